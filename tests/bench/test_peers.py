"""Peers: other programs in processes of their own, asked over lines of JSON; and one definition of decoding speed."""

import sys
from pathlib import Path

import pytest

from slipstream.bench.peers.process import Peer, PeerError

WORKER = """
import os, sys
print("a library that chats on standard output")

class Worker:
    def __init__(self, start):
        self.about = {"version": "counter 1", "variable": os.environ.get("A_VARIABLE")}
        self.value = start

    def add(self, number):
        print("and again")
        self.value += number
        return self.value

    def leave(self):
        sys.stderr.write("last words\\n")
        sys.stderr.flush()
        os._exit(3)
"""


@pytest.fixture
def worker(tmp_path):
    file = tmp_path / "worker.py"
    file.write_text(WORKER)
    return file


def start(worker, **settings):
    return Peer("counter", Path(sys.executable), worker, settings, {"A_VARIABLE": "set"})


def test_a_peer_keeps_its_state_between_questions_and_may_print_what_it_likes(worker):
    with start(worker, start=1) as peer:
        assert peer.about == {"version": "counter 1", "variable": "set"}
        assert [peer.ask("add", number=number) for number in (2, 3)] == [3, 6]


def test_a_peer_that_cannot_start_says_why(worker):
    with pytest.raises(PeerError, match="unexpected keyword argument 'colour'"):
        start(worker, colour="red")


def test_a_peer_that_fails_at_a_question_says_why(worker):
    with start(worker, start=1) as peer, pytest.raises(PeerError, match="AttributeError"):
        peer.ask("subtract", number=1)


def test_a_peer_that_dies_is_an_error_with_its_status_and_last_words(worker):
    with start(worker, start=1) as peer, pytest.raises(PeerError, match=r"status 3.*\n(.*\n)*last words"):
        peer.ask("leave")
