"""What the engine answers without a server: the texts that a server's answers are held to."""

import multiprocessing
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True)
class Choice:
    """What to load, in the words of `slipstream serve`."""

    model: str = "embedded"
    draft: str = "auto"
    device: str = "auto"
    tp: int = 1

    @property
    def flags(self) -> list[str]:
        """The server's arguments for the same."""
        return [self.model, "--draft", self.draft, "--device", self.device, "--tp", str(self.tp)]


def offline_texts(jobs: Sequence[dict[str, Any]], choice: Choice) -> list[str]:
    """Answer requests' bodies with the engine alone, one at a time, in a process that ends with the last."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_answer, list(jobs), choice).result()


def _answer(jobs: list[dict[str, Any]], choice: Choice) -> list[str]:
    from slipstream import LLM, SamplingParams

    known = {field.name for field in fields(SamplingParams)}
    settings = [{name: value for name, value in job.items() if name in known} for job in jobs]
    with LLM(choice.model, choice.draft, device=choice.device, tp=choice.tp) as llm:
        return [
            llm.generate(job["prompt"], SamplingParams(**setting)).text
            for job, setting in zip(jobs, settings, strict=True)
        ]
