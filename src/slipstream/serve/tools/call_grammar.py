"""Grammars of tool calls in a family's own syntax, in llguidance's dialect of Lark: calls are valid as written.

Markers that are tokens of the model are named by their ids, for a grammar's text never matches one.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slipstream.serve.tools import gemma4, harmony
from slipstream.serve.tools import marked_calls as m
from slipstream.serve.tools.call_arguments import json_arguments
from slipstream.serve.tools.element_arguments import element_arguments
from slipstream.serve.tools.families import Family
from slipstream.serve.tools.gemma4_arguments import gemma4_arguments
from slipstream.serve.tools.lark import ANY_TEXT, escaped, literal, spelled
from slipstream.serve.tools.parser import Tool
from slipstream.serve.tools.reasoning import THINK, Opening, Reasoning

MOST_CALLS = 32  # of one answer: a model that never stops would fill its context with calls
_SPACE = "/[ \\n]{0,4}/"


@dataclass(frozen=True)
class _Spelling:
    """How a family writes calls: `{name}` is the function's name, `{quoted}` the same in JSON, `{count}` a number.

    Args:
        opens: comes before the first call; a marker with which it begins tells that there are calls.
        head: comes before a call's arguments.
        tail: comes after them.
        between: comes between two calls.
        closes: comes after the last.
        alone: there is one call an answer, which its end ends.
        lead: what an answer of nothing but calls may begin with, as Lark has it.
    """

    opens: str
    head: str
    tail: str
    between: str
    closes: str
    alone: bool = False
    lead: str = ""


_HERMES = '{{"name": {quoted}, "arguments": '
_SPELLINGS = {
    "kimi_k2": _Spelling(
        m.KIMI_SECTION,
        m.KIMI_CALL + "functions.{name}:{count}" + m.KIMI_ARGUMENTS,
        m.KIMI_CALL_END,
        "",
        m.KIMI_SECTION_END,
    ),
    "deepseek_v3": _Spelling(
        m.DEEPSEEK_SECTION,
        m.DEEPSEEK_CALL + "function" + m.DEEPSEEK_SEPARATOR + "{name}\n```json\n",
        "\n```" + m.DEEPSEEK_CALL_END,
        "\n",
        m.DEEPSEEK_SECTION_END,
    ),
    "deepseek_v31": _Spelling(
        m.DEEPSEEK_SECTION,
        m.DEEPSEEK_CALL + "{name}" + m.DEEPSEEK_SEPARATOR,
        m.DEEPSEEK_CALL_END,
        "",
        m.DEEPSEEK_SECTION_END,
    ),
    "hermes": _Spelling("<tool_call>\n", _HERMES, "}}", "\n</tool_call>\n<tool_call>\n", "\n</tool_call>"),
    "llama3_json": _Spelling("", '{{"name": {quoted}, "parameters": ', "}}", "; ", ""),
    "mistral": _Spelling("[TOOL_CALLS][", _HERMES, "}}", ", ", "]"),
    "mistral_v11": _Spelling("[TOOL_CALLS]", "{name}[ARGS]", "", "[TOOL_CALLS]", ""),
    "minimax_m2": _Spelling(
        "<minimax:tool_call>\n", '<invoke name="{name}">\n', "</invoke>\n", "", "</minimax:tool_call>"
    ),
    "qwen3_coder": _Spelling(
        "<tool_call>\n", "<function={name}>\n", "</function>\n", "</tool_call>\n<tool_call>\n", "</tool_call>"
    ),
    "glm45": _Spelling("<tool_call>", "{name}\n", "", "</tool_call>\n<tool_call>", "</tool_call>", lead="/\\n?/ "),
    "glm47": _Spelling("<tool_call>", "{name}", "", "</tool_call><tool_call>", "</tool_call>"),
    "gemma4": _Spelling(gemma4.CALL, "call:{name}{{", "}}", gemma4.CALL_END + gemma4.CALL, gemma4.CALL_END),
    "openai": _Spelling("", harmony.CALL_HEAD, "", "", "", alone=True),
}


class CallGrammar:
    """The grammar of one request's calls.

    Args:
        tokens: ids of the model's markers that are tokens of their own, those of its reasoning too.
        begins: how the answer begins.
    """

    def __init__(
        self,
        family: Family,
        tools: Sequence[Tool],
        tokens: Mapping[str, int],
        begins: Opening,
        reasoning: Reasoning = THINK,
    ) -> None:
        self._family = family
        self._tools = tools
        self._tokens = tokens
        self._begins = begins
        self._reasoning = reasoning
        self._spelling = _SPELLINGS[family.name]

    def forced(self, max_calls: int | None) -> str:
        """Return a grammar of reasoning, where there is some, and then calls and nothing else."""
        return self._thought(self._spelling.lead + "calls") + self._calls(max_calls, True, self._spelling.opens)

    def triggered(self, max_calls: int | None, otherwise: str | None = None) -> str | None:
        """Return a grammar of text, or of calls that follow the schemas of strict tools, perhaps after text.

        Args:
            otherwise: what an answer without calls must follow instead; there is no text before calls then.

        None where no marker tells that a call begins.
        """
        opens = self._spelling.opens
        marker = next((marker for marker in self._family.markers if opens.startswith(marker)), None)
        if self._family.channels:
            head = (
                "" if self._begins == "outside" else spelled(f"{harmony.CHANNEL}final{harmony.MESSAGE}", self._tokens)
            )
            body = f"body: {head} {otherwise or ANY_TEXT} | calls\n"
        elif marker is None and otherwise is None:
            return None
        elif otherwise is not None:
            body = f"body: {otherwise} | calls\n"
        elif marker in self._tokens:
            body = f"body: {ANY_TEXT} | {ANY_TEXT} calls\n"
        else:
            assert marker is not None
            # The text and the marker are one lexeme, which ends where the marker does: calls go on behind it.
            body = f"body: {ANY_TEXT} | marked calls\nmarked[lazy]: /(.|\\n)*{escaped(marker)}/\n"
            opens = opens.removeprefix(marker)
        calls = self._calls(max_calls, otherwise is not None, opens)
        return self._thought("body") + body + calls

    def _thought(self, then: str) -> str:
        if not self._family.channels:
            return thought(self._begins, self._tokens, then, self._reasoning)
        return analysis(self._begins, self._tokens, then)

    def _calls(self, max_calls: int | None, all_strict: bool, opens: str) -> str:
        """Return the rule `calls` and what it needs."""
        spelling = self._spelling
        more = 0 if spelling.alone else (MOST_CALLS if max_calls is None else min(max_calls, MOST_CALLS)) - 1
        further = f"({self._spelled(spelling.between)} call){{0,{more}}}" if more else ""
        rules = [f"calls: {self._spelled(opens)} call {further} {self._spelled(spelling.closes)}\n"]
        rules.append(f"call: {' | '.join(f'call{i}' for i in range(len(self._tools)))}\n")
        for i, tool in enumerate(self._tools):
            names = {"name": tool.name, "quoted": json.dumps(tool.name, ensure_ascii=False), "count": "{count}"}
            head, tail = spelling.head.format(**names), spelling.tail.format(**names)
            rules.append(f"call{i}: {self._spelled(head)} arguments{i} {self._spelled(tail)}\n")
            schema = tool.parameters if all_strict or tool.strict else None
            rules.append(self._arguments(f"arguments{i}", schema))
        return "".join(rules)

    def _arguments(self, rule: str, schema: dict[str, Any] | None) -> str:
        if self._family.elements is not None:
            return element_arguments(rule, schema, self._family.elements, self._known)
        return (
            gemma4_arguments(rule, schema, self._known)
            if self._family.name == "gemma4"
            else json_arguments(rule, schema)
        )

    def _spelled(self, text: str) -> str:
        return spelled(text, self._known)

    @property
    def _known(self) -> dict[str, int]:
        """The family's markers that are tokens."""
        return {marker: self._tokens[marker] for marker in self._family.markers if marker in self._tokens}


def thought(
    begins: Opening, tokens: Mapping[str, int], then: str, reasoning: Reasoning, on_channels: bool = False
) -> str:
    """Return the rule `start`: reasoning as the answer's beginning has it, and what comes after."""
    if on_channels and begins != "outside":
        head = spelled(f"{harmony.CHANNEL}final{harmony.MESSAGE}", tokens)
        return analysis(begins, tokens, f"{head} {then}")
    if begins == "outside":
        return f"start: {then}\n"
    if (end := tokens.get(reasoning.end)) is not None:
        inner = f"thought: {ANY_TEXT} <[{end}]> {_SPACE}\n"
    else:
        inner = f"thought: unmarked {_SPACE}\nunmarked[lazy]: /(.|\\n)*{escaped(reasoning.end)}/\n"
    is_token = reasoning.start in tokens
    start = f"<[{tokens[reasoning.start]}]>" if is_token else literal(reasoning.start)
    if reasoning.label:
        start += f" {literal(reasoning.label)}"
    if begins == "inside":
        # Models whose template does not open the reasoning open it themselves; as letters, that is a part of any text.
        return f"start: {f'({start})? ' if is_token else ''}thought {then}\n" + inner
    return f"start: ({_SPACE} {start} thought)? {then}\n" + inner


def analysis(begins: Opening, tokens: Mapping[str, int], then: str) -> str:
    """Return the rule `start` of an answer on channels: a message of reasoning, and what comes after."""
    if begins == "outside":
        return f"start: {then}\n"
    start = spelled(f"{harmony.START}assistant", tokens)
    if harmony.END in tokens:
        inner = f"thought: {ANY_TEXT} <[{tokens[harmony.END]}]> {start}\n"
    else:
        inner = f"thought: unmarked {start}\nunmarked[lazy]: /(.|\\n)*{escaped(harmony.END)}/\n"
    if begins == "inside":
        return f"start: thought {then}\n" + inner
    return f"start: ({spelled(f'{harmony.CHANNEL}analysis{harmony.MESSAGE}', tokens)} thought)? {then}\n" + inner
