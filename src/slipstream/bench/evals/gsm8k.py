"""GSM8K with the prompts and the scoring of lm-eval's `gsm8k` task (version 3), so that scores compare."""

import hashlib
import json
import lzma
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from slipstream.bench.workload import ChatMessage, Prompt
from slipstream.errors import SlipstreamError
from slipstream.records.evals import Gsm8kItem

STOPS = ("Question:", "</s>", "<|im_end|>")
FEWSHOT_SEED = 1234
INVALID = "[invalid]"
WHERE_IT_IS = "train.jsonl and test.jsonl of github.com/openai/grade-school-math, grade_school_math/data"

_STRICT = re.compile(r"#### (\-?[0-9\.\,]+)")
_FLEXIBLE = re.compile(r"(-?[$0-9.,]{2,})|(-?[0-9]+)")
_IGNORED = tuple(re.compile(pattern) for pattern in (",", r"\$", "(?s).*#### ", r"\.$"))


class EvalError(SlipstreamError):
    """An evaluation cannot be run or its data cannot be read."""


@dataclass(frozen=True)
class Question:
    """A problem and its worked answer, which ends in `#### N`."""

    question: str
    answer: str


@dataclass(frozen=True)
class Gsm8kData:
    """Both halves of the data set; examples come from train, questions from test."""

    train: tuple[Question, ...]
    test: tuple[Question, ...]
    sha256: str


def load_data(folder: Path) -> Gsm8kData:
    """Read train.jsonl and test.jsonl (either may be compressed with xz)."""
    digest = hashlib.sha256()
    halves = []
    for name in ("train", "test"):
        content = _read(folder, name)
        digest.update(content)
        try:
            rows = [json.loads(line) for line in content.decode("utf-8").splitlines() if line.strip()]
            halves.append(tuple(Question(row["question"], row["answer"]) for row in rows))
        except (UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError) as error:
            raise EvalError(f"{folder}: {name} is not JSONL with 'question' and 'answer' on each line.") from error
    return Gsm8kData(halves[0], halves[1], digest.hexdigest())


def prompts(data: Gsm8kData, num_shots: int, max_tokens: int, chat: bool, limit: int | None = None) -> list[Prompt]:
    """Return one prompt for each test question, with the examples lm-eval would draw for it."""
    if num_shots > len(data.train):
        raise EvalError(f"{num_shots} examples were asked for; train holds {len(data.train)}.")
    rng = random.Random(FEWSHOT_SEED)
    made = []
    for question in data.test[:limit]:
        examples = rng.sample(data.train, num_shots) if num_shots else []
        made.append(_chat(examples, question, max_tokens) if chat else _text(examples, question, max_tokens))
    return made


def score(index: int, answer: str, gold: str) -> Gsm8kItem:
    """Score one answer under both filters."""
    strict, flexible = extract(answer, "strict"), extract(answer, "flexible")
    truth = _normal(gold)
    return Gsm8kItem(index, answer, strict, flexible, _normal(strict) == truth, _normal(flexible) == truth)


def extract(answer: str, which: Literal["strict", "flexible"]) -> str:
    """Take the number out of an answer: the first after `####`, or the last of anything like a number."""
    if which == "strict":
        match = _STRICT.search(answer)
        return match.group(1).strip() if match else INVALID
    matches = [match.group(0) for match in _FLEXIBLE.finditer(answer)]
    return matches[-1].strip() if matches else INVALID


def _text(examples: Sequence[Question], question: Question, max_tokens: int) -> Prompt:
    shots = "".join(f"{_asked(example)} {example.answer}\n\n" for example in examples)
    return Prompt(max_tokens, text=shots + _asked(question))


def _chat(examples: Sequence[Question], question: Question, max_tokens: int) -> Prompt:
    turns: list[ChatMessage] = []
    for example in examples:
        turns += [ChatMessage("user", _asked(example)), ChatMessage("assistant", example.answer)]
    return Prompt(max_tokens, messages=(*turns, ChatMessage("user", _asked(question))))


def _asked(question: Question) -> str:
    return f"Question: {question.question}\nAnswer:"


def _normal(text: str) -> str:
    for pattern in _IGNORED:
        text = pattern.sub("", text)
    return text.lower()


def _read(folder: Path, name: str) -> bytes:
    plain, packed = folder / f"{name}.jsonl", folder / f"{name}.jsonl.xz"
    try:
        if plain.exists():
            return plain.read_bytes()
        return lzma.decompress(packed.read_bytes())
    except (OSError, lzma.LZMAError) as error:
        raise EvalError(f"{folder}: holds no readable {name}.jsonl or {name}.jsonl.xz ({error}).") from error
