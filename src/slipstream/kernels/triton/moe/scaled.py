"""Products of MXFP4 rows with MXFP4 experts on matrix units that read both as they are stored (gfx950).

Codes stay packed two to a byte and scales stay bytes: nothing is widened, and a row is a quarter of its bfloat16 form.
"""
# Triton gives kernel arguments their types when it compiles, so Python has none to check.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# ruff: noqa: ANN001, ANN201, PLR0913

import triton
import triton.language as tl

from slipstream.kernels.triton.launch import show_copies, wait_for_inputs
from slipstream.kernels.triton.moe.grouped_gemm import tile_of

_GROUP_BYTES = tl.constexpr(16)
_FORMAT = tl.constexpr("e2m1")


@triton.jit
def scaled_kernel(x_ptr, w_ptr, x_scale_ptr, w_scale_ptr, tiles_ptr, pairs_ptr, out_ptr, max_tiles, num_pairs, N, HALF,
                  ROWS_PER_INPUT: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_B: tl.constexpr,
                  SPLITS: tl.constexpr, EVEN: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """Multiply listed rows by their experts' weights; sums go to out[split, pair, N]. HALF is the bytes of a row."""
    wait_for_inputs(PDL)
    for tile in range(tl.program_id(1), tl.load(tiles_ptr + 3 * max_tiles), tl.num_programs(1)):
        expert, pairs, real, rows, outputs, split = tile_of(
            tiles_ptr, pairs_ptr, tile, N, ROWS_PER_INPUT, BLOCK_T, BLOCK_N, SPLITS
        )
        byte, group = tl.arange(0, BLOCK_B), tl.arange(0, BLOCK_B // _GROUP_BYTES)
        is_output = outputs < N
        weight_rows = expert * N + outputs.to(tl.int64)
        groups = HALF // _GROUP_BYTES
        w_at = w_ptr + weight_rows[:, None] * HALF + byte[None, :]
        x_at = x_ptr + rows[None, :] * HALF + byte[:, None]
        w_scale_at = w_scale_ptr + weight_rows[:, None] * groups + group[None, :]
        x_scale_at = x_scale_ptr + rows[:, None] * groups + group[None, :]
        acc = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
        stretch = tl.cdiv(tl.cdiv(HALF, BLOCK_B), SPLITS) * BLOCK_B
        first = split * stretch
        for start in range(first, tl.minimum(first + stretch, HALF), BLOCK_B):
            first_group = start // _GROUP_BYTES
            if EVEN:
                w = tl.load(w_at + start)
                x = tl.load(x_at + start, mask=real[None, :], other=0)
                w_scale = tl.load(w_scale_at + first_group)
                x_scale = tl.load(x_scale_at + first_group, mask=real[:, None], other=0)
            else:  # past the end codes are zeros, whatever their scale
                inside, group_inside = start + byte < HALF, first_group + group < groups
                w = tl.load(w_at + start, mask=is_output[:, None] & inside[None, :], other=0)
                x = tl.load(x_at + start, mask=real[None, :] & inside[:, None], other=0)
                w_scale = tl.load(w_scale_at + first_group, mask=is_output[:, None] & group_inside[None, :], other=0)
                x_scale = tl.load(x_scale_at + first_group, mask=real[:, None] & group_inside[None, :], other=0)
            show_copies(PDL)
            acc = tl.dot_scaled(w, w_scale, _FORMAT, x, x_scale, _FORMAT, acc)
        at = (split.to(tl.int64) * num_pairs + pairs)[None, :] * N + outputs[:, None]
        tl.store(out_ptr + at, acc, mask=is_output[:, None] & real[None, :])
