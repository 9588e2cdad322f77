"""Passes of many rows on Hopper: its GEMM fits any shape, and it and its attention have the portable kernels' bits.

Triton's interpreter knows no warps of several kinds, so the bits are compared on a GPU only.
"""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from slipstream.kernels.attention_batch import AttentionBatch, KvLayer
from slipstream.kernels.triton.attention.dispatch import AttentionLaunch, attention
from slipstream.kernels.triton.gemm.dispatch import Products
from slipstream.kernels.triton.gemm.hopper_ws_launch import LEAST_ROWS, tile_of
from slipstream.kernels.triton.gemm.split_k import Epilogue
from slipstream.kernels.triton.tuning import architecture_of, read_tuning
from slipstream.quant.formats import fp8
from slipstream.quant.packed import PackedWeight

on_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or architecture_of(torch.device("cuda")) != "sm_90", reason="needs a Hopper GPU"
)
SHAPES = {  # outputs, inputs, whether gated, whether with a residual
    "queries, keys, values of Llama-8B": (6144, 4096, False, False),
    "its output projection": (4096, 4096, False, True),
    "its gates": (28672, 4096, True, False),
    "its down projection": (4096, 14336, False, True),
    "gates of an odd width": (2 * 1504, 1000, True, False),
    "few outputs": (576, 1536, False, True),
    "few columns": (960, 576, False, False),
}


@pytest.mark.parametrize("kind", ["dense", "fp8"])
@pytest.mark.parametrize("silu", [False, True])
@pytest.mark.parametrize("split", [False, True])
def test_every_shape_has_a_tile_whose_stages_fit_shared_memory(kind, silu, split):
    if silu and split:
        pytest.skip("gates fill the device without splits")
    for rows in (LEAST_ROWS, 384, 512, 1000, 2048, 8192, 131072):
        for outputs in (64, 576, 1536, 4096, 6144, 28672, 152064):
            tile = tile_of(rows, outputs, kind=kind, silu=silu, split=split, programs=132)
            beside = 65536 if tile.pair and split else 32768  # totals, or outputs on their way
            assert tile.stages >= 3 and tile.stages * (128 + tile.block_n) * 128 + beside < 227 << 10, tile


@on_hopper
@pytest.mark.parametrize("format", ["dense", "fp8"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_gemm_of_many_rows_has_the_portable_kernels_bits(shape, format):
    (outputs, inputs, silu, added), device = shape, torch.device("cuda")
    torch.manual_seed(0)
    tuning = read_tuning("sm_90")
    products, portable = (Products(replace(tuning, architecture=name), device) for name in ("sm_90", "portable"))
    weight = (torch.randn(outputs, inputs, device=device) / 50).bfloat16()
    if format == "fp8":
        codes, scale = fp8.encode_per_channel(weight, "best")
        weight = products.prepare(PackedWeight("fp8_per_channel", outputs, inputs, codes, {"scale": scale}))
    x = torch.randn(1300, inputs, device=device).bfloat16()
    bias = torch.randn(outputs, device=device).bfloat16()
    residual = torch.randn(1300, outputs, device=device).bfloat16() if added else None
    rows = portable.rows_for(weight, x)
    want = portable.multiply(rows, weight, Epilogue(bias, residual, silu=silu))
    for count in (257, 300, 512, 1300):
        rows = products.rows_for(weight, x[:count])
        kept = None if residual is None else residual[:count]
        assert torch.equal(products.multiply(rows, weight, Epilogue(bias, kept, silu=silu)), want[:count]), count


@on_hopper
@pytest.mark.parametrize("page", [8, 16, 64, 256])
@pytest.mark.parametrize("heads", [(32, 8, 128), (9, 3, 64), (40, 8, 128), (28, 4, 128), (16, 16, 64)])
@pytest.mark.parametrize("scattered", [False, True], ids=["pages in order", "pages scattered"])
def test_prompts_attend_as_the_portable_kernel_does_whatever_unwritten_slots_hold(heads, page, scattered):
    (num_heads, num_groups, width), device = heads, torch.device("cuda")
    torch.manual_seed(page)
    counts, starts = [70, 300, 1, 513, 4], [0, 128, 77, 1000, 15]
    ends = [start + count for start, count in zip(starts, counts, strict=True)]
    num_pages = [-(-end // page) for end in ends]
    cache = [torch.randn(sum(num_pages) * page, num_groups, width, device=device).bfloat16() for _ in range(2)]
    order = (torch.randperm(sum(num_pages)) if scattered else torch.arange(sum(num_pages))).split(num_pages)
    table = torch.zeros(len(counts), max(num_pages), dtype=torch.int32)
    for row, pages, end in zip(table, order, ends, strict=True):
        row[: len(pages)] = pages
        unwritten = slice(int(pages[-1]) * page + (end - 1) % page + 1, (int(pages[-1]) + 1) * page)
        for part in cache:
            part[unwritten] = float("nan")
    index = torch.cat([torch.arange(start, end) for start, end in zip(starts, ends, strict=True)]).to(device)
    batch = AttentionBatch(
        torch.tensor([0, *counts]).cumsum(0).int().to(device),
        torch.tensor(ends, dtype=torch.int32, device=device),
        table.to(device),
        index,
        torch.full_like(index, -1),
        page,
        max(counts),
        max(num_pages) * page,
    )
    config, counters = read_tuning("sm_90").attention, torch.zeros(1 << 16, dtype=torch.int32, device=device)
    q = torch.randn(len(index), num_heads, width, device=device).bfloat16()
    found = [
        attention(q, KvLayer(*cache), batch, width**-0.5, None, AttentionLaunch(config, counters, dependent=False))
        for config in (config, replace(config, persistent_programs=0))
    ]
    assert torch.equal(*found) and not found[0].isnan().any()
