"""Every kind of step and of prompt batch, ready to be launched: kernels compiled, graphs captured, once and for all.

Making something ready runs it, so the batch is empty meanwhile. What traffic can need is made ready before the first
request; what was not foreseen (another length of chains) when it is first needed.
"""

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from slipstream.executors.cuda_graph.capture import Capturer, joined_buckets, key_bounds, row_buckets, seconds_of
from slipstream.executors.cuda_graph.passes import CatchUp
from slipstream.executors.cuda_graph.prompts import PADDED_SIZES, Mixed, PaddedPrompts, Part, Prompts, fits_padded
from slipstream.executors.cuda_graph.state import StepModels
from slipstream.executors.cuda_graph.step import Step, StepBuffers, StepKind
from slipstream.executors.cuda_graph.transfer import Arrival, download
from slipstream.executors.cuda_graph.tree_step import TreeStep, make_step
from slipstream.executors.interface import StepCosts
from slipstream.kernels import CompiledOps

_LONG_PROMPTS = (640, 2048, 8192)
"""Lengths of prompts between which the kernels for long ones change."""
_FEW_KEYS = 128
"""Of a row, where what a step takes hardly depends on them."""


@dataclass(frozen=True)
class StepLaunches:
    """The parts of one kind of step, ready to be launched.

    Args:
        mixed: the target's pass with a padded prompt batch beside it, by the size of that.
    """

    step: Step | TreeStep
    draft: Callable[[], None]
    verify: Callable[[], None]
    choose: Callable[[], None]
    extend: Callable[[], None]
    mixed: dict[int, Callable[[], None]] = field(default_factory=dict)

    def parts(self, size: int | None = None) -> list[Callable[[], None]]:
        """Return what is launched, in order; with a padded prompt batch of a size beside it, if there is one."""
        return [self.draft, self.verify if size is None else self.mixed[size], self.choose, self.extend]


@dataclass(frozen=True)
class PromptLaunches:
    """What a padded prompt batch does, ready to be launched."""

    prompts: PaddedPrompts
    compute: Callable[[], None]
    choose: Callable[[], None]
    extend: Callable[[], None] | None

    def finish(self, *, ends: bool) -> Arrival | None:
        """Launch what follows the target's pass; return what was chosen after whole prompts, if any `ends`."""
        arrival = None
        if ends:
            self.choose()
            assert self.prompts.sampled is not None, "it was chosen when it was made ready"
            arrival = download(self.prompts.sampled)
        if self.extend is not None:
            self.extend()
        return arrival


class Prepared:
    """Makes steps ready and keeps them."""

    def __init__(self, models: StepModels, buffers: StepBuffers, max_context: int) -> None:
        self._models, self._buffers, self._max_context = models, buffers, max_context
        self._capturer = Capturer(models.device, models.ops.capturable)
        self._steps: dict[StepKind, StepLaunches] = {}
        self._padded: dict[int, PromptLaunches] = {}
        self._catch_ups: dict[int, Callable[[], None]] = {}  # by rows
        self._costs: dict[StepKind, StepCosts] = {}
        self._taken: dict[StepKind, list[tuple[int, float]]] = {}  # keys of a row, and seconds with so many
        # Latents of prompts need passes of their own.
        self._sizes: tuple[int, ...] = PADDED_SIZES if models.target.spec.mla is None else ()
        self._buckets = row_buckets(len(buffers.state.active_R) - 1)
        self._joined_buckets = joined_buckets(self._buckets[-1])
        self._bounds = key_bounds(buffers.state.rows.pages_RP.shape[1] * models.target_kv.page_size)
        self.as_they_come = Prompts(models, buffers)

    def num_rows(self, num_places: int) -> int:
        """Return the size of the smallest step with so many places."""
        return next(size for size in self._buckets if size >= num_places)

    def joined_rows(self, num_places: int) -> int:
        """Return the size of the smallest step with so many places that prompts are computed beside."""
        return next(size for size in self._joined_buckets if size >= num_places)

    def max_keys(self, longest: int) -> int:
        """Return the bound on keys of the smallest step for rows of at most so many."""
        return next((bound for bound in self._bounds if bound >= longest), self._bounds[-1])

    def padded_size(self, parts: Sequence[Part]) -> int | None:
        """Return the padded size that parts are computed in; None if they are computed as they come."""
        size = fits_padded(parts) if parts else None
        return size if size in self._sizes else None

    def mixes(self, kind: StepKind) -> bool:
        """Tell whether padded prompts are computed beside such a step, if they are for its drafts.

        Both then want the same states of the target. Steps over long contexts read so many keys that a pass of their
        own costs prompts little more.
        """
        same = kind.has_states or self._models.draft is None
        return bool(self._sizes) and same and kind.max_keys == self._bounds[0]

    def costs(self, kind: StepKind) -> StepCosts | None:
        """Return what such a step costs; None where it was not measured with prompts beside it."""
        costs = self._costs.get(kind)
        return costs if costs is not None and costs.beside_s else None

    def seconds(self, kind: StepKind, num_keys: float) -> float | None:
        """Return what such a step takes alone with rows of so many keys; None where it was not measured."""
        if kind not in self._taken:
            return None
        (few, few_s), (many, many_s) = self._taken[kind]
        return few_s + max(many_s - few_s, 0.0) * max(num_keys - few, 0) / (many - few)

    def step(self, kind: StepKind) -> StepLaunches:
        """Return a kind of step."""
        if kind not in self._steps:
            with self._nobody_there():
                step, drafts = make_step(self._models, self._buffers, kind), kind.num_drafted > 0
                draft = self._capturer.capture(step.draft) if drafts else _nothing
                verify = self._capturer.capture(step.verify)
                if step.hidden is None:
                    step.draft()
                    step.verify()
                choose = self._capturer.capture(step.choose)
                extend = self._capturer.capture(step.extend) if drafts else _nothing
            self._steps[kind] = StepLaunches(step, draft, verify, choose, extend)
        return self._steps[kind]

    def catch_up(self, num_rows: int) -> Callable[[], None]:
        """Return what lets the draft follow so many rows that were decoded without it."""
        if num_rows not in self._catch_ups:
            with self._nobody_there():
                self._catch_ups[num_rows] = self._capturer.capture(self._catching_up(num_rows).run)
        return self._catch_ups[num_rows]

    def _catching_up(self, num_rows: int) -> CatchUp:
        num_columns = -(-self._bounds[-1] // self._models.target_kv.page_size)
        return CatchUp(self._models, self._buffers.state, num_rows, num_columns)

    def mixed(self, kind: StepKind, size: int) -> Callable[[], None]:
        """Return a step's pass with a padded prompt batch beside it."""
        launches = self.step(kind)
        if size not in launches.mixed:
            with self._nobody_there():
                launches.draft()  # or the nodes of the last such step would be computed once more, where others lie now
                mixed = Mixed(self._models, launches.step, self.prompts(size).prompts)
                launches.mixed[size] = self._capturer.capture(mixed.verify)
        return launches.mixed[size]

    def prompts(self, size: int) -> PromptLaunches:
        """Return a padded prompt batch."""
        if size not in self._padded:
            with self._nobody_there():
                prompts = PaddedPrompts(self._models, self._buffers, size)
                compute, choose = self._capturer.capture(prompts.compute), self._capturer.capture(prompts.choose)
                extend = self._capturer.capture(prompts.extend) if self._models.draft is not None else None
            self._padded[size] = PromptLaunches(prompts, compute, choose, extend)
        return self._padded[size]

    def warm_up(self, kinds_of: Callable[[int, int], Mapping[StepKind, bool]]) -> list[str]:
        """Make ready all that traffic can need; return what that took, in sentences.

        Args:
            kinds_of: names the kinds of steps for so many rows and a bound on keys, and whether prompts may join each.
        """
        on_gpu = self._models.device.type == "cuda"
        free = torch.cuda.mem_get_info()[0] if on_gpu else 0
        kinds = {
            kind: joined and self.mixes(kind) and num_rows in self._joined_buckets
            for max_keys in self._bounds
            for num_rows in reversed(self._buckets)  # the largest first: the others fit the memory it took
            for kind, joined in kinds_of(num_rows, max_keys).items()
        }
        started = time.perf_counter()
        self._compile(kinds)
        compiled_s = time.perf_counter() - started
        with self._nobody_there():
            self._pretend_prompts(_LONG_PROMPTS[0], 1)
        for size in self._sizes:
            self.prompts(size)
        for kind, mixes in kinds.items():
            self.step(kind)
            if kind.notes:
                self.catch_up(kind.num_rows)
            for size in self._sizes if mixes else ():
                self.mixed(kind, size)
        if not self._capturer.count:
            return []
        started = time.perf_counter()
        self.measure()
        measured_s = time.perf_counter() - started
        taken_mib = (free - torch.cuda.mem_get_info()[0]) / 2**20
        return [
            f"graphs: kernels ready in {compiled_s:.1f} s; {self._capturer.count} graphs captured in "
            f"{self._capturer.seconds:.1f} s, {taken_mib:.0f} MiB; steps timed in {measured_s:.1f} s",
            *itertools.islice((_said(kind, costs) for kind, costs in self._costs.items() if costs.beside_s), 1),
        ]

    def measure(self) -> None:
        """Find out what steps not measured yet take with few keys and with many, and with prompts beside them.

        Rows are nobody's: their tokens differ, as requests' would, since each may wake other experts, and their keys
        are read all over the cache.
        """
        state = self._buffers.state
        with self._nobody_there():
            length = min(_LONG_PROMPTS[1], self._max_context)
            prompt_s = seconds_of([lambda: self._pretend_prompts(length, 1)]) / length
            state.imagine_rows(self._models.target.spec.vocab_size)
            for kind, launches in self._steps.items():
                if kind in self._taken:
                    continue
                taken = []
                for num_keys in self._measured_keys(kind.max_keys):
                    state.rows.committed_R.fill_(num_keys)
                    taken.append((num_keys, seconds_of(launches.parts())))
                state.rows.committed_R.fill_(taken[0][0])
                beside_s = {}
                for size in launches.mixed:
                    prompts = self._padded[size]
                    ends = [prompts.choose, *([prompts.extend] if prompts.extend else [])]
                    beside_s[size] = seconds_of([*launches.parts(size), *ends]) - taken[0][1]
                self._taken[kind], self._costs[kind] = taken, StepCosts(taken[0][1], beside_s, prompt_s)

    def _measured_keys(self, max_keys: int) -> tuple[int, int]:
        """Return few and many keys of rows that take such a step."""
        smaller = [bound for bound in self._bounds if bound < max_keys]
        few = smaller[-1] if smaller else min(_FEW_KEYS, self._max_context // 2)
        return few, few + max(3 * (min(max_keys, self._max_context) - few) // 4, 1)

    def _compile(self, kinds: Mapping[StepKind, bool]) -> None:
        """Have the kernels of steps and prompts compiled, side by side where nothing depends on what they compute."""
        models, buffers = self._models, self._buffers
        dense = models.target.spec.moe is None
        if models.device.type != "cuda" or not isinstance(models.ops, CompiledOps) or not dense:
            return
        with self._nobody_there(), models.ops.compiling():
            for size in self._sizes:
                prompts = PaddedPrompts(models, buffers, size)
                prompts.compute()
                prompts.choose()
                if models.draft is not None:
                    prompts.extend()
            for size in _LONG_PROMPTS:
                self._pretend_prompts(size, 1)
            for count in self._part_counts():
                self._pretend_prompts(_LONG_PROMPTS[0], count)
            for kind, mixes in kinds.items():
                step = make_step(models, buffers, kind)
                step.draft()
                step.verify()
                step.choose()
                if kind.num_drafted:
                    step.extend()
                if kind.notes:
                    self._catching_up(kind.num_rows).run()
                for size in self._sizes if mixes else ():
                    Mixed(models, step, PaddedPrompts(models, buffers, size)).verify()

    def _pretend_prompts(self, size: int, count: int) -> None:
        """Compute so many prompts, of so many tokens altogether, that are nobody's."""
        state = self._buffers.state
        nobody, each = len(state.active_R) - 1, max(min(size, self._max_context) // count, 1)
        pages = [state.empty_page] * -(-each // self._models.target_kv.page_size)
        self.as_they_come.run([Part([0] * each, [0] * (each - 1), 0, pages, nobody, each, nobody)] * count, None)

    def _part_counts(self) -> list[int]:
        """Return how many prompts may be computed together, as far as kernels tell the numbers apart."""
        most = self._buckets[-1]
        return [*itertools.takewhile(lambda count: count < most, (2**power for power in range(1, 12))), most]

    @contextmanager
    def _nobody_there(self) -> Iterator[None]:
        """Take every row out of the batch for a while."""
        state = self._buffers.state
        saved = state.saved()
        state.active_R.fill_(0)
        state.rows.pages_RP.fill_(state.empty_page)
        yield
        state.restore(saved)


def _nothing() -> None:
    """Do nothing: a step without drafts has two parts."""


def _said(kind: StepKind, costs: StepCosts) -> str:
    beside = ", ".join(f"{size} {seconds * 1e3:+.1f}" for size, seconds in costs.beside_s.items())
    return (
        f"steps: {kind.num_rows} requests in {costs.step_s * 1e3:.1f} ms; with so many tokens of prompts beside them, "
        f"{beside} ms; a long prompt alone {costs.prompt_s * 1e6:.0f} us a token"
    )
