"""vLLM's CPU build as a peer, plain or with an EAGLE-3 draft; runs in vLLM's own environment."""

import time

import vllm
from vllm import LLM, SamplingParams, TokensPrompt


class Worker:
    """vLLM's engine in this very process, stepped by hand.

    Args:
        model: a Hugging Face folder.
        draft: a draft's folder in vLLM's dialect; "" decodes plainly.
    """

    def __init__(self, model: str, dtype: str, draft: str, depth: int, context: int, max_requests: int) -> None:
        speculation = {"method": "eagle3", "model": draft, "num_speculative_tokens": depth} if draft else None
        self._engine = LLM(
            model,
            dtype=dtype,
            speculative_config=speculation,
            enforce_eager=True,
            max_model_len=context,
            max_num_seqs=max_requests,
            enable_prefix_caching=False,
        ).llm_engine
        self._num_requests = 0
        self.about = {"version": f"vllm {vllm.__version__}", "details": f"{dtype}, eager"}

    def run(self, prompts: list[list[int]], tokens: int) -> list[tuple[float, int, list[int]]]:
        """Answer prompts together; return (seconds since the start, prompt, tokens) of everything emitted."""
        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        rows, known, events = {}, [0] * len(prompts), []
        began = time.perf_counter()
        for row, prompt in enumerate(prompts):
            self._num_requests += 1
            rows[str(self._num_requests)] = row
            self._engine.add_request(str(self._num_requests), TokensPrompt(prompt_token_ids=prompt), params)
        while self._engine.has_unfinished_requests():
            outputs = self._engine.step()
            now = time.perf_counter() - began
            for output in outputs:
                row, ids = rows[output.request_id], list(output.outputs[0].token_ids)
                if len(ids) > known[row]:
                    events.append((now, row, ids[known[row] :]))
                    known[row] = len(ids)
        return events
