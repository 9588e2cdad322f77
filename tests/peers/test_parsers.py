"""Parsers against vLLM's and SGLang's own on generated answers (opt in: pytest -m interop).

Both have two parsers to each family: one for whole answers and one for streams. Where those agree, ours does too.
"""

import dataclasses
import json
import random
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tests.peers.harmony_vocabulary import vocabulary_folder
from tests.peers.suites import SUITES
from tests.peers.transcripts import Transcript, channel_transcript, transcript, typed_transcript
from tests.serve.interop import run_client

from slipstream.serve.tools import harmony
from slipstream.serve.tools.events import Message
from slipstream.serve.tools.families import FAMILIES
from slipstream.serve.tools.form import AnswerForm
from slipstream.serve.tools.protocol import tool_of
from slipstream.serve.tools.reader import TOKEN_MARK
from slipstream.serve.tools.reasoning import END, REASONING, START

HERE = Path(__file__).resolve().parent
COUNT = 10_000
CHANNEL_COUNT = 2_000
TYPED_COUNT = 4_000
PARSERS = {
    "vllm": {"mistral_v11": "mistral"},
    "sglang": {
        "mistral_v11": "mistral", "llama3_json": "llama3", "deepseek_v3": "deepseekv3", "deepseek_v31": "deepseekv31",
        "minimax_m2": "minimax-m2",
    },
}  # fmt: skip
REASONERS = {"vllm": {}, "sglang": {"deepseek_r1": "deepseek-r1", "minimax_m2": "minimax"}}

WORDS = "numbers and null inside an object of Gemma 4's that no schema describes: others read text, ours JSON"

Json = dict[str, Any]


@pytest.mark.interop
def test_parsers_agree_with_vllm_s_and_sglang_s_but_for_differences_that_are_explained(capsys):
    compare([transcript(seed) for seed in range(COUNT)], capsys)


@pytest.mark.interop
def test_gpt_oss_s_channels_are_read_as_openai_harmony_reads_them_in_vllm_and_as_sglang_does(capsys):
    cases = [channel_transcript(seed) for seed in range(CHANNEL_COUNT)]
    compare(cases, capsys, TIKTOKEN_ENCODINGS_BASE=str(vocabulary_folder()))


@pytest.mark.interop
def test_values_that_a_schema_types_are_read_as_vllm_and_sglang_do_but_for_what_is_explained(capsys):
    compare([typed_transcript(seed) for seed in range(TYPED_COUNT)], capsys)


def compare(cases: list[Transcript], capsys: Any, **environment: str) -> None:
    """Compare all readings of transcripts, print how often they differ and why, and fail for want of a reason."""
    theirs = {who: answers_of(who, cases, **environment) for who in PARSERS}
    explained: Counter[str] = Counter()
    unexplained = []
    for number, case in enumerate(cases):
        our = ours(case, ["".join(step) for step in marked(case)])
        found = {f"{who} {how}": theirs[who][number].get(how) for who in PARSERS for how in ("whole", "stream")}
        for place, their in found.items():
            reason = explanation(case, our, place, found)
            if reason is None and case.family == "gemma4":
                as_text = {key: in_words(their) for key, their in found.items()}
                reason = explanation(case, in_words(our) or our, place, as_text) and WORDS
            explained[reason or "unexplained"] += 1
            if reason is None:
                unexplained.append((case.family, case.shape, place, case.text, our, their))
    with capsys.disabled():
        sys.stdout.write("".join(f"\n{count:6d} {reason}" for reason, count in explained.most_common()) + "\n")
    assert unexplained == []


@pytest.mark.interop
def test_however_a_transcript_is_cut_ours_reads_the_same():
    chance = random.Random(0)
    for seed in range(COUNT):
        case = (channel_transcript, typed_transcript, transcript, transcript, transcript)[seed % 5](seed)
        whole = ours(case, [case.text], tokens=False)
        cuts = sorted(chance.randrange(len(case.text) + 1) for _ in range(chance.randint(0, len(case.text))))
        pieces = [case.text[start:end] for start, end in zip([0, *cuts], [*cuts, len(case.text)], strict=True)]
        assert ours(case, pieces, tokens=False) == whole


def explanation(case: Transcript, our: Json, place: str, found: dict[str, Json | None]) -> str | None:
    """Return why one of their results is what it is beside ours; None if there is no good reason."""
    their, who = found[place], place.split()[0]
    whole = found[f"{who} whole"]
    if same(our, their):
        return "the same"
    if place.endswith("stream") and same(our, whole):
        return f"{who}'s stream is not its own whole answer, which ours is"
    if case.kind == "channels":
        return of_channels(case, our, place, whole=found["vllm whole"])
    if case.kind == "reasoning":
        guessed = ours(case, [case.text], tokens=False, inside=not opens(case))
        if same(guessed, their) or (place.endswith("stream") and same(guessed, whole)):
            return f"{who} guesses otherwise whether an answer without <think> begins inside it; we look at the prompt"
        shown = whole if place.endswith("stream") else their
        if shown is not None and same(our, shown | {"content": shown["content"].replace(END, "", 1)}):
            return f"{who} shows a </think> that nothing opened as text"
        return None
    if who == "vllm" and their is not None and any(name.strip().startswith("[") for name, _ in their["calls"]):
        return "vLLM reads the lists that older Mistrals write as a function named [; SGLang is followed"
    if case.family == "llama3_json" and case.shape.endswith(("calls", "cut off")) and place == "vllm whole":
        if same(our, found["vllm stream"]) and their is not None and from_the_first_brace(case, their):
            return "vLLM's whole answers look for calls inside text; its streams and SGLang do not, and are followed"
        return None
    if case.shape != "cut off" or their is None or whole is None:
        return None
    brackets = who == "sglang" and case.family.startswith("mistral")  # which its streams leave out of all text
    if cut_off_alike(case, our, their):
        return "cut off: the last call is told of as far as it came; others drop it, close it, or give text back"
    lost = beside_markers(case)
    if place.endswith("stream") and cut_off_alike(case, our, whole) and cut_off_alike(case, our, their, lost, brackets):
        return f"cut off: {who}'s stream lost letters that came with a marker, or brackets; ours has them"
    return None


def in_words(result: Json | None) -> Json | None:
    """Return a result whose calls have texts in place of numbers and null."""

    def text_of(value: Any) -> Any:  # any JSON value
        if isinstance(value, dict):
            return {key: text_of(one) for key, one in value.items()}
        if isinstance(value, list):
            return [text_of(one) for one in value]
        return value if isinstance(value, str) else json.dumps(value)

    calls = [(name, _value(arguments)) for name, arguments in (result or {}).get("calls", [])]
    told = [[name, value if isinstance(value, str) else json.dumps(text_of(value))] for name, value in calls]
    return None if result is None else result | {"calls": told}


def of_channels(case: Transcript, our: Json, place: str, whole: Json | None) -> str | None:
    """Return why a reading of gpt-oss's channels is what it is beside ours; vLLM's `whole` is openai-harmony's."""
    head = case.text.rpartition(harmony.END)[2]
    is_cut = case.shape == "cut off" and harmony.MESSAGE not in head
    without_head = whole and whole | {"content": whole["content"].removesuffix(head if is_cut else "")}
    if place.startswith("sglang") and (same(our, whole) or same(our, without_head)):
        return "sglang reads otherwise than openai-harmony, whose parser vLLM uses and ours follows"
    return "cut off in a message's head, which vLLM gives back as text" if same(our, without_head) else None


def from_the_first_brace(case: Transcript, their: Json) -> bool:
    """Tell whether a reading drops a text and takes what follows it for the whole answer."""
    alone = dataclasses.replace(case, text=case.text[case.text.index('{"name"') :])
    return same(their, ours(alone, [alone.text], tokens=False) | {"content": ""})


def cut_off_alike(case: Transcript, our: Json, their: Json, lost: int = 0, brackets: bool = False) -> bool:
    """Tell whether two readings of an answer that was cut off differ in its last call only.

    Args:
        lost: how many letters may be missing at the end of the text and of a call.
        brackets: whether closing ones may be missing everywhere.
    """
    if not gives_back(case, their["content"], lost, brackets):
        return False
    num_told = len(their["calls"])
    rest_is_text = all(name in their["content"] for name, _ in our["calls"][num_told:])
    return calls_alike(our["calls"], their["calls"], lost) or (
        (rest_is_text or num_told == 0) and normal(our)["calls"][:num_told] == normal(their)["calls"]
    )


def gives_back(case: Transcript, content: str, lost: int, brackets: bool) -> bool:
    """Tell whether a reading's text is what stands before the calls, and some of the answer's end; space aside."""
    markers = FAMILIES[case.family].markers
    cut = next((n for n in range(30, 0, -1) for m in markers if n < len(m) and case.text.endswith(m[:n])), 0)
    found = [at for marker in markers if (at := case.text.find(marker)) >= 0]
    before = case.text[: min(found, default=len(case.text) - cut)]

    def plain(text: str) -> str:
        for marker in markers:
            text = text.replace(marker, "")
        text = "".join(text.split())
        return text.replace("]", "") if brackets else text

    begin, whole, given = plain(before), plain(case.text), plain(content)
    return any(
        given.startswith(begin[:length]) and whole.endswith(given[length:])
        for length in range(max(0, len(begin) - lost), len(begin) + 1)
    )


def calls_alike(our: list[list[str]], their: list[list[str]], lost: int) -> bool:
    """Tell whether two lists of calls are the same up to the last, which one of them may lack."""
    told = list(their)
    for own in our[:-1]:
        if told and call_alike(own, told[0], lost):
            told.pop(0)
        elif len(own[1]) > lost:
            return False
    return len(told) < 2 or (len(told) == 2 and bool(our) and call_alike(our[-1], told[0], lost))


def call_alike(own: list[str], told: list[str], lost: int) -> bool:
    """Tell whether two calls are the same, but for so many letters at the end."""
    is_beginning = own[1].startswith(told[1]) and len(own[1]) - len(told[1]) <= lost
    return own[0] == told[0] and (is_beginning or _value(own[1]) == _value(told[1]))


def beside_markers(case: Transcript) -> int:
    """Return the most letters that a step with a marker has."""
    markers = set(FAMILIES[case.family].markers)
    return max((len("".join(step)) for step in case.steps if not markers.isdisjoint(step)), default=0)


def opens(case: Transcript) -> bool:
    """Tell whether ours takes an answer for one that begins inside its reasoning, without a prompt to look at."""
    return REASONING[case.family].opens


def ours(case: Transcript, pieces: list[str], tokens: bool = True, inside: bool | None = None) -> Json:
    """Return what our parser makes of an answer."""
    if case.kind != "reasoning":
        family = FAMILIES[case.family]
        tools = tuple(tool_of(tool, place) for place, tool in enumerate(case.tools))
        ids = dict.fromkeys(family.markers, 0) if tokens else {}
        reasoning = REASONING["openai_gptoss"] if family.channels else None
        form = AnswerForm(family, reasoning, tools=tools, tokens=ids, channels=family.channels)
    else:
        ids = dict.fromkeys((START, END), 0) if tokens else {}
        form = AnswerForm(None, REASONING[case.family], opens(case) if inside is None else inside, tokens=ids)
    parser, message = form.parser(), Message()
    for event in [*(event for piece in pieces for event in parser.feed(piece)), *parser.finish()]:
        message.add(event)
    read = {"content": message.content, "calls": [[call.name, call.arguments] for call in message.calls]}
    thoughts = {"reasoning": message.reasoning}
    return {"tools": read, "channels": read | thoughts, "reasoning": thoughts | {"content": message.content}}[case.kind]


def marked(case: Transcript) -> list[list[str]]:
    """Return a transcript's steps with markers marked as the tokens they are."""
    markers = (START, END) if case.kind == "reasoning" else FAMILIES[case.family].markers
    return [[TOKEN_MARK + piece if piece in markers else piece for piece in step] for step in case.steps]


def same(one: Json | None, other: Json | None) -> bool:
    """Tell whether two results say the same: JSON by value, and white space at a text's ends aside."""
    return one is not None and other is not None and normal(one) == normal(other)


def normal(result: Json) -> Json:
    """Return a result in the form it is compared in."""
    texts = {key: value.strip() for key, value in result.items() if isinstance(value, str)}
    return texts | {"calls": [[name, _value(arguments)] for name, arguments in result.get("calls", [])]}


def _value(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return text


def answers_of(who: str, cases: list[Transcript], **environment: str) -> list[Json]:
    """Return what another project's parsers make of the transcripts."""
    names = {"reasoning": REASONERS[who]}
    lines = [
        json.dumps(case.for_parser(names.get(case.kind, PARSERS[who]).get(case.family, case.family))) for case in cases
    ]
    script = str(HERE / "parse_answers.py")
    said = run_client(
        SUITES[who].client, ["-P", script, who, str(_written(lines))], PYTHONPATH=str(HERE), **environment
    )
    results = [json.loads(line[1:]) for line in said.splitlines() if line.startswith("#{")]
    assert len(results) == len(cases)
    return results


def _written(lines: list[str]) -> Path:
    from slipstream.checkpoint.cache_dir import default_cache_dir

    path = default_cache_dir() / "interop" / "transcripts.jsonl"
    path.write_text("\n".join(lines))
    return path
