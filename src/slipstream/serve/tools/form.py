"""How one answer is to be read: in which syntax, with which tools, beginning inside its reasoning or not."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from slipstream.checkpoint.tokenizer import IncrementalDetokenizer, Tokenizer
from slipstream.serve.tools.events import AnswerParser
from slipstream.serve.tools.families import Family
from slipstream.serve.tools.harmony import channels
from slipstream.serve.tools.parser import Parser, PlainParser, Tool, WholeReasoning, Writer, random_id
from slipstream.serve.tools.reader import TOKEN_MARK, Reader, Waiting
from slipstream.serve.tools.reasoning import Reasoning, reasoned


@dataclass(frozen=True)
class AnswerForm:
    """How one answer is to be read.

    Args:
        family: the syntax of its calls; None if it may make none.
        inside: whether it begins inside its reasoning.
        tokens: the markers that are tokens of the model, by their text.
        whole_reasoning: a stream tells of its reasoning when that is over.
        named: the request named the tool that is called, so that a call is no choice of the model's.
        channels: the model writes messages on channels (`harmony.py`), whatever is made of them.
        forced: it is calls alone, behind its reasoning.
    """

    family: Family | None = None
    reasoning: Reasoning | None = None
    inside: bool = False
    tools: tuple[Tool, ...] = ()
    max_calls: int | None = None
    tokens: Mapping[str, int] = field(default_factory=dict)
    whole_reasoning: bool = False
    named: bool = False
    channels: bool = False
    forced: bool = False

    def parser(self) -> AnswerParser:
        """Return a fresh parser."""
        if self.family is None and self.reasoning is None and not self.channels:
            return PlainParser()
        syntax = _text if self.family is None else self.family.syntax
        if self.channels:
            syntax = channels(self.reasoning is not None, self.family is not None, self.inside)
        elif self.reasoning is not None:
            syntax = reasoned(self.reasoning, self.inside, syntax)
        new_id = random_id if self.family is None else self.family.new_id
        parser = Parser(syntax, Writer(new_id, self.tools, self.max_calls, tuple(self.tokens), self.forced))
        return WholeReasoning(parser) if self.whole_reasoning else parser

    def detokenizer(self, tokenizer: Tokenizer, skip_special: bool) -> "IncrementalDetokenizer | MarkingDetokenizer":
        """Return a fresh detokenizer whose text this form's parser can read."""
        plain = tokenizer.detokenizer(skip_special)
        return MarkingDetokenizer(plain, self.tokens) if self.tokens else plain


PLAIN = AnswerForm()


class MarkingDetokenizer:
    """Shows markers that are tokens, special ones too, with a mark in front: text that spells one has none."""

    def __init__(self, plain: IncrementalDetokenizer, tokens: Mapping[str, int]) -> None:
        self._plain = plain
        self._markers = {token_id: marker for marker, token_id in tokens.items()}

    def push(self, ids: Iterable[int]) -> str:
        """Take more ids, and return the text that is now complete."""
        return "".join(self._text(token_id) for token_id in ids)

    def finish(self) -> str:
        """Return what is left."""
        return self._plain.finish()

    def _text(self, token_id: int) -> str:
        text = self._plain.push([token_id])
        if (marker := self._markers.get(token_id)) is None:
            return text
        return text.removesuffix(marker) + TOKEN_MARK + marker


def without_marks(text: str) -> str:
    """Return text as people read it."""
    return text.replace(TOKEN_MARK, "")


def _text(reader: Reader, writer: Writer) -> Waiting[None]:
    """Read an answer that makes no calls."""
    yield from reader.until((), writer.text)
