"""Paged attention for decoding, verifying and prefill: query tokens x the heads that share a key, in one tile.

A request's keys are cut in splits of a fixed length, and their results are merged in order: by one program where there
are many queries (`prefill`), else by the last of several (`split_kv`). Nodes of trees have kernels of their own
(`tree`).
"""
# ruff: noqa: PLR0913

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from slipstream.kernels.attention_batch import AttentionBatch, KvLayer
from slipstream.kernels.triton.attention.even import even_kernel
from slipstream.kernels.triton.attention.hopper_launch import (
    WorkList,
    hopper_split_fits,
    hopper_split_options,
    launch_hopper_split,
    launch_persistent,
    launch_prefill,
    lay_out_work,
    persistent_fits,
    persistent_programs,
    prefill_fits,
)
from slipstream.kernels.triton.attention.prefill import prefill_kernel
from slipstream.kernels.triton.attention.split_kv import splits_kernel
from slipstream.kernels.triton.attention.tile import (
    SPLITS_IN_GROUP,
)
from slipstream.kernels.triton.attention.tree import tree_attention
from slipstream.kernels.triton.launch import launch_options
from slipstream.kernels.triton.tuning import AttentionConfig

_LOG2E = 1.4426950408889634
_NARROW_ROWS = 16


@dataclass(frozen=True)
class AttentionLaunch:
    """How attention runs.

    Args:
        counters: zeros, which programs that share a tile count themselves in with, and leave as zeros.
        dependent: whether the kernel may start while the one before it drains.
        instruction: see `launch_options`.
        early: whether it may then read the batch's description at once, and the pass's work: the kernel before must
            wait for its own inputs before it lets this one start (`wait_then_let_start`), or the one before that.
    """

    config: AttentionConfig
    counters: Tensor
    dependent: bool
    instruction: int = 0
    early: bool = False


def attention(
    q_THd: Tensor, layer: KvLayer, batch: AttentionBatch, scale: float, window: int | None, launch: AttentionLaunch,
    maxima_TH: Tensor | None = None, work: WorkList | None = None,
) -> Tensor:  # fmt: skip
    """Attend over the pages of each request; the grid follows from shapes and host-side bounds alone.

    Args:
        maxima_TH: where each head's largest magnitude goes, in passes of fewer queries than `serial_from`.
        work: what `work_list_of` has laid out for this batch, before the product that queries came of.
    """
    if batch.tree is not None and window is not None:
        batch = batch.by_node
    if batch.tree is not None:
        options = {"PDL": launch.dependent, "EARLY": launch.early}
        options |= launch_options(launch.dependent, launch.instruction)
        return tree_attention(q_THd, layer, batch, scale * _LOG2E, launch.config, options, maxima_TH)
    num_tokens, num_heads, width = q_THd.shape
    num_groups, num_requests, config = layer.keys_SGd.shape[1], batch.kv_lens_R.shape[0], launch.config
    most_queries, most_keys, rows, tokens = _bounds(batch, num_tokens, num_heads // num_groups, config)
    one_tile = most_queries <= tokens
    num_tiles = num_requests if one_tile else num_tokens // tokens + num_requests
    head_block = max(triton.next_power_of_2(width), 16)
    out = torch.empty_like(q_THd)
    described = _description(batch)
    # What is copied just now is no description from before the kernel before: it is not to be read early.
    early = launch.early and batch.kv_index_T.is_contiguous() and batch.ancestors_T.is_contiguous()
    strides = (layer.keys_SGd.stride(0), batch.page_table_RP.stride(0), scale * _LOG2E, window or 0)
    shape = {
        "HEADS": num_heads, "GROUPS": num_groups, "WIDTH": width, "D": head_block, "ROWS": rows, "TOKENS": tokens,
        "REQUESTS": triton.next_power_of_2(num_requests), "SPLIT": config.split, "BLOCK": config.block,
        "PAGE": batch.page_size, "IN_GROUP": SPLITS_IN_GROUP, "HAS_WINDOW": window is not None, "PDL": launch.dependent,
        "num_warps": config.num_warps, "num_stages": config.num_stages,
        **launch_options(launch.dependent, launch.instruction),
    }  # fmt: skip
    if most_queries >= config.serial_from:
        assert maxima_TH is None, "only programs that share a request's keys leave maxima"
        if window is None and prefill_fits(config, q_THd, layer, batch.page_size):
            launch_prefill((q_THd, layer, out), described, batch.page_size, scale * _LOG2E, launch.dependent)
            return out
        prefill_kernel[(num_groups, num_tokens // tokens + num_requests)](
            *_read(q_THd, layer),
            out,
            *described,
            num_requests,
            *strides[:2],
            *layer.scale_strides,
            *strides[2:],
            **shape | ({} if layer.scales is None else {"num_warps": 2 * config.num_warps}),
        )
        return out
    shape["EARLY"] = early
    several = (q_THd, layer, out), described, strides, shape, launch, maxima_TH
    return _attend_by_several(*several, num_tiles, most_queries, most_keys, work)


def work_list_of(
    batch: AttentionBatch, num_tokens: int, num_heads: int, layer: KvLayer, dtype: torch.dtype, launch: AttentionLaunch
) -> WorkList | None:
    """Lay out which keys programs attend to in a pass's every layer without a window, if persistent programs attend.

    Args:
        layer: any of those layers' cache.
        dtype: that of queries.
    """
    if batch.tree is not None:
        return None
    num_groups, config = layer.keys_SGd.shape[1], launch.config
    most_queries, most_keys, rows, tokens = _bounds(batch, num_tokens, num_heads // num_groups, config)
    narrow = most_queries <= tokens and rows == _NARROW_ROWS and most_queries < config.serial_from
    if not narrow or not _is_persistent(config, len(batch.kv_lens_R), most_keys, dtype, layer, batch.page_size):
        return None
    shape = {
        "GROUPS": num_groups, "TOKENS": tokens, "REQUESTS": triton.next_power_of_2(len(batch.kv_lens_R)),
        "QUERIES": _queries_read(most_queries, tokens), "BLOCK": config.block, "PAGE": batch.page_size,
        "IN_GROUP": SPLITS_IN_GROUP,
    }  # fmt: skip
    return lay_out_work(persistent_programs(config, layer), _description(batch), shape, launch)


def _description(batch: AttentionBatch) -> tuple[Tensor, ...]:
    tokens = (batch.kv_index_T.contiguous(), batch.ancestors_T.contiguous())
    return batch.query_starts_R1, batch.kv_lens_R, batch.page_table_RP, *tokens


def _bounds(batch: AttentionBatch, num_tokens: int, repeats: int, config: AttentionConfig) -> tuple[int, int, int, int]:
    """Return the most queries and keys of a request, and rows and tokens of a tile: `repeats` heads share a key."""
    most_queries = num_tokens if batch.max_queries is None else batch.max_queries
    most_keys = batch.page_table_RP.shape[1] * batch.page_size if batch.max_keys is None else batch.max_keys
    rows = _NARROW_ROWS if most_queries * repeats <= _NARROW_ROWS else config.rows_wide
    rows = max(rows, triton.next_power_of_2(repeats))
    return most_queries, most_keys, rows, rows // repeats


def _is_persistent(
    config: AttentionConfig, num_requests: int, most_keys: int, dtype: torch.dtype, layer: KvLayer, page_size: int
) -> bool:
    """Tell whether persistent programs with a producer warp attend; each request is one narrow tile."""
    cells, num_splits = layer.keys_SGd.shape[1] * num_requests, max(-(-most_keys // config.split), 1)
    whole, most_groups = _shares(config, cells, num_splits)[1], cells * -(-num_splits // SPLITS_IN_GROUP)
    return whole and persistent_fits(config, (num_requests, most_groups), dtype, layer, page_size)


def _attend_by_several(
    tensors: tuple[Tensor, KvLayer, Tensor], described: tuple[Tensor, ...], strides: tuple[int, int, float, int],
    shape: dict[str, Any], launch: AttentionLaunch, maxima_TH: Tensor | None, num_tiles: int, most_queries: int,
    most_keys: int, work: WorkList | None,
) -> Tensor:  # fmt: skip
    """Attend by programs that share a tile's keys; return the outputs.

    Args:
        tensors: queries, the cache, and the outputs.
        shape: what kernels' programs have in common.
    """
    (q_THd, layer, out), config = tensors, launch.config
    num_groups, rows, tokens, num_requests = shape["GROUPS"], shape["ROWS"], shape["TOKENS"], len(described[1])
    repeats, head_block = shape["HEADS"] // num_groups, shape["D"]
    num_splits = max(-(-most_keys // config.split), 1)
    shares, whole = _shares(config, num_groups * num_requests, num_splits)
    num_results = -(-num_splits // SPLITS_IN_GROUP)
    most_groups = num_groups * num_requests * num_results
    one_tile = most_queries <= tokens
    narrow = one_tile and not shape["HAS_WINDOW"] and rows == _NARROW_ROWS
    even = whole and narrow and _is_even(config, most_groups, shape["PAGE"])
    persistent = (
        narrow
        and maxima_TH is None
        and _is_persistent(config, num_requests, most_keys, q_THd.dtype, layer, shape["PAGE"])
    )
    assert num_tiles * num_groups <= launch.counters.numel(), "every shared tile has a counter"
    # A persistent program may leave two results of a request: of all groups so far, and of the last one.
    num_results = max(num_results, 2) if persistent else num_results if even else num_splits
    cells = num_tiles * num_groups * num_results * rows
    sums = torch.empty(2 * cells, dtype=torch.float32, device=q_THd.device)
    partial = torch.empty(cells * head_block, dtype=torch.float32, device=q_THd.device)
    shape |= {"MAXIMA": maxima_TH is not None}
    early_options = _early_options(launch, shape["WIDTH"] * layer.keys_SGd.element_size(), whole)
    shape["COMPACT"] = _compact_rows(config, repeats, rows) if most_queries == 1 else 0
    rest = (out, *described, sums, partial, launch.counters, sums if maxima_TH is None else maxima_TH)
    if narrow and not whole and hopper_split_fits(config, q_THd, layer):
        shape |= hopper_split_options(config, most_queries, repeats, rows)
        given = (q_THd, layer.keys_SGd, layer.values_SGd, *rest)
        launch_hopper_split(given, num_results, strides[:3], shape, (num_groups, num_tiles, shares))
        return out
    if persistent:
        shape["QUERIES"] = _queries_read(most_queries, tokens)
        launch_persistent(
            (q_THd, layer, out), described, (sums, partial), (num_results, *strides[1:3]), shape, launch, work
        )
        return out
    if even:
        del shape["HAS_WINDOW"]
        shape |= _even_options(config, most_queries, tokens, layer.scales is not None)
        grid = (num_groups, max(config.even_programs // num_groups, 1))
        even_kernel[grid](
            *_read(q_THd, layer), *rest, num_requests, num_results, *strides[:2], *layer.scale_strides, strides[2],
            **shape,
        )  # fmt: skip
        return out
    shape |= _split_options(config, rows, whole, layer.scales is not None)
    shape |= {"REQUESTS": 1} if one_tile else {}  # nobody looks for them
    splits_kernel[(num_groups, num_tiles, shares)](
        *_read(q_THd, layer), *rest, num_requests, num_results, *strides[:2], *layer.scale_strides, *strides[2:],
        WHOLE=whole, ONE=one_tile, **early_options, **shape,
    )  # fmt: skip
    return out


def _read(q_THd: Tensor, layer: KvLayer) -> tuple[Tensor | None, ...]:
    """Return queries, keys and values as kernels take them, with the scales of FP8."""
    whole = layer.keys_SGd.stride(0) == layer.keys_SGd.shape[1] * layer.keys_SGd.shape[2]
    assert layer.scales is None or whole, "a slot is found by where its codes are"
    return q_THd, layer.keys_SGd, layer.values_SGd, *(layer.scales or (None, None))


def _is_even(config: AttentionConfig, most_groups: int, page_size: int) -> bool:
    """Tell whether programs that take groups share those of all requests evenly; blocks and pages must fit."""
    fits = config.block % page_size == 0 or page_size % config.block == 0
    return config.even_programs > 0 and config.even_from <= most_groups and fits


def _even_options(config: AttentionConfig, most_queries: int, tokens: int, fp8: bool = False) -> dict[str, int]:
    """Return what the programs have of their own that share all requests' groups."""
    options = {"QUERIES": _queries_read(most_queries, tokens)}
    options |= {"num_warps": config.num_warps, "num_stages": config.num_stages * (2 if fp8 else 1)}
    return options | ({"maxnreg": config.registers} if config.registers and not fp8 else {})


def _queries_read(most_queries: int, tokens: int) -> int:
    """Return of how many queries the places are read, one after another."""
    return 1 if most_queries == 1 else triton.next_power_of_2(tokens)


def _shares(config: AttentionConfig, cells: int, num_splits: int) -> tuple[int, bool]:
    """Return how many programs share the keys of each cell, and whether they take whole groups of splits."""
    if cells * num_splits > config.programs:
        shares = max(min(config.programs // cells, -(-num_splits // SPLITS_IN_GROUP)), 1)
        if shares < num_splits:
            return shares, True
    return -(-num_splits // config.share), False


def _early_options(launch: AttentionLaunch, head_bytes: int, whole: bool) -> dict[str, bool]:
    """Return whether programs share splits, and whether TMA prefetches keys early, multiples of 16 bytes."""
    shared = launch.config.share > 1 and not whole
    return {"SHARED": shared, "BULK": launch.dependent and head_bytes % 16 == 0}


def _compact_rows(config: AttentionConfig, repeats: int, rows: int) -> int:
    """Return the rows of the tile in which the results of one query are merged; 0: those of the tile of queries."""
    compact = triton.next_power_of_2(repeats)
    return compact if config.compact and compact < rows else 0


def _split_options(config: AttentionConfig, rows: int, whole: bool, fp8: bool = False) -> dict[str, int]:
    """Return warps, stages and registers of programs that share a tile, none of which changes bits.

    Wide tiles hold two sums of values each, and have twice the warps; FP8 keys have half the bytes.
    """
    wide = rows > _NARROW_ROWS
    options = {
        "num_warps": config.num_warps * (2 if wide else 1),
        "num_stages": config.num_stages * (2 if fp8 and whole else 1),
    }
    limited = whole and not wide and not fp8 and config.registers
    return options | ({"maxnreg": config.registers} if limited else {})
