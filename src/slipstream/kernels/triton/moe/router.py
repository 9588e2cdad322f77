"""The router of a mixture of experts in two launches: scores in float32, then each token's best experts.

What else reads the same normalised rows goes along: the shared expert's gate and up in the first launch, its
activation and the INT8 rows of the routed experts in the second.
"""
# Triton gives kernel arguments their types when it compiles, so Python has none to check.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# ruff: noqa: ANN001, ANN202, PLR0913, SIM102

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.checkpoint.spec import RoutingSpec
from slipstream.kernels.triton.gemm.split_k import prefetch_rows, token_tile
from slipstream.kernels.triton.launch import launch_options, wait_for_inputs
from slipstream.kernels.triton.moe.rows import write_row
from slipstream.kernels.triton.tuning import architecture_of, matrix_instruction

_ROWS, _COLUMNS, _SPLITS = 16, 256, 7  # one way to cut sums, whatever the number of tokens


@triton.jit(do_not_specialize=["T"])
def _scores_kernel(
    x_ptr, w_ptr, shared_ptr, out_ptr, T, E, N, D, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_D: tl.constexpr,
    SPLITS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Multiply a split of K: parts [split, token, N] of the E scores, then of the shared expert's rows."""
    tokens = tl.program_id(2) * BLOCK_T + tl.arange(0, BLOCK_T)
    split = tl.program_id(1)
    score_blocks = tl.cdiv(E, BLOCK_E)
    block = tl.program_id(0)
    source, first_row, num_rows = w_ptr, block * BLOCK_E, E
    first_output = 0
    if block >= score_blocks:
        source, first_row, num_rows = shared_ptr, (block - score_blocks) * BLOCK_E, N - E
        first_output = E
    rows = first_row + tl.arange(0, BLOCK_E)
    real = rows < num_rows
    w_at = source + tl.minimum(rows, num_rows - 1).to(tl.int64)[:, None] * D
    columns = tl.cdiv(tl.cdiv(D, BLOCK_D), SPLITS) * BLOCK_D
    first = split * columns
    if PDL:
        prefetch_rows(w_at, tl.minimum(first, D - 1), D, 64)
    wait_for_inputs(PDL)
    acc = tl.zeros([BLOCK_E, BLOCK_T], tl.float32)
    for start in range(first, tl.minimum(first + columns, D), BLOCK_D):
        column = start + tl.arange(0, BLOCK_D)
        inside = column < D
        x_at = x_ptr + tokens.to(tl.int64)[None, :] * D + column[:, None]
        w = tl.load(w_at + column[None, :], mask=inside[None, :], other=0.0)
        x = tl.load(x_at, mask=(tokens < T)[None, :] & inside[:, None], other=0.0)
        acc = tl.dot(w, x, acc, input_precision="ieee")
    at = (split.to(tl.int64) * T + tokens)[None, :] * N + (first_output + rows)[:, None]
    tl.store(out_ptr + at, acc, mask=real[:, None] & (tokens < T)[None, :])


@triton.jit
def _sum_of_parts(at, stride, inside, SPLITS: tl.constexpr, BLOCK: tl.constexpr):
    total = tl.zeros([BLOCK], tl.float32)
    for split in tl.static_range(SPLITS):
        total += tl.load(at + split * stride, mask=inside, other=0.0)
    return total


@triton.jit
def _choose(logits, bias_ptr, ids_ptr, weights_ptr, token, E, scale, TOP_K: tl.constexpr, NORMALISE: tl.constexpr,
            SCORING: tl.constexpr, BIAS: tl.constexpr, BLOCK: tl.constexpr, SLOTS: tl.constexpr):  # fmt: skip
    """Choose a token's experts by score, best first and ties to the lower id; weigh them by score.

    A choice is one maximum: over words of the number, in the order of integers, and the id behind it. BIAS says what
    the bias is added to: the logits, or the scores in the choice alone ("choice").
    """
    expert = tl.arange(0, BLOCK)
    real = expert < E
    if BIAS == "logits":
        logits += tl.load(bias_ptr + expert, mask=real, other=0.0)
    if SCORING == "softmax":
        logits = tl.where(real, logits, float("-inf"))
        raised = tl.exp(logits - tl.max(logits, 0))
        scores = tl.div_rn(raised, tl.zeros_like(raised) + tl.sum(raised, 0))
    else:
        scores = tl.div_rn(tl.full([BLOCK], 1.0, tl.float32), 1.0 + tl.exp(-logits))
    left = scores
    if BIAS == "choice":
        left = scores + tl.load(bias_ptr + expert, mask=real, other=0.0)
    bits = tl.where(real, left, float("-inf")).to(tl.int32, bitcast=True)
    order = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    keys = (order.to(tl.int64) << 32) | (BLOCK - 1 - expert).to(tl.int64)
    slot = tl.arange(0, SLOTS)
    ids = tl.full([SLOTS], BLOCK, tl.int32)
    for k in tl.static_range(TOP_K):
        best = tl.max(keys, 0)
        ids = tl.where(slot == k, BLOCK - 1 - (best & 0xFFFFFFFF).to(tl.int32), ids)
        keys = tl.where(keys == best, -0x8000000000000000, keys)
    weights = tl.sum(tl.where(ids[:, None] == expert[None, :], scores[None, :], 0.0), 1)
    if NORMALISE:
        weights = tl.div_rn(weights, tl.zeros_like(weights) + (tl.sum(weights, 0) + 1e-20))
    at = token * TOP_K + slot
    tl.store(ids_ptr + at, ids.to(ids_ptr.dtype.element_ty), mask=slot < TOP_K)
    tl.store(weights_ptr + at, weights * scale, mask=slot < TOP_K)


@triton.jit
def _activate_shared(parts_at, stride, hidden_at, width, SPLITS: tl.constexpr, BLOCK: tl.constexpr):
    """Write silu(gate) * up of the shared expert, each rounded as torch would."""
    column = tl.arange(0, BLOCK)
    inside = column < width
    dtype = hidden_at.dtype.element_ty
    gate = _sum_of_parts(parts_at + column, stride, inside, SPLITS, BLOCK).to(dtype).to(tl.float32)
    up = _sum_of_parts(parts_at + width + column, stride, inside, SPLITS, BLOCK).to(dtype).to(tl.float32)
    silu = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    tl.store(hidden_at + column, (silu * up).to(dtype), mask=inside)


@triton.jit
def _write_codes(x_ptr, codes_ptr, scale_ptr, token, width, BLOCK: tl.constexpr):
    column = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + token * width + column, mask=column < width, other=0.0).to(tl.float32)
    write_row(x, token, width, codes_ptr, scale_ptr, "int8", BLOCK)


@triton.jit(do_not_specialize=["T"])
def _choose_kernel(
    parts_ptr, bias_ptr, ids_ptr, weights_ptr, x_ptr, codes_ptr, code_scale_ptr, hidden_ptr, T, E, N, D, scale,
    TOP_K: tl.constexpr, NORMALISE: tl.constexpr, SCORING: tl.constexpr, BIAS: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK: tl.constexpr, SLOTS: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_H: tl.constexpr, SHARED: tl.constexpr,
    CODES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Choose a token's experts; other programs activate the shared expert's row, and write the token's row as INT8."""
    wait_for_inputs(PDL)
    token = tl.program_id(0).to(tl.int64)
    task = tl.program_id(1)
    parts_at = parts_ptr + token * N
    stride = T.to(tl.int64) * N
    if task == 0:
        expert = tl.arange(0, BLOCK)
        logits = _sum_of_parts(parts_at + expert, stride, expert < E, SPLITS, BLOCK)
        _choose(logits, bias_ptr, ids_ptr, weights_ptr, token, E, scale, TOP_K, NORMALISE, SCORING, BIAS, BLOCK, SLOTS)
    if SHARED:
        if task == 1:
            width = (N - E) // 2
            _activate_shared(parts_at + E, stride, hidden_ptr + token * width, width, SPLITS, BLOCK_H)
    if CODES:
        if task == 1 + SHARED:
            _write_codes(x_ptr, codes_ptr, code_scale_ptr, token, D, BLOCK_D)


def fits(routing: RoutingSpec) -> bool:
    """Tell whether the kernels choose this way: experts that compete in groups are left to torch."""
    return routing.num_groups == 1


@dataclass(frozen=True)
class Gate:
    """A router's weight and bias, and the shared expert's gate and up [2I, D] where there is one."""

    weight_ED: Tensor
    bias_E: Tensor | None
    routing: RoutingSpec
    shared_ND: Tensor | None = None


@dataclass(frozen=True)
class Routed:
    """Each token's experts, int64 [T, K], best first, their float32 weights, and the shared expert's inner row."""

    ids_TK: Tensor
    weights_TK: Tensor
    shared_TI: Tensor | None


def route(
    x_TD: Tensor, weight_ED: Tensor, bias_E: Tensor | None, routing: RoutingSpec, dependent: bool = False
) -> tuple[Tensor, Tensor]:
    """Return each token's experts, int64 [T, K], best first, and their float32 weights."""
    routed = route_rows(x_TD, Gate(weight_ED, bias_E, routing), None, dependent)
    return routed.ids_TK, routed.weights_TK


def route_rows(x_TD: Tensor, gate: Gate, codes: tuple[Tensor, Tensor] | None, dependent: bool) -> Routed:
    """Choose experts; also run the shared expert up to its activation, and write rows as INT8 into `codes`."""
    num_tokens, width = x_TD.shape
    num_experts, routing = gate.weight_ED.shape[0], gate.routing
    assert fits(routing)
    x_TD, weight_ED, device = x_TD.contiguous(), gate.weight_ED.to(x_TD.dtype), x_TD.device
    shared_ND = gate.shared_ND if gate.shared_ND is not None else weight_ED
    num_shared = 0 if gate.shared_ND is None else gate.shared_ND.shape[0]
    total, block_t, architecture = num_experts + num_shared, token_tile(num_tokens), architecture_of(device)
    parts = torch.empty(_SPLITS, num_tokens, total, dtype=torch.float32, device=device)
    blocks = triton.cdiv(num_experts, _ROWS) + triton.cdiv(num_shared, _ROWS)
    _scores_kernel[(blocks, _SPLITS, triton.cdiv(num_tokens, block_t))](
        x_TD, weight_ED, shared_ND, parts, num_tokens, num_experts, total, width,
        BLOCK_T=block_t, BLOCK_E=_ROWS, BLOCK_D=_COLUMNS, SPLITS=_SPLITS, PDL=dependent, num_warps=4,
        num_stages=_stages(block_t, architecture), **launch_options(dependent, matrix_instruction(architecture)),
    )  # fmt: skip
    ids_TK = torch.empty(num_tokens, routing.top_k, dtype=torch.int64, device=device)
    weights_TK = torch.empty(num_tokens, routing.top_k, dtype=torch.float32, device=device)
    shared_TI = x_TD.new_empty(num_tokens, num_shared // 2) if num_shared else None
    _choose_kernel[(num_tokens, 1 + (num_shared > 0) + (codes is not None))](
        parts, gate.bias_E, ids_TK, weights_TK, x_TD, *(codes or (None, None)), shared_TI, num_tokens, num_experts,
        total, width, routing.scale, TOP_K=routing.top_k, NORMALISE=routing.normalise, SCORING=routing.scoring,
        BIAS=routing.bias, SPLITS=_SPLITS, BLOCK=triton.next_power_of_2(num_experts),
        SLOTS=triton.next_power_of_2(routing.top_k), BLOCK_D=triton.next_power_of_2(width),
        BLOCK_H=triton.next_power_of_2(max(num_shared // 2, 1)), SHARED=num_shared > 0, CODES=codes is not None,
        PDL=dependent, num_warps=8, **launch_options(dependent),
    )  # fmt: skip
    return Routed(ids_TK, weights_TK, shared_TI)


def _stages(block_t: int, architecture: str) -> int:
    """Return how many tiles of columns are in flight beside each other; AMD's shared memory holds fewer wide ones."""
    return 4 if block_t == 16 else 2 if matrix_instruction(architecture) else 3
