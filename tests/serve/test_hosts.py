"""Who may call: by which name, with which key, and what a Host header that is none gets."""

import logging

import pytest
from misbehaving import ask, eventually
from tiny_server import Running, tiny_engine

from slipstream.errors import ConfigError
from slipstream.serve.config import ServeConfig

SMALL = {"prompt": "x", "max_tokens": 1}


@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize", "/admin/speculation"])
@pytest.mark.parametrize("host", ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "10.0.0.1", ""])
def test_without_keys_a_loopback_server_goes_by_loopback_names_alone(client, path, host):
    answer = client.post(path, json=SMALL, headers={"Host": host})
    assert answer.status_code == 403
    assert answer.json()["error"]["type"] == "permission_error"
    assert "--allowed-host" in answer.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/", "/docs", "/openapi.json", "/metrics", "/speculation", "/v1/models", "/version"])
def test_that_holds_for_reading_too_but_not_for_health(client, path):
    assert client.get(path, headers={"Host": "evil.example"}).status_code == 403
    assert client.options(path, headers={"Host": "evil.example"}).status_code == 403
    for health in ("/health", "/health/live", "/ping"):
        assert client.get(health, headers={"Host": "pod-7.internal"}).status_code == 200


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:8000", "localhost.", "127.0.0.1", "127.0.0.2:9", "[::1]:80"])
def test_every_loopback_name_is_answered(client, host):
    assert client.get("/v1/models", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize("path", ["/admin/speculation", "/admin", "/v1/models", "/health", "/health/", "/docs/"])
@pytest.mark.parametrize("host", ["[", "]", "[::1", "[::::]", "a]b", "x:port", "x:123456", "[v1.x]", "\xe9[", "//["])
def test_a_host_that_is_none_is_a_400_on_every_path(client, path, host):
    answer = client.get(path, headers={b"Host": host.encode("latin-1")})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "line",
    [
        "GET http://[/x HTTP/1.1",
        "GET //[ HTTP/1.1",
        "GET /v1/models/%ff%00%ed%a0%80 HTTP/1.1",
        "GET /v1/models/..%2f..%2f HTTP/1.1",
        "GET * HTTP/1.1",
        "OPTIONS * HTTP/1.1",
        "CONNECT x:1 HTTP/1.1",
        "TRACE / HTTP/1.1",
        "HEAD /docs// HTTP/1.1",
        "GET ?[ HTTP/1.1",
        "GET /health/?[&%=\x7e HTTP/1.1",
        "POST /v1/models HTTP/1.1\r\nContent-Type: application/json; charset=\xe9\r\nContent-Length: 1\r\n\r\n1 / /",
        "POST /tokenize HTTP/1.1\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n / ",
        "POST /tokenize HTTP/1.1\r\nContent-Length: \xb2\r\nX: /",
        "POST /tokenize HTTP/1.1\r\nContent-Length: 99999999999999999999999\r\nX: /",
        "GET /version HTTP/1.1\r\nAuthorization: Bearer \xff\r\nX-Request-ID: \xe9\r\nOrigin: [\r\nX: /",
        "GET /version HTTP/1.1\r\nUpgrade: websocket\r\nConnection: upgrade\r\nX: /",
        "GET /version HTTP/9.9",
        "\x00\x01\x02",
    ],
)
def test_no_request_line_or_header_is_a_5xx(server: Running, client, caplog, line):
    with ask(server, raw=f"{line}\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode("latin-1")) as connection:
        connection.settimeout(30)
        answer = b"".join(iter(lambda: connection.recv(1 << 16), b""))
    assert answer.startswith((b"HTTP/1.1 2", b"HTTP/1.1 3", b"HTTP/1.1 4")), answer
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert client.get("/health").status_code == 200


def test_other_names_are_answered_where_they_are_allowed():
    small = {"json": SMALL}
    with Running(tiny_engine(), allowed_hosts=("Api.Example.org", "10.0.0.7")) as server, server.client() as client:
        for host, status in (("api.example.org:8000", 200), ("10.0.0.7", 200), ("localhost", 200), ("other", 403)):
            assert client.post("/v1/completions", **small, headers={"Host": host}).status_code == status
        assert client.post("/admin/speculation", json={}, headers={"Host": "api.example.org"}).status_code == 403
    with Running(tiny_engine(), allowed_hosts=("*",)) as server, server.client() as client:
        assert client.post("/v1/completions", **small, headers={"Host": "other"}).status_code == 200
        assert client.post("/admin/speculation", json={}, headers={"Host": "other"}).status_code == 403
    for wrong in ("", "http://x", "x:80", "a b", "[::1]"):
        with pytest.raises(ConfigError, match="without scheme or port"):
            ServeConfig("m", allowed_hosts=(wrong,))


def test_with_keys_any_name_is_answered_and_metrics_need_a_key():
    with Running(tiny_engine(), api_keys=("k",), admin_key="root") as server, server.client() as client:
        key = {"Authorization": "Bearer k", "Host": "api.example.org"}
        assert client.post("/v1/completions", json=SMALL, headers=key).status_code == 200
        assert client.get("/metrics").status_code == 401
        assert client.get("/metrics", headers=key).status_code == 200
        assert client.get("/metrics", headers={"Authorization": "Bearer root"}).status_code == 200
        for path in ("/health", "/", "/docs", "/openapi.json"):
            assert client.get(path).status_code == 200
        assert client.get("/speculation").status_code == 401


def test_open_metrics_need_no_key():
    with Running(tiny_engine(), api_keys=("k",), open_metrics=True) as server, server.client() as client:
        assert client.get("/metrics").status_code == 200
        assert client.get("/v1/models").status_code == 401


def test_polls_that_succeed_are_not_in_the_log(client, caplog):
    caplog.set_level(logging.INFO, logger="slipstream")
    for path in ("/speculation", "/health", "/metrics", "/"):
        assert client.get(path).status_code == 200
    client.get("/speculation", headers={"Host": "evil.example"})

    def logged() -> list[int]:
        return [record.fields["status"] for record in caplog.records if record.name == "slipstream.serve.gate"]

    eventually(logged)  # a record is written after its answer
    assert logged() == [403]
