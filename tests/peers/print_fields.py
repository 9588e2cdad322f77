"""Prints the fields of another project's chat and completion requests as JSON; run by that project's Python."""

import json
import sys


def of_openai() -> list[list[str]]:
    """Return those of OpenAI's client."""
    from openai.types import completion_create_params as completion
    from openai.types.chat import completion_create_params as chat

    kinds = (chat.CompletionCreateParamsBase, completion.CompletionCreateParamsBase)
    return [[*kind.__annotations__, "stream"] for kind in kinds]


def of_vllm() -> list[list[str]]:
    """Return those of vLLM's server."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest

    return [list(kind.model_fields) for kind in (ChatCompletionRequest, CompletionRequest)]


def of_sglang() -> list[list[str]]:
    """Return those of SGLang's server."""
    import sglang_plugin

    sglang_plugin.let_sglang_be_imported()
    from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest, CompletionRequest

    return [list(kind.model_fields) for kind in (ChatCompletionRequest, CompletionRequest)]


if __name__ == "__main__":
    chat_fields, completion_fields = {"openai": of_openai, "vllm": of_vllm, "sglang": of_sglang}[sys.argv[1]]()
    sys.stdout.write("\n" + json.dumps({"chat": chat_fields, "completion": completion_fields}) + "\n")
