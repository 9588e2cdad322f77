"""Time whole decoder layers of a few rows on this GPU, kernels in their order, and choose tiles by that.

    PYTHONPATH=src python benchmarks/tune.py --out out/configs [--seconds 110] [--only llama,fp8,smollm] [--check]

A product timed alone does not show what it costs in a step, where the kernels around it overlap with it. Here a graph
holds the layers of a model with cold weights; first the ways to run it are compared, then each product's tiles are
changed in turn, and what makes the layer faster is kept. Everything that will be timed is compiled first, by as many
processes as there are cores. A configuration that fails is skipped, and its error printed.
"""

import argparse
import dataclasses
import itertools
import multiprocessing
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from gpu_models import LLAMA_8B, SMOLLM_135M, filled_cache, random_target
from slipstream.checkpoint.spec import ModelSpec
from slipstream.kernels.triton.bandwidth import read_bandwidth
from slipstream.kernels.triton.gemm.dispatch import Products
from slipstream.kernels.triton.ops import TritonOps
from slipstream.kernels.triton.tuning import LinearConfig, Tuning, architecture_of, read_tuning
from slipstream.models.context import PagedContext, QueryTokens, paged_context
from slipstream.models.layers import Linear
from slipstream.models.target import Target
from slipstream.quant.packed import PackedWeight
from tune_products import Shape, bits_differ, copies_of, replayed_us, write_tuning

PAGE = 16
BATCHES = (1, 8)
ROWS_CHECKED = (1, 4, 8, 16, 17, 32, 33, 48)
REPLAYS = 15
SMOLLM = dataclasses.replace(SMOLLM_135M, max_position=LLAMA_8B.max_position, tie_embeddings=False)
Tiles = tuple[int, int, int, int]
"""block_n, block_k, split_k, num_stages"""


@dataclasses.dataclass(frozen=True)
class Case:
    """A model's layers, the format of their weights, and the tiles worth trying by product, and for its head."""

    name: str
    spec: ModelSpec
    format: str
    context: int
    tiles: dict[str, list[Tiles]]
    head: list[Tiles]

    @property
    def head_shape(self) -> str:
        """The head's outputs and inputs."""
        return f"{self.spec.vocab_size}:{self.spec.hidden_size}"


LLAMA_TILES: dict[str, list[Tiles]] = {
    "28672:4096": [(64, 128, 1, 2), (64, 128, 1, 3), (64, 256, 1, 2), (64, 256, 1, 3), (128, 64, 1, 3), (128, 64, 1, 4),
                   (128, 128, 1, 2), (128, 128, 1, 3), (64, 64, 1, 4), (64, 64, 1, 6), (64, 128, 2, 3)],
    "4096:14336": [(64, 128, 4, 2), (64, 128, 4, 3), (64, 128, 4, 4), (64, 128, 4, 5), (64, 128, 4, 6), (64, 256, 4, 2),
                   (64, 256, 2, 3), (64, 256, 2, 6), (64, 64, 4, 6), (128, 64, 8, 3), (128, 128, 8, 2)],
    "6144:4096": [(64, 128, 4, 2), (64, 128, 4, 3), (64, 128, 4, 4), (64, 64, 4, 3), (64, 64, 4, 4), (64, 64, 4, 6),
                  (64, 128, 2, 4), (64, 128, 2, 6), (64, 256, 2, 2), (64, 256, 2, 3), (64, 256, 4, 2)],
    "4096:4096": [(64, 256, 2, 2), (64, 256, 2, 3), (64, 256, 2, 4), (64, 256, 2, 6), (64, 128, 2, 4), (64, 128, 2, 6),
                  (64, 128, 4, 2), (64, 128, 4, 3), (64, 128, 4, 6), (64, 64, 4, 6), (64, 256, 4, 3)],
}  # fmt: skip
FP8_TILES: dict[str, list[Tiles]] = {
    "28672:4096": [(128, 256, 1, 2), (128, 256, 1, 3), (128, 128, 1, 3), (128, 128, 1, 4), (64, 256, 1, 2),
                   (64, 256, 1, 3), (64, 256, 1, 4)],
    "4096:14336": [(64, 256, 4, 3), (64, 256, 4, 4), (64, 256, 4, 5), (64, 256, 4, 6), (64, 256, 8, 2), (64, 256, 8, 3),
                   (128, 256, 8, 2)],
    "6144:4096": [(64, 256, 2, 4), (64, 256, 2, 5), (64, 256, 2, 6), (64, 256, 4, 2), (64, 256, 4, 3), (64, 256, 4, 5)],
    "4096:4096": [(64, 256, 2, 4), (64, 256, 2, 6), (64, 256, 4, 2), (64, 256, 4, 3), (64, 256, 4, 4), (64, 256, 4, 5)],
}  # fmt: skip
SMOLLM_TILES: dict[str, list[Tiles]] = {
    "3072:576": [(64, 256, 1, 3), (64, 256, 1, 2), (64, 128, 1, 5), (64, 128, 1, 3)],
    "576:1536": [(64, 128, 4, 3), (64, 128, 3, 4), (64, 256, 2, 3), (64, 256, 3, 2), (64, 256, 6, 2), (64, 256, 1, 6)],
    "960:576": [(64, 256, 1, 3), (64, 256, 1, 2), (64, 128, 1, 5), (64, 128, 2, 3)],
    "576:576": [(64, 256, 1, 3), (64, 256, 1, 2), (64, 128, 1, 5), (64, 128, 2, 3)],
}
LLAMA_HEAD: list[Tiles] = [(64, 256, 1, 3), (128, 128, 1, 3), (64, 128, 1, 3), (64, 128, 1, 4), (128, 64, 1, 4)]
SMOLLM_HEAD: list[Tiles] = [(64, 128, 1, 3), (128, 64, 1, 5), (64, 128, 1, 2), (64, 256, 1, 3)]
CASES = {
    "llama": Case("Llama-8B BF16", LLAMA_8B, "dense", 1024, LLAMA_TILES, LLAMA_HEAD),
    "fp8": Case("Llama-8B FP8", LLAMA_8B, "fp8", 1024, FP8_TILES, []),
    "smollm": Case("SmolLM2 BF16", SMOLLM, "dense", 256, SMOLLM_TILES, SMOLLM_HEAD),
}
NUM_LAYERS = {"llama": 8, "fp8": 12, "smollm": 30}
LINES = (0, 8, 16)  # of 128 bytes
ATTENTION = [  # split, block, num_warps, num_stages
    (128, 64, 4, 2), (128, 64, 4, 3), (128, 128, 8, 2), (128, 128, 8, 3), (256, 128, 8, 2), (256, 64, 4, 3),
    (64, 64, 4, 3), (64, 64, 2, 2), (128, 64, 2, 3), (64, 32, 2, 3), (128, 32, 2, 4),
]  # fmt: skip


class Layers:
    """A model's layers on the device, run over requests that have a context each."""

    def __init__(self, case: Case, num_layers: int, device: torch.device, most_rows: int = max(BATCHES)) -> None:
        spec = dataclasses.replace(
            case.spec, num_layers=num_layers, vocab_size=case.spec.vocab_size if case.head else 64
        )
        self.case = case
        self.target: Target = random_target(spec, torch.bfloat16, device)
        if case.format == "fp8":
            pack_layers(self.target, TritonOps(device))
        self._pages = -(-case.context // PAGE)
        self._kv = filled_cache(self.target.kv_shape, most_rows * self._pages, PAGE, torch.bfloat16, device)
        self._device = device

    def pass_of(self, tuning: Tuning, batch: int) -> Callable[[], Tensor]:
        """Return a pass of one token a request; a request's token is the same in every batch."""
        ops = TritonOps(self._device, tuning)
        ctx = self._context(ops, batch)
        generator = torch.Generator().manual_seed(0)
        hidden = torch.randn(batch, self.target.spec.hidden_size, generator=generator).bfloat16().to(self._device)
        layers = list(self.target.layers)
        return lambda: ops.run_layers(layers, hidden, ctx, ())[0]

    def head_of(self, tuning: Tuning, batch: int) -> Callable[[], Tensor]:
        """Return a pass through the last layer, the last norm and the head."""
        ops = TritonOps(self._device, tuning)
        ctx = self._context(ops, batch)
        hidden = torch.ones(batch, self.target.spec.hidden_size, device=self._device).bfloat16()
        layers, norm, head = [self.target.layers[-1]], self.target.norm, self.target.lm_head

        def step() -> Tensor:
            last = ops.run_layers(layers, hidden, ctx, ())[0]
            return ops.linear(ops.rms_norm(last, norm.weight, norm.eps), head.weight)

        return step

    def us_per_layer(self, tuning: Tuning, batch: int) -> float:
        """Return microseconds a layer."""
        return self._us(self.pass_of(tuning, batch)) / len(self.target.layers)

    def us_of_head(self, tuning: Tuning, batch: int) -> float:
        """Return the microseconds of one layer and the head."""
        return self._us(self.head_of(tuning, batch))

    def _us(self, step: Callable[[], Tensor]) -> float:
        """Return microseconds in a CUDA graph."""
        return replayed_us(step, REPLAYS)[0]

    def _context(self, ops: TritonOps, batch: int) -> PagedContext:
        index = torch.full((batch,), self.case.context - 1, device=self._device)
        table = torch.arange(batch * self._pages, device=self._device, dtype=torch.int32).view(batch, self._pages)
        queries = QueryTokens([1] * batch, index, index, torch.full_like(index, -1))
        return paged_context(ops, self._kv, table, queries)


def pack_layers(target: Target, ops: TritonOps) -> None:
    """Turn a target's blocks into FP8, rounded as the hardware does: quick, and as good as any to be timed."""
    for layer in target.layers:
        for linear in (m for m in layer.modules() if isinstance(m, Linear)):
            scale = linear.weight.float().abs().amax(1) / 448
            codes = (linear.weight / scale[:, None]).to(torch.float8_e4m3fn)
            packed = PackedWeight("fp8_per_channel", len(codes), linear.in_features, codes, {"scale": scale})
            linear.pack(ops.prepare(packed))


def ways(tuning: Tuning) -> dict[str, Tuning]:
    """Return what is compared first: each way adds one thing to the one before."""
    rows_first = dataclasses.replace(tuning, weights_first=False, fold_rows=0)
    old = dataclasses.replace(tuning.attention, split=256, block=128, num_warps=4, num_stages=3)
    first = dataclasses.replace(rows_first, weights_first=True)
    return {
        "rows first, attention 256/128": dataclasses.replace(rows_first, attention=old),
        "rows first": rows_first,
        "weights first": first,
        "weights first, norm and rope folded": dataclasses.replace(first, fold_rows=16),
    }


def with_tiles(tuning: Tuning, format: str, shape: str, tiles: Tiles) -> Tuning:
    """Return a tuning in which a product has these tiles, and asks for as many lines ahead as it did."""
    block_n, block_k, split_k, stages = tiles
    before = tuning.linear.get(f"{format}:{shape}")
    config = LinearConfig(block_n, block_k, split_k, 4, stages, *(() if before is None else (before.ahead,)))
    return dataclasses.replace(tuning, linear={**tuning.linear, f"{format}:{shape}": config})


def with_lines(tuning: Tuning, format: str, shape: str, lines: int) -> Tuning:
    """Return a tuning in which a product asks for so many lines ahead; it has tiles of its own already."""
    config = dataclasses.replace(tuning.linear[f"{format}:{shape}"], ahead=lines)
    return dataclasses.replace(tuning, linear={**tuning.linear, f"{format}:{shape}": config})


def with_attention(tuning: Tuning, fields: tuple[int, int, int, int]) -> Tuning:
    """Return a tuning with these tiles of attention."""
    split, block, warps, stages = fields
    attention = dataclasses.replace(tuning.attention, split=split, block=block, num_warps=warps, num_stages=stages)
    return dataclasses.replace(tuning, attention=attention)


def variants_of(tuning: Tuning, case: Case) -> list[Tuning]:
    """Return every tuning whose kernels may be timed."""
    folded = dataclasses.replace(tuning, weights_first=True, fold_rows=16)
    found = list(ways(tuning).values())
    found += [with_tiles(folded, case.format, shape, tiles) for shape, all_ in case.tiles.items() for tiles in all_]
    found += [with_tiles(folded, "dense", case.head_shape, tiles) for tiles in case.head]
    return found + [with_attention(folded, fields) for fields in ATTENTION]


_WORKERS: dict[str, Layers] = {}


def compile_one(task: tuple[str, Tuning]) -> str:
    """Run two layers once, so that their kernels are in Triton's cache; return what went wrong."""
    name, tuning = task
    try:
        with torch.no_grad():
            if name not in _WORKERS:
                _WORKERS[name] = Layers(CASES[name], 2, torch.device("cuda"))
            for batch in BATCHES:
                _WORKERS[name].pass_of(tuning, batch)()
                if CASES[name].head:
                    _WORKERS[name].head_of(tuning, batch)()
            torch.cuda.synchronize()
    except Exception as error:  # noqa: BLE001 - anything a compiler may raise is a reason to skip the variant
        return f"{name}: {str(error).splitlines()[-1][:200] if str(error) else type(error).__name__}"
    return ""


def compile_all(tuning: Tuning, names: list[str]) -> None:
    """Compile what will be timed, in as many processes as there are cores."""
    started = time.monotonic()
    tasks = [(name, variant) for name in names for variant in variants_of(tuning, CASES[name])]
    with multiprocessing.get_context("spawn").Pool(min(multiprocessing.cpu_count(), 14)) as pool:
        failed = [error for error in pool.imap_unordered(compile_one, tasks) if error]
    for error in failed:
        print(f"does not run: {error}")
    print(f"compiled {len(tasks) - len(failed)} of {len(tasks)} in {time.monotonic() - started:.0f} s", flush=True)


class Judge:
    """Times tunings of one model's layers, and keeps the best."""

    def __init__(self, layers: Layers, tuning: Tuning, deadline: float) -> None:
        self.layers, self.best, self._deadline = layers, tuning, deadline
        self._score = self.timed("as configured", tuning)

    def timed(self, name: str, tuning: Tuning, *, head: bool = False) -> float:
        """Print what a tuning takes, and return it: batch 1 counts as much as batch 8."""
        measure = self.layers.us_of_head if head else self.layers.us_per_layer
        try:
            times = [measure(tuning, batch) for batch in BATCHES]
        except Exception as error:  # noqa: BLE001 - one failing variant must not end the run
            print(f"  skipped {name}: {str(error).splitlines()[-1][:160] if str(error) else type(error).__name__}")
            return float("inf")
        text = "  ".join(f"B={batch} {us:7.2f} us" for batch, us in zip(BATCHES, times, strict=True))
        print(f"  {self.layers.case.name} {name:44} {text}", flush=True)
        return sum(times)

    def choose_head(self, tiles: list[Tiles]) -> None:
        """Keep the best tiles of the head."""
        shape = self.layers.case.head_shape
        tried = [with_tiles(self.best, "dense", shape, tile) for tile in tiles]
        scores = [self.timed(f"head {tile}", tuning, head=True) for tile, tuning in zip(tiles, tried, strict=True)]
        if scores and min(scores) < self.timed("head as configured", self.best, head=True) * 0.998:
            self.best = tried[scores.index(min(scores))]

    def try_out(self, name: str, tuning: Tuning) -> None:
        """Keep a tuning if it makes the layer faster by more than the noise."""
        if time.monotonic() > self._deadline:
            return
        score = self.timed(name, tuning)
        if score < self._score * 0.998:
            self._score, self.best = score, tuning


def tune(name: str, tuning: Tuning, device: torch.device, deadline: float) -> Tuning:
    """Compare the ways to run a model's layers, then change one thing after the other."""
    layers = Layers(CASES[name], NUM_LAYERS[name], device)
    judge = Judge(layers, dataclasses.replace(tuning, weights_first=True, fold_rows=16), deadline)
    for way, variant in ways(tuning).items():
        judge.timed(way, variant)
    for fields in ATTENTION:  # one for all models: Llama's layers decide, the others' times are for the reader
        if name == "llama":
            judge.try_out(f"attention {fields}", with_attention(judge.best, fields))
        elif name == "smollm":
            judge.timed(f"attention {fields}", with_attention(judge.best, fields))
    for number in (1, 2):  # twice: what is best for one product depends on its neighbours
        for shape, tiles in layers.case.tiles.items():
            for tile in tiles:
                judge.try_out(f"{number}: {shape} {tile}", with_tiles(judge.best, layers.case.format, shape, tile))
    for shape, lines in itertools.product(layers.case.tiles, LINES):  # compiled when met: tiles are known only now
        judge.try_out(f"{shape}, {lines} lines ahead", with_lines(judge.best, layers.case.format, shape, lines))
    judge.choose_head(layers.case.head)
    print(f"{layers.case.name}: best {judge.timed('best', judge.best):.1f} us for both", flush=True)
    try:
        profile(layers, judge.best, BATCHES[0])
        if name == "llama":
            del layers
            long = Layers(dataclasses.replace(CASES[name], name="Llama-8B at 10,240 keys", context=10240), 4, device)
            Judge(long, judge.best, deadline)
            profile(long, judge.best, BATCHES[0])
    except Exception as error:  # noqa: BLE001 - figures are worth more than where they come from
        print(f"  no profile: {error!r}")
    return judge.best


def profile(layers: Layers, tuning: Tuning, batch: int) -> None:
    """Print what each kernel of a layer costs: the time from the end of the one before to its own."""
    graph = torch.cuda.CUDAGraph()
    step = layers.pass_of(tuning, batch)
    step()
    with torch.cuda.graph(graph):
        step()
    graph.replay()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
        graph.replay()
        torch.cuda.synchronize()
    kernels = sorted((e.time_range.end, e.name) for e in found.events() if "kernel" in e.name)
    marks = [i for i, (_, name) in enumerate(kernels) if "splits" in name]
    each = marks[-1] - marks[-2]
    for place in range(1, each + 1):
        ends = [(kernels[m + place][0] - kernels[m + place - 1][0], kernels[m + place][1]) for m in marks[1:-1]]
        text = statistics.median(cost for cost, _ in ends)
        print(f"  {layers.case.name} B={batch} after attention, {place}: {text:6.2f} us {ends[0][1][:40]}", flush=True)


def check_bits(tuning: Tuning, names: list[str], device: torch.device) -> None:
    """Say whether a row's bits are the same in passes of 1 to 48 rows through layers, of 1 to 300 through products."""
    for name in names:
        case = CASES[name]
        layers = Layers(case, 3, device, max(ROWS_CHECKED))
        outs = {rows: layers.pass_of(tuning, rows)() for rows in ROWS_CHECKED}
        wrong = [rows for rows, out in outs.items() if not torch.equal(out, outs[max(ROWS_CHECKED)][:rows])]
        plain = layers.pass_of(dataclasses.replace(tuning, weights_first=False, fold_rows=0), 1)()
        say = f"DIFFER at {wrong}" if wrong else "same"
        print(
            f"bits of {case.name} layers: {say}; without folding {'same' if torch.equal(plain, outs[1]) else 'OTHER'}"
        )
        del layers
        for shape in case.tiles:
            outputs, inputs = map(int, shape.split(":"))
            product = Shape(shape, outputs, inputs)
            x = torch.randn(300, inputs, device=device).bfloat16()
            weight = copies_of(Products(tuning, device), case.format, product, device)[0]
            wrong = bits_differ(tuning, weight, x, product)
            print(f"bits of {case.name} {shape}: {f'DIFFER at {wrong}' if wrong else 'same'}", flush=True)


def main() -> None:
    """Tune what is asked for, and write the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="folder for the file; --check writes none")
    parser.add_argument("--seconds", type=float, default=110.0, help="stop trying things out by then")
    parser.add_argument("--only", default=",".join(CASES), help="which models, of " + ",".join(CASES))
    parser.add_argument("--check", action="store_true", help="only check that rows keep their bits")
    arguments = parser.parse_args()
    if arguments.out is None and not arguments.check:
        parser.error("--out FOLDER is where the tiles go; without it there is only --check.")
    started = time.monotonic()
    device, names = torch.device("cuda"), arguments.only.split(",")
    tuning = read_tuning(architecture_of(device))
    if arguments.check:
        check_bits(tuning, names, device)
        return
    compile_all(tuning, names)
    print(f"{torch.cuda.get_device_name()} reads {read_bandwidth(device) / 1e12:.3f} TB/s", flush=True)
    left = max(arguments.seconds - (time.monotonic() - started), 10.0)
    for number, name in enumerate(names):
        tuning = tune(name, tuning, device, time.monotonic() + left / (len(names) - number))
        torch.cuda.empty_cache()
        left = max(arguments.seconds - (time.monotonic() - started), 5.0)
    write_tuning(tuning, arguments.out)
    check_bits(tuning, names, device)


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
