"""The router of a mixture of experts: scores in float32, then each token's best experts and their weights."""
# Triton gives kernel arguments their types when it compiles, so Python has none to check.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# ruff: noqa: ANN001, ANN202, PLR0913

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.checkpoint.spec import RoutingSpec
from slipstream.kernels.triton.expert_tiles import matrix_instruction
from slipstream.kernels.triton.launch import launch_options, wait_for_inputs
from slipstream.kernels.triton.tuning import architecture_of
from slipstream.kernels.triton.variants import Variant

_TOKENS, _EXPERTS, _COLUMNS, _SPLITS = 16, 16, 256, 7  # one way to cut sums, whatever the number of tokens


@triton.jit
def _scores_kernel(
    x_ptr, w_ptr, out_ptr, T, E, D, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_D: tl.constexpr,
    SPLITS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Multiply a stretch of columns: parts [split, token, expert] of the scores, in float32."""
    wait_for_inputs(PDL)
    tokens = tl.program_id(2) * BLOCK_T + tl.arange(0, BLOCK_T)
    experts = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)
    split = tl.program_id(1)
    stretch = tl.cdiv(tl.cdiv(D, BLOCK_D), SPLITS) * BLOCK_D
    first = split * stretch
    acc = tl.zeros([BLOCK_E, BLOCK_T], tl.float32)
    for start in range(first, tl.minimum(first + stretch, D), BLOCK_D):
        column = start + tl.arange(0, BLOCK_D)
        inside = column < D
        w_at = w_ptr + experts.to(tl.int64)[:, None] * D + column[None, :]
        x_at = x_ptr + tokens.to(tl.int64)[None, :] * D + column[:, None]
        w = tl.load(w_at, mask=(experts < E)[:, None] & inside[None, :], other=0.0)
        x = tl.load(x_at, mask=(tokens < T)[None, :] & inside[:, None], other=0.0)
        acc = tl.dot(w, x, acc, input_precision="ieee")
    at = (split.to(tl.int64) * T + tokens)[None, :] * E + experts[:, None]
    tl.store(out_ptr + at, acc, mask=(experts < E)[:, None] & (tokens < T)[None, :])


@triton.jit
def _choose_kernel(
    parts_ptr, bias_ptr, ids_ptr, weights_ptr, T, E, scale, TOP_K: tl.constexpr, NORMALISE: tl.constexpr,
    SPLITS: tl.constexpr, BLOCK: tl.constexpr, SLOTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Choose a token's experts by score + bias, best first and ties to the lower id; weigh them by score."""
    wait_for_inputs(PDL)
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK)
    real = expert < E
    logits = tl.zeros([BLOCK], tl.float32)
    for split in tl.static_range(SPLITS):
        logits += tl.load(parts_ptr + (split * T + token) * E + expert, mask=real, other=0.0)
    scores = tl.div_rn(tl.full([BLOCK], 1.0, tl.float32), 1.0 + tl.exp(-logits))
    left = scores + tl.load(bias_ptr + expert, mask=real, other=0.0)
    left = tl.where(real, left, float("-inf"))
    slot = tl.arange(0, SLOTS)
    ids = tl.zeros([SLOTS], tl.int32)
    weights = tl.zeros([SLOTS], tl.float32)
    for k in tl.static_range(TOP_K):
        chosen = tl.min(tl.where(left == tl.max(left, 0), expert, BLOCK), 0)
        weight = tl.sum(tl.where(expert == chosen, scores, 0.0), 0)
        ids = tl.where(slot == k, chosen, ids)
        weights = tl.where(slot == k, weight, weights)
        left = tl.where(expert == chosen, float("-inf"), left)
    if NORMALISE:
        weights = tl.div_rn(weights, tl.zeros_like(weights) + (tl.sum(weights, 0) + 1e-20))
    at = token * TOP_K + slot
    tl.store(ids_ptr + at, ids.to(ids_ptr.dtype.element_ty), mask=slot < TOP_K)
    tl.store(weights_ptr + at, weights * scale, mask=slot < TOP_K)


def fits(routing: RoutingSpec) -> bool:
    """Tell whether the kernels choose this way: experts that compete in groups are left to torch."""
    return routing.num_groups == 1


def route(
    x_TD: Tensor, weight_ED: Tensor, bias_E: Tensor, routing: RoutingSpec, dependent: bool = False
) -> tuple[Tensor, Tensor]:
    """Return each token's experts, int64 [T, K], best first, and their float32 weights."""
    num_tokens, width = x_TD.shape
    num_experts = weight_ED.shape[0]
    assert fits(routing)
    parts = torch.empty(_SPLITS, num_tokens, num_experts, dtype=torch.float32, device=x_TD.device)
    _scores_kernel[(triton.cdiv(num_experts, _EXPERTS), _SPLITS, triton.cdiv(num_tokens, _TOKENS))](
        x_TD.contiguous(), weight_ED.to(x_TD.dtype), parts, num_tokens, num_experts, width,
        BLOCK_T=_TOKENS, BLOCK_E=_EXPERTS, BLOCK_D=_COLUMNS, SPLITS=_SPLITS, PDL=dependent,
        num_warps=4, num_stages=4,
        **launch_options(dependent, matrix_instruction(architecture_of(x_TD.device))),
    )  # fmt: skip
    ids_TK = torch.empty(num_tokens, routing.top_k, dtype=torch.int64, device=x_TD.device)
    weights_TK = torch.empty(num_tokens, routing.top_k, dtype=torch.float32, device=x_TD.device)
    _choose_kernel[(num_tokens,)](
        parts, bias_E, ids_TK, weights_TK, num_tokens, num_experts, routing.scale, TOP_K=routing.top_k,
        NORMALISE=routing.normalise, SPLITS=_SPLITS, BLOCK=triton.next_power_of_2(num_experts),
        SLOTS=triton.next_power_of_2(routing.top_k), PDL=dependent, num_warps=4, **launch_options(dependent),
    )  # fmt: skip
    return ids_TK, weights_TK


def variants(architecture: str) -> list[Variant]:
    """Return the kernels that run on an architecture, for the 384 experts of Kimi-K2.5."""
    scores = {"x_ptr": "*bf16", "w_ptr": "*bf16", "out_ptr": "*fp32", "T": "i32", "E": "i32", "D": "i32"}
    blocks = {"BLOCK_T": _TOKENS, "BLOCK_E": _EXPERTS, "BLOCK_D": _COLUMNS, "SPLITS": _SPLITS, "PDL": False}
    choose = {
        "parts_ptr": "*fp32", "bias_ptr": "*fp32", "ids_ptr": "*i64", "weights_ptr": "*fp32", "T": "i32", "E": "i32",
        "scale": "fp32",
    }  # fmt: skip
    choice = {"TOP_K": 8, "NORMALISE": True, "SPLITS": _SPLITS, "BLOCK": 512, "SLOTS": 8, "PDL": False}
    aligned = ("x_ptr", "w_ptr", "out_ptr", "E", "D")
    return [
        Variant("router scores", _scores_kernel, scores, blocks, 4, 4, "bf16", aligned),
        Variant("router choice", _choose_kernel, choose, choice, 4, 2, divisible=("parts_ptr", "E")),
    ]
