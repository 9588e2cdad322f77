"""Find out why an answer parts from the same answer without a draft: chance (a race) or arithmetic, and where first.

    PYTHONPATH=src python benchmarks/gpu_parting.py --bundle bundle.pt --seconds 60 [--variants shipped,no-pdl]

Each variant answers the last questions twice without and twice with the draft. Beside the tokens, the keys and values
every answer left in the cache are compared: where two runs agree on the tokens, theirs must be the same bits, so a
difference is seen though no token parted. For the first parting of tokens the text is computed again in three ways, one
row at a time, as chains, and in one pass, and the first kernel whose rows differ is named.
"""

import argparse
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gpu_models import engine_of, filled_cache
from gpu_smollm import EmbeddedPair, embedded_pair
from slipstream.engine.config import EngineConfig
from slipstream.engine.engine import Engine
from slipstream.kernels import Ops, select
from slipstream.kernels.reference.noise import gumbel
from slipstream.models.context import KvCache, QueryTokens, page_table, paged_context
from slipstream.speculation.sampling import SamplingParams

PAGE = 16
BATCH = 32


@dataclass(frozen=True)
class Variant:
    """A way to run: captured steps, and kernels that overlap the one before, on or off."""

    overlap: bool = True
    graphs: bool = True
    captured: bool = True


VARIANTS = {
    "shipped": Variant(),
    "no-pdl": Variant(overlap=False),
    "no-graphs": Variant(graphs=False),
    "no-pdl-no-graphs": Variant(overlap=False, graphs=False),
    "eager": Variant(captured=False),
}


@dataclass
class Answer:
    """One question's answer: its tokens, how many requests ran when each came, and its keys and values at its end.

    Args:
        kv_LSC: keys and values of the committed tokens, by layer and place; None until the answer has ended.
    """

    tokens: list[int]
    running: list[int]
    kv_LSC: Tensor | None = None


@dataclass(frozen=True)
class Parting:
    """Where two runs' answers to a question stop being the same."""

    question: int
    at: int
    one: int
    two: int


class Questions:
    """The questions asked, with their seeds, and the models that answer."""

    def __init__(self, pair: EmbeddedPair, args: argparse.Namespace, device: torch.device) -> None:
        self.pair, self.device = pair, device
        self.numbers = list(range(len(pair.prompts)))[-args.count :]
        self.params = SamplingParams(max_tokens=args.tokens, temperature=args.temperature)
        self.num_drafted = args.num_drafted

    def answer(self, ops: Ops, variant: Variant, drafted: bool) -> dict[int, Answer]:
        """Answer every question."""
        engine, kv = self._engine(ops, variant, drafted)
        prompts = self.pair.prompts
        ids = {engine.add(prompts[q], self.params, q, self.pair.end_tokens): q for q in self.numbers}
        answers = {q: Answer([], []) for q in self.numbers}
        while engine.has_work:
            before = {r.request_id: (list(r.pages), len(r.tokens) - 1) for r in engine._scheduler.running}
            for emission in engine.step():
                answer = answers[ids[emission.request_id]]
                answer.tokens += [token.token_id for token in emission.tokens]
                answer.running += [len(before)] * len(emission.tokens)
                if emission.finish_reason is not None and emission.request_id in before:
                    answer.kv_LSC = _copied(kv, *before[emission.request_id])
        return answers

    def _engine(self, ops: Ops, variant: Variant, drafted: bool) -> tuple[Engine, KvCache]:
        num_drafted = self.num_drafted if drafted else 0
        longest = max(map(len, self.pair.prompts)) + self.params.max_tokens + 4 * (num_drafted + 1)
        config = EngineConfig(
            max_context=longest,
            num_pages=BATCH * -(-(longest + num_drafted) // PAGE),
            page_size=PAGE,
            max_requests=BATCH,
            max_batch_tokens=2048,
            prefix_cache=False,
            cuda_graphs="on" if variant.captured else "off",
        )
        engine = engine_of(self.pair.target, self.pair.draft if drafted else None, ops, config, num_drafted)
        return engine, engine.executor.runner.kv


def _copied(kv: KvCache, pages: Sequence[int], num_tokens: int) -> Tensor:
    """Return a copy of a request's keys and values: [layers, tokens, numbers of a key and a value]."""
    device = kv.layers[0].keys_SGd.device
    start_P = torch.tensor(pages, device=device) * PAGE
    slots_S = (start_P[:, None] + torch.arange(PAGE, device=device)).flatten()[:num_tokens]
    layers = [torch.cat([part[slots_S].flatten(1) for part in (x.keys_SGd, x.values_SGd)], 1) for x in kv.layers]
    return torch.stack(layers)


def compare(name: str, one: dict[int, Answer], two: dict[int, Answer], questions: Questions) -> list[Parting]:
    """Print how two runs differ, in tokens and in keys; return the partings of tokens."""
    partings, wrong = [], []
    for question in questions.numbers:
        a, b = one[question], two[question]
        common = next((i for i, (x, y) in enumerate(zip(a.tokens, b.tokens, strict=False)) if x != y), None)
        if common is not None:
            partings.append(Parting(question, common, a.tokens[common], b.tokens[common]))
        same = len(questions.pair.prompts[question])
        same += min(len(a.tokens), len(b.tokens)) if common is None else common
        found = _first_difference(a.kv_LSC, b.kv_LSC, same)
        if found:
            wrong.append((question, found))
    total = len(questions.numbers)
    print(f"  {name:22} {total - len(partings)} of {total} the same tokens, {total - len(wrong)} the same keys")
    for question, found in wrong[:3]:
        print(f"    question {question} (prompt {len(questions.pair.prompts[question])}): {found}")
    for parting in partings[:3]:
        rows = tuple(run[parting.question].running[parting.at] for run in (one, two))
        print(f"    {parting}; requests running then: {rows}")
    return partings


def _first_difference(one_LSC: Tensor | None, two_LSC: Tensor | None, same: int) -> str:
    """Say at which token, then at which layer, keys and values of the same text first differ."""
    if one_LSC is None or two_LSC is None:
        return ""
    length = min(one_LSC.shape[1], two_LSC.shape[1], same)
    differs_LSC = one_LSC[:, :length] != two_LSC[:, :length]
    differs_S = differs_LSC.any(0).any(1)
    if not bool(differs_S.any()):
        return ""
    place = int(differs_S.nonzero()[0])
    layers = differs_LSC[:, place].any(1).nonzero().flatten().tolist()
    gap = (one_LSC[:, place].float() - two_LSC[:, place].float()).abs().max()
    return (
        f"place {place} ({place % PAGE} of its page), layers {layers[0]} to {layers[-1]} ({len(layers)} of them), "
        f"by up to {float(gap):.3g}; {int(differs_S.sum())} of {length} places differ in all"
    )


def kernels_of(variant: Variant, device: torch.device, kernels: str) -> Ops:
    """Return the kernels a variant asks for; only the Triton ones overlap and can be captured."""
    if kernels != "triton":
        return select(device, kernels)
    from slipstream.kernels.triton.ops import TritonOps
    from slipstream.kernels.triton.tuning import architecture_of, read_tuning

    tuning = read_tuning(architecture_of(device))
    ops = TritonOps(device, tuning if variant.overlap else replace(tuning, dependent_launch=False))
    ops.capturable = variant.graphs
    return ops


def trigger_late() -> None:
    """Let kernels start the next one after their own wait instead of before it; to be called before any compiles."""
    import triton
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

    from slipstream.kernels.triton import attention, linear, norm_rope, sample

    @triton.jit
    def wait_for_inputs(PDL):  # noqa: ANN001, ANN202  # Triton gives it its type
        if PDL:
            gdc_wait()
            gdc_launch_dependents()

    for module in (attention, linear, norm_rope, sample):
        module.wait_for_inputs = wait_for_inputs


class Trace:
    """What every kernel of some passes returned, a row for each place of a text."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self._rows: dict[int, list[Tensor]] = {}
        self._places: list[range] = []
        self._step = 0

    @contextmanager
    def over(self, places: range) -> Iterator[None]:
        """Record the kernels of one pass over these places."""
        self._places.append(places)
        self._step = 0
        yield

    def record(self, name: str, rows: Tensor) -> None:
        """Take in a kernel's output."""
        if self._step == len(self.names):
            self.names.append(f"{self._step}: {name}")
        self._rows.setdefault(self._step, []).append(rows.flatten(1).clone())
        self._step += 1

    def table(self, step: int, first: int) -> Tensor:
        """Return a kernel's rows from a place on."""
        order = torch.tensor([place for places in self._places for place in places])
        rows = torch.cat(self._rows[step])
        return rows[order.argsort().to(rows.device)][first - int(order.min()) :]


@contextmanager
def traced(trace: Trace) -> Iterator[None]:
    """Show a trace every kernel of the Triton blocks."""
    from slipstream.kernels.triton import blocks, norm_rope, products

    def shown(name: str, owner: Any, attribute: str) -> Any:
        original = getattr(owner, attribute)

        def call(*args: Any, **kwargs: Any) -> Any:
            out = original(*args, **kwargs)
            trace.record(name, out)
            return out

        setattr(owner, attribute, call)
        return lambda: setattr(owner, attribute, original)

    undo = [
        shown("norm", norm_rope, "rms_norm"),
        shown("rope", norm_rope, "rope_and_write"),
        shown("attention", blocks, "attention"),
        shown("product", products.Products, "multiply"),
    ]
    try:
        yield
    finally:
        for restore in undo:
            restore()


def explain(parting: Parting, answer: Answer, questions: Questions, ops: Ops) -> None:
    """Compute the text up to a parting in three ways, and print what each chooses and where they first differ."""
    pair, device = questions.pair, questions.device
    prompt = pair.prompts[parting.question]
    tokens = [*prompt, *answer.tokens[: parting.at]]
    end, first = len(tokens), len(prompt)
    count = questions.num_drafted + 1
    cuts = {
        "rows": [0, *range(first, end + 1)],
        "chains": [0, *range(first, end, count), end],
        "one pass": [0, end],
    }
    traces, logits = {}, {}
    for name, places in cuts.items():
        traces[name] = Trace()
        spans = [range(a, b) for a, b in pairwise(places)]
        logits[name] = _logits(pair, ops, torch.tensor(tokens, device=device), spans, traces[name])
    print(f"  question {parting.question}, token {parting.at}, place {end}: {parting.one} or {parting.two}?")
    for name, logits_V in logits.items():
        scores_V = _scores(logits_V, questions.params.temperature, parting.question, end)
        gap = float(scores_V[parting.one] - scores_V[parting.two])
        print(f"    {name:9} chooses {int(scores_V.argmax())}; the first is ahead of the second by {gap:+.4f}")
    for name in ("chains", "one pass"):
        print(f"    rows and {name}: {_first_kernel(traces['rows'], traces[name], first)}")


def _logits(pair: EmbeddedPair, ops: Ops, tokens_S: Tensor, spans: Sequence[range], trace: Trace) -> Tensor:
    """Run the target over a text span by span; return the logits at its end."""
    device, pages = tokens_S.device, -(-len(tokens_S) // PAGE) + 1
    kv = filled_cache(pair.target.kv_shape, pages, PAGE, pair.target.embed_tokens.dtype, device)
    table = page_table([range(pages)], device)
    for span in spans:
        own = torch.arange(span.start, span.stop, device=device)
        queries = QueryTokens([len(span)], own, own, torch.full_like(own, -1))
        with traced(trace), trace.over(span):
            last_TD = pair.target(tokens_S[span.start : span.stop], paged_context(ops, kv, table, queries), ()).last_TD
    return pair.target.logits(last_TD[-1:], ops)[0].float()


def _scores(logits_V: Tensor, temperature: float, seed: int, position: int) -> Tensor:
    if temperature == 0:
        return logits_V
    ids_V = torch.arange(len(logits_V))
    noise_V = gumbel(torch.tensor(seed).expand_as(ids_V), torch.tensor(position).expand_as(ids_V), ids_V)
    return logits_V / temperature + noise_V.to(logits_V.device)


def _first_kernel(one: Trace, two: Trace, first: int) -> str:
    """Name the earliest place of the answer where a kernel's rows differ, and the first such kernel there."""
    earliest: tuple[int, int, float] | None = None
    for step in range(len(one.names)):
        a, b = one.table(step, first), two.table(step, first)
        differs = (a != b).any(1).nonzero().flatten()
        if len(differs) and (earliest is None or int(differs[0]) < earliest[0]):
            row = int(differs[0])
            earliest = row, step, float((a[row].float() - b[row].float()).abs().max())
    if earliest is None:
        return f"all {len(one.names)} kernels give the same bits at every place"
    row, step, gap = earliest
    return f"place {first + row}, kernel {one.names[step]} of {len(one.names)}, by up to {gap:.3g}"


def try_variant(name: str, questions: Questions, kernels: str, deadline: float) -> int:
    """Run one variant and print what was found; return how many answers parted."""
    variant, started = VARIANTS[name], time.monotonic()
    ops = kernels_of(variant, questions.device, kernels)
    print(f"{name}: {variant}", flush=True)
    runs = {}
    for run in ("plain", "drafted", "plain again", "drafted again"):
        if time.monotonic() > deadline:
            print("  out of time")
            break
        runs[run] = questions.answer(ops, variant, run.startswith("drafted"))
    partings = []
    pairs = [("plain", "drafted"), ("plain", "plain again"), ("drafted", "drafted again"),
             ("plain again", "drafted again")]  # fmt: skip
    for one, two in pairs:
        if one in runs and two in runs:
            found = compare(f"{one}, {two}", runs[one], runs[two], questions)
            partings += [(parting, runs[one][parting.question]) for parting in found]
    if kernels == "triton" and time.monotonic() < deadline and (partings or name == "shipped"):
        explain(*(partings[0] if partings else _ending(runs["plain"], questions)), questions, ops)
    print(f"  [{time.monotonic() - started:.1f} s]", flush=True)
    return len(partings)


def _ending(answers: dict[int, Answer], questions: Questions) -> tuple[Parting, Answer]:
    """Return the end of the longest answer as if it had parted there: three ways must agree on it as well."""
    question = max(questions.numbers, key=lambda q: len(answers[q].tokens))
    answer = answers[question]
    return Parting(question, len(answer.tokens) - 1, answer.tokens[-1], answer.tokens[-2]), answer


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bundle", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--kernels", default="triton")
    parser.add_argument("--variants", type=lambda text: text.split(","), default=list(VARIANTS))
    parser.add_argument("--count", type=int, default=60, help="the last so many questions")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--num-drafted", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=60.0, help="nothing new is begun after these")
    parser.add_argument("--late", action="store_true", help="kernels start the next one after their own wait")
    parser.add_argument("--tiny", action="store_true", help="tiny models, to try the script itself")
    args = parser.parse_args()
    unknown = set(args.variants) - set(VARIANTS)
    if unknown:
        parser.error(f"--variants knows {', '.join(VARIANTS)}; not {', '.join(sorted(unknown))}")
    return args


def main() -> int:
    """Try each variant; the exit status is 1 if answers parted or a variant failed."""
    args = arguments()
    deadline = time.monotonic() + args.seconds
    device = torch.device(args.device)
    if args.late:
        trigger_late()
    questions = Questions(embedded_pair(args.bundle, device, args.tiny), args, device)
    bad = 0
    with torch.inference_mode():
        for name in args.variants:
            if time.monotonic() > deadline:
                print(f"{name}: left out, out of time")
                continue
            try:
                bad += try_variant(name, questions, args.kernels, deadline)
            except Exception:  # noqa: BLE001  # the other variants' findings are worth having
                traceback.print_exc()
                bad += 1
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
