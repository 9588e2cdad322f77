"""How products of 1 to 4 rows end (`hopper_gemv`): what `small_m` does with its sums, bit for bit."""
# Gluon gives kernel arguments their types when it compiles, so Python has none to check.
# mypy: disable-error-code="no-untyped-def,untyped-decorator,misc,assignment"
# ruff: noqa: ANN001, ANN201, ANN202, PLR0913

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from slipstream.kernels.triton.gluon_compat import thread_barrier

WARPS = gl.constexpr(4)


@gluon.constexpr_function
def end_layout():
    """Return how sums [outputs, tokens] lie in threads when they are finished."""
    return gl.BlockedLayout([1, 1], [32, 1], [WARPS.value, 1], [0, 1])


@gluon.jit
def weight_row(j, part, N, END: gl.constexpr, HALF: gl.constexpr):
    """Return the weight rows of outputs or pairs `j`; parts are gates and `up`, or values and those they turn with."""
    if END == "rope":
        row = j // HALF * (2 * HALF) + j % HALF + part * HALF
    elif END == "silu":
        row = part * (N // 2) + j
    else:
        row = j
    return row


@gluon.jit
def _added(sums, part: gl.constexpr, BLOCK_N: gl.constexpr, SEG: gl.constexpr, SLICES: gl.constexpr, MP: gl.constexpr):
    """Return a part's sums [SEG, MP]: splits, where their weights multiplied their own columns, added in order."""
    E: gl.constexpr = end_layout()
    total = sums.slice(part * BLOCK_N, SEG).slice(0, MP, 1).load(E)
    for piece in gl.static_range(1, SLICES):
        total += sums.slice(part * BLOCK_N + piece * SEG, SEG).slice(piece * MP, MP, 1).load(E)
    return total


@gluon.jit
def finished_sums(
    one, two, store, BLOCK_N: gl.constexpr, SEG: gl.constexpr, SLICES: gl.constexpr, PARTS: gl.constexpr,
    MP: gl.constexpr,
):  # fmt: skip
    """Return the sums of both parts [SEG, MP], through shared memory that nobody reads any more."""
    thread_barrier()
    store.slice(0, BLOCK_N).store(one)
    if PARTS == 2:
        store.slice(BLOCK_N, BLOCK_N).store(two)
    thread_barrier()
    first = _added(store, 0, BLOCK_N, SEG, SLICES, MP)
    second = first
    if PARTS == 2:
        second = _added(store, 1, BLOCK_N, SEG, SLICES, MP)
    return first, second


@gluon.jit
def biased(total, bias_ptr, j, part, N, END: gl.constexpr, HALF: gl.constexpr, HAS_BIAS: gl.constexpr):
    """Return sums with their rows' bias, if they have one."""
    if HAS_BIAS:
        total += gl.load(bias_ptr + gl.minimum(weight_row(j, part, N, END, HALF), N - 1)).to(gl.float32)[:, None]
    return total


@gluon.jit
def _leave(
    out, real, tile, leave_ptr, M, N, SEG: gl.constexpr, OWN: gl.constexpr, MP: gl.constexpr, LEAVES: gl.constexpr,
    LEVELS: gl.constexpr,
):  # fmt: skip
    """Store what the next kernel wants to know of outputs [SEG, MP]; those that are not real count as zeros."""
    kept = gl.where(real, out, 0.0).to(gl.float32)
    if LEAVES == "squares":
        sums = kept * kept
        for _ in gl.static_range(LEVELS):
            sums = gl.sum(sums.reshape([sums.shape[0] // 2, 2, MP]), 1)
        LAYOUT: gl.constexpr = sums.type.layout
        own = gl.arange(0, SEG >> LEVELS, gl.SliceLayout(1, LAYOUT))
        part, token = tile * (OWN >> LEVELS) + own, gl.arange(0, MP, gl.SliceLayout(0, LAYOUT))
        count = (N + (1 << LEVELS) - 1) >> LEVELS
        there = (token < M)[None, :] & ((part < count) & (own < (OWN >> LEVELS)))[:, None]
        gl.store(leave_ptr + token[None, :] * count + part[:, None], sums, mask=there)
    else:
        found = gl.max(gl.abs(kept), 0)
        token = gl.arange(0, MP, found.type.layout)
        gl.store(leave_ptr + token * gl.num_programs(0) + tile, found, mask=token < M)


@gluon.jit
def end_plain(
    first, second, residual, tile, y_ptr, leave_ptr, M, N, y_stride, SEG: gl.constexpr, OWN: gl.constexpr,
    MP: gl.constexpr, END: gl.constexpr, HAS_RESIDUAL: gl.constexpr, LEAVES: gl.constexpr, LEVELS: gl.constexpr,
):  # fmt: skip
    """Store outputs, or SiLU(first) * second, as `split_k.store_outputs` does."""
    E: gl.constexpr = end_layout()
    dtype: gl.constexpr = y_ptr.dtype.element_ty
    num_outputs = N
    if END == "silu":
        num_outputs = N // 2
        gate = first.to(dtype).to(gl.float32)
        silu = (gate / (1.0 + gl.exp(-gate))).to(dtype).to(gl.float32)
        first = silu * second.to(dtype).to(gl.float32)
    out = first.to(dtype)
    token = gl.arange(0, MP, gl.SliceLayout(0, E))[None, :]
    n = (tile * OWN + gl.arange(0, SEG, gl.SliceLayout(1, E)))[:, None]
    real = (token < M) & (n < gl.minimum((tile + 1) * OWN, num_outputs))
    if HAS_RESIDUAL:
        out = (out.to(gl.float32) + residual.to(gl.float32)).to(dtype)
    gl.store(y_ptr + token * y_stride + n, out, mask=real)
    if LEAVES != "none":
        _leave(out, real, tile, leave_ptr, M, N, SEG, OWN, MP, LEAVES, LEVELS)


@gluon.jit
def places(slots_ptr, positions_ptr, M, MP: gl.constexpr):
    """Return each token's slot and position."""
    E: gl.constexpr = end_layout()
    token = gl.arange(0, MP, gl.SliceLayout(0, E))
    slot = gl.load(slots_ptr + token, mask=token < M, other=0).to(gl.int64)
    return slot, gl.load(positions_ptr + token, mask=token < M, other=0).to(gl.int64)


@gluon.jit
def angles(position, tile, cos_ptr, sin_ptr, SEG: gl.constexpr, OWN: gl.constexpr, HALF: gl.constexpr):
    """Return the angles of a tile's pairs at tokens' positions [SEG, MP]."""
    E: gl.constexpr = end_layout()
    column = (tile * OWN + gl.arange(0, SEG, gl.SliceLayout(1, E))) % HALF
    angle = position[None, :] * HALF + column[:, None]
    return gl.load(cos_ptr + angle), gl.load(sin_ptr + angle)


@gluon.jit
def _store_halves(at, first, second, mask, HALF: gl.constexpr):
    gl.store(at, first, mask=mask)
    gl.store(at + HALF, second, mask=mask)


@gluon.jit
def end_rope(
    first, second, slot, cos, sin, tile, q_ptr, keys_ptr, values_ptr, M, N, q_stride, slot_stride,
    SEG: gl.constexpr, OWN: gl.constexpr, MP: gl.constexpr, HEADS: gl.constexpr, GROUPS: gl.constexpr,
    HALF: gl.constexpr,
):  # fmt: skip
    """Rotate and store queries, rotate and write keys, write values, as `narrow_rope.rotate_and_store` does."""
    E: gl.constexpr = end_layout()
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    first, second = first.to(dtype), second.to(dtype)
    pair = tile * OWN + gl.arange(0, SEG, gl.SliceLayout(1, E))
    head, column = (pair // HALF)[:, None], (pair % HALF)[:, None]
    x, partner = first.to(gl.float32), second.to(gl.float32)
    is_turned = head < HEADS + GROUPS
    first = gl.where(is_turned, (x * cos + -1.0 * partner * sin).to(dtype), first)
    second = gl.where(is_turned, (partner * cos + 1.0 * x * sin).to(dtype), second)
    token = gl.arange(0, MP, gl.SliceLayout(0, E))
    real = (token < M)[None, :] & (pair < gl.minimum((tile + 1) * OWN, N // 2))[:, None]
    q_at = q_ptr + token.to(gl.int64)[None, :] * q_stride + head * (2 * HALF) + column
    written = slot[None, :] * slot_stride + column
    k_at = keys_ptr + written + (head - HEADS) * (2 * HALF)
    v_at = values_ptr + written + (head - HEADS - GROUPS) * (2 * HALF)
    _store_halves(q_at, first, second, real & (head < HEADS), HALF)
    _store_halves(k_at, first, second, real & (head >= HEADS) & is_turned, HALF)
    _store_halves(v_at, first, second, real & (head >= HEADS + GROUPS), HALF)
