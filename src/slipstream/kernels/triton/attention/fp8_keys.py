"""FP8 keys and values as operands of a BF16 MMA, for `persistent_ws`: read as pairs of codes, widened in registers.

Matrix instructions of 16-bit numbers have loads of their own (ldmatrix), those of bytes have none that transpose. So
codes are loaded two by two, as if a pair were one number, and the pairs taken apart: E4M3 moved into the bits of BF16
is the number times 2^-120, and one multiplication by 2^120 makes it right, subnormals too. Sums have the order of BF16
keys: the sixteen products of an instruction are those of sixteen columns, whose order among themselves is free.
"""
# Gluon gives kernel arguments their types when it compiles, so Python has none to check.
# mypy: disable-error-code="no-untyped-def,untyped-decorator,misc"
# ruff: noqa: ANN001, ANN201, ANN202

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

SCALE_BYTES = gl.constexpr(128)  # of a box of scales: what TMA aligns boxes to; a page's come first


@gluon.jit
def _widen(pairs, FIRST: gl.constexpr, SECOND: gl.constexpr):
    """Return four codes as BF16, two and two.

    Args:
        pairs: int16, two codes each; two neighbours of a thread lie in one register.
        FIRST, SECOND: which bytes of that register each result is made of, each above a byte of zeros (PRMT).
    """
    return gl.inline_asm_elementwise(
        "{ .reg .b32 a, b, s, t;"
        f" prmt.b32 a, $2, 0, {FIRST}; prmt.b32 b, $2, 0, {SECOND};"
        " shr.u32 s, a, 4; shr.u32 t, b, 4;"
        " lop3.b32 s, s, 0x07f007f0, 0, 0xc0; lop3.b32 t, t, 0x07f007f0, 0, 0xc0;"
        " lop3.b32 s, a, 0x80008000, s, 0xea; lop3.b32 t, b, 0x80008000, t, 0xea;"
        " mov.b32 a, 0x7b807b80; mul.rn.bf16x2 $0, s, a; mul.rn.bf16x2 $1, t, a; }",
        "=r,=r,r", [pairs], dtype=(gl.bfloat16, gl.bfloat16), is_pure=True, pack=2,
    )  # fmt: skip


@gluon.jit
def load_keys(pairs, WIDTH: gl.constexpr, BLOCK: gl.constexpr, MATRIX: gl.constexpr):
    """Return keys [WIDTH, BLOCK] as the right operand of q kT.

    Four columns in a row are one thread's, so that the sixteen of an instruction are those of BF16 keys in another
    order: of every four the first two come first.

    Args:
        pairs: in shared memory, int16 [BLOCK, WIDTH / 2].
    """
    four = pairs.permute((1, 0)).load(gl.DotOperandLayout(1, MATRIX, 2))
    first, second = _widen(four, 0x1404, 0x3424)
    keys = gl.join(first, second).reshape([WIDTH // 16, 8, BLOCK, 2]).permute((0, 3, 1, 2)).reshape([WIDTH, BLOCK])
    return gl.convert_layout(keys, gl.DotOperandLayout(1, MATRIX, 2))


@gluon.jit
def load_queries(queries, ROWS: gl.constexpr, WIDTH: gl.constexpr, MATRIX: gl.constexpr):
    """Return queries [ROWS, WIDTH] as the left operand of q kT, their columns in the order of `load_keys`."""
    four = queries.load(gl.DotOperandLayout(0, MATRIX, 4)).reshape([ROWS, WIDTH // 16, 4, 2, 2])
    q = four.permute((0, 1, 3, 2, 4)).reshape([ROWS, WIDTH])
    return gl.convert_layout(q, gl.DotOperandLayout(0, MATRIX, 2))


@gluon.jit
def load_values(pairs, WIDTH: gl.constexpr, BLOCK: gl.constexpr, MATRIX: gl.constexpr):
    """Return values [BLOCK, WIDTH] as the right operand of weights times v: even columns first (`column_of`)."""
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, MATRIX, 2)
    even, odd = _widen(pairs.load(RIGHT), 0x2404, 0x3414)
    values = gl.join(even, odd).permute((0, 2, 1)).reshape([BLOCK, WIDTH])
    return gl.convert_layout(values, RIGHT, assert_trivial=True)


@gluon.jit
def column_of(column, WIDTH: gl.constexpr):
    """Return which column of a head this one of an output is, where values were loaded by `load_values`."""
    return column % (WIDTH // 2) * 2 + column // (WIDTH // 2)


@gluon.constexpr_function
def _scale_layout(block, page):
    """Return the layout [pages, slots] in which a thread has the scales of the keys that it has scores of."""
    key = {power: [power // page, power % page] for power in (1, 2, 4, 8, 16, 32)}
    nothing = [0, 0]
    return gl.DistributedLinearLayout(
        reg_bases=[key[1], key[32]], lane_bases=[key[2], key[4], nothing, nothing, nothing],
        warp_bases=[key[8], key[16]], block_bases=[], shape=[block // page, page],
    )  # fmt: skip


@gluon.jit
def load_scales(boxes, BLOCK: gl.constexpr, PAGE: gl.constexpr, MATRIX: gl.constexpr):
    """Return the scales of a block's keys or values, powers of two: [BLOCK], a number for each column of scores.

    Args:
        boxes: in shared memory, E8M0 [pages, SCALE_BYTES].
    """
    LAYOUT: gl.constexpr = _scale_layout(BLOCK, PAGE)
    codes = boxes.slice(0, PAGE, 1).load(LAYOUT).reshape([BLOCK])
    codes = gl.convert_layout(codes, gl.SliceLayout(0, MATRIX), assert_trivial=True)
    return (codes.to(gl.int32) << 23).to(gl.float32, bitcast=True)
