"""Time rounds of the embedded model on a CPU, interleaved: what checking M rows costs beside one, and drafting them.

    python benchmarks/cpu_step.py [--threads 2] [--context 200] [--rounds 30] [--keys float16 bfloat16]

A round runs as the engine runs it: one call that drafts chains, checks them in one pass of the target (blocks, head and
choice) and lets the draft follow. The call says how long each of the three took. Contexts are random, which changes
what is kept but not what is computed.
"""

import argparse
import statistics

import torch

from slipstream.checkpoint.embedded import embedded_draft
from slipstream.checkpoint.hub import resolve
from slipstream.checkpoint.reader import open_checkpoint
from slipstream.engine.read_draft import read_draft
from slipstream.kernels import Cut, Follower, RoundModels, RoundStart, SamplingState
from slipstream.kernels.cpu.ops import CpuOps
from slipstream.models.context import KvCache
from slipstream.models.eagle3 import Eagle3Draft
from slipstream.models.load import captured_layers, load_target
from slipstream.models.target import Target

SHAPES = (*((1, rows) for rows in (1, 2, 4, 6, 8, 16, 24, 32)), (8, 1), (8, 2), (8, 3), (8, 4))  # requests, rows each
PAGE_SIZE = 16
CPU = torch.device("cpu")


class Rounds:
    """Rounds of one shape over one type of keys."""

    def __init__(self, ops: CpuOps, target: Target, draft: Eagle3Draft, keys: str, shape: tuple[int, int, int]) -> None:
        requests, rows, before = shape
        pages = -(-(before + rows) // PAGE_SIZE)
        self._ops, self._depth = ops, rows - 1
        captured = captured_layers(draft.spec, target.spec)
        caches = [random_cache(model, requests * pages, keys) for model in (target, draft)]
        self._models = RoundModels(target, caches[0], captured, draft, caches[1])
        self._start = RoundStart(
            pages=[range(row * pages, (row + 1) * pages) for row in range(requests)],
            roots=[1000 + row for row in range(requests)],
            lengths=[before] * requests,
            sampling=SamplingState(requests, target.spec.vocab_size, CPU),
            slots=range(requests),
            limits=[self._depth] * requests,
            followers=[
                Follower.start(torch.randn(draft.spec.hidden_size), draft.fc.in_features, rows) for _ in range(requests)
            ],
        )
        self.seconds: list[tuple[float, float, float]] = []

    def run(self) -> None:
        """Run one round and keep its times."""
        results = self._ops.run_rounds(self._models, self._start, self._depth, Cut())
        assert results is not None, "the kernels read the embedded model"
        self.seconds.append(results[0].seconds)


def random_cache(model: Target | Eagle3Draft, num_pages: int, keys: str) -> KvCache:
    """Return random keys and values."""
    kv = KvCache.allocate(model.kv_shape, num_pages, PAGE_SIZE, getattr(torch, keys), CPU)
    for layer in kv.layers:
        layer.keys_SGd.copy_(torch.randn(layer.keys_SGd.shape))
        layer.values_SGd.copy_(torch.randn(layer.values_SGd.shape))
    return kv


def main() -> None:
    """Print a line per shape: milliseconds for checking, the ratio to one row, and what drafting and following took."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--context", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--keys", nargs="+", default=["float16"])
    args = parser.parse_args()
    torch.set_num_threads(1)
    ops = CpuOps(args.threads)
    target = load_target(open_checkpoint(resolve("embedded")), torch.float32, CPU, ops=ops)
    path = embedded_draft()
    assert path is not None, "the embedded draft ships with the package"
    draft = read_draft(path, target, None, ops)
    cases = {
        (keys, shape): Rounds(ops, target, draft, keys, (*shape, args.context))
        for keys in args.keys
        for shape in SHAPES
    }
    for _ in range(args.rounds + 2):
        for case in cases.values():
            case.run()
    print(
        f"{args.context} tokens of context, {ops.isa}, {args.threads} threads, medians of {args.rounds}, milliseconds"
    )
    print("requests x rows, keys       check  to one row     draft    follow")
    one = 0.0
    for (keys, (requests, rows)), case in cases.items():
        draft_s, check_s, follow_s = (statistics.median(times) for times in zip(*case.seconds[2:], strict=True))
        one = one or check_s
        name = f"{requests} x {rows}, {keys}"
        print(f"{name:22} {1e3 * check_s:10.3f} {check_s / one:11.2f} {1e3 * draft_s:9.3f} {1e3 * follow_s:9.3f}")


if __name__ == "__main__":
    with torch.inference_mode():
        main()
