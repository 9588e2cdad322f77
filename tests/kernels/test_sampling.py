"""The sampler's reference against its definition, spelled out over Python's own whole and rational numbers."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling_samples import Case, Settings, assert_same, logits_of, masks_of, mixed, rows_of, state_of

from slipstream.kernels.reference.noise import gumbel
from slipstream.kernels.reference.ops import ReferenceOps
from slipstream.kernels.reference.sampling import EXP2_MINUS, LOG2_E, weights
from slipstream.speculation.sampling import SamplingParams

CPU = torch.device("cpu")
OPS = ReferenceOps(CPU)
F = np.float32


def naive_weight(logit: float, highest: float, temperature: float) -> int:
    with np.errstate(over="ignore"):
        distance = F(0) if logit == highest else F(highest) - F(logit)
        y = min(F(distance / F(temperature)) * F(LOG2_E), F(63))
    whole = math.floor(y)
    fraction, power = F(y - F(whole)), F(EXP2_MINUS[0])
    for coefficient in EXP2_MINUS[1:]:
        power = F(F(power * fraction) + F(coefficient))
    return int(power * F(2**31)) >> whole


def naive_logits(logits: list[float], case: Case) -> list[float]:
    """Return processed logits, by the words of the definition."""
    asked = case.settings
    out = [F(-math.inf) if math.isnan(x) else F(x) for x in logits]
    said = [*asked.output, *case.path]
    if (asked.repetition_penalty, asked.frequency_penalty, asked.presence_penalty) != (1, 0, 0):
        for token in {*asked.prompt, *said}:
            repetition = F(asked.repetition_penalty)
            out[token] = out[token] / repetition if out[token] > 0 else out[token] * repetition
            out[token] = out[token] - F(asked.frequency_penalty) * F(said.count(token))
            out[token] = out[token] - F(asked.presence_penalty) * F(token in said)
    for token, bias in asked.logit_bias.items():
        out[token] = out[token] + F(bias)
    left = set(range(len(out))) if case.allowed is None else set(case.allowed)
    if case.position - len(asked.prompt) < asked.min_tokens:
        longer = left - set(asked.end_tokens)
        left = longer if longer or case.allowed is None else left
    return [float(x) if token in left else -math.inf for token, x in enumerate(out)]


def naive_kept(logits: list[float], case: Case) -> list[int]:
    """Return the tokens truncation keeps, best first."""
    asked = case.settings
    order = sorted(
        (token for token, x in enumerate(logits) if x > -math.inf), key=lambda token: (-logits[token], token)
    )
    if asked.temperature == 0:
        return order
    first = order[: asked.top_k or None]
    weight = {token: naive_weight(logits[token], logits[first[0]], asked.temperature) for token in first}
    total, before, kept = sum(weight.values()), 0, []
    for token in first:
        nucleus = asked.top_p == 1 or not kept or before < asked.top_p * total
        if nucleus and weight[token] >= asked.min_p * 2**31:
            kept.append(token)
        before += weight[token]
    return kept


def naive_token(logits: list[float], case: Case) -> int:
    asked = case.settings
    kept = naive_kept(logits, case)
    if not kept or asked.temperature == 0:
        return kept[0] if kept else -1
    place = torch.tensor([asked.seed]), torch.tensor([case.position])
    noise = gumbel(*place, torch.tensor(sorted(kept)))
    scores = torch.tensor([logits[token] for token in sorted(kept)]) / torch.tensor(asked.temperature) + noise
    return sorted(kept)[int(scores.argmax())]


probabilities = st.sampled_from([0.001, 0.1, 0.5, 0.9, 0.95, 0.999999, 1.0])
settings_of = st.builds(
    Settings,
    temperature=st.sampled_from([0.0, 0.01, 0.7, 1.0, 5.0]),
    top_k=st.sampled_from([0, 1, 3, 20, 1000]),
    top_p=probabilities,
    min_p=st.sampled_from([0.0, 1e-9, 0.05, 0.5, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 0.5, 1.7]),
    frequency_penalty=st.sampled_from([0.0, 0.3, -2.0]),
    presence_penalty=st.sampled_from([0.0, 1.1]),
    logit_bias=st.dictionaries(st.integers(0, 39), st.floats(-100, 100, width=32), max_size=4),
    min_tokens=st.integers(0, 9),
    seed=st.integers(-(2**63), 2**63 - 1),
    prompt=st.lists(st.integers(0, 39), min_size=1, max_size=4).map(tuple),
    output=st.lists(st.integers(0, 39), max_size=4).map(tuple),
    end_tokens=st.lists(st.integers(0, 50), max_size=3).map(tuple),
)
tokens = st.lists(st.integers(0, 39), max_size=5, unique=True).map(tuple)
values = st.one_of(
    st.integers(-3, 3).map(float), st.floats(-40, 40, width=32), st.sampled_from([math.nan, -math.inf, -0.0])
)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(values, min_size=40, max_size=40),
    settings_of,
    st.lists(st.integers(0, 39), max_size=3),
    st.none() | tokens,
)
def test_a_token_is_what_the_definition_says(logits, asked, path, allowed):
    case = Case(asked, len(asked.prompt) + len(asked.output) + len(path), tuple(path), allowed)
    got = OPS.sample(torch.tensor([logits]), rows_of([case], CPU), state_of([case], 40, CPU), masks_of([case], 40, CPU))
    assert got.tokens_L.tolist() == [naive_token(naive_logits(logits, case), case)]


@given(st.floats(-88, 0, width=32), st.sampled_from([0.2, 1.0, 3.0]))
def test_a_weight_is_the_exponential_to_23_bits(logit, temperature):
    [[weight]] = weights(torch.tensor([[logit]]), torch.zeros(1, 1), torch.tensor([[temperature]])).tolist()
    assert weight == naive_weight(logit, 0.0, temperature)
    assert math.isclose(weight, 2**31 * math.exp(logit / temperature), rel_tol=1e-5, abs_tol=1)


@pytest.mark.parametrize("kind", ["flat", "peaked", "ties"])
def test_log_probabilities_are_those_of_the_logits_as_they_came(kind, generator):
    asked = Settings(logprobs=7, temperature=0.5, top_k=2, logit_bias={3: 5.0})
    logits = logits_of(kind, 1, 301, generator)
    got = OPS.sample(logits, rows_of([Case(asked)], CPU), state_of([Case(asked)], 301, CPU), None)
    expected = torch.log_softmax(logits[0].double(), -1)
    order = sorted(range(301), key=lambda token: (-float(logits[0, token]), token))
    assert got.top_ids_LK[0].tolist() == [*order[:7], *([-1] * 13)]
    assert got.top_logprobs_LK[0, :7].tolist() == pytest.approx(expected[order[:7]].tolist(), abs=2e-6)
    assert float(got.logprob_L[0]) == pytest.approx(float(expected[got.tokens_L[0]]), abs=2e-6)


def test_a_row_is_the_same_alone_and_among_others(generator):
    cases = mixed(300)
    logits = logits_of("ties", len(cases), 300, generator).bfloat16()
    together = OPS.sample(logits, rows_of(cases, CPU), state_of(cases, 300, CPU), masks_of(cases, 300, CPU))
    for row, case in enumerate(cases):
        alone = OPS.sample(
            logits[row : row + 1], rows_of([case], CPU), state_of([case], 300, CPU), masks_of([case], 300, CPU)
        )
        one = dataclasses.replace(together, **{name: part[row : row + 1] for name, part in vars(together).items()})
        assert_same(alone, one, [case])


def test_a_mask_shorter_than_the_vocabulary_rules_out_the_rest():
    case = Case(Settings(), allowed=(31, 33))
    masks = masks_of([case], 34, CPU)
    short = dataclasses.replace(masks, words_MW=masks.words_MW[:, :1].contiguous())
    got = OPS.sample(torch.arange(34.0)[None], rows_of([case], CPU), state_of([case], 34, CPU), short)
    assert got.tokens_L.tolist() == [31]


def test_emitted_tokens_are_counted_where_penalties_look_back():
    looks_back, other = Settings(presence_penalty=1.0, prompt=(4, 5), output=(5, 6)), Settings(prompt=(4,))
    state = state_of([Case(looks_back), Case(other)], 10, CPU)
    before = state.said_SV.clone()
    tokens = torch.tensor([[7, 7, 5, 9], [1, 2, 3, 4]])
    OPS.count(state, torch.tensor([1, 0]), tokens, torch.tensor([3, 4]))
    assert before[1].tolist() == [0, 0, 0, 0, 1, 3, 2, 0, 0, 0]
    assert state.said_SV[1].tolist() == [0, 0, 0, 0, 1, 5, 2, 4, 0, 0]
    assert torch.equal(state.said_SV[0], before[0])


def test_a_requests_own_settings_can_be_loaded_and_a_cleared_slot_is_greedy():
    state = state_of([Case(Settings())], 50, CPU)
    state.load(0, SamplingParams(temperature=1.0, min_p=0.5, logit_bias={2: 1.0}), 4, (1,), (), ())
    state.clear(0)
    logits = torch.zeros(1, 50)
    logits[0, 30] = 0.1
    assert OPS.sample(logits, rows_of([Case(Settings())], CPU), state, None).tokens_L.tolist() == [30]
