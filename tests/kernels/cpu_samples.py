"""Random weights, batches and caches for the CPU kernels' tests."""

import torch

from slipstream.kernels import AttentionBatch, KvLayer
from slipstream.quant.gguf_blocks import BLOCK_BYTES
from slipstream.quant.packed import PackedWeight

FORMATS = ("q4_1", "q4_0", "q8_0", "w8a8_int8", "w4a8")


def packed_weight(format: str, rows: int, columns: int, generator: torch.Generator) -> PackedWeight:
    if format in BLOCK_BYTES:
        size = BLOCK_BYTES[format]
        blocks = torch.randint(0, 256, (rows, columns // 32, size), generator=generator, dtype=torch.uint8)
        halves = 2 if format == "q4_1" else 1
        scales = (torch.randn(rows, columns // 32, halves, generator=generator) * 0.01).half()
        blocks[..., : 2 * halves] = scales.view(torch.uint8)
        return PackedWeight(format, rows, columns, blocks.flatten(1))
    scale = {"scale": torch.rand(rows, generator=generator) * 0.01}
    if format == "w8a8_int8":
        codes = torch.randint(-128, 128, (rows, columns), generator=generator, dtype=torch.int8)
    else:
        codes = torch.randint(0, 256, (rows, columns // 2), generator=generator, dtype=torch.uint8)
    return PackedWeight(format, rows, columns, codes, scale)


def integer_product(x_TD: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
    """W8A8 and W4A8 by their definition: int8 per token, whole sums, one multiplication by both scales."""
    codes = weight.codes.long()
    if weight.format == "w4a8":
        halves = torch.stack([codes & 15, codes >> 4], dim=-1).flatten(1)
        codes = torch.where(halves > 7, halves - 16, halves)
    scale_T1 = x_TD.abs().amax(-1, keepdim=True) / 127
    x_codes = torch.where(scale_T1 > 0, torch.round(x_TD / scale_T1), 0.0).long()
    return (x_codes @ codes.T).float() * (scale_T1 * weight.scales["scale"][None, :])


def causal(counts: list[int], before: list[int], page_size: int, generator: torch.Generator) -> AttentionBatch:
    """Requests with keys from earlier passes and `counts` new tokens each, on shuffled pages."""
    starts = torch.tensor([0, *counts]).cumsum(0).int()
    kv_lens = torch.tensor([b + c for b, c in zip(before, counts, strict=True)]).int()
    pages = -(-int(kv_lens.max()) // page_size) if len(counts) else 1
    table = torch.randperm(len(counts) * pages, generator=generator).int().view(len(counts), pages)
    parts = [torch.arange(b, b + c) for b, c in zip(before, counts, strict=True)]
    kv_index = torch.cat(parts) if parts else torch.zeros(0, dtype=torch.int64)
    return AttentionBatch(starts, kv_lens, table, kv_index, torch.full_like(kv_index, -1), page_size)


def filled_cache(batch: AttentionBatch, keys: list[torch.Tensor], values: list[torch.Tensor]) -> KvLayer:
    """Each request's keys and values [len, heads, width], on the batch's pages."""
    slots = int(batch.page_table_RP.max() + 1) * batch.page_size
    layer = KvLayer(torch.zeros(slots, *keys[0].shape[1:]), torch.zeros(slots, *keys[0].shape[1:]))
    for row, (k, v) in enumerate(zip(keys, values, strict=True)):
        index = torch.arange(len(k))
        slot = batch.page_table_RP[row, index // batch.page_size].long() * batch.page_size + index % batch.page_size
        layer.keys_SGd[slot], layer.values_SGd[slot] = k, v
    return layer
