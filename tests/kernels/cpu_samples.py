"""Random weights, batches and caches for the CPU kernels' tests."""

import torch

from slipstream.kernels import AttentionBatch, KvLayer
from slipstream.quant.gguf_blocks import BLOCK_FORMATS
from slipstream.quant.packed import PackedWeight

FORMATS = (*BLOCK_FORMATS, "w8a8_int8", "w4a8")
_HALVES = {"q4_1": slice(0, 4), "q5_1": slice(0, 4), "q4_k": slice(0, 4), "q5_k": slice(0, 4), "q6_k": slice(208, 210)}


def packed_weight(format: str, rows: int, columns: int, generator: torch.Generator) -> PackedWeight:
    if format in BLOCK_FORMATS:
        return PackedWeight(format, rows, columns, random_blocks(format, rows, columns, generator))
    scale = {"scale": torch.rand(rows, generator=generator) * 0.01}
    if format == "w8a8_int8":
        codes = torch.randint(-128, 128, (rows, columns), generator=generator, dtype=torch.int8)
    else:
        codes = torch.randint(0, 256, (rows, columns // 2), generator=generator, dtype=torch.uint8)
    return PackedWeight(format, rows, columns, codes, scale)


def random_blocks(format: str, rows: int, columns: int, generator: torch.Generator) -> torch.Tensor:
    """Any bytes will do for codes and small scales; half floats are drawn so that weights are about 0.1."""
    stored = BLOCK_FORMATS[format]
    shape = (rows, columns // stored.columns, stored.nbytes)
    blocks = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
    halves = blocks[..., _HALVES.get(format, slice(0, 2))]
    size = 0.01 if stored.columns == 32 else 0.0003
    scales = (torch.randn(*shape[:2], halves.shape[-1] // 2, generator=generator) * size).half()
    halves.copy_(scales.view(torch.uint8))
    return blocks.flatten(1)


def columns_for(format: str, columns: int) -> int:
    """Return the smallest number of columns from `columns` on that a format can have."""
    step = BLOCK_FORMATS[format].columns if format in BLOCK_FORMATS else 1
    return -(-columns // step) * step


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
