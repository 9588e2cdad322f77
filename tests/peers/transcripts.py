"""Answers that models might write, in each family's syntax, cut at random: what parsers are compared on."""

import json
import random
from dataclasses import dataclass, field
from typing import Any

from slipstream.serve.tools import gemma4, harmony
from slipstream.serve.tools import marked_calls as m
from slipstream.serve.tools.families import FAMILIES
from slipstream.serve.tools.gemma4_arguments import gemma4_written
from slipstream.serve.tools.reasoning import END, START

Json = dict[str, Any]

TOOLS: list[Json] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "days": {"type": "integer"},
                    "ratio": {"type": "number"},
                    "exact": {"type": "boolean"},
                    "where": {"type": "object"},
                    "tags": {"type": "array"},
                },
            },
        },
    }
    for name in ("get_weather", "search", "run-code")
]
_WORDS = (
    "The", "weather", "is", "fine", "x < 3", "a{b}", "[1, 2]", "中文", "émoji 😀", "\n", "\n\n", "{", "}", "<b>",
    "`code`", "tool", "call", "<tool", "</", "<|", "|>", "[TOOL", "<minimax:", '"quoted"', "\\n", "function", ";",
    "...",
)  # fmt: skip
_STRINGS = (
    "Oslo",
    "",
    'a "b"',
    "line\nbreak",
    "北京",
    "{}",
    "}",
    "</tag>",
    "x < y & z",
    "\\path\\n",
    "😀",
    "tab\there",
)


TYPED = ("glm45", "glm47", "qwen3_coder", "gemma4")
"""Those whose values a schema gives a type."""
_MARKED = sorted(name for name, family in FAMILIES.items() if not family.channels and name not in TYPED)
_NEXT = f"{harmony.START}assistant"
_HEADS = {
    "call": harmony.CALL_HEAD,
    "call, address first": " to=functions.{name}" + harmony.CALL_HEAD.replace(" to=functions.{name}", ""),
    "call, nothing constrained": f"{harmony.CHANNEL}commentary to=functions.{{name}} json{harmony.MESSAGE}",
}
_ELEMENTS = {
    "minimax_m2": ('<invoke name="{}">\n{}</invoke>\n', '<parameter name="{}">{}</parameter>\n'),
    "glm45": ("<tool_call>{}\n{}</tool_call>", "<arg_key>{}</arg_key>\n<arg_value>{}</arg_value>\n"),
    "glm47": ("<tool_call>{}{}</tool_call>", "<arg_key>{}</arg_key><arg_value>{}</arg_value>"),
    "qwen3_coder": (
        "<tool_call>\n<function={}>\n{}</function>\n</tool_call>",
        "<parameter={}>\n{}\n</parameter>\n",
    ),
}


@dataclass(frozen=True)
class Transcript:
    """One answer.

    Args:
        steps: the tokens of each step of a stream; a marker is one token.
        shape: what kind of answer it is, for the explanation of differences.
    """

    family: str
    kind: str
    text: str
    steps: list[list[str]]
    shape: str
    tools: list[Json] = field(default_factory=lambda: TOOLS)

    def for_parser(self, parser: str) -> Json:
        """Return it as the other projects' script takes it."""
        markers = (
            [*_all_markers(), START, END] if self.kind == "reasoning" else [*FAMILIES[self.family].markers, START, END]
        )
        return {
            "kind": self.kind, "parser": parser, "text": self.text, "steps": self.steps, "tools": self.tools,
            "markers": markers,
        }  # fmt: skip


def transcript(seed: int) -> Transcript:
    """Return one of many."""
    chance = random.Random(seed)
    if chance.random() < 0.2:
        return _reasoning(chance)
    return _called(chance.choice(_MARKED), chance)


def typed_transcript(seed: int) -> Transcript:
    """Return one of many in the syntaxes of `TYPED`."""
    chance = random.Random(seed)
    return _called(chance.choice(TYPED), chance)


def _called(family: str, chance: random.Random) -> Transcript:
    shape = chance.choices(("calls", "text and calls", "text", "cut off"), (4, 4, 2, 2))[0]
    calls = _calls(family, chance) if shape != "text" else ""
    before = "" if shape == "calls" else _prose(chance, family)
    text = before + calls
    if shape == "cut off":
        text = text[: chance.randint(1, len(text))]
    return Transcript(family, "tools", text, _steps(text, [*FAMILIES[family].markers], chance), shape)


def channel_transcript(seed: int) -> Transcript:
    """Return one of many that gpt-oss might write."""
    chance = random.Random(seed)
    shape = chance.choice([*_HEADS, "text", "cut off"])
    messages = [f"{harmony.CHANNEL}analysis{harmony.MESSAGE}{_plain(chance)}"] * (chance.random() < 0.7)
    messages += [f"{harmony.CHANNEL}commentary{harmony.MESSAGE}{_plain(chance)}"] * (chance.random() < 0.3)
    if shape in _HEADS or (shape == "cut off" and chance.random() < 0.6):
        head = _HEADS[shape if shape in _HEADS else chance.choice(list(_HEADS))]
        name, value = chance.choice(TOOLS)["function"]["name"], _arguments(chance, False)
        arguments = json.dumps(value, ensure_ascii=chance.random() < 0.3)
        messages.append(head.format(name=name) + arguments + harmony.CALL)
    else:
        messages.append(f"{harmony.CHANNEL}final{harmony.MESSAGE}{_plain(chance)}{harmony.RETURN}")
    text = (harmony.END + _NEXT).join(messages)
    if shape == "cut off":  # between two tokens: markers always are some
        tokens = [token for step in _steps(text, [*harmony.MARKERS], chance) for token in step]
        text = "".join(tokens[: chance.randint(1, len(tokens))])
    return Transcript("openai", "channels", text, _steps(text, [*harmony.MARKERS], chance), shape)


def _reasoning(chance: random.Random) -> Transcript:
    family = chance.choice(("kimi_k2", "minimax_m2", "deepseek_r1", "qwen3"))
    shape = chance.choices(("thought and answer", "answer", "thought"), (6, 1, 1))[0]
    opened = chance.random() < 0.5
    thought = (START if opened else "") + _plain(chance) + END if shape != "answer" else ""
    text = thought.removesuffix(END) if shape == "thought" else thought + chance.choice(("", "\n\n")) + _plain(chance)
    shape += " opened" if opened and shape != "answer" else ""
    return Transcript(family, "reasoning", text, _steps(text, [START, END], chance), shape)


def _steps(text: str, markers: list[str], chance: random.Random) -> list[list[str]]:
    """Cut a text into tokens, markers whole, and those into steps of one to three."""
    tokens: list[str] = []
    while text:
        marker = next((marker for marker in markers if text.startswith(marker)), None)
        if marker is None:
            nearest = min((at for marker in markers if (at := text.find(marker)) > 0), default=len(text))
            token = text[: min(chance.choice((1, 2, 3, 4, 6, 9)), nearest)]
        else:
            token = marker
        tokens.append(token)
        text = text[len(token) :]
    steps: list[list[str]] = []
    while tokens:
        count = chance.choice((1, 1, 1, 2, 3))
        steps.append(tokens[:count])
        tokens = tokens[count:]
    return steps


def _calls(family: str, chance: random.Random) -> str:
    count = chance.choice((1, 1, 2, 3))
    names = [chance.choice(TOOLS)["function"]["name"] for _ in range(count)]
    values = [_arguments(chance, family == "minimax_m2") for _ in range(count)]
    objects = [json.dumps(value, ensure_ascii=chance.random() < 0.3) for value in values]
    pairs = list(zip(names, objects, strict=True))
    if family == "kimi_k2":
        inside = "".join(
            f"{m.KIMI_CALL}functions.{name}:{i}{m.KIMI_ARGUMENTS}{text}{m.KIMI_CALL_END}"
            for i, (name, text) in enumerate(pairs)
        )
        return m.KIMI_SECTION + inside + m.KIMI_SECTION_END
    if family == "deepseek_v3":
        inside = "\n".join(
            f"{m.DEEPSEEK_CALL}function{m.DEEPSEEK_SEPARATOR}{name}\n```json\n{text}\n```{m.DEEPSEEK_CALL_END}"
            for name, text in pairs
        )
        return m.DEEPSEEK_SECTION + inside + m.DEEPSEEK_SECTION_END
    if family == "deepseek_v31":
        inside = "".join(
            f"{m.DEEPSEEK_CALL}{name}{m.DEEPSEEK_SEPARATOR}{text}{m.DEEPSEEK_CALL_END}" for name, text in pairs
        )
        return m.DEEPSEEK_SECTION + inside + m.DEEPSEEK_SECTION_END
    if family == "minimax_m2":
        return _in_elements(family, names, values, "<minimax:tool_call>\n{}</minimax:tool_call>", "")
    if family in _ELEMENTS:
        return _in_elements(family, names, values, "{}", "\n" if family != "glm47" else "")
    if family == "gemma4":
        pairs = [(name, gemma4_written(value)) for name, value in zip(names, values, strict=True)]
        return "".join(f"{gemma4.CALL}call:{name}{text}{gemma4.CALL_END}" for name, text in pairs)
    if family == "mistral_v11":
        return "".join(f"[TOOL_CALLS]{name}[ARGS]{text}" for name, text in pairs)
    if family == "mistral":
        return "[TOOL_CALLS] [" + ", ".join(f'{{"name": "{n}", "arguments": {text}}}' for n, text in pairs) + "]"
    if family == "llama3_json":
        return "; ".join(f'{{"name": "{name}", "parameters": {text}}}' for name, text in pairs[:1])
    return "\n".join(f'<tool_call>\n{{"name": "{n}", "arguments": {text}}}\n</tool_call>' for n, text in pairs)


def _in_elements(family: str, names: list[str], values: list[Json], section: str, between: str) -> str:
    call, element = _ELEMENTS[family]
    escapes = family == "minimax_m2"
    parts = []
    for name, value in zip(names, values, strict=True):
        texts = {
            key: one if isinstance(one, str) else json.dumps(one, ensure_ascii=escapes) for key, one in value.items()
        }
        parts.append(call.format(name, "".join(element.format(key, text) for key, text in texts.items())))
    return section.format(between.join(parts))


def _arguments(chance: random.Random, plain: bool) -> Json:
    makers = {
        "city": lambda: chance.choice([s for s in _STRINGS if not plain or (s.strip() == s and s and "<" not in s)]),
        "days": lambda: chance.randint(-3, 99),
        "ratio": lambda: chance.choice((0.5, 1.25, -3.75)),
        "exact": lambda: chance.random() < 0.5,
        "where": lambda: {"lat": 1.5, "names": [chance.choice(_STRINGS), {"deep": None}]},
        "tags": lambda: [chance.choice(_STRINGS) for _ in range(chance.randint(0, 2))],
    }
    return {key: makers[key]() for key in chance.sample(sorted(makers), chance.randint(0, 4))}


def _prose(chance: random.Random, family: str) -> str:
    text = _plain(chance)
    return "Well. " + text if family == "llama3_json" else text


def _plain(chance: random.Random) -> str:
    return " ".join(chance.choice(_WORDS) for _ in range(chance.randint(1, 12)))


def _all_markers() -> list[str]:
    return sorted({marker for family in FAMILIES.values() for marker in family.markers})
