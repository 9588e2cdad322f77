"""Requests that arrive at random moments."""

import random

from slipstream.engine.engine import Engine


def drive(engine: Engine, work: list, order: random.Random) -> list[list[int]]:
    """Add requests at random moments, step until all have ended, check invariants after each step."""
    waiting = list(enumerate(work))
    names: dict[int, int] = {}
    answers: list[list[int]] = [[] for _ in work]
    while waiting or engine.has_work:
        while waiting and (not engine.has_work or order.random() < 0.4):
            index, (prompt, params, seed) = waiting.pop(0)
            names[engine.add(prompt, params, seed)] = index
        for emission in engine.step():
            answers[names[emission.request_id]] += [token.token_id for token in emission.tokens]
        engine.check_invariants()
    assert engine.page_usage == 0
    return answers
