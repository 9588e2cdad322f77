"""Kimi-K2.5's kernels on a GPU: right, how fast with which tiles, and one tensor-parallel rank at full size.

    PYTHONPATH=src python -m benchmarks.gpu_kimi --out FOLDER [--only correct,tiles,latent,rank,profile] [--tiny]

Needs torch and triton alone. A section that fails prints why, and the others still run; figures go to
FOLDER/kimi.json after every section. `--tiny` shrinks everything, to see that the script itself works.
"""

import argparse
import itertools
import json
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from slipstream.engine.rank import Rank, rank_kernels
from slipstream.engine.rank_models import random_experts, rank_of
from slipstream.kernels import AttentionBatch, KvLayer
from slipstream.kernels.reference.attention import latent_attention as plain_latent_attention
from slipstream.kernels.reference.experts import experts as plain_experts
from slipstream.kernels.triton.bandwidth import read_bandwidth
from slipstream.kernels.triton.expert_tiles import ExpertTiles, StageTiles, expert_tiles
from slipstream.kernels.triton.experts import ExpertOptions, experts
from slipstream.kernels.triton.latent_attention import LatentTiles, latent_attention, shipped_tiles
from slipstream.quant.packed import ExpertWeights

FORMATS = ("w4a8", "dense", "int4_group", "mxfp4", "fp8_block")
ROWS = (1, 4, 8, 32, 160)
TOP_K = 8
LATENT, ROPE, HEADS, PAGE = 512, 64, 8, 64


@dataclass(frozen=True)
class Sizes:
    """Kimi's, on one of eight ranks; or a few, to try the script."""

    hidden: int = 7168
    inner: int = 256
    experts: int = 384
    contexts: tuple[int, ...] = (1024, 10240)
    batches: tuple[int, ...] = (1, 2, 8, 40)
    rows: tuple[int, ...] = ROWS


TINY = Sizes(128, 64, 8, (96,), (1,), (1, 2))


class Bench:
    """A device, its bandwidth and what was measured on it."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.device = torch.device(arguments.device)
        self.gpu = self.device.type != "cpu"
        self.sizes = TINY if arguments.tiny else Sizes()
        self.tiny = arguments.tiny
        self.format = arguments.format
        self.bandwidth = read_bandwidth(self.device) if self.gpu else 1e10
        self.results: dict[str, object] = {"read_bandwidth": self.bandwidth, "device": str(arguments.device)}

    def microseconds(self, calls: list[Callable[[], object]], repeats: int = 5) -> float:
        """Return the time of a call: calls are captured one after another, and the graph replayed; the median."""
        for call in calls[:2]:
            call()
        if not self.gpu:
            start = time.perf_counter()
            calls[0]()
            return (time.perf_counter() - start) * 1e6
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in calls:
                call()
        times = []
        for _ in range(repeats + 1):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) * 1e3 / (2 * len(calls)))
        return sorted(times[1:])[repeats // 2]

    def choices(self, rows: int, number: int, num_experts: int) -> list[torch.Tensor]:
        """Return several routings of so many rows, each row to its own experts, uniformly."""
        scores = torch.rand(number, rows, num_experts, device=self.device)
        return list(scores.topk(TOP_K, dim=-1).indices)


def correct(bench: Bench) -> dict[str, float]:
    """Compare with the reference in float32, and rows alone with rows together."""
    sizes, found = bench.sizes, {}
    torch.manual_seed(0)
    x = torch.randn(5, sizes.hidden, device=bench.device).bfloat16()
    weights = torch.rand(5, TOP_K, device=bench.device)
    for name in FORMATS:
        gate_up = random_experts(name, (16, 2 * sizes.inner, sizes.hidden), bench.device)
        down = random_experts(name, (16, sizes.hidden, sizes.inner), bench.device)
        ids = bench.choices(5, 1, 16)[0]
        ids[1, 2] = -1
        together = experts(x, gate_up, down, ids, weights)
        expected = plain_experts(x, gate_up, down, ids, weights)
        alone = torch.cat([experts(x[t : t + 1], gate_up, down, ids[t : t + 1], weights[t : t + 1]) for t in range(5)])
        found[f"experts {name}"] = _relative_error(together, expected)
        found[f"experts {name}, rows alone differ"] = float((alone != together).sum())
    q, layer, batch = latent_case(bench, 3, sizes.contexts[0], 4)
    together = latent_attention(q, layer, batch, 0.1, LATENT)
    found["latent attention"] = _relative_error(together, plain_latent_attention(q.float(), layer, batch, 0.1, LATENT))
    first = AttentionBatch(
        torch.arange(4, dtype=torch.int32, device=bench.device), batch.kv_index_T[::4].int() + 1, batch.page_table_RP,
        batch.kv_index_T[::4], batch.ancestors_T[::4], PAGE, 1, batch.max_keys,
    )  # fmt: skip
    alone = latent_attention(q[::4].contiguous(), layer, first, 0.1, LATENT)
    found["latent attention, rows alone differ"] = float((alone != together[::4]).sum())
    for name, value in found.items():
        print(f"{name:44} {value:.3g}")
    return found


def _relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got.double() - expected.double()).norm() / expected.double().norm())


def candidates(bench: Bench, base: ExpertTiles) -> Iterator[tuple[str, ExpertTiles]]:
    """Yield tiles that differ from the shipped ones in one stage."""
    yield "shipped", base
    stage1 = [(64, 256, 4, 4), (64, 256, 4, 6), (64, 512, 4, 3), (64, 512, 4, 4), (128, 256, 4, 4), (32, 512, 4, 4)]
    for (n, k, warps, stages), splits in itertools.product(stage1[: 1 if bench.tiny else None], (1, 2, 4, 7)):
        yield (
            f"stage1 {n}x{k}/{splits} w{warps} s{stages}",
            replace(base, stage1=StageTiles(n, k, splits, warps, stages)),
        )
    stage2 = [(64, 256, 4, 1), (64, 256, 4, 2), (128, 256, 4, 2), (128, 256, 8, 2), (256, 256, 8, 2), (64, 128, 4, 3),
              (128, 128, 4, 3), (32, 256, 4, 2)]  # fmt: skip
    for n, k, warps, stages in stage2[: 1 if bench.tiny else None]:
        yield f"stage2 {n}x{k} w{warps} s{stages}", replace(base, stage2=StageTiles(n, k, 1, warps, stages))


def tiles(bench: Bench) -> list[dict[str, object]]:
    """Time one layer's experts with each tile shape, over routings that together are larger than any cache."""
    sizes, rows_found = bench.sizes, []
    gate_up = random_experts(bench.format, (sizes.experts, 2 * sizes.inner, sizes.hidden), bench.device)
    down = random_experts(bench.format, (sizes.experts, sizes.hidden, sizes.inner), bench.device)
    one_expert = (gate_up.nbytes + down.nbytes) / sizes.experts
    architecture = "sm_90"
    for rows in sizes.rows:
        x = torch.randn(rows, sizes.hidden, device=bench.device).bfloat16()
        weights = torch.rand(rows, TOP_K, device=bench.device)
        choices = bench.choices(rows, 12 if rows < 32 else 4, sizes.experts)
        distinct = sum(int(ids.unique().numel()) for ids in choices) / len(choices)
        best: dict[str, tuple[float, str]] = {}
        for name, shape in candidates(bench, expert_tiles(architecture, bench.format, rows * TOP_K)):
            try:
                us = bench.microseconds(_calls(x, gate_up, down, choices, weights, shape))
            except Exception:  # noqa: BLE001 - one shape that does not fit must not end the sweep
                print(f"{rows:4} rows  {name:28} failed: {traceback.format_exc(limit=0).strip()[-160:]}")
                continue
            percent = 100 * distinct * one_expert / bench.bandwidth / (us * 1e-6)
            rows_found.append({"rows": rows, "tiles": name, "us": us, "experts": distinct, "percent": percent})
            part = name.partition(" ")[0]
            best[part] = min(best.get(part, (float("inf"), "")), (us, f"{name}: {us:.1f} us, {percent:.0f}%"))
        print(f"{rows:4} rows, {distinct:.1f} experts  " + "  |  ".join(text for _, text in best.values()))
    return rows_found


def _calls(
    x: torch.Tensor, gate_up: ExpertWeights, down: ExpertWeights, choices: list[torch.Tensor], weights: torch.Tensor,
    shape: ExpertTiles,
) -> list[Callable[[], object]]:  # fmt: skip
    options = ExpertOptions(shape)
    return [lambda ids=ids: experts(x, gate_up, down, ids, weights, options) for ids in choices]


def latent_case(
    bench: Bench, requests: int, context: int, width: int, offset: int = 0, slots: torch.Tensor | None = None
) -> tuple[torch.Tensor, KvLayer, AttentionBatch]:
    """Return queries, a random cache and the pass over the last `width` keys of each request."""
    pages = -(-context // PAGE)
    if slots is None:
        slots = torch.randn(requests * pages * PAGE, 1, LATENT + ROPE, device=bench.device).bfloat16()
    table = torch.arange(offset * pages, (offset + requests) * pages, device=bench.device).int().view(requests, pages)
    index = torch.arange(context - width, context, device=bench.device).repeat(requests)
    batch = AttentionBatch(
        torch.arange(0, (requests + 1) * width, width, dtype=torch.int32, device=bench.device),
        torch.full((requests,), context, dtype=torch.int32, device=bench.device), table, index,
        torch.full_like(index, -1), PAGE, width, pages * PAGE,
    )  # fmt: skip
    q = torch.randn(requests * width, HEADS, LATENT + ROPE, device=bench.device).bfloat16()
    return q, KvLayer(slots, slots[..., :LATENT]), batch


def latent(bench: Bench) -> list[dict[str, object]]:
    """Time latent attention of one layer over caches that together are larger than the L2 cache."""
    found = []
    base = shipped_tiles("sm_90")
    shapes = [base, *(LatentTiles(split, 64, 32, 8, stages) for split in (256, 512, 1024) for stages in (2, 3))]
    shapes += [LatentTiles(512, 64, 32, 4, 2), LatentTiles(512, 64, 16, 8, 2), LatentTiles(512, 32, 32, 4, 4)]
    for context, requests in itertools.product(bench.sizes.contexts, bench.sizes.batches):
        copies = max(1, min(40 // requests, 16)) if bench.gpu else 1
        slots = latent_case(bench, requests * copies, context, 1)[1].keys_SGd
        for width in (1, 4):
            cases = [latent_case(bench, requests, context, width, n * requests, slots) for n in range(copies)]
            figures = []
            for shape in dict.fromkeys(shapes[: 1 if bench.tiny else None]):
                try:
                    us = bench.microseconds([lambda case=case, shape=shape: _attend(case, shape) for case in cases])
                except Exception:  # noqa: BLE001 - one shape that does not fit must not end the sweep
                    print(f"{shape} failed: {traceback.format_exc(limit=0).strip()[-160:]}")
                    continue
                percent = 100 * requests * context * (LATENT + ROPE) * 2 / bench.bandwidth / (us * 1e-6)
                figures.append((us, percent, shape))
                found.append({"batch": requests, "context": context, "width": width, "us": us, "percent": percent,
                              "tiles": asdict(shape)})  # fmt: skip
            text = "  ".join(
                f"{s.split}/{s.block}x{s.rows} w{s.warps} s{s.stages}: {us:.1f} us {p:.0f}%" for us, p, s in figures
            )
            print(f"batch {requests} context {context} width {width}: {text}")
    return found


def _attend(case: tuple[torch.Tensor, KvLayer, AttentionBatch], shape: LatentTiles) -> torch.Tensor:
    q, layer, batch = case
    return latent_attention(q, layer, batch, 0.1, LATENT, shape)


def make_rank(bench: Bench) -> Rank:
    """Build the rank at the largest batch and context asked for."""
    kernels = rank_kernels(bench.device, "triton", {})
    room = (max(bench.sizes.batches), max(bench.sizes.contexts))
    shape = rank_of("kimi-k2.5", 2 if bench.tiny else 8, bench.tiny)
    return Rank(shape, bench.format, kernels, room, bench.bandwidth if bench.gpu else None)


def rank(bench: Bench) -> list[dict[str, object]]:
    """Time decoding, verifying and drafting of the whole rank."""
    start = time.perf_counter()
    built = make_rank(bench)
    print(f"built in {time.perf_counter() - start:.1f} s: {built.resident_bytes / 1e9:.1f} GB of weights")
    found = []
    for context, batch in itertools.product(bench.sizes.contexts, bench.sizes.batches):
        for step in (built.decode(batch, context), built.verify(batch, context, 4), built.draft_step(batch, context)):
            found.append(asdict(step) | {"percent_of_floor": step.percent_of_floor})
            print(f"{step.step:7} batch {batch:3} context {context:6}: {step.ms:7.3f} ms, {step.experts_hit:5.1f} hit, "
                  f"{step.read_bytes / 1e9:6.2f} GB, {step.percent_of_floor or 0:.1f}% of floor")  # fmt: skip
    return found


def profile(bench: Bench) -> dict[str, str]:
    """Print what each kernel of a decode and a verify step takes, at batch 1 and the first context."""
    built = make_rank(bench)
    context, found = bench.sizes.contexts[0], {}
    kinds = [torch.profiler.ProfilerActivity.CUDA if bench.gpu else torch.profiler.ProfilerActivity.CPU]
    for name, step in (("decode", built.decode), ("verify", lambda b, c: built.verify(b, c, 4))):
        step(1, context)
        with torch.profiler.profile(activities=kinds) as profiler:
            step(1, context)
        found[name] = profiler.key_averages().table(sort_by="cuda_time_total", row_limit=30, max_name_column_width=60)
        print(f"{name}\n{found[name]}")
    return found


SECTIONS = {"correct": correct, "tiles": tiles, "latent": latent, "rank": rank, "profile": profile}


def main() -> None:
    """Run the sections asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default="correct,tiles,latent,rank")
    parser.add_argument("--format", default="w4a8")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args()
    bench = Bench(arguments)
    print(f"read bandwidth {bench.bandwidth / 1e12:.2f} TB/s")
    failed = []
    for name in arguments.only.split(","):
        start = time.perf_counter()
        print(f"== {name}")
        try:
            with torch.no_grad():
                bench.results[name] = SECTIONS[name](bench)
        except Exception:  # noqa: BLE001 - sections are independent, and device time is dear
            failed.append(name)
            traceback.print_exc()
        if bench.gpu:
            torch.cuda.empty_cache()
        print(f"== {name} took {time.perf_counter() - start:.1f} s", flush=True)
        arguments.out.mkdir(parents=True, exist_ok=True)
        (arguments.out / "kimi.json").write_text(json.dumps(bench.results, indent=1))
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
