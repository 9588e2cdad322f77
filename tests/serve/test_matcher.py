"""What a grammar drafts: a guess as far as it is allowed, and texts to which there is no alternative."""

import json

import pytest
from llguidance import LLExecutor, LLTokenizer
from tool_server import byte_tokenizer

from slipstream.serve.grammar_trial import GrammarSource, compile_grammar
from slipstream.serve.matcher import Matcher

TOKENIZER = byte_tokenizer("")
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "unit": {"enum": ["C", "F"]}},
    "required": ["city", "unit"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def readable() -> LLTokenizer:
    return LLTokenizer(TOKENIZER.to_json(), n_vocab=TOKENIZER.vocab_size, eos_token=list(TOKENIZER.eos_token_ids))


def after(readable: LLTokenizer, text: str) -> Matcher:
    """Return where an answer stands that began with a text."""
    grammar = compile_grammar(readable, GrammarSource("json_schema", json.dumps(SCHEMA), white_space=None))
    matcher = Matcher(grammar, TOKENIZER.vocab_size, "response_format", LLExecutor())
    matcher.advance(TOKENIZER.encode(text))
    return matcher


@pytest.mark.parametrize(
    ("text", "guess", "most", "drafted"),
    [
        ('{"', "", 16, 'city":"'),
        ('{"', "", 3, "cit"),
        ('{"', "nothing", 16, 'city":"'),
        ('{"city":"', "Rome", 16, "Rome"),
        ('{"city":"', "", 16, ""),
        ('{"city":"', 'Rome",', 16, 'Rome","unit":"'),
        ('{"city":"Rome","unit":"', "K", 16, ""),
        ('{"city":"Rome","unit":"', 'F"}', 16, 'F"}'),
    ],
)
def test_a_guess_is_kept_as_far_as_it_is_allowed_and_what_must_follow_is_added(readable, text, guess, most, drafted):
    matcher = after(readable, text)
    before = matcher.allowed(())
    assert TOKENIZER.decode(matcher.draft(TOKENIZER.encode(guess), most)) == drafted
    assert before is not None and (matcher.allowed(()) == before).all(), "the state is as it was"
