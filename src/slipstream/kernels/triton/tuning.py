"""Configurations of the kernels per architecture: files in configs/, what `slipstream tune` found, and else one rule.

A row's bits depend on `split_k` and on the kind of matrix instruction, never on how many rows share the pass: one
configuration belongs to a (format, N, K), and the number of rows only picks the width of the token tile.
"""

import hashlib
import json
import logging
import re
from dataclasses import asdict, dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import Any

import torch

from slipstream.checkpoint.cache_dir import default_cache_dir
from slipstream.errors import KernelError
from slipstream.records.store import write_text

_LOG = logging.getLogger(__name__)

MOST_WIDE_ROWS = 256
"""A token tile holds no more; passes of more rows have several."""
CHAIN_ROWS = 4
"""Up to so many rows, a chain's or fewer, a pass may have tiles of its own."""
FEWER_ROWS, FEW_ROWS = 32, 64
"""Up to so many rows a token tile is narrow, and what is best for hundreds is not for them."""
_SHARED_BYTES = {"sm_80": 163 << 10, "sm_86": 99 << 10, "sm_89": 99 << 10, "sm_100": 227 << 10, "sm_120": 99 << 10}
"""What a program may have of shared memory, on architectures that have no file: stages are as many as fit."""
Json = dict[str, Any]
"""A parsed configuration file; its fields are checked when the dataclasses below are built."""


@dataclass(frozen=True)
class LinearConfig:
    """Tiles of a GEMM: `block_n` weight rows by `block_k` columns a step, K cut in `split_k` splits.

    Args:
        prefetch_lines: 128-byte lines of each weight row to prefetch to L2, past the stages, before the inputs are
            there: a power of two, or 0 for none.
        program_n: weight rows of a tile that are its program's, an even number, in products of up to 16 rows; 0: all.
            Matrix instructions have 64, and how many programs there are decides how evenly SMs read.
        sliced_k: whether a program has all splits of fewer weight rows in one tile, in products of so few rows that a
            token tile holds them once for each split. Then no partial sum goes through memory.
        gemv_stages: stages of the shared-memory ring of a product of 1 to 4 rows (`hopper_gemv`, sm_90); 0: that kernel
            is not used. So many that two programs do not fit an SM.
        gemv_trigger: TMA loads that are left there when the next kernel may start; -1: it may at once.
    """

    block_n: int
    block_k: int
    split_k: int
    num_warps: int
    num_stages: int
    prefetch_lines: int = 8
    program_n: int = 0
    sliced_k: bool = False
    gemv_stages: int = 0
    gemv_trigger: int = -1

    @property
    def outputs(self) -> int:
        """Weight rows that are a program's."""
        return self.program_n or (self.block_n // self.split_k if self.sliced_k else self.block_n)


@dataclass(frozen=True)
class WideConfig:
    """Tiles of a product whose programs take all rows of a pass, up to 256; the columns' order is the narrow tiles'.

    Args:
        block_n: weight rows of a tile.
        pair: whether a program takes two tiles, which share the rows it loads.
        tma: whether tiles are fetched by TMA (NVIDIA from sm_90 on).
        deferred: whether splits' sums are left for the kernel that follows, where it can add them.
        prefetch: whether programs prefetch the first lines of their weights before the PDL wait.
        together: whether all tiles of a step are waited for before the first is multiplied, and not one after another
            (sm_90). The products of an FP8 step, of 128 columns at most, are then whole before they are added to the
            sums: the same bits there, and instructions that need not wait for one another.
        warp_specialised: whether a producer warp loads tiles and the others multiply (`wide_streams`, sm_90), where K
            has one split and there is no residual, or the reduction is deferred.
        at_once: there, whether a step must have been multiplied before the next is waited for; with FP8 it always must.
        from_rows: passes of fewer rows take the narrow tiles; it matters in a configuration for few rows alone. Less
            than 17 takes passes from `small_m`.
    """

    block_n: int
    pair: bool
    block_k: int
    num_warps: int
    num_stages: int
    tma: bool = False
    deferred: bool = False
    prefetch: bool = True
    together: bool = False
    warp_specialised: bool = False
    at_once: bool = False
    from_rows: int = 17


@dataclass(frozen=True)
class AttentionConfig:
    """Tiles of attention: `split` keys to a partial result (part of the bits), `block` keys a step.

    Args:
        rows_wide: rows of the tile when a pass brings more queries than the narrow tile of 16 holds.
        serial_from: from so many queries a request on, one program takes all splits instead of one each.
        programs: where there would be more programs than this, each takes groups of splits; that changes no bits.
        registers: the most that a thread may have where programs take groups of BF16 keys, and in `hopper_split_kv`, so
            that more of them run at a time (NVIDIA); 0: as many as the compiler likes.
        share: splits a program takes where the bound on keys is reached; the more, the fewer are idle below it.
        compact: whether the last program of a tile with a single query merges the heads of that query alone, sixteen
            results at a time.
        even_programs: where programs take groups and narrow tiles hold each request's queries, as many programs (those
            that run at a time) share all requests' groups evenly; 0: a request's programs share its own. That changes
            no bits.
        even_from: but for passes with fewer groups than this, over all requests and heads, at the bound on keys.
        hopper_split_warps: warps of a program of `hopper_split_kv` (sm_90), where programs take splits of a request and
            not groups; 0: that kernel is not used. That changes no bits.
        persistent_programs: programs of `persistent_ws` (sm_90), where `even_programs` could be; 0: that kernel is not
            used. That changes no bits.
        persistent_from: but for passes of fewer requests than this.
        persistent_groups: and but for those with fewer groups than this, counted as for `even_from`.
    """

    split: int = 256
    block: int = 64
    rows_wide: int = 32
    serial_from: int = 65
    num_warps: int = 4
    num_stages: int = 2
    programs: int = 1056
    registers: int = 0
    share: int = 1
    compact: bool = False
    even_programs: int = 0
    even_from: int = 0
    hopper_split_warps: int = 0
    persistent_programs: int = 0
    persistent_from: int = 0
    persistent_groups: int = 0


@dataclass(frozen=True)
class Tuning:
    """What is known of one architecture.

    Args:
        linear: configurations by "format:N:K".
        linear_few: tiles of passes with up to 4 rows, by "format:N:K", where others are better than `linear`'s.
        linear_many: tiles of passes with 17 to 64 rows, by "format:N:K" or by format, where others are better than
            `linear`'s.
        wide: tiles of passes with more than 256 rows, by format; without `wide_linear` those with more than 64.
        wide_linear: tiles of passes with up to 256 rows that one program takes, by "format:N:K" or by format; of those
            with up to 64 rows by "format:N:K/64" only, or, with up to 32, by "format:N:K/32" where there is one, and
            other passes have the narrow tiles.
        programs: how many programs keep the device's memory busy; products are split over K until there are as many.
        shared_bytes: what a program's tiles in flight may take of the shared memory; 0: configurations fit as they are.
        fp8_dot: whether matrix instructions read E4M3 as stored in checkpoints.
        dependent_launch: whether a kernel may start while the one before it drains (NVIDIA from sm_90 on).
        add_warps: the most warps of a program that adds the splits of a row of more than 1,024 numbers.
        weights_first: whether products of up to 16 rows start on their weights before their rows are there.
        fold_rows: up to so many rows, norms and rotations are part of those products.
        fold_codes: up to so many rows, those with FP8 weights make the codes of their rows, where no norm is between.
        fold_norm_codes: up to so many rows, at most 8, they make them of rows that have their norm to come.
        measured: whether an architecture has a file; without one portable kernels run, with tiles by arithmetic.
    """

    architecture: str
    linear: dict[str, LinearConfig] = field(default_factory=dict)
    wide: dict[str, LinearConfig] = field(default_factory=dict)
    linear_few: dict[str, LinearConfig] = field(default_factory=dict)
    linear_many: dict[str, LinearConfig] = field(default_factory=dict)
    wide_linear: dict[str, WideConfig] = field(default_factory=dict)
    attention: AttentionConfig = field(default_factory=AttentionConfig)
    programs: int = 264
    bytes_per_step: int = 256
    num_stages: int = 4
    shared_bytes: int = 0
    fp8_dot: bool = False
    dependent_launch: bool = False
    add_warps: int = 8
    weights_first: bool = False
    fold_rows: int = 0
    fold_codes: int = 0
    fold_norm_codes: int = 0
    measured: bool = True

    @property
    def instruction(self) -> int:
        """Rows and columns of the matrix instruction, one for all kernels, where there is a choice (AMD); 0: none."""
        return matrix_instruction(self.architecture)

    def linear_config(self, format: str, num_outputs: int, num_inputs: int, itemsize: float) -> LinearConfig:
        """Return the tiles of a weight [num_outputs, num_inputs] kept in `itemsize` bytes a number."""
        known = self.linear.get(f"{format}:{num_outputs}:{num_inputs}")
        if known is not None:
            return known
        block_k = int(self.bytes_per_step / itemsize)
        while block_k > 64 and num_inputs % block_k:
            block_k //= 2
        num_tiles, num_steps = -(-num_outputs // 64), -(-num_inputs // block_k)
        split_k = 1
        while split_k < 8 and num_tiles * split_k < self.programs and num_steps >= 8 * split_k:
            split_k *= 2
        return LinearConfig(64, block_k, split_k, 4, self.num_stages)

    def few_config(self, shape: str, narrow: LinearConfig) -> LinearConfig:
        """Return the tiles of a "format:N:K" for a chain or less; the bits stay those of `narrow`."""
        return _with_order_of(narrow, self.linear_few.get(shape, narrow))

    def many_config(self, shape: str, narrow: LinearConfig) -> LinearConfig:
        """Return the tiles of a "format:N:K" for a few dozen rows; the bits stay those of `narrow`."""
        tiles = self.linear_many.get(shape) or self.linear_many.get(shape.partition(":")[0], narrow)
        return _with_order_of(narrow, tiles)

    def wide_config(self, format: str, narrow: LinearConfig) -> LinearConfig:
        """Return the tiles for passes of many rows; the bits stay those of `narrow`."""
        return _with_order_of(narrow, self.wide.get(format, narrow))

    def wide_linear_config(self, shape: str, num_rows: int) -> WideConfig | None:
        """Return the tiles with which one program takes all rows of a pass, if the "format:N:K" has such."""
        few = num_rows <= FEW_ROWS
        config = self.wide_linear.get(few_rows_name(shape) if few else shape)
        if num_rows <= FEWER_ROWS:
            config = self.wide_linear.get(few_rows_name(shape, FEWER_ROWS), config)
        return None if config is None or (few and num_rows < config.from_rows) else config

    def wide_format_config(
        self, format: str, num_rows: int, num_outputs: int, narrow: LinearConfig
    ) -> WideConfig | None:
        """Return the same by format, for weights whose programs keep a good part of the device busy."""
        config = self.wide_linear.get(format) if num_rows > FEW_ROWS else None
        if config is None or 4 * narrow.split_k * -(-num_outputs // config.block_n) < self.programs:
            return None
        return config

    def fitted(self, config: LinearConfig, tile: int, itemsize: float, *, staged_rows: bool = True) -> LinearConfig:
        """Return the configuration with as many stages as fit beside a token tile; stages change no bits.

        Args:
            staged_rows: whether each stage holds a token tile too, or one is all there is.
        """
        tile_bytes = int(tile * config.block_k * itemsize)
        step_bytes = int(config.block_n * config.block_k * itemsize) + tile_bytes * staged_rows
        most_bytes = self.shared_bytes - tile_bytes * (not staged_rows)
        most = most_bytes // step_bytes if self.shared_bytes else config.num_stages
        return replace(config, num_stages=max(min(config.num_stages, most), 1))


def few_rows_name(shape: str, most: int = FEW_ROWS) -> str:
    """Return the name under which a "format:N:K" has tiles for so many rows at the most."""
    return f"{shape}/{most}"


def _with_order_of(narrow: LinearConfig, tiles: LinearConfig) -> LinearConfig:
    """Return tiles that add columns in the order of `narrow`.

    The splits are its own, and a step divides them. Rows of the weight, warps and stages change no order, as long
    as the matrix instruction stays the same: on sm_90 that of 64 rows, for tiles of 64 and 128.
    """
    return replace(tiles, block_k=min(tiles.block_k, narrow.block_k), split_k=narrow.split_k)


def read_tuning(architecture: str) -> Tuning:
    """Return what is known of an architecture; one without a file gets the rule."""
    file = resources.files("slipstream.kernels.triton") / "configs" / f"{architecture}.json"
    if not file.is_file():
        return Tuning(architecture, shared_bytes=_SHARED_BYTES.get(architecture, 0), measured=False)
    return parse_tuning(architecture, json.loads(file.read_text(encoding="utf-8")))


def parse_tuning(architecture: str, data: Json) -> Tuning:
    """Build a tuning from a configuration file's content."""
    try:
        return _merged(Tuning(architecture), data)
    except TypeError as error:
        raise KernelError(f"configs/{architecture}.json has a field this version does not know: {error}.") from error


def _merged(tuning: Tuning, data: Json) -> Tuning:
    """Return a tuning with a file's entries in place of its own, or beside them."""
    found: Json = {
        name: {**getattr(tuning, name), **{entry: kind(**fields) for entry, fields in data[name].items()}}
        for name, kind in _SECTIONS.items()
        if name in data
    }
    if "attention" in data:
        found["attention"] = replace(tuning.attention, **data["attention"])
    return replace(tuning, **{**data, **found})


def tuned_file(device: torch.device) -> Path:
    """Return where `slipstream tune` writes what it found for a GPU, in the user's cache."""
    name = re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name(device).lower()).strip("-")
    return default_cache_dir() / "tuning" / f"{name}.json"


def write_tuned(path: Path, shipped: Tuning, tuned: Tuning) -> None:
    """Write what is tuned otherwise than it ships, and what it was tuned beside; other models' tiles stay."""
    before = with_tuned(shipped, path)
    changed: Json = {"beside": _digest(shipped), "attention": asdict(tuned.attention)}
    for name in _SECTIONS:
        ours = getattr(shipped, name)
        entries = {
            key: config
            for key, config in (*getattr(before, name).items(), *getattr(tuned, name).items())
            if ours.get(key) != config
        }
        changed[name] = {key: asdict(config) for key, config in entries.items()}
    write_text(path, json.dumps(changed, indent=1, sort_keys=True) + "\n")


def with_tuned(shipped: Tuning, path: Path) -> Tuning:
    """Return what ships with what a file has instead; one that another version wrote is left out, and says so."""
    if not path.is_file():
        return shipped
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data.pop("beside", None) == _digest(shipped):
            return _merged(shipped, data)
        _LOG.warning("%s was tuned for another version of the kernels and is not used; run `slipstream tune`.", path)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        _LOG.warning("%s cannot be read (%s) and is not used; run `slipstream tune` again.", path, error)
    return shipped


def _digest(shipped: Tuning) -> str:
    return hashlib.sha256(repr(shipped).encode()).hexdigest()[:16]


_SECTIONS: dict[str, type[LinearConfig] | type[WideConfig]] = {
    "linear": LinearConfig,
    "wide": LinearConfig,
    "linear_few": LinearConfig,
    "linear_many": LinearConfig,
    "wide_linear": WideConfig,
}


def matrix_instruction(architecture: str) -> int:
    """Return the size of AMD's matrix instruction that all kernels take (`launch_options`); 0 elsewhere."""
    return 16 if architecture.startswith("gfx") else 0


def has_fp8(architecture: str) -> bool:
    """Tell whether a GPU's instructions know E4M3: NVIDIA's do from sm_89 on."""
    return architecture not in ("sm_80", "sm_86", "sm_87")


def check_architecture(architecture: str) -> None:
    """Refuse GPUs that the kernels do not compile for."""
    too_old = architecture.startswith("sm_") and int(architecture.removeprefix("sm_")) < 80
    if too_old or (architecture.startswith("gfx") and architecture not in ("gfx942", "gfx950")):
        raise KernelError(
            f"The Triton kernels are for NVIDIA GPUs from sm_80 (A100) on and for AMD's gfx942 and gfx950; this one is "
            f"{architecture}. Choose the 'reference' kernels, which are torch's."
        )


def architecture_of(device: torch.device) -> str:
    """Return the name an architecture's file goes by: sm_90, gfx942, ...; "interpreter" where there is no GPU."""
    if device.type == "cpu":
        return "interpreter"
    if torch.version.hip is not None:
        name: str = torch.cuda.get_device_properties(device).gcnArchName
        return name.split(":")[0]
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"
