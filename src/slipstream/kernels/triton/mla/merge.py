"""Merge the pieces of latent attention, in order, and turn what each head saw into its values.

A row is merged number by number, so its bits are the same in any tile and whichever kernel merges it.
"""
# Triton gives kernel arguments their types when it compiles, so Python has none to check.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# ruff: noqa: ANN001, ANN201, ANN202, PLR0913

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.triton.launch import launch_options, wait_for_inputs
from slipstream.kernels.triton.tuning import architecture_of, matrix_instruction

_FEW_TOKENS = 32  # up to here half the values of a head to a program, to have more of them


@triton.jit
def piece_of(key, NEAR: tl.constexpr, NEAR_KEYS: tl.constexpr, SPLIT: tl.constexpr):
    """Return the piece a key lies in; pieces depend on the key alone."""
    return tl.where(key < NEAR_KEYS, key // NEAR, NEAR_KEYS // NEAR + (key - NEAR_KEYS) // SPLIT)


@triton.jit
def _merged(acc_ptr, stats_ptr, row, count, num_pieces, ROWS: tl.constexpr, WIDTH: tl.constexpr,
            WIDTH_P: tl.constexpr):  # fmt: skip
    """Return rows [ROWS, WIDTH_P] in float32, each merged from its first `count` pieces."""
    column = tl.arange(0, WIDTH_P)
    inside = (column < WIDTH)[None, :]
    best = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, WIDTH_P], tl.float32)
    for start in range(0, tl.max(count, 0), 4):
        for step in tl.static_range(4):  # the loads of four pieces are on their way together
            here = start + step < count
            at = row * num_pieces + start + step
            part = tl.load(acc_ptr + at[:, None] * WIDTH + column[None, :], mask=here[:, None] & inside, other=0.0)
            part_best = tl.load(stats_ptr + at * 2, mask=here, other=float("-inf"))
            part_total = tl.load(stats_ptr + at * 2 + 1, mask=here, other=0.0)
            new_best = tl.maximum(best, part_best)
            level = tl.where(new_best == float("-inf"), 0.0, new_best)
            shrink = tl.exp2(best - level)
            weight = tl.exp2(part_best - level)
            total = total * shrink + part_total * weight
            acc = acc * shrink[:, None] + part * weight[:, None]
            best = new_best
    return tl.div_rn(acc, tl.broadcast_to(tl.where(count > 0, total, 1.0)[:, None], [ROWS, WIDTH_P]))


@triton.jit
def merge_kernel(acc_ptr, stats_ptr, index_ptr, out_ptr, num_rows, num_pieces, H, ROWS: tl.constexpr,
                 WIDTH: tl.constexpr, WIDTH_P: tl.constexpr, NEAR: tl.constexpr, NEAR_KEYS: tl.constexpr,
                 SPLIT: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """Merge a few rows and round to the output's type."""
    wait_for_inputs(PDL)
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    real = row < num_rows
    own_key = tl.load(index_ptr + row // H, mask=real, other=0).to(tl.int32)
    count = tl.where(real, piece_of(own_key, NEAR, NEAR_KEYS, SPLIT) + 1, 0)
    merged = _merged(acc_ptr, stats_ptr, row, count, num_pieces, ROWS, WIDTH, WIDTH_P)
    column = tl.arange(0, WIDTH_P)
    mask = real[:, None] & (column < WIDTH)[None, :]
    tl.store(out_ptr + row[:, None] * WIDTH + column[None, :], merged.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def values_kernel(acc_ptr, stats_ptr, index_ptr, w_ptr, out_ptr, T, num_pieces, H, V, w_stride_h, w_stride_v,
                  ROWS: tl.constexpr, WIDTH: tl.constexpr, WIDTH_P: tl.constexpr, NEAR: tl.constexpr,
                  NEAR_KEYS: tl.constexpr, SPLIT: tl.constexpr, BLOCK_V: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """Merge one head of some tokens, round, and multiply by that head's part of the up-projection: [T, H, V].

    The weight is read before the pieces are there. The whole width is one product, so a row's bits are its own.
    """
    head = tl.program_id(1)
    value = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    column = tl.arange(0, WIDTH_P)
    w_at = w_ptr + head.to(tl.int64) * w_stride_h + value.to(tl.int64)[:, None] * w_stride_v + column[None, :]
    w = tl.load(w_at, mask=(value < V)[:, None] & (column < WIDTH)[None, :], other=0.0)
    wait_for_inputs(PDL)
    token = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    real = token < T
    own_key = tl.load(index_ptr + token, mask=real, other=0).to(tl.int32)
    count = tl.where(real, piece_of(own_key, NEAR, NEAR_KEYS, SPLIT) + 1, 0)
    row = token.to(tl.int64) * H + head
    merged = _merged(acc_ptr, stats_ptr, row, count, num_pieces, ROWS, WIDTH, WIDTH_P)
    values = tl.dot(w, tl.trans(merged.to(w.dtype)), input_precision="ieee")
    mask = (value < V)[:, None] & real[None, :]
    tl.store(out_ptr + row[None, :] * V + value[:, None], values.to(out_ptr.dtype.element_ty), mask=mask)


@dataclass(frozen=True)
class Pieces:
    """What `partial_kernel` left of each (token, head) row and piece: sums [rows, pieces, c], best score and total.

    Args:
        cut: keys of a near piece, keys that are near, keys of a piece beyond.
    """

    acc: Tensor
    stats: Tensor
    index_T: Tensor
    num_heads: int
    cut: tuple[int, int, int]

    @property
    def constants(self) -> dict[str, int]:
        """Compile-time values of the kernels that merge."""
        width = self.acc.shape[2]
        near, near_keys, split = self.cut
        padded = max(16, int(triton.next_power_of_2(width)))
        return {"WIDTH": width, "WIDTH_P": padded, "NEAR": near, "NEAR_KEYS": near_keys, "SPLIT": split}


def merge(pieces: Pieces, out_THc: Tensor, dependent: bool) -> Tensor:
    """Write each row's attention, rounded to the output's type, and return it."""
    num_rows, num_pieces = pieces.acc.shape[:2]
    rows = 1 if num_rows <= 2048 else 4
    merge_kernel[(triton.cdiv(num_rows, rows),)](
        pieces.acc, pieces.stats, pieces.index_T, out_THc, num_rows, num_pieces, pieces.num_heads,
        ROWS=rows, PDL=dependent, **pieces.constants, **launch_options(dependent),
    )  # fmt: skip
    return out_THc


def merge_values(pieces: Pieces, weight_HVc: Tensor, dependent: bool) -> Tensor:
    """Return the values of each head, [T, H, V]; the attention between is rounded to the weight's type."""
    num_heads, num_values = weight_HVc.shape[:2]
    num_tokens = pieces.index_T.shape[0]
    assert weight_HVc.stride(2) == 1
    out = weight_HVc.new_empty(num_tokens, num_heads, num_values)
    instruction = matrix_instruction(architecture_of(out.device))
    rows, block = 16 if instruction else 8, 64 if num_tokens <= _FEW_TOKENS or instruction else 128
    values_kernel[(triton.cdiv(num_values, block), num_heads, triton.cdiv(num_tokens, rows))](
        pieces.acc, pieces.stats, pieces.index_T, weight_HVc, out, num_tokens, pieces.acc.shape[1], num_heads,
        num_values, weight_HVc.stride(0), weight_HVc.stride(1), ROWS=rows, BLOCK_V=block, PDL=dependent, num_warps=8,
        **pieces.constants, **launch_options(dependent, instruction),
    )  # fmt: skip
    return out
