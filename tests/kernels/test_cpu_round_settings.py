"""Every request stays in rounds, whatever its settings, and says what it says part by part."""

import itertools

import pytest
import torch

from slipstream.engine.build import build_engine
from slipstream.engine.config import EngineConfig
from slipstream.kernels import Cut, Onward, RoundModels, RoundStart, SamplingState
from slipstream.kernels.cpu.ops import CpuOps
from slipstream.kernels.reference.ops import ReferenceOps
from slipstream.kernels.rounds import AllowedNodes, DraftedNodes
from slipstream.models.context import KvCache
from slipstream.speculation.sampling import SamplingParams
from slipstream.speculation.tree import TreeShape
from tiny import VOCAB, follower_draft, tiny_target

CPU = torch.device("cpu")
TARGET = tiny_target()
CHAIN = TreeShape.chain(4)


class Steps:
    """Token i of the answer must be i modulo 3; a dead end comes after `room` tokens."""

    def __init__(self, room: int = 100) -> None:
        self.room = room

    def start(self):
        return StepsState(self.room)


class StepsState:
    """Where an answer stands."""

    finished = False

    def __init__(self, room: int) -> None:
        self._taken, self._room = [], room

    def allowed(self, path):
        text = [*self._taken, *path]
        if any(token % 3 != index % 3 for index, token in enumerate(text)):
            return None
        return (torch.arange(VOCAB) % 3 == len(text) % 3) & (len(text) < self._room)

    def advance(self, tokens):
        self._taken += tokens


SETTINGS = (
    {},
    {"temperature": 1.0, "top_p": 0.7},
    {"temperature": 1.3, "top_k": 9, "min_p": 0.05, "logprobs": 4},
    {"repetition_penalty": 1.4, "frequency_penalty": 0.2, "presence_penalty": -0.3, "temperature": 0.7},
    {"frequency_penalty": 1.0, "logprobs": 0},
    {"logit_bias": {5: 3.0, 9: -4.0}, "min_tokens": 12, "stop_token_ids": (5, 7, 11)},
    {"grammar": Steps(), "temperature": 0.9, "top_p": 0.9, "logprobs": 2},
    {"grammar": Steps(room=9), "repetition_penalty": 1.2},
)


class PartByPart(CpuOps):
    """The same kernels, but no round in one call."""

    def run_rounds(self, models, start, depth, cut):
        return None


class Counted(CpuOps):
    """Counts the requests of rounds."""

    requests: tuple[int, ...] = ()

    def run_rounds(self, models, start, depth, cut):
        self.requests += (len(start.roots),)
        return super().run_rounds(models, start, depth, cut)


def answers(ops, draft, patience_s=0.0, settings=SETTINGS):
    """Return each request's tokens with their log probabilities, and how it ended."""
    config = EngineConfig(max_context=64, page_size=4, max_requests=len(settings))
    engine = build_engine(TARGET, draft, CHAIN if draft else None, config, ops)
    for index, given in enumerate(settings):
        engine.add([3, 1 + index, 4, 1, 5], SamplingParams(max_tokens=20, **given), index)
    said, ends = [[] for _ in settings], [None] * len(settings)
    while engine.has_work:
        for emission in engine.step(patience_s):
            said[emission.request_id] += [(token.token_id, token.logprob) for token in emission.tokens]
            ends[emission.request_id] = (emission.finish_reason, str(emission.error))
        engine.check_invariants()
    return said, ends


@pytest.mark.parametrize("drafts", [False, True])
def test_rounds_emit_what_their_parts_emit_whatever_a_request_asks_for(cpu_ops, drafts):
    draft = follower_draft(TARGET) if drafts else None
    counted = Counted(2, cpu_ops.isa)
    got = answers(counted, draft)
    assert got == answers(PartByPart(1, cpu_ops.isa), draft)
    assert max(counted.requests) == len(SETTINGS)
    assert "leaves no token" in got[1][-1][1]
    assert len(got[0][-1]) == 9


def test_rounds_that_go_on_count_what_was_said_and_report_log_probabilities(fast_ops):
    settings = [given for given in SETTINGS if "grammar" not in given]
    for draft in (None, follower_draft(TARGET)):
        assert answers(fast_ops, draft, 60.0, settings) == answers(PartByPart(2), draft, 0.0, settings)


def with_masks(drafted, masks):
    return [AllowedNodes(nodes, own) for nodes, own in zip(drafted, masks, strict=True)]


def round_start(state, fill, rounds, room):
    return RoundStart(
        pages=[[0, 1, 2, 3], [4, 5, 6, 7]],
        roots=[3, 5],
        lengths=[0, 0],
        sampling=state,
        slots=[1, 0],
        limits=[0, 0],
        followers=[None, None],
        onward=Onward(rounds, 60.0, [12, 12], [(), ()]),
        masks=fill,
        room=room,
    )


def run_rounds(ops, fill, rounds=4, room=()):
    kv = KvCache.allocate(TARGET.kv_shape, 8, 4, torch.float32, CPU)
    state = SamplingState(2, VOCAB, CPU)
    return ops.run_rounds(RoundModels(TARGET, kv), round_start(state, fill, rounds, room), 0, Cut())


def no_masks(_, drafted, __):
    return with_masks(drafted, [[-1] * (1 + len(nodes.tokens)) for nodes in drafted])


def test_masks_are_asked_for_in_every_round_with_what_was_said_before(fast_ops):
    """The first request's tokens are even, the second has no grammar; the call is ended before its third round."""
    asked = []

    def fill(emitted, drafted, words_MW):
        asked.append(([list(tokens) for tokens in emitted], [list(nodes.tokens) for nodes in drafted]))
        words_MW[1] = 0x55555555
        return None if len(asked) == 3 else with_masks(drafted, [[1], [-1]])

    results = run_rounds(fast_ops, fill)
    tokens = [[result.tokens[row][0] for result in results] for row in range(2)]
    free = run_rounds(fast_ops, no_masks)
    assert len(results) == 2 and all(token % 2 == 0 for token in tokens[0])
    assert tokens[1] == [result.tokens[1][0] for result in free[:2]]
    assert asked == [([tokens[0][:n], tokens[1][:n]], [[], []]) for n in range(3)]


def test_nodes_put_in_place_of_what_was_drafted_are_checked_like_those(fast_ops):
    """A fork at the first request's root, with the text that plain rounds give on its longer branch."""
    text = [result.tokens[0][0] for result in run_rounds(fast_ops, no_masks, 5)]
    wrong = (text[0] + 1) % VOCAB

    def fill(_, drafted, __):
        fork = DraftedNodes([wrong, *text[:3]], [0, 0, 2, 3])
        return with_masks([fork, drafted[1]], [[-1] * 5, [-1]])

    (result,) = run_rounds(fast_ops, fill, rounds=1, room=[4, 0])
    assert list(result.tokens[0]) == text[:4] and len(result.tokens[1]) == 1
    assert result.drafted[0].by_depth() == [2, 1, 1] and result.drafted[1].by_depth() == []


@pytest.mark.parametrize(
    "nodes",
    [DraftedNodes([1, 2, 3], [0, 1, 2]), DraftedNodes([1, 2], [0, 2]), DraftedNodes([VOCAB], [0]),
     DraftedNodes([1], [0], guessed=2)],
)  # fmt: skip
def test_nodes_there_is_no_room_for_or_that_are_no_tree_are_refused(fast_ops, nodes):
    with pytest.raises(Exception, match="outside"):
        run_rounds(fast_ops, lambda _, drafted, __: with_masks([nodes, drafted[1]], [[-1], [-1]]), room=[2, 0])


def test_a_request_whose_mask_leaves_nothing_emits_nothing_and_ends_the_call(fast_ops):
    results = run_rounds(fast_ops, lambda _, drafted, words_MW: with_masks(drafted, [[len(words_MW) - 1], [-1]]))
    assert [list(map(len, result.tokens)) for result in results] == [[0, 1]]


def test_what_goes_wrong_with_masks_is_raised(fast_ops):
    def fill(emitted, drafted, words_MW):
        raise ValueError("broken on purpose")

    with pytest.raises(ValueError, match="on purpose"):
        run_rounds(fast_ops, fill)
    with pytest.raises(Exception, match="outside"):
        run_rounds(fast_ops, lambda _, drafted, words_MW: with_masks(drafted, [[len(words_MW)], [-1]]))


def test_log_probabilities_in_rounds_are_those_of_the_samplers_reference(fast_ops):
    """A round over one token each: what the target's own logits give, sampled by the reference."""
    settings = [{"temperature": 1.0, "top_p": 0.8, "logprobs": 20}, {"temperature": 0.5, "top_k": 3, "logprobs": 3}]
    both = [answers(ops, None, 0.0, settings) for ops in (fast_ops, ReferenceOps(CPU))]
    (got, ends), (expected, expected_ends) = both
    assert ends == expected_ends
    for mine, theirs in itertools.chain(*(zip(*pair, strict=True) for pair in zip(got, expected, strict=True))):
        assert mine[0] == theirs[0]
        assert mine[1].logprob == pytest.approx(theirs[1].logprob, abs=1e-4)
        assert [token for token, _ in mine[1].top] == [token for token, _ in theirs[1].top]
