"""Time attention whose keys are asked for by a warp of its own on this GPU, beside the programs that ship.

    PYTHONPATH=src python benchmarks/gpu_flow.py --out FOLDER [--bits] [--seconds 65] [--start FILE]

First the bits, each candidate in a process of its own, which is ended if it hangs: one query to four, alone, among 8
and among 40 requests, contexts around the borders of groups, each as the programs of a request's own have it; 40 with
one, three and four queries hundreds of times, half of them over memory full of NaN, so that no result of the run before
can stand in for one that was not there yet. Then graphs of whole layers over and over, beside kernels that do not
overlap: contexts grow and shrink from one to the next, and a pass's own keys are NaN before it, so that none can be
read too early. `--bits` ends here. Then attention alone, contexts spread around 1,216 and 1,408 keys, and 10,240 keys.
Then whole decoder layers of Llama-8B's shape at 1,152, 1,408 and 10,240 keys: without such a warp, with what ships and
the best of the others, and without again. FOLDER gets `sm_90.json` with the best, to be put into
kernels/triton/configs, and `flow.json` with every time. A candidate that fails is skipped, and said.
"""

import argparse
import dataclasses
import json
import multiprocessing
import time
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from gpu_even import (
    Alone,
    Fields,
    Requests,
    Times,
    check,
    compile_layers,
    context_sets,
    heading,
    score,
    time_layers,
    with_fields,
)
from gpu_rows import Layers, said
from gpu_rows_tried import Case
from gpu_tune import starting_tuning, write_tuning
from slipstream.kernels.triton.bandwidth import read_bandwidth
from slipstream.kernels.triton.ops import TritonOps
from slipstream.kernels.triton.tuning import Tuning
from slipstream.models.context import PagedContext

CASES: tuple[Case, ...] = ((8, 1), (8, 4), (40, 1), (40, 4))
ALONE: dict[int, tuple[Case, ...]] = {1216: CASES[2:], 1408: CASES[2:], 10240: CASES}
TODAY, AGAIN = "as configured", "as configured, again"
ONE: Fields = {"flow_programs": 132, "flow_stages": 5}
SHIPS = "4 blocks"
CANDIDATES: dict[str, Fields] = {  # programs are 132 processors times those that fit one; their parts are by head
    "5 blocks": ONE,
    "4 blocks": {**ONE, "flow_stages": 4},
    "6 blocks": {**ONE, "flow_stages": 6},
}
RUNS = 200  # of 40 requests, for each number of queries and each set of contexts
TASK_SECONDS = 90.0  # what checking one candidate's bits may take, compiling included
GROWN = 60  # graphs of whole layers, for each number of nodes
TIMED_SECONDS = 25.0  # what is left for the times, whatever that took


def wrong_runs(own: Tuning, fields: Fields) -> list[str]:
    """Return how many of many runs gave other bits than each request's own programs."""
    found, config = [], dataclasses.replace(own.attention, **fields)
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills what is allocated with NaN, when told to
    for name, (contexts, bound) in context_sets().items():
        requests, rows = Requests(contexts, 1, bound, torch.device("cuda")), list(range(len(contexts)))
        for queries, skipped in ((4, 0), (1, 0), (3, 1)):
            expected = requests.attended(own.attention, rows, queries, skipped).clone()
            wrong = torch.zeros((), dtype=torch.int64, device="cuda")
            for run in range(RUNS):
                torch.utils.deterministic.fill_uninitialized_memory = run % 2 == 0
                wrong += (requests.attended(config, rows, queries, skipped) != expected).any()
            if wrong.item():
                found.append(f"{wrong.item()} of {RUNS} runs of 40 x {queries}, {name}")
    torch.use_deterministic_algorithms(False)
    return found


def move_contexts(ctx: PagedContext, first_R: torch.Tensor, nodes: int) -> None:
    """Have a context's requests go on from other keys, in place; what the pass writes there is NaN before it."""
    batch = ctx.batch
    index_T = (first_R[:, None] + torch.arange(nodes, device=first_R.device)).flatten()
    rows_T = torch.arange(len(first_R), device=first_R.device).repeat_interleave(nodes)
    pages_T = batch.page_table_RP[rows_T, index_T // batch.page_size].long()
    ctx.slots_T.copy_(pages_T * batch.page_size + index_T % batch.page_size)
    batch.kv_lens_R.copy_(first_R + nodes)
    for place in (ctx.positions_T, batch.kv_index_T):
        place.copy_(index_T)
    for layer in ctx.kv.layers:
        layer.keys_SGd[ctx.slots_T], layer.values_SGd[ctx.slots_T] = float("nan"), float("nan")


def wrong_graphs(tuning: Tuning, fields: Fields) -> list[str]:
    """Return how many graphs of whole layers, with contexts that grow, gave other bits than kernels one by one."""
    device, found = torch.device("cuda"), []
    tunings = (dataclasses.replace(tuning, dependent_launch=False), with_fields(tuning, fields))
    layers = Layers(2, 1408, 40, device, 4096)
    for nodes in (4, 1):
        graphs, outs, contexts = [], [], []
        generator = torch.Generator(device).manual_seed(0)
        hidden = torch.randn(40 * nodes, 4096, device=device, generator=generator).bfloat16()
        for one in tunings:
            ops = TritonOps(device, one)
            contexts.append(layers.laid_out(ops, 40, nodes))
            ops.run_layers(list(layers.target.layers), hidden, contexts[-1], ())
            torch.cuda.synchronize()
            graphs.append(torch.cuda.CUDAGraph())
            with torch.cuda.graph(graphs[-1]):
                outs.append(ops.run_layers(list(layers.target.layers), hidden, contexts[-1], ())[0])
        wrong = torch.zeros((), dtype=torch.int64, device=device)
        for run in range(GROWN):
            spread_over = 40 if run % 2 else 1000  # requests are alike, and are not
            first_R = 1400 - torch.randint(4, spread_over, (40,), device=device, generator=generator)
            for graph, ctx in zip(graphs, contexts, strict=True):
                move_contexts(ctx, first_R, nodes)
                graph.replay()
            wrong += (outs[0] != outs[1]).any()
        if wrong.item() or not outs[0].isfinite().all():
            found.append(f"{wrong.item()} of {GROWN} graphs of layers, 40 x {nodes}")
    return found


def checked_alone(task: tuple[str, Tuning, Fields], answer: Connection) -> None:
    """Check a candidate's bits, wherever attention can have it."""
    name, tuning, fields = task
    torch.set_grad_enabled(False)
    # What is right is what each request's own programs give; candidates must not be asked for where there are few.
    own = with_fields(tuning, {"even_programs": 0, "flow_programs": 0})
    fields = {**fields, "flow_from": 0, "flow_groups": 0}
    found = check((name, own, fields))[1]
    answer.send("; ".join([*([found] if found else []), *wrong_runs(own, fields), *wrong_graphs(own, fields)]))


def layers_alone(task: tuple[str, Tuning, Fields], answer: Connection) -> None:
    """Compile whole layers as a candidate has them, and run each once."""
    _, tuning, fields = task
    torch.set_grad_enabled(False)
    errors = [compile_layers((with_fields(tuning, fields), case)) for case in CASES]
    answer.send("; ".join(error for error in errors if error))


def in_processes(tuning: Tuning, *, timed: bool) -> list[str]:
    """Compile, run and compare in processes; return the candidates whose bits are today's. None outlasts its time."""
    context, started = multiprocessing.get_context("spawn"), time.monotonic()
    waiting = {}
    jobs = [(checked_alone, name, fields) for name, fields in CANDIDATES.items()]
    if timed:
        jobs += [(layers_alone, name, fields) for name, fields in {TODAY: {}, **CANDIDATES}.items()]
    for job, name, fields in jobs:
        mine, theirs = context.Pipe(duplex=False)
        process = context.Process(target=job, args=((name, tuning, fields), theirs), daemon=True)
        process.start()
        theirs.close()
        waiting[mine] = (process, job, name)
    wrong: dict[str, str] = {}
    while waiting:
        left = started + TASK_SECONDS - time.monotonic()
        for pipe in multiprocessing.connection.wait(list(waiting), max(left, 0.0)) or list(waiting):
            process, job, name = waiting.pop(pipe)
            try:
                found = pipe.recv() if pipe.poll() else f"HANGS, ended after {TASK_SECONDS:.0f} s"
            except EOFError:
                found = "its process died"
            process.join(1.0)
            process.kill()
            kind = "bits" if job is checked_alone else "layers"
            print(f"  {kind}, {name}: {found or 'right'}  ({time.monotonic() - started:.0f} s)", flush=True)
            if found:
                wrong[name] = found
    return [name for name in CANDIDATES if name not in wrong]


def time_alone(tuning: Tuning, names: list[str], deadline: float) -> dict[str, Times]:
    """Time attention alone, what ships first and last; return all times, the best first."""
    alone = Alone(ALONE, torch.device("cuda"))
    short = heading("us of attention at 10,240 keys, and", [1216, 1408], CASES[2:])
    print(short, "|", " ".join(f"{r}x{n}".rjust(6) for r, n in CASES), flush=True)
    found: dict[str, Times] = {}
    for name in (TODAY, *names, AGAIN):
        if time.monotonic() > deadline and found:
            print(f"out of time before {name}")
            continue
        print(f"{name} ...", flush=True)
        try:
            found[name] = alone.measured(name, with_fields(tuning, CANDIDATES.get(name, {})).attention)
        except Exception as error:  # noqa: BLE001 - one failing candidate must not end the run
            print(f"{name:36} skipped: {said(error)}", flush=True)
    order = sorted(found, key=lambda name: score(found[name], found[TODAY]))
    for name in dict.fromkeys((TODAY, order[0])):
        print(f"{'TB/s, ' + name:36} {alone.speed(found[name])}", flush=True)
    return {name: found[name] for name in order}


def main() -> None:
    """Check bits, time, and write the files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=65.0, help="try nothing new after so long")
    parser.add_argument("--bits", action="store_true", help="check bits alone")
    parser.add_argument("--start", type=Path, help="the configuration to start from, if not the one that ships")
    arguments = parser.parse_args()
    deadline = time.monotonic() + arguments.seconds
    tuning = with_fields(starting_tuning(arguments.start, torch.device("cuda")), {"flow_programs": 0})
    print(f"{torch.cuda.get_device_name()} reads {read_bandwidth(torch.device('cuda')) / 1e12:.3f} TB/s", flush=True)
    names = in_processes(tuning, timed=not arguments.bits)
    if arguments.bits:
        print(f"right: {', '.join(names) or 'none'}")
        return
    deadline = max(deadline, time.monotonic() + TIMED_SECONDS)
    alone = time_alone(tuning, names, deadline - 15)
    best = next((name for name in alone if name in CANDIDATES and name != SHIPS), SHIPS)
    best_two = [name for name in dict.fromkeys((SHIPS, best)) if name in alone]
    tried = {TODAY: tuning} | {name: with_fields(tuning, CANDIDATES[name]) for name in best_two}
    layers = time_layers({**tried, AGAIN: tuning}, deadline + 10, CASES)
    best = min(layers, key=lambda name: score(layers[name], layers[TODAY])) if TODAY in layers else TODAY
    fields = CANDIDATES.get(best, {})
    arguments.out.mkdir(parents=True, exist_ok=True)
    write_tuning(with_fields(tuning, fields), arguments.out)
    listed = {
        kind: {n: {f"{k}: {r}x{c}": round(us, 2) for (k, (r, c)), us in t.items()} for n, t in found.items()}
        for kind, found in (("alone", alone), ("layers", layers))
    }
    (arguments.out / "flow.json").write_text(json.dumps({**listed, "best": best}, indent=1) + "\n", encoding="utf-8")
    print(f"best: {best}, {fields}")
    for name, times in layers.items():
        print(f"{score(times, layers[TODAY]):.4f} of the time: {name}")


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    torch.manual_seed(0)
    main()
