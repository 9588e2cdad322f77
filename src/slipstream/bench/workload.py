"""Makes the prompts of a point: random token ids of exact length, or real prompts; the same for every arm."""

import json
import random
from dataclasses import dataclass
from pathlib import Path

from slipstream.bench.recipe import Workload
from slipstream.errors import SlipstreamError


class WorkloadError(SlipstreamError):
    """A workload's prompts cannot be made or read."""


@dataclass(frozen=True)
class ChatMessage:
    """One turn of a conversation."""

    role: str
    content: str


@dataclass(frozen=True)
class Prompt:
    """One request: token ids, text, or messages (exactly one of them), and how many tokens to generate."""

    output_tokens: int
    token_ids: tuple[int, ...] = ()
    text: str = ""
    messages: tuple[ChatMessage, ...] = ()


@dataclass(frozen=True)
class Template:
    """The token ids a chat template puts before and after a user's words."""

    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()

    @classmethod
    def between(cls, one: tuple[int, ...], other: tuple[int, ...]) -> "Template":
        """Find the template as what two rendered prompts with different content have in common."""
        shorter = min(len(one), len(other))
        start = next((i for i in range(shorter) if one[i] != other[i]), shorter)
        end = next((i for i in range(shorter - start) if one[-1 - i] != other[-1 - i]), shorter - start)
        return cls(one[:start], one[len(one) - end :])


def random_prompts(
    workload: Workload, token_range: tuple[int, int], template: Template, count: int, seed: int
) -> list[Prompt]:
    """Draw prompts of exact length, the template's own tokens included in that length."""
    assert workload.input_tokens is not None, "checked when the recipe was read"
    rng = random.Random(seed)
    frame = len(template.before) + len(template.after)
    prompts = []
    for _ in range(count):
        length = _length(rng, workload.input_tokens, workload.range_ratio)
        output = _length(rng, workload.output_tokens, workload.range_ratio)
        if length <= frame:
            raise WorkloadError(f"input_tokens {length} leaves no room beside the chat template's {frame} tokens.")
        words = tuple(rng.randrange(*token_range) for _ in range(length - frame))
        prompts.append(Prompt(output, token_ids=template.before + words + template.after))
    return prompts


def file_prompts(workload: Workload, count: int, seed: int) -> list[Prompt]:
    """Take prompts from the workload's file in a seeded order, starting over when it is used up."""
    assert workload.path is not None, "checked when the recipe was read"
    entries = read_prompts(Path(workload.path), workload.chat_template)
    rng = random.Random(seed)
    order: list[int] = []
    while len(order) < count:
        order += rng.sample(range(len(entries)), len(entries))
    return [
        Prompt(_length(rng, workload.output_tokens, workload.range_ratio), text=text, messages=messages)
        for text, messages in (entries[i] for i in order[:count])
    ]


def read_prompts(path: Path, chat: bool) -> list[tuple[str, tuple[ChatMessage, ...]]]:
    """Read JSONL with `prompt` (or `text`) or `messages`; with `chat`, a bare prompt becomes a user's message."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise WorkloadError(f"{path}: prompts cannot be read ({error}).") from error
    entries: list[tuple[str, tuple[ChatMessage, ...]]] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
            if "messages" in value:
                turns = tuple(ChatMessage(str(m["role"]), str(m["content"])) for m in value["messages"])
                if not chat:
                    raise WorkloadError(f"{path}, line {number}: messages need chat_template: true.")
                entries.append(("", turns))
                continue
            text = str(value["prompt"] if "prompt" in value else value["text"])
            entries.append(("", (ChatMessage("user", text),)) if chat else (text, ()))
        except (json.JSONDecodeError, TypeError, KeyError) as error:
            raise WorkloadError(
                f"{path}, line {number}: expected an object with 'prompt', 'text' or 'messages'."
            ) from error
    if not entries:
        raise WorkloadError(f"{path}: holds no prompts.")
    return entries


def _length(rng: random.Random, length: int, ratio: float) -> int:
    return rng.randint(max(1, round(length * ratio)), length)
