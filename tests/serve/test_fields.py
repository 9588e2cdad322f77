"""Every field of other servers' requests works, is refused by name, or is listed as harmless."""

import logging
import runpy
from pathlib import Path

import pytest

from slipstream.serve.anthropic.request import MessagesRequest
from slipstream.serve.fields import HARMLESS, OF_CHATS, REFUSED
from slipstream.serve.protocol import ChatRequest, CompletionRequest
from slipstream.serve.responses.request import ResponsesRequest
from slipstream.serve.sglang.fields import OF_SAMPLING
from slipstream.serve.sglang.request import GenerateRequest, Sampling

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
    both = ChatRequest.model_fields.keys() & CompletionRequest.model_fields.keys()
    tables = [(both, OF_CHATS), (Sampling.model_fields.keys(), OF_SAMPLING)]
    tables += [(kind.model_fields.keys(), kind.others) for kind in (ResponsesRequest, MessagesRequest, GenerateRequest)]
    for works, others in tables:
        assert not others.refused.keys() & others.harmless.keys()
        assert not works & (others.refused.keys() - REFUSED.keys())
        assert not works & (others.harmless.keys() - HARMLESS.keys())


@pytest.mark.parametrize(
    ("path", "body", "kind"),
    [
        ("/v1/responses", {"input": "hello", "max_output_tokens": 2}, ResponsesRequest),
        ("/v1/messages", {"messages": CHAT["messages"], "max_tokens": 2}, MessagesRequest),
        ("/generate", {"text": "hello", "sampling_params": {"max_new_tokens": 2}}, GenerateRequest),
    ],
)
def test_other_apis_refuse_their_own_fields_by_name(client, path, body, kind):
    own = {name: values for name, values in kind.others.refused.items() if REFUSED.get(name) != values}
    for name in own:
        answer = client.post(path, json={**body, name: "something"})
        assert (answer.status_code, name in answer.json()["error"]["message"]) == (400, True)
    nothing = {name: values[-1] for name, values in own.items()} | dict.fromkeys(kind.others.harmless.keys() - body, 1)
    left = {name: value for name, value in nothing.items() if name not in kind.model_fields}
    answer = client.post(path, json={**body, **left})
    assert answer.status_code == 200, answer.text


def test_sampling_params_refuse_their_own_fields_by_name(client):
    for name in OF_SAMPLING.refused:
        answer = client.post("/generate", json={"text": "a", "sampling_params": {name: "something"}})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, f"sampling_params.{name}")


def test_the_documentation_is_up_to_date():
    root = Path(__file__).parents[2]
    script = runpy.run_path(str(root / "scripts" / "request_fields.py"))
    written = (root / "docs" / "request-fields.md").read_text(encoding="utf-8")
    assert written == script["page"](), "run scripts/request_fields.py"
