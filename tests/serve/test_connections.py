"""Connections are bounded in number and time: a client that waits too long, or never reads, makes way for others."""

import contextlib
import json
import logging
import re
import select
import signal
import socket
import subprocess
import threading
from pathlib import Path

import httpx
import pytest
from misbehaving import TEXT, Brake, ask, eventually, start_process
from tiny_server import Running, tiny_engine

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
WHOLE = b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n"


def read_all(connection: socket.socket) -> bytes:
    """Read until the server closes the connection, or resets it."""
    connection.settimeout(30)
    received = b""
    try:
        while part := connection.recv(1 << 16):
            received += part
    except ConnectionResetError:
        pass
    return received


def status_of(answer: bytes) -> int:
    return int(answer.split(b" ")[1])


@pytest.fixture(scope="module")
def hasty():
    """Run a server with short time-outs."""
    with Running(tiny_engine(), read_timeout_s=0.3, keep_alive_timeout_s=1) as running:
        yield running


@pytest.mark.parametrize(
    "sent",
    [
        pytest.param(HEAD, id="an unfinished head"),
        pytest.param(HEAD + b"Content-Length: 40\r\n\r\n" + b'{"prompt": ', id="an unfinished body"),
        pytest.param(HEAD + b"Transfer-Encoding: chunked\r\n\r\n5\r\n{", id="an unfinished chunk"),
    ],
)
def test_a_request_that_does_not_arrive_is_a_408_and_the_connection_ends(hasty, sent):
    answer = read_all(ask(hasty, raw=sent))
    assert status_of(answer) == 408
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"Connection: close" in head
    assert "--read-timeout" in json.loads(body)["error"]["message"]
    eventually(lambda: not hasty.server.server_state.connections)


@pytest.mark.parametrize(
    ("sent", "num_answers"),
    [
        pytest.param(b"", 0, id="nothing at all"),
        pytest.param(WHOLE, 1, id="nothing after a request"),
        pytest.param(WHOLE + WHOLE, 2, id="two requests at once"),
        pytest.param(WHOLE + HEAD, 1, id="the beginning of another"),
        pytest.param(HEAD.replace(b"json", b"text") + b"Content-Length: 9\r\n\r\nx", 1, id="a body nobody wants"),
    ],
)
def test_a_connection_that_idles_ends(hasty, sent, num_answers):
    answer = read_all(ask(hasty, raw=sent))
    assert answer.count(b"HTTP/1.1 200") + answer.count(b"HTTP/1.1 415") == num_answers
    eventually(lambda: not hasty.server.server_state.connections)


def test_bytes_now_and_then_keep_no_connection(hasty):
    with ask(hasty, raw=HEAD + b"Content-Length: 4000\r\n\r\n") as connection:
        connection.settimeout(0.05)
        answer = b""
        for _ in range(400):
            try:
                connection.sendall(b" ")
                answer += connection.recv(1 << 16)
            except TimeoutError:
                continue
            except (ConnectionResetError, BrokenPipeError):
                break
        assert status_of(answer) == 408


def test_a_client_that_waits_for_100_continue_and_one_that_takes_its_time_are_answered(hasty):
    content = json.dumps({"prompt": "x" * 50, "max_tokens": 1, "pad": "x" * 60_000}).encode()
    head = HEAD + b"Expect: 100-continue\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(content)
    with ask(hasty, raw=head) as connection:
        assert status_of(connection.recv(1 << 16)) == 100
        pause = threading.Event()
        for start in range(0, len(content), 1 << 14):  # longer than the time-out in all, but never without progress
            connection.sendall(content[start : start + (1 << 14)])
            pause.wait(0.15)
        assert status_of(read_all(connection)) == 200


def test_at_the_bound_the_connection_that_waited_longest_makes_way():
    with Running(tiny_engine(), max_connections=4) as server, server.client() as client:
        half_open = [ask(server, raw=HEAD) for _ in range(12)]
        assert client.post("/v1/completions", json={"prompt": "x", "max_tokens": 1}).status_code == 200
        assert [status_of(read_all(connection)) for connection in half_open[:8]] == [503] * 8
        assert len(server.server.server_state.connections) <= 4
        for connection in half_open:
            connection.close()


def test_where_every_connection_has_work_one_more_is_a_503_that_says_when_to_try_again():
    engine = tiny_engine()
    brake = Brake(engine)
    with Running(engine, max_connections=2) as server:
        busy = [ask(server, {**TEXT, "max_tokens": 2}) for _ in range(2)]
        eventually(lambda: server.worker.num_open == 2)
        answer = read_all(ask(server, raw=WHOLE))
        assert status_of(answer) == 503
        assert b"Retry-After: 1" in answer
        assert b"Connection: close" in answer
        assert b"--max-connections" in answer
        brake.release()
        for connection in busy:
            connection.settimeout(30)
            assert status_of(connection.recv(1 << 16)) == 200
            connection.close()


def test_bodies_that_are_half_here_are_bounded_together():
    with Running(tiny_engine(), max_body_bytes=2000) as server, server.client() as client:
        half = [ask(server, raw=HEAD + b"Content-Length: 2000\r\n\r\n" + b" " * 1990) for _ in range(66)]
        refused, *_ = select.select(half, [], [], 30)
        assert 1 <= len(refused) <= 2
        answer = refused[0].recv(1 << 16)
        assert status_of(answer) == 503
        assert b"retry-after: 1" in answer
        for connection in half:
            connection.close()
        eventually(lambda: client.post("/tokenize", json={"prompt": "x" * 1900}).status_code == 200)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_never_reads_loses_its_connection_at_once(stream, caplog):
    body = {**TEXT, "max_tokens": 60, "logprobs": 20, "n": 4, "stream": stream}  # more than socket buffers hold
    with Running(tiny_engine(), write_timeout_s=0.3) as server:
        silent = ask(server, body)
        eventually(lambda: "left bytes unread" in caplog.text)
        eventually(lambda: not server.server.server_state.connections)
        eventually(lambda: _socket_state(server.config.port, silent.getsockname()[1]) is None)
        silent.close()
        server.wait_idle()


def _socket_state(local: int, remote: int) -> str | None:
    """Return the state of the server's end of a connection, as the kernel has it; None once it is gone."""
    with Path("/proc/net/tcp").open() as table:
        for line in table.readlines()[1:]:
            _, ours, theirs, state, *_ = line.split()
            if (int(ours.split(":")[1], 16), int(theirs.split(":")[1], 16)) == (local, remote):
                return state
    return None


def test_what_the_drain_cuts_off_ends_with_an_error_that_is_told(caplog):
    engine = tiny_engine()
    brake = Brake(engine)
    with Running(engine, drain_timeout_s=0.3) as server:
        stream, whole = (ask(server, {**TEXT, "stream": stream}) for stream in (True, False))
        half = ask(server, raw=HEAD + b"Content-Length: 40\r\n\r\n{")
        brake.go.release(3)
        eventually(lambda: brake.num_begun == 4)
        server.server.should_exit = True
        streamed, answer = read_all(stream), read_all(whole)
        read_all(half)
        brake.release()
    ending = re.search(rb'data: ({"error".*})\n\ndata: \[DONE\]\n\n\r\n0\r\n\r\n$', streamed)
    assert json.loads(ending[1])["error"]["code"] == 503
    assert status_of(answer) == 503
    assert b"retry-after: 5" in answer
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def test_with_few_descriptors_unfinished_heads_keep_nobody_out_and_the_log_small():
    process, client = start_process(drain_s=0.2, max_files=64)
    with killed_at_last(process), client:
        address = (client.base_url.host, client.base_url.port)
        half_open = [socket.create_connection(address) for _ in range(80)]
        for connection in half_open:
            connection.sendall(HEAD)
        for _ in range(3):
            assert httpx.get(f"{client.base_url}/version").status_code == 200
        endless = {**TEXT, "max_tokens": 100, "n": 128, "stream": True}
        with client.stream("POST", "/v1/completions", json=endless) as response:
            lines = response.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            rest = list(lines)
        assert '"code":503' in rest[-4]
        assert rest[-2] == "data: [DONE]"
        assert process.wait(30) == 0
        log = process.stderr.read()
    assert "at most" in log
    assert len(log) < 50_000


@contextlib.contextmanager
def killed_at_last(process: subprocess.Popen):
    """Leave no process behind, whatever fails."""
    try:
        yield
    finally:
        process.kill()
