"""What a served model speaks: the syntax of its calls, its reasoning, and its template's switches for that."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from slipstream.checkpoint.tokenizer import Tokenizer
from slipstream.serve.errors import HttpError
from slipstream.serve.grammar_trial import GrammarSource
from slipstream.serve.structured import Constraint
from slipstream.serve.tools.call_arguments import prepared
from slipstream.serve.tools.call_grammar import CallGrammar, thought
from slipstream.serve.tools.families import Family, reasoning_family, tool_family
from slipstream.serve.tools.form import AnswerForm
from slipstream.serve.tools.harmony import MARKERS
from slipstream.serve.tools.protocol import Choice, Thinking
from slipstream.serve.tools.reasoning import THINK, Opening, Reasoning, going_on, opening

_SWITCHES = ("enable_thinking", "thinking")


@dataclass(frozen=True)
class Dialect:
    """What a served model speaks.

    Args:
        tokens: ids of markers that are tokens of their own, by their text.
        variables: what its chat template reads.
    """

    family: Family | None = None
    reasoning: Reasoning | None = None
    tokens: Mapping[str, int] = field(default_factory=dict)
    variables: frozenset[str] = frozenset()

    @classmethod
    def of(cls, tokenizer: Tokenizer, tool_flag: str | None, reasoning_flag: str | None) -> "Dialect":
        """Return a model's dialect, as the flags say or as its template shows."""
        family = tool_family(tool_flag, tokenizer.chat_template)
        reasoning = reasoning_family(reasoning_flag, tokenizer.chat_template)
        markers = [marker for part in (family, reasoning) if part is not None for marker in part.markers]
        tokens = {text: tokenizer.added_token_ids[text] for text in markers if text in tokenizer.added_token_ids}
        return cls(family, reasoning, tokens, tokenizer.template_variables)

    @property
    def channels(self) -> bool:
        """Whether the model writes messages on channels."""
        return any(part is not None and part.channels for part in (self.family, self.reasoning))

    def check(self, choice: Choice) -> None:
        """Raise unless this model can make the calls that a request allows."""
        if choice.mode != "none" and self.family is None:
            raise HttpError(
                400,
                "tools: this server does not know how this model writes its calls; start it with --tool-call-parser.",
                param="tools",
            )

    def opening(self, prompt: str, begun: str | None = None) -> Opening:
        """Return how an answer to a prompt begins.

        Args:
            begun: what there is of the message that it goes on with.
        """
        if self.reasoning is None:
            return "outside"
        return opening(prompt, self.reasoning) if begun is None else going_on(begun, self.reasoning)

    def check_thinking(self, effort: str | None, thinking: Thinking | None, begins: Opening) -> None:
        """Raise where a client wants no reasoning (which is no hint), and there is some nevertheless.

        The template has opened it, or the model, which writes it on a channel of its own, knows no answers without.
        """
        if begins == "inside" or (begins == "either" and self.channels):
            if thinking is not None and thinking.type == "disabled":
                raise _no_switch("thinking")
            if thinking is None and effort == "none":
                raise _no_switch("reasoning_effort")

    def form(self, choice: Choice, begins: Opening, separate: bool = True) -> AnswerForm:
        """Return how an answer is to be read.

        Args:
            separate: tell reasoning apart from the answer; it is text otherwise.
        """
        family = None if choice.mode == "none" else self.family
        reasoning = self.reasoning if separate else None
        markers = {marker for part in (family, reasoning) if part is not None for marker in part.markers}
        markers |= set(MARKERS if self.channels else ())
        tokens = {text: token_id for text, token_id in self.tokens.items() if text in markers}
        form = AnswerForm(family, reasoning, begins == "inside", choice.tools, choice.max_calls, tokens)
        alone = choice.mode == "required" and not self.channels and (separate or self.reasoning is None)
        return replace(form, named=choice.named, channels=self.channels, forced=alone)

    def constraint(self, wanted: Constraint | None, choice: Choice, begins: Opening) -> Constraint | None:
        """Return what an answer must follow: calls where they are forced, reasoning before what a client wants."""
        if choice.mode != "none" and self.family is not None:
            calls = CallGrammar(self.family, choice.tools, self.tokens, begins, self.reasoning or THINK)
            if choice.mode == "required":
                return Constraint(GrammarSource("lark", calls.forced(choice.max_calls)), "tools")
            if wanted is not None:
                text = calls.triggered(choice.max_calls, otherwise="@body")
                return Constraint(GrammarSource("lark", text or "", body=wanted.source), wanted.field)
            if any(tool.strict for tool in choice.tools):
                text = calls.triggered(choice.max_calls)
                return None if text is None else Constraint(GrammarSource("lark", text), "tools")
        if wanted is None or begins == "outside":
            return wanted
        text = thought(begins, self.tokens, "@body", self.reasoning or THINK, self.channels)
        return Constraint(GrammarSource("lark", text, body=wanted.source), wanted.field)

    def schemas(self, choice: Choice) -> list[Constraint]:
        """Return the schemas that an answer's calls must follow, each by itself, to be tried one by one."""
        return [
            Constraint(GrammarSource("json_schema", json.dumps(prepared(tool.parameters))), tool.field)
            for tool in choice.tools
            if tool.parameters is not None and (choice.mode == "required" or (choice.mode == "auto" and tool.strict))
        ]

    def switches(self, effort: str | None, thinking: Thinking | None, budget: int | None) -> dict[str, Any]:
        """Return the template's variables that reasoning is asked for with.

        Clients send an effort to every model, and Anthropic's a budget: where the template has no switch they are
        hints that are left aside.
        """
        found: dict[str, Any] = {}
        if effort is not None and "reasoning_effort" in self.variables:
            found["reasoning_effort"] = effort
        if effort is not None or thinking is not None:
            wanted = effort != "none" if thinking is None else thinking.type == "enabled"
            found |= {name: wanted for name in _SWITCHES if name in self.variables}
        if budget is not None and "thinking_budget" not in self.variables:
            raise _no_switch("thinking_budget")
        if budget is None and thinking is not None and "thinking_budget" in self.variables:
            budget = thinking.budget_tokens
        return found if budget is None else {**found, "thinking_budget": budget}


def _no_switch(field_name: str) -> HttpError:
    return HttpError(
        400, f"{field_name}: this model's chat template has no switch for it; leave it out.", param=field_name
    )
