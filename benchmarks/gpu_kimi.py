"""Kimi-K2.5's kernels on a GPU: right, how fast with which tiles, and one tensor-parallel rank at full size.

    PYTHONPATH=src python -m benchmarks.gpu_kimi --out FOLDER [--only correct,tiles,latent,rank] [--tiny]
        [--seconds 60] [--install] [--vllm FILE] [--routing spread,clustered]

Sections are correct, tiles, latent, products, rank and profile. Needs torch and triton alone. A section that fails
prints why, and the others still run; figures go to FOLDER/kimi.json after every section, the tiles that won to
FOLDER/experts_sm_90.json, and with --install also to where the sections after read them. `--tiny` shrinks everything,
to see that the script itself works.
"""

import argparse
import itertools
import json
import re
import time
import traceback
from dataclasses import asdict
from pathlib import Path

import torch
from benchmarks.gpu_kimi_bench import LATENT, PAGE, TOP_K, Bench, latent_case
from benchmarks.gpu_kimi_sweep import latent, products, tiles

from slipstream.engine.rank import Rank, StepFigures, captured, rank_kernels
from slipstream.engine.rank_models import random_experts, rank_of
from slipstream.kernels import AttentionBatch
from slipstream.kernels.reference.attention import latent_attention as plain_latent_attention
from slipstream.kernels.reference.experts import experts as plain_experts
from slipstream.kernels.triton.expert_products import nibble_kernel
from slipstream.kernels.triton.expert_words import words_down_kernel, words_gate_up_kernel
from slipstream.kernels.triton.experts import experts
from slipstream.kernels.triton.latent_attention import latent_attention

FORMATS = ("w4a8", "dense", "int4_group", "int4_fp8", "mxfp4", "mxfp4_act", "fp8_block")
TOKENS = 6  # more than are run word by word, so that a row alone goes through other kernels than rows together


def correct(bench: Bench) -> dict[str, float]:
    """Compare with the reference in float32, and rows alone with rows together; show the INT8 instructions."""
    sizes, found = bench.sizes, {}
    torch.manual_seed(0)
    x = torch.randn(TOKENS, sizes.hidden, device=bench.device).bfloat16()
    weights = torch.rand(TOKENS, TOP_K, device=bench.device)
    for name in FORMATS:
        gate_up = random_experts(name, (16, 2 * sizes.inner, sizes.hidden), bench.device)
        down = random_experts(name, (16, sizes.hidden, sizes.inner), bench.device)
        ids = bench.choices(TOKENS, 1, 16)[0]
        ids[1, 2] = -1
        together = experts(x, gate_up, down, ids, weights)
        expected = plain_experts(x, gate_up, down, ids, weights)
        rows = [slice(token, token + 1) for token in range(TOKENS)]
        alone = torch.cat([experts(x[row], gate_up, down, ids[row], weights[row]) for row in rows])
        found[f"experts {name}"] = _relative_error(together, expected)
        found[f"experts {name}, rows alone differ"] = float((alone != together).sum())
    for context in sizes.contexts:
        q, layer, batch = latent_case(bench.device, 3, context, 4)
        together = latent_attention(q, layer, batch, 0.1, LATENT)
        plain = plain_latent_attention(q.float(), layer, batch, 0.1, LATENT)
        found[f"latent attention, {context} keys"] = _relative_error(together, plain)
        first = AttentionBatch(
            torch.arange(4, dtype=torch.int32, device=bench.device), batch.kv_index_T[::4].int() + 1,
            batch.page_table_RP, batch.kv_index_T[::4].contiguous(), batch.ancestors_T[::4].contiguous(), PAGE, 1,
            batch.max_keys,
        )  # fmt: skip
        alone = latent_attention(q[::4].contiguous(), layer, first, 0.1, LATENT)
        found[f"latent attention, {context} keys, rows alone differ"] = float((alone != together[::4]).sum())
    for name, value in found.items():
        print(f"{name:52} {value:.3g}")
    if bench.gpu:
        _show_instructions()
    return found


def _relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got.double() - expected.double()).norm() / expected.double().norm())


def _show_instructions() -> None:
    """Print the INT8 instructions of the W4A8 kernels that just ran: in PTX, and in the machine's code."""
    for kernel in (nibble_kernel, words_gate_up_kernel, words_down_kernel):
        for compiled, *_ in kernel.device_caches.values():
            for binary in compiled.values():
                ptx = re.findall(r"(?:wgmma|mma\.sync)\S*\.s8\S*|dp4a\.s32\.s32", binary.asm["ptx"])
                sass = re.findall(r"\b(?:IGMMA|IMMA|IDP)\.\S+", binary.asm["sass"])
                if ptx or sass:
                    counted = ", ".join(f"{sass.count(word)} {word}" for word in dict.fromkeys(sass))
                    print(f"{binary.metadata.name}: PTX {len(ptx)} {ptx[0] if ptx else ''}; SASS {counted}")


def make_rank(bench: Bench, routing: str) -> Rank:
    """Build the rank at the largest batch and context asked for."""
    kernels = rank_kernels(bench.device, "triton", {})
    room = (max(bench.sizes.batches), max(bench.sizes.contexts))
    shape = rank_of("kimi-k2.5", 2 if bench.tiny else 8, bench.tiny)
    return Rank(shape, bench.format, kernels, room, bench.bandwidth if bench.gpu else None, routing)


def rank(bench: Bench) -> list[dict[str, object]]:
    """Time decoding, verifying and drafting of the whole rank, beside vLLM's rank where its figures are given."""
    peer = _vllm(bench.arguments.vllm)
    found = []
    for routing in bench.arguments.routing.split(","):
        start = time.perf_counter()
        built = make_rank(bench, routing)
        print(
            f"{routing}: built in {time.perf_counter() - start:.1f} s, {built.resident_bytes / 1e9:.1f} GB of weights"
        )
        print(
            "context batch | decode ms floor   hit | verify ms floor   hit | time x bytes x of it | draft |  vLLM    x"
        )
        for context, batch in itertools.product(bench.sizes.contexts, bench.sizes.batches):
            if bench.seconds_left <= 0:
                print("the time is up")
                break
            steps = built.decode(batch, context), built.verify(batch, context, 4), built.draft_step(batch, context)
            found += [asdict(step) | {"percent_of_floor": step.percent_of_floor, "routing": routing} for step in steps]
            print(_line(*steps, peer.get((batch, context))), flush=True)
        del built
    return found


def _line(decode: StepFigures, verify: StepFigures, draft: StepFigures, vllm_ms: float | None) -> str:
    time_ratio, bytes_ratio = verify.ms / decode.ms, verify.read_bytes / decode.read_bytes
    beside = "" if vllm_ms is None else f"{vllm_ms:5.2f} {vllm_ms / decode.ms:4.2f}"
    both = " | ".join(
        f"{step.ms:9.3f} {step.percent_of_floor or 0:4.0f}% {step.experts_hit:5.1f}" for step in (decode, verify)
    )
    return (
        f"{decode.context:7} {decode.batch:5} | {both} | "
        f"{time_ratio:6.2f} {bytes_ratio:7.2f} {time_ratio / bytes_ratio:5.2f} | {draft.ms:5.2f} | {beside}"
    )


def _vllm(path: Path | None) -> dict[tuple[int, int], float]:
    """Return milliseconds a token by batch and context, from the lines the peers' measure.py printed."""
    if path is None:
        return {}
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("{")]
    return {(line["B"], line["ctx"]): line["tpot_ms"] for line in lines if not line["spec"]}


def profile(bench: Bench) -> dict[str, list[tuple[str, float]]]:
    """Print what each kernel of a layer costs: from the end of the one before to its own, the mean over layers."""
    built = make_rank(bench, "spread")
    found = {}
    near, far = bench.sizes.contexts[0], bench.sizes.contexts[-1]
    for batch, width, context in ((1, 1, near), (1, 4, near), (8, 1, far), (40, 1, far), (40, 4, far)):
        graph = captured(built.target_pass(min(batch, max(bench.sizes.batches)), context, width), bench.device)
        graph.replay()
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            graph.replay()
            torch.cuda.synchronize()
        kernels = sorted((event.time_range.end, event.time_range.start, event.name) for event in profiler.events()
                         if event.device_type == torch.autograd.DeviceType.CUDA)  # fmt: skip
        name = f"batch {batch} width {width} context {context}"
        layer = found[name] = _by_place(kernels)
        total = sum(us for _, us in layer)
        print(f"{name}: {len(kernels)} kernels, {len(layer)} a layer of {total:.1f} us")
        print("  " + "  ".join(f"{kernel} {us:.1f}" for kernel, us in layer), flush=True)
    return found


def _by_place(kernels: list[tuple[float, float, str]]) -> list[tuple[str, float]]:
    """Return the kernels of a layer in order and their mean cost; a layer is what repeats in the pass's middle."""
    names = [name for _, _, name in kernels]
    costs = [end - before for (before, *_), (end, *_) in itertools.pairwise(kernels)]
    middle = len(names) // 2
    period = next((p for p in range(4, 40) if names[middle : middle + 3 * p] == names[middle - p : middle + 2 * p]), 0)
    if not period:
        return []
    layers = [costs[at - 1 : at - 1 + period] for at in range(middle % period + 2 * period, middle + 1, period)]
    means = [sum(column) / len(layers) for column in zip(*layers, strict=True)]
    return [(names[middle + n].strip("_")[:16], mean) for n, mean in enumerate(means)]


SECTIONS = {
    "correct": correct, "tiles": tiles, "latent": latent, "products": products, "rank": rank, "profile": profile
}  # fmt: skip


def main() -> None:
    """Run the sections asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default="correct,tiles,latent,rank")
    parser.add_argument("--format", default="w4a8")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--seconds", type=float, default=600.0, help="start nothing new after so long")
    parser.add_argument("--jobs", type=int, default=12, help="processes that compile the shapes of a sweep")
    parser.add_argument("--install", action="store_true", help="put a sweep's winners where the kernels read them")
    parser.add_argument("--vllm", type=Path, help="lines printed by the peers' measure.py for kimi-rank")
    parser.add_argument("--routing", default="spread", help="spread, clustered or both with a comma between")
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
