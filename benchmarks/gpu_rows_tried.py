"""What `gpu_rows.py` tries: ways to share attention's keys, tiles of products, stretches of columns."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator

from slipstream.kernels.triton.tuning import LinearConfig, Tuning, WideConfig, few_rows_name

Case = tuple[int, int]
"""Requests, and nodes of each."""
ALL: tuple[Case, ...] = ((1, 1), (1, 4), (8, 1), (8, 4), (40, 1), (40, 4))
MANY, FEW, NARROW = ((40, 4),), ((40, 1), (8, 4)), ((1, 1), (1, 4), (8, 1))
GATE_UP, DOWN, QKV, OUT = "dense:28672:4096", "dense:4096:14336", "dense:6144:4096", "dense:4096:4096"
Tile = tuple[int, bool, int, int, int]
"""Weight rows, whether two tiles of them, columns a step, warps, stages."""
TILES_MANY: tuple[Tile, ...] = (
    (128, False, 64, 8, 3),
    (128, False, 64, 8, 4),
    (128, False, 64, 8, 6),
    (128, True, 64, 8, 4),
    (128, True, 64, 4, 5),
    (64, False, 64, 4, 4),
    (64, False, 64, 4, 6),
    (64, False, 128, 4, 4),
)
TILES_FEW: tuple[Tile, ...] = (
    (64, False, 64, 4, 4),
    (64, False, 64, 4, 6),
    (64, False, 128, 4, 3),
    (64, False, 128, 4, 4),
    (128, False, 64, 8, 4),
    (128, False, 64, 8, 6),
    (128, False, 128, 8, 4),
)
TILES_GATED: tuple[Tile, ...] = (
    (128, True, 64, 8, 4),
    (128, True, 64, 8, 3),
    (128, True, 64, 4, 5),
    (128, True, 128, 8, 3),
    (64, True, 64, 4, 5),
    (64, True, 64, 4, 3),
)
SPLITS: dict[str, tuple[LinearConfig, ...]] = {  # other stretches, and the tiles of few rows that go with them
    QKV: (LinearConfig(64, 256, 1, 4, 3), LinearConfig(64, 128, 4, 4, 3)),
    OUT: (LinearConfig(64, 256, 4, 4, 3), LinearConfig(64, 128, 4, 4, 4)),
    DOWN: (LinearConfig(64, 128, 8, 4, 4), LinearConfig(64, 256, 2, 4, 6)),
}
GROUPS = (  # stages, registers and programs of attention's programs that take groups of splits
    *itertools.product((2,), (0, 168, 128), (320, 640, 1056, 2112)),
    *itertools.product((3,), (0,), (320, 640, 1056, 2112)),
)
PROGRAMS = (1056, 2112, 4224)
NEAR: tuple[dict[str, int | bool], ...] = (  # of attention where few programs attend; no bit changes
    {"num_stages": 2},
    {"num_stages": 4},
    {"num_warps": 2},
    {"num_warps": 8},
    {"bulk": True},
    {"compact": True},
    {"share": 2},
    {"share": 3},
    {"share": 3, "compact": True},
    {"num_stages": 2, "compact": True},
    {"num_stages": 2, "share": 3, "bulk": True, "compact": True},
)


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A change of the tuning.

    Args:
        cases: the passes it touches.
        same: whether it must leave every bit as it is.
    """

    name: str
    apply: Callable[[Tuning], Tuning]
    cases: tuple[Case, ...]
    same: bool = True


def with_attention(**fields: int | bool) -> Callable[[Tuning], Tuning]:
    """Return a change of attention's fields."""
    return lambda tuning: dataclasses.replace(tuning, attention=dataclasses.replace(tuning.attention, **fields))


def with_wide(name: str, config: WideConfig) -> Callable[[Tuning], Tuning]:
    """Return a change of one product's tiles for many or few rows."""
    return lambda tuning: dataclasses.replace(tuning, wide_linear={**tuning.wide_linear, name: config})


def without_lines(name: str) -> Callable[[Tuning], Tuning]:
    """Return a change after which a product asks for no weights before its rows are there."""

    def apply(tuning: Tuning) -> Tuning:
        known = tuning.wide_linear.get(name)
        return tuning if known is None else with_wide(name, dataclasses.replace(known, ahead=False))(tuning)

    return apply


def with_linear(name: str, config: LinearConfig) -> Callable[[Tuning], Tuning]:
    """Return a change of one product's narrow tiles, which fix its stretches."""
    return lambda tuning: dataclasses.replace(tuning, linear={**tuning.linear, name: config})


def attention_candidates() -> list[Candidate]:
    """Return ways to share the keys: of large batches first, then of batch 8."""
    wide = ((40, 4), (40, 1))
    found = [
        Candidate(f"groups: stages {s}, registers {r}, programs {p}",
                  with_attention(group_stages=s, group_registers=r, group_programs=p), wide)
        for s, r, p in GROUPS
    ]  # fmt: skip
    return found + [
        Candidate(f"groups from {p} programs on", with_attention(programs=p), ((8, 4), (8, 1))) for p in PROGRAMS
    ]


def near_candidates() -> list[Candidate]:
    """Return ways to attend where few programs do: stages, warps, how splits are shared, and how long they are."""
    found = [
        Candidate(f"attention: {', '.join(f'{k} {v}' for k, v in fields.items())}", with_attention(**fields), ALL)
        for fields in NEAR
    ]
    return found + [Candidate(f"splits of {n} keys", with_attention(split=n), ALL, same=False) for n in (64, 128, 256)]


def tile_candidates(shape: str, *, few: bool) -> list[Candidate]:
    """Return tiles of a product, with its stretches added at once and later."""
    name, cases = (few_rows_name(shape), FEW) if few else (shape, MANY)
    tiles = TILES_GATED if shape == GATE_UP else TILES_FEW if few else TILES_MANY
    ways = (False,) if shape == GATE_UP else (True, False)
    found = []
    for (block_n, pair, block_k, warps, stages), later in itertools.product(tiles, ways):
        config = WideConfig(block_n, pair, block_k, warps, stages, tma=True, later=later)
        found.append(Candidate(f"{name} {short(config)}", with_wide(name, config), cases))
    return found


def short(config: WideConfig) -> str:
    """Return tiles in a word."""
    return (
        f"{'2x' if config.pair else ''}{config.block_n}x{config.block_k}/w{config.num_warps}s{config.num_stages}"
        f"{' later' if config.later else ''}"
    )


def later_only(shape: str, *, few: bool) -> list[Candidate]:
    """Return a product's tiles with its stretches added later, one stage count of each."""
    kept: dict[tuple[int, bool, int], Candidate] = {}
    for candidate in tile_candidates(shape, few=few)[::2]:
        config = candidate.apply(Tuning("")).wide_linear[few_rows_name(shape) if few else shape]
        kept[config.block_n, config.pair, config.block_k] = candidate
    return list(kept.values())


def candidates_of(group: str) -> Iterator[Candidate]:
    """Yield the candidates of a group, but for other stretches."""
    if group == "attention":
        yield from attention_candidates()
    elif group == "near":
        yield from near_candidates()
    elif group == "ahead":
        for shape in (QKV, DOWN, OUT, GATE_UP):
            yield Candidate(f"{shape} asks for nothing ahead", without_lines(shape), MANY)
            yield Candidate(f"{few_rows_name(shape)} asks for nothing ahead", without_lines(few_rows_name(shape)), FEW)
    elif group in ("many", "few"):
        for shape in (QKV, DOWN, OUT, GATE_UP):
            yield from tile_candidates(shape, few=group == "few")
