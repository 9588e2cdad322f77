"""The Python interface: one prompt or many, keywords, streams side by side, and sentences for what cannot be meant."""

import asyncio
import dataclasses
import itertools
import subprocess
import sys
from contextlib import aclosing
from typing import get_type_hints

import pytest

from slipstream import LLM, AsyncLLM, Completion, SamplingParams, TreeShape
from slipstream.engine.config import EngineConfig
from slipstream.engine.loading import LoadOptions
from slipstream.engine.request import FinishReason
from slipstream.engine.settings import Sampling, Settings
from slipstream.errors import ConfigError, RequestError, StepError
from slipstream.models.topology import Topology
from training import write_target_folder

CHAT = [{"role": "user", "content": "Hello"}]
LONG = {"max_tokens": 40, "ignore_eos": True}


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return write_target_folder(tmp_path_factory.mktemp("llm") / "target")


@pytest.fixture(scope="module")
def llm(target):
    with LLM(target, "ngram", device="cpu", max_context=256) as made:
        yield made


@pytest.fixture(scope="module")
def llm_async(target):
    made = AsyncLLM(target, "ngram", device="cpu", max_context=256)
    yield made
    asyncio.run(made.close())


def test_importing_the_package_loads_no_torch_and_lists_its_names():
    code = "import sys, slipstream; print('torch' in sys.modules, *dir(slipstream))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded, *names = done.stdout.split()
    assert loaded == "False"
    assert {"LLM", "AsyncLLM", "SamplingParams", "TreeShape"} <= set(names)


def test_one_prompt_gives_one_completion_and_a_list_gives_a_list(llm):
    alone = llm.generate("hello there", max_tokens=4)
    assert isinstance(alone, Completion)
    assert str(alone) == alone.text and len(alone.token_ids) <= 4
    together = llm.generate(["hello there", "and you?"], max_tokens=4)
    assert [answer.text for answer in together] == [alone.text, llm.generate("and you?", max_tokens=4).text]
    assert llm.generate([]) == []


def test_text_token_ids_and_messages_may_be_asked_side_by_side(llm):
    ids = llm.encode("hello there")
    answers = llm.generate(["hello there", ids, CHAT], max_tokens=4)
    assert answers[0].token_ids == answers[1].token_ids == llm.generate(ids, max_tokens=4).token_ids
    assert answers[2].text == llm.chat(CHAT, max_tokens=4).text == llm.generate(CHAT, max_tokens=4).text


def test_sampling_is_given_as_keywords_or_whole_and_speculation_changes_nothing(llm):
    params = SamplingParams(max_tokens=12, temperature=0.8, seed=3)
    whole = llm.chat(CHAT, params)
    assert whole.seed == 3
    assert llm.chat(CHAT, max_tokens=12, temperature=0.8, seed=3).token_ids == whole.token_ids
    plain = llm.chat(CHAT, params, speculate=False)
    assert plain.token_ids == whole.token_ids and plain.stats.drafted == 0


def test_several_answers_to_a_prompt_stand_side_by_side(llm):
    answers = llm.generate(["hello", "you"], n=2, temperature=1.0, seed=1, max_tokens=4)
    assert [len(answer.prompt_tokens) for answer in answers] == [
        len(llm.encode(prompt)) for prompt in ("hello", "hello", "you", "you")
    ]


def test_stop_may_be_one_string(llm):
    whole = llm.generate("hello", **LONG).text
    stop = whole[10:13]
    assert llm.generate("hello", stop=stop, **LONG).text == whole.partition(stop)[0]


def test_streams_that_are_open_together_each_get_all_of_their_own(llm):
    prompts = ["hello there", "and you?", "a third one"]
    expected = [llm.generate(prompt, **LONG).text for prompt in prompts]
    streams = [llm.stream(prompt, **LONG) for prompt in prompts]
    pieces = list(itertools.zip_longest(*streams))
    assert ["".join(piece.text for piece in column if piece) for column in zip(*pieces, strict=True)] == expected


def test_a_stream_that_is_closed_or_never_begun_leaves_nothing_in_the_engine(llm):
    stream = llm.stream("hello", **LONG)
    next(stream)
    assert llm.engine.has_work
    stream.close()
    llm.stream("never begun", **LONG)
    assert not llm.engine.has_work


def test_a_list_with_a_prompt_that_cannot_run_runs_none_of_it(llm):
    with pytest.raises(RequestError, match=r"Prompt 2 of 2: The prompt has \d+ tokens; the context holds 256"):
        llm.generate(["hello", "x" * 900])
    assert not llm.engine.has_work


@pytest.mark.parametrize(
    ("ask", "words"),
    [
        (lambda llm: llm.generate(""), "prompt is empty"),
        (lambda llm: llm.generate(["fine", ""]), "Prompt 2 of 2: The prompt is empty"),
        (lambda llm: llm.generate([[]]), "prompt is empty"),
        (lambda llm: llm.generate(5), "A prompt is a int"),
        (lambda llm: llm.generate(b"bytes"), "A prompt is a bytes"),
        (lambda llm: llm.generate(CHAT[0]), "list of messages"),
        (lambda llm: llm.generate([1, "two"]), "holds 'two'"),
        (lambda llm: llm.generate([{"role": "user"}]), "has no text as its content"),
        (lambda llm: llm.generate("hello", n=2), r"generate\(\[prompt\], n=2\)"),
        (lambda llm: llm.generate("hello", {"temperature": 1}), "give a SamplingParams"),
        (lambda llm: llm.generate("hello", SamplingParams(), temperature=1), "one or the other"),
        (lambda llm: llm.generate("hello", temprature=1), "did you mean temperature"),
        (lambda llm: llm.generate("hello", temperature="hot"), r"temperature is 'hot' \(str\); it is a number"),
        (lambda llm: llm.generate("hello", max_tokens=2.5), "max_tokens is 2.5"),
        (lambda llm: llm.generate("hello", speculate="no"), "speculate is 'no'"),
        (lambda llm: llm.chat("hello"), "list of messages"),
        (lambda llm: llm.chat([]), "list of messages"),
        (lambda llm: llm.stream(["one", "two"]), "Several prompts"),
        (lambda llm: llm.stream("hello", n=2), "n is 2"),
        (lambda llm: SamplingParams(stop="word"), "stop is one string"),
        (lambda llm: SamplingParams(temperature="hot"), "temperature is 'hot'"),
        (lambda llm: SamplingParams(stop=None), "stop is None; it holds texts"),
        (lambda llm: llm.generate("hello", stop=[5]), r"stop is \(5,\); it holds texts"),
        (lambda llm: llm.generate("hello", stop_token_ids=["a"]), "it holds token ids"),
        (lambda llm: llm.generate("hello", logit_bias={"a": 1}), "it holds biases by token id"),
        (lambda llm: llm.generate("hello", logit_bias={1: "a"}), "logit_bias for token 1 is 'a'"),
    ],
)
def test_a_request_that_cannot_be_meant_is_answered_with_a_sentence(llm, ask, words):
    with pytest.raises(RequestError, match=words):
        ask(llm)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: LLM(max_contxt=10), "has no setting 'max_contxt'; did you mean max_context"),
        (lambda: LLM(max_context="4k"), r"max_context is '4k' \(str\); it is a whole number or None"),
        (lambda: LLM(max_requests=0), "max_requests is 0; it must be at least 1"),
        (lambda: LLM(cuda_graphs="often"), "'auto' or 'on' or 'off'"),
        (lambda: LLM(5), r"model is 5 \(int\)"),
        (lambda: LLM(draft=5), r"draft is 5 \(int\)"),
        (lambda: LLM(tree=5), r"TreeShape\(depth=5"),
        (lambda: LLM(LoadOptions(), "ngram"), "LoadOptions names everything"),
        (lambda: LLM(device="tpu"), "device is 'tpu'"),
    ],
)
def test_settings_that_cannot_be_are_refused_before_a_model_is_looked_for(monkeypatch, make, words):
    monkeypatch.setattr("slipstream.checkpoint.hub.embedded_model", lambda progress: pytest.fail("it was fetched"))
    with pytest.raises(ConfigError, match=words):
        make()


def test_settings_reach_the_engine(target):
    with LLM(target, None, tree=TreeShape(depth=2), device="cpu", max_requests=3, max_context=64, page_size=8) as made:
        config = made.engine.config
    assert (config.max_requests, config.max_context, config.page_size) == (3, 64, 8)
    with pytest.raises(RequestError, match="closed"):
        made.generate("hello")


def test_keywords_are_the_fields_of_the_dataclasses_they_become():
    named = {"model", "draft", "tree", "device", "engine", "topology", "hosts"}
    for keywords, owners, without in (
        (Settings, (LoadOptions, EngineConfig, Topology), named),
        (Sampling, (SamplingParams,), set()),
    ):
        fields = {f.name for owner in owners for f in dataclasses.fields(owner)}
        assert set(get_type_hints(keywords)) == fields - without


@pytest.mark.parametrize(("model", "draft"), [("embedded", "auto"), ("auto", "embedded")])
def test_auto_and_embedded_name_the_same_model_and_draft(model, draft):
    options = LoadOptions(model, draft)
    assert (options.model, options.draft) == ("embedded", "auto")


def test_calls_at_once_share_one_engine_and_give_what_each_gives_alone(llm, llm_async):
    prompts = ["hello there", "and you?", "a third one", "the last"]

    async def ask():
        async def streamed(prompt):
            return "".join([piece.text async for piece in llm_async.stream(prompt, **LONG)])

        listed = llm_async.generate(prompts, **LONG)
        return await asyncio.gather(listed, llm_async.chat(CHAT, **LONG), *map(streamed, prompts))

    listed, chat, *streamed = asyncio.run(ask())
    expected = [llm.generate(prompt, **LONG).text for prompt in prompts]
    assert [answer.text for answer in listed] == streamed == expected
    assert chat.text == llm.chat(CHAT, **LONG).text


def test_an_iterator_closed_and_a_call_cancelled_end_their_requests(llm_async):
    engine = llm_async._loaded.engine

    async def leave():
        async with aclosing(llm_async.stream("hello", max_tokens=200, ignore_eos=True)) as pieces:
            async for _ in pieces:
                break
        call = asyncio.create_task(llm_async.generate("hello", max_tokens=200, ignore_eos=True))
        await anext(aiter(llm_async.stream("another", max_tokens=1)))
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await llm_async.generate("the next one", max_tokens=1)  # commands run in order, so the aborts came before

    asyncio.run(leave())
    assert not engine.has_work


def test_errors_reach_the_caller_who_made_them_and_no_other(llm_async):
    async def ask():
        with pytest.raises(RequestError, match="prompt is empty"):
            await llm_async.generate("")
        with pytest.raises(RequestError, match="did you mean temperature"):
            llm_async.stream("hello", temprature=1)
        good, bad = await asyncio.gather(
            llm_async.generate("hello", max_tokens=3), llm_async.generate("x" * 900), return_exceptions=True
        )
        assert good.finish_reason in (FinishReason.LENGTH, FinishReason.STOP)
        assert isinstance(bad, RequestError)

    asyncio.run(ask())


def test_a_failed_step_is_raised_at_its_callers_and_the_next_call_is_answered(llm_async, monkeypatch):
    engine = llm_async._loaded.engine

    async def ask():
        with monkeypatch.context() as broken:
            broken.setattr(engine.executor, "submit", lambda step: 1 / 0)
            with pytest.raises(StepError, match="division by zero"):
                await llm_async.generate("hello", max_tokens=3)
        assert (await llm_async.generate("hello", max_tokens=3)).text is not None

    asyncio.run(ask())


class BrokenGrammar:
    """A grammar whose answers cannot begin, or cannot go on."""

    def __init__(self, breaks_at):
        self.breaks_at, self.finished = breaks_at, False

    def start(self):
        if self.breaks_at == "start":
            raise ValueError("it cannot begin")
        return self

    def allowed(self, path):
        raise ValueError("it cannot go on")

    def advance(self, tokens):
        pass


@pytest.mark.parametrize(("breaks_at", "words"), [("start", "cannot begin"), ("allowed", "cannot go on")])
def test_what_fails_one_answer_is_raised_at_its_caller_and_no_other_notices(llm, llm_async, breaks_at, words):
    broken = SamplingParams(max_tokens=4, grammar=BrokenGrammar(breaks_at))
    with pytest.raises(Exception, match=words):
        llm.generate(["hello", "you"], broken)
    assert not llm.engine.has_work

    async def ask():
        return await asyncio.gather(
            llm_async.generate("hello", broken), llm_async.generate("hello", max_tokens=4), return_exceptions=True
        )

    bad, good = asyncio.run(ask())
    assert words in str(bad)
    assert good.text == llm.generate("hello", max_tokens=4).text


def test_closing_ends_the_answers_under_way_with_a_sentence(target):
    async def close():
        made = AsyncLLM(target, None, device="cpu", max_context=256)
        pieces = made.stream("hello", max_tokens=250, ignore_eos=True)
        await anext(pieces)
        waiting = asyncio.create_task(made.generate("hello", max_tokens=250, ignore_eos=True))
        await asyncio.sleep(0)  # lets the task queue its request
        await made.close()
        for later in (waiting, made.generate("too late")):
            with pytest.raises(RequestError, match="closed"):
                await later

    asyncio.run(close())
