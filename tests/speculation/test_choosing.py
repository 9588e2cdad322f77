"""The choice among captured shapes: what gives the most tokens a second by measured costs and learned chances."""

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.speculation.chances import Chances
from slipstream.speculation.choosing import Controller
from slipstream.speculation.tree import TreeShape

CHAINS = tuple(TreeShape.chain(length) for length in (1, 3, 5))
TREES = (TreeShape(5, 4, 8), TreeShape(5, 4, 16))
KINDS = {
    "useless": (0.02, 0.0, 0.0, 0.0, 0.0),
    "poor": (0.35, 0.12, 0.04, 0.01, 0.0),
    "usual": (0.7, 0.5, 0.35, 0.25, 0.18),
    "good": (0.85, 0.72, 0.6, 0.5, 0.42),
    "excellent": (0.97, 0.94, 0.91, 0.88, 0.85),
}


def seconds(shapes=CHAINS, step_s=4.0, node_s=0.05, level_s=0.2, follow_s=0.15):
    """Return what steps take on a device where a node costs a little and a level of the draft a little more."""
    costs = {None: step_s}
    return costs | {s: step_s + follow_s + s.depth * level_s + (s.num_nodes - 1) * node_s for s in shapes}


def run(kept_of, costs, steps=300, rows=4, controller=None):
    """Choose while the host learns of each step when the next is under way; return tokens a second, and all choices.

    Args:
        kept_of: returns the rates by place at which drafted tokens of a shape are kept.
    """
    drawn, controller = random.Random(3), controller or Controller([shape for shape in costs if shape])
    tokens, taken, chosen, unread = 0.0, 0.0, [], None
    for _ in range(steps):
        choice = controller.choose(rows, rows, costs)
        if unread is not None:
            controller.learn(*unread)
        kept = []
        for _ in range(rows if choice else 0):
            number = drawn.random()
            kept.append(sum(number < rate for rate in kept_of(choice)[: choice.depth]))
        unread = None if choice is None else (choice, kept)
        tokens += rows + sum(kept)
        taken += costs[choice]
        chosen.append(choice)
    return tokens / taken, chosen


@pytest.mark.parametrize("rows", [1, 8, 64])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("device", [{}, {"node_s": 0.6}, {"node_s": 2.0, "level_s": 1.0}, {"level_s": 0.02}])
def test_the_choice_is_nearly_as_good_as_the_best_fixed_one_and_never_much_below_plain(kind, device, rows):
    costs, rates = seconds(**device), KINDS[kind]
    rate, _ = run(lambda shape: rates, costs, rows=rows)
    fixed = {shape: rows * (1 + sum(rates[: shape.depth] if shape else ())) / taken for shape, taken in costs.items()}
    assert rate >= 0.93 * max(fixed.values())
    assert rate >= 0.97 * fixed[None]


def test_drafting_rests_where_it_loses_longer_each_time_and_is_tried_in_few_steps():
    _, chosen = run(lambda shape: KINDS["useless"], seconds(node_s=1.0), steps=2000)
    rests = [len(list(same)) for is_rest, same in itertools.groupby(chosen, lambda choice: choice is None) if is_rest]
    tries = sum(choice is not None for choice in chosen)
    assert rests[:3] == sorted(rests[:3])
    assert max(rests) == 256
    assert tries < 0.03 * len(chosen)


def test_a_draft_that_becomes_good_is_found_out_when_it_is_tried_again():
    controller = Controller(CHAINS)
    run(lambda shape: KINDS["useless"], seconds(), rows=1, steps=100, controller=controller)
    assert controller.rests
    rate, _ = run(lambda shape: KINDS["excellent"], seconds(), rows=1, steps=800, controller=controller)
    assert rate > 2 * 1 / seconds()[None]


def test_another_text_is_a_reason_to_try_again_where_one_is_written_at_a_time():
    controller = Controller(CHAINS)
    run(lambda shape: KINDS["useless"], seconds(), rows=1, steps=100, controller=controller)
    controller.begin_text(8)
    assert controller.choose(1, 1, seconds()) is None
    controller.begin_text(1)
    assert controller.choose(1, 1, seconds()) is not None


def test_one_row_that_drafts_among_many_that_may_not_does_not_hold_them_up():
    costs = seconds(node_s=0.5)
    assert Controller(CHAINS).choose(64, 1, costs) is None
    assert Controller(CHAINS).choose(1, 1, costs) is not None


def test_why_is_told():
    controller = Controller(CHAINS)
    run(lambda shape: KINDS["good"], seconds(), controller=controller)
    told = controller.explain()
    assert set(told["tokens_a_second"]) == {"no drafts", "chain of 1", "chain of 3", "chain of 5"}
    assert told["tokens_a_second"][told["chosen"]] >= 0.98 * max(told["tokens_a_second"].values())
    assert told["chances"] == sorted(told["chances"], reverse=True)


@pytest.mark.parametrize("chance", [0.02, 0.4, 0.7])
@pytest.mark.parametrize("node_s", [0.002, 0.05, 0.4])
def test_trees_are_weighed_by_what_is_kept_of_them_and_what_their_nodes_cost(chance, node_s):
    """Siblings make a token likelier to be kept, and cost nodes: the choice comes near the best fixed one."""
    costs = seconds((*CHAINS, *TREES), node_s=node_s)

    def kept_of(shape):
        power = 1.0 if shape in CHAINS else 1.5 if shape == TREES[0] else 1.8
        return [(1 - (1 - chance) ** power) ** place for place in range(1, 6)]

    rate, _ = run(kept_of, costs, steps=3000)
    fixed = [4 * (1 + sum(kept_of(shape)[: shape.depth] if shape else ())) / taken for shape, taken in costs.items()]
    assert rate >= 0.95 * max(fixed)
    assert rate >= 0.97 * fixed[0]


def test_what_was_kept_of_a_shape_that_is_no_choice_is_not_learned():
    controller = Controller(CHAINS)
    controller.learn(TREES[0], [5, 5])
    assert controller.choose(1, 1, seconds()) == CHAINS[0], "still nothing is known"


@given(
    costs_s=st.lists(st.floats(1e-4, 1.0), min_size=6, max_size=6),
    kept=st.lists(st.tuples(st.sampled_from((*CHAINS, *TREES)), st.lists(st.integers(0, 5), max_size=5)), max_size=30),
    rows=st.tuples(st.integers(1, 64), st.integers(1, 64)),
)
@settings(max_examples=60, deadline=None)
def test_whatever_was_kept_and_whatever_steps_take_a_choice_is_one_of_those_with_a_price(costs_s, kept, rows):
    costs = dict(zip((None, *CHAINS, *TREES), costs_s, strict=True))
    controller = Controller((*CHAINS, *TREES))
    for shape, counts in kept:
        controller.learn(shape, [min(count, shape.depth) for count in counts])
        assert controller.choose(max(rows), min(rows), costs) in costs
        told = controller.last
        assert all(0 <= chance <= 1 for chance in told.chances)
        assert list(told.chances) == sorted(told.chances, reverse=True)
        assert told.rates[told.chosen] >= max(told.rates.values()) / 1.01 - 1e-9
        assert told.rates[None] == pytest.approx(max(rows) / costs[None])


@pytest.mark.parametrize(("rate", "least", "most"), [(1.0, 0.95, 1.0), (0.9, 0.7, 0.9), (0.4, 0.0, 0.25)])
def test_what_trees_keep_tells_of_chains_which_fail_more_often(rate, least, most):
    drawn, chains = random.Random(1), Chances(1)
    for _ in range(400):
        chains.learn_from_tree(1, [int(drawn.random() < rate) for _ in range(8)])
    assert least <= chains.by_place()[0] <= most


def test_a_long_chain_is_found_behind_a_tree_that_is_shorter():
    shapes = (*CHAINS, TreeShape.chain(7), TreeShape(5, 4, 15))
    rates = (0.97, 0.94, 0.91, 0.88, 0.85, 0.82, 0.79)
    costs = seconds(shapes, step_s=4.5, node_s=0.004, level_s=0.28, follow_s=0.25)
    _, chosen = run(lambda shape: rates, costs, rows=1, steps=200)
    assert chosen[-1] == TreeShape.chain(7)
