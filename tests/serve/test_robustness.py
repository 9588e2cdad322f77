"""The server stays up and loses nothing when clients, steps and signals misbehave."""

import json
import signal
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from misbehaving import TEXT, Brake, ask, eventually, start_process
from tiny_server import Running, tiny_engine


@pytest.mark.parametrize("stream", [True, False])
def test_a_disconnect_frees_the_pages_within_one_step(stream):
    engine = tiny_engine()
    brake = Brake(engine)
    with Running(engine) as server:
        connection = ask(server, {**TEXT, "stream": stream})
        brake.go.release(2)
        eventually(lambda: brake.num_begun == 3)
        assert engine.num_running == 1
        connection.close()
        eventually(lambda: len(server.worker._thread._commands) == 1)  # the cancellation waits for the step to end
        brake.go.release(1)
        eventually(lambda: engine.num_running == 0)
        assert brake.num_steps <= 3
        assert engine.page_usage == 0
        engine.check_invariants()
        brake.release()
        assert server.worker.meters.finished["abort"] == 1


def test_a_failing_pass_fails_only_the_requests_in_it_and_the_server_lives_on():
    engine = tiny_engine(max_requests=2)
    with Running(engine) as server, server.client() as client:
        expected = client.post("/v1/completions", json=TEXT).json()["choices"][0]["text"]
        forward = engine.executor.runner.forward
        brake = Brake(engine)

        def broken(batch, pages):
            if brake.num_steps == 3:
                raise RuntimeError("injected")
            return forward(batch, pages)

        engine.executor.runner.forward = broken
        with ThreadPoolExecutor(4) as pool:
            answers = [pool.submit(client.post, "/v1/completions", json=TEXT) for _ in range(4)]
            eventually(lambda: server.worker.num_open == 4)
            brake.release()
            results = [answer.result() for answer in answers]
        assert sorted(result.status_code for result in results) == [200, 200, 500, 500]
        for result in results:
            if result.status_code == 200:
                assert result.json()["choices"][0]["text"] == expected
            else:
                assert result.json()["error"]["type"] == "server_error"
                assert "injected" not in result.text
        assert client.post("/v1/completions", json=TEXT).json()["choices"][0]["text"] == expected
        assert client.get("/health").status_code == 200
        assert "slipstream_failed_steps_total 1.0" in client.get("/metrics").text
        server.wait_idle()


def test_a_stream_whose_step_fails_ends_with_an_error_event():
    engine = tiny_engine()
    with Running(engine) as server, server.client() as client:
        forward = engine.executor.runner.forward
        engine.executor.runner.forward = lambda batch, pages: (_ for _ in ()).throw(RuntimeError("injected"))
        text = client.post("/v1/completions", json={**TEXT, "stream": True}).text
        engine.executor.runner.forward = forward
        first, done = [line for line in text.split("\n\n") if line]
        assert json.loads(first.removeprefix("data: "))["error"]["code"] == 500
        assert done == "data: [DONE]"
        server.wait_idle()


def test_a_full_queue_is_a_429_that_says_when_to_try_again():
    engine = tiny_engine(max_requests=2)
    brake = Brake(engine)
    with Running(engine, max_waiting=3) as server, server.client() as client:
        with ThreadPoolExecutor(5) as pool:
            taken = [pool.submit(client.post, "/v1/completions", json=TEXT) for _ in range(5)]
            eventually(lambda: server.worker.num_open == 5)
            refused = client.post("/v1/completions", json=TEXT)
            assert refused.status_code == 429
            assert int(refused.headers["Retry-After"]) >= 1
            assert refused.json()["error"]["type"] == "rate_limit_error"
            assert client.post("/v1/completions", json={**TEXT, "prompt": "x" * 500}).status_code == 400
            brake.release()
            assert [answer.result().status_code for answer in taken] == [200] * 5
        assert client.post("/v1/completions", json=TEXT).status_code == 200
        server.wait_idle()


def test_a_client_that_never_reads_stalls_nobody_and_is_given_up(caplog):
    engine = tiny_engine()
    body = {
        **TEXT,
        "max_tokens": 100,
        "logprobs": 20,
        "n": 3,
        "return_token_ids": True,
    }  # far more bytes than socket buffers hold
    with Running(engine, write_timeout_s=0.5) as server, server.client() as client:
        expected = client.post("/v1/completions", json=TEXT).json()["choices"][0]["text"]
        silent = ask(server, {**body, "stream": True})
        for _ in range(3):
            assert client.post("/v1/completions", json=TEXT).json()["choices"][0]["text"] == expected
        eventually(lambda: "left bytes unread" in caplog.text)
        server.wait_idle()
        assert server.worker.num_open == 0
        silent.close()


def test_a_stream_says_nothing_before_its_first_token():
    engine = tiny_engine()
    brake = Brake(engine)
    with Running(engine) as server:
        connection = ask(
            server, {"messages": [{"role": "user", "content": "x"}], "stream": True}, "/v1/chat/completions"
        )
        eventually(lambda: brake.num_begun == 1)
        head = connection.recv(1 << 16)
        assert head.startswith(b"HTTP/1.1 200")
        assert b"data:" not in head
        brake.release()
        received = b""
        while b"data:" not in received:
            received += connection.recv(1 << 16)
        connection.close()
        server.wait_idle()


def test_a_request_that_takes_too_long_is_a_504_and_its_pages_come_back():
    engine = tiny_engine()
    brake = Brake(engine)
    with Running(engine, request_timeout_s=0.2) as server, server.client() as client:
        answer = client.post("/v1/completions", json=TEXT)
        assert answer.status_code == 504
        assert answer.json()["error"]["type"] == "timeout_error"
        brake.release()
        server.wait_idle()


def test_a_dead_engine_thread_fails_what_is_under_way_and_shows_in_health():
    engine = tiny_engine()
    with Running(engine) as server, server.client() as client:

        def die(patience_s):
            raise MemoryError("injected, outside a step")

        engine.step = die
        threading.excepthook, before = (lambda *_: None), threading.excepthook
        assert client.post("/v1/completions", json=TEXT).status_code == 503
        assert client.get("/health/live").status_code == 503
        assert client.get("/health/ready").status_code == 503
        assert client.post("/v1/completions", json=TEXT).status_code == 503
        threading.excepthook = before


def test_a_new_request_asks_a_patient_step_to_hurry():
    engine = tiny_engine()
    asked, hurry = [], engine.hurry
    engine.hurry = lambda: (asked.append(1), hurry())
    with Running(engine) as server, server.client() as client:
        before = len(asked)
        assert client.post("/v1/completions", json=TEXT).status_code == 200
        assert len(asked) > before


def test_sigterm_under_load_lets_every_answer_finish():
    process, client = start_process(drain_s=30)
    body = {**TEXT, "stream": True, "stream_options": {"include_usage": True}}
    with client, ThreadPoolExecutor(8) as pool:
        started = threading.Barrier(9)

        def read(seed: int) -> str:
            with client.stream("POST", "/v1/completions", json={**body, "seed": seed}) as response:
                lines = response.iter_lines()
                first = next(lines)
                started.wait()
                return first + "".join(lines)

        reads = [pool.submit(read, seed) for seed in range(8)]
        started.wait()
        process.send_signal(signal.SIGTERM)
        texts = [one.result() for one in reads]
    assert all(text.endswith("data: [DONE]") and '"completion_tokens":60' in text for text in texts)
    assert process.wait(30) == 0
    log = process.stderr.read()
    assert "SIGTERM" in log
    assert "once upon" not in log  # prompts stay out of the log


def test_a_short_request_for_hundreds_of_megabytes_of_log_probabilities_is_refused():
    asked = {"n": 128, "max_tokens": 8, "temperature": 1}
    scoring = {"prompt": ["a" * 100] * 4, "prompt_logprobs": 20}
    answering = {"prompt": ["a" * 60] * 7, "max_tokens": 60, "logprobs": 20}
    with Running(tiny_engine(), max_waiting=1000) as server, server.client() as client:
        for fields, name in ((scoring, "prompt_logprobs"), (answering, "logprobs")):
            answer = client.post("/v1/completions", json={**asked, **fields})
            assert answer.status_code == 400
            assert answer.json()["error"]["param"] == name
        fine = {"prompt": "a" * 100, "max_tokens": 1, "prompt_logprobs": 20}
        scored = client.post("/v1/completions", json=fine).json()["choices"][0]
        assert len(scored["prompt_logprobs"]) == 100
        server.wait_idle()


def test_keys_limits_and_origins():
    keys = {"api_keys": ("secret-1", "secret-2"), "admin_key": "root", "max_body_bytes": 2000}
    with Running(tiny_engine(), **keys, cors_origins=("https://page.example",)) as server, server.client() as client:
        small = {"prompt": "x", "max_tokens": 1}
        assert client.post("/v1/completions", json=small).status_code == 401
        for key, status in (("secret-1", 200), ("secret-2", 200), ("secret", 401), ("root", 401)):
            headers = {"Authorization": f"Bearer {key}"}
            assert client.post("/v1/completions", json=small, headers=headers).status_code == status
        headers = {"Authorization": "Bearer secret-1"}
        assert client.get("/v1/models").status_code == 401
        assert client.get("/health").status_code == 200
        assert client.post("/admin/speculation", json={}, headers=headers).status_code == 401
        assert client.post("/admin/speculation", json={}, headers={"Authorization": "Bearer root"}).status_code == 200
        large = {"prompt": "x" * 3000}
        assert client.post("/v1/completions", json=large, headers=headers).status_code == 413
        chunked = (part for part in (b'{"prompt": "', b"x" * 3000, b'"}'))
        headers["Content-Type"] = "application/json"
        assert client.post("/v1/completions", content=chunked, headers=headers).status_code == 413
        asked = {"Origin": "https://page.example", "Access-Control-Request-Method": "POST"}
        assert client.options("/v1/completions", headers=asked).headers["access-control-allow-origin"]
        assert "secret-1" not in repr(server.config)


def test_a_mistake_of_ours_is_a_500_in_openais_form_that_names_the_request(monkeypatch):
    with Running(tiny_engine()) as server, server.client() as client:
        monkeypatch.setattr(server.tokenizer, "encode", lambda *_, **__: 1 / 0)
        answer = client.post("/v1/completions", json=TEXT, headers={"X-Request-ID": "mine"})
        assert answer.status_code == 500
        assert answer.json()["error"]["type"] == "server_error"
        assert "mine" in answer.json()["error"]["message"]
        assert client.get("/health").status_code == 200


def test_a_client_that_sends_far_too_much_still_reads_why():
    body = b"x" * (4 << 20)
    fields = {
        "Host": "localhost",
        "Connection": "close",
        "Content-Type": "application/json",
        "Content-Length": len(body),
    }
    head = "\r\n".join(["POST /v1/completions HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items())])
    with Running(tiny_engine(), max_body_bytes=2000) as server:
        with socket.create_connection(("127.0.0.1", server.config.port), timeout=30) as connection:
            connection.sendall(f"{head}\r\n\r\n".encode() + body)
            answer = b"".join(iter(lambda: connection.recv(1 << 16), b""))
        assert b"413" in answer.splitlines()[0]
        assert b"--max-body-bytes, 2000" in answer


def test_by_default_no_other_origin_may_call_and_admin_is_open_only_on_loopback():
    with Running(tiny_engine()) as server, server.client() as client:
        answer = client.post(
            "/v1/completions", json={"prompt": "x", "max_tokens": 1}, headers={"Origin": "https://x.y"}
        )
        assert "access-control-allow-origin" not in answer.headers
        assert client.post("/admin/speculation", json={}).status_code == 200
        assert client.post("/admin/speculation", json={}, headers={"Host": "evil.example:8000"}).status_code == 403
    with Running(tiny_engine(), api_keys=("k",)) as server, server.client() as client:
        assert client.post("/admin/speculation", json={}).status_code == 403


def test_request_ids_are_taken_up_or_made(client):
    given = client.post("/v1/completions", json={"prompt": "x", "max_tokens": 1}, headers={"X-Request-ID": "abc-1"})
    assert given.headers["X-Request-ID"] == "abc-1"
    assert given.json()["id"] == "cmpl-abc-1"
    strange = client.get("/version", headers={"X-Request-ID": "a b\tc" + "x" * 500})
    assert len(strange.headers["X-Request-ID"]) == 32
