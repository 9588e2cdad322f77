"""Time a training step on this GPU, plain and with fused kernels, and say how far their results lie apart.

    PYTHONPATH=src:benchmarks python benchmarks/train_step.py [--out FILE] [--shapes 32x1024 51x640] [--dtype float16]

Needs no checkpoint: a random target of SmolLM2-135M's shape, a fresh draft of 12,288 entries, random texts of about
200 tokens. A part that fails is named and left out. `--tiny` is a trial of this script itself, on whatever is there.
"""

import argparse
import contextlib
import dataclasses
import json
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch

from gpu_models import SMOLLM_135M, TINY
from slipstream.checkpoint.spec import ModelSpec, RopeSpec
from slipstream.kernels.training import ops as ops_module
from slipstream.kernels.training.fused import CHECKS, FusedOps
from slipstream.kernels.training.loss import Labels, soft_cross_entropy
from slipstream.kernels.training.ops import TrainOps
from slipstream.kernels.training.seen import Seen
from slipstream.models.target import Target
from slipstream.train.data.corpus import Corpus, DraftVocab, Text, join
from slipstream.train.draft.objective import DraftShape, Emphasis, Objective, new_draft
from slipstream.train.draft.packing import Batch, Packer, UnrollContext, to_device
from slipstream.train.run.optimizer import MovingAverage, Optimizer

UNROLL = 5
Variants = dict[str, TrainOps]


class Bench:
    """The models, the optimizer and what was found; every finding is printed and written at once."""

    def __init__(self, spec: ModelSpec, entries: int, dtype: torch.dtype, repeats: int, out: Path | None) -> None:
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._repeats, self._out = repeats, out
        generator = torch.Generator().manual_seed(0)
        chosen = torch.randperm(spec.vocab_size, generator=generator)[:entries].sort().values
        self.vocab = DraftVocab(chosen, spec.vocab_size, 1.0)
        target = _random_target(spec, chosen, dtype, self.device)
        self.draft = new_draft(DraftShape(vocab_size=entries).spec(spec), target, self.vocab, 0)
        ops_module.USE_FUSED = False  # each variant is set by hand
        self.objective = Objective(target, self.draft, self.vocab, Emphasis(hard_share=0.2))
        self.objective.dtype = torch.bfloat16
        self.named = {name: p for name, p in self.draft.named_parameters() if p.requires_grad}
        self.optimizer = Optimizer(self.named, "adamw")
        self.average = MovingAverage(self.named, 0.999)

    def say(self, **found: object) -> None:
        """Print a finding, and add it to the file."""
        line = json.dumps(found)
        print(line, flush=True)
        if self._out is not None:
            with self._out.open("a") as file:
                file.write(line + "\n")

    @contextlib.contextmanager
    def trying(self, what: str) -> Iterator[None]:
        """Go on after a failure, saying what it was."""
        try:
            yield
        except Exception as error:  # noqa: BLE001  # the next part may well work
            traceback.print_exc()
            self.say(failed=what, error=f"{type(error).__name__}: {error}"[:400])

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def clock(self, run: Callable[[], object]) -> float:
        """Return the milliseconds of one run, after one that is not counted."""
        run()
        self.synchronize()
        begun = time.perf_counter()
        for _ in range(self._repeats):
            run()
        self.synchronize()
        return (time.perf_counter() - begun) * 1e3 / self._repeats

    def gradients(self, batch: Batch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the losses of the unrolled steps and the gradients of a batch."""
        self.optimizer.zero_grad()
        out = self.objective(batch)
        out.loss.backward()
        return out.loss_J, {name: p.grad for name, p in self.named.items() if p.grad is not None}

    def update(self) -> None:
        """Take a step of no length."""
        torch.nn.utils.clip_grad_norm_(list(self.named.values()), 1.0)
        self.optimizer.step(0.0)
        self.average.update(10_000)

    def step(self, batches: list[Batch]) -> None:
        """Do what training does with a batch, taken from the host."""
        batches.append(batches.pop(0))
        self.gradients(to_device(batches[0], self.device))
        self.update()


def _random_target(spec: ModelSpec, chosen: torch.Tensor, dtype: torch.dtype, device: torch.device) -> Target:
    """Return a target that nearly always prefers tokens the draft knows, as a trained one does."""
    torch.manual_seed(0)
    with torch.device(device):
        target = Target(spec, spec.max_position)
    with torch.no_grad():
        for parameter in target.parameters():
            if parameter.dim() == 2:
                parameter.normal_(0, 0.03)
        target.embed_tokens.weight.mul_(3)
        outside = torch.ones(spec.vocab_size, dtype=torch.bool)
        outside[chosen] = False
        target.embed_tokens.weight[outside.to(device)] *= 0.6
    target.rotary.fill(device)
    return target.to(dtype).requires_grad_(False).eval() if dtype == torch.float32 else _narrowed(target, dtype)


def _narrowed(target: Target, dtype: torch.dtype) -> Target:
    """Return the target with its weights, but not its rotary table, in a narrower type."""
    for parameter in target.parameters():
        parameter.data = parameter.data.to(dtype)
    return target.requires_grad_(False).eval()


def random_corpus(vocab: DraftVocab, tokens: int, longest: int) -> Corpus:
    """Return texts of 40 to 640 tokens, about 200 on average, of which about two thirds are answers."""
    rng = np.random.default_rng(0)
    texts, total = [], 0
    while total < tokens:
        length = int(np.clip(rng.gamma(2.5, 80), min(40, longest // 2), min(640, longest)))
        start = int(rng.integers(4, max(5, length * 2 // 3)))
        texts.append(Text(rng.choice(vocab.token_ids_V.numpy(), length).tolist(), [(start, length)]))
        total += length
    return join(texts)


def variants(bench: Bench) -> Variants:
    """Return the ways to run a step: plain, each part fused alone, all parts that pass their check."""
    found: Variants = {"plain": TrainOps(bench.device)}
    good = []
    for part, check in CHECKS.items():
        with bench.trying(f"check of {part}"):
            begun = time.perf_counter()
            check(bench.device)
            good.append(part)
            found[f"only {part}"] = FusedOps(bench.device, [part])
            bench.say(check=part, seconds=round(time.perf_counter() - begun, 1))
    found["fused"] = FusedOps(bench.device, good)
    return found


def part_times(bench: Bench, batch: Batch) -> dict[str, float]:
    """Return the milliseconds of a step's parts, each run by itself."""
    objective, draft = bench.objective, bench.draft
    seen = Seen(batch.text_BT)
    last, captured = objective.features(batch.ids_BT, batch.positions_BT, seen)
    teacher = objective.teacher(last, batch.teacher_slots_N, batch.ids_BT)
    normed = [
        torch.randn(rows.slots_N.shape[0], draft.spec.hidden_size, device=bench.device)
        .to(objective.dtype)
        .requires_grad_()
        for rows in batch.steps
    ]
    grad = torch.randn(*batch.ids_BT.shape, draft.spec.hidden_size, device=bench.device).to(objective.dtype)

    def losses() -> None:
        for rows, hidden in zip(batch.steps, normed, strict=True):
            labels = Labels(rows.teacher_N, torch.full(rows.slots_N.shape, 1e-4, device=bench.device), 0.2)
            soft_cross_entropy(hidden, draft.lm_head.weight, teacher, labels, objective.ops)

    def forward() -> list[torch.Tensor]:
        ctx = UnrollContext(objective.ops, batch.positions_BT, Seen(batch.text_BT))
        return [hidden.normed_TD for hidden in objective.unroll(captured, batch.ids_BT, ctx, UNROLL)]

    def both() -> None:
        torch.autograd.backward(forward(), [grad] * UNROLL)

    times = {
        "target": bench.clock(lambda: objective.features(batch.ids_BT, batch.positions_BT, Seen(batch.text_BT))),
        "teacher": bench.clock(lambda: objective.teacher(last, batch.teacher_slots_N, batch.ids_BT)),
        "loss": bench.clock(losses),
        "draft forward": bench.clock(forward),
    }
    times["draft backward"] = bench.clock(both) - times["draft forward"]
    times["optimizer"] = bench.clock(bench.update)
    return {name: round(ms, 2) for name, ms in times.items()}


def apart(bench: Bench, batch: Batch, plain: TrainOps, fused: TrainOps) -> dict[str, object]:
    """Return how far losses and gradients of two variants lie apart, and each from a draft in float32."""

    def run(ops: TrainOps, dtype: torch.dtype) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        bench.objective.ops, bench.objective.dtype = ops, dtype
        losses, gradients = bench.gradients(batch)
        return losses.double().cpu(), {name: g.detach().clone() for name, g in gradients.items()}

    def worst(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> tuple[float, str]:
        return max((round(float((b[n] - a[n]).norm() / a[n].norm().clamp(min=1e-12)), 5), n) for n in a)

    old, new = run(plain, torch.bfloat16), run(fused, torch.bfloat16)
    found: dict[str, object] = {
        "losses plain": old[0].tolist(),
        "losses fused": new[0].tolist(),
        "worst loss, relative": float(((new[0] - old[0]) / old[0]).abs().max()),
        "worst gradient, fused from plain": worst(old[1], new[1]),
    }
    with bench.trying("the same in float32"):
        exact = run(plain, torch.float32)
        found["worst gradient, plain from float32"] = worst(exact[1], old[1])
        found["worst gradient, fused from float32"] = worst(exact[1], new[1])
    bench.objective.dtype = torch.bfloat16
    return found


def profile(bench: Bench, batches: list[Batch], rows: int = 28) -> None:
    """Print the kernels that take most of two steps."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as recording

    with recording(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as found:
        bench.step(batches)
        bench.step(batches)
        bench.synchronize()
    kernels = [e for e in found.key_averages() if e.device_type == torch.autograd.DeviceType.CUDA]
    kernels.sort(key=lambda e: -e.self_device_time_total)
    busy = sum(kernel.self_device_time_total for kernel in kernels) / 2e3
    print(f"{busy:8.3f} ms of kernels in a step, {sum(kernel.count for kernel in kernels) // 2} of them", flush=True)
    for kernel in kernels[:rows]:
        print(f"{kernel.self_device_time_total / 2e3:8.3f} ms {kernel.count // 2:5d} x {kernel.key[:110]}", flush=True)


def shape_run(bench: Bench, shape: str, ways: Variants, fully: bool) -> list[str]:
    """Measure one shape of batch; return lines of a table."""
    rows, length = (int(x) for x in shape.split("x"))
    corpus = random_corpus(bench.vocab, rows * length * 5, length)
    packer = Packer(corpus, length, rows, UNROLL, seed=0)
    batches = [packer.batch(step) for step in range(3)]
    on_device = to_device(batches[0], bench.device)
    supervised = [len(step.slots_N) for step in on_device.steps]
    used = float((on_device.text_BT >= 0).float().mean())
    bench.say(shape=shape, texts=len(corpus), filled=round(used, 3), supervised=supervised)
    lines, base = [], 0.0
    for name, ops in ways.items():
        if not fully and name.startswith("only"):
            continue
        with bench.trying(f"{shape} {name}"):
            bench.objective.ops = ops
            ms = bench.clock(lambda: bench.step(batches))
            base = base or ms
            speed = rows * length / ms * 1e3
            lines.append(f"{shape:9s} {name:16s} {ms:8.1f} ms {speed / 1e3:8.0f}k tokens/s {base / ms:6.2f}x plain")
            bench.say(shape=shape, variant=name, ms=round(ms, 2), tokens_per_s=round(speed))
            if fully and name in ("plain", "fused"):
                found = part_times(bench, on_device)
                lines.append(" " * 10 + "  ".join(f"{part} {value}" for part, value in found.items()))
                bench.say(shape=shape, variant=name, parts_ms=found)
    if fully:
        with bench.trying("differences"):
            found = apart(bench, on_device, ways["plain"], ways["fused"])
            bench.say(shape=shape, **found)
            lines += [f"          {name}: {value}" for name, value in found.items()]
        with bench.trying("profile"):
            bench.objective.ops = ways["fused"]
            if bench.device.type == "cuda":
                profile(bench, batches)
    return lines


def main() -> None:
    """Run everything asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--shapes", nargs="+", default=["32x1024", "51x640"])
    parser.add_argument("--dtype", default="float16")
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    begun = time.perf_counter()
    spec, entries, shapes = dataclasses.replace(SMOLLM_135M, max_position=2048), 12_288, args.shapes
    if args.tiny:
        spec = dataclasses.replace(TINY, head_dim=16, rope=RopeSpec(10000.0, 16), tie_embeddings=True)
        entries, shapes = 48, ["1x48"]
    bench = Bench(spec, entries, getattr(torch, args.dtype), 1 if args.tiny else 6, args.out)
    ways = variants(bench)
    lines = []
    for index, shape in enumerate(shapes):
        with bench.trying(shape):
            lines += shape_run(bench, shape, ways, fully=index == 0)
    print("\n".join(lines))
    print(f"{time.perf_counter() - begun:.0f} s in all")


if __name__ == "__main__":
    main()
