"""transformers as a peer: `generate` in float32, timed token by token."""

import time

import torch
import transformers


class Worker:
    """A model of a Hugging Face folder."""

    def __init__(self, model: str, threads: int) -> None:
        torch.set_num_threads(threads)
        self._model = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        self.about = {"version": f"transformers {transformers.__version__}", "details": "float32, eager"}

    def run(self, prompts: list[list[int]], tokens: int) -> list[tuple[float, int, list[int]]]:
        """Answer prompts together; return (seconds since the start, prompt, tokens) of everything emitted."""
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        events = []
        began = time.perf_counter()

        def listen(seen: torch.Tensor, _scores: object, **_: object) -> torch.Tensor:
            now = time.perf_counter() - began
            events.extend((now, row, [token]) for row, token in enumerate(seen[:, -1].tolist()))
            return torch.zeros(len(seen), dtype=torch.bool)

        with torch.inference_mode():
            self._model.generate(
                ids, attention_mask=mask, do_sample=False, min_new_tokens=tokens, max_new_tokens=tokens, pad_token_id=0,
                stopping_criteria=transformers.StoppingCriteriaList([listen]),
            )  # fmt: skip
        return events
