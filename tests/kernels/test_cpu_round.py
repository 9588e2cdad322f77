"""A round of decoding in one call does what its parts do one after the other."""

import math

import pytest
import torch

from slipstream.engine.build import build_engine
from slipstream.engine.config import EngineConfig
from slipstream.errors import KernelError
from slipstream.kernels import Cut, Follower, RoundModels, RoundStart, SamplingState
from slipstream.kernels.cpu.ops import CpuOps
from slipstream.models.context import KvCache
from slipstream.models.eagle3 import Eagle3Draft
from slipstream.models.packing import quantize_linears
from slipstream.speculation.controller import Reach
from slipstream.speculation.pace import Pace
from slipstream.speculation.sampling import SamplingParams
from slipstream.speculation.tree import TreeShape
from tiny import follower_draft, tiny_draft, tiny_target

TARGET = tiny_target()
CHAIN = TreeShape.chain(4)
DRAFTS = {
    "none": lambda: None,
    "follower": lambda: follower_draft(TARGET),
    "fed after the norm": lambda: tiny_draft(TARGET, seed=9, residual="normed", feedback="post_norm"),
    "states normed each": lambda: tiny_draft(TARGET, seed=5, feature_norm="per_layer"),
    "states normed together": lambda: tiny_draft(TARGET, seed=6, feature_norm="concat"),
    "two blocks": lambda: tiny_draft(TARGET, seed=3, num_layers=2),
}


class PartByPart(CpuOps):
    """The same kernels, but no round in one call."""

    def run_rounds(self, models, start, depth, cut):
        return None


class Counted(CpuOps):
    """Counts rounds and the requests in them."""

    requests: tuple[int, ...] = ()

    def run_rounds(self, models, start, depth, cut):
        self.requests += (len(start.roots),)
        return super().run_rounds(models, start, depth, cut)


class Resting(Pace):
    """Drafts for three steps, rests for five, and so on, whatever it learns."""

    step = 0

    def start(self, num_requests, depth):
        super().start(num_requests, depth)
        return Reach(depth, Cut()) if Resting.step % 8 < 3 else Reach(0, Cut(math.inf), follows=False)


def story(draft, ops, temperature=0.0, shape=CHAIN, patience_s=0.0, num_pages=None):
    """Return every step's tokens and which of them were drafted, and what was counted; a request comes late."""
    config = EngineConfig(max_context=64, page_size=4, max_requests=4, num_pages=num_pages)
    engine = build_engine(TARGET, draft, shape, config, ops)
    engine.add([3, 1, 4, 1, 5], SamplingParams(max_tokens=20, temperature=temperature), 0)
    engine.add([9, 2, 6], SamplingParams(max_tokens=7, temperature=temperature), 1, speculate=False)
    engine.add([5] * 11, SamplingParams(max_tokens=60, temperature=temperature), 2)
    steps = []
    while engine.has_work:
        if len(steps) == (2 if patience_s else 5):
            engine.add([8, 8, 1], SamplingParams(max_tokens=9, logprobs=1, temperature=temperature), 3)
        Resting.step = len(steps)
        step = engine.step(patience_s)
        engine.check_invariants()
        steps.append(
            [(e.request_id, [(t.token_id, t.draft_position) for t in e.tokens], e.finish_reason) for e in step]
        )
    return steps, engine.stats.acceptance.emitted, engine.stats.acceptance.passes


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("quantized", [False, True], ids=["dense", "int8"])
@pytest.mark.parametrize("name", DRAFTS)
def test_a_round_in_one_call_emits_what_its_parts_emit(cpu_ops, name, quantized, temperature):
    draft = DRAFTS[name]()
    if quantized and draft is not None:
        quantize_linears(draft, cpu_ops)
    counted = Counted(2, cpu_ops.isa)
    steps = story(draft, counted, temperature)
    assert steps == story(draft, PartByPart(1, cpu_ops.isa), temperature)
    assert set(counted.requests) >= {1, 3}
    if name == "follower" and not quantized:
        assert any(position > 1 for step in steps[0] for _, tokens, _ in step for _, position in tokens)


def answers(steps):
    """Return every request's tokens, and how it ended, whatever the steps they came in."""
    whole = {}
    for request_id, tokens, reason in (emission for step in steps for emission in step):
        said, _ = whole.get(request_id, ([], None))
        whole[request_id] = (said + tokens, reason)
    return whole


@pytest.mark.parametrize("num_pages", [None, 24], ids=["many pages", "few pages"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("name", DRAFTS)
def test_rounds_that_go_on_emit_what_single_ones_emit(cpu_ops, name, temperature, num_pages):
    draft, ops = DRAFTS[name](), CpuOps(2, cpu_ops.isa)
    single, *counts = story(draft, ops, temperature, num_pages=num_pages)
    patient, *patient_counts = story(draft, ops, temperature, patience_s=60.0, num_pages=num_pages)
    assert answers(patient) == answers(single)
    assert patient_counts == counts
    if num_pages is None:
        assert len(patient) < len(single) / 2


@pytest.mark.parametrize("name", ["none", "follower"])
def test_rounds_that_went_on_take_pages_one_by_one_where_few_are_left(fast_ops, name):
    """Two answers that do not fit together: several rounds to a step at first, then one, then somebody waits."""

    def tell(patience_s, num_pages):
        config = EngineConfig(max_context=64, page_size=4, max_requests=2, num_pages=num_pages, prefix_cache=False)
        engine = build_engine(TARGET, DRAFTS[name](), CHAIN, config, fast_ops)
        for seed in range(2):
            engine.add([3, 1, 4, 1, 5][seed:], SamplingParams(max_tokens=50), seed)
        said = [[], []]
        while engine.has_work:
            for emission in engine.step(patience_s):
                said[emission.request_id] += [token.token_id for token in emission.tokens]
            engine.check_invariants()
        return said, engine.stats.preemptions

    whole, _ = tell(0.0, None)
    said, preemptions = tell(60.0, 20)
    assert said == whole and preemptions > 0


class Spelled:
    """Every token is a letter."""

    def push(self, ids):
        return "".join(chr(ord("A") + token) for token in ids)

    def finish(self):
        return ""


class SpelledForAWhile(Spelled):
    """Breaks at its eighth token."""

    left = 7

    def push(self, ids):
        self.left -= 1
        if self.left < 0:
            raise ValueError("broken on purpose")
        return super().push(ids)


@pytest.mark.parametrize("name", ["none", "follower"])
def test_a_request_that_fails_in_rounds_that_go_on_leaves_the_others_alone(fast_ops, name):
    def told(failing):
        engine = build_engine(TARGET, DRAFTS[name](), CHAIN, EngineConfig(max_context=64, page_size=4), fast_ops)
        if failing:
            engine.add([3, 1, 4, 1, 5], SamplingParams(max_tokens=30), 0, detokenizer=SpelledForAWhile())
        kept = engine.add([9, 2, 6], SamplingParams(max_tokens=40), 1)
        emissions = []
        while engine.has_work:
            emissions += engine.step(60.0)
            engine.check_invariants()
        assert [str(e.error) for e in emissions if e.error is not None] == ["broken on purpose"] * failing
        return [token.token_id for e in emissions if e.request_id == kept for token in e.tokens]

    assert told(failing=True) == told(failing=False)


@pytest.mark.parametrize("name", ["none", "follower"])
@pytest.mark.parametrize("how", ["end token", "stop string", "length"])
def test_rounds_end_with_the_answer_and_go_on_with_the_others(fast_ops, name, how):
    def tell(patience_s):
        config = EngineConfig(max_context=64, page_size=4, max_requests=2)
        engine = build_engine(TARGET, DRAFTS[name](), CHAIN, config, fast_ops)
        changed = {
            "stop string": {"stop": (stop,)},
            "end token": {"stop_token_ids": (end,)},
            "length": {"max_tokens": 7},
        }
        params = SamplingParams(**{"max_tokens": 30, **changed[how]})
        engine.add([3, 1, 4, 1, 5], params, 0, detokenizer=Spelled())
        engine.add([9, 2, 6], SamplingParams(max_tokens=40), 1)
        steps = []
        while engine.has_work:
            step = engine.step(patience_s)
            engine.check_invariants()
            steps.append([(e.request_id, [t.token_id for t in e.tokens], (e.text, e.finish_reason)) for e in step])
        said = {i: "".join(e[2][0] for step in steps for e in step if e[0] == i) for i in (0, 1)}
        return answers([[(i, t, r) for i, t, (_, r) in step] for step in steps]), said, len(steps)

    stop, end = "\0", 62
    if how != "length":
        first = build_engine(TARGET, None, None, EngineConfig(max_context=64), fast_ops)
        said = [token for token, _ in answer(first, [3, 1, 4, 1, 5], 12)]
        end, stop = said[9], Spelled().push(said[8:10])
    whole, text, num_steps = tell(60.0)
    single, single_text, num_single = tell(0.0)
    assert (whole, text) == (single, single_text)
    assert num_steps < num_single
    assert len(whole[0][0]) < 30 and len(whole[1][0]) == 40


def test_a_patient_step_ends_when_it_is_asked_to_hurry_and_is_patient_again(fast_ops):
    engine = build_engine(TARGET, None, None, EngineConfig(max_context=64), fast_ops)
    engine.add([3, 1, 4], SamplingParams(max_tokens=40), 0)
    engine.step(60.0)
    engine.hurry()
    assert [len(emission.tokens) for emission in engine.step(60.0)] == [1]
    assert len(engine.step(60.0)[0].tokens) > 8
    steps = engine.stats.steps
    assert steps == engine.stats.acceptance.passes


@pytest.mark.parametrize("name", [name for name in DRAFTS if name != "none"])
def test_a_draft_that_rested_drafts_what_one_that_followed_all_along_drafts(cpu_ops, name, monkeypatch):
    monkeypatch.setattr("slipstream.engine.build.Pace", Resting)
    draft = DRAFTS[name]()
    counted = Counted(2, cpu_ops.isa)
    steps = story(draft, counted, shape=None)
    assert steps == story(draft, PartByPart(1, cpu_ops.isa), shape=None)
    assert len(counted.requests) > 8
    if name == "follower":
        assert any(position > 1 for step in steps[0][8:] for _, tokens, _ in step for _, position in tokens)


def answer(engine, prompt, count):
    """Return a request's tokens and which of them were drafted."""
    engine.add(prompt, SamplingParams(max_tokens=count), 0)
    tokens = []
    while engine.has_work:
        tokens += [(t.token_id, t.draft_position) for e in engine.step() for t in e.tokens]
        engine.check_invariants()
    return tokens


class Scripted(Pace):
    """Drafts while it is told to and rests otherwise."""

    drafts = False

    def start(self, num_requests, depth):
        super().start(num_requests, depth)
        return Reach(depth, Cut()) if Scripted.drafts else Reach(0, Cut(math.inf), follows=False)


@pytest.fixture
def fused(monkeypatch):
    """Positions of every pass of a draft over the target's states outside rounds, pass by pass."""
    monkeypatch.setattr("slipstream.engine.build.Pace", Scripted)
    counts = []
    fuse = Eagle3Draft.fuse

    def counting(draft, features, ops):
        counts.append(len(features[0]))
        return fuse(draft, features, ops)

    monkeypatch.setattr(Eagle3Draft, "fuse", counting)
    return counts


def two_turns(ops, draft=None, **settings):
    """Let a request end while the draft rests; then one that goes on from its text drafts."""
    config = EngineConfig(**{"max_context": 128, "page_size": 4, "max_requests": 4, **settings})
    engine = build_engine(TARGET, draft or follower_draft(TARGET), None, config, ops)
    prompt = [3, 1, 4, 1, 5]
    Scripted.drafts = False
    first = answer(engine, prompt, 33)
    Scripted.drafts = True
    text = [token for token, _ in first]
    return engine, [first, answer(engine, [*prompt, *text, 7], 40)]


def test_a_request_that_ends_while_the_draft_rests_asks_nothing_of_the_draft(cpu_ops, fused):
    engine = build_engine(TARGET, follower_draft(TARGET), None, EngineConfig(max_context=128, page_size=4), cpu_ops)
    Scripted.drafts = False
    answer(engine, [3, 1, 4, 1, 5], 33)
    assert fused == [5]


@pytest.mark.parametrize("name", [name for name in DRAFTS if name != "none"])
def test_a_request_that_goes_on_from_such_text_drafts_as_if_the_draft_had_followed_it(cpu_ops, name, fused):
    draft = DRAFTS[name]()
    engine, turns = two_turns(cpu_ops, draft)
    assert fused == [5, 31, 3]  # the prompt; what was left in 36 reused positions; the 3 of 39 that are new
    assert engine.stats.cached_tokens == 36
    steps, same = two_turns(PartByPart(1, cpu_ops.isa), draft)
    assert same == turns
    for layer, expected in zip(engine.drafter.kv.layers, steps.drafter.kv.layers, strict=True):
        assert torch.equal(layer.keys_SGd[:36], expected.keys_SGd[:36])
        assert torch.equal(layer.values_SGd[:36], expected.values_SGd[:36])
    if name == "follower":
        assert any(position > 0 for _, position in turns[1])


def test_without_a_prefix_cache_nothing_is_left_and_nothing_asked_of_the_draft(cpu_ops, fused):
    _, turns = two_turns(cpu_ops, prefix_cache=False)
    assert fused == [5, 39]
    assert two_turns(cpu_ops)[1] == turns


def test_without_room_to_leave_it_the_draft_follows_at_the_end(cpu_ops, fused, monkeypatch):
    monkeypatch.setattr("slipstream.speculation.eagle3_drafter._LEFT_BYTES", 1000)
    engine = build_engine(TARGET, follower_draft(TARGET), None, EngineConfig(max_context=128, page_size=4), cpu_ops)
    Scripted.drafts = False
    answer(engine, [3, 1, 4, 1, 5], 33)
    assert fused == [5, 31]
    assert two_turns(cpu_ops)[1] == two_turns(PartByPart(1, cpu_ops.isa))[1]


def test_what_was_left_in_a_page_is_gone_with_the_page(cpu_ops, fused):
    config = EngineConfig(max_context=128, page_size=4, max_requests=4, num_pages=40)
    engine = build_engine(TARGET, follower_draft(TARGET), None, config, cpu_ops)
    Scripted.drafts = False
    answer(engine, [3, 1, 4, 1, 5], 60)
    Scripted.drafts = True
    for token in range(20, 25):
        answer(engine, [token] * 61, 5)  # some 17 of 40 pages
    fused.clear()
    for token in (23, 24):
        answer(engine, [token] * 61, 5)
    assert engine.stats.cached_tokens == 120
    assert fused == [1, 1]


def test_a_request_that_makes_room_while_the_draft_rests_leaves_what_is_late_to_itself(cpu_ops, fused):
    config = EngineConfig(max_context=64, page_size=4, max_requests=2, num_pages=20, copied_tokens=0)
    engine = build_engine(TARGET, follower_draft(TARGET), None, config, cpu_ops)
    Scripted.drafts = False
    for token, count in ((3, 36), (9, 40)):
        engine.add([token, 1, 4, 1, 5], SamplingParams(max_tokens=count), 0)
    texts, waiting_with = {0: [], 1: []}, 0
    while engine.has_work:
        for emission in engine.step():
            texts[emission.request_id] += [token.token_id for token in emission.tokens]
        waiting_with = len(texts[1]) if engine.num_waiting else waiting_with
        engine.check_invariants()
    assert engine.stats.preemptions == 1
    assert fused[0] == 10
    assert len(fused) == 3  # then what the second left behind, and what was lost with its pages
    assert sum(fused[1:]) == waiting_with
    fresh = build_engine(TARGET, None, None, EngineConfig(max_context=64), cpu_ops)
    assert [token for token, _ in answer(fresh, [9, 1, 4, 1, 5], 40)] == texts[1]


def test_a_tree_given_while_the_draft_rests_changes_no_text(fast_ops, monkeypatch):
    monkeypatch.setattr("slipstream.engine.build.Pace", Resting)
    texts = []
    for shape in (None, TreeShape.chain(12), TreeShape(depth=3, width=2)):
        engine = build_engine(TARGET, follower_draft(TARGET), None, EngineConfig(max_context=128), fast_ops)
        engine.add([3, 1, 4, 1, 5], SamplingParams(max_tokens=100), 0)
        tokens, Resting.step = [], 3
        while engine.has_work:
            if shape is not None and len(tokens) == 60:
                engine.set_tree(shape)
            tokens += [token.token_id for emission in engine.step() for token in emission.tokens]
        texts.append(tokens)
    assert texts[0] == texts[1] == texts[2]


def test_trees_go_part_by_part(fast_ops):
    counted = Counted(1)
    shape = TreeShape(depth=2, width=2)
    assert story(follower_draft(TARGET), counted, shape=shape) == story(
        follower_draft(TARGET), PartByPart(1), shape=shape
    )
    assert counted.requests == ()


def test_a_target_that_is_not_float32_goes_part_by_part_and_is_asked_once(fast_ops):
    half = tiny_target().to(torch.bfloat16)
    counted = Counted(1)
    engine = build_engine(half, None, None, EngineConfig(max_context=64), counted)
    engine.add([3, 1, 4], SamplingParams(max_tokens=6), 0)
    emitted = 0
    while engine.has_work:
        emitted += sum(len(emission.tokens) for emission in engine.step())
    assert emitted == 6
    assert counted.requests == (1,)


@pytest.mark.parametrize(
    ("change", "accepted"),
    [
        ({}, True),
        ({"limits": [3]}, False),
        ({"lengths": [8]}, False),
        ({"roots": [61]}, False),
        ({"roots": [-1]}, False),
        ({"followers": [None]}, False),
        ({"followers": [Follower.start(torch.zeros(32), 96, 2)]}, False),
        ({"pages": [[0, 5]]}, False),
        ({"slots": [2]}, False),
        ({"sampling": SamplingState(2, 9, torch.device("cpu"))}, False),
    ],
)
def test_a_round_that_would_leave_its_pages_or_tables_is_refused(fast_ops, change, accepted):
    draft = tiny_draft(TARGET)
    target_kv, draft_kv = (
        KvCache.allocate(model.kv_shape, 2, 4, torch.float32, torch.device("cpu")) for model in (TARGET, draft)
    )
    models = RoundModels(TARGET, target_kv, (0, 1, 2), draft, draft_kv)
    state = SamplingState(2, TARGET.spec.vocab_size, torch.device("cpu"))
    whole = dict(pages=[[0, 1]], roots=[3], lengths=[5], sampling=state, slots=[1], limits=[2])  # noqa: C408
    start = RoundStart(**{**whole, "followers": [Follower.start(torch.zeros(32), 96, 8)], **change})
    if accepted:
        assert fast_ops.run_rounds(models, start, 3, Cut()) is not None
        return
    with pytest.raises(KernelError, match="outside its pages"):
        fast_ops.run_rounds(models, start, 3, Cut())


def test_a_floor_above_every_score_checks_roots_alone(fast_ops):
    draft = tiny_draft(TARGET)
    kvs = [KvCache.allocate(model.kv_shape, 2, 4, torch.float32, torch.device("cpu")) for model in (TARGET, draft)]
    state = SamplingState(1, TARGET.spec.vocab_size, torch.device("cpu"))
    start = RoundStart([[0, 1]], [3], [5], state, [0], [2], [Follower.start(torch.zeros(32), 96, 8)])
    (result,) = fast_ops.run_rounds(RoundModels(TARGET, kvs[0], (0, 1, 2), draft, kvs[1]), start, 2, Cut(math.inf))
    assert [nodes.tokens for nodes in result.drafted] == [[]]
    assert [len(tokens) for tokens in result.tokens] == [1]
