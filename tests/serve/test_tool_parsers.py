"""What models write as calls and reasoning, read into events, however the text is cut."""

import dataclasses
import json
import random

import pytest

from slipstream.serve.tools import harmony
from slipstream.serve.tools.events import Message
from slipstream.serve.tools.families import FAMILIES, reasoning_family, tool_family
from slipstream.serve.tools.form import AnswerForm
from slipstream.serve.tools.parser import Parser, Tool, Writer
from slipstream.serve.tools.reasoning import REASONING, going_on, opening, reasoned

WEATHER = Tool(
    "weather",
    parameters={
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "unit": {"type": ["string", "null"]}},
    },
)
TOOLS = (WEATHER, Tool("search"))
KIMI = "<|tool_call_begin|>functions.{}<|tool_call_argument_begin|>{}<|tool_call_end|>"
KIMI_SECTION = "<|tool_calls_section_begin|>{}<|tool_calls_section_end|>"
DEEPSEEK_SECTION = "<｜tool▁calls▁begin｜>{}<｜tool▁calls▁end｜>"

CALLS = [
    ("hermes", '<tool_call>\n{"name": "weather", "arguments": {"city": "}\\"<"}}\n</tool_call>', '{"city": "}\\"<"}'),
    ("hermes", '<tool_call>{"arguments": {"city": "Oslo"}, "name": "weather"}</tool_call>', '{"city": "Oslo"}'),
    ("hermes", '<tool_call>{"name": "weather"}</tool_call>', "{}"),
    ("llama3_json", '<|python_tag|>{"name": "weather", "parameters": {"days": 3}}', '{"days": 3}'),
    ("mistral", '[TOOL_CALLS] [{"name": "weather", "arguments": {"days": 3}}]', '{"days": 3}'),
    ("mistral", '[TOOL_CALLS]weather[ARGS]{"days": 3}', '{"days": 3}'),
    ("mistral", '[TOOL_CALLS]weather{"days": 3}', '{"days": 3}'),
    ("kimi_k2", KIMI_SECTION.format(KIMI.format("weather:0", '{"city": "北京"}')), '{"city": "北京"}'),
    ("kimi_k2", KIMI.format("weather:0", '{"city": "北京"}'), '{"city": "北京"}'),
    (
        "deepseek_v3",
        DEEPSEEK_SECTION.format(
            '<｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{"days": 3}\n```<｜tool▁call▁end｜>'
        ),
        '{"days": 3}',
    ),
    (
        "deepseek_v3",
        DEEPSEEK_SECTION.format('<｜tool▁call▁begin｜>weather<｜tool▁sep｜>{"days": 3}<｜tool▁call▁end｜>'),
        '{"days": 3}',
    ),
    (
        "minimax_m2",
        '<minimax:tool_call>\n<invoke name="weather">\n<parameter name="days">3</parameter>\n'
        '<parameter name="city">a "b"\n</parameter>\n<parameter name="unit">null</parameter>\n</invoke>\n'
        "</minimax:tool_call>",
        '{"days": 3, "city": "a \\"b\\"\\n", "unit": null}',
    ),
]
CALLS += [
    ("openai", f'<|channel|>commentary{to}{kind}<|message|>{{"days": 3}}<|call|>', '{"days": 3}')
    for to, kind in ((" to=functions.weather ", "<|constrain|>json"), (" to=weather", ""))
]
GLM_DAYS = "<tool_call>weather{0}<arg_key>days</arg_key>{0}<arg_value>3</arg_value>{0}"
CALLS += [
    (family, GLM_DAYS.format(gap) + f'<arg_key>city</arg_key>{gap}<arg_value>a "b" </arg_value>{gap}</tool_call>', read)
    for family, gap in (("glm45", "\n"), ("glm47", ""))
    for read in ('{"days": 3, "city": "a \\"b\\" "}',)
]
CALLS += [
    ("glm47", "<tool_call>weather</tool_call>", "{}"),
    ("glm45", "<tool_call>weather\n</tool_call>", "{}"),
    (
        "qwen3_coder",
        "<tool_call>\n<function=weather>\n<parameter=city>\na <b>\n\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
        "<parameter=unit>\nnull\n</parameter>\n</function>\n</tool_call>",
        '{"city": "a <b>\\n", "days": 3, "unit": null}',
    ),
    ("qwen3_coder", "<tool_call><function=weather><parameter=days>3</parameter></tool_call>", '{"days": 3}'),
    ("gemma4", "<|tool_call>call:weather{}<tool_call|>", "{}"),
    (
        "gemma4",
        '<|tool_call>call:weather{city:<|"|>a, {"b"}<|"|>,days:3,'
        'more:{list:[1.5,true,<|"|>x<|"|>,[]],<|"|>k<|"|>:null}}<tool_call|>',
        '{"city": "a, {\\"b\\"}", "days": 3, "more": {"list": [1.5, true, "x", []], "k": null}}',
    ),
    ("gemma4", "<|tool_call>call:weather{ city: 90210 , unit:null }<tool_call|>", '{"city": "90210", "unit": null}'),
]
CALLS.append(("openai", ' to=functions.weather<|channel|>commentary json<|message|>{"days": 3}', '{"days": 3}'))
NO_CALLS = [
    ("openai", "A message has a <|channel|>, and ends in an"),
    ("openai", "A message begins with <|start|>, or not."),
    ("hermes", "Write <tool_call> and then <tool_call>{}</tool_call>, like that."),
    ("hermes", '<tool_call>{"name": "weather", "arg'),
    ("llama3_json", '{"name": "no such tool", "parameters": {}}'),
    ("llama3_json", '{"answer": {"name": "weather"}} and {"name": "weather", "parameters": {}}'),
    ("mistral", "Mistral's models write [TOOL_CALLS] before their calls."),
    ("kimi_k2", "The section is <|tool_calls_section_begin|> and <|tool_call_begin|>."),
    ("deepseek_v3", "The marker is <｜tool▁calls▁begin｜>, then <｜tool▁call▁begin｜>."),
    ("minimax_m2", "A <minimax:tool_call> holds an <invoke>."),
    ("minimax_m2", '<minimax:tool_call><invoke name="two words"></invoke>.'),
    ("glm45", "Write <tool_call> and then <tool_call>weather, like that."),
    ("glm47", '<tool_call>{"name": "weather"}</tool_call>'),
    ("glm47", "<tool_call>wea"),
    ("qwen3_coder", "Write <tool_call>, <function=weather and <tool_call><function=two words>."),
    ("gemma4", "Write <|tool_call>call: or <|tool_call>call:weather and <tool_call|>."),
]


@pytest.mark.parametrize(("family", "text", "arguments"), CALLS)
def test_each_family_s_calls_are_read_from_its_own_syntax(family: str, text: str, arguments: str) -> None:
    message = whole(family, text)
    assert [(call.name, call.arguments) for call in message.calls] == [("weather", arguments)]
    assert message.content == ""


@pytest.mark.parametrize(("family", "text"), NO_CALLS)
def test_text_that_only_looks_like_a_call_is_left_as_it_is(family: str, text: str) -> None:
    message = whole(family, text)
    assert message.calls == ()
    assert message.content == text


@pytest.mark.parametrize("family", FAMILIES)
def test_however_an_answer_is_cut_its_events_joined_are_the_same(family: str) -> None:
    calls = [text for name, text, _ in CALLS if name == family]
    texts = [text for name, text in NO_CALLS if name == family]
    answers = [
        *calls,
        *texts,
        *("Let me look.\n\n" + call + "\n" + call for call in calls),
        *("<think>\nHm, <b>.\n\n</think>\n\n" + call + " So." for call in calls),
        "\n \n So it is.\n",
        *(call[:size] for call in calls for size in range(0, len(call), 7)),
    ]
    for number, text in enumerate(answers):
        expected = whole(family, text)
        for attempt in range(10):
            assert cut(family, text, random.Random(100 * number + attempt)) == expected


TYPED = [
    ("integer", "3", "3"),
    ("number", "3", "3"),
    ("number", "NaN", '"NaN"'),
    ("number", "1e999", '"1e999"'),
    ("boolean", "True", "true"),
    ("array", '[1, "a"]', '[1, "a"]'),
    ("object", '{"a": null}', '{"a": null}'),
    ("object", "[" * 20_000, json.dumps("[" * 20_000)),
    ("string", "3", '"3"'),
    (["string", "null"], "null", "null"),
    (["string", "integer"], "3", "3"),
    (["string", "integer"], "three", '"three"'),
]


@pytest.mark.parametrize(("kind", "text", "expected"), TYPED)
@pytest.mark.parametrize(
    ("family", "answer"),
    [
        ("glm47", "<tool_call>f<arg_key>a</arg_key><arg_value>%s</arg_value></tool_call>"),
        ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=a>\n%s\n</parameter>\n</function>\n</tool_call>"),
        ("minimax_m2", '<minimax:tool_call><invoke name="f"><parameter name="a">%s</parameter></invoke>'),
    ],
)
def test_a_parameter_s_schema_tells_the_type_of_its_value(kind, text, expected, family, answer) -> None:
    tools = (Tool("f", parameters={"properties": {"a": {"$ref": "#/$defs/A"}}, "$defs": {"A": {"type": kind}}}),)
    (call,) = joined(Parser(FAMILIES[family].syntax, Writer(lambda _, i: str(i), tools)), [answer % text]).calls
    assert call.arguments == f'{{"a": {expected}}}'


@pytest.mark.parametrize(
    ("family", "answer", "told"),
    [
        ("glm47", "<tool_call>weather<arg_key>city</arg_key><arg_value>Os", '{"city": "Os'),
        ("qwen3_coder", "<tool_call><function=weather><parameter=city>\nOs\n</para", '{"city": "Os'),
        ("gemma4", '<|tool_call>call:weather{city:<|"|>Oslo<|"|>,days:1', '{"city": "Oslo"'),
        ("gemma4", '<|tool_call>call:weather{more:{list:[1,<|"|>a<|', '{"more": {"list": [1, "a'),
        ("gemma4", "<|tool_call>call:weather{more:[}<tool_call|>", '{"more": ['),
        ("gemma4", "<|tool_call>call:weather{" + "a:{" * 20_000, "{" + '"a": {' * 20_000),
    ],
)
def test_a_call_that_is_cut_off_is_told_of_as_far_as_it_came(family: str, answer: str, told: str) -> None:
    (call,) = whole(family, answer).calls
    assert call.arguments == told


def test_qwen_s_calls_may_lack_their_section_s_beginning_if_the_tool_is_known_and_not_strict() -> None:
    bare = "So:\n\n<function=%s>\n<parameter=city>\nOslo\n</parameter>\n</function>\n</tool_call>"
    tools = (*TOOLS, Tool("sure", strict=True))
    for name, num_calls in (("weather", 1), ("sure", 0), ("unknown", 0)):
        parser = Parser(FAMILIES["qwen3_coder"].syntax, Writer(lambda _, i: str(i), tools))
        message = joined(parser, list(bare % name))
        assert [call.arguments for call in message.calls] == ['{"city": "Oslo"}'] * num_calls
        assert message.content == ("So:" if num_calls else bare % name)
    parser = Parser(FAMILIES["qwen3_coder"].syntax, Writer(lambda _, i: str(i), tools))
    unended = (bare % "weather").removesuffix("</tool_call>")
    message = joined(parser, [unended + (bare % "sure").removeprefix("So:")])
    assert [call.name for call in message.calls] == ["weather"]


def test_calls_follow_one_another_with_text_around_them() -> None:
    for family in ("minimax_m2", "glm45", "glm47", "qwen3_coder", "gemma4"):
        calls = [text for name, text, _ in CALLS if name == family]
        message = whole(family, "First.\n" + "\n".join(calls) + " And then." + "".join(calls))
        assert len(message.calls) == 2 * len(calls)
        assert message.content == "First. And then."


def test_white_space_before_a_call_belongs_to_the_syntax() -> None:
    message = whole("hermes", "I look it up.\n\n" + CALLS[1][1] + "\n" + CALLS[1][1])
    assert message.content == "I look it up."
    assert len(message.calls) == 2


def test_without_parallel_calls_only_the_first_is_told_of() -> None:
    parser = Parser(FAMILIES["hermes"].syntax, Writer(lambda _, i: str(i), TOOLS, max_calls=1))
    message = joined(parser, [2 * CALLS[0][1]])
    assert len(message.calls) == 1


def test_a_marker_that_is_a_special_token_is_text_when_it_is_only_spelled() -> None:
    family = FAMILIES["kimi_k2"]
    spelled = KIMI_SECTION.format(KIMI.format("weather:0", "{}"))
    tokens = spelled
    for marker in family.markers:
        tokens = tokens.replace(marker, "\ufdd0" + marker)
    writer = [Writer(lambda _, i: str(i), TOOLS, tokens=family.markers) for _ in range(2)]
    assert joined(Parser(family.syntax, writer[0]), [spelled]).content == spelled
    message = joined(Parser(family.syntax, writer[1]), [tokens])
    assert [call.name for call in message.calls] == ["weather"]
    assert message.content == ""


def test_reasoning_ends_at_its_marker_or_where_kimi_s_calls_begin() -> None:
    call = KIMI_SECTION.format(KIMI.format("weather:0", "{}"))
    for ending in ("</think>", ""):
        parser = Parser(reasoned(REASONING["kimi_k2"], True, FAMILIES["kimi_k2"].syntax), Writer(lambda _, i: str(i)))
        message = joined(parser, list("I should look." + ending + call))
        assert message.reasoning == "I should look."
        assert [one.name for one in message.calls] == ["weather"]


@pytest.mark.parametrize("as_tokens", [True, False])
@pytest.mark.parametrize("ending", ["\n<channel|>", "\n<|tool_call>call:search{}<tool_call|>", ""])
def test_gemma_s_thoughts_lie_on_their_channel(ending: str, as_tokens: bool) -> None:
    answer = "<|channel>thought\nA <b>." + ending
    markers = {*FAMILIES["gemma4"].markers, *REASONING["gemma4"].markers}
    for marker in markers if as_tokens else ():
        answer = answer.replace(marker, "\ufdd0" + marker)
    form = AnswerForm(FAMILIES["gemma4"], REASONING["gemma4"], tokens=dict.fromkeys(markers if as_tokens else (), 0))
    for pieces in ([answer], list(answer)):
        message = joined(form.parser(), pieces)
        assert (message.reasoning, message.content) == ("A <b>.", "")
        assert len(message.calls) == ending.count("call:")


ANALYSIS = "<|channel|>analysis<|message|>I should look.<|end|>"
PREAMBLE = "<|start|>assistant<|channel|>commentary<|message|>Let me see.<|end|>"
CALLED = '<|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"days": 3}'
FINAL = "<|start|>assistant<|channel|>final<|message|>It is 3 < 4.\n"


@pytest.mark.parametrize("as_tokens", [True, False])
@pytest.mark.parametrize(
    ("answer", "reasoning", "content", "calls"),
    [
        (ANALYSIS + FINAL, "I should look.", "It is 3 < 4.\n", 0),
        (ANALYSIS + PREAMBLE + CALLED, "I should look.", "Let me see.", 1),
        (ANALYSIS + ANALYSIS + FINAL + "<|return|>", "I should look.\nI should look.", "It is 3 < 4.\n", 0),
        (PREAMBLE + FINAL + "<|return|>", "", "Let me see.\nIt is 3 < 4.\n", 0),
        (ANALYSIS + "<|start|>assistant to=functions.weather<|channel|>commentary", "I should look.", "", 0),
        (" to=functions.weather<|channel|>comm", "", "", 0),
        (ANALYSIS[:-9], "I should loo", "", 0),
        ("No header at all.", "", "No header at all.", 0),
    ],
)
def test_gpt_oss_s_channels_are_reasoning_text_and_calls(as_tokens, answer, reasoning, content, calls) -> None:
    tokens = dict.fromkeys(harmony.MARKERS, 0) if as_tokens else {}
    for marker in tokens:
        answer = answer.replace(marker, "\ufdd0" + marker)
    if not as_tokens and answer.endswith(("commentary", "comm")):
        content = answer.removeprefix(ANALYSIS)  # letters that are no header
    form = AnswerForm(FAMILIES["openai"], REASONING["openai_gptoss"], tools=TOOLS, tokens=tokens, channels=True)
    for pieces in ([answer], list(answer)):
        message = joined(form.parser(), pieces)
        assert (message.reasoning, message.content) == (reasoning, content)
        assert [(call.name, call.arguments) for call in message.calls] == [("weather", '{"days": 3}')] * calls
    plain = dataclasses.replace(form, family=None, reasoning=None)
    message = joined(plain.parser(), list(answer))
    assert message.reasoning == "" and message.calls == ()
    assert message.content.replace("\n", "").startswith((reasoning + content).replace("\n", ""))


def test_the_prompt_s_end_says_whether_an_answer_begins_inside_the_reasoning() -> None:
    assert opening("...<|im_start|>assistant\n<think>\n", REASONING["qwen3"]) == "inside"
    assert opening("...<|im_start|>assistant\n<think>\n\n</think>\n\n", REASONING["deepseek_r1"]) == "outside"
    assert opening("...<|im_start|>assistant\n", REASONING["deepseek_r1"]) == "inside"
    assert opening("...<|im_start|>assistant\n", REASONING["qwen3"]) == "either"
    gemma4 = REASONING["gemma4"]
    assert opening("...<turn|>\n<|turn>model\n", gemma4) == "either"
    assert opening("...<tool_response|><|channel>thought\n", gemma4) == "inside"
    assert opening("...<|turn>model\n<|channel>thought\n<channel|>", gemma4) == "outside"
    assert going_on("<|channel>thought\nSo", gemma4) == "inside"
    gpt_oss = REASONING["openai_gptoss"]
    assert opening("...<|end|><|start|>assistant", gpt_oss) == "either"
    assert opening("...<|start|>assistant<|channel|>analysis<|message|>", gpt_oss) == "inside"
    assert opening("...<|start|>assistant<|channel|>final<|message|>", gpt_oss) == "outside"


def test_families_are_known_by_what_their_templates_write() -> None:
    assert tool_family(None, "{{ tools }}<tool_call>") is FAMILIES["hermes"]
    assert tool_family(None, "{{ tools }}<tool_call><function=") is FAMILIES["qwen3_coder"]
    assert tool_family("qwen3_xml", None) is FAMILIES["qwen3_coder"]
    assert tool_family(None, "{{ tools }}<tool_call><arg_key>k</arg_key>\n<arg_value>") is FAMILIES["glm45"]
    assert tool_family(None, "{{ tools }}<tool_call><arg_key>k</arg_key><arg_value>") is FAMILIES["glm47"]
    assert reasoning_family(None, "<think><arg_key>") is reasoning_family("glm47", None) is REASONING["glm45"]
    assert tool_family(None, "{{ tools }}<|tool_call>call:name{}<tool_call|><|channel>") is FAMILIES["gemma4"]
    assert reasoning_family(None, "<|channel>thought\n<channel|>") is REASONING["gemma4"]
    assert tool_family(None, "{{ tools }}<｜DSML｜function_calls>") is None  # DeepSeek-V3.2
    assert tool_family(None, "{{ messages }}") is FAMILIES["hermes"]
    assert tool_family(None, "{{ tools }}[TOOL_CALLS]") is FAMILIES["mistral"]
    assert tool_family(None, "{{ tools }}<|start|>assistant<|channel|>final") is FAMILIES["openai"]
    assert tool_family("gpt-oss", None) is FAMILIES["openai"]
    assert reasoning_family(None, "<|start|>assistant<|channel|>final") is REASONING["openai_gptoss"]
    assert tool_family("none", "{{ tools }}<tool_call>") is None
    assert reasoning_family(None, "<|tool_call_begin|><think>") is REASONING["kimi_k2"]
    assert reasoning_family(None, "{{ messages }}") is None


def whole(family: str, text: str) -> Message:
    """Return an answer that arrives at once."""
    return joined(_parser(family), [text])


def cut(family: str, text: str, chance: random.Random) -> Message:
    """Return an answer that arrives in pieces."""
    pieces = []
    while text:
        size = chance.randint(1, 9)
        pieces.append(text[:size])
        text = text[size:]
    return joined(_parser(family), pieces)


def joined(parser: Parser, pieces: list[str]) -> Message:
    """Return what a parser makes of pieces of an answer."""
    message = Message()
    for event in [*(event for piece in pieces for event in parser.feed(piece)), *parser.finish()]:
        message.add(event)
    return message


def _parser(family: str) -> Parser:
    syntax = reasoned(REASONING["qwen3"], False, FAMILIES[family].syntax)
    return Parser(syntax, Writer(lambda _, index: str(index), TOOLS))
