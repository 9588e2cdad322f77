"""Drafts are compared on the same prompts, group by group, with plain decoding among them."""

import pytest

from slipstream.engine.loading import LoadOptions, load
from slipstream.errors import ConfigError
from slipstream.speculation.sampling import SamplingParams
from slipstream.speculation.tree import TreeShape
from slipstream.train.draft.compare import NO_DRAFT, compare_drafts
from training import write_target_folder

PROMPTS = [[{"role": "user", "content": text}] for text in ("one", "two", "three", "four", "five")]
PARAMS = SamplingParams(max_tokens=6, seed=0, ignore_eos=True)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    target = write_target_folder(tmp_path_factory.mktemp("compare") / "target")
    return load(LoadOptions(target, "none", device="cpu", max_requests=2))


def test_every_way_of_decoding_answers_every_group_and_is_timed_on_each(loaded):
    counted: list[int] = []
    shapes = [TreeShape.chain(1), TreeShape.chain(2)]
    results = compare_drafts(loaded, ["ngram"], shapes, PROMPTS, PARAMS, advance=counted.append)
    assert [(result.name, result.shape) for result in results] == [(NO_DRAFT, None), *(("ngram", s) for s in shapes)]
    assert sum(counted) == 3 * len(PROMPTS)
    for result in results:
        assert len(result.speeds) == 3 and min(result.speeds) > 0  # groups of two, two and one
        assert result.num_identical == result.num_answers == len(PROMPTS)
        assert result.stats.emitted == 6 * len(PROMPTS)
    assert results[0].stats.drafted == 0 and results[1].stats.drafted > 0


def test_answers_are_compared_by_their_seed(loaded):
    with pytest.raises(ConfigError, match="needs a seed"):
        compare_drafts(loaded, ["ngram"], [TreeShape.chain(1)], PROMPTS, SamplingParams(max_tokens=2))
