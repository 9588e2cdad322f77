"""Requests as a busy server has them: every setting, shared beginnings, second turns, aborts, moments of arrival."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from residues import Residues
from slipstream.engine.engine import Engine
from slipstream.engine.output import Emission
from slipstream.engine.request import FinishReason
from slipstream.executors.interface import TokenLogprob
from slipstream.speculation.sampling import SamplingParams

END = 2
MOST_TOKENS = 18
SETTINGS: tuple[dict, ...] = (
    {},
    {"temperature": 1.0},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 0.8, "top_k": 7},
    {"temperature": 1.1, "min_p": 0.05},
    {"temperature": 0.9, "top_k": 20, "top_p": 0.8, "min_p": 0.02},
    {"presence_penalty": 0.8},
    {"temperature": 0.7, "frequency_penalty": 0.5, "repetition_penalty": 1.3},
    {"repetition_penalty": 1.4, "top_p": 0.5},
    {"logit_bias": {3: 2.5, 7: -4.0, END: 1.0}},
    {"min_tokens": 9, "temperature": 1.0, "logit_bias": {END: 4.0}},
    {"logprobs": 5},
    {"logprobs": 0, "temperature": 1.0, "top_p": 0.95},
    {"prompt_logprobs": 2, "logprobs": 1},
    {"grammar": Residues(12)},
    {"grammar": Residues(30), "temperature": 0.9, "top_p": 0.9, "logprobs": 2, "presence_penalty": 0.4},
    {"stop_token_ids": (5, 11, 23), "temperature": 1.0},
)


@dataclass(frozen=True)
class Ask:
    """One request.

    Args:
        prompt: of a second turn, what follows the first one's prompt and answer.
        follows: which request this is the second turn of.
        aborted_after: it is ended by its reader once it has read so many tokens.
    """

    prompt: tuple[int, ...]
    params: SamplingParams
    seed: int
    speculate: bool = True
    follows: int | None = None
    aborted_after: int | None = None


@dataclass(frozen=True)
class Answer:
    """What came of a request: tokens with their log probabilities, the prompt's, and how much of it was cached."""

    tokens: tuple[tuple[int, TokenLogprob | None], ...] = ()
    prompt: tuple[TokenLogprob | None, ...] = ()
    reason: FinishReason | None = None
    num_cached: int = 0

    @property
    def ids(self) -> list[int]:
        """The tokens alone."""
        return [token for token, _ in self.tokens]

    def followed_by(self, emission: Emission) -> "Answer":
        """Return the answer with what a step added."""
        more = tuple((token.token_id, token.logprob) for token in emission.tokens)
        scored = emission.prompt_logprobs or self.prompt
        return Answer((*self.tokens, *more), scored, emission.finish_reason, emission.num_cached)


def asks(count: int, vocab: int, seed: int) -> list[Ask]:
    """Return requests of every kind, in the order they come; every setting comes once in so many as there are."""
    order = random.Random(seed)
    beginnings = [tuple(order.randrange(3, vocab) for _ in range(17)) for _ in range(3)]
    made: list[Ask] = []
    for index in range(count):
        settings = SETTINGS[index % len(SETTINGS)]
        fewest = settings.get("min_tokens", 1 if index % 5 else 12)
        params = SamplingParams(max_tokens=order.randint(fewest, MOST_TOKENS), **settings)
        own = tuple(order.randrange(3, vocab) for _ in range(order.randint(1, 9)))
        prompt = own if order.random() < 0.3 else (*order.choice(beginnings)[: order.choice((8, 17))], *own)
        if order.random() < 0.3:
            prompt = (*prompt, *prompt[-6:], *prompt[-6:])[-40:]  # what n-grams find again
        follows = None
        first = [n for n, ask in enumerate(made) if ask.follows is None and ask.aborted_after is None]
        if first and order.random() < 0.3:
            follows, prompt = order.choice(first), own
        aborted = order.randrange(1, 9) if order.random() < 0.12 else None
        made.append(Ask(prompt, params, order.randrange(-(2**63), 2**63), order.random() < 0.85, follows, aborted))
    return made


def whole_prompt(ask: Ask, work: Sequence[Ask], answers: Sequence[Answer]) -> tuple[int, ...]:
    """Return a request's prompt, the first turn's text included."""
    if ask.follows is None:
        return ask.prompt
    return (*work[ask.follows].prompt, *answers[ask.follows].ids, *ask.prompt)


def one_by_one(engine: Engine, work: Sequence[Ask]) -> list[Answer]:
    """Answer each request alone, on an engine that caches nothing."""
    answers: list[Answer] = []
    for ask in work:
        alone = [replace(ask, prompt=whole_prompt(ask, work, answers), follows=None, aborted_after=None)]
        answers += drive(engine, alone, random.Random(0))
    return answers


def drive(
    engine: Engine, work: Sequence[Ask], order: random.Random, patience_s: Sequence[float] = (0.0, 0.002)
) -> list[Answer]:
    """Answer requests that come at random moments, a second turn once its first has ended.

    Args:
        patience_s: steps have one of these.
    """
    answers = [Answer() for _ in work]
    waiting, names = list(range(len(work))), dict[int, int]()
    while waiting or engine.has_work:
        ready = [n for n in waiting if _can_begin(work[n], answers)]
        while ready and (not engine.has_work or order.random() < 0.4):
            index = ready.pop(0)
            waiting.remove(index)
            ask, prompt = work[index], whole_prompt(work[index], work, answers)
            names[engine.add(prompt, ask.params, ask.seed, (END,), speculate=ask.speculate)] = index
        for emission in engine.step(patience_s=order.choice(patience_s)):
            index = names[emission.request_id]
            assert emission.error is None, emission.error
            answers[index] = answers[index].followed_by(emission)
            enough = work[index].aborted_after
            if enough is not None and len(answers[index].tokens) >= enough:
                engine.abort(emission.request_id)
        engine.check_invariants()
    assert engine.page_usage == 0
    return answers


def _can_begin(ask: Ask, answers: Sequence[Answer]) -> bool:
    return ask.follows is None or answers[ask.follows].reason is not None
