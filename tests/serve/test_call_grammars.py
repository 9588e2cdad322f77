"""Grammars of calls: whatever they allow is read back as calls that follow the tools' schemas."""

import json
import random

import pytest
from llguidance import LLMatcher, LLTokenizer
from tool_server import CHATML, byte_tokenizer

from slipstream.checkpoint.tokenizer import Tokenizer
from slipstream.serve.grammar_trial import GrammarSource, compile_grammar
from slipstream.serve.structured import Constraint
from slipstream.serve.tools.call_grammar import CallGrammar
from slipstream.serve.tools.dialect import Dialect
from slipstream.serve.tools.events import Message
from slipstream.serve.tools.families import FAMILIES
from slipstream.serve.tools.gemma4_arguments import gemma4_arguments
from slipstream.serve.tools.parser import Tool
from slipstream.serve.tools.protocol import Choice
from slipstream.serve.tools.reasoning import REASONING

CITY = {"enum": ["Oslo", "Rome"]}
SCHEMA = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/City"}, "days": {"type": "integer"}, "exact": {"type": "boolean"}},
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"City": CITY},
    "$id": "no address",
}
TOOLS = (Tool("weather", parameters=SCHEMA, strict=True), Tool("clock", parameters={"additionalProperties": False}))
FAMILIES_BY_TOKENS = [(family, tokens) for family in FAMILIES for tokens in (True, False)]


@pytest.mark.parametrize(("family", "tokens"), FAMILIES_BY_TOKENS)
def test_any_answer_a_forced_grammar_allows_is_read_back_as_valid_calls(family: str, tokens: bool) -> None:
    tokenizer = tokenizer_of(family, tokens)
    dialect = Dialect.of(tokenizer, family, "none")
    grammar = CallGrammar(FAMILIES[family], TOOLS, dialect.tokens, "outside").forced(3)
    for seed in range(2):
        message = read(tokenizer, dialect, walk(tokenizer, grammar, random.Random(seed)))
        assert 1 <= len(message.calls) <= 3
        assert message.content == ""
        for call in message.calls:
            check(call.name, json.loads(call.arguments))


@pytest.mark.parametrize(("family", "tokens"), FAMILIES_BY_TOKENS)
def test_behind_a_marker_in_free_text_only_valid_calls_are_allowed(family: str, tokens: bool) -> None:
    tokenizer = tokenizer_of(family, tokens)
    dialect = Dialect.of(tokenizer, family, "none")
    grammar = CallGrammar(FAMILIES[family], TOOLS, dialect.tokens, "outside").triggered(None)
    if family == "llama3_json":
        assert grammar is None  # no marker tells that a call begins
    if family in ("llama3_json", "openai"):  # whose text and calls are messages of their own
        return
    forced = CallGrammar(FAMILIES[family], TOOLS[:1], dialect.tokens, "outside").forced(1)
    call = walk(tokenizer, forced, random.Random(1))
    text = tokenizer.encode("Any < text {", add_special=False)
    assert accepted(tokenizer, grammar, text)
    assert accepted(tokenizer, grammar, [*text, *call])
    wrong = tokenizer.encode(tokenizer.decode(call, skip_special=False).replace("city", "town"), add_special=False)
    assert not accepted(tokenizer, grammar, [*text, *wrong])


@pytest.mark.parametrize("tokens", [True, False])
@pytest.mark.parametrize(
    ("begins", "answer"), [("inside", "So <b> it is.</think>\n"), ("either", "<think>So.</think>")]
)
def test_reasoning_comes_before_forced_calls(tokens: bool, begins: str, answer: str) -> None:
    tokenizer = tokenizer_of("hermes", tokens)
    dialect = Dialect.of(tokenizer, "hermes", "qwen3")
    grammar = CallGrammar(FAMILIES["hermes"], TOOLS, dialect.tokens, begins).forced(1)  # type: ignore[arg-type]
    call = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
    assert accepted(tokenizer, grammar, tokenizer.encode(answer + call, add_special=False))
    assert accepted(tokenizer, grammar, tokenizer.encode(call, add_special=False)) == (begins == "either")


@pytest.mark.parametrize("tokens", [True, False])
def test_what_is_forced_on_gpt_oss_lies_on_its_channel_behind_its_analysis(tokens: bool) -> None:
    tokenizer = tokenizer_of("openai", tokens)
    dialect = Dialect.of(tokenizer, "openai", "openai_gptoss")
    analysis = "<|channel|>analysis<|message|>So < it is.<|end|><|start|>assistant"
    call = "<|channel|>commentary to=functions.clock <|constrain|>json<|message|>{}"
    final = '<|channel|>final<|message|>{"city": "Oslo"}'
    wanted = Constraint(GrammarSource("json_schema", json.dumps({"properties": {"city": CITY}})), "response_format")
    form = Choice("required", TOOLS)
    either = Choice("auto", TOOLS)
    for choice, asked, right, wrong in (
        (form, None, [call, analysis + call], [final]),
        (either, None, [call, final, analysis + call], ["Oslo", call.replace("clock", "weather")]),
        (either, wanted, [call, final, analysis + final], ['{"city": "Oslo"}', final.replace("Oslo", "Lima")]),
        (Choice(), wanted, [final, analysis + final], [call, analysis]),
    ):
        source = dialect.constraint(asked, choice, "either").source
        for text, allowed in (*((text, True) for text in right), *((text, False) for text in wrong)):
            ids = tokenizer.encode(text, add_special=False)
            state = compile_grammar(known(tokenizer), source)
            assert (state.try_consume_tokens(ids) == len(ids) and state.is_accepting()) == allowed, text


ELEMENTS = {
    "minimax_m2": (
        '<minimax:tool_call>\n<invoke name="f">\n%s</invoke>\n</minimax:tool_call>',
        '<parameter name="%s">%s</parameter>\n',
    ),
    "qwen3_coder": (
        "<tool_call>\n<function=f>\n%s</function>\n</tool_call>",
        "<parameter=%s>\n%s\n</parameter>\n",
    ),
    "glm45": ("<tool_call>f\n%s</tool_call>", "<arg_key>%s</arg_key>\n<arg_value>%s</arg_value>\n"),
    "glm47": ("<tool_call>f%s</tool_call>", "<arg_key>%s</arg_key><arg_value>%s</arg_value>"),
}


@pytest.mark.parametrize("tokens", [True, False])
@pytest.mark.parametrize("family", ELEMENTS)
def test_strings_of_elements_are_texts_that_follow_their_limits(family: str, tokens: bool) -> None:
    properties = {
        "free": {"type": "string"},
        "code": {"type": "string", "pattern": "^[a-c]{2}/?$"},
        "short": {"type": "string", "maxLength": 3, "minLength": 1},
        "list": {"type": "array", "items": {"type": "integer"}, "maxItems": 2},
    }
    tools = (Tool("f", parameters={"properties": properties, "required": list(properties)}),)
    whole, one = ELEMENTS[family]
    right = {"free": 'a < "b"\n', "code": "ab/", "short": "abc", "list": "[1, 2]"}
    answer = whole % "".join(one % pair for pair in right.items())
    form = accepts(family, tokens, tools, [answer], [answer.replace("abc", "abcd"), answer.replace("[1", '["a"')])
    assert form == {**right, "list": [1, 2]}


@pytest.mark.parametrize("tokens", [True, False])
def test_gemma_s_values_follow_a_schema_of_any_depth(tokens: bool) -> None:
    node = {
        "type": "object",
        "properties": {"name": {"enum": ["a", "b"]}, "below": {"type": "array", "items": {"$ref": "#/$defs/Node"}}},
        "required": ["name"],
    }
    properties = {
        "Tree": {"$ref": "#/$defs/Node"},
        "any": {},
        "code": {"anyOf": [{"type": "string", "maxLength": 3}, {"type": "null"}]},
        "list": {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 2},
    }
    tools = (Tool("f", parameters={"properties": properties, "$defs": {"Node": node}, "required": ["any", "list"]}),)
    whole = "<|tool_call>call:f{%s}<tool_call|>"
    right = (
        'any:{x:[1.5,<|"|>y<|"|>,true]},code:<|"|>abc<|"|>,list:[1,2],'
        'Tree:{below:[{name:<|"|>a<|"|>}],name:<|"|>b<|"|>}'
    )
    wrong = [
        right.replace("[1,2]", "[]"),
        right.replace("[1,2]", "[1,2,3]"),
        right.replace("abc", "abcd"),
        right.replace('<|"|>abc<|"|>', "5"),
        right.replace('<|"|>a<|"|>', '<|"|>c<|"|>'),
        right.removeprefix('any:{x:[1.5,<|"|>y<|"|>,true]},'),
        right + ",more:1",
    ]
    answers = [whole % "any:null,list:[7]", whole % right]
    assert accepts("gemma4", tokens, tools, answers, [whole % text for text in wrong]) == {
        "any": {"x": [1.5, "y", True]},
        "code": "abc",
        "list": [1, 2],
        "Tree": {"below": [{"name": "a"}], "name": "b"},
    }


def test_a_long_chain_of_references_is_followed_in_gemma_s_grammar() -> None:
    chain: dict[str, object] = {f"n{i}": {"properties": {"a": {"$ref": f"#/$defs/n{i + 1}"}}} for i in range(1500)}
    schema = {"properties": {"x": {"$ref": "#/$defs/n0"}}, "$defs": {**chain, "n1500": {"const": "the end"}}}
    assert "the end" in gemma4_arguments("arguments", schema, {})


@pytest.mark.parametrize(
    ("family", "call"),
    [
        ("minimax_m2", ELEMENTS["minimax_m2"][0] % '<parameter name="x">1</parameter>\n'),
        ("glm47", "<tool_call>f<arg_key>x</arg_key><arg_value>1</arg_value></tool_call>"),
        ("gemma4", "<|tool_call>call:f{x:1}<tool_call|>"),
    ],
)
def test_a_tool_that_is_not_strict_beside_one_that_is_takes_any_parameters(family: str, call: str) -> None:
    tools = (*TOOLS[:1], Tool("f", parameters={"properties": {"y": {"type": "string"}}}))
    for tokens in (True, False):
        tokenizer = tokenizer_of(family, tokens)
        known_tokens = Dialect.of(tokenizer, family, "none").tokens
        grammar = CallGrammar(FAMILIES[family], tools, known_tokens, "outside").triggered(None)
        assert accepted(tokenizer, grammar, tokenizer.encode("Now: " + call, add_special=False))


def test_gemma_s_thoughts_come_before_forced_calls() -> None:
    tokenizer = byte_tokenizer(CHATML, (*FAMILIES["gemma4"].markers, *REASONING["gemma4"].markers[:2]))
    dialect = Dialect.of(tokenizer, "gemma4", "gemma4")
    call, thought = "<|tool_call>call:clock{}<tool_call|>", "<|channel>thought\nSo < it.\n<channel|>"
    for begins, right, wrong in (
        ("either", [call, thought + call], [thought]),
        ("inside", ["So < it.\n<channel|>" + call], [call]),
        ("outside", [call], [thought + call]),
    ):
        source = dialect.constraint(None, Choice("required", TOOLS), begins).source
        for text, allowed in (*((text, True) for text in right), *((text, False) for text in wrong)):
            ids = tokenizer.encode(text, add_special=False)
            state = compile_grammar(known(tokenizer), source)
            assert (state.try_consume_tokens(ids) == len(ids) and state.is_accepting()) == allowed, text


def accepts(family: str, tokens: bool, tools: tuple[Tool, ...], right: list[str], wrong: list[str]) -> object:
    """Assert that a forced grammar allows some answers only; returns what arguments the last of them is read as."""
    tokenizer = tokenizer_of(family, tokens)
    dialect = Dialect.of(tokenizer, family, "none")
    grammar = CallGrammar(FAMILIES[family], tools, dialect.tokens, "outside").forced(1)
    for answer, allowed in (*((text, True) for text in right), *((text, False) for text in wrong)):
        assert accepted(tokenizer, grammar, tokenizer.encode(answer, add_special=False)) == allowed, answer
    return json.loads(
        read(tokenizer, dialect, tokenizer.encode(right[-1], add_special=False), tools).calls[0].arguments
    )


def tokenizer_of(family: str, tokens: bool) -> Tokenizer:
    """Return a tokenizer in which the family's markers are tokens, or are not."""
    return byte_tokenizer(CHATML, (*FAMILIES[family].markers, "<think>", "</think>") if tokens else ())


def known(tokenizer: Tokenizer) -> LLTokenizer:
    """Return a tokenizer as grammars know it."""
    return LLTokenizer(tokenizer.to_json(), n_vocab=tokenizer.vocab_size, eos_token=list(tokenizer.eos_token_ids))


def matcher(tokenizer: Tokenizer, grammar: str) -> LLMatcher:
    """Return a matcher at its beginning."""
    return compile_grammar(known(tokenizer), GrammarSource("lark", grammar))


def accepted(tokenizer: Tokenizer, grammar: str, ids: list[int]) -> bool:
    """Tell whether an answer may consist of these tokens."""
    state = matcher(tokenizer, grammar)
    return state.try_consume_tokens(ids) == len(ids) and state.is_accepting()


def walk(tokenizer: Tokenizer, grammar: str, chance: random.Random) -> list[int]:
    """Return an answer along random tokens that a grammar allows; digits and spaces end soon."""
    state = matcher(tokenizer, grammar)
    ids: list[int] = []
    while not state.is_stopped() and len(ids) < 2000:
        bits = int.from_bytes(state.compute_bitmask(), "little")
        allowed = [i for i in range(tokenizer.vocab_size) if bits >> i & 1]
        ends = [i for i in allowed if i in tokenizer.eos_token_ids]
        token = ends[0] if ends and chance.random() < 0.5 else chance.choice(allowed)
        assert state.consume_token(token)
        ids.append(token)
    return [i for i in ids if i not in tokenizer.eos_token_ids]


def read(tokenizer: Tokenizer, dialect: Dialect, ids: list[int], tools: tuple[Tool, ...] = TOOLS) -> Message:
    """Return what a server would make of an answer."""
    form = dialect.form(Choice("required", tools), "outside")
    detokenizer, parser, message = form.detokenizer(tokenizer, True), form.parser(), Message()
    events = [event for i in ids for event in parser.feed(detokenizer.push([i]))]
    for event in [*events, *parser.feed(detokenizer.finish()), *parser.finish()]:
        message.add(event)
    return message


def check(name: str, arguments: dict[str, object]) -> None:
    """Assert that a call's arguments follow its tool's schema."""
    assert isinstance(arguments, dict)
    if name == "weather":
        assert {"city", "days"} <= set(arguments) <= {"city", "days", "exact"}
        assert arguments["city"] in ("Oslo", "Rome")
        assert isinstance(arguments["days"], int)
    else:
        assert name == "clock"
