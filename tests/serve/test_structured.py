"""Answers have the form a request asks for, in whichever of the known spellings it asks."""

import json
import re

import pytest

TEXT = {"prompt": "once", "max_tokens": 60, "temperature": 1}
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 22]}}, "required": ["a"], "additionalProperties": False}
LARK = 'start: "select " column\ncolumn: "a" | "bc"'
GBNF = 'root ::= "select " column\ncolumn ::= "a" | "bc"'
SELECT = re.compile("select (a|bc)")
OBJECT = re.compile(r'\{\s*"a"\s*:\s*(1|22)\s*\}')

FORMS = [
    ({"structured_outputs": {"json": SCHEMA}}, OBJECT),
    ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, OBJECT),
    ({"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}}, re.compile(r'\{"a":\s?(1|22)\}')),
    ({"structured_outputs": {"regex": "[ab]{3}-(x|yz)"}}, re.compile("[ab]{3}-(x|yz)")),
    ({"structured_outputs": {"choice": ["yes", 'no "or" so', "a.b"]}}, re.compile(r'yes|no "or" so|a\.b')),
    ({"structured_outputs": {"grammar": LARK}}, SELECT),
    ({"structured_outputs": {"grammar": GBNF}}, SELECT),
    ({"structured_outputs": {"json_object": True}, "max_tokens": 1}, re.compile(r"\{")),
    ({"guided_json": SCHEMA}, OBJECT),
    ({"guided_regex": "^[0-9]{2}$"}, re.compile("[0-9]{2}")),
    ({"guided_choice": ["one", "two"]}, re.compile("one|two")),
    ({"guided_grammar": LARK}, SELECT),
    ({"json_schema": json.dumps(SCHEMA)}, OBJECT),
    ({"regex": "(ab|cd)ef"}, re.compile("(ab|cd)ef")),
    ({"ebnf": GBNF}, SELECT),
    ({"regex": "", "ebnf": None, "guided_json": None, "max_tokens": 3}, re.compile(".{0,3}", re.DOTALL)),
]


@pytest.mark.parametrize(("form", "expected"), FORMS, ids=lambda value: str(value)[:50])
def test_an_answer_has_the_form_it_was_asked_for_whatever_the_draft_guesses(client, form, expected):
    for seed in range(2):
        body = {**TEXT, **form, "seed": seed}
        guessed, plain = (
            client.post("/v1/completions", json={**body, "speculate": speculate}).json()["choices"][0]["text"]
            for speculate in (True, False)
        )
        assert expected.fullmatch(guessed)
        assert guessed == plain


@pytest.mark.parametrize(
    ("form", "field"),
    [
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs.choice"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": 5}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "(a"}}, "structured_outputs.regex"),
        ({"guided_json": {"type": "frog"}}, "guided_json"),
        ({"guided_choice": "yes"}, "guided_choice"),
        ({"guided_regex": "a(?=b)"}, "guided_regex"),
        ({"guided_grammar": "begin: x"}, "guided_grammar"),
        ({"ebnf": "root ::= ("}, "ebnf"),
        ({"regex": "a", "response_format": {"type": "json_object"}}, "regex"),
        ({"regex": "(((a{900}){900}){900}){900}"}, "regex"),
    ],
)
def test_a_form_that_cannot_be_followed_is_a_400_that_names_its_field(client, form, field):
    answer = client.post("/v1/completions", json={**TEXT, **form})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == field
    assert field in answer.json()["error"]["message"]
