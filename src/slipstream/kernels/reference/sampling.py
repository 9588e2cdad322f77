"""The sampler in torch: what `slipstream.kernels.sampling` defines, step by step.

Shape letters: L rows of logits, V vocabulary, D drafted tokens on a row's path, W words of a mask, K best tokens.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.kernels.reference.noise import NOISE_MAX, NOISE_MIN, gumbel
from slipstream.kernels.sampling import MAX_TOP, Column, Sampled, SampleRows, SamplingState, TokenMasks, Uses

WEIGHT_ONE = 2**31
"""The weight of the best token."""
LOG2_E = 1.4426950216293335
"""log2(e) as a float32."""
EXP2_MINUS = (
    -0.0009449036442674696,
    0.00920579768717289,
    -0.0552973598241806,
    0.2401801496744156,
    -0.6931437253952026,
    1,
)
"""2^-f for f in [0, 1) within 2.5e-7 of its size, highest power first; each is a float32, and at 0 it is 1."""


@dataclass(frozen=True)
class Truncation:
    """What truncates rows that have a temperature: int64 `top_k` (0 keeps all), the others float64."""

    temperature_L: Tensor
    top_k_L: Tensor
    top_p_L: Tensor
    min_p_L: Tensor


def sample(logits_LV: Tensor, rows: SampleRows, state: SamplingState, masks: TokenMasks | None) -> Sampled:
    """Return each row's token, and log probabilities where the row's slot wants them."""
    raw_LV = numbers(logits_LV)
    logits_LV = processed(raw_LV, rows, state, masks)
    temperature_L = state.column(Column.TEMPERATURE)[rows.slot_L].float()
    seed_L = state.column(Column.SEED)[rows.slot_L]
    uses_L = state.column(Column.USES)[rows.slot_L]
    tokens_L = logits_LV.argmax(-1)
    nothing_L = logits_LV.amax(-1) == -torch.inf
    cut_L = (uses_L & int(Uses.TRUNCATION)) != 0
    if bool(cut_L.any()):
        columns = (Column.TEMPERATURE, Column.TOP_K, Column.TOP_P, Column.MIN_P)
        cut = Truncation(*(state.column(column)[rows.slot_L[cut_L]] for column in columns))
        kept_KV = kept(logits_LV[cut_L], cut)
        logits_LV = logits_LV.clone()
        logits_LV[cut_L] = logits_LV[cut_L].masked_fill(~kept_KV, -torch.inf)
    warm_L = temperature_L > 0
    if bool(warm_L.any()):
        tokens_L[warm_L] = drawn(logits_LV[warm_L], temperature_L[warm_L], seed_L[warm_L], rows.position_L[warm_L])
    tokens_L.masked_fill_(nothing_L, -1)
    return _with_logprobs(tokens_L, raw_LV, state.column(Column.NUM_TOP)[rows.slot_L])


def count(state: SamplingState, slot_R: Tensor, tokens_RN: Tensor, counts_R: Tensor) -> None:
    """Add the first `counts` tokens of each row to what its slot has said, where that is kept; -1 is no token."""
    place_N = torch.arange(tokens_RN.shape[1], device=tokens_RN.device)
    penalises_R = (state.column(Column.USES)[slot_R] & int(Uses.PENALTIES)) != 0
    real_RN = (place_N < counts_R[:, None]) & penalises_R[:, None] & (tokens_RN >= 0)
    cell_RN = slot_R[:, None] * state.vocab_size + tokens_RN.clamp(min=0)
    state.said_SV.view(-1).index_add_(0, cell_RN.flatten(), 2 * real_RN.flatten().int())


def numbers(logits_LV: Tensor) -> Tensor:
    """Return logits in float32, -inf in the place of what is no number."""
    logits_LV = logits_LV.float()
    return logits_LV.masked_fill(logits_LV.isnan(), -torch.inf)


def processed(logits_LV: Tensor, rows: SampleRows, state: SamplingState, masks: TokenMasks | None) -> Tensor:
    """Apply penalties, bias, masks and minimum lengths to the rows that have any."""
    uses_L = state.column(Column.USES)[rows.slot_L]
    waits_L = rows.position_L < state.column(Column.MIN_UNTIL)[rows.slot_L]
    masked_L = torch.zeros_like(waits_L) if masks is None else masks.row_L >= 0
    changed_L = ((uses_L & int(Uses.PENALTIES | Uses.BIAS)) != 0) | waits_L | masked_L
    if not bool(changed_L.any()):
        return logits_LV
    logits_LV = logits_LV.clone()
    for row in changed_L.nonzero().flatten().tolist():
        slot, logits_V = int(rows.slot_L[row]), logits_LV[row]
        if int(uses_L[row]) & Uses.PENALTIES:
            logits_V = _penalised(logits_V, state, slot, rows.path_LD[row])
        if int(uses_L[row]) & Uses.BIAS:
            logits_V = logits_V + state.bias_SV[slot]
        words_W = masks.words_MW[masks.row_L[row]] if masks is not None and bool(masked_L[row]) else None
        ends_W = state.ends_SW[slot] if bool(waits_L[row]) else None
        if words_W is not None or ends_W is not None:
            logits_V = logits_V.masked_fill(~_left(len(logits_V), words_W, ends_W), -torch.inf)
        logits_LV[row] = logits_V
    return logits_LV


def kept(logits_LV: Tensor, cut: Truncation) -> Tensor:
    """Return which tokens top-k, top-p and min-p keep."""
    sorted_LV, order_LV = torch.sort(logits_LV, dim=-1, descending=True, stable=True)
    rank_V = torch.arange(logits_LV.shape[1], device=logits_LV.device)
    weights_LV = weights(sorted_LV, sorted_LV[:, :1], cut.temperature_L[:, None].float())
    kept_LV = (cut.top_k_L[:, None] == 0) | (rank_V < cut.top_k_L[:, None])
    counted_LV = weights_LV * kept_LV
    total_L1, before_LV = counted_LV.sum(-1, keepdim=True), counted_LV.cumsum(-1) - counted_LV
    top_p_L1 = cut.top_p_L[:, None]
    kept_LV &= (top_p_L1 >= 1) | (before_LV.double() < top_p_L1 * total_L1.double()) | (rank_V == 0)
    kept_LV &= weights_LV.double() >= cut.min_p_L[:, None] * float(WEIGHT_ONE)
    return torch.zeros_like(kept_LV).scatter_(-1, order_LV, kept_LV)


def weights(logits_LV: Tensor, highest_L1: Tensor, temperature_L1: Tensor) -> Tensor:
    """Return each token's whole weight, int64: 2^31 * exp((logit - highest) / T), and 2^31 for the highest itself.

    With y = (highest - logit) / T * log2(e), a number from 0 to 63, it is 2^-(y - floor(y)) by a polynomial, times
    2^31, shifted right by floor(y).
    """
    distance_LV = torch.where(logits_LV == highest_L1, 0.0, highest_L1 - logits_LV)
    y_LV = (distance_LV / temperature_L1 * LOG2_E).clamp(max=63.0)
    whole_LV = y_LV.floor()
    fraction_LV = y_LV - whole_LV
    power_LV = torch.full_like(fraction_LV, EXP2_MINUS[0])
    for coefficient in EXP2_MINUS[1:]:
        power_LV = power_LV * fraction_LV + coefficient
    return (power_LV * float(WEIGHT_ONE)).long() >> whole_LV.long()


def drawn(logits_LV: Tensor, temperature_L: Tensor, seed_L: Tensor, position_L: Tensor) -> Tensor:
    """Return argmax(logits / T + noise) of warm rows; only tokens that could still win are given their noise."""
    scaled_LV = logits_LV.float() / temperature_L[:, None]
    reach = NOISE_MAX - NOISE_MIN + 0.05
    row, token = (scaled_LV >= scaled_LV.amax(-1, keepdim=True) - reach).nonzero(as_tuple=True)
    scores_LV = torch.full_like(scaled_LV, -torch.inf)
    scores_LV[row, token] = scaled_LV[row, token] + gumbel(seed_L[row], position_L[row], token)
    return scores_LV.argmax(-1)


def _penalised(logits_V: Tensor, state: SamplingState, slot: int, path_D: Tensor) -> Tensor:
    floats_C = state.records_SC[slot].view(torch.float64).float()
    said_V = state.said_SV[slot].clone()
    path_D = path_D[path_D >= 0]
    said_V.index_add_(0, path_D, torch.ones_like(path_D, dtype=torch.int32), alpha=2)
    counts_V = (said_V >> 1).float()
    repetition = floats_C[Column.REPETITION]
    repeated_V = torch.where(logits_V > 0, logits_V / repetition, logits_V * repetition)
    logits_V = torch.where(said_V > 0, repeated_V, logits_V)
    return logits_V - floats_C[Column.FREQUENCY] * counts_V - floats_C[Column.PRESENCE] * (counts_V > 0)


def _left(vocab_size: int, words_W: Tensor | None, ends_W: Tensor | None) -> Tensor:
    """Return which tokens a mask and the end tokens leave; the latter only as long as anything else is left."""
    if ends_W is None:
        assert words_W is not None, "one of them is there"
        return _bits(words_W, vocab_size)
    longer_V = ~_bits(ends_W, vocab_size)
    if words_W is None:
        return longer_V
    allowed_V = _bits(words_W, vocab_size)
    return allowed_V & longer_V if bool((allowed_V & longer_V).any()) else allowed_V


def _bits(words_W: Tensor, vocab_size: int) -> Tensor:
    """Return words as one bool a token; a token past the last word has none."""
    place_32 = torch.arange(32, device=words_W.device, dtype=torch.int32)
    bits = ((words_W[:, None] >> place_32) & 1).flatten().bool()[:vocab_size]
    return torch.nn.functional.pad(bits, (0, vocab_size - len(bits)))


def _with_logprobs(tokens_L: Tensor, raw_LV: Tensor, num_top_L: Tensor) -> Sampled:
    num_rows, device = len(tokens_L), tokens_L.device
    logprob_L = torch.full((num_rows,), -torch.inf, device=device)
    top_ids_LK = torch.full((num_rows, MAX_TOP), -1, dtype=torch.int64, device=device)
    top_logprobs_LK = torch.full((num_rows, MAX_TOP), -torch.inf, device=device)
    wanted_N = (num_top_L >= 0).nonzero().flatten()
    if len(wanted_N):
        raw_NV = raw_LV[wanted_N]
        highest_N1 = raw_NV.amax(-1, keepdim=True)
        total_N = weights(raw_NV, highest_N1, torch.ones_like(highest_N1)).sum(-1)
        norm_N1 = highest_N1.double() + torch.log(total_N.double() / WEIGHT_ONE)[:, None]
        own_N1 = raw_NV.gather(-1, tokens_L[wanted_N, None].clamp(min=0))
        own_N1.masked_fill_(tokens_L[wanted_N, None] < 0, -torch.inf)
        best_K = min(MAX_TOP, raw_NV.shape[1])
        best_NK, ids_NK = (part[:, :best_K] for part in torch.sort(raw_NV, dim=-1, descending=True, stable=True))
        absent_NK = (torch.arange(best_K, device=device) >= num_top_L[wanted_N, None]) | (best_NK == -torch.inf)
        logprob_L[wanted_N] = _scored(own_N1, norm_N1)[:, 0]
        top_ids_LK[wanted_N, :best_K] = ids_NK.masked_fill(absent_NK, -1)
        top_logprobs_LK[wanted_N, :best_K] = _scored(best_NK, norm_N1).masked_fill(absent_NK, -torch.inf)
    return Sampled(tokens_L, logprob_L, top_ids_LK, top_logprobs_LK)


def _scored(logits_NK: Tensor, norm_N1: Tensor) -> Tensor:
    return torch.where(logits_NK == -torch.inf, -torch.inf, logits_NK.double() - norm_N1).float()
