"""Chains end where going on would not pay, by costs and confidence alone; the text never depends on it."""

import math
import random

import pytest

from slipstream.engine.build import build_engine
from slipstream.engine.config import EngineConfig
from slipstream.kernels.cpu.library import LIBRARY_PATH
from slipstream.kernels.cpu.ops import CpuOps
from slipstream.speculation.controller import ChainController, DraftedPass
from slipstream.speculation.pace import Pace
from slipstream.speculation.sampling import SamplingParams
from slipstream.speculation.tree import TreeShape
from tiny import follower_draft, run, tiny_draft, tiny_target


def simulate(row_s: float, base_s: float = 0.005, level_s: float = 0.0003, true_chance=lambda p: p, passes=400):
    """Run a controller on a machine whose costs are known, for one request and chains of 5; return it."""
    controller, order = ChainController(), random.Random(0)
    for _ in range(passes):
        floor = controller.floor(1)
        score, nodes, alive = 0.0, [], True
        for _ in range(5):
            score += math.log(order.uniform(0.3, 1.0))
            if score < floor:
                break
            alive = alive and order.random() < true_chance(math.exp(score)) / (
                true_chance(math.exp(nodes[-1][0])) if nodes else 1
            )
            nodes.append((score, alive))
        rows, levels = 1 + len(nodes), max(len(nodes), 1)
        check_s = base_s + row_s * rows
        cycle_s = check_s + level_s * levels
        kept = sum(alive for _, alive in nodes)
        controller.record(DraftedPass(1, rows, levels, level_s * levels, check_s, cycle_s, 1 + kept, nodes))
    return controller


def test_where_rows_cost_nothing_everything_is_worth_checking():
    assert simulate(row_s=0.0, level_s=0.0).floor(1) == -math.inf


def test_where_a_row_costs_as_much_as_a_pass_only_what_is_nearly_sure_is_drafted():
    assert simulate(row_s=0.05, base_s=0.0).floor(1) >= math.log(0.7)


def test_the_dearer_a_row_the_surer_the_draft_must_be():
    floors = [simulate(row_s=row_s).floor(1) for row_s in (0.0001, 0.001, 0.004)]
    assert floors == sorted(floors)
    assert floors[0] < floors[-1]


def test_a_draft_that_is_wrong_when_sure_is_cut_where_an_honest_one_is_not():
    assert simulate(0.001, true_chance=lambda p: p**6).floor(1) > simulate(0.001, true_chance=lambda p: p).floor(1)


def decide(level_chances, row_s=0.0005, level_s=0.0004, follow_s=0.0004, requests=8, passes=200):
    """Run a controller where every level's nodes are kept with a known chance; return the depths it chose."""
    controller, order, depths = ChainController(), random.Random(0), []
    for _ in range(passes):
        reach = controller.reach(requests, len(level_chances))
        depths.append(reach.depth)
        nodes, by_level = [], [(0, 0)] * reach.depth
        for _ in range(requests):
            score, alive = 0.0, True
            for level, chance in enumerate(level_chances[: reach.depth]):
                score += math.log(order.uniform(0.6, 1.0))
                if score < reach.floor:
                    break
                alive = alive and order.random() < chance
                nodes.append((score, alive))
                by_level[level] = (by_level[level][0] + 1, by_level[level][1] + alive)
        rows, levels = requests + len(nodes), len(by_level)
        drafts = levels > 0
        check_s = 0.008 + row_s * rows * order.uniform(0.99, 1.01)
        draft_s, follow = level_s * levels, follow_s * (drafts or reach.follows)
        emitted = requests + sum(kept for _, kept in by_level)
        cycle_s = check_s + draft_s + follow
        controller.record(
            DraftedPass(requests, rows, levels, draft_s, check_s, cycle_s, emitted, nodes, follow, by_level)
        )
    return depths


def usual(depths):
    return max(set(depths[-60:]), key=depths[-60:].count)


def test_drafting_rests_where_nothing_is_kept_and_is_tried_again_now_and_then():
    depths = decide([0.02, 0.02, 0.02], passes=700)
    assert usual(depths) == 0
    tries = [index for index, depth in enumerate(depths) if depth > 0 and depths[index - 1] == 0][-3:]
    assert 64 <= tries[1] - tries[0] < tries[2] - tries[1] <= 512 + 4


def test_drafting_rests_where_rows_cost_more_than_they_bring():
    assert usual(decide([0.6, 0.6], row_s=0.01)) == 0
    assert usual(decide([0.6, 0.6], row_s=0.0001)) == 2


def test_a_level_that_does_not_pay_is_left_out_though_the_first_pays():
    assert usual(decide([0.9, 0.1, 0.1])) == 1
    assert usual(decide([0.9, 0.9, 0.9])) == 3


def test_resting_asks_for_no_following_and_drafting_does():
    controller = ChainController()
    for _ in range(40):
        controller.record(DraftedPass(8, 16, 1, 0.001, 0.01, 0.012, 8, [(-0.1, False)] * 8, 0.001, [(8, 0)]))
    assert not controller.reach(8, 5).follows
    assert ChainController().reach(8, 5).follows


def test_confidence_is_corrected_by_what_was_kept():
    controller = ChainController()
    hope = controller.chance(0.55)
    controller.learn([(math.log(0.55), False)] * 200)
    assert controller.chance(0.55) < 0.1 < hope
    controller.learn([(math.log(0.95), True)] * 200)
    assert controller.chance(0.95) > 0.95


def test_costs_of_small_and_large_batches_are_kept_apart():
    controller = simulate(row_s=0.05, base_s=0.0)
    assert controller.floor(1) >= math.log(0.7)
    assert controller.floor(8) == ChainController().floor(8)


def test_one_pass_that_lost_its_core_changes_little():
    steady = simulate(row_s=0.001)
    before = steady.floor(1)
    steady.record(DraftedPass(1, 6, 5, 0.0015, 9.0, 9.1, 3, []))
    assert steady.floor(1) == pytest.approx(before, abs=0.5)


def test_a_pass_with_a_prompt_in_it_teaches_what_is_kept_but_not_what_it_costs():
    clock = iter(range(100))
    controller = ChainController()
    pace = Pace(controller, lambda: float(next(clock)))
    hope = controller.chance(0.95)
    for _ in range(20):
        pace.start(1, 5)
        pace.drafted([7], [[math.log(0.95)]], [1])
        pace.checked({7: 0, 8: 300})  # request 8 had its prompt computed
    assert controller.chance(0.95) < hope
    assert controller.floor(1) == ChainController().floor(1)


def test_a_round_followed_by_a_prompts_own_pass_is_left_out():
    times = iter([0.0, 1.0, 2.0, 50.0, 51.0, 52.0])
    controller = ChainController()
    seen = []
    controller.record = seen.append
    pace = Pace(controller, lambda: next(times))
    pace.start(1, 5)
    pace.drafted([7], [[-0.1]], [1])
    pace.checked({7: 1})
    pace.checked({9: 400})
    pace.start(1, 5)
    assert seen == []
    pace.drafted([7], [[-0.1]], [1])
    pace.checked({7: 1})
    times = iter([60.0])
    pace.start(1, 5)
    assert [(round_.draft_s, round_.check_s, round_.cycle_s) for round_ in seen] == [(1.0, 1.0, 10.0)]


@pytest.mark.skipif(not LIBRARY_PATH.exists(), reason="CPU kernels not built")
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_chains_cut_anywhere_give_the_text_of_plain_decoding(temperature):
    target, ops = tiny_target(), CpuOps(1)
    config = EngineConfig(max_context=128, page_size=4)
    prompts = [[3, 1, 4, 1, 5], [9, 2, 6], [5] * 11]
    params = [SamplingParams(max_tokens=40, temperature=temperature) for _ in prompts]
    plain = run(build_engine(target, None, TreeShape(), config, ops), prompts, params, [1, 2, 3])
    for draft in (follower_draft(target), tiny_draft(target, seed=5)):
        engine = build_engine(target, draft, None, config, ops)
        assert run(engine, prompts, params, [1, 2, 3]) == plain
        drafted = engine.stats.acceptance
        assert 0 < drafted.drafted < 5 * drafted.decoding_passes  # some chains were cut, not all
