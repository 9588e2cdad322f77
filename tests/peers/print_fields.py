"""Prints the fields of another project's requests as JSON, by API; run by that project's Python."""

import dataclasses
import importlib
import json
import sys
from typing import Any

# API: modules and types whose fields a request of that API may have.
TYPES: dict[str, dict[str, tuple[str, ...]]] = {
    "openai": {
        "chat": ("openai.types.chat.completion_create_params:CompletionCreateParamsBase",),
        "completion": ("openai.types.completion_create_params:CompletionCreateParamsBase",),
        "responses": ("openai.types.responses.response_create_params:ResponseCreateParamsBase",),
    },
    "anthropic": {
        "messages": ("anthropic.types.message_create_params:MessageCreateParamsBase",),
        "count_tokens": ("anthropic.types.message_count_tokens_params:MessageCountTokensParams",),
    },
    "vllm": {
        "chat": ("vllm.entrypoints.openai.chat_completion.protocol:ChatCompletionRequest",),
        "completion": ("vllm.entrypoints.openai.completion.protocol:CompletionRequest",),
        "responses": ("vllm.entrypoints.openai.responses.protocol:ResponsesRequest",),
        "messages": ("vllm.entrypoints.anthropic.protocol:AnthropicMessagesRequest",),
        "count_tokens": ("vllm.entrypoints.anthropic.protocol:AnthropicCountTokensRequest",),
        "tokenize": (
            "vllm.entrypoints.serve.tokenize.protocol:TokenizeCompletionRequest",
            "vllm.entrypoints.serve.tokenize.protocol:TokenizeChatRequest",
        ),
        "detokenize": ("vllm.entrypoints.serve.tokenize.protocol:DetokenizeRequest",),
    },
    "sglang": {
        "chat": ("sglang.srt.entrypoints.openai.protocol:ChatCompletionRequest",),
        "completion": ("sglang.srt.entrypoints.openai.protocol:CompletionRequest",),
        "responses": ("sglang.srt.entrypoints.openai.protocol:ResponsesRequest",),
        "messages": ("sglang.srt.entrypoints.anthropic.protocol:AnthropicMessagesRequest",),
        "count_tokens": ("sglang.srt.entrypoints.anthropic.protocol:AnthropicCountTokensRequest",),
        "tokenize": ("sglang.srt.entrypoints.openai.protocol:TokenizeRequest",),
        "detokenize": ("sglang.srt.entrypoints.openai.protocol:DetokenizeRequest",),
        "generate": ("sglang.srt.managers.io_struct:GenerateReqInput",),
        "sampling_params": ("sglang.srt.sampling.sampling_params:SamplingParams",),
    },
}


def fields_of(place: str) -> list[str]:
    """Return the fields of a type: a pydantic model, a dataclass, a msgspec struct or a typed dictionary."""
    module, _, name = place.partition(":")
    kind: Any = getattr(importlib.import_module(module), name)
    if hasattr(kind, "model_fields"):
        return list(kind.model_fields)
    if hasattr(kind, "__struct_fields__"):
        return list(kind.__struct_fields__)
    if dataclasses.is_dataclass(kind):
        return [field.name for field in dataclasses.fields(kind)]
    return list(kind.__annotations__)


if __name__ == "__main__":
    project = sys.argv[1]
    if project == "sglang":
        import sglang_plugin

        sglang_plugin.let_sglang_be_imported()
    found = {api: sorted({name for one in places for name in fields_of(one)}) for api, places in TYPES[project].items()}
    sys.stdout.write("\n" + json.dumps({"fields": found}) + "\n")
