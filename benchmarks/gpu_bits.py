"""Check on this GPU that a row's bits do not depend on the rows beside it, and say where they do.

    PYTHONPATH=src python benchmarks/gpu_bits.py [--fix --out FOLDER]

Three checks: products of the shapes of SmolLM2-135M and Llama-8B over passes of 1 to 2048 rows; attention of a decoding
row alone, in a chain of drafted tokens, and beside prompts; and the logits of a whole model of SmolLM2's shape. With
--fix whatever differs is switched off, checked again, and written as a configuration. The exit status is 1 if a
difference remains.
"""

import argparse
import dataclasses
import json
import multiprocessing
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from gpu_models import SMOLLM_135M, filled_cache, random_target
from gpu_tune import LLAMA, SMOLLM, Shape, epilogue, random_weight
from slipstream.kernels.ops import AttentionBatch, KvLayer
from slipstream.kernels.triton.attention.dispatch import AttentionLaunch, attention
from slipstream.kernels.triton.gemm.dispatch import Products
from slipstream.kernels.triton.ops import TritonOps
from slipstream.kernels.triton.tuning import Tuning, architecture_of, read_tuning
from slipstream.models.context import KvCache, QueryTokens, page_table, paged_context
from slipstream.models.target import Target
from slipstream.quant.packed import PackedWeight

ROWS = (1, 4, 16, 32, 40, 64, 128, 160, 192, 200, 256, 512, 1024, 2048)
PRODUCTS = [
    *(("dense", shape) for shape in LLAMA + SMOLLM),
    *(("fp8", shape) for shape in LLAMA),
    ("fp8", Shape("untuned", 4096, 8192)),  # by the rule, with steps longer than wide tiles have
]
HEADS = ((9, 3, 64), (32, 8, 128))
SEAMS = (50, 100, 190, 191, 192, 193, 254, 255, 256, 257, 318, 319, 320, 321, 384, 446, 447, 448, 512, 600, 700)
CONTEXTS = (60, 188, 189, 190, 254, 316, 317, 318, 445, 600)
PAGE = 16
MOST_KEYS = 768

Span = tuple[int, int, int]
"""A request's queries in a pass: the request, the first place and the one past the last."""


@dataclasses.dataclass(frozen=True)
class Finding:
    """One check's result: which kernels it is about, and where bits differ (nothing if they do not)."""

    kernels: str
    what: str
    differs: str

    def __str__(self) -> str:
        return f"{self.kernels:9} {self.what:34} {'BITS DIFFER: ' + self.differs if self.differs else 'equal'}"


def check_product(task: tuple[Tuning, str, Shape]) -> Finding:
    """Compare the rows that passes of other sizes share with the largest."""
    tuning, format, shape = task
    torch.set_grad_enabled(False)
    torch.manual_seed(0)
    device = torch.device("cuda")
    products = Products(tuning, device)
    weight = random_weight(format, shape, device)
    weight = products.prepare(weight) if isinstance(weight, PackedWeight) else weight
    x = torch.randn(max(ROWS), shape.inputs, device=device).bfloat16()

    def product(num_rows: int) -> Tensor:
        return products.multiply(products.rows_for(weight, x[:num_rows]), weight, epilogue(shape, num_rows, device))

    whole = product(max(ROWS))
    different = [m for m in ROWS if not torch.equal(product(m), whole[:m])]
    return Finding(format, shape.name, f"rows {different}" if different else "")


def check_attention(tuning: Tuning, heads: tuple[int, int, int], device: torch.device) -> list[Finding]:
    """Compare decoding rows alone with the same rows in chains, and beside prompts of other requests."""
    num_heads, num_groups, width = heads
    count = len(SEAMS) + 1  # the last request brings prompts
    pages = MOST_KEYS // PAGE
    layer = KvLayer(
        *(torch.randn(count * MOST_KEYS, num_groups, width, device=device, dtype=torch.bfloat16) for _ in "kv")
    )
    q = torch.randn(count, MOST_KEYS, num_heads, width, device=device, dtype=torch.bfloat16)
    table = torch.randperm(count * pages, device=device).int().view(count, pages)
    counters = torch.zeros(1 << 16, dtype=torch.int32, device=device)
    launch = AttentionLaunch(tuning.attention, counters, tuning.dependent_launch, tuning.instruction)

    def run(spans: Sequence[Span]) -> dict[tuple[int, int], Tensor]:
        lengths = [end - start for _, start, end in spans]
        own = torch.cat([torch.arange(start, end, device=device) for _, start, end in spans])
        described = AttentionBatch(
            query_starts_R1=torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32).to(device),
            kv_lens_R=torch.tensor([end for _, _, end in spans], dtype=torch.int32, device=device),
            page_table_RP=table[[request for request, _, _ in spans]].contiguous(),
            kv_index_T=own,
            ancestors_T=torch.full_like(own, -1),
            page_size=PAGE,
            max_queries=max(lengths),
            max_keys=MOST_KEYS,
        )
        rows = torch.cat([q[request, start:end] for request, start, end in spans]).contiguous()
        out = attention(rows, layer, described, width**-0.5, None, launch)
        places = [(request, at) for request, start, end in spans for at in range(start, end)]
        return dict(zip(places, out, strict=True))

    own = list(enumerate(SEAMS))
    alone = run([(request, at, at + 1) for request, at in own])
    prompt = len(SEAMS)
    passes = {
        **{f"chain of 4, place {p}": [(r, at - p, at - p + 4) for r, at in own] for p in range(4)},
        **{f"beside a prompt of {n}": [*((r, at, at + 1) for r, at in own), (prompt, 0, n)] for n in (2, 12, 100, 500)},
        "chains beside a prompt of 500": [*((r, at - 1, at + 3) for r, at in own), (prompt, 30, 530)],
        "inside a prompt of 60": [(r, at - 41, at + 19) for r, at in own],
        "inside a whole prompt": [(r, 0, at + 7) for r, at in own],
    }
    findings = []
    for name, spans in passes.items():
        found = run(spans)
        wrong = [at for request, at in own if not torch.equal(found[request, at], alone[request, at])]
        findings.append(Finding("attention", f"heads of {width}, {name}", f"keys {wrong}" if wrong else ""))
    return findings


def check_model(tuning: Tuning, device: torch.device) -> list[Finding]:
    """Compare the logits of four tokens decoded one by one, as a chain, and beside 300 rows of a prompt."""
    model = random_target(SMOLLM_135M, torch.bfloat16, device)
    ops = TritonOps(device, tuning)
    tokens = torch.randint(0, SMOLLM_135M.vocab_size, (2, MOST_KEYS), device=device)
    wrong: dict[str, list[int]] = {"a chain of 4": [], "one by one beside a prompt of 300": []}
    for context in CONTEXTS:
        ones = [[(0, context + node, context + node + 1)] for node in range(4)]
        expected = _decoded(model, ops, tokens, context, ones)
        passes = {
            "a chain of 4": [[(0, context, context + 4)]],
            "one by one beside a prompt of 300": [[*span, (1, 0, 300)] for span in ones],
        }
        for name, spans in passes.items():
            if not torch.equal(_decoded(model, ops, tokens, context, spans), expected):
                wrong[name].append(context)
    return [Finding("model", name, f"contexts {at}" if at else "") for name, at in wrong.items()]


def _decoded(model: Target, ops: TritonOps, tokens_RP: Tensor, context: int, passes: list[list[Span]]) -> Tensor:
    """Return the logits of the first request's rows, after its context was computed in one pass."""
    device, pages = tokens_RP.device, MOST_KEYS // PAGE
    kv = filled_cache(model.kv_shape, 2 * pages, PAGE, torch.bfloat16, device)
    _forward(model, ops, kv, tokens_RP, [(0, 0, context)])
    found = []
    for spans in passes:
        last_TD = _forward(model, ops, kv, tokens_RP, spans)
        found.append(model.logits(last_TD[: spans[0][2] - spans[0][1]], ops))
    return torch.cat(found)


def _forward(model: Target, ops: TritonOps, kv: KvCache, tokens_RP: Tensor, spans: list[Span]) -> Tensor:
    device, pages = tokens_RP.device, MOST_KEYS // PAGE
    own = torch.cat([torch.arange(start, end, device=device) for _, start, end in spans])
    queries = QueryTokens([end - start for _, start, end in spans], own, own, torch.full_like(own, -1))
    table = page_table([range(r * pages, (r + 1) * pages) for r, _, _ in spans], device)
    ids = torch.cat([tokens_RP[r, start:end] for r, start, end in spans])
    last_TD: Tensor = model(ids, paged_context(ops, kv, table, queries), ()).last_TD
    return last_TD


def check_all(tuning: Tuning, device: torch.device) -> list[Finding]:
    """Run every check and print its line; products are shared out, since compiling them takes most of the time."""
    findings = []
    with multiprocessing.get_context("spawn").Pool(8) as pool:
        pending = pool.imap(check_product, [(tuning, format, shape) for format, shape in PRODUCTS])
        for heads in HEADS:
            findings += check_attention(tuning, heads, device)
        findings += check_model(tuning, device)
        findings += list(pending)
    for finding in findings:
        print(finding, flush=True)
    return findings


def switched_off(tuning: Tuning, findings: list[Finding]) -> Tuning:
    """Return a tuning without the tiles of the kernels whose bits differ."""
    wrong = {finding.kernels for finding in findings if finding.differs}
    wrong |= {"dense", "attention"} if wrong == {"model"} else set()
    kept = {shape: tiles for shape, tiles in tuning.linear_many.items() if shape.split(":")[0] not in wrong}
    wide = {format: tiles for format, tiles in tuning.wide.items() if format not in wrong}
    attention_config = tuning.attention
    if "attention" in wrong:
        attention_config = dataclasses.replace(attention_config, serial_from=1 << 30, rows_wide=16)
    return dataclasses.replace(tuning, linear_many=kept, wide=wide, attention=attention_config)


def main() -> None:
    """Check, and with --fix switch off what differs and check again."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fix", action="store_true")
    parser.add_argument("--out", type=Path, help="folder for the configuration that --fix writes")
    arguments = parser.parse_args()
    if arguments.fix and arguments.out is None:
        parser.error("--fix writes a configuration: name its folder with --out")
    torch.set_grad_enabled(False)
    device, started = torch.device("cuda"), time.monotonic()
    tuning = read_tuning(architecture_of(device))
    findings = check_all(tuning, device)
    if arguments.fix and any(finding.differs for finding in findings):
        print("again, with those tiles switched off", flush=True)
        tuning = switched_off(tuning, findings)
        findings = check_all(tuning, device)
        arguments.out.mkdir(parents=True, exist_ok=True)
        data = {name: value for name, value in dataclasses.asdict(tuning).items() if name != "architecture"}
        path = arguments.out / f"{tuning.architecture}.json"
        path.write_text(json.dumps(data, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        print(f"wrote {path}")
    num_wrong = sum(bool(finding.differs) for finding in findings)
    print(f"{len(findings)} checks, {num_wrong} with differences, {time.monotonic() - started:.0f} s", flush=True)
    sys.exit(1 if num_wrong else 0)


if __name__ == "__main__":
    main()
