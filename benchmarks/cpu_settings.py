"""What sampling settings cost on a CPU: the embedded model with its draft, each setting beside greedy, in turns.

    python -m benchmarks.cpu_settings

Chains have one length, so every pass computes as many rows whatever is kept of them: "passes" is the rate of passes
beside that of greedy decoding just before, which is what simulated acceptance would give, in the executor that serves.
"tokens" is the rate of tokens, where settings change the text and with it what is kept. Prompts are not timed, nor what
follows the first end. "others" are seven greedy requests beside one that follows a JSON schema.
"""

import argparse
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from slipstream import LLM, SamplingParams, TreeShape
from slipstream.engine.config import PATIENCE_S
from slipstream.serve.grammar import CompiledGrammar, LLExecutor, LLTokenizer
from slipstream.serve.grammar_trial import GrammarSource, compile_grammar
from slipstream.train.data.prompts import read_prompts

_SETTLE_S = 0.1  # threads spin for a while after their work
_TEXT = {"type": "string", "maxLength": 80}
SCHEMA = {
    "type": "array",
    "minItems": 40,
    "items": {"type": "object", "properties": {"name": _TEXT, "reason": _TEXT}, "required": ["name", "reason"]},
}
SETTINGS = {
    "greedy": {},
    "T = 1": {"temperature": 1.0},
    "T = 1, top-p 0.95": {"temperature": 1.0, "top_p": 0.95},
    "T = 1, top-k 40": {"temperature": 1.0, "top_k": 40},
    "T = 1, min-p 0.05": {"temperature": 1.0, "min_p": 0.05},
    "T = 1, top-p 0.95, top-k 40": {"temperature": 1.0, "top_p": 0.95, "top_k": 40},
    "T = 1, top-p 0.95, min-p 0.05": {"temperature": 1.0, "top_p": 0.95, "min_p": 0.05},
    "penalties": {"repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.2},
    "5 log probabilities": {"logprobs": 5},
}
CASES = {1: [*SETTINGS, "JSON schema"], 8: [*SETTINGS, "JSON schema", "others"]}
PROMPTS = Path(__file__).parents[1] / "recipes/bench/prompts/mixed.jsonl"


def turn(llm: LLM, params: Sequence[SamplingParams], first: int) -> tuple[float, float]:
    """Answer prompts from the first-th on; return passes a second, and tokens of the last request."""
    time.sleep(_SETTLE_S)
    engine, reader = llm.engine, llm.tokenizer
    chats = read_prompts(PROMPTS)[first : first + len(params)]
    ids = [
        engine.add(reader.encode_chat(chat), one, 0, reader.eos_token_ids, reader.detokenizer())
        for chat, one in zip(chats, params, strict=True)
    ]
    silent = set(ids)
    while silent:
        silent -= {emission.request_id for emission in engine.step()}
    started, passes, tokens, ended = time.perf_counter(), engine.stats.steps, 0, False
    while not ended:
        emissions = engine.step(PATIENCE_S)
        tokens += sum(len(emission.tokens) for emission in emissions if emission.request_id == ids[-1])
        ended = any(emission.finish_reason is not None for emission in emissions)
    seconds = time.perf_counter() - started
    passes = engine.stats.steps - passes
    for request_id in ids:
        engine.abort(request_id)
    engine.step()
    return passes / seconds, tokens / seconds


def main() -> None:
    """Let the settings take turns and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--tokens", type=int, default=96)
    args = parser.parse_args()
    llm = LLM(tree=TreeShape.chain(3))
    reading = LLTokenizer(llm.tokenizer.to_json(), n_vocab=llm.engine.vocab_size)
    source = GrammarSource("json_schema", json.dumps(SCHEMA))
    executor = LLExecutor()

    def asked(name: str, tokens: int) -> SamplingParams:
        if name != "JSON schema":
            return SamplingParams(max_tokens=tokens, ignore_eos=True, **SETTINGS.get(name, {}))
        grammar = CompiledGrammar(compile_grammar(reading, source), llm.engine.vocab_size, "schema", executor)
        return SamplingParams(max_tokens=tokens, grammar=grammar)

    found = defaultdict(list)
    for number in range(args.rounds + 1):
        tokens = args.tokens if number else 8  # the first round only warms up
        for batch, names in CASES.items():
            for name in names:
                params = [asked(name, tokens) for _ in range(batch)]
                if name == "others":
                    params[0] = asked("JSON schema", tokens)
                greedy = turn(llm, [asked("greedy", tokens)] * batch, number)
                found[batch, name].append((greedy, turn(llm, params, number)))
    print("requests, setting                     passes/s  tokens/s   passes  tokens  (ratios: medians over rounds)")
    for (batch, name), pairs in found.items():
        passes, tokens = (statistics.median(own[i] / greedy[i] for greedy, own in pairs[1:]) for i in (0, 1))
        rates = [statistics.median(own[i] for _, own in pairs[1:]) for i in (0, 1)]
        print(f"{batch}  {name:34} {rates[0]:8.1f} {rates[1]:9.1f}   {passes:5.3f}x  {tokens:5.3f}x")


if __name__ == "__main__":
    main()
