"""Our engine as a peer among peers: a GGUF as stored, plain or with an EAGLE-3 draft; it also times memory."""

import time
from collections.abc import Iterator

import gguf
import torch

import slipstream
from slipstream.engine.config import PATIENCE_S
from slipstream.engine.llm import LLM
from slipstream.engine.output import Emission
from slipstream.speculation.sampling import SamplingParams
from slipstream.speculation.tree import TreeShape

_READ_FLOATS = 100_000_000
_READ_PASSES = 10


class Worker:
    """An engine without a prefix cache, so that every run computes its prompts.

    Args:
        model: a GGUF file.
        draft: a draft's folder, or "none".
        depth: drafted tokens, a chain; 0 drafts as far as it pays, which is what the engine does by itself.
    """

    def __init__(self, model: str, draft: str, depth: int, threads: int, context: int, max_requests: int) -> None:
        torch.set_num_threads(threads)
        tree = TreeShape.chain(depth) if depth else None
        self._llm = LLM(
            model, draft, tree=tree, device="cpu", max_context=context, max_requests=max_requests, prefix_cache=False
        )
        self.about = {
            "version": f"slipstream {slipstream.__version__}",
            "weight_bytes": sum(int(tensor.n_bytes) for tensor in gguf.GGUFReader(model).tensors),
            "details": "; ".join(self._llm.summary),
        }

    def run(self, prompts: list[list[int]], tokens: int) -> list[tuple[float, int, list[int]]]:
        """Answer prompts together, as patiently as a server; return (seconds since the start, prompt, tokens) of
        everything emitted, pass by pass.
        """
        engine = self._llm.engine
        params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
        events = []
        began = time.perf_counter()
        rows = {engine.add(prompt, params, 0): row for row, prompt in enumerate(prompts)}
        while engine.has_work:
            emissions = engine.step(PATIENCE_S)
            now = time.perf_counter() - began
            events += [(now, rows[e.request_id], tokens) for e in emissions for tokens in _passes(e)]
        return events

    def encode(self, messages: list[list[dict[str, str]]]) -> list[list[int]]:
        """Return the token ids of chats, which every peer is then given."""
        return [self._llm.encode(chat) for chat in messages]

    def lengths(self, prompts: list[list[int]], tokens: int) -> list[int]:
        """Return how long each prompt's answer is when it may end by itself."""
        done = self._llm.generate(prompts, SamplingParams(max_tokens=tokens, temperature=0.0))
        return [len(completion.tokens) for completion in done]

    def read_memory(self) -> float:
        """Return bytes a second that all threads together read from memory: the best of passes over 400 MB."""
        data = torch.ones(_READ_FLOATS)
        seconds = []
        for _ in range(_READ_PASSES):
            began = time.perf_counter()
            data.sum()
            seconds.append(time.perf_counter() - began)
        return data.nbytes / min(seconds)


def _passes(emission: Emission) -> Iterator[list[int]]:
    """Give what each pass of a step emitted: drafted tokens, if any, and the target's own."""
    tokens: list[int] = []
    for token in emission.tokens:
        tokens.append(token.token_id)
        if token.draft_position == 0:
            yield tokens
            tokens = []
    if tokens:  # an answer's last token may be a drafted one
        yield tokens
