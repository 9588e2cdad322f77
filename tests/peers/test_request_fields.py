"""No field of other projects' requests is dropped without a word (opt in: pytest -m interop)."""

import json
from pathlib import Path

import pytest
from tests.peers.suites import KIMI, SUITES
from tests.serve.interop import run_client

from slipstream.serve.fields import HARMLESS, REFUSED
from slipstream.serve.protocol import ChatRequest, CompletionRequest

HERE = Path(__file__).resolve().parent


@pytest.mark.interop
@pytest.mark.parametrize("project", ["openai", "vllm", "sglang"])
def test_every_field_works_or_is_refused_by_name_or_is_harmless(project):
    client = SUITES[project].client if project in SUITES else KIMI
    said = run_client(client, ["-P", str(HERE / "print_fields.py"), project], PYTHONPATH=str(HERE))
    line = next(line for line in reversed(said.splitlines()) if line.startswith('{"chat"'))
    fields = json.loads(line)
    for kind, model in (("chat", ChatRequest), ("completion", CompletionRequest)):
        assert len(fields[kind]) > 15
        assert sorted(set(fields[kind]) - model.model_fields.keys() - REFUSED.keys() - HARMLESS.keys()) == []
