"""What a setting costs beside greedy decoding, on the embedded model with its draft, interleaved in one run.

    python benchmarks/cpu_sampling.py [--threads 2] [--tokens 96] [--repeats 3] [--batches 1 8] [--only top-p json]
    python benchmarks/cpu_sampling.py --cpu-clock

Every setting decodes the same prompts for as many tokens, greedily unless it says otherwise. A line gives tokens per
second and milliseconds per step, each also as a share of the greedy run's speed. Neither is the cost of sampling alone:
what a draft guesses right changes with the setting, and beyond one request so does how many still run in a step, since
answers that are guessed better end sooner. With one request, whose chains have one length here, the second is fair.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
from llguidance import LLExecutor, LLTokenizer

from slipstream.checkpoint.embedded import embedded_draft
from slipstream.checkpoint.hub import resolve
from slipstream.checkpoint.reader import open_checkpoint
from slipstream.checkpoint.tokenizer import Tokenizer
from slipstream.engine.build import build_engine
from slipstream.engine.config import EngineConfig
from slipstream.engine.engine import Engine
from slipstream.engine.loading import read_draft
from slipstream.kernels.cpu.ops import CpuOps
from slipstream.models.load import load_target
from slipstream.serve.grammar import CompiledGrammar
from slipstream.serve.grammar_trial import GrammarSource, compile_grammar
from slipstream.speculation.grammar import Grammar
from slipstream.speculation.sampling import SamplingParams
from slipstream.speculation.tree import TreeShape

CPU = torch.device("cpu")
CHAIN = TreeShape.chain(3)
SCHEMA = {"type": "array", "items": {"type": "object", "properties": {"name": {"type": "string"}}}, "minItems": 99}
QUESTIONS = (
    "Write a story about a lighthouse.", "Explain how a bicycle stays upright.", "List ten European rivers.",
    "Write a letter to a landlord.", "What is a prime number?", "Describe a walk in a forest.",
    "How is bread made?", "Tell me about the moon.",
)  # fmt: skip
SETTINGS: dict[str, dict[str, object]] = {
    "greedy": {},
    "temperature": {"temperature": 1.0},
    "top-p": {"temperature": 1.0, "top_p": 0.95},
    "top-k": {"temperature": 1.0, "top_k": 40},
    "min-p": {"temperature": 1.0, "min_p": 0.05},
    "top-p and top-k": {"temperature": 1.0, "top_p": 0.95, "top_k": 40},
    "penalties": {"repetition_penalty": 1.1, "frequency_penalty": 0.1, "presence_penalty": 0.1},
    "logprobs": {"logprobs": 5},
    "json": {},
}


def grammar_of(tokenizer: Tokenizer, vocab_size: int) -> Grammar:
    """Return the compiled schema."""
    readable = LLTokenizer(tokenizer.to_json(), n_vocab=vocab_size, eos_token=list(tokenizer.eos_token_ids) or None)
    matcher = compile_grammar(readable, GrammarSource("json_schema", json.dumps(SCHEMA)))
    return CompiledGrammar(matcher, vocab_size, "schema", LLExecutor())


def decode(
    engine: Engine, prompts: list[list[int]], params: SamplingParams, clock: Callable[[], float]
) -> tuple[float, int, int]:
    """Return seconds, tokens and steps from the first token of every request on."""
    for seed, prompt in enumerate(prompts):
        engine.add(prompt, params, seed)
    engine.step()
    started, steps, tokens = clock(), engine.stats.steps, 0
    while engine.has_work:
        tokens += sum(len(emission.tokens) for emission in engine.step(0.02))
    return clock() - started, tokens, engine.stats.steps - steps


def main() -> None:
    """Print a line per batch and setting."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--only", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--cpu-clock", action="store_true", help="time of the process, for a busy machine; one thread")
    args = parser.parse_args()
    clock = time.process_time if args.cpu_clock else time.perf_counter
    args.threads = 1 if args.cpu_clock else args.threads
    torch.set_num_threads(1)
    ops, source = CpuOps(args.threads), open_checkpoint(resolve("embedded"))
    target = load_target(source, torch.float32, CPU, ops=ops)
    path = embedded_draft()
    assert path is not None, "the embedded draft ships with the package"
    draft = read_draft(path, target, None, ops)
    tokenizer = Tokenizer.load(resolve("embedded"))
    prompts = [tokenizer.encode(question) for question in QUESTIONS]
    names = ["greedy", *(name for name in args.only if name != "greedy")]
    vocab_size = target.spec.vocab_size
    print(f"{ops.isa}, {args.threads} threads, medians of {args.repeats}, chains of {CHAIN.depth}")
    for batch in args.batches:
        engine = build_engine(target, draft, CHAIN, EngineConfig(max_context=512, max_requests=batch), ops)
        runs: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
        for _ in range(args.repeats):
            for name in names:
                grammar = grammar_of(tokenizer, vocab_size) if name == "json" else None
                params = SamplingParams(max_tokens=args.tokens, ignore_eos=True, grammar=grammar, **SETTINGS[name])
                seconds, tokens, steps = decode(engine, prompts[:batch], params, clock)
                runs[name].append((tokens / seconds, 1e3 * seconds / steps))
        greedy = [statistics.median(column) for column in zip(*runs["greedy"], strict=True)]
        for name in names:
            speed, step_ms = (statistics.median(column) for column in zip(*runs[name], strict=True))
            print(
                f"batch {batch}  {name:16} {speed:8.1f} tokens/s {speed / greedy[0]:5.2f}x"
                f" {step_ms:8.3f} ms a step {greedy[1] / step_ms:5.2f}x"
            )


if __name__ == "__main__":
    main()
