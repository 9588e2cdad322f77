"""vLLM's CPU build over two machines, started by its own multi-node flags with a draft of ours in its dialect."""

import os
import re
import signal
from pathlib import Path

import httpx
import pytest

from slipstream.bench.peers.environments import vllm_environment
from tests.nodes.kept import Kept
from tests.nodes.namespaces import wait_for
from tests.nodes.pairs import write_wide_pair

pytestmark = pytest.mark.nodes
START_S = 500
ENV = ("HF_HUB_OFFLINE=1", "VLLM_CPU_KVCACHE_SPACE=1", "OMP_NUM_THREADS=1", "VLLM_CPU_OMP_THREADS_BIND=nobind")
BODY = {"prompt": [3, 14, 15], "max_tokens": 24, "temperature": 0.0, "ignore_eos": True}


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return write_wide_pair(tmp_path_factory.mktemp("pair"))


def start(machines, pair, folder: Path, *topology: object) -> Kept:
    engine = ["--engine", "vllm", "--engine-program", f"{vllm_environment() / 'vllm'} serve", *topology]
    settings = [word for setting in ENV for word in ("--engine-env", setting)]
    small = ["--dtype", "float32", "--max-context", "200", "--max-requests", "4", "--engine-args", "--enforce-eager"]
    draft = ["--draft", pair.draft, "--depth", "3", "--export-dir", folder / "drafts"]
    return Kept(machines, folder, pair.target, *draft, *engine, *settings, *small, "--start-timeout", START_S)


def test_vllm_serves_on_two_machines_with_our_draft_and_a_killed_node_is_reported(machines, pair, tmp_path):
    kept = start(machines, pair, tmp_path, "--tp", "2")
    try:
        url = kept.wait_ready(START_S)
        assert url == f"http://{machines[0].address}:8000"
        with httpx.Client(base_url=url, timeout=120, trust_env=False) as client:
            model = client.get("/v1/models").json()["data"][0]["id"]
            answered = client.post("/v1/completions", json={"model": model, **BODY})
            assert answered.status_code == 200, answered.text + kept.said()
            assert answered.json()["usage"]["completion_tokens"] == BODY["max_tokens"]
            metrics = client.get("/metrics").text
        accepted = float(re.search(r"^vllm:spec_decode_num_accepted_tokens_total\S* (\S+)$", metrics, re.M)[1])
        print(f"vLLM on two machines accepted {accepted:g} drafted tokens of 24")  # noqa: T201
        assert accepted > 0
        (headless,) = [pid for pid in machines[1].processes() if b"--headless" in command_line(pid)]
        os.kill(headless, signal.SIGKILL)
        code = kept.wait()
        print(kept.lines[-1])  # noqa: T201
        assert code == 1
        assert f"node {machines[1].name}: vllm ended with signal SIGKILL" in kept.said()
        assert "What ran on the other nodes was ended" in kept.said()
        wait_for(lambda: not machines[0].processes() and not machines[1].processes(), 30, kept.said)
    finally:
        kept.process.kill()


def test_stopping_the_launcher_ends_vllm_on_every_machine(machines, pair, tmp_path):
    kept = start(machines, pair, tmp_path, "--tp", "2")
    try:
        kept.wait_ready(START_S)
        assert kept.stop() == 0, kept.said()
        assert not machines[0].processes() and not machines[1].processes()
    finally:
        kept.process.kill()


def command_line(pid: int) -> bytes:
    arguments = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    return b"" if b"sh" in arguments[:1] else b" ".join(arguments) if b"python" in arguments[0] else b""
