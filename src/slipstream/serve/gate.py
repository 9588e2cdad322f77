"""What every request passes first: a name it calls us by, an id, API keys, limits on its body, a line in the log."""

import asyncio
import contextlib
import hmac
import ipaddress
import logging
import re
import time
import uuid
from collections.abc import Iterable

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from slipstream.serve.config import ServeConfig, is_loopback
from slipstream.serve.errors import HttpError

logger = logging.getLogger(__name__)

_HEALTH_PATHS = frozenset({"/health", "/health/live", "/health/ready", "/ping"})
# The playground and the API's description: the same in every server of this version, so they tell no secret.
_STATIC_PATHS = frozenset({"/", "/docs", "/openapi.json"})
# They change what other requests find, and take no body: other servers' clients post nothing to them.
_CACHE_PATHS = frozenset({"/flush_cache", "/reset_prefix_cache"})
_CANCEL_PATH = re.compile(r"/v1/responses/[^/]+/cancel")
_POLLED_PATHS = _HEALTH_PATHS | _STATIC_PATHS | {"/metrics", "/speculation"}
_MAX_INCOMING = 64  # bodies of the largest size that may be half received at once
_DRAIN_S = 2.0
_DRAIN_BYTES = 1 << 26
_HOST = re.compile(r"(?:(?P<name>[A-Za-z0-9._~!$&'()*+,;=%-]*)|\[(?P<address>[0-9A-Fa-f:.]+)\])(?::[0-9]{0,5})?")
_MAX_LOGGED_PATH = 256
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")


class Gate:
    """ASGI middleware. Streams pass through it untouched."""

    def __init__(self, app: ASGIApp, config: ServeConfig) -> None:
        self._app = app
        self._config = config
        self.max_body_bytes = config.max_body_bytes
        self.num_incoming_bytes = 0
        self._turn = asyncio.Lock()
        self._hosts = frozenset(host.lower().removesuffix(".") for host in config.allowed_hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request through, or answer it with what is wrong."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        request_id = _request_id(headers)
        state = scope.setdefault("state", {})
        state["request_id"] = request_id
        # With keys, whose requests are whose; without, everybody is the same caller.
        state["caller"] = _given_key(headers) if self._config.api_keys else ""
        scope["path"] = path = self._local(scope["path"])
        body = _Body(receive, self)
        started = time.perf_counter()
        status = 0

        async def watched_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["X-Request-ID"] = request_id
            await send(message)

        try:
            if scope["method"] == "POST":
                async with self._turn:
                    await asyncio.sleep(0)  # of requests that come together one is begun, then streams go on
            self._check(scope, headers)
            # The connection leaves the body of an answer to HEAD out; routes know GET only.
            called = {**scope, "method": "GET"} if scope["method"] == "HEAD" else scope
            await self._app(called, body.receive, watched_send)
        except HttpError as error:
            if error.status == 413:
                await _drain(receive)
            said = error.for_path(path, request_id)
            await JSONResponse(said, error.status, error.headers)(scope, receive, watched_send)
        finally:
            body.release()
            fields = {
                "request_id": request_id,
                "method": scope["method"],
                "path": path[:_MAX_LOGGED_PATH],
                "status": status,
                "ms": round(1000 * (time.perf_counter() - started), 1),
            }
            is_poll = scope["method"] in ("GET", "HEAD") and path in _POLLED_PATHS and status == 200
            logger.log(logging.DEBUG if is_poll else logging.INFO, "request", extra={"fields": fields})

    def _check(self, scope: Scope, headers: Headers) -> None:
        path = scope["path"]
        host = _host(headers)
        if path not in _HEALTH_PATHS:
            self._check_host(host)
        if scope["method"] == "OPTIONS":  # a browser's question before a call; CORS answers it, without keys
            return
        if path == "/admin" or path.startswith("/admin/") or path in _CACHE_PATHS:
            check_admin(self._config, headers)
        else:
            self._check_key(path, headers)
        if path in _CACHE_PATHS or _CANCEL_PATH.fullmatch(path):  # these have no body
            _check_no_page(headers)
        length = headers.get("content-length", "0")
        if length.isdecimal() and int(length) > self.max_body_bytes:
            raise _too_large(self.max_body_bytes)

    def _check_host(self, host: str) -> None:
        """Refuse names that are not ours.

        A page of another site can point its own name at this machine; the browser then takes us for that site, and
        lets the page call us and read the answers.
        """
        if not self._hosts and (self._config.api_keys or not self._config.is_local):
            return
        if not is_loopback(host) and not {"*", host} & self._hosts:
            raise HttpError(
                403,
                "The Host header has a name this server does not go by. It answers to localhost, 127.0.0.1 and ::1; "
                "start it with --allowed-host NAME for others.",
            )

    def _check_key(self, path: str, headers: Headers) -> None:
        config = self._config
        if not config.api_keys or path in _HEALTH_PATHS or path in _STATIC_PATHS:
            return
        keys = config.api_keys
        if path == "/metrics":
            if config.open_metrics:
                return
            keys = (*keys, *(() if config.admin_key is None else (config.admin_key,)))
        if not _has_key(headers, keys):
            raise HttpError(401, "An API key is needed: send the header 'Authorization: Bearer <key>'.")

    def _local(self, path: str) -> str:
        """Return a path as it is here, behind a proxy that leaves its own prefix (--root-path) in front or takes it."""
        prefix = self._config.root_path
        return path[len(prefix) :] if prefix and path.startswith(f"{prefix}/") else path


def check_admin(config: ServeConfig, headers: Headers) -> None:
    """Raise unless a request may do what concerns every client: it has the admin key, or is this machine's own."""
    if config.admin_key is not None:
        if not _has_key(headers, [config.admin_key]):
            raise HttpError(401, "This needs the admin key: send the header 'Authorization: Bearer <key>'.")
    elif not config.is_local or config.api_keys:
        raise HttpError(403, "/admin is closed: start the server with --admin-key to open it.")
    elif not is_loopback(_host(headers)):
        raise HttpError(403, "/admin answers by the names localhost, 127.0.0.1 and ::1 only, without --admin-key.")


class _Body:
    """A request's body on its way in, bounded alone and together with all others."""

    def __init__(self, receive: Receive, gate: Gate) -> None:
        self._receive = receive
        self._gate = gate
        self._num_bytes = 0
        self._num_held = 0
        self._is_whole = False

    async def receive(self) -> Message:
        """Return the next message, unless the body grows past a limit, or breaks off."""
        message = await self._receive()
        num_bytes = len(message.get("body", b""))
        self._num_bytes += num_bytes
        self._num_held += num_bytes
        self._gate.num_incoming_bytes += num_bytes
        if self._num_bytes > self._gate.max_body_bytes:
            raise HTTPException(413, str(_too_large(self._gate.max_body_bytes)))
        if message["type"] == "http.disconnect" and not self._is_whole:
            raise HTTPException(499, "The client went away before its request was whole.")
        self._is_whole = not message.get("more_body", False)
        if self._is_whole:
            self.release()
        elif self._gate.num_incoming_bytes > _MAX_INCOMING * self._gate.max_body_bytes:
            raise HTTPException(503, "Too many large requests are coming in at once; try again.", {"Retry-After": "1"})
        return message

    def release(self) -> None:
        """Count the body no more among those on their way in."""
        self._gate.num_incoming_bytes -= self._num_held
        self._num_held = 0


def _too_large(limit: int) -> HttpError:
    return HttpError(413, f"The body is larger than the server's --max-body-bytes, {limit}.")


async def _drain(receive: Receive) -> None:
    """Read on for a while: a client that is still sending when the connection closes never sees our answer."""
    num_bytes = 0
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_DRAIN_S):
            while num_bytes < _DRAIN_BYTES:
                message = await receive()
                num_bytes += len(message.get("body", b""))
                if not message.get("more_body", False):
                    return


def _host(headers: Headers) -> str:
    """Return the name or address a client calls us by, without the port."""
    wrong = HttpError(400, "The Host header is not a name or an address, with or without a port.")
    match = _HOST.fullmatch(headers.get("host", ""))
    if match is None:
        raise wrong
    try:
        return str(ipaddress.IPv6Address(match["address"])) if match["address"] else match["name"].lower().rstrip(".")
    except ValueError:
        raise wrong from None


def _check_no_page(headers: Headers) -> None:
    """Refuse what a web page sends: without a body it asks nobody's leave first. Other clients send neither header."""
    if "origin" in headers or headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
        raise HttpError(403, "Web pages may not call this.")


def _request_id(headers: Headers) -> str:
    given = headers.get("x-request-id", "")
    return given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex


def _has_key(headers: Headers, keys: Iterable[str]) -> bool:
    """Compare in constant time, and with every key, so that timing tells nothing about any of them."""
    given = _given_key(headers).encode()
    matches = [hmac.compare_digest(given, key.encode()) for key in keys]
    return any(matches)


def _given_key(headers: Headers) -> str:
    """Return the key a client sent: as OpenAI's clients do, or as Anthropic's."""
    scheme, _, given = headers.get("authorization", "").partition(" ")
    return given.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
