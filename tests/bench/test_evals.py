"""GSM8K is asked and scored as lm-eval does it, and a single changed token is found."""

import json
from pathlib import Path

import pytest

from slipstream.bench.client import Client, ServerError, open_session
from slipstream.bench.evals.answers import Asking, ask_all
from slipstream.bench.evals.gsm8k import STOPS, EvalError, Gsm8kData, Question, load_data, prompts, score
from slipstream.bench.evals.lm_eval import items_of
from slipstream.bench.evals.lossless import Settings, compare
from slipstream.bench.workload import Prompt
from slipstream.records.evals import changed
from tests.bench.fake_server import Behaviour, FakeServer
from tests.bench.virtual_time import run_virtual

STORED = json.loads((Path(__file__).parent / "data/gsm8k_answers.json").read_text())
DATA = Gsm8kData(
    tuple(Question(**row) for row in STORED["train"]), tuple(Question(**row) for row in STORED["test"]), "stored"
)
SHARED = Path(__file__).parents[3] / "shared/data/gsm8k"


@pytest.mark.parametrize(("field", "name"), [("strict", "strict-match"), ("flexible", "flexible-extract")])
def test_200_stored_answers_score_as_lm_eval_scores_them(field, name):
    items = [score(i, answer, DATA.test[i].answer) for i, answer in enumerate(STORED["answers"])]
    assert len(items) == 200
    assert [getattr(item, f"{field}_extracted") for item in items] == STORED["extracted"][name]
    assert [getattr(item, field) for item in items] == STORED["scores"][name]
    assert sum(getattr(item, field) for item in items) / 200 == pytest.approx(STORED["totals"][name])
    assert 20 < sum(STORED["scores"][name]) < 180, "the stored answers must be able to tell a wrong scorer"


@pytest.mark.parametrize("shots", [5, 10])
def test_text_prompts_are_lm_evals_to_the_letter(shots):
    made = prompts(DATA, shots, max_tokens=10, chat=False, limit=3)
    assert [prompt.text for prompt in made] == STORED["prompts"][f"{shots}-text"]


def test_chat_prompts_are_lm_evals_turn_by_turn():
    made = prompts(DATA, 5, max_tokens=10, chat=True, limit=3)
    turns = [[{"role": m.role, "content": m.content} for m in prompt.messages] for prompt in made]
    # lm-eval hands its rendered history over as text.
    assert turns == [json.loads(text) for text in STORED["prompts"]["5-chat"]]


def test_the_real_data_reads_when_it_is_here():
    if not SHARED.exists():
        pytest.skip(f"GSM8K is not at {SHARED}")
    data = load_data(SHARED)
    assert (len(data.train), len(data.test)) == (7473, 1319)
    gold = [score(i, q.answer, q.answer) for i, q in enumerate(data.test)]
    assert all(item.strict for item in gold)


def test_missing_data_is_a_sentence(tmp_path):
    with pytest.raises(EvalError, match=r"holds no readable train\.jsonl"):
        load_data(tmp_path)


def test_changed_answers_are_paired_by_question():
    before = [score(0, "#### 1", "#### 1"), score(1, "#### 5", "#### 2"), score(2, "#### 3", "#### 3")]
    after = [score(0, "#### 9", "#### 1"), score(1, "#### 2", "#### 2"), score(2, "#### 3", "#### 3")]
    found = changed(before, after, "strict")
    assert (found.num_pairs, found.to_right, found.to_wrong) == (3, (1,), (0,))


def test_lm_evals_own_samples_become_the_same_items():
    rows = []
    for name in ("strict-match", "flexible-extract"):
        for i in range(200):
            rows.append(
                {
                    "doc_id": i,
                    "filter": name,
                    "resps": [[STORED["answers"][i]]],
                    "filtered_resps": [STORED["extracted"][name][i]],
                    "exact_match": float(STORED["scores"][name][i]),
                }
            )
    ours = tuple(score(i, answer, DATA.test[i].answer) for i, answer in enumerate(STORED["answers"]))
    assert items_of(rows) == ours


async def with_servers(behaviours, body):
    fakes = [FakeServer(behaviour) for behaviour in behaviours]
    async with open_session() as session:
        clients = [await Client.connect(session, await fake.start()) for fake in fakes]
        try:
            return await body(*clients)
        finally:
            for fake in fakes:
                await fake.stop()


def test_answers_come_back_in_the_order_of_the_questions():
    made = prompts(DATA, 1, max_tokens=10, chat=False, limit=20)
    replies = {prompt.text[-60:]: f"#### {i}" for i, prompt in enumerate(made)}
    behaviour = Behaviour(reply=replies)
    answers = run_virtual(with_servers([behaviour], lambda c: ask_all(c, made, Asking(stops=STOPS, concurrency=7))))
    assert [answer.text for answer in answers] == [f"#### {i}" for i in range(20)]


@pytest.mark.parametrize("chat", [True, False])
def test_a_planted_one_token_change_is_found_with_its_margin(chat):
    from slipstream.bench.workload import ChatMessage

    def ask(text):
        return Prompt(8, messages=(ChatMessage("user", text),)) if chat else Prompt(8, text=text)

    same = {"first": "the quick brown fox", "second": "one two three four"}
    baseline = Behaviour(reply=same)
    planted = Behaviour(reply=same | {"second": "one two tree four"})
    asked = [ask("first"), ask("second")]
    settings = Settings(seeds=(3,))
    cases = run_virtual(with_servers([baseline, planted], lambda a, b: compare(a, b, asked, settings)))
    assert [(case.prompt, case.temperature) for case in cases] == [(0, 0.0), (1, 0.0), (0, 0.8), (1, 0.8)]
    assert [case.difference is None for case in cases] == [True, False, True, False]
    found = cases[1].difference
    assert (found.position, found.baseline_token, found.token) == (2, "three", "tree")
    assert found.top_two_margin == pytest.approx(0.25)


def test_an_answer_that_ends_early_differs_where_it_ends():
    cases = run_virtual(
        with_servers(
            [Behaviour(reply={"q": "a b c"}), Behaviour(reply={"q": "a b"})],
            lambda a, b: compare(a, b, [Prompt(8, text="q")], Settings(seeds=())),
        )
    )
    assert (cases[0].difference.position, cases[0].difference.token) == (2, "(end)")


def test_an_eval_does_not_go_on_after_a_failure():
    async def broken(client):
        client.url += "/nowhere"
        return await ask_all(client, [Prompt(8, text="q")], Asking())

    with pytest.raises(ServerError, match="HTTP 404"):
        run_virtual(with_servers([Behaviour()], broken))
