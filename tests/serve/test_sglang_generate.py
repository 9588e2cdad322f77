"""SGLang's `/generate` says what completions say, in SGLang's form."""

import itertools
import json

import pytest

SAMPLING = {"max_new_tokens": 12, "temperature": 0, "ignore_eos": True}
SAME = {"max_tokens": 12, "temperature": 0, "ignore_eos": True}


def completion(client, **changes) -> dict:
    return client.post("/v1/completions", json={"prompt": "once upon", **SAME, **changes}).json()["choices"][0]


def test_one_prompt_gets_one_answer_and_several_a_list(client, server):
    expected = completion(client)["text"]
    one = client.post("/generate", json={"text": "once upon", "sampling_params": SAMPLING, "rid": "mine"}).json()
    assert one["text"] == expected
    assert len(one["output_ids"]) == 12
    assert one["meta_info"]["finish_reason"] == {"type": "length", "length": 12}
    assert (one["meta_info"]["id"], one["meta_info"]["prompt_tokens"]) == ("mine", 9)
    ids = server.tokenizer.encode("once upon")
    several = {"input_ids": [ids, ids[:4]], "sampling_params": [SAMPLING, {**SAMPLING, "max_new_tokens": 3}]}
    long, short = client.post("/generate", json=several).json()
    assert long["text"] == expected
    assert short["meta_info"]["completion_tokens"] == 3
    many = {"text": "once upon", "sampling_params": {**SAMPLING, "n": 2, "temperature": 1, "sampling_seed": 5}}
    assert [a["text"] for a in client.post("/generate", json=many).json()] == [
        completion(client, temperature=1, seed=5, n=2)["text"],
        client.post(
            "/v1/completions", json={"prompt": "once upon", **SAME, "temperature": 1, "seed": 5, "n": 2}
        ).json()["choices"][1]["text"],
    ]


def test_a_stream_repeats_the_answer_so_far(client):
    body = {"text": ["once upon", "a"], "sampling_params": SAMPLING, "stream": True}
    lines = [line.removeprefix("data: ") for line in client.post("/generate", json=body).text.split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    texts = [event["text"] for event in map(json.loads, lines) if event["index"] == 0]
    assert all(after.startswith(before) for before, after in itertools.pairwise(texts))
    assert texts[-1] == completion(client)["text"]


def test_log_probabilities_are_those_of_completions(client):
    wanted = {"return_logprob": True, "logprob_start_len": 2, "top_logprobs_num": 2, "return_text_in_logprobs": True}
    body = {"text": "once upon", "sampling_params": SAMPLING, **wanted}
    meta = client.post("/generate", json=body).json()["meta_info"]
    expected = completion(client, logprobs=2, echo=True)["logprobs"]
    assert [entry[0] for entry in meta["output_token_logprobs"]] == expected["token_logprobs"][9:]
    assert meta["input_token_logprobs"][0][0] is None
    assert [entry[0] for entry in meta["input_token_logprobs"][1:]] == expected["token_logprobs"][3:9]
    assert [entry[2] for entry in meta["input_token_logprobs"]] == expected["tokens"][2:9]
    assert [len(top) for top in meta["output_top_logprobs"]] == [2] * 12
    scored = {**body, "sampling_params": {"max_new_tokens": 0}, "logprob_start_len": 0}
    alone = client.post("/generate", json=scored).json()
    assert (alone["text"], len(alone["meta_info"]["input_token_logprobs"])) == ("", 9)


def test_the_end_says_what_was_matched(client):
    whole = completion(client)["text"]
    body = {"text": "once upon", "sampling_params": {**SAMPLING, "stop": [whole[5:7]]}}
    assert client.post("/generate", json=body).json()["meta_info"]["finish_reason"]["matched"] == whole[5:7]


def test_an_answer_keeps_to_a_grammar(client):
    body = {"text": "once", "sampling_params": {"regex": "(ab|cd){2}", "max_new_tokens": 20}}
    assert client.post("/generate", json=body).json()["text"] in {"abab", "abcd", "cdab", "cdcd"}


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"text": None}, None),
        ({"text": []}, "text"),
        ({"text": "x" * 2000}, "text"),
        ({"input_ids": [1]}, None),
        ({"sampling_params": {"temperature": -1}}, "sampling_params"),
        ({"sampling_params": {"max_new_tokens": 100000}}, "sampling_params.max_new_tokens"),
        ({"sampling_params": {"stop_regex": "a"}}, "sampling_params.stop_regex"),
        ({"sampling_params": {"ebnf": "root ::= ("}}, "sampling_params.ebnf"),
        ({"sampling_params": [{}, {}]}, "sampling_params"),
        ({"return_hidden_states": True}, "return_hidden_states"),
        ({"rid": ["a", "b"]}, "rid"),
        ({"return_logprob": True, "logprob_start_len": 2}, "logprob_start_len"),
        ({"stream": True, "return_logprob": True, "sampling_params": {"max_new_tokens": 5000}}, "return_logprob"),
        ({"text": ["a"] * 300}, None),
    ],
)
def test_a_wrong_value_is_a_400_that_names_the_field(client, change, field):
    answer = client.post("/generate", json={"text": "a", "sampling_params": {"max_new_tokens": 2}, **change})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == field


def test_no_limit_is_as_many_tokens_as_the_context_has_room_for(client, server):
    asked = {"text": "once upon", "sampling_params": {"max_new_tokens": None, "temperature": 0, "ignore_eos": True}}
    assert len(client.post("/generate", json=asked).json()["output_ids"]) == server.engine.config.max_context - 9
    del asked["sampling_params"]["max_new_tokens"]  # the default, 128, is more than there is room for
    assert len(client.post("/generate", json=asked).json()["output_ids"]) == server.engine.config.max_context - 9


def test_what_ended_an_answer_may_be_kept_in_it(client):
    whole = completion(client)["text"]
    body = {"text": "once upon", "sampling_params": {**SAMPLING, "stop": [whole[5:7]], "no_stop_trim": True}}
    assert client.post("/generate", json=body).json()["text"] == whole[:7]
