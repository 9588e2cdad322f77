"""The one rule: its noise, its distribution, and processing along a node's own path."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slipstream.errors import RequestError
from slipstream.kernels.reference.noise import NOISE_MAX, NOISE_MIN, gumbel, philox
from slipstream.speculation.accept import accept
from slipstream.speculation.choose import Row, TokenHistory, choose, process
from slipstream.speculation.sampling import SamplingParams, derive_seed
from slipstream.speculation.tree import TreeBatch
from tiny import OPS

CPU = torch.device("cpu")


def test_the_hash_gives_the_published_answers():
    """Known answers of Philox4x32-10 from its authors' Random123 distribution."""
    zero, ones = torch.tensor([0]), torch.tensor([0xFFFFFFFF])
    assert [int(w) for w in philox((zero,) * 4, (zero,) * 2)] == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert [int(w) for w in philox((ones,) * 4, (ones,) * 2)] == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]


@given(st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**31), st.integers(0, 200000))
def test_noise_is_a_function_of_its_key_within_its_bounds(seed, position, token):
    one = gumbel(torch.tensor([seed]), torch.tensor([position]), torch.tensor([token]))
    many = gumbel(torch.tensor([[seed]]), torch.tensor([[position]]), torch.arange(token, token + 7)[None])
    assert float(one) == float(many[0, 0])
    assert NOISE_MIN <= float(one) <= NOISE_MAX


@given(st.integers(0, 2**40), st.sampled_from([0.3, 1.0, 2.0]))
def test_choosing_from_candidates_is_choosing_from_all(seed, temperature):
    logits_LV = torch.randn(3, 500, generator=torch.Generator().manual_seed(seed)) * 6
    seeds, positions = torch.tensor([seed, seed + 1, -seed]), torch.tensor([1, 2, 3])
    chosen = OPS.choose(logits_LV, torch.full((3,), temperature), seeds, positions)
    noise = gumbel(seeds[:, None], positions[:, None], torch.arange(500)[None])
    assert chosen.tolist() == (logits_LV / temperature + noise).argmax(-1).tolist()


def chi_square(counts: torch.Tensor, probs: torch.Tensor) -> float:
    expected = probs * counts.sum()
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("drafted", [[], [0, 1], [2]])
def test_sampled_tokens_have_the_targets_distribution_whatever_was_drafted(drafted):
    """Draw two tokens in a row from known distributions through a tree, many times; each pair has its probability.

    With 12 outcomes (11 degrees of freedom) chi-square exceeds 31.3 once in a thousand honest runs.
    """
    first = torch.tensor([0.5, 0.3, 0.2])
    second = torch.tensor([[0.1, 0.2, 0.3, 0.4], [0.4, 0.3, 0.2, 0.1], [0.25, 0.25, 0.25, 0.25]])
    draws = 4000
    params = SamplingParams(temperature=1.0)
    counts = torch.zeros(3, 4)
    floor = torch.full((4,), -30.0)
    root_logits = torch.cat([first.log(), floor[:1]])
    tokens = [9, *drafted]
    batch = TreeBatch(torch.tensor([tokens]), torch.tensor([[-1] + [0] * len(drafted)]), torch.tensor([len(tokens)]))
    for seed in range(draws):
        rows = [Row(params, seed, 7)] + [Row(params, seed, 8)] * len(drafted)
        logits_LV = torch.stack([root_logits, *(second[token].log() for token in drafted)])
        accepted = accept(batch, choose(logits_LV, rows, OPS).tokens_L[None])
        emitted = accepted.tokens_RE[0, : int(accepted.counts_R[0])].tolist()
        if len(emitted) == 1:  # not drafted: the next pass draws the second token at its own position
            emitted.append(int(choose(second[emitted[0]].log()[None], [Row(params, seed, 8)], OPS).tokens_L))
        counts[emitted[0], emitted[1]] += 1
    assert chi_square(counts.flatten(), (first[:, None] * second).flatten()) < 31.3


def history(prompt, said=()):
    made = TokenHistory.start(prompt, 10, CPU)
    made.extend(list(said))
    return made


def test_penalties_count_the_tokens_on_a_nodes_own_path():
    logits = torch.arange(10.0)
    params = SamplingParams(frequency_penalty=0.5, presence_penalty=0.25, repetition_penalty=2.0)
    along = process(logits, Row(params, 0, 5, history([1], [2]), (3, 3)))
    committed = process(logits, Row(params, 0, 5, history([1], [2, 3, 3]), ()))
    assert torch.equal(along, committed)
    expected = logits.clone()
    expected[1] = 1 / 2
    expected[2] = 2 / 2 - 0.75
    expected[3] = 3 / 2 - 1.0 - 0.25
    assert torch.allclose(along, expected)


def test_truncation_keeps_what_it_says():
    logits = torch.tensor([0.5, 0.25, 0.15, 0.1]).log()
    kept = {
        name: (process(logits, Row(SamplingParams(temperature=1.0, **{name: value}), 0, 0)) > -math.inf).tolist()
        for name, value in (("top_k", 2), ("top_p", 0.6), ("min_p", 0.25))
    }
    assert kept["top_k"] == [True, True, False, False]
    assert kept["top_p"] == [True, True, False, False]
    assert kept["min_p"] == [True, True, True, False]


def test_end_tokens_wait_for_the_minimum_length():
    params = SamplingParams(min_tokens=3)
    logits = torch.zeros(10)
    early = process(logits, Row(params, 0, 0, history([1], [2]), (4,), (7,)))
    late = process(logits, Row(params, 0, 0, history([1], [2]), (4, 4), (7,)))
    assert early[7] == -math.inf
    assert late[7] == 0


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"top_k": -1},
        {"min_p": 2},
        {"max_tokens": 0},
        {"min_tokens": 5, "max_tokens": 4},
        {"presence_penalty": 3},
        {"frequency_penalty": -2.5},
        {"repetition_penalty": 0},
        {"logit_bias": {1: 1000.0}},
        {"seed": 2**63},
        {"stop": ("",)},
        {"logprobs": 21},
        {"n": 0},
    ],
)
def test_absurd_sampling_values_are_refused_by_name(settings):
    with pytest.raises(RequestError) as error:
        SamplingParams(**settings)
    assert next(iter(settings)) in str(error.value)


def test_samples_of_one_request_have_seeds_of_their_own():
    seeds = [derive_seed(2**63 - 1, index) for index in range(100)]
    assert seeds[0] == 2**63 - 1
    assert len(set(seeds)) == 100
    assert all(-(2**63) <= seed < 2**63 for seed in seeds)


@pytest.mark.parametrize("temperature", [1e-6, 1e-38, 5e-324])
def test_a_temperature_that_would_overflow_is_greedy(temperature):
    params = SamplingParams(temperature=temperature, top_p=0.5)
    assert params == SamplingParams(top_p=0.5)
    logits_LV = torch.tensor([[1.0, 90.0, 80.0]])
    assert choose(logits_LV, [Row(params, 3, 5)], OPS).tokens_L.tolist() == [1]


def test_a_bias_may_be_a_whole_number():
    row = Row(SamplingParams(logit_bias={5: 5}), 0, 0)
    assert process(torch.zeros(8), row).tolist() == [0, 0, 0, 0, 0, 5, 0, 0]
