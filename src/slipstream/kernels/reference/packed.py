"""Products with packed weights, by format: the table each number format adds its reference arithmetic to."""

from collections.abc import Callable

from torch import Tensor

from slipstream.quant.packed import PackedWeight

PACKED_LINEARS: dict[str, Callable[[Tensor, PackedWeight], Tensor]] = {}
"""x_TD and a weight to y_TN, without bias."""
