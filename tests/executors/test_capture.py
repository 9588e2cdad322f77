"""Graphs outlive nothing that they read and write."""

import gc
import weakref
from contextlib import nullcontext
from unittest.mock import MagicMock

import pytest
import torch

from slipstream.executors.cuda_graph.capture import Capturer


class Owner:
    """Owns a tensor that what is captured writes to."""

    def __init__(self) -> None:
        self.count_1 = torch.zeros(1)

    def run(self) -> None:
        """Write."""
        self.count_1 += 1


def test_what_a_graph_writes_to_lives_as_long_as_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("Stream", "current_stream", "CUDAGraph"):
        monkeypatch.setattr(torch.cuda, name, MagicMock())
    for name in ("stream", "graph"):
        monkeypatch.setattr(torch.cuda, name, lambda *args, **options: nullcontext())
    capturer, owner = Capturer(torch.device("cuda"), capturable=True), Owner()
    lives = weakref.ref(owner)
    replay = capturer.capture(owner.run)
    assert owner.count_1.item() > 1  # it ran, and was captured
    del owner
    gc.collect()
    assert lives() is not None, "a replay would write to memory that was given back"
    del capturer, replay
    gc.collect()
    assert lives() is None
