"""Parses transcripts with another project's parsers; run by its Python: a file of JSON lines in, JSON lines out."""

import json
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

Json = dict[str, Any]


class FakeTokenizer:
    """A tokenizer whose tokens are the pieces of one transcript; markers have ids of their own, and are special."""

    def __init__(self, markers: list[str]) -> None:
        self._ids = {marker: i for i, marker in enumerate(markers)}
        self.all_special_tokens = list(markers)
        self.all_special_ids = list(range(len(markers)))
        self.special_tokens_map: Json = {}
        self.eos_token_id = None
        self.name_or_path = ""

    def id_of(self, piece: str) -> int:
        return self._ids.setdefault(piece, len(self._ids))

    def get_vocab(self) -> dict[str, int]:
        return dict(self._ids)

    @property
    def vocab(self) -> dict[str, int]:
        return dict(self._ids)

    def encode(self, text: str, *_: Any, **__: Any) -> list[int]:
        return [self.id_of(text)]

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        return self.id_of(tokens) if isinstance(tokens, str) else [self.id_of(token) for token in tokens]

    def decode(self, ids: Any, *_: Any, **__: Any) -> str:
        texts = {i: text for text, i in self._ids.items()}
        return "".join(texts[i] for i in ([ids] if isinstance(ids, int) else ids))


def with_vllm() -> Callable[[Json], Json]:
    """Return vLLM's way."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager

    logging.disable(logging.CRITICAL)

    def parse(case: Json) -> Json:
        if case["kind"] == "channels":
            return _vllm_channels(case)
        tokenizer = FakeTokenizer(case["markers"])
        for piece in (piece for step in case["steps"] for piece in step):
            tokenizer.id_of(piece)
        request = ChatCompletionRequest(
            messages=[{"role": "user", "content": "-"}], model="m", tools=case["tools"] or None
        )
        if case["kind"] == "tools":
            kind = ToolParserManager.get_tool_parser(case["parser"])
            whole = kind(tokenizer, request.tools).extract_tool_calls(case["text"], request)
            found = [[call.function.name, call.function.arguments] for call in whole.tool_calls]
            result = {"content": whole.content or "", "calls": found}
            return {"whole": result, "stream": _vllm_stream(kind(tokenizer, request.tools), case, tokenizer, request)}
        kind = ReasoningParserManager.get_reasoning_parser(case["parser"])
        reasoning, content = kind(tokenizer).extract_reasoning(case["text"], request)
        parser = kind(tokenizer)
        return {
            "whole": {"reasoning": reasoning or "", "content": content or ""},
            "stream": _vllm_reasoning_stream(parser, case, tokenizer),
        }

    return parse


class HarmonyTokenizer:
    """gpt-oss's vocabulary, as openai-harmony has it, by the names vLLM calls."""

    def __init__(self, encoding: Any) -> None:
        self._encoding = encoding

    def get_vocab(self) -> dict[str, int]:
        return {}

    def decode(self, ids: list[int]) -> str:
        return self._encoding.decode(ids)


def _vllm_channels(case: Json) -> Json:
    """Return what vLLM reads with openai-harmony's own parser, which takes tokens."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.parser.harmony_utils import get_encoding
    from vllm.parser.parser_manager import ParserManager

    encoding = get_encoding()
    kind = ParserManager.get_parser("openai", "openai_gptoss", enable_auto_tools=True, is_harmony=True)
    request = ChatCompletionRequest(messages=[{"role": "user", "content": "-"}], model="m", tools=case["tools"])

    def ids_of(step: list[str]) -> list[int]:
        special = {"allowed_special": "all"}, {"disallowed_special": ()}
        return [i for piece in step for i in encoding.encode(piece, **special[piece not in case["markers"]])]

    steps = [ids_of(step) for step in case["steps"]]
    ids = [token_id for step in steps for token_id in step]
    whole = kind(HarmonyTokenizer(encoding), request.tools)
    reasoning, content, calls = whole.parse(case["text"], request, True, ids)
    found = [[call.name, call.arguments] for call in calls or ()]
    told: Json = {"reasoning": "", "content": "", "calls": []}
    stream = kind(HarmonyTokenizer(encoding), request.tools)
    for number, step in enumerate(steps):
        delta = stream.parse_delta("", step, request, [], finished=number == len(steps) - 1)
        if delta is None:
            continue
        told["reasoning"] += delta.reasoning or ""
        told["content"] += delta.content or ""
        for call in delta.tool_calls or ():
            if call.index == len(told["calls"]):
                told["calls"].append([call.function.name, ""])
            told["calls"][call.index][1] += call.function.arguments or ""
    return {"whole": {"reasoning": reasoning or "", "content": content or "", "calls": found}, "stream": told}


def _vllm_stream(parser: Any, case: Json, tokenizer: FakeTokenizer, request: Any) -> Json:
    content, calls = "", {}
    before, ids_before = "", []

    def take(delta: Any) -> None:
        nonlocal content
        if delta is None:
            return
        content += delta.content or ""
        for call in delta.tool_calls or ():
            entry = calls.setdefault(call.index, ["", ""])
            function = call.function
            if function is not None:
                name, arguments = (
                    (function.get("name"), function.get("arguments"))
                    if isinstance(function, dict)
                    else (function.name, function.arguments)
                )
                entry[0] += name or ""
                entry[1] += arguments or ""

    for step in case["steps"]:
        delta, ids = "".join(step), [tokenizer.id_of(piece) for piece in step]
        take(
            parser.extract_tool_calls_streaming(
                before, before + delta, delta, ids_before, ids_before + ids, ids, request
            )
        )
        before, ids_before = before + delta, ids_before + ids
    if hasattr(parser, "finish_streaming"):
        take(parser.finish_streaming())
    for index, sent in enumerate(getattr(parser, "streamed_args_for_tool", ())):  # as its server does at the end
        arguments = (
            parser.prev_tool_call_arr[index].get("arguments") if index < len(parser.prev_tool_call_arr) else None
        )
        expected = arguments if isinstance(arguments, str) else json.dumps(arguments or {}, ensure_ascii=False)
        if index in calls and sent and expected.startswith(sent) and calls[index][1] == sent:
            calls[index][1] = expected
    return {"content": content, "calls": [calls[index] for index in sorted(calls)]}


def _vllm_reasoning_stream(parser: Any, case: Json, tokenizer: FakeTokenizer) -> Json:
    reasoning = content = before = ""
    ids_before: list[int] = []
    for step in case["steps"]:
        delta, ids = "".join(step), [tokenizer.id_of(piece) for piece in step]
        said = parser.extract_reasoning_streaming(before, before + delta, delta, ids_before, ids_before + ids, ids)
        if said is not None:
            reasoning += getattr(said, "reasoning", None) or ""
            content += said.content or ""
        before, ids_before = before + delta, ids_before + ids
    said = parser.finish_streaming() if hasattr(parser, "finish_streaming") else None
    if said is not None:
        reasoning += getattr(said, "reasoning", None) or ""
        content += said.content or ""
    return {"reasoning": reasoning, "content": content}


def with_sglang() -> Callable[[Json], Json]:
    """Return SGLang's way."""
    import sglang_plugin

    sglang_plugin.let_sglang_be_imported()
    from sglang.srt.entrypoints.openai.protocol import Tool
    from sglang.srt.function_call.function_call_parser import FunctionCallParser
    from sglang.srt.parser.reasoning_parser import ReasoningParser

    logging.disable(logging.CRITICAL)

    def parse_channels(case: Json) -> Json:
        """Take reasoning out first, and then calls, as its server does."""
        tools = [Tool.model_validate(tool) for tool in case["tools"]]
        reasoning, rest = ReasoningParser("gpt-oss", stream_reasoning=True).parse_non_stream(case["text"])
        content, found = FunctionCallParser(tools, "gpt-oss").parse_non_stream(rest or "")
        calls = [[call.name, call.parameters] for call in found]
        told: Json = {"reasoning": "", "content": "", "calls": []}
        thoughts, parser = ReasoningParser("gpt-oss", stream_reasoning=True), FunctionCallParser(tools, "gpt-oss")
        for step in case["steps"]:
            thought, text = thoughts.parse_stream_chunk("".join(step))
            told["reasoning"] += thought or ""
            if not text:
                continue
            text, found = parser.parse_stream_chunk(text)
            told["content"] += text or ""
            told["calls"] += [[call.name, call.parameters] for call in found]
        return {"whole": {"reasoning": reasoning or "", "content": content, "calls": calls}, "stream": told}

    def parse(case: Json) -> Json:
        if case["kind"] == "channels":
            return parse_channels(case)
        if case["kind"] == "reasoning":
            reasoning, content = ReasoningParser(case["parser"], stream_reasoning=True).parse_non_stream(case["text"])
            streamed, told = "", ""
            parser = ReasoningParser(case["parser"], stream_reasoning=True)
            for step in case["steps"]:
                thought, text = parser.parse_stream_chunk("".join(step))
                streamed, told = streamed + (thought or ""), told + (text or "")
            return {
                "whole": {"reasoning": reasoning or "", "content": content or ""},
                "stream": {"reasoning": streamed, "content": told},
            }
        tools = [Tool.model_validate(tool) for tool in case["tools"]]
        text, found = FunctionCallParser(tools, case["parser"]).parse_non_stream(case["text"])
        whole = {"content": text, "calls": [[call.name, call.parameters] for call in found]}
        parser = FunctionCallParser(tools, case["parser"])
        content, calls = "", {}
        for step in case["steps"]:
            text, found = parser.parse_stream_chunk("".join(step))
            content += text or ""
            for call in found:
                entry = calls.setdefault(call.tool_index, ["", ""])
                entry[0] += call.name or ""
                entry[1] += call.parameters or ""
        return {"whole": whole, "stream": {"content": content, "calls": [calls[index] for index in sorted(calls)]}}

    return parse


if __name__ == "__main__":
    parse_with = {"vllm": with_vllm, "sglang": with_sglang}[sys.argv[1]]()
    for line in Path(sys.argv[2]).read_text().splitlines():
        try:
            answer = parse_with(json.loads(line))
        except Exception as error:  # noqa: BLE001 (theirs, whatever it is, is the finding)
            answer = {"failed": f"{type(error).__name__}: {error}"[:300]}
        sys.stdout.write("#" + json.dumps(answer) + "\n")
