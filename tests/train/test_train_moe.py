"""Training reads the same states and writes the same texts from latents and experts as serving does, and teaches."""

import numpy as np
import pytest
import torch

from slipstream.checkpoint.reader import open_checkpoint
from slipstream.kernels.training.ops import TrainOps
from slipstream.kernels.training.seen import Seen
from slipstream.models.load import load_target
from slipstream.train.data.generate import GenerationRequest, Generator
from slipstream.train.draft.packing import PackedContext
from tiny_moe import VOCAB, deepseek, minimax, passes, save
from training import EOS, ListSource, assert_learns, engine_over, greedy

CPU = torch.device("cpu")


@pytest.fixture(scope="module", params=[deepseek, minimax], ids=["DeepSeek-V3", "MiniMax-M2"])
def target(request, tmp_path_factory):
    folder = save(request.param(num_hidden_layers=3), tmp_path_factory.mktemp("target"))
    return load_target(open_checkpoint(folder), torch.float32, CPU)


def test_states_of_packed_texts_are_those_of_serving(target):
    tokens_T = torch.randint(0, VOCAB, (20,), generator=torch.Generator().manual_seed(2))
    logits, first = passes(target, tokens_T, [20], prompt=True)
    ops = TrainOps(CPU)
    row = tokens_T[None]
    ctx = PackedContext(ops, torch.arange(20)[None], Seen(torch.zeros_like(row)))
    with torch.no_grad():
        hidden = target(row, ctx, (1,))
        torch.testing.assert_close(hidden.captured[0][0], first, atol=1e-4, rtol=0)
        torch.testing.assert_close(target.logits(hidden.last_TD[0], ops), logits, atol=1e-4, rtol=0)


def test_batched_generation_writes_what_plain_greedy_decoding_writes(target):
    rng = np.random.default_rng(0)
    requests = [GenerationRequest(key, rng.integers(3, 96, 4 + key).tolist(), 6) for key in range(3)]
    source = ListSource(requests)
    Generator(engine_over(target, 2, 32), [EOS], stop_loops=False).run(source)
    for request in requests:
        assert source.results[request.key].tokens == greedy(target, request.prompt, request.max_new)


def test_a_few_steps_teach(target, tmp_path):
    assert_learns(target, tmp_path)
