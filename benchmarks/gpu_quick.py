"""Time attention's short chain (`attention_quick`) on this GPU, beside programs that share splits as they did before.

    PYTHONPATH=src python benchmarks/gpu_quick.py --out FOLDER [--seconds 40] [--start FILE]

First the bits, each setting in a process of its own, which also compiles it: one query to four, trees among them,
contexts around the borders of blocks, groups and programs; and whole layers in a graph whose own keys and values are
overwritten before every replay, so that whoever reads them too early is found out. Then whole layers of Llama-8B's
shape, cold, in turns: one request at 1,152 keys with every setting; the best of them, with 8 requests, with 10,240 keys
and with FP8 weights. FOLDER gets `sm_90.json` with the best that costs 8 requests nothing, for kernels/triton/configs.
A setting that fails, or does not answer, is skipped, and said.
"""

import argparse
import dataclasses
import multiprocessing
import time
from multiprocessing.pool import AsyncResult
from pathlib import Path

import torch
from torch import Tensor

from gpu_even import Fields, Requests, with_fields
from gpu_rows import Layers, said
from gpu_rows_tried import Case
from gpu_streams import PackedLayers
from gpu_tune import replayed_us, starting_tuning, write_tuning
from slipstream.kernels.triton.attention import AttentionLaunch, attention
from slipstream.kernels.triton.bandwidth import read_bandwidth
from slipstream.kernels.triton.tuning import AttentionConfig, Tuning

PAGE, BOUND, CONTEXT, LONG = 16, 4096, 1152, 10240
NUM_LAYERS, REPLAYS, TURNS, ANSWER_S = 8, 21, 3, 120
TODAY = "as before"
BEFORE: Fields = {"quick_warps": 0}
FOUR: Fields = {"quick_warps": 4}
SETTINGS: dict[str, Fields] = {
    "4 warps": FOUR,
    "8 warps": {"quick_warps": 8},
    "4, any registers": {**FOUR, "quick_registers": 0},
    "4, 8 groups": {**FOUR, "quick_groups": 8},
    "4, share 1": {**FOUR, "share": 1},
    "4, share 2": {**FOUR, "share": 2},
    "2 warps": {"quick_warps": 2, "quick_registers": 0},
    "4, 4224 programs": {**FOUR, "programs": 4224},
}
CONTEXTS = (1, 3, 63, 64, 65, 127, 255, 256, 257, 320, 1023, 1152, 1280, 1281, 1408, 1409, 1500, 2046, 2817, 4000)
Key = tuple[str, int, Case]
"""Format of weights, keys of a request, and requests x nodes."""
FIRST: tuple[Key, ...] = (("dense", CONTEXT, (1, 1)), ("dense", CONTEXT, (1, 4)))
FURTHER: tuple[Key, ...] = (
    ("dense", CONTEXT, (8, 1)),
    ("dense", CONTEXT, (8, 4)),
    ("dense", LONG, (1, 1)),
    ("dense", LONG, (8, 1)),
    ("fp8", CONTEXT, (1, 1)),
    ("fp8", CONTEXT, (1, 4)),
)
Times = dict[Key, float]


class Overwritten(Layers):
    """Layers whose nodes' keys and values are not there before a pass has written them."""

    def outs(self, tuning: Tuning, case: Case, replays: int) -> list[Tensor]:
        """Return what replays of a graph give, which overwrites them first."""
        first = self._context - 4
        index = torch.arange(first, first + 4)
        slots = (self._order[: self._pages][index // PAGE].long() * PAGE + index % PAGE).to(self._device)
        step = self.pass_of(tuning, case)

        def run() -> Tensor:
            for layer in self._kv.layers:
                layer.keys_SGd.index_fill_(0, slots, float("nan"))
                layer.values_SGd.index_fill_(0, slots, float("nan"))
            return step()

        run()
        torch.cuda.synchronize()
        graph, found = torch.cuda.CUDAGraph(), []
        with torch.cuda.graph(graph):
            out = run()
        for _ in range(replays):
            graph.replay()
            found.append(out.clone())
        torch.cuda.synchronize()
        return found


def attended(
    requests: Requests, config: AttentionConfig, rows: list[int], queries: tuple[int, int], tree: bool
) -> tuple[Tensor, Tensor]:
    """Return what some requests' queries attend to, and the largest magnitude of each head.

    Args:
        queries: how many, and how many are left out at the end.
        tree: whether the last query does not see the one before it.
    """
    q, batch = requests.batch(rows, *queries)
    if tree:
        ancestors = batch.ancestors_T.clone()
        ancestors[queries[0] - 1 :: queries[0]] = -3
        batch = dataclasses.replace(batch, ancestors_T=ancestors)
    counters = torch.zeros(1024, dtype=torch.int32, device=q.device)
    maxima = torch.zeros(q.shape[:2], device=q.device)
    launch = AttentionLaunch(config, counters, dependent=True, early=True)
    out = attention(q, requests.layers[0], batch, q.shape[2] ** -0.5, None, launch, maxima)
    assert not counters.any(), "counters are left as zeros"
    return out, maxima


def wrong_bits(before: AttentionConfig, config: AttentionConfig, device: torch.device) -> list[str]:
    """Return where attention alone gives other bits than before."""
    requests, found = Requests(list(CONTEXTS), 1, BOUND, device), []
    pairs = [[0, 11], [8, 18]]
    for rows in (*([row] for row in range(len(CONTEXTS))), *pairs):
        for queries, tree in (((1, 0), False), ((4, 0), False), ((1, 3), False), ((3, 1), True), ((2, 0), True)):
            if min(CONTEXTS[row] for row in rows) < 4 and queries != (1, 0):
                continue
            expected = attended(requests, before, rows, queries, tree)
            got = attended(requests, config, rows, queries, tree)
            if not all(torch.equal(a, b) for a, b in zip(got, expected, strict=True)):
                most = (got[0].float() - expected[0].float()).abs().max()
                found.append(f"{[CONTEXTS[row] for row in rows]} keys x {queries} (by {float(most):.2g})")
    return found


def check(task: tuple[Tuning, Tuning]) -> str:
    """Compile a setting; return what is wrong with its bits: "" if they are those of before."""
    before, tuning = task
    try:
        torch.manual_seed(0)
        with torch.no_grad():
            device = torch.device("cuda")
            wrong = wrong_bits(before.attention, tuning.attention, device)
            layers = Overwritten(2, CONTEXT, 1, device)
            for case in ((1, 1), (1, 4)):
                expected = layers.outs(before, case, 1)[0]
                outs = layers.outs(tuning, case, 12)
                if not bool(expected.isfinite().all()):
                    wrong.append(f"layers {case} have no numbers as before")
                if not all(torch.equal(out, expected) for out in outs):
                    wrong.append(f"layers {case}")
            torch.cuda.synchronize()
    except Exception as error:  # noqa: BLE001 - what else there is to find out is worth more
        return f"failed: {said(error)}"
    return "; ".join(f"OTHER BITS at {one}" for one in wrong[:6]) + (f" ({len(wrong)} in all)" if wrong else "")


def compile_layers(task: tuple[Tuning, Key]) -> str:
    """Run a layer as before, so that its kernels are in Triton's cache; return what went wrong."""
    tuning, (format, context, case) = task
    device = torch.device("cuda")
    try:
        with torch.no_grad():
            bound = -(-context // BOUND) * BOUND
            layers = PackedLayers(1, 64, 8, device) if format == "fp8" else Layers(1, 64, 8, device, bound)
            layers.pass_of(tuning, case)()
            torch.cuda.synchronize()
    except Exception as error:  # noqa: BLE001 - it is said, and shows again where the layer is timed
        return said(error)
    return ""


def checked(before: Tuning, tunings: dict[str, Tuning]) -> list[str]:
    """Compile all settings in processes of their own; return those whose bits are the ones before."""
    started, right = time.monotonic(), []
    with multiprocessing.get_context("spawn").Pool(min(multiprocessing.cpu_count(), 14)) as pool:
        for error in pool.imap_unordered(compile_layers, [(before, key) for key in (*FIRST, *FURTHER)]):
            print(f"  does not run: {error}" if error else "", end="\n" if error else "", flush=True)
        print(f"compiled what was there in {time.monotonic() - started:.0f} s", flush=True)
        started = time.monotonic()
        asked: dict[str, AsyncResult[str]] = {
            name: pool.apply_async(check, ((before, tuning),)) for name, tuning in tunings.items()
        }
        for name, answer in asked.items():
            try:
                wrong = answer.get(max(ANSWER_S - (time.monotonic() - started), 1))
            except multiprocessing.TimeoutError:
                wrong = "DOES NOT ANSWER"
            print(f"  {wrong or 'the same bits'}: {name}  ({time.monotonic() - started:.0f} s)", flush=True)
            right += [] if wrong else [name]
    return right


class Timer:
    """Layers of one format and context, timed with any setting."""

    def __init__(self, format: str, context: int, device: torch.device) -> None:
        requests = 8 if format == "dense" else 1
        packed = PackedLayers if format == "fp8" else Layers
        self._layers = packed(NUM_LAYERS if context == CONTEXT else 4, context, requests, device)
        self._pool = torch.cuda.graph_pool_handle()

    def us(self, tuning: Tuning, case: Case) -> tuple[float, Tensor]:
        """Return microseconds a layer, and what a pass gives."""
        us, out = replayed_us(self._layers.pass_of(tuning, case), REPLAYS, self._pool)
        return us / len(self._layers.target.layers), out


def timed(keys: tuple[Key, ...], tunings: dict[str, Tuning], turns: int, deadline: float) -> dict[str, Times]:
    """Return the least of each setting's times in turns; one with other bits is left out."""
    found: dict[str, Times] = {name: {} for name in tunings}
    for where in dict.fromkeys(key[:2] for key in keys):
        timer = Timer(*where, torch.device("cuda"))
        expected: dict[Key, Tensor] = {}
        for turn in range(turns):
            for name, tuning in tunings.items():
                for key in (key for key in keys if key[:2] == where and name in found):
                    if time.monotonic() > deadline and turn > 0:
                        continue
                    try:
                        us, out = timer.us(tuning, key[2])
                    except Exception as error:  # noqa: BLE001 - one failing setting must not end the run
                        print(f"  skipped {name}: {said(error)}", flush=True)
                        del found[name]
                        break
                    if not torch.equal(out, expected.setdefault(key, out)):
                        print(f"  OTHER BITS: {name} at {key}", flush=True)
                        del found[name]
                        break
                    found[name][key] = min(us, found[name].get(key, us))
        del timer
    return found


def show(found: dict[str, Times], keys: tuple[Key, ...]) -> None:
    """Print a table of microseconds a layer, and what each setting saves."""
    head = " ".join(f"{f'{f} {c:,} {r}x{n}':>18}" for f, c, (r, n) in keys)
    print(f"{'us a layer':26} {head}", flush=True)
    for name, times in found.items():
        text = " ".join(
            f"{times[key]:10.2f} ({times[key] - found[TODAY][key]:+5.2f})" if key in times else f"{'':18}"
            for key in keys
        )
        print(f"{name:26} {text}", flush=True)


def ratio(times: Times, before: Times, keys: tuple[Key, ...]) -> float:
    """Return the mean of times beside those before."""
    ratios = [times[key] / before[key] for key in keys if key in times and key in before]
    return sum(ratios) / max(len(ratios), 1)


def main() -> None:
    """Check bits, time, and write the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=40.0, help="no further turns after so long")
    parser.add_argument("--start", type=Path, help="the configuration to start from, if not the one that ships")
    arguments = parser.parse_args()
    device = torch.device("cuda")
    before = with_fields(starting_tuning(arguments.start, device), BEFORE)
    print(f"{torch.cuda.get_device_name()} reads {read_bandwidth(device) / 1e12:.3f} TB/s", flush=True)
    tunings = {name: with_fields(before, fields) for name, fields in SETTINGS.items()}
    right = checked(before, tunings)
    deadline = time.monotonic() + arguments.seconds
    first = timed(FIRST, {TODAY: before} | {name: tunings[name] for name in right}, TURNS, deadline - 15)
    show(first, FIRST)
    order = sorted(first, key=lambda name: ratio(first[name], first[TODAY], FIRST))
    again = dict.fromkeys((TODAY, *order[:2], *(name for name in right if "programs" in name)))
    further = timed(FURTHER, {name: before if name == TODAY else tunings[name] for name in again}, 2, deadline)
    show(further, FURTHER)
    cheap = [name for name in order[:2] if name in further]
    cheap = [name for name in cheap if ratio(further[name], further[TODAY], FURTHER[:2]) < 1.003]
    best = cheap[0] if cheap else TODAY
    print(f"best: {best}, {SETTINGS.get(best, BEFORE)}", flush=True)
    write_tuning(before if best == TODAY else tunings[best], arguments.out)


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    torch.manual_seed(0)
    main()
