"""Speculative decoding's own kernels: a draft's best tokens, where nodes of chains lie, and what is accepted of them.

A draft's best k tokens are found in two stages, by block of the vocabulary and by row, after temperature and noise.
Trees have kernels of their own (`trees`).
"""
# Triton gives kernel arguments their types when it compiles, so Python has none to check.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# ruff: noqa: ANN001, ANN201, ANN202, PLR0913

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.chains import ChainOutcome, ChainPlaces, ChainRows
from slipstream.kernels.ops import RowSampling
from slipstream.kernels.triton.launch import launch_options, wait_for_inputs
from slipstream.kernels.triton.sampling_tokens import exact_noise

MAX_K = 16
"""More than so many entries of a row are found by torch."""
_BLOCK = 2048
_MANY_BLOCKS = 2048
"""From so many blocks of all rows on, a program takes `_TAKEN` of them: there are programs enough for the device."""
_TAKEN = 4


@triton.jit
def _scores(logits_ptr, ids_ptr, temperature_ptr, seed_ptr, position_ptr, row, entry, V, stride):
    """Return logits / T + noise of entries [n] of a row, at T = 0 the logits; -inf past the vocabulary."""
    logits = _logits(logits_ptr, row, entry, V, stride)
    temperature = tl.load(temperature_ptr + row)
    if temperature > 0:
        logits = _perturbed(logits, ids_ptr, temperature, seed_ptr, position_ptr, row, entry, V)
    return logits


@triton.jit
def _logits(logits_ptr, row, entry, V, stride):
    """Return the logits of entries [n] of a row, -inf past the vocabulary."""
    return tl.load(logits_ptr + row * stride + entry, mask=entry < V, other=float("-inf")).to(tl.float32)


@triton.jit
def _perturbed(logits, ids_ptr, temperature, seed_ptr, position_ptr, row, entry, V):
    """Return logits / T + noise."""
    token = tl.load(ids_ptr + entry, mask=entry < V, other=0).to(tl.int32)
    noise = exact_noise(token, tl.load(position_ptr + row), tl.load(seed_ptr + row))
    return tl.div_rn(logits, tl.zeros_like(logits) + temperature) + noise


@triton.jit
def _better(value, at, score, entry):
    """Put scores that are better, or the first, into their places."""
    better = (score > value) | (value != value)
    return tl.where(better, score, value), tl.where(better, entry, at)


@triton.jit
def _best_of_blocks_kernel(
    logits_ptr, ids_ptr, temperature_ptr, seed_ptr, position_ptr, value_ptr, entry_ptr, V, stride,
    BLOCK: tl.constexpr, TAKEN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Leave the best value and entry of TAKEN blocks side by side, as `_best_of_block_kernel` does of one.

    Without noise all loads are in flight at once: one block to a program is too little to keep the memory busy.
    """
    wait_for_inputs(PDL)
    row, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first = group * (TAKEN * BLOCK) + tl.arange(0, BLOCK)
    value, at = tl.full([BLOCK], float("nan"), tl.float32), first
    temperature = tl.load(temperature_ptr + row)
    if temperature > 0:
        for block in range(TAKEN):
            entry = first + block * BLOCK
            score = _logits(logits_ptr, row, entry, V, stride)
            score = _perturbed(score, ids_ptr, temperature, seed_ptr, position_ptr, row, entry, V)
            value, at = _better(value, at, score, entry)
    else:
        for block in tl.static_range(TAKEN):
            entry = first + block * BLOCK
            value, at = _better(value, at, _logits(logits_ptr, row, entry, V, stride), entry)
    best = tl.max(value, 0)
    cell = row * tl.num_programs(1) + group
    tl.store(value_ptr + cell, best)
    tl.store(entry_ptr + cell, tl.min(tl.where((value == best) & (at < V), at, V - 1), 0))


@triton.jit
def _best_of_block_kernel(
    logits_ptr, ids_ptr, temperature_ptr, seed_ptr, position_ptr, value_ptr, entry_ptr, sums_ptr, V, stride,
    BLOCK: tl.constexpr, K: tl.constexpr, SUMS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Leave a block's K best values and entries, ties to the lowest entry, and its maximum and sum of exponentials."""
    wait_for_inputs(PDL)
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    cell = row * tl.num_programs(1) + block
    entry = block * BLOCK + tl.arange(0, BLOCK)
    score = _scores(logits_ptr, ids_ptr, temperature_ptr, seed_ptr, position_ptr, row, entry, V, stride)
    if SUMS:
        top = tl.max(score, 0)
        tl.store(sums_ptr + cell, tl.sum(tl.exp(score - top), 0))
    for k in tl.static_range(K):
        value = tl.max(score, 0)
        at = tl.min(tl.where((score == value) & (entry < V), entry, V - 1), 0)
        tl.store(value_ptr + cell * K + k, value)
        tl.store(entry_ptr + cell * K + k, at)
        if K > 1:
            score = tl.where(entry == at, float("-inf"), score)


@triton.jit
def _best_of_all_kernel(
    value_ptr, entry_ptr, sums_ptr, ids_ptr, out_value_ptr, out_token_ptr, copy_ptr, num_blocks, copy_stride,
    BLOCKS: tl.constexpr, K: tl.constexpr, SUMS: tl.constexpr, COPY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Store the tokens of the K best of the blocks' best of a row; with SUMS also their log-probabilities.

    With COPY a token is stored once more.
    """
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCKS)
    real = at < num_blocks * K
    value = tl.load(value_ptr + row * num_blocks * K + at, mask=real, other=float("-inf"))
    entry = tl.load(entry_ptr + row * num_blocks * K + at, mask=real, other=2147483647)
    log_total = 0.0
    if SUMS:
        top = tl.max(value, 0)
        is_first = real & (at % K == 0)  # a block's maximum is its first value
        sums = tl.load(sums_ptr + row * num_blocks + at // K, mask=is_first, other=0.0)
        log_total = top + tl.log(tl.sum(sums * tl.exp(value - top), 0))
    for k in tl.static_range(K):
        best = tl.max(value, 0)
        chosen = tl.min(tl.where((value == best) & real, entry, 2147483647), 0)
        token = tl.load(ids_ptr + chosen, mask=chosen < 2147483647, other=0)  # no entry is best where all are NaN
        tl.store(out_token_ptr + row * K + k, token)
        if COPY:
            tl.store(copy_ptr + row * copy_stride, token)
        if SUMS:
            tl.store(out_value_ptr + row * K + k, best - log_total)
        if K > 1:
            value = tl.where(entry == chosen, float("-inf"), value)


@triton.jit
def _perturb_kernel(
    logits_ptr, ids_ptr, temperature_ptr, seed_ptr, position_ptr, out_ptr, V, stride,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(PDL)
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    entry = block * BLOCK + tl.arange(0, BLOCK)
    score = _scores(logits_ptr, ids_ptr, temperature_ptr, seed_ptr, position_ptr, row, entry, V, stride)
    tl.store(out_ptr + row * V + entry, score, mask=entry < V)


def top_k(
    logits_LV: Tensor, token_ids_V: Tensor, sampling: RowSampling, k: int, dependent: bool
) -> tuple[Tensor, Tensor]:
    """Return log-probabilities and tokens [L, k] of the best of each perturbed row; k is at most MAX_K."""
    return _best(logits_LV, token_ids_V, sampling, k, None, dependent)


def propose(logits_RV: Tensor, token_ids_V: Tensor, sampling: RowSampling, out_R: Tensor, dependent: bool) -> Tensor:
    """Return the token of each row's best entry, int64 [R], and write it to `out_R` too."""
    return _best(logits_RV, token_ids_V, sampling, 1, out_R, dependent)[1][:, 0]


def perturb(logits_LV: Tensor, token_ids_V: Tensor, sampling: RowSampling, dependent: bool) -> Tensor:
    """Return logits / T + noise in float32."""
    num_rows, vocab = logits_LV.shape
    out = torch.empty(num_rows, vocab, dtype=torch.float32, device=logits_LV.device)
    _perturb_kernel[(num_rows, triton.cdiv(vocab, _BLOCK))](
        logits_LV, token_ids_V, sampling.temperature_L, sampling.seed_L, sampling.position_L, out, vocab,
        logits_LV.stride(0), BLOCK=_BLOCK, PDL=dependent, num_warps=8, **launch_options(dependent),
    )  # fmt: skip
    return out


def _best(
    logits_LV: Tensor, token_ids_V: Tensor, sampling: RowSampling, k: int, tokens_L: Tensor | None,
    dependent: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return scores and tokens of each row's best; scores mean nothing where `tokens_L` takes the best one's token."""
    num_rows, vocab = logits_LV.shape
    with_sums = tokens_L is None
    device, num_blocks = logits_LV.device, triton.cdiv(vocab, _BLOCK)
    several = k == 1 and not with_sums and num_rows * num_blocks >= _MANY_BLOCKS
    if several:
        num_blocks = triton.cdiv(vocab, _BLOCK * _TAKEN)
    values = torch.empty(num_rows, num_blocks * k, dtype=torch.float32, device=device)
    entries = torch.empty(num_rows, num_blocks * k, dtype=torch.int32, device=device)
    sums = torch.empty(num_rows, num_blocks, dtype=torch.float32, device=device)
    scores_LK = torch.empty(num_rows, k, dtype=torch.float32, device=device)
    best_LK = torch.empty(num_rows, k, dtype=torch.int64, device=device)
    copies = best_LK if tokens_L is None else tokens_L
    drawn = (logits_LV, token_ids_V, sampling.temperature_L, sampling.seed_L, sampling.position_L, values, entries)
    if several:
        _best_of_blocks_kernel[(num_rows, num_blocks)](
            *drawn, vocab, logits_LV.stride(0), BLOCK=_BLOCK, TAKEN=_TAKEN, PDL=dependent,
            num_warps=8, **launch_options(dependent),
        )  # fmt: skip
    else:
        _best_of_block_kernel[(num_rows, num_blocks)](
            *drawn, sums, vocab, logits_LV.stride(0), BLOCK=_BLOCK, K=k, SUMS=with_sums,
            PDL=dependent, num_warps=8, **launch_options(dependent),
        )  # fmt: skip
    _best_of_all_kernel[(num_rows,)](
        values, entries, sums, token_ids_V, scores_LK, best_LK, copies, num_blocks, copies.stride(0),
        BLOCKS=triton.next_power_of_2(num_blocks * k), K=k, SUMS=with_sums, COPY=tokens_L is not None, PDL=dependent,
        num_warps=4, **launch_options(dependent),
    )  # fmt: skip
    return scores_LK, best_LK


@triton.jit
def _place_kernel(
    committed_ptr, root_ptr, active_ptr, pages_ptr, chain_ptr, index_ptr, slots_ptr, position_ptr, node_index_ptr,
    node_slots_ptr, node_position_ptr, kv_lens_ptr, num_nodes, page_size, pages_stride,
    NODES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Write one row's places, by row and by node."""
    wait_for_inputs(PDL)
    row, num_rows = tl.program_id(0), tl.num_programs(0)
    committed = tl.load(committed_ptr + row) * tl.load(active_ptr + row)
    tl.store(committed_ptr + row, committed)
    node = tl.arange(0, NODES)
    real = node < num_nodes
    index = committed + node
    page = tl.load(pages_ptr + row.to(tl.int64) * pages_stride + index // page_size, mask=real, other=0).to(tl.int64)
    slot = page * page_size + index % page_size
    by_row, by_node = row * num_nodes + node, node * num_rows + row
    tl.store(chain_ptr + row * num_nodes, tl.load(root_ptr + row))
    tl.store(index_ptr + by_row, index, mask=real)
    tl.store(slots_ptr + by_row, slot, mask=real)
    tl.store(position_ptr + by_row, index + 1, mask=real)
    tl.store(node_index_ptr + by_node, index, mask=real)
    tl.store(node_slots_ptr + by_node, slot, mask=real)
    tl.store(node_position_ptr + by_node, index + 1, mask=real)
    tl.store(kv_lens_ptr + by_node, (index + 1).to(tl.int32), mask=real)


@triton.jit
def _scattered(seed, position):
    """Return the 32-bit number of `slipstream.kernels.reference.noise.scattered`."""
    x = (seed * -7046029254386353131 + position * -3335678366873096957).to(tl.uint64, bitcast=True)
    x = ((x ^ (x >> 30)).to(tl.int64, bitcast=True) * -4658895280553007687).to(tl.uint64, bitcast=True)
    x = ((x ^ (x >> 27)).to(tl.int64, bitcast=True) * -7723592293110705685).to(tl.uint64, bitcast=True)
    return ((x ^ (x >> 31)) >> 32).to(tl.int64)


@triton.jit
def below_thresholds(thresholds_ptr, seed_ptr, row, committed, at, real):
    """Return whether acceptance is simulated, and how many thresholds the row's number lies below."""
    threshold = tl.load(thresholds_ptr + at, mask=real, other=-1)
    word = _scattered(tl.load(seed_ptr + row), committed + 1)
    return tl.max(threshold, 0) >= 0, tl.sum((word < threshold).to(tl.int32), 0)


@triton.jit
def settle(
    committed_ptr, root_ptr, active_ptr, emitted_ptr, last_ptr, last_index_ptr, last_keys_ptr, out_ptr,
    row, committed, emitted, accepted, node, num_nodes,
):  # fmt: skip
    """Write what a row emits, as `StepOps.accept_chains` says, and move the row on.

    Args:
        out_ptr: where the row's count and tokens go.
        emitted: the drafted tokens that are accepted, and the target's after them, at [node].
    """
    real = node < num_nodes
    last = tl.sum(tl.where(node == accepted, emitted, 0), 0)
    kept = tl.sum(tl.where(node == accepted - 1, emitted, 0), 0)
    before = tl.where(accepted > 0, kept, tl.load(root_ptr + row))
    count = (accepted + (last >= 0).to(tl.int32)).to(tl.int64) * tl.load(active_ptr + row)
    tl.store(root_ptr + row, tl.where(last >= 0, last, before))
    tl.store(committed_ptr + row, committed + count)
    tl.store(last_ptr + row, (row * num_nodes + accepted).to(tl.int64))
    tl.store(last_index_ptr + row, committed + accepted)
    tl.store(last_keys_ptr + row, (committed + accepted + 1).to(tl.int32))
    tl.store(emitted_ptr + row * num_nodes + node, tl.maximum(emitted, 0), mask=real)
    tl.store(out_ptr, count)
    tl.store(out_ptr + 1 + node, emitted, mask=real)


@triton.jit
def _accept_kernel(
    committed_ptr, root_ptr, active_ptr, seed_ptr, until_ptr, chain_ptr, chosen_ptr, thresholds_ptr, emitted_ptr,
    last_ptr, last_index_ptr, last_keys_ptr, out_ptr, num_nodes, out_stride, NODES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Accept one row's chain, and move the row on."""
    wait_for_inputs(PDL)
    row = tl.program_id(0)
    node = tl.arange(0, NODES)
    real, drafts = node < num_nodes, node < num_nodes - 1
    committed = tl.load(committed_ptr + row)
    emitted = tl.load(chosen_ptr + row * num_nodes + node, mask=real, other=0)
    drafted = tl.load(chain_ptr + row * num_nodes + node + 1, mask=drafts, other=0)
    accepted = tl.min(tl.where((emitted == drafted) & drafts, num_nodes, node), 0)
    if NODES > 1:
        simulates, below = below_thresholds(thresholds_ptr, seed_ptr, row, committed, node, drafts)
        accepted = tl.where(simulates, below, accepted)
    accepted = tl.where(committed < tl.load(until_ptr + row), accepted, 0)
    emitted = tl.where(node < accepted, drafted, emitted)
    settle(
        committed_ptr, root_ptr, active_ptr, emitted_ptr, last_ptr, last_index_ptr, last_keys_ptr,
        out_ptr + row * out_stride, row, committed, emitted, accepted, node, num_nodes,
    )  # fmt: skip


def place_chains(rows: ChainRows, places: ChainPlaces, page_size: int, dependent: bool) -> None:
    """Write where the next nodes lie."""
    num_rows, num_nodes = places.chain_RN.shape
    _place_kernel[(num_rows,)](
        rows.committed_R, rows.root_R, rows.active_R, rows.pages_RP, places.chain_RN, places.index_RN, places.slots_RN,
        places.position_RN, places.index_NR, places.slots_NR, places.position_NR, places.kv_lens_NR, num_nodes,
        page_size, rows.pages_RP.stride(0),
        NODES=triton.next_power_of_2(num_nodes), PDL=dependent, num_warps=1, **launch_options(dependent),
    )  # fmt: skip


def accept_chains(
    rows: ChainRows, tokens_RN: tuple[Tensor, Tensor], thresholds_K: Tensor, outcome: ChainOutcome, dependent: bool
) -> None:
    """Keep what agrees of each chain; `tokens_RN` are the chains and the target's tokens, both contiguous."""
    num_rows, num_nodes = tokens_RN[0].shape
    assert len(thresholds_K) == num_nodes - 1, "every drafted token has a threshold"
    _accept_kernel[(num_rows,)](
        rows.committed_R, rows.root_R, rows.active_R, rows.seed_R, rows.drafts_until_R, *tokens_RN, thresholds_K,
        outcome.emitted_RN, outcome.last_R, outcome.last_index_R, outcome.last_keys_R, outcome.out_RE, num_nodes,
        outcome.out_RE.stride(0), NODES=triton.next_power_of_2(num_nodes), PDL=dependent, num_warps=1,
        **launch_options(dependent),
    )  # fmt: skip
