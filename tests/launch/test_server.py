"""A server on several nodes is one thing: it starts, is watched and ends as a whole, whatever ends first."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from slipstream.launch.keep import keep_running
from slipstream.launch.nodes import Nodes, node_script
from slipstream.launch.process import LaunchError
from slipstream.launch.server import Server, num_active
from tests.launch.settings import HERE, stand_in
from tests.ports import free_port


@pytest.fixture
def started(tmp_path):
    """What runs on the nodes: two processes on each, in the files that they write."""

    def pids() -> list[int]:
        return [int(pid) for node in ("a", "b") for pid in wait_for_file(tmp_path / node).split()]

    return pids


def wait_for_file(path: Path) -> str:
    while not path.exists():
        time.sleep(0.02)
    return path.read_text()


def wait_gone(pids: list[int]) -> None:
    end = time.monotonic() + 20
    while any(is_running(pid) for pid in pids):
        assert time.monotonic() < end, "processes are left on a node"
        time.sleep(0.02)


def is_running(pid: int) -> bool:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    return False


def test_a_server_on_two_nodes_becomes_healthy_and_stopping_leaves_nothing(tmp_path, started):
    async def run():
        server = await Server.start(stand_in(free_port(), flags={"pids": str(tmp_path)}), tmp_path / "log")
        await server.wait_healthy(30)
        found = started()
        assert all(is_running(pid) for pid in found)
        await server.stop()
        return found

    wait_gone(asyncio.run(run()))


def test_a_node_that_dies_is_named_and_takes_the_others_with_it(tmp_path, started):
    found = []

    def kill_the_other(url: str) -> None:
        found.extend(started())
        os.kill(found[2], signal.SIGKILL)

    with pytest.raises(
        LaunchError, match=r"node b: .* ended with signal SIGKILL.*What ran on the other nodes was ended"
    ):
        asyncio.run(
            keep_running(stand_in(free_port(), flags={"pids": str(tmp_path)}), tmp_path / "log", kill_the_other)
        )
    wait_gone(found)


def test_a_node_without_the_model_says_so_before_anything_starts(tmp_path):
    with pytest.raises(LaunchError, match=r"node .: .* /nowhere/target: is not on this node"):
        asyncio.run(keep_running(stand_in(free_port(), model="/nowhere/target"), tmp_path / "log", print))


def test_a_node_that_cannot_be_reached_ends_the_start(tmp_path):
    away = Nodes(("a", "b"), "sh -c 'echo no route; exit 255' {node}")
    with pytest.raises(LaunchError, match=r"exit status 255, as when the connection to its node is lost.*no route"):
        asyncio.run(keep_running(stand_in(free_port(), nodes=away), tmp_path / "log", print))


def test_what_runs_on_a_node_ends_when_whoever_started_it_is_killed(tmp_path, started):
    """The shell's standard input closes, as it does when a connection breaks."""
    command = [sys.executable, str(Path(__file__).with_name("stand_in.py")), "m", "--headless", "--pids", str(tmp_path)]
    nodes = Nodes(("a", "b"), HERE)
    shells = [subprocess.Popen(nodes.reach(node), stdin=subprocess.PIPE) for node in nodes.all()]
    for shell in shells:
        shell.stdin.write(node_script(command, {}, ()).encode())
        shell.stdin.flush()
    found = started()
    for shell in shells:
        shell.stdin.close()
    wait_gone(found)
    assert [shell.wait(20) for shell in shells] == [128 + signal.SIGTERM] * 2


def test_rays_nodes_are_counted_from_its_status():
    status = "Node status\n-----\nActive:\n 1 node_9a1b\n 1 node_8c4f\nPending:\n 3 node_1\nRecent failures:\n (none)\n"
    assert num_active(status) == 2
    assert num_active("Active:\n 2 worker\n (no more)\nPending:\n") == 2
    assert num_active("ConnectionError: could not find it") == 0
