"""Which tiles are fastest for Kimi's experts and latent attention: timed, and written as the table kernels read.

Shapes are compiled first, by processes beside each other; Triton's cache on disk carries them over.
"""

import itertools
import json
import multiprocessing
import statistics
import time
import traceback
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import cache, cached_property
from importlib import resources
from pathlib import Path

import torch
from benchmarks.gpu_kimi_bench import LATENT, ROPE, TOP_K, Bench, Sizes, latent_case
from benchmarks.gpu_tune import Shape, compile_all, tune_products

from slipstream.engine.rank_models import random_experts
from slipstream.kernels import AttentionBatch, KvLayer
from slipstream.kernels.reference.attention import latent_attention as plain_latent_attention
from slipstream.kernels.triton import expert_tiles as shipped_tables
from slipstream.kernels.triton.expert_tiles import ExpertTiles, StageTiles, expert_tiles, shipped
from slipstream.kernels.triton.experts import ExpertOptions, experts
from slipstream.kernels.triton.latent_attention import LatentTiles, latent_attention, shipped_tiles
from slipstream.kernels.triton.tuning import read_tuning
from slipstream.quant.packed import ExpertWeights

ARCHITECTURE = "sm_90"
WORD_STAGES = (
    [StageTiles(4, 8192), StageTiles(8, 8192), StageTiles(8, 8192, warps=8), StageTiles(2, 8192), StageTiles(8, 4096)],
    [StageTiles(32, 256), StageTiles(32, 256, warps=8), StageTiles(16, 256), StageTiles(16, 256, warps=2)],
)
MATRIX_STAGES = (
    [StageTiles(n, k, splits, warps, stages)
     for n, k, warps, stages in ((64, 256, 4, 4), (64, 512, 4, 3), (128, 256, 4, 4)) for splits in (1, 2, 4)],
    [StageTiles(64, 256, 1, 4, 2), StageTiles(128, 256, 1, 4, 2), StageTiles(64, 128, 1, 4, 3),
     StageTiles(128, 128, 1, 4, 3), StageTiles(256, 256, 1, 8, 2)],
)  # fmt: skip
DENSE_SHAPES = (
    Shape("kimi qkv_a", 2112, 7168), Shape("kimi o", 7168, 1024), Shape("kimi lm_head", 20480, 7168),
    Shape("kimi gate_up", 4608, 7168, silu=True), Shape("kimi down", 7168, 2304),
)  # fmt: skip
LATENT_SHAPES = [
    LatentTiles(), LatentTiles(ahead=False), LatentTiles(warps=4), LatentTiles(near=128), LatentTiles(split=256),
    LatentTiles(split=1024), LatentTiles(near_keys=2048), LatentTiles(rows=16), LatentTiles(rows=64),
]  # fmt: skip


def families(rows: int, tiny: bool) -> list[tuple[ExpertTiles, list[StageTiles], list[StageTiles]]]:
    """Return kinds of tiles for so many rows: a shape to start from, and what either stage may be instead."""
    cut = 1 if tiny else None
    matrix = [
        (ExpertTiles(block_t, StageTiles(64, 256, 1, 4, 4), StageTiles(64, 256, 1, 4, 2)), *MATRIX_STAGES)
        for block_t in ((8, 16) if rows <= 40 else (8, 16, 32))
    ]
    words = [(ExpertTiles(16, WORD_STAGES[0][0], WORD_STAGES[1][0], True), *WORD_STAGES)] if rows <= 16 else []
    return [(base, first[:cut], second[:cut]) for base, first, second in [*words, *matrix][:cut]]


@dataclass(frozen=True)
class Case:
    """One layer's experts and so many rows, sent to different experts in each of several routings."""

    bench: Bench
    weights: tuple[ExpertWeights, ExpertWeights]
    rows: int
    found: list[dict[str, object]] = field(default_factory=list)

    @cached_property
    def choices(self) -> list[torch.Tensor]:
        """Routings that together are larger than any cache."""
        return self.bench.choices(self.rows, 12 if self.rows < 32 else 4, self.bench.sizes.experts)

    @property
    def distinct(self) -> float:
        """Experts that a routing hits, in the mean."""
        return sum(int(ids.unique().numel()) for ids in self.choices) / len(self.choices)

    def timed(self, shape: ExpertTiles) -> float:
        """Return the microseconds of a layer."""
        device, options = self.bench.device, ExpertOptions(shape, dependent=self.bench.gpu)
        x = torch.randn(self.rows, self.bench.sizes.hidden, device=device).bfloat16()
        shares = torch.rand(self.rows, TOP_K, device=device)
        calls: list[Callable[[], object]] = [
            lambda ids=ids: experts(x, *self.weights, ids, shares, options) for ids in self.choices
        ]
        us = _attempt(self.bench, calls, f"{self.rows} rows {shape}")
        self.found.append({"rows": self.rows, "tiles": asdict(shape), "us": us, "experts": self.distinct})
        return us

    def fastest(self, base: ExpertTiles, first: list[StageTiles], second: list[StageTiles]) -> ExpertTiles:
        """Choose the first stage, then the second beside it."""
        with_first = [replace(base, stage1=stage) for stage in first]
        chosen = min(with_first, key=self.timed)
        return min([replace(chosen, stage2=stage) for stage in second], key=self.timed)


def tiles(bench: Bench) -> dict[str, object]:
    """Time one layer's experts with each shape; the fastest for a number of rows becomes a row of the table."""
    sizes, found, winners = bench.sizes, [], []
    _compile(bench, [("experts", rows, shape) for rows in sizes.rows for shape in _all_shapes(rows, bench.tiny)])
    weights = _experts(str(bench.device), bench.format, sizes)
    one_expert = sum(part.nbytes for part in weights) / sizes.experts
    for rows in sizes.rows:
        if bench.seconds_left <= 0:
            print(f"the time is up before {rows} rows")
            break
        case = Case(bench, weights, rows)
        shapes = {"shipped": expert_tiles(ARCHITECTURE, bench.format, rows * TOP_K)}
        for base, first, second in families(rows, bench.tiny):
            shapes["words" if base.words else f"matrix, {base.block_t} rows"] = case.fastest(base, first, second)
        times = {name: case.timed(shape) for name, shape in shapes.items()}
        least = case.distinct * one_expert / bench.bandwidth * 1e6
        text = "  ".join(f"{name} {us:.1f} us {100 * least / us:.0f}%" for name, us in times.items())
        best = shapes[min(times, key=lambda name: times[name])]
        print(f"{rows:4} rows, {case.distinct:.1f} experts: {text}\n     best {best}", flush=True)
        found += case.found
        if bench.seconds_left > 0:  # else the last ones were not timed
            winners.append((rows * TOP_K, best))
    _write_tiles(bench, winners)
    return {"timed": found, "best": [(pairs, asdict(shape)) for pairs, shape in winners]}


def latent(bench: Bench) -> dict[str, object]:
    """Time latent attention of one layer over caches that together are larger than the L2 cache."""
    shapes = list(dict.fromkeys([shipped_tiles(ARCHITECTURE), *LATENT_SHAPES]))[: 1 if bench.tiny else None]
    _compile(bench, [("latent", width, shape) for shape in shapes for width in (1, 4)])
    shapes = [shape for shape in shapes if _is_right(bench, shape)]
    found, times = [], {shape: [] for shape in shapes}
    for context, requests, width in itertools.product(bench.sizes.contexts, bench.sizes.batches, (1, 4)):
        copies = max(1, min(40 // requests, 16)) if bench.gpu else 1
        slots = latent_case(bench.device, requests * copies, context, 1)[1].keys_SGd
        cases = [latent_case(bench.device, requests, context, width, n * requests, slots) for n in range(copies)]
        line = []
        for shape in shapes:
            calls = [lambda case=case, shape=shape: _attend(case, shape, bench.gpu) for case in cases]
            us = _attempt(bench, calls, f"{shape}")
            percent = 100 * requests * context * (LATENT + ROPE) * 2 / bench.bandwidth / (us * 1e-6)
            times[shape].append(us)
            found.append({"batch": requests, "context": context, "width": width, "us": us, "percent": percent,
                          "tiles": asdict(shape)})  # fmt: skip
            line.append(f"{us:6.1f} {percent:3.0f}%")
        print(f"batch {requests:2} context {context:5} width {width}: " + "  ".join(line), flush=True)
    if not shapes:
        return {"timed": found}
    means = {shape: statistics.geometric_mean(values) for shape, values in times.items() if values}
    for shape, mean in means.items():
        print(f"{mean:7.1f} us in the mean of all: {shape}")
    best = min(means, key=lambda shape: means[shape])
    if means[best] == float("inf"):
        return {"timed": found}  # nobody got to run through all cases
    _write(bench, {"latent_attention": asdict(best)})
    return {"timed": found, "best": asdict(best)}


def _is_right(bench: Bench, shape: LatentTiles) -> bool:
    """Tell whether a shape gives the reference's numbers; Triton 3.6 gets loops wrong that it does not pipeline."""
    q, layer, batch = latent_case(bench.device, 2, min(1536, 2 * max(bench.sizes.contexts)), 4)
    expected = plain_latent_attention(q.float(), layer, batch, 0.1, LATENT)
    try:
        error = float((_attend((q, layer, batch), shape, False).float() - expected).norm() / expected.norm())
    except Exception:  # noqa: BLE001 - a shape that does not fit is as good as a wrong one
        error = float("nan")
    if not error < 0.01:
        print(f"{shape} is wrong: {error:.3g}")
    return error < 0.01


def products(bench: Bench) -> dict[str, object]:
    """Find the tiles of the rank's dense products, as `gpu_tune` finds Llama's, and write the table they belong to."""
    tuning = read_tuning(ARCHITECTURE)
    work = [("dense", shape) for shape in DENSE_SHAPES]
    compile_all(tuning, work)
    tuning = tune_products(tuning, work, bench.bandwidth, bench.device, time.monotonic() + bench.seconds_left)
    data = {name: value for name, value in asdict(tuning).items() if name != "architecture"}
    _write_file(bench, f"{ARCHITECTURE}.json", json.dumps(data, indent=1, sort_keys=True) + "\n")
    keys = [f"dense:{shape.outputs}:{shape.inputs}" for shape in DENSE_SHAPES]
    return {key: asdict(tuning.linear[key]) for key in keys if key in tuning.linear}


def _attempt(bench: Bench, calls: list[Callable[[], object]], name: str) -> float:
    """Time calls; a shape that fails, or comes after the time is up, is infinitely slow and costs no other its turn."""
    if bench.seconds_left <= 0:
        return float("inf")
    try:
        return bench.microseconds(calls)
    except Exception:  # noqa: BLE001 - one shape that does not fit must not end the sweep
        print(f"{name} failed: {traceback.format_exc(limit=0).strip()[-160:]}", flush=True)
        return float("inf")


def _all_shapes(rows: int, tiny: bool) -> Iterable[ExpertTiles]:
    for base, first, second in families(rows, tiny):
        yield from (replace(base, stage1=stage) for stage in first)
        yield from (replace(base, stage2=stage) for stage in second)


def _compile(bench: Bench, tasks: list[tuple[str, int, ExpertTiles | LatentTiles]]) -> None:
    """Compile shapes in processes beside each other, each of which runs them once."""
    if not bench.gpu or bench.arguments.jobs < 2:
        return
    share = min(bench.arguments.jobs, len(tasks))
    common = (str(bench.device), bench.format, bench.sizes)
    parts = [(*common, tasks[n::share]) for n in range(share)]
    with ProcessPoolExecutor(share, multiprocessing.get_context("spawn")) as pool:
        for failed in pool.map(_compile_some, parts):
            for line in failed:
                print(line)
    print(f"{len(tasks)} shapes compiled; {bench.seconds_left:.0f} s left", flush=True)


def _compile_some(part: tuple[str, str, Sizes, list[tuple[str, int, ExpertTiles | LatentTiles]]]) -> list[str]:
    device, expert_format, sizes, tasks = part
    failed = []
    for kind, rows, shape in tasks:
        try:
            if kind == "latent":
                _attend(latent_case(torch.device(device), 1, 128, rows), shape, True)
                continue
            x = torch.zeros(rows, sizes.hidden, device=device).bfloat16()
            ids = torch.arange(TOP_K, device=device).repeat(rows, 1)
            options = ExpertOptions(shape, dependent=True)
            experts(x, *_experts(device, expert_format, sizes), ids, torch.ones(rows, TOP_K, device=device), options)
        except Exception:  # noqa: BLE001 - the sweep itself will say it again, beside the shape's figures
            failed.append(f"{kind} {rows} {shape} does not compile: {traceback.format_exc(limit=0).strip()[-160:]}")
    return failed


@cache
def _experts(device: str, expert_format: str, sizes: Sizes) -> tuple[ExpertWeights, ExpertWeights]:
    shapes = (sizes.experts, 2 * sizes.inner, sizes.hidden), (sizes.experts, sizes.hidden, sizes.inner)
    gate_up, down = (random_experts(expert_format, shape, torch.device(device)) for shape in shapes)
    return gate_up, down


def _attend(case: tuple[torch.Tensor, KvLayer, AttentionBatch], shape: LatentTiles, dependent: bool) -> torch.Tensor:
    q, layer, batch = case
    return latent_attention(q, layer, batch, 0.1, LATENT, shape, dependent)


def _write_tiles(bench: Bench, winners: list[tuple[int, ExpertTiles]]) -> None:
    """Put the winners into the table of their format; the shipped row for prompts stays the last."""
    if bench.format != "w4a8" or not winners:
        return  # the other formats have one row for all, or their bits would change with the number of rows
    last = shipped(ARCHITECTURE)["experts"]["w4a8"][-1]
    rows = [{"pairs": pairs, **{name: value for name, value in asdict(shape).items() if value is not False}}
            for pairs, shape in winners]  # fmt: skip
    rows[-1]["pairs"] = max(rows[-1]["pairs"], 2048)
    _write(bench, {"experts": shipped(ARCHITECTURE)["experts"] | {"w4a8": [*rows, last]}})


def _write(bench: Bench, changed: dict[str, object]) -> None:
    """Write the table with some parts replaced, and with --install read it from now on."""
    name = f"experts_{ARCHITECTURE}.json"
    written = bench.arguments.out / name
    table = (json.loads(written.read_text()) if written.is_file() else shipped(ARCHITECTURE)) | changed
    formats = ",\n".join(
        f"  {json.dumps(name)}: [\n" + ",\n".join(f"   {json.dumps(row)}" for row in rows) + "\n  ]"
        for name, rows in table["experts"].items()
    )
    text = f'{{\n "experts": {{\n{formats}\n }},\n "latent_attention": {json.dumps(table["latent_attention"])}\n}}\n'
    _write_file(bench, name, text)
    if bench.arguments.install:
        shipped_tables.shipped.cache_clear()
        shipped_tables.shipped_tiles.cache_clear()


def _write_file(bench: Bench, name: str, text: str) -> None:
    bench.arguments.out.mkdir(parents=True, exist_ok=True)
    (bench.arguments.out / name).write_text(text)
    if bench.arguments.install:
        with resources.as_file(resources.files("slipstream.kernels.triton") / "configs" / name) as path:
            Path(path).write_text(text)
