"""The choice among captured lengths: what gives the most tokens a second by measured costs and learned chances."""

import random

import pytest

from slipstream.speculation.lengths import REST, Choice, LengthController

LENGTHS = (1, 3, 5)
FOLLOWS = Choice(0, follows=True)


def seconds(step_s=4.0, node_s=0.05, level_s=0.2, follow_s=0.15):
    """Return what steps take on a device where a node costs a little and a level of the draft a little more."""
    costs = {REST: step_s, FOLLOWS: step_s + follow_s}
    return costs | {Choice(n, True): step_s + follow_s + n * (node_s + level_s) for n in LENGTHS}


def run(chances, costs, steps=600, rows=4, controller=None):
    """Let the controller choose while tokens are kept by chance; return tokens a second and what was chosen last."""
    choose, controller = random.Random(3), controller or LengthController(LENGTHS)
    tokens = taken = 0.0
    for _ in range(steps):
        choice = controller.choose(rows, rows, costs)
        kept = []
        for _ in range(rows if choice.length else 0):
            count = 0
            while count < choice.length and choose.random() < chances:
                count += 1
            kept.append(count)
        controller.learn(choice, kept)
        tokens += rows + sum(kept)
        taken += costs[choice]
    return tokens / taken, controller


def best_fixed(chances, costs, rows=4):
    def tokens(length):
        return rows * (1 + sum(chances**k for k in range(1, length + 1)))

    return max(tokens(choice.length) / taken for choice, taken in costs.items())


@pytest.mark.parametrize("chances", [0.02, 0.3, 0.6, 0.8, 0.95])
@pytest.mark.parametrize("device", [{}, {"node_s": 0.6}, {"node_s": 2.0, "level_s": 1.0}, {"level_s": 0.02}])
def test_the_choice_is_nearly_as_good_as_the_best_fixed_one_and_never_much_below_plain(chances, device):
    costs = seconds(**device)
    rate, _ = run(chances, costs)
    assert rate >= 0.95 * best_fixed(chances, costs)
    assert rate >= 0.96 * 4 / costs[REST]


def test_it_rests_where_drafting_loses_and_wakes_when_what_it_knows_has_faded():
    costs = seconds(node_s=1.0)
    _, controller = run(0.02, costs)
    assert controller.last.chosen == REST
    for _ in range(20_000):
        controller.learn(REST, ())
    assert controller.choose(4, 4, seconds()).length > 0


def test_rows_that_are_late_draft_nothing():
    assert LengthController(LENGTHS).choose(8, 0, seconds()) == REST


def test_one_row_that_drafts_among_many_that_are_late_does_not_hold_them_up():
    costs = seconds(node_s=0.5)
    assert LengthController(LENGTHS).choose(64, 1, costs) == REST
    assert LengthController(LENGTHS).choose(1, 1, costs).length > 0


def test_why_is_told():
    _, controller = run(0.8, seconds())
    told = controller.last
    assert told.rates[told.chosen] == pytest.approx(max(told.rates.values()), rel=0.02)
    assert list(told.chances) == sorted(told.chances, reverse=True)


TREES = ((5, 8), (5, 16))


@pytest.mark.parametrize("chances", [0.02, 0.4, 0.7])
@pytest.mark.parametrize("node_s", [0.002, 0.05, 0.4])
def test_trees_are_weighed_by_what_is_kept_of_them_and_what_their_nodes_cost(chances, node_s):
    """Siblings make a token likelier to be kept, and cost nodes: the choice comes near the best fixed one."""
    costs = seconds(node_s=node_s) | {Choice(d, True, b): 5.15 + b * node_s for d, b in TREES}
    kept_after = {0: chances, 8: 1 - (1 - chances) ** 1.5, 16: 1 - (1 - chances) ** 1.8}
    choose, controller, tokens, taken = random.Random(5), LengthController(LENGTHS, TREES), 0.0, 0.0
    for _ in range(3000):
        choice = controller.choose(4, 4, costs)
        kept = []
        for _ in range(4 if choice.length else 0):
            count = 0
            while count < choice.length and choose.random() < kept_after[choice.budget]:
                count += 1
            kept.append(count)
        controller.learn(choice, kept)
        tokens, taken = tokens + 4 + sum(kept), taken + costs[choice]

    def rate(choice):
        return 4 * sum(kept_after[choice.budget] ** k for k in range(choice.length + 1)) / costs[choice]

    assert tokens / taken >= 0.95 * max(map(rate, costs))
    assert tokens / taken >= 0.96 * rate(REST)


def test_what_was_kept_of_a_tree_that_is_no_choice_is_not_learned():
    controller = LengthController(LENGTHS, TREES)
    before = controller.chances(8)
    controller.learn(Choice(5, True, 11), [5, 5])
    assert controller.chances(8) == before
