"""Every field of other servers' requests works, is refused by name, or is listed as harmless."""

import logging
import runpy
from pathlib import Path

import pytest

from slipstream.serve.fields import HARMLESS, REFUSED
from slipstream.serve.protocol import ChatRequest, CompletionRequest

CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2, "temperature": 0}
TEXT = {"prompt": "hello", "max_tokens": 2, "temperature": 0}
SOMETHING = {"modalities": ["audio"], "tool_choice": "required", "separate_reasoning": False}


@pytest.mark.parametrize("name", sorted(REFUSED.keys() - ChatRequest.model_fields))
def test_a_chat_that_asks_for_what_is_not_done_is_refused_by_name(client, name):
    answer = client.post("/v1/chat/completions", json={**CHAT, name: SOMETHING.get(name, "something")})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == name


def test_values_that_ask_for_nothing_are_taken(client):
    for route, body, model in (("chat/completions", CHAT, ChatRequest), ("completions", TEXT, CompletionRequest)):
        nothing = {name: values[-1] for name, values in REFUSED.items() if name not in model.model_fields}
        assert client.post(f"/v1/{route}", json={**body, **nothing}).status_code == 200


def test_harmless_fields_change_nothing(client):
    plain = client.post("/v1/chat/completions", json=CHAT).json()
    aside = dict.fromkeys(HARMLESS.keys() - ChatRequest.model_fields, "anything")
    other = client.post("/v1/chat/completions", json={**CHAT, **aside}).json()
    assert other["choices"] == plain["choices"]


def test_nulls_are_absences(client):
    for route, body, model in (("chat/completions", CHAT, ChatRequest), ("completions", TEXT, CompletionRequest)):
        nulls = dict.fromkeys({*model.model_fields, *REFUSED, *HARMLESS} - body.keys())
        answer = client.post(f"/v1/{route}", json={**nulls, **body})
        assert answer.status_code == 200, answer.text
    options = {"stream": True, "stream_options": {"include_usage": None}}
    assert client.post("/v1/completions", json={**TEXT, **options}).status_code == 200


def test_a_field_that_no_server_knows_is_logged_once(client, caplog):
    with caplog.at_level(logging.WARNING, logger="slipstream.serve.fields"):
        for _ in range(3):
            assert client.post("/v1/completions", json={**TEXT, "temprature": 2}).status_code == 200
    assert [record.getMessage() for record in caplog.records if "temprature" in record.getMessage()] == [
        "a request has the field 'temprature', which is unknown here and was ignored"
    ]


def test_no_field_stands_in_two_tables():
    assert not REFUSED.keys() & HARMLESS.keys()
    both = ChatRequest.model_fields.keys() & CompletionRequest.model_fields.keys()
    assert not both & (REFUSED.keys() | HARMLESS.keys())


def test_the_documentation_is_up_to_date():
    root = Path(__file__).parents[2]
    script = runpy.run_path(str(root / "scripts" / "request_fields.py"))
    written = (root / "docs" / "request-fields.md").read_text(encoding="utf-8")
    assert written == script["page"](), "run scripts/request_fields.py"
