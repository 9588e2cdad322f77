"""Every family on the Triton kernels, interpreted: the reference's logits, and the same bits in chunks. Minutes."""

import pytest
import torch

from interpreted import DEVICE
from slipstream.checkpoint.reader import open_checkpoint
from slipstream.kernels.triton.ops import TritonOps
from slipstream.models.load import load_target
from tiny_families import CONFIGS, folder_of, some_tokens
from tiny_moe import passes


@pytest.mark.long
@pytest.mark.parametrize("name", CONFIGS)
def test_a_family_has_the_references_logits_and_the_same_bits_in_chunks(name, tmp_path):
    ops = TritonOps(DEVICE)
    target = load_target(open_checkpoint(folder_of(name, tmp_path)), torch.float32, torch.device("cpu"), ops=ops)
    tokens_T = some_tokens(20)
    whole, _ = passes(target, tokens_T, [20], True, ops)
    torch.testing.assert_close(whole, passes(target, tokens_T, [20], True)[0], atol=1e-4, rtol=0)
    assert torch.equal(passes(target, tokens_T, [9, 1, 10], True, ops)[0], whole)
