"""Heads of requests: hosts, paths, methods and lengths that two programs might read in two ways."""

from tests.attack.kinds import ANY, COMPLETIONS, NO_ANSWER, REFUSED, Attack, raw, require
from tests.attack.wire import Wire, request

_SMALL = b'{"prompt": "x", "max_tokens": 1}'
_NOT_HERE = frozenset({400, 403, 421, NO_ANSWER})
FORGED = "FORGED"
"""A word that an attack tries to put at the beginning of a line of the log."""


def attacks() -> list[Attack]:
    """Return every attack of this kind."""
    return [*_hosts(), *_paths(), *_methods(), *_headers(), *_lengths(), _origins()]


def _hosts() -> list[Attack]:
    """Return names of this machine that are none; another site's name is how a web page gets in (DNS rebinding)."""
    foreign = ("evil.example", "localhost.evil.example", "127.0.0.1.evil.example:8000", "evil.example#localhost")
    broken = (
        "[",
        "[::1",
        "]",
        "[]:1",
        "localhost@evil.example",
        "localhost:port",
        "localhost:99999999",
        "a b",
        "\xff",
        "%00",
    )
    found = []
    for path in (COMPLETIONS, "/admin/speculation", "/tokenize"):
        for host in (*foreign, *broken):
            fine = _NOT_HERE if host in foreign else (*ANY, NO_ANSWER)
            body = b"{}" if "admin" in path else _SMALL
            data = request("POST", path, body, [("Host", host)])
            short = host in ("evil.example", "[") and path != "/tokenize"
            found.append(raw(f"Host {host!a} at {path}", data, fine, in_short=short))
    no_host = request("POST", COMPLETIONS, _SMALL).replace(b"Host: localhost\r\n", b"")
    two = request("POST", COMPLETIONS, _SMALL, [("Host", "localhost"), ("Host", "evil.example")])
    missing = [raw("no Host", no_host), raw("two Hosts", two, _NOT_HERE)]
    absolute = raw("an absolute target of another site", request("POST", f"http://evil.example{COMPLETIONS}", _SMALL))
    return [*found, *missing, absolute]


def _paths() -> list[Attack]:
    """Return paths that want to be lines of the log, files, or other paths."""
    paths = (
        f"/%0a{FORGED}%20line", f"/%0d%0a{FORGED}", f"/%1b[2J%1b]0;{FORGED}%07", "/%00", f"/%e2%80%a8{FORGED}",
        f"/v1/completions%0a{FORGED}?x=%0a{FORGED}", "/%c2%9b31m", "/..%2f..%2f..%2fetc/passwd",
        "/../../etc/passwd", "//evil.example/", "/%", "/%zz", "/\xe4\xff", "/admin%2fspeculation", "/ADMIN/speculation",
        "//admin/speculation", "/admin/../admin/speculation", "/./metrics", "/v1/completions/",
        "/v1/models/" + "x" * 8000, "/" + "a/" * 20_000, "*", "localhost", "/?" + "a=1&" * 10_000, "/health;x=1",
        "/docs/../..", "/playground.html", "/openapi.json/%2e%2e",
    )  # fmt: skip
    fine = (*ANY, 307, NO_ANSWER)
    return [raw(f"GET {path[:40]!a}", request("GET", path, b""), fine, in_short=FORGED in path) for path in paths]


def _methods() -> list[Attack]:
    methods = ("OPTIONS", "TRACE", "CONNECT", "PUT", "DELETE", "PATCH", "HEAD", "get", "G\x00T", "A" * 5000)
    fine = (*ANY, NO_ANSWER)
    found = [
        raw(f"{method[:8]!a} {path}", request(method, path, b""), fine)
        for method in methods
        for path in ("/health", COMPLETIONS)
    ]
    versions = ("HTTP/0.9", "HTTP/1.2", "HTTP/2.0", "HTTP/9", "ICY", "")
    found += [
        raw(f"version {v!a}", f"GET /health {v}\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode(), (*fine, 505))
        for v in versions
    ]
    return found


def _headers() -> list[Attack]:
    """Return fields that are odd, many or large."""
    fields = {
        "1000 fields": [(f"X-{i}", "y") for i in range(1000)],
        "a field of 60 kB": [("X-Long", "y" * 60_000)],
        "a field of 1 MB": [("X-Long", "y" * (1 << 20))],
        "a name of 60 kB": [("X" * 60_000, "y")],
        "a folded field": [("X-Folded", "a\r\n b")],
        "a space before the colon": [("X-Space ", "a")],
        "a name of nothing": [("", "a")],
        "a name with NUL": [("X\x00Y", "a")],
        "a value with NUL": [("X-Y", "a\x00b")],
        "a bare line feed": [("X-Y", f"a\n{FORGED}: b")],
        "a request id that is a line": [("X-Request-ID", f"a%0a{FORGED}")],
        "a request id with an escape": [("X-Request-ID", f"\x1b[2J{FORGED}")],
        "an expectation": [("Expect", "100-continue")],
        "another expectation": [("Expect", "x" * 100)],
        "an upgrade to WebSocket": [("Upgrade", "websocket"), ("Connection", "close, upgrade")],
        "an upgrade to HTTP/2": [("Upgrade", "h2c"), ("Connection", "close, upgrade")],
        "a key of 60 kB": [("Authorization", "Bearer " + "k" * 60_000)],
        "a key that is no ASCII": [("Authorization", "Bearer \xff\xfe")],
        "text for JSON": [("Content-Type", "text/plain")],
        "a form for JSON": [("Content-Type", "application/x-www-form-urlencoded")],
        "JSON in another character set": [("Content-Type", "application/json; charset=utf-7")],
        "two content types": [("Content-Type", "application/json"), ("Content-Type", "text/plain")],
        "a forwarded host": [("X-Forwarded-Host", "evil.example"), ("X-Forwarded-For", "127.0.0.1")],
    }  # fmt: skip
    fine = (100, *ANY, 417, NO_ANSWER)
    return [raw(name, request("POST", COMPLETIONS, _SMALL, added), fine) for name, added in fields.items()]


def _lengths() -> list[Attack]:
    """Return bodies whose length two readers would take differently; what hides behind must not be answered."""
    hidden = request("POST", COMPLETIONS, _SMALL)
    length = str(len(_SMALL))
    heads = {
        "two different lengths": [("Content-Length", length), ("Content-Length", "0")],
        "a length and chunks": [("Content-Length", length), ("Transfer-Encoding", "chunked")],
        "chunks, oddly spelt": [("Content-Length", length), ("Transfer-Encoding", "xchunked")],
        "chunks twice": [("Transfer-Encoding", "chunked"), ("Transfer-Encoding", "identity")],
        "chunks after a tab": [("Content-Length", length), ("Transfer-Encoding", "\tchunked")],
        "a length of two numbers": [("Content-Length", f"{length}, 0")],
        "a length with a sign": [("Content-Length", f"+{length}")],
        "a negative length": [("Content-Length", "-1")],
        "a length of 10^30": [("Content-Length", "1" + "0" * 30)],
        "a length of 5000 digits": [("Content-Length", "1" * 5000)],
        "a length in hexadecimal": [("Content-Length", "0x20")],
        "a length with an underscore": [("Content-Length", "3_2")],
        "a length in superscript": [("Content-Length", "\xb3\xb2")],
        "a length of nothing": [("Content-Length", "")],
    }

    def hiding(name: str, fields: list[tuple[str, str]]) -> Attack:
        async def send(wire: Wire) -> list[int]:
            reply = await wire.raw(request("POST", COMPLETIONS, _SMALL, fields) + hidden)
            answered = [status for status in reply.statuses if status == 200]
            require(len(answered) <= 1, f"{name}: a hidden second request was answered")
            return reply.statuses

        return Attack(name, send, frozenset((*ANY, NO_ANSWER)), in_short=name.startswith("two diff"))

    return [hiding(name, fields) for name, fields in heads.items()]


def _origins() -> Attack:
    """Return calls from a page of another site, which its browser may not let the page read."""

    async def send(wire: Wire) -> list[int]:
        origin = [("Origin", "https://evil.example")]
        asked = [*origin, ("Access-Control-Request-Method", "POST"), ("Access-Control-Request-Headers", "content-type")]
        replies = [
            await wire.raw(request("OPTIONS", COMPLETIONS, b"", asked)),
            await wire.post(COMPLETIONS, _SMALL, origin),
            await wire.post(COMPLETIONS, _SMALL, [*origin, ("Content-Type", "text/plain")]),
        ]
        allowed = [reply for reply in replies if b"access-control-allow-origin" in reply.received.lower()]
        require(not allowed, "a page of another site was allowed to read an answer")
        require(replies[2].status in REFUSED, "a page of another site may post without a browser's question")
        return [status for reply in replies for status in reply.statuses]

    return Attack("a page of another site", send, in_short=True)
