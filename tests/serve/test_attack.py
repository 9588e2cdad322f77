"""A short attack on a server breaks nothing; and the attack would see it if something broke."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from tests.attack.campaign import Row
from tests.attack.ending import check_log
from tests.attack.table import report
from tests.attack.watch import Prober

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.embedded
def test_a_short_attack_on_a_server_of_the_embedded_model_breaks_nothing():
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-m", "tests.attack", "--short"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_server_that_does_not_answer_is_noticed():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(60)
        prober = Prober(silent.getsockname()[1])
        held, _ = silent.accept()
        waits = prober.stop()
        held.close()
    assert [wait for wait in waits if wait.seconds >= 1]


def test_a_log_that_clients_wrote_into_is_noticed(tmp_path):
    log = tmp_path / "server.log"
    log.write_bytes(b"12:00:00 INFO request path=/%0aFORGED\n")
    assert not check_log(log)
    log.write_bytes(b"12:00:00 INFO request path=/\nFORGED line\n\x1b[2J\n")
    assert len(check_log(log)) == 2


def test_the_report_fits_a_terminal_and_names_what_broke():
    row = Row("amplification", 123, violations=["something long that broke " * 20])
    row.statuses.update({200: 12345, 400: 54321, 500: 3, 0: 777})
    lines = report([row]).splitlines()
    assert max(map(len, lines)) <= 80
    assert any("broke" in line for line in lines)
    assert lines[-1] == "123 attacks: 1 violations"
