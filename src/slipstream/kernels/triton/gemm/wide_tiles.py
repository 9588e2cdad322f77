"""The kernel of products whose programs take all rows of a pass: pieces of a token tile, times one weight tile or two.

A token tile is one or two pieces whose widths are powers of two, 128 + 32 for 160 rows: the weight tile is multiplied
by each in turn, and no column is computed for rows that are not there. A pair of weight tiles shares the rows' tile
likewise; with SiLU they are gates and the rows `up` of the same outputs. Columns are added in the order of
`slipstream.kernels.triton.gemm.split_k`: the same splits, the same steps, the same matrix instruction.
"""
# Triton gives kernel arguments their types when it compiles, so Python has none to check.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# ruff: noqa: ANN001, ANN201, ANN202, PLR0913, SIM108

import triton
import triton.language as tl

from slipstream.kernels.triton.gemm.split_k import prefetch_rows
from slipstream.kernels.triton.launch import arrived_last, show_copies, wait_for_inputs, wait_then_let_start


@triton.jit
def _zeros(N: tl.constexpr, M: tl.constexpr, KIND: tl.constexpr):
    if KIND == "int8":
        zeros = tl.zeros([N, M], tl.int32)
    else:
        zeros = tl.zeros([N, M], tl.float32)
    return zeros


@triton.jit
def _dot(w, x, acc, KIND: tl.constexpr, COPIED: tl.constexpr):
    """Add the product of weights [N, K] and rows [M, K] to sums [N, M], as `split_k` does; without sums return it."""
    x = tl.trans(x)
    show_copies(COPIED)
    if acc is None:
        acc = tl.dot(w, x, out_dtype=tl.float32)
    elif KIND == "int8":
        acc = tl.dot(w, x, acc, out_dtype=tl.int32)
    elif KIND == "fp8":
        K: tl.constexpr = w.shape[1]
        acc = tl.dot(w, x, acc, max_num_imprecise_acc=128 if K > 128 else K)
    elif KIND == "fp8_upcast":
        acc = tl.dot(w.to(tl.bfloat16), x.to(tl.bfloat16), acc)
    else:
        acc = tl.dot(w, x, acc, input_precision="ieee")
    return acc


@triton.jit
def _tile(
    source, first, row_end, stride, k, K, ROWS: tl.constexpr, BLOCK_K: tl.constexpr, TMA: tl.constexpr,
    EVEN_K: tl.constexpr,
):  # fmt: skip
    """Load rows [ROWS, BLOCK_K] from `first` on; rows from `row_end` on and columns from K on are zeros."""
    if TMA:
        tile = source.load([first, k])
    else:
        rows = first + tl.arange(0, ROWS)
        columns = k + tl.arange(0, BLOCK_K)
        at = source + rows.to(tl.int64)[:, None] * stride + columns[None, :]
        real = (rows < row_end)[:, None]
        if not EVEN_K:
            real = real & (columns < K)[None, :]
        tile = tl.load(at, mask=real, other=0.0)
    return tile


@triton.jit
def _keep(part, partial_ptr, at, N: tl.constexpr, M: tl.constexpr):
    inside = tl.arange(0, N)[:, None] * M + tl.arange(0, M)[None, :]
    tl.store(partial_ptr + at + inside, part)


@triton.jit
def _leave(part, partial_ptr, m_first, n_first, split, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Store partial sums [BLOCK_N, BLOCK_M] where the kernel that follows finds them: [splits, M, N]."""
    m = (m_first + tl.arange(0, BLOCK_M)).to(tl.int64)[:, None]
    n = (n_first + tl.arange(0, BLOCK_N))[None, :]
    tl.store(partial_ptr + (split.to(tl.int64) * M + m) * N + n, tl.trans(part), mask=(m < M) & (n < N))


@triton.jit
def _added(
    partial_ptr, at, stride, SPLITS: tl.constexpr, N: tl.constexpr, M: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """Add the splits' parts in their order, for `M` columns of tiles that are `WIDTH` wide."""
    inside = tl.arange(0, N)[:, None] * WIDTH + tl.arange(0, M)[None, :]
    total = tl.load(partial_ptr + at + inside, cache_modifier=".cg")
    for split in tl.static_range(1, SPLITS):
        total += tl.load(partial_ptr + at + split * stride + inside, cache_modifier=".cg")
    return total


@triton.jit
def _scaled(
    total, m_first, n_first, x_scale_ptr, w_scale_ptr, bias_ptr, M, N,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, KIND: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """Scale the sums of codes, then add the bias."""
    rows_N = tl.minimum(n_first + tl.arange(0, BLOCK_N), N - 1)
    total = total.to(tl.float32)
    if KIND != "dense":
        x_scale = tl.load(x_scale_ptr + tl.minimum(m_first + tl.arange(0, BLOCK_M), M - 1))
        total = total * (x_scale[None, :] * tl.load(w_scale_ptr + rows_N)[:, None])
    if HAS_BIAS:
        total += tl.load(bias_ptr + rows_N).to(tl.float32)[:, None]
    return total


@triton.jit
def _store(
    total, m_first, n_first, residual_ptr, y_ptr, M, num_outputs, residual_stride, y_stride,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
):  # fmt: skip
    """Round numbers [BLOCK_N, BLOCK_M], add the residual and round again, as torch would."""
    dtype = y_ptr.dtype.element_ty
    out = tl.trans(total.to(dtype))
    m = (m_first + tl.arange(0, BLOCK_M)).to(tl.int64)[:, None]
    n = (n_first + tl.arange(0, BLOCK_N))[None, :]
    real = (m < M) & (n < num_outputs)
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptr + m * residual_stride + n, mask=real, other=0.0).to(tl.float32)
        out = (out.to(tl.float32) + residual).to(dtype)
    tl.store(y_ptr + m * y_stride + n, out, mask=real)


@triton.jit
def _gated(gate, up, dtype: tl.constexpr):
    """Return silu(gate) * up, each rounded as torch would."""
    gate = gate.to(dtype).to(tl.float32)
    silu = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    return silu * up.to(dtype).to(tl.float32)


@triton.jit
def _finish_tiles(
    one, two, m_first, n_first, n_second, x_scale_ptr, w_scale_ptr, bias_ptr, residual_ptr, y_ptr, M, N,
    residual_stride, y_stride, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PAIR: tl.constexpr, KIND: tl.constexpr,
    SILU: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
):  # fmt: skip
    """Finish the sums of some rows: those of one weight tile, of two, or of gates and `up`."""
    num_outputs = N // 2 if SILU else N
    one = _scaled(one, m_first, n_first, x_scale_ptr, w_scale_ptr, bias_ptr, M, N, BLOCK_M, BLOCK_N, KIND, HAS_BIAS)
    if PAIR:
        two = _scaled(
            two, m_first, n_second, x_scale_ptr, w_scale_ptr, bias_ptr, M, N, BLOCK_M, BLOCK_N, KIND, HAS_BIAS
        )
    if SILU:
        one = _gated(one, two, y_ptr.dtype.element_ty)
    _store(
        one, m_first, n_first, residual_ptr, y_ptr, M, num_outputs, residual_stride, y_stride, BLOCK_M, BLOCK_N,
        HAS_RESIDUAL,
    )  # fmt: skip
    if PAIR and not SILU:
        _store(
            two, m_first, n_second, residual_ptr, y_ptr, M, num_outputs, residual_stride, y_stride, BLOCK_M, BLOCK_N,
            HAS_RESIDUAL,
        )  # fmt: skip


@triton.jit
def _finish_piece(
    one, two, partial_ptr, at, stride, m_first, n_first, n_second, x_scale_ptr, w_scale_ptr, bias_ptr, residual_ptr,
    y_ptr, M, N, residual_stride, y_stride, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PAIR: tl.constexpr,
    AFTER: tl.constexpr, SPLITS: tl.constexpr, KIND: tl.constexpr, SILU: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
):  # fmt: skip
    """Finish one piece of the rows; splits that were kept are added first, few rows at a time to spare registers.

    Args:
        AFTER: numbers from a kept tile to that of the pair's second.
    """
    if SPLITS == 1:
        _finish_tiles(
            one, two, m_first, n_first, n_second, x_scale_ptr, w_scale_ptr, bias_ptr, residual_ptr, y_ptr, M, N,
            residual_stride, y_stride, BLOCK_M, BLOCK_N, PAIR, KIND, SILU, HAS_BIAS, HAS_RESIDUAL,
        )  # fmt: skip
    else:
        FEW: tl.constexpr = BLOCK_M if BLOCK_M < 32 else 32
        for some in range(BLOCK_M // FEW):
            from_m = some * FEW
            first = _added(partial_ptr, at + from_m, stride, SPLITS, BLOCK_N, FEW, BLOCK_M)
            second = first
            if PAIR:
                second = _added(partial_ptr, at + AFTER + from_m, stride, SPLITS, BLOCK_N, FEW, BLOCK_M)
            _finish_tiles(
                first, second, m_first + from_m, n_first, n_second, x_scale_ptr, w_scale_ptr, bias_ptr, residual_ptr,
                y_ptr, M, N, residual_stride, y_stride, FEW, BLOCK_N, PAIR, KIND, SILU, HAS_BIAS, HAS_RESIDUAL,
            )  # fmt: skip


@triton.jit
def _multiply_split(
    x_first, x_second, w_tiles, m_first, n_first, n_second, M, N, K, x_stride, split, steps,
    FIRST: tl.constexpr, SECOND: tl.constexpr, BLOCK_N: tl.constexpr, PAIR: tl.constexpr, BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr, TMA: tl.constexpr, KIND: tl.constexpr, PDL: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """Multiply one split of K, `steps` tiles long: the first piece of the rows and the rest, by both tiles."""
    REST: tl.constexpr = SECOND if SECOND > 0 else 16
    one, one_rest = _zeros(BLOCK_N, FIRST, KIND), _zeros(BLOCK_N, REST, KIND)
    two, two_rest = _zeros(BLOCK_N, FIRST, KIND), _zeros(BLOCK_N, REST, KIND)
    for step in range(steps):
        k = (split * steps + step) * BLOCK_K
        w = _tile(w_tiles, n_first, N, K, k, K, BLOCK_N, BLOCK_K, TMA, EVEN_K)
        x = _tile(x_first, m_first, M, x_stride, k, K, FIRST, BLOCK_K, TMA, EVEN_K)
        if TOGETHER:
            rest, w_other = x, w
            if SECOND > 0:
                rest = _tile(x_second, m_first + FIRST, M, x_stride, k, K, SECOND, BLOCK_K, TMA, EVEN_K)
            if PAIR:
                w_other = _tile(w_tiles, n_second, N, K, k, K, BLOCK_N, BLOCK_K, TMA, EVEN_K)
            one, one_rest = _by_pieces(w, x, rest, one, one_rest, SECOND, KIND, PDL and not TMA)
            if PAIR:
                two, two_rest = _by_pieces(w_other, x, rest, two, two_rest, SECOND, KIND, PDL and not TMA)
        else:
            one = _dot(w, x, one, KIND, PDL and not TMA)
            if SECOND > 0:
                rest = _tile(x_second, m_first + FIRST, M, x_stride, k, K, SECOND, BLOCK_K, TMA, EVEN_K)
                one_rest = _dot(w, rest, one_rest, KIND, PDL and not TMA)
            if PAIR:
                w = _tile(w_tiles, n_second, N, K, k, K, BLOCK_N, BLOCK_K, TMA, EVEN_K)
                two = _dot(w, x, two, KIND, PDL and not TMA)
                if SECOND > 0:
                    two_rest = _dot(w, rest, two_rest, KIND, PDL and not TMA)
    return one, one_rest, two, two_rest


@triton.jit
def _by_pieces(w, x, rest, sums, sums_rest, SECOND: tl.constexpr, KIND: tl.constexpr, COPIED: tl.constexpr):
    """Add the products of a weight tile with both pieces of the rows to their sums.

    A step's FP8 products are whole before they are added, a piece's while the next is multiplied. Where the compiler
    does that addition, each piece is waited for, and in wide tiles each instruction of it.
    """
    if KIND == "fp8":
        part = _dot(w, x, None, KIND, COPIED)
        if SECOND > 0:
            part_rest = _dot(w, rest, None, KIND, COPIED)
        sums += part
        if SECOND > 0:
            sums_rest += part_rest
    else:
        sums = _dot(w, x, sums, KIND, COPIED)
        if SECOND > 0:
            sums_rest = _dot(w, rest, sums_rest, KIND, COPIED)
    return sums, sums_rest


@triton.jit
def _keep_pieces(
    first, second, partial_ptr, at, FIRST: tl.constexpr, SECOND: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """Keep the sums of one weight tile, with both pieces of the token tile."""
    _keep(first, partial_ptr, at, BLOCK_N, FIRST)
    if SECOND > 0:
        _keep(second, partial_ptr, at + BLOCK_N * FIRST, BLOCK_N, SECOND)


@triton.jit
def _leave_pieces(
    first, second, partial_ptr, m_first, n, split, M, N,
    FIRST: tl.constexpr, SECOND: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Leave the sums of one weight tile, with both pieces of the token tile."""
    _leave(first, partial_ptr, m_first, n, split, M, N, FIRST, BLOCK_N)
    if SECOND > 0:
        _leave(second, partial_ptr, m_first + FIRST, n, split, M, N, SECOND, BLOCK_N)


@triton.jit
def _prefetch(w_ptr, n, k_from, N, K, BLOCK_N: tl.constexpr):
    """Prefetch the first lines of one weight tile."""
    LINE: tl.constexpr = 128 // (w_ptr.dtype.element_ty.primitive_bitwidth // 8)
    rows_N = tl.minimum(n + tl.arange(0, BLOCK_N), N - 1).to(tl.int64)[:, None]
    prefetch_rows(w_ptr + rows_N * K, k_from, K, LINE)


@triton.jit(do_not_specialize=["M", "steps"])
def wide_kernel(
    x_first, x_second, w_tiles, w_ptr, x_scale_ptr, w_scale_ptr, bias_ptr, residual_ptr, y_ptr, partial_ptr,
    counter_ptr, M, N, K, steps, x_stride, residual_stride, y_stride,
    FIRST: tl.constexpr, SECOND: tl.constexpr, BLOCK_N: tl.constexpr, PAIR: tl.constexpr, BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr, DEFERRED: tl.constexpr, EVEN_K: tl.constexpr, TMA: tl.constexpr,
    KIND: tl.constexpr, SILU: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, PREFETCH: tl.constexpr,
    TOGETHER: tl.constexpr, WAITS_FIRST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Multiply all rows by one weight tile or a pair, over one split of K; the last of a tile adds them up.

    With DEFERRED nobody does: sums stay as they are, for the kernel that follows. With WAITS_FIRST that one starts only
    once the inputs are there here.
    """
    n_tile, m_tile, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    REST: tl.constexpr = SECOND if SECOND > 0 else 16
    m_first = m_tile * (FIRST + SECOND)
    m_second = m_first + FIRST
    num_outputs = N // 2 if SILU else N
    WIDTH: tl.constexpr = BLOCK_N if SILU or not PAIR else 2 * BLOCK_N
    n_first = n_tile * WIDTH
    n_second = n_first + (num_outputs if SILU else BLOCK_N)
    if PDL and PREFETCH:
        _prefetch(w_ptr, n_first, split * steps * BLOCK_K, N, K, BLOCK_N)
        if PAIR:
            _prefetch(w_ptr, n_second, split * steps * BLOCK_K, N, K, BLOCK_N)
    if WAITS_FIRST:
        wait_then_let_start(PDL)
    else:
        wait_for_inputs(PDL)
    one, one_rest, two, two_rest = _multiply_split(
        x_first, x_second, w_tiles, m_first, n_first, n_second, M, N, K, x_stride, split, steps,
        FIRST, SECOND, BLOCK_N, PAIR, BLOCK_K, EVEN_K, TMA, KIND, PDL, TOGETHER,
    )  # fmt: skip
    finished = not DEFERRED
    TILES: tl.constexpr = 2 if PAIR else 1
    AFTER_ONE: tl.constexpr = BLOCK_N * FIRST
    AFTER_REST: tl.constexpr = BLOCK_N * (FIRST + SECOND)
    tile = m_tile * tl.num_programs(0) + n_tile
    stride = (tl.num_programs(0) * tl.num_programs(1)).to(tl.int64) * (TILES * AFTER_REST)
    at = tile.to(tl.int64) * (TILES * AFTER_REST)
    if DEFERRED:
        _leave_pieces(one, one_rest, partial_ptr, m_first, n_first, split, M, N, FIRST, SECOND, BLOCK_N)
        if PAIR:
            _leave_pieces(two, two_rest, partial_ptr, m_first, n_second, split, M, N, FIRST, SECOND, BLOCK_N)
    elif SPLITS > 1:
        own = at + split * stride
        _keep_pieces(one, one_rest, partial_ptr, own, FIRST, SECOND, BLOCK_N)
        if PAIR:
            _keep_pieces(two, two_rest, partial_ptr, own + AFTER_REST, FIRST, SECOND, BLOCK_N)
        finished = arrived_last(counter_ptr + tile, SPLITS)
    if finished:
        _finish_piece(
            one, two, partial_ptr, at, stride, m_first, n_first, n_second, x_scale_ptr, w_scale_ptr, bias_ptr,
            residual_ptr, y_ptr, M, N, residual_stride, y_stride, FIRST, BLOCK_N, PAIR, AFTER_REST, SPLITS, KIND, SILU,
            HAS_BIAS, HAS_RESIDUAL,
        )  # fmt: skip
        if SECOND > 0:
            _finish_piece(
                one_rest, two_rest, partial_ptr, at + AFTER_ONE, stride, m_second, n_first, n_second, x_scale_ptr,
                w_scale_ptr, bias_ptr, residual_ptr, y_ptr, M, N, residual_stride, y_stride, REST, BLOCK_N, PAIR,
                AFTER_REST, SPLITS, KIND, SILU, HAS_BIAS, HAS_RESIDUAL,
            )  # fmt: skip
