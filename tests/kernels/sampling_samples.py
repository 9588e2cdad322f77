"""Rows of logits and settings that meet every branch of the sampler, and what makes a state of them."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from slipstream.kernels import Sampled, SampleRows, SamplingState, TokenMasks
from slipstream.kernels.sampling import num_words


@dataclass(frozen=True)
class Settings:
    """What a request asks for, with what it has said."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    min_tokens: int = 0
    logprobs: int | None = None
    seed: int = 3
    prompt: tuple[int, ...] = (1, 2)
    output: tuple[int, ...] = ()
    end_tokens: tuple[int, ...] = ()


@dataclass(frozen=True)
class Case:
    """One row: its settings, its place, and the tokens its grammar leaves, if it has one."""

    settings: Settings
    position: int = 7
    path: tuple[int, ...] = ()
    allowed: tuple[int, ...] | None = None


PENALTIES = Settings(
    repetition_penalty=1.3, frequency_penalty=0.3, presence_penalty=-0.4, prompt=(5, 6, 7, 7), output=(6, 8, 8)
)
LONGER = Settings(min_tokens=9, end_tokens=(0, 33, 40))


def mixed(vocab: int) -> list[Case]:
    """Return rows of every kind; the first tokens of a vocabulary are what they are about."""
    warm = Settings(temperature=0.8)
    bias = {1: 3.0, 4: -2.5, vocab - 1: 1.5}
    everything = dataclasses.replace(
        PENALTIES, temperature=1.2, top_k=30, top_p=0.8, min_p=0.01, logit_bias=bias, min_tokens=4,
        end_tokens=(3, 35), logprobs=20,
    )  # fmt: skip
    return [
        Case(Settings()),
        Case(warm, position=2**33 + 5),
        *(Case(dataclasses.replace(warm, top_k=k, seed=k)) for k in (1, 5, 40, vocab - 1, vocab + 3)),
        *(Case(dataclasses.replace(warm, top_p=p, seed=2**40 + 9)) for p in (0.02, 0.5, 0.95, 0.999999)),
        *(Case(dataclasses.replace(warm, min_p=p, seed=-5)) for p in (1e-9, 0.1, 1.0)),
        Case(dataclasses.replace(warm, top_k=50, top_p=0.9, min_p=0.02)),
        Case(Settings(top_k=4, top_p=0.3)),
        Case(PENALTIES, path=(6, 9, 9)),
        Case(dataclasses.replace(PENALTIES, temperature=0.6, top_p=0.9), path=(7,)),
        Case(Settings(logit_bias=bias)),
        Case(dataclasses.replace(LONGER, logit_bias={33: 50.0}), position=8),
        Case(dataclasses.replace(LONGER, logit_bias={33: 50.0}), position=11),
        Case(Settings(), allowed=(2, 31, 32, vocab - 1)),
        Case(dataclasses.replace(warm, top_k=3), allowed=(8,)),
        Case(dataclasses.replace(LONGER, temperature=1.0), position=8, allowed=(0, 33)),
        Case(dataclasses.replace(LONGER, temperature=1.0), position=8, allowed=(0, 33, 41)),
        Case(Settings(logprobs=5), allowed=()),
        Case(Settings(logprobs=0)),
        Case(dataclasses.replace(warm, logprobs=3, top_p=0.9)),
        Case(everything, position=4, path=(5, 5), allowed=tuple(range(1, vocab, 3))),
    ]


def state_of(cases: list[Case], vocab: int, device: torch.device, spare: int = 2) -> SamplingState:
    """Return a state whose slots, in reverse, are the cases'; each slot had a tenant before."""
    state = SamplingState(len(cases) + spare, vocab, device)
    tenant = dataclasses.replace(PENALTIES, logit_bias={0: 9.0, 3: -9.0}, min_tokens=50, end_tokens=(1, 2, 34), top_k=2)
    for slot in range(len(cases)):
        state.load(slot, tenant, 5, (1, 2, 3), (0, 3), tenant.end_tokens)
    for slot, case in zip(reversed(range(len(cases))), cases, strict=True):
        settings = case.settings
        state.load(slot, settings, settings.seed, settings.prompt, settings.output, settings.end_tokens)
    return state


def rows_of(cases: list[Case], device: torch.device) -> SampleRows:
    """Return where the cases' rows are."""
    depth = max(len(case.path) for case in cases)
    paths = [[*case.path, *([-1] * (depth - len(case.path)))] for case in cases]
    return SampleRows(
        torch.arange(len(cases) - 1, -1, -1, device=device),
        torch.tensor([case.position for case in cases], device=device),
        torch.tensor(paths, device=device, dtype=torch.int64).view(len(cases), depth),
    )


def masks_of(cases: list[Case], vocab: int, device: torch.device) -> TokenMasks:
    """Return the cases' grammars as packed words."""
    grammars = [case.allowed for case in cases if case.allowed is not None]
    bits = torch.zeros(len(grammars), 32 * num_words(vocab), dtype=torch.int64)
    for row, allowed in enumerate(grammars):
        bits[row, list(allowed)] = 1
    words = (bits.view(len(grammars), num_words(vocab), 32) << torch.arange(32)).sum(-1)
    rows, found = [], 0
    for case in cases:
        rows.append(-1 if case.allowed is None else found)
        found += case.allowed is not None
    signed = torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
    return TokenMasks(signed.to(device), torch.tensor(rows, device=device))


def logits_of(kind: str, num_rows: int, vocab: int, generator: torch.Generator) -> torch.Tensor:
    """Return float32 logits: flat, peaked, or with few values so that most are equal; some with odd numbers."""
    logits = torch.randn(num_rows, vocab, generator=generator)
    if kind == "peaked":
        return logits * 6
    if kind == "ties":
        return (logits * 2).round()
    if kind == "odd":
        logits[:, ::7] = -torch.inf
        logits[:, 1::7] = torch.nan
        logits[::2, 2::7] = -0.0
        logits[::2, 3::7] = 0.0
        logits[1] = torch.nan
        logits[2] = -torch.inf
    return logits


def assert_same(got: Sampled, expected: Sampled, cases: list[Case]) -> None:
    """Compare tokens, and to the bit what was asked for beside them."""
    assert got.tokens_L.tolist() == expected.tokens_L.tolist()
    for row, case in enumerate(cases):
        if case.settings.logprobs is not None:
            assert float(got.logprob_L[row]) == float(expected.logprob_L[row]), row
            assert got.top_ids_LK[row].tolist() == expected.top_ids_LK[row].tolist(), row
            assert got.top_logprobs_LK[row].tolist() == expected.top_logprobs_LK[row].tolist(), row
