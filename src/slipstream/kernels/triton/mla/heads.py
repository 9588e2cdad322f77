"""What surrounds latent attention: norms of queries and latents, positions, and the products of each head by itself."""
# Triton gives kernel arguments their types when it compiles, so Python has none to check.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# ruff: noqa: ANN001, ANN202, PLR0913

import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.attention_batch import KvLayer
from slipstream.kernels.triton.gemm.split_k import prefetch_rows
from slipstream.kernels.triton.launch import launch_options, wait_for_inputs
from slipstream.kernels.triton.norm import Norm
from slipstream.kernels.triton.rope import Rope
from slipstream.kernels.triton.tuning import architecture_of, matrix_instruction

_TOKENS = 16
HEAD_TILE = 64
"""Outputs of a head's tile; where rotated numbers follow them, the outputs fill whole tiles."""
_ROWS, _COLUMNS = 32, 256  # of the weight that turns squeezed queries into queries
LATENT_PROGRAMS = tl.constexpr(4)  # that share the latents of a tile of tokens


@triton.jit
def _rotated(source, at, cos_ptr, sin_ptr, position, ROPE: tl.constexpr):
    """Return ROPE rotated numbers from `source`; pairs lie half a width apart."""
    HALF: tl.constexpr = ROPE // 2
    real = at < ROPE
    x = tl.load(source + at, mask=real, other=0.0).to(tl.float32)
    mate = tl.load(source + tl.where(at < HALF, at + HALF, at - HALF), mask=real, other=0.0).to(tl.float32)
    angle = position * HALF + at % HALF
    cos = tl.load(cos_ptr + angle, mask=real, other=1.0)
    sin = tl.load(sin_ptr + angle, mask=real, other=0.0)
    return x * cos + tl.where(at < HALF, -1.0, 1.0) * mate * sin


@triton.jit
def _write_latent(source, target, norm_ptr, cos_ptr, sin_ptr, position, eps, WIDTH: tl.constexpr, ROPE: tl.constexpr,
                  BLOCK_W: tl.constexpr, BLOCK_R: tl.constexpr):  # fmt: skip
    """Norm one token's latent, rotate the part behind it, and keep both; rounded where torch rounds."""
    dtype = source.dtype.element_ty
    column = tl.arange(0, BLOCK_W)
    inside = column < WIDTH
    x = tl.load(source + column, mask=inside, other=0.0).to(tl.float32)
    rstd = tl.rsqrt(tl.sum(x * x, 0) / WIDTH + eps)
    weight = tl.load(norm_ptr + column, mask=inside, other=0.0).to(tl.float32)
    latent = ((x * rstd).to(dtype).to(tl.float32) * weight).to(dtype)
    tl.store(target + column, latent.to(target.dtype.element_ty), mask=inside)
    at = tl.arange(0, BLOCK_R)
    rotated = _rotated(source + WIDTH, at, cos_ptr, sin_ptr, position, ROPE).to(dtype)
    tl.store(target + WIDTH + at, rotated.to(target.dtype.element_ty), mask=at < ROPE)


@triton.jit
def _normed_product(x_at, real, w_at, norm_ptr, eps, Q: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr,
                    BLOCK_K: tl.constexpr):  # fmt: skip
    """Return rows of a weight times normed rows, [BLOCK_N, BLOCK_T]; the norm is rounded where torch rounds."""
    column = tl.arange(0, BLOCK_K)
    squares = tl.zeros([BLOCK_T, BLOCK_K], tl.float32)
    for start in range(0, Q, BLOCK_K):
        mask = real[:, None] & (start + column < Q)[None, :]
        x = tl.load(x_at[:, None] + (start + column)[None, :], mask=mask, other=0.0).to(tl.float32)
        squares += x * x
    rstd = tl.rsqrt(tl.sum(squares, 1) / Q + eps)
    dtype = x_at.dtype.element_ty
    acc = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
    for start in range(0, Q, BLOCK_K):
        inside = start + column < Q
        w = tl.load(w_at + (start + column)[None, :], mask=inside[None, :], other=0.0)
        x = tl.load(x_at[None, :] + (start + column)[:, None], mask=real[None, :] & inside[:, None], other=0.0)
        norm = tl.load(norm_ptr + start + column, mask=inside, other=0.0).to(tl.float32)
        normed = ((x.to(tl.float32) * rstd[None, :]).to(dtype).to(tl.float32) * norm[:, None]).to(dtype)
        acc = tl.dot(w, normed, acc, input_precision="ieee")
    return acc


@triton.jit
def _squeezed_kernel(
    x_ptr, q_norm_ptr, latent_norm_ptr, w_ptr, q_ptr, latent_ptr, slots_ptr, positions_ptr, cos_ptr, sin_ptr,
    T, N, x_stride, slot_stride, q_eps, latent_eps, Q: tl.constexpr, WIDTH: tl.constexpr, ROPE: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_R: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Norm squeezed queries and multiply them by some rows of the weight; the last programs keep the latents.

    Every program norms the rows it multiplies: they are short, and it saves a launch.
    """
    first = tl.program_id(0) * BLOCK_N
    outputs = first + tl.arange(0, BLOCK_N)
    w_at = w_ptr + tl.minimum(outputs, N - 1).to(tl.int64)[:, None] * Q
    if PDL:
        for start in tl.static_range(0, Q, 512):
            prefetch_rows(w_at, start, Q, 64)
    wait_for_inputs(PDL)
    if first < N:
        tokens = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
        real = tokens < T
        x_at = x_ptr + tl.minimum(tokens, T - 1).to(tl.int64) * x_stride
        acc = _normed_product(x_at, real, w_at, q_norm_ptr, q_eps, Q, BLOCK_T, BLOCK_N, BLOCK_K)
        at = q_ptr + tokens.to(tl.int64)[None, :] * N + outputs[:, None]
        tl.store(at, acc.to(q_ptr.dtype.element_ty), mask=(outputs < N)[:, None] & real[None, :])
    else:
        for lane in range((first - N) // BLOCK_N, BLOCK_T, LATENT_PROGRAMS):
            token = tl.program_id(1).to(tl.int64) * BLOCK_T + lane
            if token < T:
                source = x_ptr + token * x_stride + Q
                target = latent_ptr + tl.load(slots_ptr + token).to(tl.int64) * slot_stride
                position = tl.load(positions_ptr + token).to(tl.int64)
                _write_latent(source, target, latent_norm_ptr, cos_ptr, sin_ptr, position, latent_eps, WIDTH, ROPE,
                              BLOCK_W, BLOCK_R)  # fmt: skip


@triton.jit
def _heads_kernel(
    x_ptr, w_ptr, out_ptr, positions_ptr, cos_ptr, sin_ptr, T, x_stride_t, x_stride_h, w_stride_h, w_stride_n,
    w_stride_k, out_stride_t, out_stride_h, N, K: tl.constexpr, ROPE: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Multiply one head of some tokens by that head's weight; behind the outputs go ROPE rotated numbers of the input.

    The whole of K is one product, so a row's bits are its own. The weight is read before the inputs are there.
    """
    head = tl.program_id(1).to(tl.int64)
    outputs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    column = tl.arange(0, BLOCK_K)
    w_at = w_ptr + head * w_stride_h + outputs[:, None] * w_stride_n + column[None, :] * w_stride_k
    w = tl.load(w_at, mask=(outputs < N)[:, None] & (column < K)[None, :], other=0.0)
    wait_for_inputs(PDL)
    tokens = (tl.program_id(2) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
    real = tokens < T
    x_at = x_ptr + tokens * x_stride_t + head * x_stride_h
    out_at = out_ptr + tokens * out_stride_t + head * out_stride_h
    dtype = out_ptr.dtype.element_ty
    if tl.program_id(0) * BLOCK_N < N:
        x = tl.load(x_at[None, :] + column[:, None], mask=real[None, :] & (column < K)[:, None], other=0.0)
        y = tl.dot(w, x, input_precision="ieee")
        tl.store(out_at[None, :] + outputs[:, None], y.to(dtype), mask=(outputs < N)[:, None] & real[None, :])
    elif ROPE > 0:
        at = tl.arange(0, BLOCK_R)
        for lane in range(BLOCK_T):
            token = tl.program_id(2).to(tl.int64) * BLOCK_T + lane
            if token < T:
                position = tl.load(positions_ptr + token).to(tl.int64)
                source = x_ptr + token * x_stride_t + head * x_stride_h + K
                rotated = _rotated(source, at, cos_ptr, sin_ptr, position, ROPE)
                target = out_ptr + token * out_stride_t + head * out_stride_h + N + at
                tl.store(target, rotated.to(dtype), mask=at < ROPE)


def query_and_write(
    squeezed_TC: Tensor, norms: tuple[Norm, Norm], weight_Nq: Tensor, rope: Rope, layer: KvLayer, dependent: bool
) -> Tensor:
    """Return queries [T, N] from normed squeezed ones; latents are normed, rotated and written into their slots.

    Args:
        squeezed_TC: rows of [query, latent, rotary part of the key], as one product gives them.
        norms: of the query and of the latent.
    """
    num_tokens, num_outputs = squeezed_TC.shape[0], weight_Nq.shape[0]
    q_width, width = norms[0].weight_D.shape[0], norms[1].weight_D.shape[0]
    rope_width = squeezed_TC.shape[1] - q_width - width
    q_TN = squeezed_TC.new_empty(num_tokens, num_outputs)
    writers = min(LATENT_PROGRAMS.value, num_tokens)
    _squeezed_kernel[(triton.cdiv(num_outputs, _ROWS) + writers, triton.cdiv(num_tokens, _TOKENS))](
        squeezed_TC, norms[0].weight_D, norms[1].weight_D, weight_Nq, q_TN, layer.keys_SGd, rope.slots_T,
        rope.positions_T, rope.cos_Pr, rope.sin_Pr, num_tokens, num_outputs, squeezed_TC.stride(0),
        layer.keys_SGd.stride(0), norms[0].eps, norms[1].eps, Q=q_width, WIDTH=width, ROPE=rope_width, BLOCK_T=_TOKENS,
        BLOCK_N=_ROWS, BLOCK_K=_COLUMNS, BLOCK_W=triton.next_power_of_2(width),
        BLOCK_R=triton.next_power_of_2(rope_width), PDL=dependent, num_stages=4,
        **launch_options(dependent, matrix_instruction(architecture_of(squeezed_TC.device))),
    )  # fmt: skip
    return q_TN


def heads_linear(x_THd: Tensor, weight_HNK: Tensor, rope: Rope | None, dependent: bool) -> Tensor:
    """Return each head's product [T, H, N]; with `rope`, numbers of a head beyond K follow it, rotated."""
    num_tokens, num_heads, width = x_THd.shape
    num_outputs, num_inputs = weight_HNK.shape[1:]
    rope_width = 0 if rope is None else width - num_inputs
    out = x_THd.new_empty(num_tokens, num_heads, num_outputs + rope_width)
    blocks = triton.cdiv(num_outputs, HEAD_TILE)
    assert x_THd.stride(2) == 1 and (rope is None or num_outputs % HEAD_TILE == 0)
    _heads_kernel[(blocks + (rope_width > 0), num_heads, triton.cdiv(num_tokens, _TOKENS))](
        x_THd, weight_HNK, out, *((None, None, None) if rope is None else (rope.positions_T, rope.cos_Pr, rope.sin_Pr)),
        num_tokens, x_THd.stride(0), x_THd.stride(1), *weight_HNK.stride(), out.stride(0), out.stride(1), num_outputs,
        K=num_inputs, ROPE=rope_width, BLOCK_T=_TOKENS, BLOCK_N=HEAD_TILE,
        BLOCK_K=max(triton.next_power_of_2(num_inputs), 16), BLOCK_R=triton.next_power_of_2(max(rope_width, 1)),
        PDL=dependent,
        **launch_options(dependent, matrix_instruction(architecture_of(x_THd.device))),
    )  # fmt: skip
    return out
