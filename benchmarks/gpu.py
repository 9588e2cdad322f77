"""How near one GPU's limit decoding comes: Llama-8B shape with random weights, and the embedded model with its draft.

    python benchmarks/gpu_bundle.py --questions ../shared/data/gsm8k/test.jsonl.xz --out bundle.pt   # anywhere
    PYTHONPATH=src python benchmarks/gpu.py --bundle bundle.pt --vllm PEER_FOLDER --out gpu.json     # on the GPU

Needs torch, Triton and this repository. First the read bandwidth R is measured; then, for every point, the bytes a
step must read are counted (weights once, keys and values of every request), and the time is put beside bytes / R, the
floor. Contexts are not computed: requests start on caches of random keys. Steps run through `Engine.step`, streamed
tokens and all; "host" is the share of wall time in which the device was not at work on a step, "verify" the target's
part of it: beside that of plain decoding it says what the drafted nodes cost. The embedded model's answers must be
those of plain decoding. Sections can be chosen with --only; one that fails is reported and the others go on.
"""

import argparse
import dataclasses
import gc
import json
import math
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from gpu_measure import end_requests, measure_steps, pass_bytes, read_bandwidth, start_requests, step_bytes
from gpu_models import LLAMA_8B, TINY, engine_of, pack_fp8, random_draft, random_target
from gpu_profile import STEPS, kernel_shares, report
from gpu_smollm import embedded_pair, speed
from slipstream.engine.config import EngineConfig, KvCacheDtype
from slipstream.engine.memory import kv_dtypes
from slipstream.kernels import KERNEL_CHOICES, Ops, select
from slipstream.models.eagle3 import Eagle3Draft
from slipstream.models.target import Target
from slipstream.speculation.tree import TreeShape

SECTIONS = ("vllm", "decode", "eagle3", "kv_fp8", "fp8", "smollm")
NUM_DRAFTED = 3
LENGTH = 2.88  # the acceptance length that is simulated
PAGE_SIZE = 16


@dataclass(frozen=True)
class Sizes:
    """How much is measured.

    Of every request `tokens` are timed, from its `first` on, and `runs` times over: as many as the peers' harness
    times, and like it we keep the fastest run.
    """

    batches: tuple[int, ...] = (1, 8, 40)
    contexts: tuple[int, ...] = (1024, 10240)
    first: int = 16
    tokens: int = 256
    runs: int = 2
    bandwidth_bytes: int = 8 << 30
    draft_vocab: int = 32000
    smollm_batches: tuple[int, ...] = (1, 8, 32)
    smollm_tokens: int = 256


TINY_SIZES = Sizes((1, 3), (40,), 2, 8, 2, 1 << 22, 61, (1, 3), 16)


@dataclass
class Row:
    """One line of the table."""

    section: str
    what: str
    batch: int
    context: int
    ms: float
    tokens_per_s: float | None = None
    ms_per_token: float | None = None
    gbytes: float | None = None
    floor_ms: float | None = None
    host: float | None = None
    note: str = ""

    @property
    def of_floor(self) -> float | None:
        """The floor as a share of the time taken."""
        return None if self.floor_ms is None else self.floor_ms / self.ms


@dataclass
class Run:
    """What every section is given, and the rows it adds."""

    args: argparse.Namespace
    device: torch.device
    ops: Ops
    sizes: Sizes
    deadline: float
    section_deadline: float = float("inf")
    bandwidth: float = 0.0
    rows: list[Row] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def add(self, row: Row) -> None:
        """Keep a row and show it."""
        self.rows.append(row)
        print(line_of(row), flush=True)

    def late(self) -> bool:
        """Tell whether the time is up; what is left out is said."""
        if time.monotonic() < min(self.deadline, self.section_deadline):
            return False
        self.failures.append("a section's time was up before every point was measured")
        print("  (time is up: further points of this section are left out)", flush=True)
        return True


def main() -> int:
    """Run the chosen sections, print the table, write the JSON."""
    args = arguments()
    device = torch.device(args.device)
    if args.tiny:
        torch.set_num_threads(1)
    ops = select(device, args.kernels)
    print(f"torch {torch.__version__}, kernels: {ops.promise}", flush=True)
    run = Run(args, device, ops, TINY_SIZES if args.tiny else Sizes(), time.monotonic() + args.budget)
    if "vllm" in args.only and args.vllm is not None:
        guarded(run, "vllm", lambda: vllm(run))  # before this process takes memory on the device
    run.bandwidth = read_bandwidth(device, run.sizes.bandwidth_bytes)
    print(f"read bandwidth R: {run.bandwidth / 1e12:.3f} TB/s", flush=True)
    with torch.inference_mode():
        if {"decode", "eagle3", "kv_fp8", "fp8"} & set(args.only):
            guarded(run, "llama", lambda: llama(run))
        if "smollm" in args.only:
            guarded(run, "smollm", lambda: smollm(run))
    print_table(run)
    if args.out is not None:
        write_json(run, args.out)
    return 1 if run.failures else 0


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--kernels", choices=KERNEL_CHOICES, default="auto")
    parser.add_argument("--only", type=lambda text: text.split(","), default=list(SECTIONS))
    parser.add_argument("--bundle", type=Path, help="the embedded model, from gpu_bundle.py")
    parser.add_argument("--vllm", type=Path, help="a folder with measure.py and models/, as the vLLM peer's is")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--budget", type=float, default=480.0, help="seconds after which points are left out")
    parser.add_argument("--section-budget", type=float, default=150.0, help="the same for each section")
    parser.add_argument("--profile", action="store_true", help="show each point's kernels; on a GPU")
    parser.add_argument("--tiny", action="store_true", help="tiny models, to try the script itself")
    args = parser.parse_args()
    unknown = set(args.only) - set(SECTIONS)
    if unknown:
        parser.error(f"--only knows {', '.join(SECTIONS)}; not {', '.join(sorted(unknown))}")
    return args


def guarded(run: Run, section: str, work: Callable[[], None]) -> None:
    """Run a section; if it fails, say why and go on with the next."""
    started = time.monotonic()
    run.section_deadline = started + run.args.section_budget
    try:
        work()
    except Exception as error:  # noqa: BLE001  # a section's failure must not cost the figures of the others
        traceback.print_exc()
        run.failures.append(f"{section}: {type(error).__name__}: {error}")
    free_memory(run.device)
    print(f"[{section}: {time.monotonic() - started:.0f} s]", flush=True)


def free_memory(device: torch.device) -> None:
    """Give back what a section left on the device."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def llama(run: Run) -> None:
    """Measure the Llama-8B shape: bfloat16 first, then the same weights as FP8."""
    spec = TINY if run.args.tiny else LLAMA_8B
    dtype = torch.float32 if run.device.type == "cpu" else torch.bfloat16
    target = random_target(spec, dtype, run.device)
    draft = random_draft(target, run.sizes.draft_vocab)
    if "decode" in run.args.only:
        guarded(run, "decode", lambda: points(run, "decode", "plain", target, None))
    if "eagle3" in run.args.only:
        guarded(run, "eagle3", lambda: points(run, "eagle3", "EAGLE-3 K=3", target, draft))
    if "kv_fp8" in run.args.only:
        guarded(run, "kv_fp8", lambda: kv_fp8(run, target))
    if "fp8" in run.args.only:
        pack_fp8(target, run.ops)
        guarded(run, "fp8", lambda: points(run, "fp8", "FP8 plain", target, None))
        guarded(run, "fp8", lambda: points(run, "fp8", "FP8 target, BF16 draft K=3", target, draft))
        pack_fp8(draft, run.ops, skip=())
        guarded(run, "fp8", lambda: points(run, "fp8", "FP8 target, FP8 draft K=3", target, draft))


def points(run: Run, section: str, what: str, target: Target, draft: Eagle3Draft | None) -> None:
    """Measure every batch and context; the short contexts first, since they are the ones compared."""
    for context in run.sizes.contexts:
        for batch in run.sizes.batches:
            if run.late():
                return
            run.add(point(run, section, what, target, draft, (batch, context)))
            free_memory(run.device)


def kv_fp8(run: Run, target: Target) -> None:
    """Measure plain decoding of the largest batch at the longest context, with keys as computed and in FP8."""
    size = (run.sizes.batches[-1], run.sizes.contexts[-1])
    for what, keys in (("keys as computed", "auto"), ("FP8 keys", "fp8")):
        if run.late():
            return
        run.add(point(run, "kv_fp8", what, target, None, size, keys))
        free_memory(run.device)
    before, after = run.rows[-2:]
    print(f"  FP8 keys: {before.ms / after.ms:.3f}x as fast", flush=True)


def point(
    run: Run,
    section: str,
    what: str,
    target: Target,
    draft: Eagle3Draft | None,
    size: tuple[int, int],
    keys: KvCacheDtype = "auto",
) -> Row:
    """Measure one batch at one context."""
    batch, context = size
    num_drafted = NUM_DRAFTED if draft is not None else 0
    sizes = run.sizes
    profiled = STEPS if run.args.profile and run.device.type == "cuda" else 0
    each = LENGTH if draft is not None else 1.0
    warm, steps = math.ceil(sizes.first / each), math.ceil(sizes.tokens / each)
    room = (steps + warm + profiled + 4) * (num_drafted + 1) + 2 * num_drafted + 1
    config = EngineConfig(
        max_context=context + room,
        page_size=PAGE_SIZE,
        num_pages=batch * -(-(context + room + num_drafted) // PAGE_SIZE),
        max_requests=batch,
        prefix_cache=False,
        cuda_graphs="on",
        kv_cache_dtype=keys,
    )
    engine = engine_of(target, draft, run.ops, config, num_drafted)
    engine.simulate_acceptance(acceptance_rates() if num_drafted else ())
    found = []
    for number in range(sizes.runs):
        requests = start_requests(engine, batch, context, room)
        found.append(measure_steps(engine, run.device, steps, warm))
        if number + 1 < sizes.runs:
            end_requests(engine, requests)
    if profiled:
        print(
            f"  {what}, batch {batch}, context {context}, kernels of a step:\n{report(kernel_shares(engine.step))}",
            flush=True,
        )
    measured = min(found, key=lambda one: one.step_ms)
    per_request = measured.tokens_per_step / batch
    mean_context = context + per_request * (warm + steps / 2)
    nbytes = pass_bytes(target, batch, mean_context, kv_dtypes(target, config)[0])
    note = f"runs {', '.join(f'{one.step_ms:.3f}' for one in found)} ms; verify {measured.phase_ms['verify']:.3f} ms"
    if draft is not None:
        nbytes = step_bytes(target, draft, batch, mean_context, num_drafted)
        note += f"; acceptance length {per_request:.2f}; {measured.step_ms / LENGTH:.3f} ms at {LENGTH}"
    ms, floor = measured.step_ms, (nbytes / 1e9, nbytes / run.bandwidth * 1e3)
    figures = (ms, measured.tokens_per_s, ms / per_request, *floor, measured.host_overhead)
    return Row(section, what, batch, context, *figures, note)


def acceptance_rates(length: float = LENGTH) -> tuple[float, ...]:
    """Return simulated rates r, r^2, r^3 that give an acceptance length."""
    low, high = 0.0, 1.0
    for _ in range(60):
        rate = (low + high) / 2
        low, high = (rate, high) if 1 + rate + rate**2 + rate**3 < length else (low, rate)
    return tuple(rate**position for position in range(1, NUM_DRAFTED + 1))


def smollm(run: Run) -> None:
    """Measure the embedded model without a draft, with chains, and choosing by itself; the answers must be the same."""
    pair = embedded_pair(run.args.bundle, run.device, run.args.tiny)
    arms = {"plain": None, f"EAGLE-3 K={NUM_DRAFTED}": TreeShape.chain(NUM_DRAFTED), "EAGLE-3 automatic": None}
    for batch in run.sizes.smollm_batches:
        expected = None
        for what, shape in arms.items():
            if run.late():
                return
            drafts = what != "plain"
            measured, answers = speed(pair, run.ops, shape, batch, run.sizes.smollm_tokens, drafts=drafts)
            expected = expected or answers
            same = sum(one == other for one, other in zip(answers, expected, strict=True))
            if same < batch:
                run.failures.append(f"smollm: {what}, batch {batch}: {batch - same} answers differ from plain decoding")
            ms, per_request = measured.step_ms, measured.tokens_per_step / batch
            note = f"acceptance length {per_request:.2f}, {same} of {batch} identical" if drafts else ""
            row = Row("smollm", f"SmolLM2 {what}", batch, 0, ms, measured.tokens_per_s, ms / per_request, note=note)
            run.add(dataclasses.replace(row, host=measured.host_overhead))


def vllm(run: Run) -> None:
    """Let the peer measure itself on this device, plain and with its own simulated acceptance."""
    folder: Path = run.args.vllm.resolve()
    for what, arguments_ in (
        ("vLLM plain", ["models/llama8b"]),
        ("vLLM EAGLE-3 K=3", ["models/llama8b", "models/llama8b-eagle3", str(LENGTH), str(NUM_DRAFTED)]),
    ):
        if run.late():
            return
        done = subprocess.run(
            [sys.executable, "measure.py", *arguments_],
            cwd=folder,
            env={**os.environ, "CTXS": "[1024]", "BATCHES": json.dumps(list(run.sizes.batches))},
            capture_output=True,
            text=True,
            timeout=max(30.0, run.deadline - time.monotonic()),
            check=False,
        )
        found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"B"')]
        for figures in found:
            ms = figures["tpot_ms"]
            run.add(Row("vllm", what, figures["B"], figures["ctx"], ms, figures["tok_s"], ms, note="ms is per token"))
        if not found:
            raise RuntimeError(f"{what} gave no figures (exit {done.returncode}): {done.stderr[-2000:]}")


def print_table(run: Run) -> None:
    """Print everything once more, in one piece."""
    print(f"\nread bandwidth R = {run.bandwidth / 1e12:.3f} TB/s; floor = bytes / R")
    print(f"{'':28} {'B':>4} {'ctx':>6} {'ms':>9} {'tok/s':>10} {'ms/tok':>8} {'GB':>8} {'floor':>7} {'host':>6}")
    for row in run.rows:
        print(line_of(row))
    for failure in run.failures:
        print(f"FAILED: {failure}")


def line_of(row: Row) -> str:
    """Return a row of the table as text; what was not measured is a dash."""

    def cell(value: float | None, form: str) -> str:
        width = int(form.partition(".")[0])
        return f"{'-':>{width}}" if value is None else f"{value:{form}}"

    return (
        f"{row.what:28} {row.batch:>4} {row.context:>6} {cell(row.ms, '9.3f')} {cell(row.tokens_per_s, '10.1f')} "
        f"{cell(row.ms_per_token, '8.3f')} {cell(row.gbytes, '8.2f')} {cell(row.of_floor, '7.1%')} "
        f"{cell(row.host, '6.1%')}  {row.note}"
    )


def write_json(run: Run, path: Path) -> None:
    """Write the rows and what they were measured on."""
    name = torch.cuda.get_device_name() if run.device.type == "cuda" else "cpu"
    contents = {
        "device": name,
        "torch": torch.__version__,
        "kernels": run.ops.name,
        "promise": run.ops.promise,
        "read_bandwidth": run.bandwidth,
        "rows": [{**asdict(row), "of_floor": row.of_floor} for row in run.rows],
        "failures": run.failures,
    }
    path.write_text(json.dumps(contents, indent=1), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
