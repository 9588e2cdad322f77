"""Attention over paged latents (MLA, absorbed): each latent is read once for all heads and query tokens of a tile.

Specified by `slipstream.kernels.reference.attention.latent_attention`. Keys are cut in pieces at fixed places, and
pieces are merged in order, so a token's bits depend neither on the batch, nor on the page size, nor on the tokens
checked beside it. Sums are float32; softmax weights are rounded to the latents' type before they multiply latents, and
the output to q's type once, at the end: to nearest, ties to even (not toward zero, as some MLA kernels convert).
"""
# Triton gives kernel arguments their types when it compiles, so Python has none to check.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# ruff: noqa: ANN001, ANN201, ANN202, PLR0913

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.errors import ConfigError, KernelError
from slipstream.kernels.attention_batch import AttentionBatch, KvLayer
from slipstream.kernels.triton.launch import launch_options, prefetch, show_copies, wait_for_inputs
from slipstream.kernels.triton.mla.merge import Pieces, merge
from slipstream.kernels.triton.moe.tiles import shipped
from slipstream.kernels.triton.tuning import architecture_of, matrix_instruction

_TOO_SMALL = ("sm_86", "sm_89", "sm_100", "sm_120")
_LOG2E = 1.4426950408889634


@dataclass(frozen=True)
class LatentTiles:
    """Tiles of latent attention, and how keys are cut in pieces, which is part of the bits.

    Args:
        near: keys of each piece among the first `near_keys`, where programs are few; `split` keys of each one beyond.
        block: keys a step; with `ahead` those of the step after the next are prefetched meanwhile (CUDA only).
        rows: (token, head) rows of a tile at most; 8 heads of a rank times 4 tokens of a verified chain are 32.
    """

    near: int = 64
    near_keys: int = 1024
    split: int = 512
    block: int = 64
    rows: int = 32
    warps: int = 8
    stages: int = 2
    ahead: bool = True

    def __post_init__(self) -> None:
        if self.near_keys % self.near or self.near % self.block or self.split % self.block:
            raise ConfigError("Pieces are whole blocks: near and split are multiples of block, near_keys of near.")

    @property
    def cut(self) -> tuple[int, int, int]:
        """How keys are cut: keys of a near piece, keys that are near, keys of a piece beyond."""
        return self.near, self.near_keys, self.split

    def pieces(self, num_keys: int) -> int:
        """Return how many pieces so many keys are cut in."""
        near, far = min(num_keys, self.near_keys), max(num_keys - self.near_keys, 0)
        return -(-near // self.near) + -(-far // self.split)


@triton.jit
def _columns(latent_ptr, slots, known, FROM: tl.constexpr, WIDTH: tl.constexpr, WIDTH_P: tl.constexpr,
             STRIDE: tl.constexpr):  # fmt: skip
    """Return WIDTH columns of some latents from FROM on, zeros where there is no key."""
    column = tl.arange(0, WIDTH_P)
    at = latent_ptr + slots[:, None] * STRIDE + (FROM + column)[None, :]
    return tl.load(at, mask=known[:, None] & (column < WIDTH)[None, :], other=0.0)


@triton.jit
def _query(q_at, real, FROM: tl.constexpr, WIDTH: tl.constexpr, WIDTH_P: tl.constexpr):
    """Return WIDTH columns of the tile's queries from FROM on, [columns, rows]."""
    column = tl.arange(0, WIDTH_P)
    at = q_at[None, :] + (FROM + column)[:, None]
    return tl.load(at, mask=real[None, :] & (column < WIDTH)[:, None], other=0.0)


@triton.jit
def _prefetch_latents(latent_ptr, first_slot, BLOCK: tl.constexpr, STRIDE: tl.constexpr):
    """Prefetch a block of latents that lie one behind the other to L2."""
    line: tl.constexpr = 128 // (latent_ptr.dtype.element_ty.primitive_bitwidth // 8)
    lines = tl.minimum(tl.arange(0, 16) * line, STRIDE - 1)
    prefetch(latent_ptr + first_slot * STRIDE + (tl.arange(0, BLOCK)[:, None] * STRIDE + lines[None, :]))


@triton.jit
def _page(table_at, start, end, page_size):
    return tl.load(table_at + start // page_size, mask=start < end, other=0).to(tl.int64)


@triton.jit
def _bounds(piece, kv_len, NEAR: tl.constexpr, NEAR_KEYS: tl.constexpr, SPLIT: tl.constexpr):
    """Return the first key of a piece and the one behind its last."""
    near_pieces: tl.constexpr = NEAR_KEYS // NEAR
    is_near = piece < near_pieces
    first = tl.where(is_near, piece * NEAR, NEAR_KEYS + (piece - near_pieces) * SPLIT)
    return first, tl.minimum(first + tl.where(is_near, NEAR, SPLIT), kv_len)


@triton.jit
def _sums(weight, dtype: tl.constexpr):
    """Return each row's sum over a block of keys, in an order that does not depend on how many rows the tile has.

    The matrix instructions of 16-bit latents leave keys to the same threads in tiles of any width, and so to one order.
    Float32 is multiplied number by number, keys in turn, but spread over threads as the tile's shape has it: there a
    product with ones is the sum whose order is fixed.
    """
    if dtype == tl.float32:
        ones = tl.full([16, weight.shape[0]], 1.0, tl.float32)
        sums = tl.max(tl.dot(ones, weight, input_precision="ieee"), 0)
    else:
        sums = tl.sum(weight, 0)
    return sums


@triton.jit
def _weights(scores, key, own_key, ancestors, best, total, dtype: tl.constexpr):
    """Return a block's weights, what sums so far shrink by, and each row's best score and total with the block."""
    distance = own_key[None, :] - key[:, None]
    bit = (ancestors[None, :] >> tl.minimum(tl.maximum(distance, 0), 63).to(tl.int64)) & 1
    visible = (distance >= 0) & ((distance > 63) | (bit == 1))
    scores = tl.where(visible, scores, float("-inf"))
    new_best = tl.maximum(best, tl.max(scores, 0))
    level = tl.where(new_best == float("-inf"), 0.0, new_best)  # a row may see nothing of a piece
    shrink = tl.exp2(best - level)
    weight = tl.exp2(scores - level[None, :])
    return weight, shrink, new_best, total * shrink + _sums(weight, dtype)


@triton.jit
def partial_kernel(q_ptr, latent_ptr, table_ptr, starts_ptr, lens_ptr, index_ptr, ancestors_ptr, acc_ptr, stats_ptr,
                   scale, table_width, page_size, num_pieces, H, WIDTH: tl.constexpr, ROPE: tl.constexpr,
                   WIDTH_P: tl.constexpr, ROPE_P: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
                   NEAR: tl.constexpr, NEAR_KEYS: tl.constexpr, SPLIT: tl.constexpr,
                   STRIDE: tl.constexpr, ONE_PAGE: tl.constexpr, AHEAD: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """Attend the rows of one tile over one piece of keys; latents are the left side, rows the right, of each product.

    `scale` is in base 2. The first WIDTH columns of a latent are both key and value; ROPE further ones are key only.
    """
    wait_for_inputs(PDL)
    piece = num_pieces - 1 - tl.program_id(0)  # the long ones first
    request = tl.program_id(1)
    first_token = tl.load(starts_ptr + request)
    num_rows = (tl.load(starts_ptr + request + 1) - first_token) * H
    kv_len = tl.load(lens_ptr + request)
    first, end = _bounds(piece, kv_len, NEAR, NEAR_KEYS, SPLIT)
    if (tl.program_id(2) * ROWS >= num_rows) | (first >= kv_len):
        return
    lane = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    real = lane < num_rows
    token = first_token + lane // H
    row = (first_token * H + lane).to(tl.int64)
    own_key = tl.load(index_ptr + token, mask=real, other=-1).to(tl.int32)
    ancestors = tl.load(ancestors_ptr + token, mask=real, other=0).to(tl.int64)
    table_at = table_ptr + request.to(tl.int64) * table_width
    q_at = q_ptr + row * (WIDTH + ROPE)
    q = _query(q_at, real, 0, WIDTH, WIDTH_P)
    q_rope = _query(q_at, real, WIDTH, ROPE, ROPE_P)
    best = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([WIDTH_P, ROWS], tl.float32)
    if ONE_PAGE:
        page = _page(table_at, first, end, page_size)
        next_page = _page(table_at, first + BLOCK, end, page_size)
        far_page = _page(table_at, first + 2 * BLOCK, end, page_size)
        if AHEAD:
            _prefetch_latents(latent_ptr, next_page * page_size + (first + BLOCK) % page_size, BLOCK, STRIDE)
    for start in range(first, end, BLOCK):
        key = start + tl.arange(0, BLOCK)
        known = key < end
        if ONE_PAGE:
            slots = page * page_size + start % page_size + tl.arange(0, BLOCK)
            if AHEAD:  # past the end it is page 0 that is prefetched: harmless, and no branch
                _prefetch_latents(latent_ptr, far_page * page_size + (start + 2 * BLOCK) % page_size, BLOCK, STRIDE)
            page = tl.maximum(next_page, 0)  # plain handing on would keep the compiler from overlapping steps
            next_page = tl.maximum(far_page, 0)
            far_page = _page(table_at, start + 3 * BLOCK, end, page_size)
        else:
            pages = tl.load(table_at + key // page_size, mask=known, other=0)
            slots = pages.to(tl.int64) * page_size + key % page_size
        latent = _columns(latent_ptr, slots, known, 0, WIDTH, WIDTH_P, STRIDE)
        rope = _columns(latent_ptr, slots, known, WIDTH, ROPE, ROPE_P, STRIDE)
        show_copies(PDL)
        scores = tl.dot(latent, q, input_precision="ieee")
        scores = tl.dot(rope, q_rope, scores, input_precision="ieee") * scale
        weight, shrink, best, total = _weights(scores, key, own_key, ancestors, best, total, latent.dtype)
        acc = tl.dot(tl.trans(latent), weight.to(latent.dtype), acc * shrink[None, :], input_precision="ieee")
    out = row * num_pieces + piece
    column = tl.arange(0, WIDTH_P)
    tl.store(acc_ptr + out[None, :] * WIDTH + column[:, None], acc, mask=real[None, :] & (column < WIDTH)[:, None])
    tl.store(stats_ptr + out * 2, best, mask=real)
    tl.store(stats_ptr + out * 2 + 1, total, mask=real)


def latent_attention(
    q_THC: Tensor,
    layer: KvLayer,
    batch: AttentionBatch,
    scale: float,
    value_width: int,
    tiles: LatentTiles | None = None,
    dependent: bool = False,
) -> Tensor:
    """Attend absorbed queries [T, H, C] over the latents each may see: [T, H, value_width]."""
    pieces = attend_pieces(q_THC, layer, batch, scale, value_width, tiles, dependent)
    return merge(pieces, q_THC.new_empty(*q_THC.shape[:2], value_width), dependent)


def attend_pieces(
    q_THC: Tensor,
    layer: KvLayer,
    batch: AttentionBatch,
    scale: float,
    value_width: int,
    tiles: LatentTiles | None = None,
    dependent: bool = False,
) -> Pieces:
    """Attend absorbed queries [T, H, C] over each piece of the latents by itself."""
    batch = batch if batch.tree is None else batch.by_node
    num_tokens, num_heads, width = q_THC.shape
    num_requests, table_width = batch.page_table_RP.shape
    architecture = architecture_of(q_THC.device)
    if architecture in _TOO_SMALL:
        raise KernelError(
            f"The tiles of latent attention (MLA) do not fit the shared memory of {architecture} yet. Choose the "
            "'reference' kernels for it."
        )
    tiles = tiles or shipped_tiles(architecture)
    max_keys = table_width * batch.page_size if batch.max_keys is None else batch.max_keys
    num_pieces = max(1, tiles.pieces(max_keys))
    device = q_THC.device
    acc = torch.empty(num_tokens * num_heads, num_pieces, value_width, dtype=torch.float32, device=device)
    stats = torch.empty(num_tokens * num_heads, num_pieces, 2, dtype=torch.float32, device=device)
    index_T = batch.kv_index_T.contiguous()
    # Without a bound from the host, one request might hold all tokens of the pass.
    max_rows = num_heads * (num_tokens if batch.max_queries is None else batch.max_queries)
    rows = min(tiles.rows, max(16, triton.next_power_of_2(max_rows)))
    partial_kernel[(num_pieces, num_requests, triton.cdiv(max_rows, rows))](
        q_THC.contiguous(), layer.keys_SGd, batch.page_table_RP.contiguous(), batch.query_starts_R1, batch.kv_lens_R,
        index_T, batch.ancestors_T.contiguous(), acc, stats, scale * _LOG2E, table_width, batch.page_size, num_pieces,
        num_heads, **_widths(value_width, width - value_width), ROWS=rows, BLOCK=tiles.block, NEAR=tiles.near,
        NEAR_KEYS=tiles.near_keys, SPLIT=tiles.split, STRIDE=layer.keys_SGd.stride(0),
        ONE_PAGE=batch.page_size % tiles.block == 0, AHEAD=tiles.ahead and architecture.startswith("sm_"),
        num_warps=tiles.warps, num_stages=tiles.stages, PDL=dependent,
        **launch_options(dependent, matrix_instruction(architecture)),
    )  # fmt: skip
    return Pieces(acc, stats, index_T, num_heads, tiles.cut)


def _widths(value_width: int, rope_width: int) -> dict[str, int]:
    """Return how the columns of a latent are cut for the matrix instructions."""
    padded, rope = (max(16, int(triton.next_power_of_2(width))) for width in (value_width, rope_width))
    return {"WIDTH": value_width, "ROPE": rope_width, "WIDTH_P": padded, "ROPE_P": rope}


def shipped_tiles(architecture: str) -> LatentTiles:
    """Return the tiles that ship for an architecture."""
    return LatentTiles(**shipped(architecture)["latent_attention"])
