"""How each request's tokens are sampled: the settings as tensors by slot, and the values of `Ops.sample`.

The token of a row of logits is found in this order; all of it is float32 unless said:

1. Logits that are not numbers count as -inf.
2. Penalties count a token's occurrences in the answer and on the row's own drafted path. A token that has occurred
   there or in the prompt is divided by the repetition penalty if positive, else multiplied by it; then
   `frequency * count` and `presence * (count > 0)` are subtracted, in this order.
3. The bias is added.
4. The grammar's mask and, before the minimum length, the end tokens are ruled out (-inf). Where the mask leaves end
   tokens alone, the minimum length gives way. If all is ruled out, the row has no token: -1.
5. With a temperature, tokens are ordered by logit, highest first, equal ones by id. Top-k keeps the first k. Top-p
   keeps those with `sum of weights before it < top_p * (sum of weights within top-k)`, and always the first. Min-p
   keeps those with `weight >= min_p * (weight of the first)`.
6. The token is argmax(logit / T + noise), equal ones by id; without a temperature argmax(logit).

A weight is a whole number, 2^31 * exp((logit - highest) / T) to about 23 bits, made of operations that IEEE 754 rounds
alike everywhere (`slipstream.kernels.reference.sampling.weights`). So sums have no order, and torch, Triton and C++
agree on every token. The products in top-p and min-p are float64.

Log probabilities are of the logits as they came, at temperature 1: `logit - (highest + log(W / 2^31))`, W the sum of
the weights, in float64, rounded to float32 once. The best tokens are in the order of 5.

Shape letters: S slots, V vocabulary, W words of 32 tokens, C columns of a record, L rows of logits, D drafted tokens on
a row's path, M masks, K best tokens.
"""

import enum
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

MAX_TOP = 20
"""So many of the best tokens can be had with their log probabilities."""


class Uses(enum.IntFlag):
    """What of the sampler a slot uses."""

    PENALTIES = 1
    BIAS = 2
    TOP_K = 4
    TOP_P = 8
    MIN_P = 16
    TRUNCATION = 28


class Column(enum.IntEnum):
    """What a slot's record holds, 64 bits each; from TEMPERATURE on they are float64."""

    SEED = 0
    USES = 1
    TOP_K = 2
    MIN_UNTIL = 3
    NUM_TOP = 4
    TEMPERATURE = 5
    TOP_P = 6
    MIN_P = 7
    REPETITION = 8
    FREQUENCY = 9
    PRESENCE = 10
    UNUSED = 11


_RECORD = struct.Struct("=5q7d")


class SamplingSettings(Protocol):
    """What `SamplingState.load` reads of a request's settings; `slipstream.speculation.SamplingParams` has it all."""

    @property
    def temperature(self) -> float:
        """0 takes the best token."""
        ...

    @property
    def top_k(self) -> int:
        """0 keeps the whole vocabulary."""
        ...

    @property
    def top_p(self) -> float:
        """1 keeps the whole vocabulary."""
        ...

    @property
    def min_p(self) -> float:
        """0 keeps the whole vocabulary."""
        ...

    @property
    def repetition_penalty(self) -> float:
        """1 changes nothing."""
        ...

    @property
    def frequency_penalty(self) -> float:
        """0 changes nothing."""
        ...

    @property
    def presence_penalty(self) -> float:
        """0 changes nothing."""
        ...

    @property
    def logit_bias(self) -> Mapping[int, float]:
        """What is added, by token."""
        ...

    @property
    def min_tokens(self) -> int:
        """So many tokens come before an end token may."""
        ...

    @property
    def logprobs(self) -> int | None:
        """How many of the best tokens are wanted beside the token's own log probability; None: not even that."""
        ...


class SamplingState:
    """The settings of S requests on one device, each in its slot; the tensors are written to, never replaced.

    Loading is a handful of small copies, ordered with the stream's launches and never waited for.

    Args:
        records_SC: int64, what `Column` says.
        said_SV: int32, 2 * (times a token was emitted) + (it is in the prompt); kept for slots with penalties only.
        bias_SV: float32, for slots with a bias only.
        ends_SW: int32, one bit a token; for slots with a minimum length only.
        scored_slots: those that want log probabilities, as the host knows it.
    """

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        self.vocab_size = vocab_size
        self.device = device
        idle = torch.frombuffer(bytearray(_RECORD.pack(0, 0, 0, 0, -1, 0, 1, 0, 1, 0, 0, 0)), dtype=torch.int64)
        self._idle_C = idle.to(device)
        self.scored_slots: set[int] = set()
        self.records_SC = self._idle_C.repeat(num_slots, 1)
        self.said_SV = torch.zeros(num_slots, vocab_size, dtype=torch.int32, device=device)
        self.bias_SV = torch.zeros(num_slots, vocab_size, dtype=torch.float32, device=device)
        self.ends_SW = torch.zeros(num_slots, num_words(vocab_size), dtype=torch.int32, device=device)

    def column(self, column: Column) -> Tensor:
        """Return one value of every slot: a view, int64 or float64."""
        records = self.records_SC if column < Column.TEMPERATURE else self.records_SC.view(torch.float64)
        return records[:, column]

    def clear(self, slot: int) -> None:
        """Let a slot be nobody's: a row of it is the plain argmax."""
        self.records_SC[slot].copy_(self._idle_C)
        self.scored_slots.discard(slot)

    def load(
        self,
        slot: int,
        settings: SamplingSettings,
        seed: int,
        prompt: Sequence[int],
        output: Sequence[int],
        end_tokens: Sequence[int],
    ) -> None:
        """Give a slot to a request, which may have begun its answer. Tokens of bias and text lie in the vocabulary."""
        penalises = (settings.repetition_penalty, settings.frequency_penalty, settings.presence_penalty) != (1, 0, 0)
        uses = Uses(0)
        if penalises:
            uses |= Uses.PENALTIES
            self._load_said(slot, prompt, output)
        if settings.logit_bias:
            uses |= Uses.BIAS
            self._load_bias(slot, settings.logit_bias)
        if settings.temperature > 0:  # without it, truncation cannot change the best token
            uses |= Uses.TOP_K if 0 < settings.top_k < self.vocab_size else Uses(0)
            uses |= Uses.TOP_P if settings.top_p < 1 else Uses(0)
            uses |= Uses.MIN_P if settings.min_p > 0 else Uses(0)
        waits = settings.min_tokens > len(output) and bool(end_tokens)
        if waits:
            self._load_ends(slot, end_tokens)
        (self.scored_slots.discard if settings.logprobs is None else self.scored_slots.add)(slot)
        record = _RECORD.pack(
            seed,
            uses,
            settings.top_k,
            len(prompt) + settings.min_tokens if waits else 0,
            -1 if settings.logprobs is None else settings.logprobs,
            settings.temperature,
            settings.top_p,
            settings.min_p,
            settings.repetition_penalty,
            settings.frequency_penalty,
            settings.presence_penalty,
            0.0,
        )
        staged = self._staged(torch.frombuffer(bytearray(record), dtype=torch.int64))
        self.records_SC[slot].copy_(staged, non_blocking=True)

    def _load_said(self, slot: int, prompt: Sequence[int], output: Sequence[int]) -> None:
        said_V = self.said_SV[slot].zero_()
        said_V.index_fill_(0, self._sent(torch.tensor(prompt, dtype=torch.int64)), 1)
        output_N = self._sent(torch.tensor(output, dtype=torch.int64))
        said_V.index_add_(0, output_N, torch.ones_like(output_N, dtype=torch.int32), alpha=2)

    def _load_bias(self, slot: int, bias: Mapping[int, float]) -> None:
        tokens_N = self._sent(torch.tensor(list(bias), dtype=torch.int64))
        values_N = self._sent(torch.tensor(list(bias.values()), dtype=torch.float32))
        self.bias_SV[slot].zero_().index_copy_(0, tokens_N, values_N)

    def _load_ends(self, slot: int, end_tokens: Sequence[int]) -> None:
        words: dict[int, int] = {}
        for token in end_tokens:
            if 0 <= token < self.vocab_size:  # others are never chosen
                words[token // 32] = words.get(token // 32, 0) | 1 << token % 32
        at_N = self._sent(torch.tensor(list(words), dtype=torch.int64))
        bits = [word - 2**32 if word >= 2**31 else word for word in words.values()]
        self.ends_SW[slot].zero_().index_copy_(0, at_N, self._sent(torch.tensor(bits, dtype=torch.int32)))

    def _staged(self, values: Tensor) -> Tensor:
        """Return values where the device can fetch them by itself; torch keeps that memory until it has."""
        return values.pin_memory() if self.device.type == "cuda" else values

    def _sent(self, values: Tensor) -> Tensor:
        return self._staged(values).to(self.device, non_blocking=True)


@dataclass(frozen=True)
class SampleRows:
    """Whose the rows of logits are, and where; int64, contiguous.

    Args:
        position_L: the absolute position of the token being chosen.
        path_LD: the drafted tokens on the way to each row, the root's own excluded, in any order; -1 where there is
            none. They count for penalties. D may be 0.
    """

    slot_L: Tensor
    position_L: Tensor
    path_LD: Tensor


@dataclass(frozen=True)
class TokenMasks:
    """Which tokens grammars leave, one bit each, the lowest first; those past the last word are ruled out.

    Args:
        words_MW: int32, as llguidance writes them; contiguous.
        row_L: int64, each row's mask; -1 for none.
    """

    words_MW: Tensor
    row_L: Tensor


@dataclass(frozen=True)
class Sampled:
    """What `Ops.sample` found. Beside the tokens, what a row's slot did not ask for means nothing.

    Args:
        tokens_L: int64; -1 where masks leave no token, or no logit is a number.
        logprob_L: float32, of the token.
        top_ids_LK: int64 [L, 20], best first; -1 past as many as were asked for, and past the tokens above -inf.
        top_logprobs_LK: float32 [L, 20]; -inf there.
    """

    tokens_L: Tensor
    logprob_L: Tensor
    top_ids_LK: Tensor
    top_logprobs_LK: Tensor


def num_words(vocab_size: int) -> int:
    """Return how many words of 32 bits hold one bit a token."""
    return -(-vocab_size // 32)
