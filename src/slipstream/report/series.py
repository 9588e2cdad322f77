"""Gathers records into cells (one arm at one load, over its seeds) and compares each with its baseline."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from slipstream.records.compare import Speedup, speedup
from slipstream.records.point import PointRecord

T = TypeVar("T")
Metric = Callable[[PointRecord], float | None]


@dataclass(frozen=True)
class Setting:
    """Where arms are compared: one recipe, topology and workload."""

    recipe: str
    topology: str
    workload: str
    one_of_several: bool = False

    def title(self) -> str:
        """Return a heading for it; the recipe is named when the report has several."""
        place = f"{self.workload} on {self.topology}"
        return f"{self.recipe}: {place}" if self.one_of_several else place


@dataclass(frozen=True)
class Cell:
    """One arm at one concurrency in one setting: the valid records of its seeds."""

    setting: Setting
    arm: str
    concurrency: int
    records: tuple[PointRecord, ...]

    def by_seed(self, metric: Metric) -> dict[int, float]:
        """Return a metric's value for each seed that has one."""
        return {record.key.seed: value for record in self.records if (value := metric(record)) is not None}

    def mean(self, metric: Metric) -> float | None:
        """Return the plain mean over seeds."""
        values = list(self.by_seed(metric).values())
        return sum(values) / len(values) if values else None


class Grid:
    """All cells of a set of records, in the order a report shows them: baseline first, then as first measured."""

    def __init__(self, records: Sequence[PointRecord]) -> None:
        several_machines = len({_machine_of(record) for record in records}) > 1
        several = several_machines or len({record.provenance.recipe for record in records}) > 1

        def setting_of(record: PointRecord) -> Setting:
            # Arms of two machines are no pair, however alike their recipes.
            recipe = record.provenance.recipe + (f" ({_machine_of(record)})" if several_machines else "")
            return Setting(recipe, record.key.topology, record.key.workload, several)

        # A point that was measured again counts once, as it was measured last.
        by_point = {(setting_of(r), r.key): r for r in _by_start(records) if r.status == "valid"}

        self.settings = _ordered(setting_of(record) for record in records)
        self._baseline = {(setting_of(record), record.key.arm): record.baseline_arm for record in records}
        self._cells: dict[tuple[Setting, str, int], list[PointRecord]] = {}
        for record in sorted(by_point.values(), key=lambda r: r.key.seed):
            self._cells.setdefault((setting_of(record), record.key.arm, record.key.concurrency), []).append(record)
        self._arms: dict[Setting, list[str]] = {}
        everywhere = _ordered(record.key.arm for record in _by_start(records))
        for setting in self.settings:
            here = {record.key.arm for record in records if setting_of(record) == setting}
            names = [arm for arm in everywhere if arm in here]  # the same order in every table and figure
            # Each baseline goes before the arms compared with it, and the recipe's own before all.
            self._arms[setting] = sorted(names, key=lambda arm: arm != self._baseline[setting, arm])

    def arms(self, setting: Setting) -> list[str]:
        """Return a setting's arms, the baseline first."""
        return self._arms[setting]

    def baseline(self, setting: Setting, arm: str) -> str:
        """Return the arm that an arm is compared with; a baseline is its own."""
        return self._baseline[setting, arm]

    def all_arms(self) -> list[str]:
        """Return every arm once; its place decides its colour in every figure."""
        return _ordered(arm for setting in self.settings for arm in self._arms[setting])

    def concurrencies(self, setting: Setting) -> list[int]:
        """Return the concurrencies that have a valid point."""
        return sorted({c for s, _, c in self._cells if s == setting})

    def cell(self, setting: Setting, arm: str, concurrency: int) -> Cell | None:
        """Return a cell, or None when no valid point fills it."""
        records = self._cells.get((setting, arm, concurrency))
        return Cell(setting, arm, concurrency, tuple(records)) if records else None

    def cells(self) -> list[Cell]:
        """Return every filled cell, setting by setting."""
        found = [
            self.cell(setting, arm, concurrency)
            for setting in self.settings
            for arm in self.arms(setting)
            for concurrency in self.concurrencies(setting)
        ]
        return [cell for cell in found if cell is not None]

    def speedup(self, cell: Cell, metric: Metric, higher_is_better: bool = True) -> Speedup | None:
        """Compare a cell with the baseline's at the same load, seed by seed; None for the baseline itself."""
        base = self.cell(cell.setting, self.baseline(cell.setting, cell.arm), cell.concurrency)
        if base is None or base.arm == cell.arm:
            return None
        return speedup(cell.by_seed(metric), base.by_seed(metric), higher_is_better)


def output_per_device(record: PointRecord) -> float | None:
    """Output tokens per second and device."""
    return record.throughput.output_tok_s_per_device if record.throughput else None


def output_tok_s(record: PointRecord) -> float | None:
    """Output tokens per second."""
    return record.throughput.output_tok_s if record.throughput else None


def total_per_device(record: PointRecord) -> float | None:
    """Input and output tokens per second and device."""
    return record.throughput.total_tok_s_per_device if record.throughput else None


def tpot_median(record: PointRecord) -> float | None:
    """Median time per output token, milliseconds."""
    return record.latency.tpot_ms.median if record.latency and record.latency.tpot_ms else None


def tpot_p99(record: PointRecord) -> float | None:
    """99th percentile of the time per output token, milliseconds."""
    return record.latency.tpot_ms.p99 if record.latency and record.latency.tpot_ms else None


def itl_token_median(record: PointRecord) -> float | None:
    """Median gap between chunks divided by their tokens, in ms: what SGLang's client and its published figures show."""
    return record.latency.itl_token_ms.median if record.latency and record.latency.itl_token_ms else None


def itl_median(record: PointRecord) -> float | None:
    """Median gap between streamed chunks, milliseconds."""
    return record.latency.itl_ms.median if record.latency and record.latency.itl_ms else None


def ttft_median(record: PointRecord) -> float | None:
    """Median time to the first token, milliseconds."""
    return record.latency.ttft_ms.median if record.latency else None


def e2e_median(record: PointRecord) -> float | None:
    """Median time of a whole request, milliseconds."""
    return record.latency.e2e_ms.median if record.latency else None


def interactivity(record: PointRecord) -> float | None:
    """Tokens per second that one user sees, at the median."""
    tpot = tpot_median(record)
    return 1e3 / tpot if tpot else None


def acceptance_length(record: PointRecord) -> float | None:
    """Emitted tokens for each target pass."""
    return record.acceptance.length if record.acceptance else None


def input_tokens(record: PointRecord) -> float | None:
    """Mean prompt length."""
    return float(record.input_tokens) if record.input_tokens else None


def output_tokens(record: PointRecord) -> float | None:
    """Mean length of an answer."""
    return float(record.output_tokens) if record.output_tokens else None


def _machine_of(record: PointRecord) -> str:
    hardware = record.provenance.hardware
    return ", ".join((hardware.cpu, f"{hardware.num_cpus} CPUs", *hardware.devices))


def _by_start(records: Sequence[PointRecord]) -> list[PointRecord]:
    return sorted(records, key=lambda record: (record.provenance.started_at, record.key.arm))


def _ordered(items: Iterable[T]) -> list[T]:
    return list(dict.fromkeys(items))
