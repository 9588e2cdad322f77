"""A Ray cluster over two machines, started, watched and ended by the launcher; a small job stands for vLLM."""

import os
import signal
from pathlib import Path

import httpx
import pytest

from slipstream.bench.peers.environments import ray_environment
from tests.nodes.kept import Kept
from tests.nodes.namespaces import wait_for

pytestmark = pytest.mark.nodes
START_S = 300
JOB = Path(__file__).with_name("ray_job.py")


def start(machines, folder: Path) -> Kept:
    program = f"{ray_environment() / 'python'} {JOB}"
    engine = ["org/target", "--engine", "vllm", "--engine-program", program, "--tp", "2", "--ray"]
    return Kept(machines, folder, *engine, "--start-timeout", START_S)


def test_every_machine_joins_the_cluster_and_stopping_ends_it_everywhere(machines, tmp_path):
    kept = start(machines, tmp_path)
    try:
        url = kept.wait_ready(START_S)
        assert httpx.get(f"{url}/", trust_env=False).json() == [machine.address for machine in machines]
        assert kept.stop() == 0, kept.said()
        # Ray's workers leave by themselves once their node's raylet has.
        wait_for(lambda: not machines[0].processes() and not machines[1].processes(), 10, kept.said)
    finally:
        kept.process.kill()


def test_a_machine_that_leaves_the_cluster_is_named(machines, tmp_path):
    kept = start(machines, tmp_path)
    try:
        kept.wait_ready(START_S)
        lines = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in machines[1].processes()}
        (raylet,) = [pid for pid, line in lines.items() if b"raylet/raylet" in line.split(b"\0")[0]]
        os.kill(raylet, signal.SIGKILL)
        assert kept.wait() == 1
        print(kept.lines[-1])  # noqa: T201
        assert f"node {machines[1].name}: ray ended with" in kept.said()
        wait_for(lambda: not machines[0].processes() and not machines[1].processes(), 30, kept.said)
    finally:
        kept.process.kill()
