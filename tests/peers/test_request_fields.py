"""No field of other projects' requests is dropped without a word (opt in: pytest -m interop)."""

import json
from pathlib import Path

import pytest
from tests.peers.suites import KIMI, SUITES
from tests.serve.interop import run_client

from slipstream.serve.anthropic.request import MessagesRequest, Prompt
from slipstream.serve.protocol import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from slipstream.serve.responses.request import ResponsesRequest
from slipstream.serve.sglang.fields import OF_SAMPLING
from slipstream.serve.sglang.request import GenerateRequest, Sampling

HERE = Path(__file__).resolve().parent
OURS = {
    "chat": ChatRequest,
    "completion": CompletionRequest,
    "responses": ResponsesRequest,
    "messages": MessagesRequest,
    "count_tokens": Prompt,
    "tokenize": TokenizeRequest,
    "detokenize": DetokenizeRequest,
    "generate": GenerateRequest,
    "sampling_params": Sampling,
}


@pytest.mark.interop
@pytest.mark.parametrize("project", ["openai", "anthropic", "vllm", "sglang"])
def test_every_field_works_or_is_refused_by_name_or_is_harmless(project):
    client = SUITES[project].client if project in SUITES else KIMI
    said = run_client(client, ["-P", str(HERE / "print_fields.py"), project], PYTHONPATH=str(HERE))
    line = next(line for line in reversed(said.splitlines()) if line.startswith('{"fields"'))
    silent = {}
    for api, fields in json.loads(line)["fields"].items():
        assert len(fields) > 1
        others = OF_SAMPLING if api == "sampling_params" else OURS[api].others
        silent[api] = set(fields) - OURS[api].model_fields.keys() - others.refused.keys() - others.harmless.keys()
    assert {api: names for api, names in silent.items() if names} == {}
