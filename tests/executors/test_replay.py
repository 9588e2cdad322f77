"""A step's input is all an executor is told: pickled and replayed elsewhere, it gives the same outputs."""

import pickle
import random

import pytest
from mixed_work import asks, drive

from slipstream.executors.interface import StepInput, StepOutput
from slipstream.speculation.tree import TreeShape
from tiny import VOCAB, engine_of, follower_draft, stammering_target

TARGET = stammering_target(VOCAB)
DRAFTS = {"chain": follower_draft(TARGET), "n-gram": "ngram", "none": None}


class Recording:
    """Notes down, in order, what an executor is told and what it says."""

    def __init__(self, executor, monkeypatch) -> None:
        self.events: list[bytes | StepOutput] = []
        submit, collect = executor.submit, executor.collect

        def submitted(step: StepInput) -> None:
            self.events.append(pickle.dumps(step))
            submit(step)

        def collected() -> StepOutput:
            output = collect()
            self.events.append(output)
            return output

        monkeypatch.setattr(executor, "submit", submitted)
        monkeypatch.setattr(executor, "collect", collected)


@pytest.mark.parametrize("cuda_graphs", ["off", "on"])
@pytest.mark.parametrize("draft", DRAFTS)
def test_pickled_steps_replayed_on_a_fresh_executor_give_the_same_outputs(draft, cuda_graphs, monkeypatch):
    settings = {"cuda_graphs": cuda_graphs, "max_context": 96, "num_pages": 28, "max_batch_tokens": 24}
    engine = engine_of(TARGET, DRAFTS[draft], TreeShape.chain(3), **settings)
    recording = Recording(engine.executor, monkeypatch)
    drive(engine, asks(17, VOCAB, 5), random.Random(3), patience_s=(0.0,))
    fresh = engine_of(TARGET, DRAFTS[draft], TreeShape.chain(3), **settings).executor
    for event in recording.events:
        if isinstance(event, bytes):
            fresh.submit(pickle.loads(event))
        else:
            assert list(fresh.collect().rows) == list(event.rows)
    assert fresh.in_flight == 0
    assert sum(isinstance(event, bytes) for event in recording.events) > 20
