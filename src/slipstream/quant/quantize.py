"""From checkpoint folder to quantized folder: row block by row block, on all cores, resumable, all or nothing."""

import itertools
import math
import os
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from slipstream.checkpoint.stream import BlockReader, BlockWriter, split_rows
from slipstream.errors import CheckpointError
from slipstream.quant.destination import Destination
from slipstream.quant.formats.rounding import row_amax
from slipstream.quant.plan import Item, QuantizePlan, ShardPlan
from slipstream.quant.report import (
    NO_ERRORS,
    DtypeCount,
    ErrorSums,
    LayerReport,
    dtype_table,
    errors_from_json,
    errors_to_json,
    measure,
)

_COPY_BYTES = 1 << 24
_SAMPLE_EVERY = 32  # blocks, of which one has its error measured; a layer's first always


@dataclass(frozen=True)
class QuantizeResult:
    """What was written."""

    folder: Path
    layers: tuple[LayerReport, ...]
    before: tuple[DtypeCount, ...]
    after: tuple[DtypeCount, ...]
    resumed_shards: int


@dataclass(frozen=True)
class _Done:
    """What one task leaves: source bytes dealt with, and the error of a layer where it was measured."""

    nbytes: int
    module: str = ""
    errors: ErrorSums = NO_ERRORS
    amax: float = 0.0


Task = Callable[[], _Done]


def quantize(
    plan: QuantizePlan,
    folder: Path,
    overwrite: bool = False,
    advance: Callable[[int], None] = lambda nbytes: None,
    num_threads: int | None = None,
) -> QuantizeResult:
    """Run a plan; `folder` appears whole, when everything is in it, or not at all.

    A run that was stopped is taken up where its last whole file ended, if the source and the options are the same.

    Args:
        advance: called with source bytes as they are dealt with, in this thread.
    """
    with Destination(plan, folder, overwrite) as destination, BlockReader(plan.checkpoint) as reader:
        totals: dict[str, ErrorSums] = {}
        resumed = 0
        for shard in plan.shards:
            summary = destination.finished(shard)
            if summary is None:
                with (
                    destination.reporting_full_disk(),
                    BlockWriter(destination.unfinished(shard), shard.layout) as writer,
                ):
                    errors = _run_shard(shard, _Blocks(plan, reader, writer), advance, num_threads or _cores())
                summary = {module: errors_to_json(sums) for module, sums in errors.items()}
                destination.finish(shard, summary)
            else:
                resumed += 1
                advance(sum(item.info.nbytes for item in shard.items))
            totals.update({module: errors_from_json(sums) for module, sums in summary.items()})
        result = QuantizeResult(folder, _layers(plan, totals), *_dtypes(plan), resumed)
        destination.commit(_record(plan, result))
        return result


def _run_shard(
    shard: ShardPlan, blocks: "_Blocks", advance: Callable[[int], None], num_threads: int
) -> dict[str, ErrorSums]:
    errors: dict[str, ErrorSums] = {}
    amax: dict[str, float] = {}
    with _threads(num_threads) as pool:
        for done in _run(pool, num_threads, (task for item in shard.items for task in blocks.amax_tasks(item))):
            amax[done.module] = max(amax.get(done.module, 0.0), done.amax)
        for done in _run(pool, num_threads, (task for item in shard.items for task in blocks.tasks(item, amax))):
            if done.module:
                errors[done.module] = errors.get(done.module, NO_ERRORS) + done.errors
            advance(done.nbytes)
    return errors


class _Blocks:
    """The tasks a tensor is cut into."""

    def __init__(self, plan: QuantizePlan, reader: BlockReader, writer: BlockWriter) -> None:
        self._plan = plan
        self._reader = reader
        self._writer = writer

    def tasks(self, item: Item, amax: dict[str, float]) -> Iterator[Task]:
        """Yield the tasks that write an item."""
        if not item.stored:
            for start, stop in split_rows(item.info.nbytes, _COPY_BYTES):
                yield partial(self._copy, item, start, stop)
            return
        for i, (start, stop) in enumerate(self._row_blocks(item)):
            sampled = self._plan.options.full_report or i % _SAMPLE_EVERY == 0
            yield partial(self._encode, item, start, stop, sampled, amax.get(item.module))

    def amax_tasks(self, item: Item) -> Iterator[Task]:
        """Yield the tasks that find a layer's largest magnitude, if the scheme asks for it."""
        wanted = item.stored and self._plan.options.scheme.needs_amax
        for start, stop in self._row_blocks(item) if wanted else ():
            yield partial(self._amax, item, start, stop)

    def _row_blocks(self, item: Item) -> list[tuple[int, int]]:
        # Multiples of eight rows: no packed word is shared between blocks.
        rows = max(8, self._plan.options.block_elements // max(item.info.shape[1], 1) // 8 * 8)
        return list(split_rows(item.info.shape[0], rows))

    def _copy(self, item: Item, start: int, stop: int) -> _Done:
        self._reader.copy(item.info, self._writer, start, stop)
        return _Done(stop - start)

    def _amax(self, item: Item, start: int, stop: int) -> _Done:
        return _Done(0, item.module, amax=_finite_amax(item, self._reader.rows(item.info, start, stop)))

    def _encode(self, item: Item, start: int, stop: int, sampled: bool, amax: float | None) -> _Done:
        options = self._plan.options
        weight = self._reader.rows(item.info, start, stop)
        if amax is None:
            _finite_amax(item, weight)
        scale_dtype = item.stored["weight_scale"].dtypes[0]
        packed = options.scheme.encode(weight, options.rounding, amax, scale_dtype)
        for suffix, tensor in self._plan.layout.store(packed).items():
            form, name = item.stored[suffix], f"{item.module}.{suffix}"
            if form.rows_axis is not None:
                self._writer.write_rows(name, tensor, start // form.rows_per_entry, form.rows_axis)
            elif suffix == "weight_shape":
                self._writer.write_rows(name, torch.tensor(item.info.shape), 0)
            else:
                self._writer.write_rows(name, tensor, 0)
        errors = measure(weight, options.scheme, amax, scale_dtype) if sampled else NO_ERRORS
        return _Done(weight.nbytes, item.module, errors)


def _finite_amax(item: Item, weight: torch.Tensor) -> float:
    amax = row_amax(weight).float().amax().item()
    if not math.isfinite(amax):
        raise CheckpointError(
            f"{item.info.file}: {item.info.name} holds NaN or Inf, which no scheme can quantize. "
            f"Mend the checkpoint, or exclude {item.module!r}."
        )
    return amax


def _run(pool: ThreadPoolExecutor, num_threads: int, tasks: Iterator[Task]) -> Iterator[_Done]:
    """Run tasks with a bounded number under way; after a failure none is begun, and those begun are waited for."""
    pending: set[Future[_Done]] = set()
    try:
        while True:
            pending |= {pool.submit(task) for task in itertools.islice(tasks, 4 * num_threads - len(pending))}
            if not pending:
                return
            done, pending = wait(pending, return_when=FIRST_COMPLETED)
            for future in done:
                yield future.result()
    finally:
        for future in pending:
            future.cancel()
        wait(pending)


@contextmanager
def _threads(num_threads: int) -> Iterator[ThreadPoolExecutor]:
    """Give each block one thread: blocks are the parallelism, so torch must not split them further."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(num_threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            yield pool
    finally:
        torch.set_num_threads(before)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _layers(plan: QuantizePlan, totals: dict[str, ErrorSums]) -> tuple[LayerReport, ...]:
    items = [item for shard in plan.shards for item in shard.items if item.stored]
    return tuple(
        LayerReport(item.module, item.info.shape[0], item.info.shape[1], totals[item.module])
        for item in sorted(items, key=lambda item: item.module)
    )


def _dtypes(plan: QuantizePlan) -> tuple[tuple[DtypeCount, ...], tuple[DtypeCount, ...]]:
    before = ((item.info.dtype, item.info.nbytes) for shard in plan.shards for item in shard.items)
    after = ((placed.dtype, placed.nbytes) for shard in plan.shards for placed in shard.layout.tensors.values())
    return tuple(dtype_table(before)), tuple(dtype_table(after))


def _record(plan: QuantizePlan, result: QuantizeResult) -> dict[str, object]:
    """Return what slipstream.json says of this pass."""
    options = plan.options
    return {
        "source": os.fspath(plan.checkpoint.folder.name),
        "fingerprint": plan.fingerprint(),
        "scheme": options.scheme.name,
        "group_size": options.scheme.group_size,
        "rounding": options.rounding,
        "dialect": options.dialect,
        "exclude": list(options.exclude),
        "include": list(options.include),
        "torch": torch.__version__,
        "source_bytes": plan.source_bytes,
        "target_bytes": plan.target_bytes,
        "layers": {layer.module: _layer_record(layer) for layer in result.layers},
    }


def _layer_record(layer: LayerReport) -> dict[str, object]:
    return {
        "shape": [layer.rows, layer.columns],
        "rows_measured": layer.errors.rows,
        "relative_mse_best": layer.errors.relative_best,
        "relative_mse_quark": layer.errors.relative_quark,
    }
