"""The one rule: its noise, and what a request may ask of it."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slipstream.errors import RequestError
from slipstream.kernels import SampleRows, SamplingState
from slipstream.kernels.reference.noise import NOISE_MAX, NOISE_MIN, gumbel, philox
from slipstream.speculation.sampling import SamplingParams, derive_seed
from tiny import OPS


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
    state = SamplingState(3, 500, logits_LV.device)
    for slot, own in enumerate(seeds.tolist()):
        state.load(slot, SamplingParams(temperature=temperature), own, (), (), ())
    rows = SampleRows(torch.arange(3), positions, torch.zeros(3, 0, dtype=torch.int64))
    chosen = OPS.sample(logits_LV, rows, state).tokens_L
    noise = gumbel(seeds[:, None], positions[:, None], torch.arange(500)[None])
    assert chosen.tolist() == (logits_LV / temperature + noise).argmax(-1).tolist()


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
    assert SamplingParams(temperature=temperature, top_p=0.5) == SamplingParams(top_p=0.5)
