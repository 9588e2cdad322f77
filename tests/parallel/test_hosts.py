"""Ranks on several hosts find each other by one address; strangers, and hosts that disagree, are kept out."""

import datetime
import socket
import threading

import pytest
from torch.distributed import TCPStore

from slipstream.errors import ConfigError
from slipstream.models.topology import Topology
from slipstream.ranks.hosts import Hosts, accept_ranks, peer_address, reach_first

TWO = Topology(tp=2)


@pytest.fixture
def store():
    return open_store(0, is_master=True)


def open_store(port: int, is_master: bool = False) -> TCPStore:
    timeout = datetime.timedelta(seconds=20)
    return TCPStore("127.0.0.1", port, 2, is_master=is_master, wait_for_workers=False, timeout=timeout)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ((2, 2, "a:1"), "node_rank is 2 of 2 nodes; they are counted from 0"),
        ((0, 0, ""), "node_rank is 0 of 0 nodes"),
        ((2, 0, ""), "rendezvous is ''; with 2 nodes it is HOST:PORT of the first"),
        ((2, 1, "a"), "rendezvous is 'a'"),
        ((2, 1, "a:99999"), "rendezvous is 'a:99999'"),
    ],
)
def test_a_host_that_cannot_be_placed_is_refused(fields, words):
    with pytest.raises(ConfigError) as error:
        Hosts(*fields)
    assert words in str(error.value)


def test_every_host_has_as_many_of_the_ranks():
    assert list(Hosts(2, 1, "a:1").local_ranks(Topology(tp=8))) == [4, 5, 6, 7]
    with pytest.raises(ConfigError, match="tp is 3 and nnodes is 2; every node has as many"):
        Hosts(2, 0, "a:1").local_ranks(Topology(tp=3))
    with pytest.raises(ConfigError, match="tp is 1 and nnodes is 2"):
        Hosts(2, 0, "a:1").local_ranks(Topology())


class Accepting(threading.Thread):
    """The first host, waiting for the others."""

    def __init__(self, store: TCPStore, hosts: Hosts, topology: Topology) -> None:
        super().__init__(daemon=True)
        self._arguments = (store, hosts, topology)
        self.found = {}
        self.start()

    def run(self) -> None:
        self.found = accept_ranks(*self._arguments)


def test_another_host_reaches_the_first_and_is_known_by_rank_and_address(store):
    first, second = (Hosts(2, rank, f"127.0.0.1:{store.port}") for rank in (0, 1))
    accepting = Accepting(store, first, TWO)
    connection = reach_first(open_store(store.port), second, TWO, 1)
    accepting.join(10)
    assert list(accepting.found) == [1]
    assert peer_address(accepting.found[1]) == "127.0.0.1"
    connection.send_bytes(b"up")
    assert accepting.found[1].recv_bytes() == b"up"


def test_a_stranger_at_the_door_is_not_taken_for_a_rank(store):
    first, second = (Hosts(2, rank, f"127.0.0.1:{store.port}") for rank in (0, 1))
    accepting = Accepting(store, first, TWO)
    port = int(open_store(store.port).get("slipstream/invitation").decode().partition('"port": ')[2].partition(",")[0])
    with socket.create_connection(("127.0.0.1", port)) as stranger:
        stranger.sendall(b"\0\0\0\4GET ")
    connection = reach_first(open_store(store.port), second, TWO, 1)
    accepting.join(10)
    assert list(accepting.found) == [1]
    connection.close()


def test_hosts_that_split_the_model_differently_say_both(store):
    first, second = (Hosts(2, rank, f"127.0.0.1:{store.port}") for rank in (0, 1))
    accepting = Accepting(store, first, Topology(tp=4))
    with pytest.raises(ConfigError, match=r"splits the model as nnodes 2, tp 4.*this one as nnodes 2, tp 2"):
        reach_first(open_store(store.port), second, TWO, 1)
    for rank in (2, 3):
        reach_first(open_store(store.port), second, Topology(tp=4), rank)
    accepting.join(10)
    assert sorted(accepting.found) == [2, 3]
