"""Time attention of decoding and verifying batches as steps run it: with bounds of 4,096 keys, whatever is used.

    PYTHONPATH=src python -m benchmarks.gpu_attention [--seconds 60] [--splits 128,256]

One line for each configuration: microseconds of a layer (Llama-8B's heads, cold cache) for each batch x context /
queries, and the share of the read bandwidth of the first. Configurations with the same split and block must give the
same bits; one that does not is marked, one that fails is skipped.
"""

import argparse
import dataclasses
import itertools
import multiprocessing
import time

import torch
from benchmarks.gpu_tune import graph_seconds, kv_bytes
from torch import Tensor

from slipstream.kernels.ops import AttentionBatch, KvLayer
from slipstream.kernels.triton.attention import AttentionLaunch, attention
from slipstream.kernels.triton.bandwidth import read_bandwidth
from slipstream.kernels.triton.tuning import AttentionConfig, Tuning, architecture_of, read_tuning

CASES = (
    (40, 1024, 4),
    (40, 1024, 1),
    (8, 1024, 4),
    (1, 1024, 4),
    (1, 1024, 1),
    (1, 10240, 1),
    (8, 10240, 4),
    (40, 10240, 4),
)
PAGE = 16
BOUND = 4096
ALWAYS_SERIAL = 1
TILES = ((128, 4, 2), (64, 8, 3), (128, 8, 2), (32, 2, 4))  # block, warps, stages
PROGRAMS = (528, 1056, 2112, 4224)
GROUPS = (  # stages, registers and programs of those that take groups of splits
    *itertools.product((2,), (0, 168, 128), (320, 640, 1056, 2112)),
    *itertools.product((3,), (0,), (320, 640, 1056, 2112)),
)


@dataclasses.dataclass(frozen=True)
class Inputs:
    """What a pass attends with."""

    q_THd: Tensor
    layers: list[KvLayer]
    batch: AttentionBatch


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--splits", default="128")
    parser.add_argument("--cases", type=int, default=8, help="how many of the batches, contexts and queries")
    arguments = parser.parse_args()
    device = torch.device("cuda")
    tuning = read_tuning(architecture_of(device))
    bandwidth = read_bandwidth(device)
    deadline = time.monotonic() + arguments.seconds
    cases = CASES[: arguments.cases]
    splits = [int(split) for split in arguments.splits.split(",")]
    start = time.monotonic()
    with multiprocessing.get_context("spawn").Pool(min(multiprocessing.cpu_count(), 14)) as pool:
        tasks = [(config, case) for split in splits for config in candidates(tuning.attention, split) for case in cases]
        failed = [error for error in pool.imap_unordered(compile_one, tasks, 1) if error]
    print(f"compiled {len(tasks)} in {time.monotonic() - start:.0f} s; failed: {failed}", flush=True)
    inputs = {case: prepared(case, device) for case in cases}
    print(f"reads {bandwidth / 1e12:.3f} TB/s; " + " ".join(f"{b}x{c}/{q}" for b, c, q in cases), flush=True)
    for split in splits:
        expected: dict[tuple[tuple[int, int, int], int], Tensor] = {}
        for config in candidates(tuning.attention, split):
            if time.monotonic() > deadline:
                print("out of time")
                return
            try:
                print(line(tuning, config, inputs, expected, bandwidth), flush=True)
            except Exception as error:  # noqa: BLE001 - one failing configuration must not end the run
                print(f"skipped {described(config)}: {str(error)[:120]!r}", flush=True)


def candidates(shipped: AttentionConfig, split: int) -> list[AttentionConfig]:
    """Return what ships, then its tiles shared by other programs, one program a tile, and other tiles."""
    base = dataclasses.replace(shipped, split=split)
    found = [base, *(dataclasses.replace(base, programs=programs) for programs in PROGRAMS)]
    found += [
        dataclasses.replace(base, group_stages=stages, group_registers=registers, group_programs=programs)
        for stages, registers, programs in GROUPS
    ]
    found.append(dataclasses.replace(base, serial_from=ALWAYS_SERIAL))
    for block, warps, stages in TILES:
        found.append(dataclasses.replace(base, block=block, num_warps=warps, num_stages=stages))
    return list(dict.fromkeys(config for config in found if config.block <= split))


def compile_one(task: tuple[AttentionConfig, tuple[int, int, int]]) -> str:
    """Run one configuration once, so that Triton's cache has it; return what went wrong."""
    config, case = task
    try:
        tuning = read_tuning(architecture_of(torch.device("cuda")))
        with torch.no_grad():
            given = prepared(case, torch.device("cuda"), used=64)
            counters = torch.zeros(1 << 18, dtype=torch.int32, device="cuda")
            launch = AttentionLaunch(config, counters, tuning.dependent_launch)
            attention(given.q_THd, given.layers[0], given.batch, 128**-0.5, None, launch)
            torch.cuda.synchronize()
    except Exception as error:  # noqa: BLE001 - anything a compiler may raise is a reason to skip the candidate
        return f"{described(config)}: {str(error)[-120:]!r}"
    return ""


def described(config: AttentionConfig) -> str:
    """Return a configuration in a few words."""
    way = "one program" if config.serial_from == ALWAYS_SERIAL else f"programs {config.programs}"
    groups = f"groups {config.group_programs} s{config.group_stages} r{config.group_registers}"
    tiles = f"split {config.split} block {config.block} w{config.num_warps}s{config.num_stages}"
    return f"{tiles} {way}{', ' + groups if config.group_programs else ''}"


def line(
    tuning: Tuning, config: AttentionConfig, inputs: dict[tuple[int, int, int], Inputs],
    expected: dict[tuple[tuple[int, int, int], int], Tensor], bandwidth: float,
) -> str:  # fmt: skip
    """Time a configuration over the cases, and compare its bits with those of the first of its split and block."""
    counters = torch.zeros(1 << 18, dtype=torch.int32, device="cuda")
    launch = AttentionLaunch(config, counters, tuning.dependent_launch)
    times, wrong = [], []
    for case, given in inputs.items():

        def run(i: int, given: Inputs = given) -> Tensor:
            layer = given.layers[i % len(given.layers)]
            return attention(given.q_THd, layer, given.batch, 128**-0.5, None, launch)

        out = run(0)
        if not torch.equal(out, expected.setdefault((case, config.block), out)):
            wrong.append(case)
        times.append(graph_seconds(run, max(20, len(given.layers))))
    share = kv_bytes(next(iter(inputs))) / times[0] / bandwidth
    text = " ".join(f"{seconds * 1e6:6.1f}" for seconds in times)
    return f"{described(config):62} {text} us {100 * share:3.0f}%{f' BITS DIFFER {wrong}' if wrong else ''}"


def prepared(case: tuple[int, int, int], device: torch.device, used: int | None = None) -> Inputs:
    """Return queries, layers of keys and values, and the description of a step's pass, with its bound on keys.

    Args:
        used: how many keys there really are, if not as many as the case says.
    """
    num_requests, context, queries = case
    columns = max(BOUND, -(-context // BOUND) * BOUND) // PAGE
    context = used or context
    pages = -(-(context + queries) // PAGE)
    num_layers = 1 if used else max(2, min(16, (1 << 29) // kv_bytes(case)))
    size = (num_requests * pages * PAGE, 8, 128)
    layers = [
        KvLayer(*(torch.randn(size, device=device, dtype=torch.bfloat16) for _ in "kv")) for _ in range(num_layers)
    ]
    table = torch.zeros(num_requests, columns, dtype=torch.int32, device=device)
    table[:, :pages] = torch.randperm(num_requests * pages, device=device).int().view(num_requests, pages)
    own = torch.arange(context - queries, context, device=device).repeat(num_requests)
    batch = AttentionBatch(
        query_starts_R1=torch.arange(0, num_requests * queries + 1, queries, dtype=torch.int32, device=device),
        kv_lens_R=torch.full((num_requests,), context, dtype=torch.int32, device=device),
        page_table_RP=table,
        kv_index_T=own,
        ancestors_T=torch.full_like(own, -1),
        page_size=PAGE,
        max_queries=queries,
        max_keys=columns * PAGE,
    )
    q = torch.randn(num_requests * queries, 32, 128, device=device, dtype=torch.bfloat16)
    return Inputs(q, layers, batch)


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
