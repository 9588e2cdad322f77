"""Keys of accepted nodes are moved as if all were read before any is written, row by row."""

import pytest
import torch

from interpreted import DEVICE
from slipstream.kernels import KvLayer
from slipstream.kernels.reference.ops import ReferenceOps
from slipstream.kernels.triton.copies import _as_one
from slipstream.kernels.triton.ops import TritonOps
from slipstream.models.context import KvCache, KvShape


def layers_of(latent, together):
    """Return three layers, in one allocation or in three."""
    keys = torch.randn(3, 60, 1 if latent else 3, 50, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    values = None if latent else keys.flip(1).contiguous()
    apart = [keys[n].clone() for n in range(3)], None if latent else [values[n].clone() for n in range(3)]
    keys, values = (keys, values) if together else apart
    return [KvLayer(k, k[..., :40] if latent else values[n]) for n, k in enumerate(keys)]


@pytest.mark.parametrize("latent", [False, True])
@pytest.mark.parametrize("together", [False, True])
def test_slots_move_in_every_layer_as_the_reference_moves_them(latent, together):
    moved, expected, before = (layers_of(latent, together) for _ in range(3))
    from_RD = torch.tensor([[11, 13, 12], [22, 21, 24], [31, 32, 33]], device=DEVICE)
    to_RN = torch.tensor([[9, 11, 12, 13], [9, 21, 22, 23], [9, 31, 32, 33]], device=DEVICE)
    TritonOps(DEVICE).move_paths(moved, from_RD, to_RN[:, 1:])
    for layer in expected:
        ReferenceOps(DEVICE).move_kv(layer, from_RD.flatten(), to_RN[:, 1:].flatten())
    for one, other, start in zip(moved, expected, before, strict=True):
        assert torch.equal(one.keys_SGd, other.keys_SGd)
        assert torch.equal(one.values_SGd, other.values_SGd)
        assert not torch.equal(one.keys_SGd, start.keys_SGd)


@pytest.mark.parametrize("shape", [KvShape(((2, 16),) * 3), KvShape(((1, 16),) * 3, 12)])
def test_layers_of_a_cache_are_reached_by_one_launch(shape):
    layers = KvCache.allocate(shape, 4, 4, torch.float32, DEVICE).layers
    for part in ("keys_SGd", "values_SGd"):
        whole = _as_one([getattr(layer, part) for layer in layers])
        assert whole is not None
        for number, layer in enumerate(layers):
            getattr(layer, part).fill_(number + 1)
            assert torch.equal(whole[number], getattr(layer, part))
