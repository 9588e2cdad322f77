"""What sampling a step's rows costs on the device, by setting: the kernels of `Ops.sample`, replayed as a CUDA graph.

    python benchmarks/gpu_sampling.py [--rows 4 160] [--vocab 128256] [--repeats 200]

Logits are random bfloat16, flat (as a random model's) and peaked (as a trained one's). Every row has the same settings;
`plain` has none. Times are medians in microseconds. Without a GPU the kernels are those of the CPU, and only shares
mean anything.
"""

import argparse
import statistics
from collections.abc import Callable

import torch

from gpu_measure import time_ms
from slipstream.kernels import SampleRows, SamplingState, TokenMasks, select
from slipstream.speculation.sampling import SamplingParams

SETTINGS: dict[str, dict[str, object]] = {
    "plain": {},
    "temperature": {"temperature": 1.0},
    "top-p 0.95": {"temperature": 1.0, "top_p": 0.95},
    "top-p 0.5": {"temperature": 1.0, "top_p": 0.5},
    "top-k 40": {"temperature": 1.0, "top_k": 40},
    "min-p 0.05": {"temperature": 1.0, "min_p": 0.05},
    "top-k 20, top-p 0.95": {"temperature": 1.0, "top_k": 20, "top_p": 0.95},
    "penalties": {"repetition_penalty": 1.1, "frequency_penalty": 0.1},
    "penalties, top-p": {"repetition_penalty": 1.1, "temperature": 1.0, "top_p": 0.95},
    "bias, minimum": {"logit_bias": {5: 1.0}, "min_tokens": 99},
    "logprobs 5": {"logprobs": 5},
    "grammar": {},
}


def replayed(work: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """Return the work as a graph, where there are graphs."""
    if device.type != "cuda":
        return work
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def main() -> None:
    """Print a line per setting and number of rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[4, 160])
    parser.add_argument("--vocab", type=int, default=128256)
    parser.add_argument("--repeats", type=int, default=200)
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    ops, vocab = select(device), args.vocab
    print(f"{'rows':>5} {'setting':22} {'flat us':>10} {'peaked us':>10}")
    for num_rows in args.rows:
        flat = torch.randn(num_rows, vocab, device=device).bfloat16()
        position_L = torch.arange(num_rows, device=device) + 500

        def line(name: str, works: list[Callable[[], object]], count: int = num_rows) -> None:
            times = [statistics.median(time_ms(replayed(work, device), device, args.repeats)) for work in works]
            print(f"{count:>5} {name:22} " + " ".join(f"{1e3 * time:>10.1f}" for time in times), flush=True)

        both = [flat, (flat * 6).contiguous()]
        path_LD = torch.full((num_rows, 3), 7, device=device)
        for name, given in SETTINGS.items():
            state = SamplingState(num_rows, vocab, device)
            for slot in range(num_rows):
                state.load(slot, SamplingParams(max_tokens=100, **given), slot, range(100, 400), range(50), (2, 3))
            rows = SampleRows(torch.arange(num_rows, device=device), position_L, path_LD)
            masks = None
            if name == "grammar":
                words_MW = torch.randint(-(2**31), 2**31, (num_rows, -(-vocab // 32)), device=device).int()
                masks = TokenMasks(words_MW, torch.arange(num_rows, device=device))
            line(name, [lambda x=x, s=state, m=masks, r=rows: ops.sample(x, r, s, m) for x in both])


if __name__ == "__main__":
    with torch.inference_mode():
        main()
