"""Every family can be trained for: packed rows give the states of serving, windows crossed, and a few steps teach."""

import pytest
import torch

from slipstream.checkpoint.reader import open_checkpoint
from slipstream.kernels.training.ops import TrainOps
from slipstream.kernels.training.seen import Seen
from slipstream.models.load import load_target
from slipstream.train.draft.packing import PackedContext
from tiny_families import CONFIGS, folder_of, some_tokens
from tiny_moe import passes
from training import assert_learns

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", CONFIGS)
def test_packed_rows_give_the_states_of_serving_and_a_few_steps_teach(name, tmp_path):
    target = load_target(open_checkpoint(folder_of(name, tmp_path / "target")), torch.float32, CPU)
    first_T, second_T = some_tokens(20), some_tokens(14, seed=4)
    ops, row = TrainOps(CPU), torch.cat([first_T, second_T])[None]
    text_BT = torch.tensor([[0] * 20 + [1] * 14])
    positions_BT = torch.cat([torch.arange(20), torch.arange(14)])[None]
    with torch.no_grad():
        packed = target.logits(target(row, PackedContext(ops, positions_BT, Seen(text_BT))).last_TD[0], ops)
    alone = torch.cat([passes(target, tokens_T, [len(tokens_T)], True)[0] for tokens_T in (first_T, second_T)])
    torch.testing.assert_close(packed, alone, atol=1e-4, rtol=0)
    assert_learns(target, tmp_path / "draft")
