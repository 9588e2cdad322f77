"""Drafts are compared on the same prompts, group by group, with plain decoding among them."""

import dataclasses

import pytest

from slipstream.engine.config import EngineConfig
from slipstream.engine.loading import LoadOptions, load
from slipstream.errors import ConfigError
from slipstream.speculation.sampling import SamplingParams
from slipstream.speculation.tree import TreeShape
from slipstream.train.draft.compare import COPYING, NO_DRAFT, compare_drafts
from slipstream.train.run.output import write_draft
from training import objective_for, random_texts, run_record, write_target_folder

PROMPTS = [[{"role": "user", "content": text}] for text in ("one", "two", "three", "four", "five")]
PARAMS = SamplingParams(max_tokens=6, seed=0, ignore_eos=True)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    target = write_target_folder(tmp_path_factory.mktemp("compare") / "target")
    return load(LoadOptions(target, "none", device="cpu", max_requests=2))


def test_every_way_of_decoding_answers_every_group_and_is_timed_on_each(loaded):
    counted: list[int] = []
    shapes = [TreeShape.chain(1), TreeShape.chain(2)]
    asked = [shapes[0], TreeShape(depth=2, width=2, budget=4)]
    results = compare_drafts(loaded, ["ngram"], asked, PROMPTS, PARAMS, advance=counted.append)
    assert [(result.name, result.shape) for result in results] == [(NO_DRAFT, None), *(("ngram", s) for s in shapes)]
    assert sum(counted) == 3 * len(PROMPTS)
    for result in results:
        assert len(result.speeds) == 3 and min(result.speeds) > 0  # groups of two, two and one
        assert result.num_identical == result.num_answers == len(PROMPTS)
        assert result.stats.emitted == 6 * len(PROMPTS)
    assert results[0].stats.drafted == 0 and results[1].stats.drafted > 0


def test_a_draft_stands_alone_and_with_copied_tokens_beside_its_own(loaded, tmp_path):
    draft = tmp_path / "draft"
    objective, _, _ = objective_for(loaded.target, random_texts(20, vocab_size=loaded.target.spec.vocab_size))
    write_draft(draft, objective.draft, "sglang", run_record({}))
    target = write_target_folder(tmp_path / "target")
    copying = load(LoadOptions(target, "none", device="cpu", max_requests=2, engine=EngineConfig(copied_tokens=8)))
    params = dataclasses.replace(PARAMS, max_tokens=40)
    results = compare_drafts(copying, [str(draft)], [TreeShape.chain(2)], PROMPTS, params)
    assert [result.name for result in results] == [NO_DRAFT, str(draft), str(draft) + COPYING]
    assert all(result.num_identical == len(PROMPTS) == len(result.by_answer) for result in results)
    assert results[2].stats.passes < results[1].stats.passes  # a random model soon repeats itself


def test_answers_are_compared_by_their_seed(loaded):
    with pytest.raises(ConfigError, match="needs a seed"):
        compare_drafts(loaded, ["ngram"], [TreeShape.chain(1)], PROMPTS, SamplingParams(max_tokens=2))


def test_a_prompt_that_does_not_fit_is_named_before_the_others_are_answered(loaded):
    long = [{"role": "user", "content": "word " * 5000}]
    counted: list[int] = []
    with pytest.raises(ConfigError, match=r"Prompt 3 has [\d,]+ tokens.*--max-context \d+"):
        compare_drafts(loaded, ["ngram"], [TreeShape.chain(1)], [*PROMPTS[:2], long], PARAMS, advance=counted.append)
    assert not counted
