"""Prompts: read from files, excluded by their normalised text, and the variety given to sampled user turns."""

import json
import lzma
import math
import re
import string
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from slipstream.errors import DataError
from slipstream.records.schema import SchemaError, read

MOST_OF_ONE = 96
"""Prompts made of one template, however many combinations its slots have."""


@dataclass(frozen=True)
class Template:
    """A prompt with slots, such as "Write a {tone} note.", and the values of each slot."""

    text: str
    slots: dict[str, tuple[str, ...]]

    def filled(self, seed: int) -> Iterator[str]:
        """Yield prompts, no combination twice; the same ones for the same seed."""
        names = list(self.slots)
        sizes = [len(self.slots[name]) for name in names]
        total = math.prod(sizes)
        chosen = np.random.default_rng(seed).permutation(total)[:MOST_OF_ONE] if total > MOST_OF_ONE else range(total)
        for number in map(int, chosen):
            places = np.unravel_index(number, sizes)
            yield self.text.format(**{name: self.slots[name][at] for name, at in zip(names, places, strict=True)})


@dataclass(frozen=True)
class PromptFile:
    """What a file holds: prompts to take as they are, and templates."""

    prompts: tuple[str, ...] = ()
    templates: tuple[Template, ...] = ()


def read_families(path: Path) -> list[list[str]]:
    """Return a file's prompts by what they were made of: those taken as they are first, then each template's."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
        file = read(PromptFile, content, str(path))
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error}).") from error
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise DataError(f"{path}: is no YAML in UTF-8 ({error}).") from error
    except SchemaError as error:
        raise DataError(str(error)) from error
    for number, template in enumerate(file.templates):
        _check(template, f"{path}: templates[{number}]")
    made = (list(template.filled(number)) for number, template in enumerate(file.templates))
    families = [[prompt for prompt in family if prompt.strip()] for family in ([*file.prompts], *made)]
    if not any(families):
        raise DataError(f"{path}: holds no prompts; it needs `prompts`, a list of texts, or `templates`.")
    return [family for family in families if family]


def _check(template: Template, where: str) -> None:
    try:
        named = {name for _, name, _, _ in string.Formatter().parse(template.text) if name is not None}
    except ValueError as error:
        raise DataError(f"{where}: its text cannot be filled in ({error}); braces stand for slots alone.") from error
    if named != set(template.slots) or not named:
        raise DataError(
            f"{where}: its text names the slots {sorted(named)} and `slots` gives values for {sorted(template.slots)}."
        )
    if empty := sorted(name for name, values in template.slots.items() if not values):
        raise DataError(f"{where}: the slot {empty[0]!r} has no values.")


Messages = list[dict[str, str]]

SYSTEM_PROMPTS: tuple[str | None, ...] = (
    None,
    "",
    "You are a helpful assistant.",
    "You are a concise assistant. Answer briefly.",
    "You are an expert programmer who writes clear code and explains it.",
    "You are a patient maths teacher. Think step by step.",
    "You are a creative writer with a vivid style.",
    "Follow the user's instructions exactly and give complete answers.",
)
"""None is the template's own default, which most conversations use."""

OPENINGS: tuple[str, ...] = tuple(
    opening
    for line in """
    What is|What are|What does|What would happen if|What is the difference between|Which|Who was|Who is|When did
    Where can I|Where is|Why do|Why is|How do I|How can I|How does|How many|How much|How long|How would you
    Can you|Can you explain|Could you|Could you help me|Please|Please write|Please explain|I need|I want to|I am
    I have|I'm trying to|I'm looking for|Is it|Is there|Are there|Do you|Does|Did|Should I|Would you|Will|Help me
    Tell me about|Tell me|Give me|Give an example of|Give three|List|List five|Name|Name three|Describe|Define
    Explain|Explain how|Explain why|Explain the concept of|Discuss|Compare|Compare and contrast|Contrast|Analyze
    Evaluate|Summarize|Summarize the following|Summarize this|Paraphrase|Rewrite|Rewrite the following sentence
    Rephrase|Edit|Correct the grammar|Fix|Proofread|Translate|Classify|Categorize|Identify|Identify the|Extract
    Find|Find the|Calculate|Compute|Solve|Solve for x|Simplify|Determine|Convert|Estimate|Count|Sort|Order|Rank
    Write|Write a|Write a short story|Write a poem|Write a haiku about|Write an email|Write a letter|Write an essay
    Write a paragraph|Write a blog post|Write a summary|Write a product description|Write a review|Write a dialogue
    Write a speech|Write a headline|Write a function|Write a Python function|Write a Python program|Write a SQL query
    Write a JavaScript|Write a C++ program|Write code|Write a regular expression|Write a bash script|Write a test
    Create|Create a|Create a list|Create a table|Create a plan|Create a recipe|Create a story|Generate|Generate a list
    Design|Design a|Develop|Draft|Draft an email|Compose|Compose a tweet|Make|Make a list|Build|Implement|Debug
    Suggest|Suggest some|Recommend|Propose|Plan|Outline|Brainstorm|Come up with|Think of|Imagine|Imagine you are
    Pretend|You are|Act as|Act as a|As a|In your opinion|Given|Given the following|Given a list|Given two|Consider
    Suppose|Assume|If|If I have|If a train|Let|Let's|A|An|The|There are|In a|At a|John|Maria|Tom has|Sarah bought
    A farmer|A store|Two|Three|My|My friend|We|Our company|Here is|Here is a|Read the following|Based on|According to
    Answer the following question|Choose|Complete the sentence|Complete|Continue|Fill in|True or false|Turn|Change
    Add|Remove|Replace|Use|Using|Show me|Show|Teach me|Provide|Provide an example|State|Prove|Verify|Check|Test
    Hello|Hi|Hey|Thanks|Good morning|Sorry|Yes|No|OK|I don't understand|I feel|I think|I like|I wonder
    """.strip().splitlines()
    for opening in line.strip().split("|")
)
"""First words forced on a share of the sampled user turns, because a small target left alone repeats itself."""

_WORDS = re.compile(r"[a-z0-9]+")


def normalized(text: str) -> str:
    """Reduce a text to its words, so that spacing, case and punctuation do not hide that two are the same."""
    return " ".join(_WORDS.findall(text.lower()))


def read_prompts(path: Path) -> list[Messages]:
    """Read conversations up to an answer, or questions, from .jsonl (or .jsonl.xz), or prompts from .yaml.

    A line holds `messages` (or `conversations`), `question`, `prompt`, or `instruction` with `instances` whose inputs
    follow it. Answers in the file are never used. What a YAML file holds: `slipstream.train.data.prompts`.
    """
    if path.suffix in (".yaml", ".yml"):
        return [[as_asked(prompt)] for family in read_families(path) for prompt in family]
    opener = lzma.open if path.suffix == ".xz" else open
    prompts: list[Messages] = []
    try:
        with opener(path, "rt", encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    prompts += _line_prompts(line, f"{path}:{number}")
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error}).") from error
    except (lzma.LZMAError, EOFError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: is damaged or no text in UTF-8 ({error}).") from error
    if not prompts:
        raise DataError(f"{path}: holds no prompts.")
    return prompts


def read_excluded(paths: Iterable[Path]) -> frozenset[str]:
    """Return the normalised user turns of files that must never be trained on."""
    return frozenset(
        normalized(message["content"])
        for path in paths
        for messages in read_prompts(path)
        for message in messages
        if message["role"] == "user"
    )


def _line_prompts(line: str, where: str) -> list[Messages]:
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(f"{where}: is not JSON ({error.msg} at character {error.pos + 1}).") from error
    if not isinstance(value, Mapping):
        raise DataError(f"{where}: is not a JSON object.")
    turns = value.get("messages", value.get("conversations"))
    if turns is not None:
        if not isinstance(turns, list):
            raise DataError(f"{where}: its messages are {turns!r} where a list is needed.")
        messages = [_message(turn, where) for turn in turns]
        while messages and messages[-1]["role"] == "assistant":
            messages.pop()
        return [messages] if messages else []
    if isinstance(value.get("instruction"), str):
        instances = value.get("instances", [])
        if not isinstance(instances, list) or not all(isinstance(instance, Mapping) for instance in instances):
            raise DataError(f"{where}: 'instances' is not a list of objects with an 'input'.")
        inputs = [str(instance.get("input", "")) for instance in instances] or [""]
        return [
            [as_asked(f"{value['instruction']}\n\n{given}" if given.strip() else value["instruction"])]
            for given in inputs
        ]
    for key in ("question", "prompt", "text"):
        if isinstance(value.get(key), str):
            return [[as_asked(value[key])]]
    if isinstance(value.get("turns"), list):
        return [[as_asked(str(turn))] for turn in value["turns"]]
    raise DataError(f"{where}: has none of messages, question, prompt, instruction or turns.")


def _message(turn: Any, where: str) -> dict[str, str]:  # one turn of a foreign file
    named = turn if isinstance(turn, Mapping) else {}
    speaker = named.get("role", named.get("from"))
    role = {"human": "user", "gpt": "assistant"}.get(speaker, speaker) if isinstance(speaker, str) else None
    content = named.get("content", named.get("value"))
    if role not in ("system", "user", "assistant") or not isinstance(content, str):
        raise DataError(f"{where}: a message needs a role (system, user or assistant) and a content.")
    return {"role": role, "content": content}


def as_asked(content: str) -> dict[str, str]:
    """Return a prompt as a user's turn."""
    return {"role": "user", "content": content.strip()}
