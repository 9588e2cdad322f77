"""A large request costs the server little before it is refused, and the event loop next to nothing."""

import json
import threading
import time

import pytest
from tiny_server import tiny_tokenizer

from slipstream.serve.body import MAX_PARTS, parse
from slipstream.serve.errors import HttpError
from slipstream.serve.protocol import CompletionRequest, TokenizeRequest

HEADERS = {"Content-Type": "application/json"}
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
MANY_BIASES = ",".join(f'"{token}":1' for token in range(100_000))
LARGE = {
    "prompts times n": (COMPLETIONS, json.dumps({"prompt": ["a"] * 50_000, "n": 128}), "6400000 answers"),
    "messages that are none": (CHATS, '{"messages":[' + "1," * 500_000 + "1]}", "messages.0"),
    "many messages": (CHATS, '{"messages":[' + '{"role":"u"},' * 40_000 + "1]}", "messages: List should have at most"),
    "many parts": (CHATS, '{"messages":[{"role":"u","content":[' + '{"type":"t"},' * 40_000 + "1]}]}", "messages.0"),
    "token ids": (COMPLETIONS, '{"prompt":[' + "1," * 1_000_000 + "1]}", "1000001 tokens"),
    "wrong token ids": (COMPLETIONS, '{"prompt":[' + "-1," * 1_000_000 + "1]}", "prompt.0"),
    "biases": (COMPLETIONS, '{"prompt":"a","logit_bias":{' + MANY_BIASES + "}}", "4096 may have one"),
    "stops": (COMPLETIONS, '{"prompt":"a","stop":[' + '"x",' * 300_000 + '"x"]}', "stop: List should have at most 64"),
    "a long stop": (COMPLETIONS, json.dumps({"prompt": "a", "stop": "x" * 2_000_000}), "stop: String should have"),
    "arrays": (COMPLETIONS, '{"prompt":"a","x":[' + "[]," * 1_000_000 + "1]}", f"{MAX_PARTS} objects"),
    "names": (COMPLETIONS, '{"prompt":"a",' + '"a":1,' * 600_000 + '"b":1}', f"{MAX_PARTS} objects"),
    "a long text": (COMPLETIONS, json.dumps({"prompt": "1" * 4_000_000}), "prompt has more than"),
    "a long chat": (CHATS, json.dumps({"messages": [{"role": "u", "content": "1" * 4_000_000}]}), "messages has more"),
    "a long number": (COMPLETIONS, '{"prompt":"a","n":' + "1" * 4_000_000 + "}", "The body is not JSON"),
    "a long name": (COMPLETIONS, json.dumps({"prompt": "a", "model": "m" * 4_000_000}), "model: String should have"),
    "wrong tokens": ("/detokenize", '{"tokens":[' + "-1," * 1_000_000 + "1]}", "tokens.0"),
}


@pytest.mark.parametrize(("path", "content", "said"), LARGE.values(), ids=LARGE)
def test_what_is_too_large_is_refused_for_less_than_a_second_of_work(client, path, content, said):
    started = time.process_time()
    answer = client.post(path, content=content.encode(), headers=HEADERS)
    assert time.process_time() - started < 1
    assert answer.status_code == 400, answer.text[:300]
    assert said in answer.json()["error"]["message"]
    assert len(answer.content) < 1000


@pytest.mark.parametrize("depth", [130, 950, 100_000])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, '{"prompt":DEEP}'),
        (COMPLETIONS, '{"prompt":"a","logit_bias":DEEP}'),
        (COMPLETIONS, '{"prompt":"a","user":DEEP}'),
        (COMPLETIONS, '{"prompt":"a","response_format":{"type":"json_schema","json_schema":{"schema":{"x":DEEP}}}}'),
        (CHATS, '{"messages":DEEP}'),
        (CHATS, '{"messages":[{"role":"user","content":DEEP}]}'),
        (CHATS, '{"messages":[{"role":"user","content":"a"}],"chat_template_kwargs":{"tools":DEEP}}'),
        ("/tokenize", '{"prompt":DEEP}'),
        ("/admin/speculation", '{"depth":DEEP}'),
    ],
)
def test_deep_nesting_anywhere_is_a_400(client, path, body, depth):
    content = body.replace("DEEP", "[" * depth + "]" * depth)
    answer = client.post(path, content=content, headers=HEADERS)
    assert answer.status_code == 400, answer.text
    assert "nests deeper than 128 levels" in answer.json()["error"]["message"]


def test_a_text_may_hold_any_number_of_braces_colons_and_escaped_quotes():
    text = '{"\\": [' * MAX_PARTS
    assert parse(json.dumps({"prompt": text}).encode(), TokenizeRequest).prompt == text
    with pytest.raises(HttpError, match="not JSON"):
        parse(json.dumps({"prompt": text}).encode()[:-3], TokenizeRequest)


def test_a_body_is_given_up_at_its_first_wrong_element_in_every_form_it_may_have():
    content = json.dumps({"prompt": [[1, 2, "x"]] * 1000}).encode()
    with pytest.raises(HttpError, match=r"prompt.0.2: Input should be a valid integer") as error:
        parse(content, CompletionRequest)
    assert error.value.param == "prompt"


def test_a_long_text_is_tokenized_to_the_same_ids_while_other_threads_run():
    tokenizer, text = tiny_tokenizer(), "once upon 1 time. " * 20_000
    gaps_s: list[float] = []
    done = threading.Event()

    def watch() -> None:
        last = time.monotonic()
        while not done.wait(0.001):
            gaps_s.append(time.monotonic() - last)
            last = time.monotonic()

    watcher = threading.Thread(target=watch)
    watcher.start()
    started = time.monotonic()
    ids = tokenizer.encode(text)
    took_s = time.monotonic() - started
    done.set()
    watcher.join()
    assert max(gaps_s) < took_s / 2
    assert ids == tokenizer.encode("once upon 1 time. ") * 20_000
    assert tokenizer.decode(ids) == text


def test_tokenize_answers_long_texts_up_to_a_stated_number_of_tokens(client):
    answer = client.post("/tokenize", json={"prompt": "a" * 100_000})
    assert answer.json()["count"] == 100_000
    assert client.post("/detokenize", json={"tokens": answer.json()["tokens"]}).json()["prompt"] == "a" * 100_000
    refused = client.post("/tokenize", json={"prompt": "a" * 1_500_000})
    assert refused.status_code == 400
    assert "the limit is 1048576 tokens" in refused.json()["error"]["message"]
