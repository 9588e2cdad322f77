"""Every family gives transformers' logits, over texts longer than every window; the CPU kernels keep their bits."""

import pytest
import torch

from slipstream.checkpoint.reader import open_checkpoint
from slipstream.kernels import select
from slipstream.models.load import load_target
from tiny_families import CONFIGS, some_tokens, tiny
from tiny_moe import passes, save

CPU = torch.device("cpu")
T = 40


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_are_those_of_transformers_and_do_not_depend_on_chunks(name, tmp_path):
    theirs = tiny(name)
    ours = load_target(open_checkpoint(save(theirs, tmp_path)), torch.float32, CPU)
    tokens_T = some_tokens(T)
    with torch.inference_mode():
        seen = theirs(tokens_T[None], output_hidden_states=True)
    expected_TV = seen.logits[0]
    assert expected_TV.std() > 0.1, "logits that say nothing prove nothing"
    logits_TV, first_TD = passes(ours, tokens_T, [T], prompt=True)
    torch.testing.assert_close(logits_TV, expected_TV, atol=1e-4, rtol=0)
    torch.testing.assert_close(first_TD, seen.hidden_states[1][0], atol=1e-4, rtol=0)
    whole, _ = passes(ours, tokens_T, [T], True, "auto")
    chunked, _ = passes(ours, tokens_T, [7, 20, 1, 12], True, "auto")
    torch.testing.assert_close(whole, expected_TV, atol=1e-4, rtol=0)
    if select(CPU).row_invariant:
        assert torch.equal(whole, chunked)
