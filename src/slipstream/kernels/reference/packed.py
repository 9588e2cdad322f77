"""Products with packed weights, by format: the table each number format adds its reference arithmetic to."""

from collections.abc import Callable

from torch import Tensor

from slipstream.kernels.reference.gguf import gguf_linear, gguf_rows
from slipstream.kernels.reference.quantized import QUANTIZED_LINEARS
from slipstream.quant.gguf_blocks import BLOCK_FORMATS
from slipstream.quant.packed import PackedWeight

PACKED_LINEARS: dict[str, Callable[[Tensor, PackedWeight], Tensor]] = {
    **dict.fromkeys(BLOCK_FORMATS, gguf_linear),
    **QUANTIZED_LINEARS,
}
"""x_TD and a weight to y_TN, without bias."""

PACKED_ROWS: dict[str, Callable[[PackedWeight, Tensor], Tensor]] = dict.fromkeys(BLOCK_FORMATS, gguf_rows)
"""A table and row ids to float32 rows, for the formats embeddings are stored in."""
