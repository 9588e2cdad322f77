"""Our own engine over two machines answers as on one, and a machine that is lost is reported within ten seconds."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import pytest

from tests.nodes.kept import Kept
from tests.nodes.namespaces import wait_for

pytestmark = pytest.mark.nodes
WITHIN_S = 10.0
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src"), "OMP_NUM_THREADS": "1"}
PROGRAM = (sys.executable, "-m", "slipstream", "serve")
BODY = {"prompt": [3, 14, 15], "max_tokens": 24, "temperature": 0.0, "ignore_eos": True, "return_token_ids": True}


class Group:
    """`slipstream serve --nnodes N` on each of the machines, in one process each."""

    def __init__(self, machines, pair, folder: Path, *more: str) -> None:
        first = machines[0].address
        options = [pair.target, "--draft", pair.draft, "--dtype", "float32", "--host", first, "--port", 8000, *more]
        if len(machines) > 1:
            options += ["--nnodes", len(machines), "--rendezvous", f"{first}:29500"]
        self.logs = [folder / f"node{rank}.log" for rank in range(len(machines))]
        self.processes = []
        for rank, machine in enumerate(machines):
            place = ["--node-rank", rank] if len(machines) > 1 else []
            command = machine.inside(*PROGRAM, *options, *place)
            with self.logs[rank].open("w") as log:
                self.processes.append(subprocess.Popen(command, stdout=log, stderr=log, env=ENVIRONMENT))
        self.client = httpx.Client(base_url=f"http://{first}:8000", timeout=60, trust_env=False)
        wait_for(lambda: self.health() == 200, 120, self.said)

    def health(self) -> int:
        with contextlib.suppress(httpx.TransportError):
            return self.client.get("/health").status_code
        assert self.processes[0].poll() is None, self.said()
        return 0

    def said(self) -> str:
        return "\n".join(log.read_text() for log in self.logs)

    def answer(self) -> list[int]:
        model = self.client.get("/v1/models").json()["data"][0]["id"]
        found = self.client.post("/v1/completions", json={"model": model, **BODY}).json()["choices"][0]["token_ids"]
        assert len(found) == BODY["max_tokens"]
        return found

    def ask_until_refused(self) -> None:
        with httpx.Client(base_url=self.client.base_url, timeout=60, trust_env=False) as client:
            model = client.get("/v1/models").json()["data"][0]["id"]
            while client.post("/v1/completions", json={"model": model, **BODY}).status_code == 200:
                continue

    def stop(self) -> list[int]:
        self.client.close()
        self.processes[0].send_signal(signal.SIGTERM)
        return [process.wait(40) for process in self.processes]


def test_two_machines_answer_as_one_does_and_end_together(machines, pair, tmp_path):
    one = Group(machines[:1], pair, tmp_path, "--tp", "2")
    expected = one.answer()
    one.stop()
    two = Group(machines, pair, tmp_path, "--tp", "2")
    assert two.answer() == expected
    assert two.stop() == [0, 0]


@pytest.mark.parametrize("how", ["its process is killed", "it falls off the network"])
def test_a_lost_machine_is_reported_within_ten_seconds(machines, pair, tmp_path, how):
    group = Group(machines, pair, tmp_path, "--tp", "4")
    try:
        asking = threading.Thread(target=group.ask_until_refused)
        asking.start()
        if how == "its process is killed":
            group.processes[1].kill()
        else:
            machines[1].unplug()
        took = wait_for(lambda: group.health() == 503, WITHIN_S, group.said)
        reason = group.client.get("/health").json()["reason"]
        print(f"{how}: reported after {took:.1f} s: {reason}")  # noqa: T201
        assert machines[1].address in reason
        asking.join(WITHIN_S)
        assert not asking.is_alive(), "an answer under way waits for the lost machine"
        wait_for(lambda: not machines[1].processes(), 2 * WITHIN_S, group.said)
    finally:
        group.processes[0].kill()


def test_the_launcher_starts_and_ends_our_engine_on_both_machines(machines, pair, tmp_path):
    program = ["--engine-program", " ".join(PROGRAM), "--dtype", "float32", "--tp", "2"]
    kept = Kept(machines, tmp_path, pair.target, "--draft", pair.draft, *program)
    try:
        url = kept.wait_ready(120)
        model = httpx.get(f"{url}/v1/models", trust_env=False).json()["data"][0]["id"]
        answered = httpx.post(f"{url}/v1/completions", json={"model": model, **BODY}, timeout=60, trust_env=False)
        assert len(answered.json()["choices"][0]["token_ids"]) == BODY["max_tokens"]
        assert kept.stop() == 0, kept.said()
        assert not machines[0].processes() and not machines[1].processes()
    finally:
        kept.process.kill()
