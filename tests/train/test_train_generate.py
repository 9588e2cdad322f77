import numpy as np
import torch

from slipstream.train import sampling
from slipstream.train.generate import GenerationRequest, Generator, GeneratorConfig
from slipstream.train.repetition import loop_end, looping_rows
from training import EOS, ListSource, greedy


def test_batched_generation_with_refills_writes_what_plain_greedy_decoding_writes(target):
    rng = np.random.default_rng(0)
    requests = [
        GenerationRequest(key, rng.integers(3, 96, int(rng.integers(1, 30))).tolist(), int(rng.integers(1, 25)))
        for key in range(11)
    ]
    source = ListSource(requests)
    config = GeneratorConfig(rows=4, max_length=64, check_every=3, prefill_tokens=64, stop_loops=False)
    stats = Generator(target, [EOS], config).run(source)
    assert stats.texts == 11
    for request in requests:
        expected = greedy(target, request.prompt, request.max_new)
        assert source.results[request.key].tokens == expected
        assert source.results[request.key].ended == (expected[-1] == EOS)


def test_sampled_texts_follow_the_target_within_the_nucleus():
    torch.manual_seed(0)
    logits = torch.tensor([2.0, 1.5, 0.0, -1.0, -3.0])
    rows = 40_000
    tokens = sampling.sample(
        logits.expand(rows, -1), torch.full((rows,), 0.8), torch.full((rows,), 0.9), torch.rand(rows, 3)
    )
    p = (logits / 0.8).softmax(-1)
    nucleus = torch.tensor([1.0, 1.0, 1.0, 0.0, 0.0])  # .60 + .32 = .92 would do, yet .60 + .32 > .9 is needed
    kept = p * nucleus if p[:2].sum() < 0.9 else p * torch.tensor([1.0, 1.0, 0, 0, 0])
    expected = kept / kept.sum()
    frequency = torch.bincount(tokens, minlength=5) / rows
    assert (frequency - expected).abs().max() < 0.01


def test_temperature_zero_takes_the_most_likely_token():
    logits = torch.randn(6, 50)
    zero = torch.zeros(6)
    assert sampling.sample(logits, zero, zero + 0.9, torch.rand(6, 3)).equal(logits.argmax(-1))


def test_a_loop_is_cut_after_the_third_repetition_of_a_long_enough_span():
    head = list(range(100, 120))
    assert loop_end([*head, *list(range(20)) * 5]) == 20 + 60
    assert loop_end([*head, *[7, 8] * 40]) == 20 + 48  # a span of 16 made of the pair, three times
    assert loop_end([*head, *list(range(20)) * 2, 5, 6]) is None
    assert loop_end(list(range(300))) is None


def test_rows_that_repeat_themselves_are_noticed():
    written = torch.zeros(3, 400, dtype=torch.int64)
    written[0, :200] = torch.arange(200)
    written[1, :200] = torch.arange(200) % 40
    written[2, :100] = 5
    assert looping_rows(written, torch.tensor([200, 200, 100])).tolist() == [False, True, False]
