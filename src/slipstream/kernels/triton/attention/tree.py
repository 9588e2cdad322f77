"""Paged attention for the nodes of draft trees: the keys before a tree are read once for a tile of its nodes.

A node's result is that of plain decoding along its path, bit for bit. Splits lie at fixed positions, so those that end
before the root's are the same for all nodes: a tile of nodes attends to them together. From the root's split on, each
node attends by itself, to the keys of its own path, each at its position. Then every node's results are merged in the
order of splits (see `tile`).

Results lie by node and key head: those of groups of splits first, if programs take groups, then those of splits.

What describes the trees, and the keys before them, were written before the kernel before these: programs look pages
up, and prefetch keys, while that kernel still runs. On Hopper `hopper_tree` attends, and what it leaves is merged here.
"""
# Triton gives kernel arguments their types when it compiles, so Python has none to check.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# ruff: noqa: ANN001, ANN201, ANN202, PLR0913

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.attention_batch import AttentionBatch, KvLayer
from slipstream.kernels.triton.attention.hopper_launch import HOPPER_ROWS, launch_tree, prefill_fits
from slipstream.kernels.triton.attention.merge import merge_group, merge_sixteens, stored_four
from slipstream.kernels.triton.attention.split_kv import load_queries, prefetch_block
from slipstream.kernels.triton.attention.tile import (
    SPLITS_IN_GROUP,
    attend_block,
    key_offsets,
    merge,
    nothing,
)
from slipstream.kernels.triton.launch import let_next_start, wait_for_previous
from slipstream.kernels.triton.tuning import AttentionConfig

_NARROW_ROWS = 16
_MOST_BYTES = 128 << 20
"""Results of groups may take so much; where they would take more, one program merges all groups of a tile."""


@triton.jit
def _path_offsets(
    pages_at, path_at, slot_stride, start, end, root, BLOCK: tl.constexpr, PAGE: tl.constexpr
):  # fmt: skip
    """Return where the keys of a node's path from position `start` on lie; past the end, where the last one does."""
    key = tl.minimum(start + tl.arange(0, BLOCK), end - 1)
    drafted = key > root
    page = tl.load(pages_at + key // PAGE, mask=key <= root, other=0, cache_modifier=".cg").to(tl.int64)
    slot = tl.load(path_at + key - root - 1, mask=drafted, other=0, cache_modifier=".cg").to(tl.int64)
    return tl.where(drafted, slot, page * PAGE + key % PAGE) * slot_stride


@triton.jit
def _store(best, total, acc, sums_at, part_at, place, real, STRIDE: tl.constexpr, D: tl.constexpr):
    """Store a result of rows that belong to several nodes."""
    tl.store(sums_at + place * (2 * STRIDE), best, mask=real)
    tl.store(sums_at + place * (2 * STRIDE) + STRIDE, total, mask=real)
    tl.store(part_at + place * (STRIDE * D), acc, mask=real[:, None])


@triton.jit
def _attend_before(
    q, k_at, v_at, scales, pages_at, slot_stride, at, from_split, to_split, end_split, whole_splits,
    group_places, scale, sums_at, part_at, real,
    WIDTH: tl.constexpr, D: tl.constexpr, SLOT: tl.constexpr, ROWS: tl.constexpr, STRIDE: tl.constexpr,
    SPLIT: tl.constexpr, BLOCK: tl.constexpr, PAGE: tl.constexpr, IN_GROUP: tl.constexpr, RUNNING: tl.constexpr,
):  # fmt: skip
    """Attend to splits that all nodes share, and store the results: of groups, up to `whole_splits`, and of splits.

    Args:
        at: where the first block's keys lie.
        RUNNING: groups are merged as they come, and leave one result.
    """
    own = tl.full([ROWS], 0, tl.int32)
    bits = tl.full([ROWS], -1, tl.int64)
    end = end_split * SPLIT
    best, _, acc = nothing(ROWS, D)
    group_best, group_total, group_acc = nothing(ROWS, D)
    all_best, all_total, all_acc = nothing(ROWS, D)
    total = tl.zeros([ROWS, 16], tl.float32)
    for start in range(from_split * SPLIT, to_split * SPLIT, BLOCK):
        here = at
        at = key_offsets(pages_at, slot_stride, start + BLOCK, end, BLOCK, PAGE, True)
        best, total, acc = attend_block(
            best, total, acc, q, k_at, v_at, scales, here, own, bits, start, end, scale, own,
            WIDTH, D, SLOT, BLOCK, False, False,
        )  # fmt: skip
        if (start + BLOCK) % SPLIT == 0:
            split, sums = start // SPLIT, tl.max(total, 1)
            if split < whole_splits:
                group_best, group_total, group_acc = merge(group_best, group_total, group_acc, best, sums, acc)
                if (split + 1) % IN_GROUP == 0:
                    if RUNNING:
                        all_best, all_total, all_acc = merge(
                            all_best, all_total, all_acc, group_best, group_total, group_acc
                        )
                        if split + 1 == whole_splits:
                            _store(all_best, all_total, all_acc, sums_at, part_at, 0, real, STRIDE, D)
                    else:
                        place = split // IN_GROUP
                        _store(group_best, group_total, group_acc, sums_at, part_at, place, real, STRIDE, D)
                    group_best, group_total, group_acc = nothing(ROWS, D)
            else:
                place = group_places + split - whole_splits
                _store(best, sums, acc, sums_at, part_at, place, real, STRIDE, D)
            best, sums, acc = nothing(ROWS, D)
            total = tl.zeros([ROWS, 16], tl.float32)


@triton.jit
def _attend_path(
    q_ptr, k_at, v_at, scales, pages_at, path_at, at, sums_ptr, partial_ptr, token, group, root, end,
    num_places, first_place, slot_stride, scale,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr,
    STRIDE: tl.constexpr, SPLIT: tl.constexpr, BLOCK: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """Attend with one node to the splits from its root's on, and store their results.

    Args:
        at: where the first block's keys lie.
        end: how many keys the node's path has.
        first_place: where the result of split 0 would lie.
    """
    REPEATS: tl.constexpr = HEADS // GROUPS
    row, column = tl.arange(0, ROWS), tl.arange(0, D)
    real = row < REPEATS
    head = group * REPEATS + tl.minimum(row, REPEATS - 1)
    q = load_queries(q_ptr + (token * HEADS + head)[:, None] * WIDTH + column[None, :], WIDTH, D)
    own = tl.full([ROWS], 0, tl.int32) + end - 1
    bits = tl.full([ROWS], -1, tl.int64)
    cell = token * GROUPS + group
    sums_at = sums_ptr + cell * num_places * (2 * STRIDE) + row
    part_at = partial_ptr + cell * num_places * (STRIDE * D) + (row[:, None] * D + column[None, :])
    best, _, acc = nothing(ROWS, D)
    total = tl.zeros([ROWS, 16], tl.float32)
    for start in tl.range(root // SPLIT * SPLIT, end, BLOCK, num_stages=1):  # one turn, or two
        here = at
        at = _path_offsets(pages_at, path_at, slot_stride, start + BLOCK, end, root, BLOCK, PAGE)
        best, total, acc = attend_block(
            best, total, acc, q, k_at, v_at, scales, here, own, bits, start, end, scale, own,
            WIDTH, D, GROUPS * WIDTH, BLOCK, False, True,
        )  # fmt: skip
        if ((start + BLOCK) % SPLIT == 0) | (start + BLOCK >= end):
            place = first_place + start // SPLIT
            _store(best, tl.max(total, 1), acc, sums_at, part_at, place, real, STRIDE, D)
            best, _, acc = nothing(ROWS, D)
            total = tl.zeros([ROWS, 16], tl.float32)


@triton.jit(do_not_specialize=["shares", "num_places", "group_places", "pages_stride", "scale_stride"])
def tree_splits_kernel(
    q_ptr, k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, pages_ptr, root_ptr, index_ptr, paths_ptr, sums_ptr, partial_ptr,
    shares, num_places, group_places, slot_stride, pages_stride, scale_step, scale_stride, scale,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr,
    OWN_ROWS: tl.constexpr, STRIDE: tl.constexpr, NODES: tl.constexpr, TOKENS: tl.constexpr, DEPTH: tl.constexpr,
    SPLIT: tl.constexpr, BLOCK: tl.constexpr, PAGE: tl.constexpr, IN_GROUP: tl.constexpr, WHOLE: tl.constexpr,
    RUNNING: tl.constexpr, EARLY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Attend to a share of the splits before a tile's roots, or to the splits from the root's on of one of its nodes.

    Args:
        shares: programs that share the splits before. They come behind those of the tile's nodes: the last shares are
            empty below the bound on keys, and no node should wait for them to come and go.
        OWN_ROWS: rows of a node's own tile, the heads that share a key; STRIDE of its results.
        WHOLE: programs take groups of splits.
        EARLY: look things up before the inputs are there.
    """
    let_next_start(PDL)
    if not EARLY:
        wait_for_previous(PDL)
    REPEATS: tl.constexpr = HEADS // GROUPS
    TILES: tl.constexpr = (NODES + TOKENS - 1) // TOKENS
    group, tile, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    request = tile // TILES
    first = tile % TILES * TOKENS
    root = tl.load(root_ptr + request, cache_modifier=".cg")
    root_split = root // SPLIT
    whole_splits = root_split // IN_GROUP * IN_GROUP if WHOLE else 0
    pages_at = pages_ptr + request.to(tl.int64) * pages_stride
    k_at, v_at = k_ptr + group * WIDTH, v_ptr + group * WIDTH
    scales = (k_scales_ptr, v_scales_ptr, group * scale_stride, scale_step)
    column = tl.arange(0, D)
    if part >= TOKENS:
        each = tl.cdiv(root_split, shares)
        if WHOLE:
            each = tl.cdiv(tl.cdiv(root_split, IN_GROUP), shares) * IN_GROUP
        from_split = (part - TOKENS) * each
        to_split = tl.minimum(from_split + each, root_split)
        if from_split < to_split:
            row = tl.arange(0, ROWS)
            node = first + row // REPEATS
            real = (node < NODES) & (row < TOKENS * REPEATS)
            token = (request * NODES + tl.minimum(node, NODES - 1)).to(tl.int64)
            q_at = (token * HEADS + group * REPEATS + row % REPEATS)[:, None] * WIDTH + column[None, :]
            cell = token * GROUPS + group
            sums_at = sums_ptr + cell * num_places * (2 * STRIDE) + row % REPEATS
            part_at = (cell * num_places * STRIDE + row % REPEATS)[:, None] * D + column[None, :]
            at = key_offsets(pages_at, slot_stride, from_split * SPLIT, root_split * SPLIT, BLOCK, PAGE)
            if EARLY and PDL:
                prefetch_block(k_at, v_at, at, WIDTH, False)  # these keys are all of earlier passes
                wait_for_previous(PDL)
            _attend_before(
                load_queries(q_ptr + q_at, WIDTH, D), k_at, v_at, scales, pages_at, slot_stride, at,
                from_split, to_split, root_split, whole_splits, group_places, scale, sums_at, partial_ptr + part_at,
                real, WIDTH, D, GROUPS * WIDTH, ROWS, STRIDE, SPLIT, BLOCK, PAGE, IN_GROUP, RUNNING,
            )  # fmt: skip
    elif first + part < NODES:
        token = (request * NODES + first + part).to(tl.int64)
        end = tl.load(index_ptr + token, cache_modifier=".cg").to(tl.int32) + 1
        path_at = paths_ptr + token * DEPTH
        at = _path_offsets(pages_at, path_at, slot_stride, root_split * SPLIT, end, root, BLOCK, PAGE)
        if EARLY:
            wait_for_previous(PDL)
        _attend_path(
            q_ptr, k_at, v_at, scales, pages_at, path_at, at, sums_ptr, partial_ptr, token, group,
            root, end, num_places, group_places - whole_splits, slot_stride, scale,
            HEADS, GROUPS, WIDTH, D, OWN_ROWS, STRIDE, SPLIT, BLOCK, PAGE,
        )  # fmt: skip


@triton.jit(do_not_specialize=["num_places", "group_places"])
def tree_merge_kernel(
    sums_ptr, partial_ptr, out_ptr, maxima_ptr, root_ptr, index_ptr, num_places, group_places,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr, STRIDE: tl.constexpr,
    NODES: tl.constexpr, SPLIT: tl.constexpr, IN_GROUP: tl.constexpr, WHOLE: tl.constexpr, RUNNING: tl.constexpr,
    MAXIMA: tl.constexpr, EARLY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Merge the results of one node's heads that share a key, and store their outputs."""
    let_next_start(PDL)
    if not EARLY:
        wait_for_previous(PDL)
    REPEATS: tl.constexpr = HEADS // GROUPS
    group, token = tl.program_id(0), tl.program_id(1).to(tl.int64)
    root = tl.load(root_ptr + tl.program_id(1) // NODES, cache_modifier=".cg")
    last_split = tl.load(index_ptr + token, cache_modifier=".cg").to(tl.int32) // SPLIT + 1
    if EARLY:
        wait_for_previous(PDL)
    row, column = tl.arange(0, STRIDE), tl.arange(0, D)
    real = row < REPEATS
    cell = token * GROUPS + group
    sums_at = sums_ptr + cell * num_places * (2 * STRIDE) + row
    part_at = partial_ptr + cell * num_places * (STRIDE * D) + (row[:, None] * D + column[None, :])
    best, total, acc = nothing(STRIDE, D)
    if WHOLE:
        whole_splits = root // SPLIT // IN_GROUP * IN_GROUP
        own_sums_at, own_part_at = sums_at + group_places * (2 * STRIDE), part_at + group_places * (STRIDE * D)
        count = last_split - whole_splits
        # Few splits come after the groups: read along with these, so that nobody waits a second time.
        four_0 = stored_four(own_sums_at, own_part_at, 0, 0, count, real, STRIDE, D)
        four_1 = stored_four(own_sums_at, own_part_at, 4, 0, count, real, STRIDE, D)
        num_groups = tl.minimum(whole_splits // IN_GROUP, 1) if RUNNING else whole_splits // IN_GROUP
        best, total, acc = merge_sixteens(
            best, total, acc, sums_at, part_at, 0, num_groups, real, STRIDE, STRIDE, D, True, PDL
        )
        best, total, acc = merge_group(best, total, acc, four_0, STRIDE, D, False)
        best, total, acc = merge_group(best, total, acc, four_1, STRIDE, D, False)
    else:
        best, total, acc = merge_sixteens(
            best, total, acc, sums_at, part_at, 0, last_split, real, STRIDE, STRIDE, D, False, PDL
        )
    head = group * REPEATS + row
    out = (acc / tl.where(total == 0.0, 1.0, total)[:, None]).to(out_ptr.dtype.element_ty)
    is_out = real[:, None] & (column < WIDTH)[None, :]
    tl.store(out_ptr + (token * HEADS + head)[:, None] * WIDTH + column[None, :], out, mask=is_out)
    if MAXIMA:
        largest = tl.max(tl.where(is_out, tl.abs(out.to(tl.float32)), 0.0), 1)
        tl.store(maxima_ptr + token * HEADS + head, largest, mask=real)


@dataclass(frozen=True)
class TreeLayout:
    """How programs share the keys before trees, and where their results lie; none of it changes bits.

    Args:
        shares: programs to a tile.
        groups: results of groups a node may have; 0 where programs take splits.
        splits: results of splits.
        running: one program merges all groups of a tile.
    """

    shares: int
    groups: int
    splits: int
    running: bool = False

    @staticmethod
    def of(config: AttentionConfig, cells: int, most_keys: int, depth: int, bytes_each: int) -> "TreeLayout":
        """Return the layout of so many pairs of a tile and a key head.

        Args:
            bytes_each: what a result takes of each of the pass's nodes and key heads.
        """
        num_splits = max(-(-most_keys // config.split), 1)
        own = (config.split - 1 + depth) // config.split + 1
        if cells * num_splits <= config.programs:
            return TreeLayout(-(-num_splits // config.share), 0, num_splits + own)
        groups, rest = -(-num_splits // SPLITS_IN_GROUP), SPLITS_IN_GROUP - 1 + own
        assert rest <= 2 * SPLITS_IN_GROUP, "splits behind the groups are merged at once"
        shares = max(min(config.programs // cells, groups), 1)
        if shares == 1 or (groups + rest) * bytes_each > _MOST_BYTES:
            return TreeLayout(1, 1, rest, running=True)
        return TreeLayout(shares, groups, rest)


def tree_attention(
    q_THd: Tensor, layer: KvLayer, batch: AttentionBatch, scale: float, config: AttentionConfig,
    options: dict[str, Any], maxima_TH: Tensor | None,
) -> Tensor:  # fmt: skip
    """Attend with the nodes of trees; grids follow from shapes and host-side bounds alone.

    Args:
        scale: of scores, which are exponents of two.
        options: whether kernels may start while those before drain (PDL), whether what describes the batch may then be
            read at once (EARLY), and the launch's further arguments.
    """
    assert batch.tree is not None, "these are trees"
    (num_tokens, num_heads, width), num_groups = q_THd.shape, layer.keys_SGd.shape[1]
    num_requests, depth = len(batch.tree.root_R), batch.tree.slots_TD.shape[1]
    num_nodes, repeats, head_block = num_tokens // num_requests, num_heads // num_groups, triton.next_power_of_2(width)
    head_block, stride = max(head_block, 16), triton.next_power_of_2(repeats)
    hopper = num_nodes * repeats > _NARROW_ROWS and prefill_fits(config, q_THd, layer, batch.page_size)
    rows = _NARROW_ROWS if num_nodes * repeats <= _NARROW_ROWS else HOPPER_ROWS if hopper else config.rows_wide
    rows = max(rows, stride)
    tiles = num_requests * -(-num_nodes // (rows // repeats))
    most_keys = batch.page_table_RP.shape[1] * batch.page_size if batch.max_keys is None else batch.max_keys
    each = num_tokens * num_groups * stride * (head_block + 2) * 4
    layout = TreeLayout.of(config, tiles * num_groups, most_keys, depth, each)
    num_places = layout.groups + layout.splits
    cells = num_tokens * num_groups * num_places * stride
    sums = torch.empty(2 * cells, dtype=torch.float32, device=q_THd.device)
    partial = torch.empty(cells * head_block, dtype=torch.float32, device=q_THd.device)
    out = torch.empty_like(q_THd)
    index_T, paths_TD = batch.kv_index_T.contiguous(), batch.tree.slots_TD.contiguous()
    # What is copied just now is no description from before the kernel before: it is not to be read early.
    early = options["EARLY"] and index_T is batch.kv_index_T and paths_TD is batch.tree.slots_TD
    options = {**options, "EARLY": early, "WHOLE": layout.groups > 0, "RUNNING": layout.running}
    shape = {"HEADS": num_heads, "GROUPS": num_groups, "WIDTH": width, "STRIDE": stride, "NODES": num_nodes}
    assert layer.scales is None or layer.keys_SGd.is_contiguous(), "a slot is found by where its codes are"
    described = (batch.page_table_RP, batch.tree.root_R, index_T, paths_TD)
    places, strides = (layout.shares, num_places, layout.groups), (layer.keys_SGd.stride(0), described[0].stride(0))
    shape |= {"D": head_block, "SPLIT": config.split, "IN_GROUP": SPLITS_IN_GROUP}
    grid = (num_groups, tiles, layout.shares + rows // repeats)
    own = {"DEPTH": depth, "PAGE": batch.page_size}
    if hopper:
        launch_tree(
            grid, (q_THd, layer), described, (sums, partial), (*places, *strides, scale), {**shape, **options, **own}
        )
    else:
        tree_splits_kernel[grid](
            q_THd, layer.keys_SGd, layer.values_SGd, *(layer.scales or (None, None)), *described, sums, partial,
            *places, *strides, *layer.scale_strides, scale, ROWS=rows,
            OWN_ROWS=max(stride, _NARROW_ROWS), TOKENS=rows // repeats, BLOCK=config.block,
            num_warps=config.num_warps, num_stages=config.num_stages, **shape, **options, **own,
        )  # fmt: skip
    tree_merge_kernel[(num_groups, num_tokens)](
        sums, partial, out, sums if maxima_TH is None else maxima_TH, batch.tree.root_R, index_T, num_places,
        layout.groups, MAXIMA=maxima_TH is not None, num_warps=4, **shape, **options,
    )  # fmt: skip
    return out
