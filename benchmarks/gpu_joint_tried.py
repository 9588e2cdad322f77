"""What `gpu_joint.py` tries: every kernel of a layer with other tiles, and settings that touch several of them."""

import dataclasses
from collections.abc import Callable

from slipstream.kernels.triton.tuning import LinearConfig, Tuning

Change = Callable[[Tuning], Tuning]
SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
ORDER = ("qkv", "attention", "o", "gate_up", "down")
"""The kernels as they follow one another; after the last comes the first again."""
Tiles = dict[int, tuple[tuple[int, int, tuple[int, ...]], ...]]
"""By stretches of columns: weight rows, columns a step, and numbers of stages."""
DENSE: dict[str, Tiles] = {
    "qkv": {
        2: ((64, 256, (2, 3, 4, 6)), (64, 128, (3, 4, 6, 8)), (64, 512, (2, 3)), (128, 128, (3,))),
        1: ((64, 256, (4, 6)), (64, 128, (6, 8)), (64, 512, (3,))),
        4: ((64, 256, (2, 3)), (64, 128, (3, 4)), (64, 512, (2,))),
    },
    "o": {
        2: ((64, 256, (2, 3, 4, 6)), (64, 128, (3, 4, 6, 8)), (64, 512, (2, 3))),
        4: ((64, 256, (2, 3, 4)), (64, 128, (3, 4, 6)), (64, 512, (2, 3))),
        8: ((64, 256, (2, 3)), (64, 512, (2,))),
        1: ((64, 256, (6,)), (64, 512, (3,))),
    },
    "gate_up": {
        1: ((64, 128, (2, 3, 4)), (64, 64, (3, 4, 6)), (64, 256, (2, 3)), (128, 64, (2, 3, 4)), (128, 128, (2, 3))),
    },
    "down": {
        4: ((64, 128, (3, 4, 6)), (64, 256, (2, 3, 4)), (64, 512, (2, 3)), (64, 64, (6, 8))),
        2: ((64, 256, (3, 6)), (64, 512, (3,)), (64, 128, (6, 8))),
        8: ((64, 128, (3, 4)), (64, 256, (2, 3))),
    },
}
FP8: dict[str, Tiles] = {
    "qkv": {
        2: ((64, 256, (3, 4, 5, 6, 8)), (64, 128, (4, 6, 8)), (128, 256, (2, 3))),
        4: ((64, 256, (2, 3, 4, 5)),),
        1: ((64, 256, (6, 8)),),
    },
    "o": {
        4: ((64, 256, (2, 3, 4, 5)), (64, 128, (4, 6))),
        2: ((64, 256, (3, 4, 6, 8)),),
        8: ((64, 256, (2, 3)),),
    },
    "gate_up": {1: ((128, 256, (2, 3)), (128, 128, (3, 4)), (64, 256, (2, 3, 4)), (64, 128, (3, 4, 6)))},
    "down": {
        4: ((64, 256, (3, 4, 5, 6, 8)), (64, 128, (6, 8)), (128, 256, (2, 3))),
        8: ((64, 256, (2, 3, 4)),),
        2: ((64, 256, (6, 8)),),
    },
}
AHEAD = (
    (0, False),
    (8, False),
    (16, True),
)  # lines, and whether the copy engine is asked for them: with every choice of tiles
SHARED = frozenset({"small_first", "end_first", "near_rows", "thin_rows"})  # settings that hold for every format
FINE = (
    (0, False),
    (4, True),
    (8, False),
    (8, True),
    (16, False),
    (16, True),
    (32, False),
    (32, True),
)  # with the tiles that were chosen
REGISTERS = (0, 128, 96, 80)
NEAR: tuple[dict[str, int | bool], ...] = (  # of attention, no bit changed
    {"compact": True},
    {"early_blocks": 2},
    {"bulk": True},
    {"early_blocks": 2, "bulk": True},
    {"early_blocks": 2, "bulk": True, "compact": True},
    {"share": 2},
    {"share": 3, "compact": True},
    {"num_stages": 2},
    {"num_stages": 2, "compact": True},
    {"num_stages": 2, "share": 3, "bulk": True, "compact": True},
    {"num_stages": 2, "early_blocks": 2, "bulk": True, "compact": True},
    {"num_stages": 1, "early_blocks": 2, "bulk": True, "compact": True},
    {"num_stages": 4},
    {"num_warps": 2, "compact": True},
    {"num_warps": 8, "early_blocks": 2, "compact": True},
)
FAR: tuple[dict[str, int | bool], ...] = (  # other bits in every pass
    {"split": 64, "block": 64, "compact": True},
    {"split": 64, "block": 64, "compact": True, "num_stages": 2, "bulk": True},
    {"split": 128, "block": 128, "num_warps": 8, "num_stages": 2, "compact": True},
    {"split": 256, "block": 64, "compact": True},
)
Few = tuple[str, int, int, int, int, int]
"""A product's name, then the fields of its tiles but for warps: rows, columns, stretches, stages, lines ahead."""
HALVES: tuple[tuple[Few, ...], ...] = (  # half of the fast memory for each kernel, so that the next one's come in
    (("gate_up", 64, 64, 1, 4, 0), ("down", 64, 256, 4, 3, 8)),
    (("gate_up", 64, 128, 1, 2, 4), ("down", 64, 256, 4, 2, 8)),
    (("gate_up", 64, 128, 1, 3, 0), ("down", 64, 128, 4, 3, 16)),
)
JOINT: dict[str, tuple[tuple[Few, ...], ...]] = {
    "dense": (
        (("o", 64, 256, 2, 3, 16),),
        (("o", 64, 256, 4, 3, 8),),
        (("o", 64, 512, 4, 2, 8),),
        (("o", 64, 256, 2, 3, 16), ("qkv", 64, 256, 2, 2, 0)),
        (("gate_up", 64, 64, 1, 4, 0), ("down", 64, 128, 4, 6, 8)),
        *((*half, ("qkv", 64, 256, 2, 3, 8), ("o", 64, 256, 2, 3, 16)) for half in HALVES),
    ),
    "fp8": (
        (("o", 64, 256, 4, 3, 2),),
        (("o", 64, 256, 2, 4, 8),),
        (("gate_up", 64, 256, 1, 3, 0), ("down", 64, 256, 4, 4, 8)),
        (("gate_up", 64, 128, 1, 4, 0), ("down", 64, 256, 4, 4, 8), ("qkv", 64, 256, 2, 4, 4), ("o", 64, 256, 4, 3, 2)),
        (("gate_up", 64, 256, 1, 2, 4), ("down", 64, 256, 4, 3, 8), ("qkv", 64, 256, 2, 3, 4), ("o", 64, 256, 4, 2, 4)),
    ),
}


@dataclasses.dataclass(frozen=True)
class Move:
    """A change of the tuning: of which kernel, or of "settings"."""

    part: str
    name: str
    apply: Change


def key_of(format: str, part: str) -> str:
    """Return the name of a product's tiles."""
    return f"{format}:{SHAPES[part][0]}:{SHAPES[part][1]}"


def with_config(format: str, part: str, config: LinearConfig) -> Change:
    """Return a change to these tiles of a product."""
    return lambda tuning: dataclasses.replace(tuning, linear={**tuning.linear, key_of(format, part): config})


def with_fields(format: str, part: str, **fields: int | bool) -> Change:
    """Return a change of some fields of a product's tiles."""

    def apply(tuning: Tuning) -> Tuning:
        return with_config(format, part, dataclasses.replace(tuning.linear[key_of(format, part)], **fields))(tuning)

    return apply


def with_attention(**fields: int | bool) -> Change:
    """Return a change of attention's fields."""
    return lambda tuning: dataclasses.replace(tuning, attention=dataclasses.replace(tuning.attention, **fields))


def with_settings(**fields: int | bool) -> Change:
    """Return a change of what holds for all products."""
    return lambda tuning: dataclasses.replace(tuning, **fields)


def one_after_another(changes: list[Change]) -> Change:
    """Return all changes as one."""

    def apply(tuning: Tuning) -> Tuning:
        for change in changes:
            tuning = change(tuning)
        return tuning

    return apply


def shown(fields: dict[str, int | bool]) -> str:
    """Return fields in a few words."""
    return ", ".join(f"{name} {value}" for name, value in fields.items())


def short(config: LinearConfig) -> str:
    """Return tiles in a word: weight rows x columns, stretches, stages, lines ahead, registers."""
    lines = f"{'b' if config.bulk else 'a'}{config.ahead}" if config.ahead else "a0"
    registers = f"r{config.registers}" if config.registers else ""
    return f"{config.block_n}x{config.block_k}/{config.split_k}s{config.num_stages}{lines}{registers}"


def settings_moves(format: str, own: bool) -> list[Move]:
    """Return settings, and ways to attend that change no bit; `own`: only what other formats do not share."""
    tried: list[dict[str, int | bool]] = [{"small_first": True}, {"end_first": True}]
    tried += [{"near_rows": True}, {"small_first": True, "end_first": True}]
    if format == "dense":
        tried += [{"thin_rows": 1}, {"thin_rows": 4}, {"thin_rows": 8}]
        tried += [{"thin_rows": 4, "small_first": True, "end_first": True, "near_rows": True}]
    if format == "fp8":
        tried += [
            {"fold_codes": 16},
            {"fold_codes": 4},
            {"fold_codes": 16, "fold_norm_codes": 1},
            {"fold_codes": 16, "fold_norm_codes": 4},
            {"fold_codes": 16, "fold_norm_codes": 8},
            {"fold_codes": 16, "fold_norm_codes": 1, "small_first": True, "end_first": True},
            {"fold_codes": 16, "fold_norm_codes": 8, "small_first": True, "end_first": True},
        ]
    tried += [{"small_first": False}, {"end_first": False}, {"near_rows": False}, {"thin_rows": 0}]
    found = [
        Move("settings", shown(fields), with_settings(**fields))
        for fields in tried
        if not own or SHARED.isdisjoint(fields)
    ]
    return found if own else found + [Move("attention", shown(fields), with_attention(**fields)) for fields in NEAR]


def far_moves() -> list[Move]:
    """Return ways to attend that change bits."""
    return [Move("attention", shown(fields), with_attention(**fields)) for fields in FAR]


def tile_moves(format: str, part: str, splits: int | None = None) -> list[Move]:
    """Return a product's tiles, in so many stretches, or in any."""
    found = []
    for stretches, tiles in (FP8 if format == "fp8" else DENSE)[part].items():
        for block_n, block_k, stages in tiles if splits in (None, stretches) else ():
            for count in stages:
                for lines, bulk in AHEAD:
                    config = LinearConfig(block_n, block_k, stretches, 4, count, lines, bulk)
                    found.append(Move(part, short(config), with_config(format, part, config)))
    return found


def joint_moves(format: str, own: bool) -> list[Move]:
    """Return tiles of several products at once, and with attention in two stages, so that all leave room."""
    found = []
    for products in JOINT[format]:
        configs = [
            (part, LinearConfig(rows, columns, splits, 4, stages, lines, lines > 0))
            for part, rows, columns, splits, stages, lines in products
        ]
        changes = [with_config(format, part, config) for part, config in configs]
        name = ", ".join(f"{part} {short(config)}" for part, config in configs)
        found.append(Move("joint", name, one_after_another(changes)))
        if own:
            continue
        near = with_attention(num_stages=2, early_blocks=2, bulk=True, compact=True)
        found.append(Move("joint", f"{name}, attention in 2 stages", one_after_another([*changes, near])))
    return found


def fine_moves(format: str, tuning: Tuning) -> list[Move]:
    """Return changes of what is not a tile: lines ahead and registers of each product, one stage more or less."""
    found = []
    for part in SHAPES:
        config = tuning.linear[key_of(format, part)]
        changed = [dataclasses.replace(config, ahead=lines, bulk=bulk) for lines, bulk in FINE]
        changed += [dataclasses.replace(config, registers=count) for count in REGISTERS]
        changed += [dataclasses.replace(config, num_stages=max(config.num_stages + more, 2)) for more in (-1, 1)]
        found += [Move(part, short(one), with_config(format, part, one)) for one in changed if one != config]
    return found
