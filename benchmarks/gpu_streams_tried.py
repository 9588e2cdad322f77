"""What `gpu_streams.py` tries: tiles of products over 160 and 40 rows, waited for together or streamed."""

import dataclasses

from gpu_rows_tried import Case, with_wide
from gpu_tune import LLAMA, Shape
from slipstream.kernels.triton.tuning import FEW_ROWS, LinearConfig, Tuning, WideConfig, few_rows_name
from slipstream.kernels.triton.wide_linear import fitted, row_pieces

SHAPES = LLAMA
MANY, FEW = 160, 40
PASSES: dict[int, Case] = {MANY: (40, 4), FEW: (40, 1)}
Tile = tuple[int, bool, int, int]
"""Weight rows, whether two tiles of them, warps, stages."""
TILES: dict[tuple[str, int], tuple[Tile, ...]] = {
    ("fp8", MANY): ((64, False, 4, 3), (64, False, 4, 4), (64, False, 4, 6), (128, False, 8, 4), (128, False, 8, 6),
                    (128, True, 8, 4), (64, True, 8, 4), (64, True, 8, 3)),
    ("fp8", FEW): ((64, False, 4, 4), (64, False, 4, 6), (128, False, 8, 4), (128, False, 4, 4), (128, False, 8, 6)),
    ("dense", MANY): ((64, False, 4, 4), (64, False, 4, 6), (128, False, 4, 5), (128, False, 8, 6)),
    ("dense", FEW): ((64, False, 4, 6), (128, False, 8, 4), (128, False, 8, 6)),
}  # fmt: skip
GATED: dict[tuple[str, int], tuple[Tile, ...]] = {
    ("fp8", MANY): ((128, True, 8, 4), (64, True, 4, 3), (64, True, 4, 5), (64, True, 8, 3), (64, True, 8, 5)),
    ("fp8", FEW): ((128, True, 8, 4), (64, True, 4, 4), (64, True, 4, 6), (64, True, 8, 4)),
    ("dense", MANY): ((64, True, 4, 3), (128, True, 8, 4), (64, True, 8, 3)),
    ("dense", FEW): ((128, True, 8, 4), (64, True, 4, 5)),
}
LEAST_PAIRED = 16384  # outputs; with fewer, pairs of tiles leave processors idle
STREAMED: dict[int, tuple[Tile, ...]] = {
    MANY: ((128, False, 8, 5), (128, False, 8, 6), (64, False, 4, 4), (64, False, 4, 6), (128, True, 8, 4)),
    FEW: ((64, False, 4, 6), (128, False, 8, 6), (64, False, 4, 8)),
}
STREAMED_GATED: dict[int, tuple[Tile, ...]] = {
    MANY: ((128, True, 8, 4), (64, True, 4, 3), (64, True, 8, 5)),
    FEW: ((128, True, 8, 5), (64, True, 4, 5)),
}


@dataclasses.dataclass(frozen=True)
class Product:
    """One product over a pass of so many rows."""

    format: str
    shape: Shape
    rows: int

    @property
    def key(self) -> str:
        """What the shape goes by."""
        return f"{self.format}:{self.shape.outputs}:{self.shape.inputs}"

    @property
    def name(self) -> str:
        """What its tiles go by in a configuration."""
        return few_rows_name(self.key) if self.rows <= FEW_ROWS else self.key

    def order(self, tuning: Tuning) -> LinearConfig:
        """Return the configuration that fixes the order of its columns."""
        return tuning.linear_config(
            self.format, self.shape.outputs, self.shape.inputs, 2 if self.format == "dense" else 1
        )

    def __str__(self) -> str:
        return f"{self.format:5} {self.shape.name:13} {self.rows:3} rows"


def candidates(tuning: Tuning, product: Product) -> list[WideConfig]:
    """Return tiles worth trying: those configured, waited for together or streamed, and others."""
    fp8, order, silu = product.format == "fp8", product.order(tuning), product.shape.silu
    step = 128 if fp8 else 64
    tiles = (GATED if silu else TILES)[product.format, product.rows]
    made = [WideConfig(n, pair, step, warps, stages, tma=True) for n, pair, warps, stages in tiles]
    today = tuning.wide_linear_config(product.key, product.rows, product.shape.outputs, order)
    made += [] if today is None else [dataclasses.replace(today, later=False)]
    new = [dataclasses.replace(config, together=True) for config in made]
    new += [
        WideConfig(n, pair, step, warps, stages, tma=True, later=order.split_k > 1, together=fp8, stream=True)
        for n, pair, warps, stages in (STREAMED_GATED if silu else STREAMED)[product.rows]
        if silu or not pair or product.shape.outputs >= LEAST_PAIRED
    ]
    pieces, most = row_pieces(product.rows), tuning.shared_bytes
    return list({fitted(config, pieces, product.format, silu, most): config for config in reversed(new)}.values())


def with_tiles(tuning: Tuning, product: Product, config: WideConfig) -> Tuning:
    """Return a tuning in which a product has these tiles."""
    return with_wide(product.name, config)(tuning)
