import json
import lzma
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from slipstream.errors import ConfigError, DataError
from slipstream.train.data.conversations import ConversationSource, Shown
from slipstream.train.data.corpus import Text, choose_vocab, join, read_corpus, shard_paths, write_shard
from slipstream.train.data.generate import GenerationResult, GeneratorConfig
from slipstream.train.data.make_data import Watch, make_corpus, make_eval_set
from slipstream.train.data.mixture import DataConfig, read_documents, whole_sentences
from slipstream.train.data.prompts import MOST_OF_ONE, normalized, read_excluded, read_prompts
from slipstream.train.data.speaker import Speaker, chat_frame
from slipstream.train.run.recipe import EvalSet, make_recipe, read_recipe
from training import EOS, CharTokenizer, tiny_target

VOCAB = 120


@pytest.fixture
def data(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    lines = [{"question": f"How many is {i} and {i}?"} for i in range(40)]
    (folder / "train.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (folder / "test.jsonl").write_text(json.dumps({"question": "how many is 3 and 3"}))
    return folder


def recipe(**data):
    return make_recipe(
        {
            "train": {"steps": 1, "row_length": 512},
            "data": {"max_prompt": 200, "max_answer": 24, "shard_texts": 8, "answer_tokens": 400, **data},
            "generate": {"rows": 6, "max_length": 400},
            "files": {"prompts": ["train.jsonl"], "evaluate": [{"name": "test", "file": "test.jsonl"}]},
        },
        "test",
    )


class Scripted:
    """Answers requests with fixed text, as a target would."""

    def __init__(self, tokenizer, user="What is two and two?", answer="The answer is four."):
        self.tokenizer, self.user, self.answer = tokenizer, user, answer
        self.count = 0

    def play(self, source, rounds):
        for _ in range(rounds):
            for request in source.take(4):
                self.count += 1
                words = self.answer if request.max_new != 128 else self.user
                tokens = self.tokenizer.encode(f"{words} {self.count}")
                source.give(GenerationResult(request, [*tokens, EOS], True))


def test_the_template_taken_apart_is_the_template(data):
    tokenizer = CharTokenizer()
    frame = chat_frame(tokenizer, None)
    whole = tokenizer.encode(tokenizer.render_chat([{"role": "user", "content": "Hi"}]))
    assert [*frame.before_user, *tokenizer.encode("Hi"), *frame.to_answer] == whole
    assert tokenizer.decode(frame.to_next_user) == "\nu\n"


def test_conversations_are_chats_as_served_with_answers_marked(data):
    tokenizer = CharTokenizer()
    config = DataConfig(answer_tokens=2000, magpie=0.5, maths=0.3, second_turn=0.5, max_prompt=300, seed=1)
    source = ConversationSource(tokenizer, config, read_prompts(data / "train.jsonl"), frozenset())
    Scripted(tokenizer).play(source, 60)
    assert len(source.texts) > 20
    assert any(len(text.spans) == 2 for text in source.texts)
    for text in source.texts:
        for start, end in text.spans:
            assert text.ids[end - 1] == EOS
            assert tokenizer.decode(text.ids[start:end]).startswith("The answer is four.")
            assert tokenizer.decode(text.ids[:start]).endswith("a\n")
        assert len(text.ids) == text.spans[-1][1]


def test_tasks_on_passages_quote_an_earlier_answer(data):
    tokenizer = CharTokenizer()
    config = DataConfig(answer_tokens=4000, magpie=0.3, maths=0, passages=0.7, second_turn=0, max_prompt=400, seed=1)
    source = ConversationSource(tokenizer, config, [], frozenset(), window=8)
    Scripted(tokenizer, answer="The answer is four. It was three before").play(source, 60)
    turns = [tokenizer.decode(text.ids[: text.spans[0][0]]) for text in source.texts]
    quoting = [turn for turn in turns if "The answer is" in turn]
    assert len(quoting) > len(turns) // 3, "most user turns are tasks once there are answers to quote"
    assert len({turn.split("\n\n")[0] for turn in quoting}) > 5, "the tasks vary"


def test_tasks_are_written_after_examples_that_are_not_answered_themselves(data):
    tokenizer = CharTokenizer()
    examples = [[{"role": "user", "content": f"Describe the number {number} in a few words."}] for number in range(20)]
    config = DataConfig(answer_tokens=2000, magpie=0, maths=0, tasks=1, second_turn=0, max_prompt=400, seed=1)
    source = ConversationSource(tokenizer, config, [], frozenset(), Shown(examples))
    asked = source.take(5)
    for request in asked:
        shown = tokenizer.decode(request.prompt)
        assert shown.count("Describe the number") >= 2, "the target sees several examples"
        assert shown.endswith("u\n"), "and is to write the next user turn"
    source = ConversationSource(tokenizer, config, [], frozenset(), Shown(examples))
    Scripted(tokenizer).play(source, 60)
    assert len(source.texts) > 5
    assert not any("Describe" in tokenizer.decode(text.ids) for text in source.texts)


def test_tasks_without_examples_are_refused():
    with pytest.raises(ConfigError, match=r"files\.examples; 0 of 0 prompts will do"):
        ConversationSource(CharTokenizer(), DataConfig(magpie=0.5, maths=0, tasks=0.5), [], frozenset())


def test_long_turns_quote_documents_and_keep_to_the_length_allowed(tmp_path):
    tokenizer = CharTokenizer()
    lines = [{"title": f"Report {i}", "text": f"Line {i} of a report says this. " * (i + 1)} for i in range(40)]
    (tmp_path / "d.jsonl").write_text("\n".join(map(json.dumps, lines)))
    documents = read_documents([tmp_path / "d.jsonl"])
    config = DataConfig(magpie=0.2, maths=0, documents=0.8, max_document=3000, seed=1)
    source = ConversationSource(tokenizer, config, [], frozenset(), Shown(documents=documents))
    asked = [tokenizer.decode(request.prompt) for request in source.take(80)]
    quoting = [len(prompt) for prompt in asked if "of a report says" in prompt]
    assert len(quoting) > 40, "most conversations work on documents"
    assert max(quoting) <= 3000 and len({length // 500 for length in quoting}) > 3, "of all lengths"
    with pytest.raises(ConfigError, match=r"files\.documents names none"):
        ConversationSource(tokenizer, config, [], frozenset())


def test_a_document_without_text_is_named(tmp_path):
    (tmp_path / "d.jsonl").write_text('{"text": "Good."}\n{"title": "Bad"}')
    with pytest.raises(DataError, match=r"d\.jsonl:2: is no document"):
        read_documents([tmp_path / "d.jsonl"])


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("One sentence of some length. Another that breaks o", "One sentence of some length."),
        ("No end", "No end"),
        ("Hi! And then a text that goes on without an en", "Hi! And then a text that goes on without an en"),
    ],
)
def test_a_passage_ends_with_a_sentence_if_one_is_complete(text, kept):
    assert whole_sentences(text) == kept


def test_shares_that_exceed_all_conversations_are_refused():
    with pytest.raises(ConfigError, match="magpie, maths, passages, tasks and documents"):
        DataConfig(magpie=0.6, maths=0.1, passages=0.2, tasks=0.2)


def test_excluded_prompts_and_duplicates_are_dropped(data):
    tokenizer = CharTokenizer()
    excluded = read_excluded([data / "test.jsonl"])
    assert excluded == {normalized("How many is 3, and 3?")}
    source = ConversationSource(
        tokenizer, DataConfig(magpie=0, maths=0, second_turn=0), read_prompts(data / "train.jsonl"), excluded
    )
    assert len(source._file_prompts) == 39
    text = Text([5, 6, 7], [(1, 3)])
    source.resume([(0, text), (1, text)], 2)
    assert (source.tally.kept, source.tally.duplicates) == (1, 1)


def test_a_corpus_is_made_in_shards_and_a_second_call_goes_on(data, tmp_path):
    speaker = Speaker(tiny_target(vocab_size=VOCAB), CharTokenizer())
    folder = tmp_path / "corpus"
    first = make_corpus(speaker, recipe(magpie=0, maths=0), data, folder, Watch())
    assert first.answer_tokens >= 400 and len(shard_paths(folder)) >= 1
    corpus = read_corpus(folder)
    assert corpus.num_answer_tokens == first.answer_tokens
    again = make_corpus(speaker, recipe(magpie=0, maths=0), data, folder, Watch())
    assert again.answer_tokens == first.answer_tokens
    more = recipe(magpie=0, maths=0, answer_tokens=800)
    assert make_corpus(speaker, more, data, folder, Watch()).answer_tokens >= 800
    assert read_corpus(folder).num_answer_tokens >= 800


@pytest.mark.parametrize("stops", [(40, 60), (33, 34, 90)])
def test_a_corpus_is_the_same_however_often_it_was_interrupted(data, tmp_path, stops):
    mixture = recipe(magpie=0.3, maths=0.1, passages=0.2, second_turn=0.3, answer_tokens=1200, shard_texts=2)

    def made(name, stops):
        speaker = Speaker(tiny_target(vocab_size=VOCAB, scale=0.3), CharTokenizer())
        for most in stops:
            enough = partial(next, iter([*[False] * most, *[True] * 9]))
            make_corpus(speaker, mixture, data, tmp_path / name, Watch(enough=lambda *_, enough=enough: enough()))
        make_corpus(speaker, mixture, data, tmp_path / name, Watch())
        return read_corpus(tmp_path / name)

    whole, pieces = made("whole", ()), made("pieces", stops)
    assert np.array_equal(whole.ids, pieces.ids) and np.array_equal(whole.spans, pieces.spans)


def test_no_text_in_time_is_said_as_that(data, tmp_path):
    speaker = Speaker(tiny_target(vocab_size=VOCAB), CharTokenizer())
    with pytest.raises(DataError, match="No text finished in the time given"):
        make_corpus(speaker, recipe(magpie=0, maths=0), data, tmp_path / "c", Watch(enough=lambda *_: True))


def test_an_evaluation_set_is_answered_once_and_kept(data, tmp_path):
    speaker = Speaker(tiny_target(vocab_size=VOCAB), CharTokenizer())
    config = GeneratorConfig(rows=4, max_length=128)
    item = EvalSet("train", "train.jsonl", first=5, max_new=12)
    texts = make_eval_set(speaker, item, data, tmp_path / "eval.safetensors", config)
    again = make_eval_set(speaker, item, data, tmp_path / "eval.safetensors", config)
    assert len(texts) == 5 and np.array_equal(texts.ids, again.ids)


def test_a_target_without_a_chat_template_is_refused(data):
    tokenizer = CharTokenizer()
    tokenizer.has_chat_template = False
    with pytest.raises(DataError, match="no chat template"):
        ConversationSource(tokenizer, DataConfig(), read_prompts(data / "train.jsonl"), frozenset())


def test_data_without_answers_is_refused(tmp_path):
    write_shard(tmp_path / "shard-00000.safetensors", [Text([1, 2, 3], [])])
    with pytest.raises(DataError, match="no answers"):
        read_corpus(tmp_path)


def test_the_draft_vocabulary_holds_the_special_tokens_and_the_frequent_ones():
    corpus = join([Text([9, 9, 5, 7, 50], [(0, 4)]), Text([9, 5], [(0, 2)])])
    vocab = choose_vocab(corpus, 60, 4, forced=[0, 2])
    assert vocab.token_ids_V.tolist() == [0, 2, 5, 9]
    assert vocab.coverage == pytest.approx(5 / 6)
    assert vocab.draft_index()[torch.tensor([0, 1, 5, 9])].tolist() == [0, -1, 2, 3]
    with pytest.raises(ConfigError, match="no room"):
        choose_vocab(corpus, 60, 1, forced=[0, 2])
    with pytest.raises(ConfigError, match="outside"):
        choose_vocab(corpus, 60, 8, forced=[99])


def test_a_recipe_refuses_keys_it_does_not_know():
    with pytest.raises(ConfigError, match="learning_rate"):
        make_recipe({"train": {"steps": 1, "learning_rate": 1}}, "recipe")
    with pytest.raises(ConfigError, match="optimiser"):
        make_recipe({"train": {"steps": 1}, "optimiser": {}}, "recipe")


@pytest.mark.parametrize(
    ("section", "values", "words"),
    [
        ("train", {"steps": "ten"}, "recipe.train.steps: expected a whole number, found 'ten'"),
        ("train", {"steps": 0}, "steps is 0"),
        ("train", {"steps": 1, "lr": [1]}, "recipe.train.lr: expected a number"),
        ("train", {"time_budget_s": float("nan")}, "time_budget_s is nan"),
        ("draft", {"vocab_size": 0}, "vocab_size is 0"),
        ("data", {"seed": "x"}, "recipe.data.seed"),
        ("data", {"max_answer": 0}, "max_answer is 0"),
        ("generate", {"rows": 0}, "rows is 0"),
        ("files", {"prompts": "train.jsonl"}, "recipe.files.prompts: expected a list"),
        ("files", {"evaluate": 3}, "recipe.files.evaluate: expected a list"),
        ("files", {"evaluate": [{"name": "a"}]}, "key 'file' is missing"),
        ("files", {"evaluate": [{"name": "../a", "file": "b"}]}, "files are named after it"),
        ("files", {"evaluate": [{"name": "a", "file": "b", "first": -1}]}, "first is -1"),
        ("files", {"evaluate": 2 * [{"name": "a", "file": "b"}]}, "names a twice"),
    ],
)
def test_a_recipe_refuses_values_that_cannot_be(section, values, words):
    with pytest.raises(ConfigError, match=words):
        make_recipe({"train": {"steps": 1}, section: values}, "recipe")


def test_a_corpus_that_another_target_wrote_is_refused(data, tmp_path):
    corpus = tmp_path / "corpus"
    first = Speaker(tiny_target(vocab_size=VOCAB), CharTokenizer(), digest="of the first")
    make_corpus(first, recipe(maths=0), data, corpus, Watch())
    make_corpus(first, recipe(maths=0), data, corpus, Watch())
    other = Speaker(tiny_target(seed=1, vocab_size=VOCAB), CharTokenizer(), digest="of another")
    with pytest.raises(DataError, match="was written by another target"):
        make_corpus(other, recipe(maths=0), data, corpus, Watch())


def test_a_number_with_an_exponent_needs_no_dot(tmp_path):
    (tmp_path / "recipe.yaml").write_text("train: {steps: 1, lr: 6e-4}")
    assert read_recipe(tmp_path / "recipe.yaml").train.lr == 6e-4
    (tmp_path / "recipe.yaml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"recipe\.yaml: cannot be read as a recipe"):
        read_recipe(tmp_path / "recipe.yaml")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b'{"question": ', ":2: is not JSON"),
        (b"[1]", ":2: is not a JSON object"),
        (b'{"messages": 5}', ":2: its messages are 5"),
        (b'{"messages": [5]}', ":2: a message needs a role"),
        (b'{"conversations": [{"from": ["human"], "value": "a"}]}', ":2: a message needs a role"),
        (b'{"instruction": "a", "instances": [3]}', ":2: 'instances' is not a list"),
        (b'{"question": "\xff"}', "no text in UTF-8"),
    ],
)
def test_a_broken_line_of_prompts_is_named(tmp_path, line, words):
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(b'{"question": "a"}\n' + line + b'\n{"question": "b"}\n')
    with pytest.raises(DataError, match=f"{path}.*{words}"):
        read_prompts(path)


def test_a_compressed_file_that_ends_too_soon_is_said_to_be_damaged(tmp_path):
    path = tmp_path / "prompts.jsonl.xz"
    path.write_bytes(lzma.compress(b'{"question": "a"}\n' * 99)[:-20])
    with pytest.raises(DataError, match="is damaged"):
        read_prompts(path)


def test_a_full_disk_is_a_sentence_and_leaves_no_half_file(tmp_path, monkeypatch):
    import errno

    from slipstream.train.data import corpus as module

    def full(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(module, "save_file", full)
    with pytest.raises(DataError, match="disk is full"):
        write_shard(tmp_path / "shard-00000.safetensors", [Text([1, 2], [(0, 2)])])
    assert list(tmp_path.iterdir()) == []


def test_a_token_is_worth_as_many_answers_as_it_is_in():
    corpus = join([Text([9, 9, 5, 5, 5, 5, 5], [(2, 7)]), Text([9, 6, 7], [(1, 3)]), Text([9, 6, 5], [(1, 2)])])
    assert choose_vocab(corpus, 60, 1, forced=()).token_ids_V.tolist() == [6]


def write_yaml(path, content) -> None:
    path.write_text(yaml.safe_dump(content), encoding="utf-8")


def test_templates_are_filled_in_with_every_combination_and_no_more_than_is_worth_it(tmp_path):
    few = {"text": "A {colour} {thing}.", "slots": {"colour": ["red", "blue"], "thing": ["car", "cat", "hat"]}}
    many = {"text": "{a}{b}", "slots": {name: [f"{name}{i}" for i in range(20)] for name in "ab"}}
    write_yaml(tmp_path / "own.yaml", {"prompts": ["As it is {so}."], "templates": [few, many]})
    prompts = [messages[0]["content"] for messages in read_prompts(tmp_path / "own.yaml")]
    assert prompts[0] == "As it is {so}."
    assert set(prompts[1:7]) == {f"A {c} {t}." for c in ("red", "blue") for t in ("car", "cat", "hat")}
    assert len(prompts[7:]) == len(set(prompts[7:])) == MOST_OF_ONE
    assert prompts == [messages[0]["content"] for messages in read_prompts(tmp_path / "own.yaml")]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"templates": [{"text": "A {b}", "slots": {"c": ["d"]}}]}, r"templates\[0\].*\['b'\].*\['c'\]"),
        ({"templates": [{"text": "A {b", "slots": {"b": ["d"]}}]}, r"templates\[0\].*cannot be filled in"),
        ({"templates": [{"text": "A {b}", "slots": {"b": []}}]}, "'b' has no values"),
        ({"prompt": ["x"]}, "Did you mean 'prompts'"),
        ({}, "holds no prompts"),
    ],
)
def test_a_file_of_templates_that_cannot_be_filled_in_is_named(tmp_path, content, words):
    write_yaml(tmp_path / "own.yaml", content)
    with pytest.raises(DataError, match=f"(?s)own.yaml.*{words}"):
        read_prompts(tmp_path / "own.yaml")


def test_the_prompts_that_ship_with_the_recipes_can_be_read():
    folder = Path(__file__).parents[2] / "recipes" / "train" / "prompts"
    prompts = [messages[0]["content"] for path in sorted(folder.glob("*.yaml")) for messages in read_prompts(path)]
    assert len(prompts) > 30_000 and len(set(prompts)) > 0.99 * len(prompts)


def test_maths_questions_follow_their_own_examples(data):
    tokenizer = CharTokenizer()
    config = DataConfig(magpie=0, maths=1, second_turn=0, max_prompt=2000)
    own = [[{"role": "user", "content": f"what is {i} and {i} and {i}, all of them together"}] for i in range(20)]
    source = ConversationSource(tokenizer, config, read_prompts(data / "train.jsonl"), frozenset(), Shown(maths=own))
    shown = tokenizer.decode(source.take(1)[0].prompt)
    assert "all of them together" in shown


def test_a_prompt_from_a_file_is_answered_greedily_once_at_most(data):
    config = DataConfig(magpie=0, maths=0, second_turn=0, greedy=1.0, file_repeats=3)
    source = ConversationSource(CharTokenizer(), config, read_prompts(data / "train.jsonl"), frozenset())
    requests = source.take(200)
    greedy = [tuple(request.prompt) for request in requests if request.temperature == 0]
    assert len(requests) == 3 * 40 and len(greedy) == len(set(greedy)) == 40
