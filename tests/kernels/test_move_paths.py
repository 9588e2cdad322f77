"""Keys of accepted nodes are moved as if all were read before any is written, row by row."""

import pytest
import torch

from interpreted import DEVICE
from slipstream.kernels import KvLayer
from slipstream.kernels.reference.ops import ReferenceOps
from slipstream.kernels.triton.ops import TritonOps


@pytest.mark.parametrize("latent", [False, True])
def test_slots_move_as_the_reference_moves_them(latent):
    keys = torch.randn(60, 1 if latent else 3, 50, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    values = keys[..., :40] if latent else keys.flip(0).contiguous()
    moved, expected = (KvLayer(k := keys.clone(), k[..., :40] if latent else values.clone()) for _ in range(2))
    from_RD = torch.tensor([[11, 13, 12], [22, 21, 24], [31, 32, 33]], device=DEVICE)
    to_RN = torch.tensor([[9, 11, 12, 13], [9, 21, 22, 23], [9, 31, 32, 33]], device=DEVICE)
    TritonOps(DEVICE).move_paths(moved, from_RD, to_RN[:, 1:])
    ReferenceOps(DEVICE).move_kv(expected, from_RD.flatten(), to_RN[:, 1:].flatten())
    assert torch.equal(moved.keys_SGd, expected.keys_SGd)
    assert torch.equal(moved.values_SGd, expected.values_SGd)
    assert not torch.equal(moved.keys_SGd, keys)
