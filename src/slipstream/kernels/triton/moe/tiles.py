"""Tile shapes of the experts' products: data, chosen by architecture, number format and the number of pairs."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from importlib.resources import files
from typing import Any

from torch import Tensor

from slipstream.errors import ConfigError

_UNKNOWN = "sm_90"  # whose table serves Triton's interpreter, and GPUs without one of their own


@dataclass(frozen=True)
class StageTiles:
    """How one product is cut: outputs and columns of a tile, parts the columns are split in, warps, loads in flight."""

    block_n: int
    block_k: int
    splits: int = 1
    warps: int = 4
    stages: int = 4


@dataclass(frozen=True)
class ExpertTiles:
    """Rows of a tile, and the two products: stage 1 is gate and up, stage 2 is down (which is never split).

    Args:
        words: whether rows are multiplied one at a time, without matrix instructions (`gemv`); for few rows.
    """

    block_t: int
    stage1: StageTiles
    stage2: StageTiles
    words: bool = False

    def __post_init__(self) -> None:
        if self.stage2.splits != 1:
            raise ConfigError("stage2.splits is 1: its sums are weighted where they are made. Split stage 1 only.")
        if self.words and self.stage2.block_n not in (16, 32):
            raise ConfigError("stage2.block_n is 16 or 32 word by word: a shared expert's sums keep one instruction.")

    def changed(self, settings: Mapping[str, int]) -> "ExpertTiles":
        """Return the tiles with some values replaced, by name: `block_t`, `stage1.block_n`, `stage2.block_k`, ..."""
        tiles = self
        for name, value in settings.items():
            stage, _, knob = name.rpartition(".")
            if name == "block_t":
                tiles = replace(tiles, block_t=value)
            elif name == "words":
                tiles = replace(tiles, words=bool(value))
            elif stage in ("stage1", "stage2") and knob in {field.name for field in fields(StageTiles)}:
                changed: dict[str, Any] = {stage: replace(getattr(tiles, stage), **{knob: value})}
                tiles = replace(tiles, **changed)
            else:
                knobs = ", ".join(field.name for field in fields(StageTiles))
                raise ConfigError(
                    f"There is no tile setting {name!r}; there are block_t, words and, of stage1 and stage2, {knobs}."
                )
        return tiles


def expert_tiles(architecture: str, weight_format: str, num_pairs: int) -> ExpertTiles:
    """Return the shipped tiles of the first bucket that holds `num_pairs` (tokens x experts of a token).

    Sums of integers are exact however they are cut, so "w4a8" has a row of the table for each range of pairs. Sums of
    floats are not, and a token's bits must not depend on the others: their formats have one row for all.
    """
    table = shipped_tiles(architecture)[weight_format]
    return next((tiles for limit, tiles in table if num_pairs <= limit), table[-1][1])


@cache
def shipped(architecture: str) -> dict[str, Any]:
    """Return the parsed table of an architecture: "experts" by format, and "latent_attention"."""
    folder = files("slipstream.kernels.triton") / "configs"
    file = folder / f"experts_{architecture}.json"
    text = (file if file.is_file() else folder / f"experts_{_UNKNOWN}.json").read_text(encoding="utf-8")
    table: dict[str, Any] = json.loads(text)
    return table


@cache
def shipped_tiles(architecture: str) -> dict[str, list[tuple[int, ExpertTiles]]]:
    """Return an architecture's tiles by format: rows of them, and how many pairs each serves."""
    return {
        name: [(int(row["pairs"]), _tiles(row)) for row in rows]
        for name, rows in shipped(architecture)["experts"].items()
    }  # fmt: skip


def _tiles(row: Mapping[str, Any]) -> ExpertTiles:
    stages = StageTiles(**row["stage1"]), StageTiles(**row["stage2"])
    return ExpertTiles(row["block_t"], *stages, row.get("words", False))


@dataclass(frozen=True)
class MoeOptions:
    """How experts are run and watched.

    Args:
        settings: tile shapes to try in place of the shipped ones, by name (`ExpertTiles.changed`).
        on_choice: told the experts [T, K] that each fused block of a pass chose, to count them.
    """

    settings: Mapping[str, int] = field(default_factory=dict)
    on_choice: Callable[[Tensor], None] | None = None
