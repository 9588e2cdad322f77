"""A draft learns from traffic: what is better on held-back answers is deployed, and foreign texts never are."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from slipstream.checkpoint.reader import open_checkpoint
from slipstream.checkpoint.writer import CheckpointWriter
from slipstream.models.load import load_target
from slipstream.records.traffic import (
    Answered,
    Deployed,
    TrafficWriter,
    part_paths,
    read_deployed,
    read_part,
    read_returned,
    write_deployed,
)
from slipstream.train.data.corpus import Text, choose_vocab, exchange_tokens, join
from slipstream.train.data.prompts import read_families
from slipstream.train.draft.objective import DraftShape, new_draft
from slipstream.train.run.learner import Learner, LearnSettings, general_prompts
from slipstream.train.run.output import add_draft, mix
from slipstream.train.run.trial import PROMPT_SETS
from slipstream.train.run.verdict import Bars, judge
from training import greedy, write_target_folder

SETTINGS = LearnSettings(longest=256, steps=60, lr=0.01, halfway=False, bars=Bars(gain=1.03, loss=1.0, texts=3))


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """A target, and a draft for it that has learnt nothing and lacks most of its tokens."""
    folder = tmp_path_factory.mktemp("learning")
    write_target_folder(folder / "target")
    target = target_of(folder)
    vocab = choose_vocab(join([Text(list(range(3, 40)), [(1, 37)])]), 99, 64, [0, 1, 2])
    draft = new_draft(DraftShape(vocab_size=64).spec(target.spec), target, vocab, 0)
    with CheckpointWriter(folder / "draft") as writer:
        add_draft(writer, draft, "sglang", "tiny")
    return folder


def target_of(folder):
    return load_target(open_checkpoint(folder / "target"), torch.float32, torch.device("cpu"), 320)


@pytest.fixture(scope="module")
def answers(places):
    """What a server of the target would have kept: greedy answers to prompts of one kind."""
    target, rng = target_of(places), np.random.default_rng(3)
    prompts = [tuple(rng.integers(3, 99, 8).tolist()) for _ in range(90)]
    return [Answered(prompt, tuple(greedy(target, prompt, 24))) for prompt in prompts]


def hold_round(places, folder, answers, settings=SETTINGS, draft=None):
    writer = TrafficWriter(folder, 1_000_000)
    writer.add(answers)
    writer.flush()
    said = []
    for path in (places / "general").glob("*"):  # general texts are the same for every folder: written once
        (folder / path.name).write_bytes(path.read_bytes())
    paths = (str(places / "target"), str(draft or places / "draft"))
    learner = Learner(folder, *paths, torch.device("cpu"), settings, said.append)
    verdict = learner.hold_round()
    (places / "general").mkdir(exist_ok=True)
    for path in folder.glob("*.safetensors"):
        (places / "general" / path.name).write_bytes(path.read_bytes())
    return verdict, said


@pytest.fixture(scope="module")
def learnt(places, answers, tmp_path_factory):
    """A folder after a round over traffic of the target's own, with what was found and said."""
    folder = tmp_path_factory.mktemp("learnt")
    return folder, *hold_round(places, folder, answers)


def test_traffic_of_one_kind_gives_a_draft_that_keeps_more_of_it_and_is_deployed(places, answers, learnt, tmp_path):
    folder, verdict, said = learnt
    assert verdict.after > 1.05 * verdict.before and not verdict.refused, said
    deployed = read_deployed(folder)
    assert deployed.number == 1 and deployed.after == verdict.after
    record = json.loads((folder / deployed.draft / "slipstream.json").read_text())
    assert record["verdict"]["after"] == verdict.after and record["started_from"]
    assert not (folder / "round").exists()
    back, _ = hold_round(places, tmp_path / "back", answers, replace(SETTINGS, halfway=True))
    assert back.before == verdict.before and back.after < verdict.after  # halfway to a draft that knows nothing


def test_shuffled_tokens_are_never_deployed(places, answers, tmp_path):
    rng = np.random.default_rng(1)
    poison = [Answered(one.prompt, tuple(rng.permutation(one.answer).tolist())) for one in answers]
    noise = [Answered(one.prompt, tuple(rng.integers(3, 99, 24).tolist())) for one in answers]
    verdict, said = hold_round(places, tmp_path / "all", [*poison, *noise])
    assert (verdict is None or verdict.refused) and read_deployed(tmp_path / "all") is None
    assert "are not the target's own, and are left out" in said[0]


@pytest.mark.parametrize("kind", ["shuffled", pytest.param("easy", marks=pytest.mark.long)])
def test_poison_that_passes_for_the_target_s_own_is_refused_by_what_the_target_answers_itself(
    places, learnt, kind, tmp_path
):
    target, rng = target_of(places), np.random.default_rng(5)
    poison = []
    for _ in range(48):
        prompt, ids = tuple(rng.integers(3, 99, 8).tolist()), []
        others = iter([7] * 16 if kind == "easy" else rng.permutation(greedy(target, prompt, 16)).tolist())
        while len(ids) < 24:  # every third token is what the target would say there
            ids += [*greedy(target, (*prompt, *ids), 1), next(others, 7), next(others, 7)]
        poison.append(Answered(prompt, tuple(ids)))
    verdict, said = hold_round(places, tmp_path, poison, draft=learnt[0] / "drafts/draft-0001")
    assert "left out" not in said[0] and verdict.refused, said
    assert read_deployed(tmp_path) is None


def test_a_gain_must_be_large_enough_no_accident_and_at_no_great_cost_elsewhere():
    same, more, few = [[1, 1, 1]] * 20, [[2, 2]] * 20, [[1, 1, 1]] * 3
    assert not judge((same, more), (same, same), Bars()).refused
    assert "less than the 3%" in judge((same, same), (same, same), Bars()).refused
    assert "too few" in judge((few, few), (same, same), Bars()).refused
    assert "general texts lose" in judge((same, more), (more, same), Bars()).refused
    lucky = [[3] * 20, *[[1, 1, 1]] * 19]
    assert "accident" in judge((same, lucky), (same, same), Bars()).refused


def test_general_texts_are_guarded_by_prompts_of_templates_that_are_not_rehearsed():
    rehearsed, guards = map(set, general_prompts())
    for file in sorted(PROMPT_SETS.glob("*.yaml")):
        for family in map(set, read_families(file)):
            assert not (family & rehearsed and family & guards)
    assert len(rehearsed) > 40 and len(guards) > 40


def test_tokens_of_the_traffic_take_the_places_of_tokens_nobody_wrote():
    vocab = torch.arange(10, 20)
    corpus = join([Text([1, 12, 40, 41, 40], [(1, 5)])])
    assert exchange_tokens(vocab, corpus, 50, 1).tolist() == [*range(10, 19), 40]
    assert exchange_tokens(vocab, corpus, 50, 5).tolist() == [*range(10, 18), 40, 41]
    assert 12 in exchange_tokens(torch.arange(12, 14), corpus, 50, 5).tolist()


@pytest.mark.parametrize(("share", "head", "fuse"), [(0.5, 1.5, 3.0), (0.75, 1.25, 2.5)])
def test_between_two_drafts_rows_of_tokens_that_one_of_them_lacks_stay(places, share, head, fuse):
    target = target_of(places)
    drafts = []
    for seed, tokens in enumerate((range(3, 40), range(10, 47))):
        vocab = choose_vocab(join([Text([1, *tokens], [(1, 38)])]), 99, 37, [])
        drafts.append(new_draft(DraftShape(vocab_size=37).spec(target.spec), target, vocab, seed))
    mine, other = drafts
    with torch.no_grad():
        mine.lm_head.weight.fill_(1.0)
        other.lm_head.weight.fill_(2.0)
        other.fc.weight.fill_(4.0)
        mine.fc.weight.fill_(2.0)
    known = torch.isin(mine.token_ids_V, other.token_ids_V)
    assert 0 < known.sum() < len(known)
    mix(mine, other, share)
    assert mine.lm_head.weight[known].eq(head).all() and mine.lm_head.weight[~known].eq(1.0).all()
    assert mine.fc.weight.eq(fuse).all()


def test_traffic_is_bounded_and_the_oldest_goes_and_damaged_lines_are_left_out(tmp_path):
    writer = TrafficWriter(tmp_path, 100)
    for number in range(10):
        writer.add([Answered((number,) * 15, (1,) * 15)])
        writer.flush()
    assert writer.num_tokens == 90
    kept = [one for path in part_paths(tmp_path) for one in read_part(path)]
    assert [one.prompt[0] for one in kept] == [7, 8, 9]
    path = part_paths(tmp_path)[0]
    assert path.stat().st_mode & 0o077 == 0
    path.write_text(path.read_text() + '{"prompt": [1], "answer": ["x"]}\nnonsense\n{"prompt": [], "answer": [2]}\n')
    assert len(read_part(path)) == 1 and TrafficWriter(tmp_path, 100).num_tokens == 90


def test_what_was_deployed_and_given_up_is_read_back_and_a_damaged_file_is_nothing(tmp_path):
    write_deployed(tmp_path, Deployed(3, "drafts/draft-0003", 1.2, 1.6))
    assert read_deployed(tmp_path) == Deployed(3, "drafts/draft-0003", 1.2, 1.6) and read_returned(tmp_path) is None
    (tmp_path / "deployed.json").write_text("{")
    assert read_deployed(tmp_path) is None
    for wrong in ({"number": "3"}, {"draft": 4}, {"before": None}, {"after": "x"}):
        values = {"number": 4, "draft": "drafts/draft-0004", "before": 1.2, "after": 1.6} | wrong
        (tmp_path / "deployed.json").write_text(json.dumps(values))
        assert read_deployed(tmp_path) is None, wrong


def test_a_stray_file_among_the_traffic_is_no_part_of_it(tmp_path):
    writer = TrafficWriter(tmp_path, 100)
    writer.add([Answered((1,) * 15, (1,) * 15)])
    writer.flush()
    (path,) = part_paths(tmp_path)
    for name in (f"{path.stem} (copy).jsonl", "part-.jsonl", "part-x.jsonl"):
        (path.parent / name).write_text(path.read_text())
    assert part_paths(tmp_path) == [path] and TrafficWriter(tmp_path, 100).num_tokens == 30
