"""Chains end where going on would not pay, by costs and confidence alone; the text never depends on it."""

import itertools
import math
import random

import pytest

from slipstream.engine.build import build_engine
from slipstream.engine.config import EngineConfig
from slipstream.kernels import Cut
from slipstream.kernels.cpu.library import LIBRARY_PATH
from slipstream.kernels.cpu.ops import CpuOps
from slipstream.speculation.controller import ChainController
from slipstream.speculation.outcomes import Beyond, DraftedChain, DraftedPass
from slipstream.speculation.pace import Pace
from slipstream.speculation.sampling import SamplingParams
from slipstream.speculation.tree import TreeShape
from tiny import follower_draft, run, tiny_draft, tiny_target


def simulate(row_s: float, base_s: float = 0.005, level_s: float = 0.0003, true_chance=lambda p: p, passes=400):
    """Run a controller on a machine whose costs are known, for one request and chains of 5; return it."""
    controller, order = ChainController(), random.Random(0)
    for _ in range(passes):
        reach = controller.reach(1, 5)
        floor = (reach.cut if reach.depth else controller.cut(1)).floor  # drafting goes on even where it should rest
        scores, checked, kept, alive = [], 0, 0, True
        for _ in range(5):
            before = math.exp(scores[-1]) if scores else 1.0
            scores.append((scores[-1] if scores else 0.0) + math.log(order.uniform(0.3, 1.0)))
            if scores[-1] < floor:
                break
            alive = alive and order.random() < true_chance(math.exp(scores[-1])) / true_chance(before)
            checked, kept = checked + 1, kept + alive
        check_s = base_s + row_s * (1 + checked)
        draft_s = level_s * len(scores)
        chains = [DraftedChain(scores, checked, kept)]
        controller.record(DraftedPass(chains, len(scores), draft_s, check_s, check_s + draft_s))
    return controller


def test_where_rows_cost_nothing_everything_is_worth_checking():
    cut = simulate(row_s=0.0, level_s=0.0).cut(1)
    assert (cut.floor, cut.need, cut.price(1), cut.price(30)) == (-math.inf, 0.0, 0.0, 0.0)


def test_where_a_row_costs_as_much_as_a_pass_only_what_is_nearly_sure_is_drafted():
    assert simulate(row_s=0.05, base_s=0.0).cut(1).floor >= math.log(0.7)


def test_the_dearer_a_row_the_surer_the_draft_must_be():
    floors = [simulate(row_s=row_s).cut(1).floor for row_s in (0.0001, 0.001, 0.004)]
    assert floors == sorted(floors)
    assert floors[0] < floors[-1]


def test_the_dearer_a_level_the_more_must_be_likely_to_come_of_it():
    needs = [simulate(row_s=0.0005, level_s=level_s).cut(1).need for level_s in (0.0001, 0.0005, 0.002)]
    assert needs == sorted(needs)
    assert 0 < needs[0] < needs[-1]


def test_a_draft_that_is_wrong_when_sure_is_cut_where_an_honest_one_is_not():
    wrong, honest = (simulate(0.001, true_chance=lambda p, n=n: p**n).cut(1).floor for n in (6, 1))
    assert wrong > honest


def cut_off(scores, cut):
    """Return how many levels are drafted: another one while what is likely enough adds up to what it needs."""
    for level in range(len(scores[0])):
        above = [math.exp(row[level]) - math.exp(cut.floor) for row in scores if row[level] >= cut.floor]
        if not above or sum(above) < cut.need:
            return level + 1
    return len(scores[0])


def decide(level_chances, row_s=0.0005, level_s=0.0004, follow_s=0.0004, requests=8, passes=200):
    """Run a controller where each level's tokens are kept with a chance that the draft knows; return what it chose."""
    controller, order, depths = ChainController(), random.Random(0), []
    for _ in range(passes):
        reach = controller.reach(requests, len(level_chances))
        chains, levels = [], 0
        if reach.depth:
            chances = [
                [min(chance * order.uniform(0.9, 1.1), 1.0) for chance in level_chances] for _ in range(requests)
            ]
            scores = [list(itertools.accumulate(math.log(p) for p in row[: reach.depth])) for row in chances]
            levels = cut_off(scores, reach.cut)
            for row in scores:
                checked = next((i for i, score in enumerate(row[:levels]) if score < reach.cut.floor), levels)
                kept = next((i for i in range(checked) if order.random() >= level_chances[i]), checked)
                chains.append(DraftedChain(row[:levels], checked, kept))
        chains = chains or [DraftedChain([], 0, 0)] * requests
        depths.append(max(chain.checked for chain in chains))
        rows = sum(1 + chain.checked for chain in chains)
        check_s = 0.008 + row_s * rows * order.uniform(0.99, 1.01)
        draft_s, follow = level_s * levels, follow_s * (levels > 0 or reach.follows)
        controller.record(DraftedPass(chains, levels, draft_s, check_s, check_s + draft_s + follow, follow))
    return depths


def usual(depths):
    return max(set(depths[-60:]), key=depths[-60:].count)


@pytest.mark.parametrize(("requests", "longest"), [(2, 64), (8, 512)])
def test_drafting_rests_where_nothing_is_kept_and_is_tried_again_now_and_then(requests, longest):
    depths = decide([0.4, 0.4, 0.4], row_s=0.003, passes=1500, requests=requests)
    assert usual(depths) == 0
    tries = [index for index, depth in enumerate(depths) if depth > 0]
    rests = [after - before for before, after in itertools.pairwise(tries) if after - before > 12]
    assert longest <= max(rests) <= longest + 4
    assert len(tries) < len(depths) / 8


def test_drafting_rests_where_rows_cost_more_than_they_bring():
    assert usual(decide([0.6, 0.6], row_s=0.01)) == 0
    assert usual(decide([0.6, 0.6], row_s=0.0001)) == 2


def test_a_level_that_does_not_pay_is_left_out_though_the_first_pays():
    assert usual(decide([0.9, 0.1, 0.1])) == 1
    assert usual(decide([0.9, 0.9, 0.9])) == 3


@pytest.mark.parametrize("requests", [1, 8])
def test_a_level_that_pays_is_found_though_it_was_not_tried_at_first(requests):
    assert usual(decide([0.95] * 5, requests=requests, passes=300)) == 5


def test_a_bad_beginning_is_forgotten():
    controller = ChainController()
    for kept, passes in ((0, 40), (3, 120)):
        for _ in range(passes):
            drafts = controller.reach(1, 3).depth > 0
            chain = DraftedChain([-0.1, -0.2, -0.3], 3, kept) if drafts else DraftedChain([], 0, 0)
            check_s, draft_s = 0.004 + 0.0003 * chain.checked, 0.0006 * drafts
            controller.record(DraftedPass([chain], 3 * drafts, draft_s, check_s, check_s + draft_s))
    assert controller.reach(1, 3).depth == 3


def passes_of(controller, count, row_s=0.0003, kept=2):
    """Make passes of one request whose chains of 3 cost so much and are kept so far; return how many drafted."""
    drafted = 0
    for _ in range(count):
        drafts = controller.reach(1, 3).depth > 0
        chain = DraftedChain([-0.1, -0.2, -0.3], 3, kept) if drafts else DraftedChain([], 0, 0)
        check_s, draft_s = 0.004 + row_s * chain.checked, 0.0006 * drafts
        controller.record(DraftedPass([chain], 3 * drafts, draft_s, check_s, check_s + draft_s))
        drafted += drafts
    return drafted


def test_costs_of_a_busy_beginning_are_forgotten_though_drafting_rests():
    controller = ChainController()
    passes_of(controller, 60, row_s=0.006)
    assert not controller.reach(1, 3).follows
    passes_of(controller, 80)
    assert passes_of(controller, 200) > 180


def test_another_text_ends_the_rest_of_a_lone_request():
    controller = ChainController()
    passes_of(controller, 60, kept=0)
    assert controller.reach(1, 3).passes > 1 and not controller.reach(1, 3).follows
    controller.begin_text()
    assert controller.reach(1, 3).follows
    assert passes_of(controller, 8) >= 3


def test_resting_asks_for_no_following_and_drafting_does():
    controller = ChainController()
    for _ in range(40):
        controller.record(DraftedPass([DraftedChain([-0.1], 1, 0)] * 8, 1, 0.001, 0.01, 0.012, 0.001))
    assert not controller.reach(8, 5).follows
    assert ChainController().reach(8, 5).follows


def test_what_was_copied_behind_a_drafted_token_is_what_drafting_gained():
    def within(kept, foretold, in_all, floor=-math.inf):
        """Return how many tokens were checked for the draft, and how many it gained."""
        chain = DraftedChain([-0.1, -0.2], 2, kept, Beyond(4, foretold, in_all))
        return DraftedPass([chain], 2, 0.0, 0.0, 0.0).within(Cut(floor))[1:]

    assert within(kept=1, foretold=0, in_all=5) == (2, 5)  # four that the text went on with after the draft's
    assert within(kept=2, foretold=2, in_all=2) == within(kept=0, foretold=3, in_all=3) == (0, 0)
    assert within(kept=2, foretold=1, in_all=2) == (1, 1)
    assert within(kept=2, foretold=0, in_all=2, floor=-0.15) == (1, 1)


@pytest.mark.parametrize("power", [0.3, 1.0, 4.0])
def test_confidence_is_corrected_by_what_was_kept(power):
    controller, order = ChainController(), random.Random(0)
    for _ in range(2000):
        confidence = order.uniform(0.05, 1.0)
        controller.learn([DraftedChain([math.log(confidence)], 1, int(order.random() < confidence**power))])
    for confidence in (0.3, 0.6, 0.9):
        assert confidence ** controller.cut(1).trust == pytest.approx(confidence**power, abs=0.1)


def test_a_row_is_the_dearer_the_more_there_are():
    cut = simulate(row_s=0.001).cut(1)
    prices = [cut.price(rows) for rows in (1, 2, 4, 8, 30)]
    assert prices == sorted(prices)
    assert 2 * prices[0] < prices[-1] <= cut.row


def test_costs_of_small_and_large_batches_are_kept_apart():
    controller = simulate(row_s=0.05, base_s=0.0)
    assert controller.cut(1).floor >= math.log(0.7)
    assert controller.explain(1) and not controller.explain(8)


def test_one_pass_that_lost_its_core_changes_little():
    steady = simulate(row_s=0.001)
    before = steady.cut(1)
    steady.record(DraftedPass([DraftedChain([-0.1] * 5, 5, 2)], 5, 9.0, 9.0, 18.1))
    after = steady.cut(1)
    assert after.floor == pytest.approx(before.floor, abs=0.5)
    assert after.need == pytest.approx(before.need, rel=0.1)


def test_a_pass_with_a_prompt_in_it_teaches_what_is_kept_but_not_what_it_costs():
    clock = iter(range(100))
    controller = ChainController()
    pace = Pace(controller, lambda: float(next(clock)))
    trust = controller.cut(1).trust
    for _ in range(20):
        pace.start(1, 5)
        pace.drafted([7], [[math.log(0.95)]], [1])
        pace.checked({7: 0, 8: 300})  # request 8 had its prompt computed
    assert controller.cut(1).trust > trust  # tokens of a confidence are hoped for less
    assert not controller.explain(1)


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
    assert [(round_.draft_s, round_.check_s, round_.round_s) for round_ in seen] == [(1.0, 1.0, 10.0)]


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
