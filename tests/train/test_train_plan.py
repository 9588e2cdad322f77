"""A time budget becomes a plan, once; a target's captured layers are distinct."""

import dataclasses
import itertools

import pytest
import torch

from slipstream.errors import ConfigError
from slipstream.train.data.prompts import normalized, read_prompts
from slipstream.train.draft.objective import DraftShape
from slipstream.train.run.plan import (
    Speeds,
    check_asked,
    expected_acceptance,
    make_plan,
    read_plan,
    write_plan,
)
from slipstream.train.run.trial import PROMPT_SETS, plain_recipe
from training import tiny_spec

SPEEDS = Speeds(800.0, 0.9, 1.4, 0.5, 0.4, 0.7)
CPU = torch.device("cpu")


def plan(budget_s, store=True):
    spent = {"loading": 10.0, "trial": 30.0, "measuring": 15.0, "writing": 4.0}
    recipe = plain_recipe(tiny_spec(), CPU, budget_s)
    return make_plan({"target": "a", "budget_s": budget_s}, recipe, SPEEDS, spent, store)


@pytest.mark.parametrize("store", [True, False])
@pytest.mark.parametrize("budget_s", [300.0, 600.0, 7200.0])
def test_a_plan_fills_the_budget_and_no_more(budget_s, store):
    made = plan(budget_s, store)
    assert 0.85 * budget_s < sum(made.phases.values()) <= 0.93 * budget_s
    assert made.recipe.train.steps > 1 and made.recipe.data.answer_tokens > 1000
    assert any("minutes" in line or "min" in line for line in made.lines())


def test_a_longer_budget_buys_more_data_more_steps_and_more_acceptance():
    plans = [plan(budget_s) for budget_s in (300.0, 600.0, 1200.0)]
    for less, more in itertools.pairwise(plans):
        assert less.recipe.train.steps < more.recipe.train.steps
        assert less.recipe.data.answer_tokens < more.recipe.data.answer_tokens
        assert less.acceptance < more.acceptance
    assert expected_acceptance(1) == 1.0 and expected_acceptance(1e12) == expected_acceptance(2e8)


def test_a_budget_that_loading_eats_is_refused_with_one_that_would_do():
    with pytest.raises(ConfigError, match=r"leaves too little for data and training; give \d+ s or more"):
        plan(70.0)


def test_a_plan_is_read_back_as_it_was_and_serves_no_other_run(tmp_path):
    made = plan(600.0)
    assert read_plan(tmp_path) is None
    write_plan(tmp_path, made)
    again = read_plan(tmp_path)
    assert again == dataclasses.replace(made)
    check_asked(again, made.asked, tmp_path)
    with pytest.raises(ConfigError, match=r"another run \(budget_s differ\)"):
        check_asked(again, {**made.asked, "budget_s": 300.0}, tmp_path)


def test_a_target_that_cannot_fit_is_refused_before_any_work():
    huge = dataclasses.replace(tiny_spec(), hidden_size=65_536, intermediate_size=262_144, num_layers=200)
    with pytest.raises(ConfigError, match="Split the target over more devices"):
        plain_recipe(huge, CPU, 600.0)


def test_the_questions_a_draft_is_measured_on_are_not_among_those_it_learns_from():
    held_out = {normalized(messages[0]["content"]) for messages in read_prompts(PROMPT_SETS / "held_out.yaml")}
    learnt = {
        normalized(messages[0]["content"])
        for name in ("maths.yaml", "chat.yaml")
        for messages in read_prompts(PROMPT_SETS / name)
    }
    assert len(held_out) == 16 and len(learnt) > 5000 and held_out.isdisjoint(learnt)


@pytest.mark.parametrize("num_layers", range(2, 40))
def test_a_new_draft_captures_three_different_layers(num_layers):
    target = dataclasses.replace(tiny_spec(), num_layers=num_layers)
    low, middle, high = DraftShape().spec(target).captured_layers
    assert 0 <= low < middle < high <= num_layers
    if num_layers >= 7:
        assert (low, middle, high) == target.default_captured_layers()


def test_layers_that_are_not_three_or_not_distinct_are_refused():
    with pytest.raises(ConfigError, match=r"draft\.captured_layers=\[0, 1\]"):
        DraftShape().spec(dataclasses.replace(tiny_spec(), num_layers=1))
    with pytest.raises(ConfigError, match="names a layer twice"):
        DraftShape(captured_layers=(2, 3, 3)).spec(tiny_spec())
