"""One client's connection, with an end to every wait for the client: to send a request, the rest of it, or to read.

uvicorn ends connections that idle between two requests, and waits for everything else for as long as it takes.
"""

import asyncio
import contextlib
import http
import json
import logging
import socket
import struct
from collections.abc import Callable
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from slipstream.serve.config import ServeConfig
from slipstream.serve.errors import HttpError, request_unfinished
from slipstream.serve.stream import CONNECTION

logger = logging.getLogger(__name__)

_READ_BYTES = 1 << 14  # at a time: in chunks of a byte they take the event loop 70 ms, and then others have a turn
_PROGRESS_BYTES = 1 << 14  # of a body, for each read time-out: a few bytes now and then do not keep a connection


class Connection(H11Protocol):
    """uvicorn's HTTP/1.1 over h11, tended from outside: `tend` gives up a client that keeps the server waiting."""

    def __init__(
        self,
        settings: uvicorn.Config,
        state: ServerState,
        app_state: dict[str, Any],  # what uvicorn calls it; ours is empty
        config: ServeConfig,
        *,
        refusal: HttpError | None = None,
    ) -> None:
        """Wrap uvicorn's protocol.

        Args:
            refusal: the answer to whatever the client asks, where it is one too many.
        """
        super().__init__(settings, state, {**app_state, CONNECTION: self})
        self._limits = config
        self._refusal = refusal
        self._since = self.loop.time()
        self._num_received = 0
        self._num_unread = 0
        self._unread_since = 0.0

    @property
    def waits(self) -> bool:
        """Whether the next move is the client's; a connection that has a whole request to answer does not wait."""
        return self.cycle is None or self.cycle.response_complete or self.cycle.more_body

    @property
    def waits_since(self) -> float:
        """When the client last did what moves its request on, on the event loop's clock."""
        return self._since

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # as uvicorn has it
        """Begin to wait for a request."""
        super().connection_made(transport)
        if hasattr(transport, "max_size"):  # asyncio's own; what a larger read holds is parsed in one go
            transport.max_size = _READ_BYTES
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            # For bytes that the kernel has taken and cannot send, also after the connection was closed.
            patience_ms = round(2000 * self._limits.write_timeout_s)
            _set_option(transport, socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, patience_ms)

    def connection_lost(self, exc: Exception | None) -> None:
        """Note the end of the connection."""
        if isinstance(exc, TimeoutError):
            logger.warning("a client was given up: it left bytes unread", extra={"fields": {"client": self.client}})
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take bytes, and note whether they move the request on."""
        if self._refusal is not None:
            # Not before something was read: closing on unread bytes resets the connection, and the answer is lost.
            self.refuse(self._refusal)
            return
        before = (self.conn.their_state, self.cycle)
        if self.conn.their_state is h11.IDLE and self._num_received == 0:
            self._move_on()  # the head begins; until here a connection may idle
        self._num_received += len(data)
        super().data_received(data)
        if before != (self.conn.their_state, self.cycle) or (
            self.conn.their_state is h11.SEND_BODY and self._num_received >= _PROGRESS_BYTES
        ):
            self._move_on()

    def on_response_complete(self) -> None:
        """Begin to wait for the next request."""
        self._move_on()
        super().on_response_complete()

    def write_part(self, make: Callable[[], bytes]) -> bool:
        """Send a part of the body of an answer under way, past uvicorn and h11, which would only frame it.

        False, and nothing is made, if it must wait for the client to read, or is not sent in chunks (HTTP/1.0).
        """
        cycle = self.cycle
        if cycle is None or cycle.disconnected or self.flow.write_paused or cycle.scope["http_version"] != "1.1":
            return False
        if part := make():
            self.transport.write(b"%x\r\n%b\r\n" % (len(part), part))
        return True

    def tend(self, now: float) -> None:
        """Give the client up if it has kept the server waiting for too long."""
        limits = self._limits
        if self._left_unread_s(now) > limits.write_timeout_s:
            self._give_up(f"it left bytes unread for {limits.write_timeout_s:g} s")
        elif self._owes_request and now - self._since > limits.read_timeout_s:
            if self.conn.their_state is h11.IDLE and not self._num_received:
                self.end()  # there is no request to answer
            else:
                self.refuse(request_unfinished(limits.read_timeout_s))
        elif not self.waits and now - self._since > limits.request_timeout_s + limits.write_timeout_s:
            self._give_up("it reads its answer too slowly")

    def refuse(self, error: HttpError) -> None:
        """Answer the request that is coming in with an error, unless it has an answer already, and close."""
        logger.info("a client was refused: %s", error, extra={"fields": {"client": self.client}})
        self._answer(error)
        self.end()

    def make_way(self, error: HttpError) -> None:
        """Close the connection for the sake of another; a client that may have asked for something is told why."""
        if self.cycle is None or not self.cycle.response_complete:
            self._answer(error)
        self.end()

    def end(self) -> None:
        """Close the connection now, whatever was left to send, and count it no more."""
        self.connections.discard(self)
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if not self.transport.get_write_buffer_size():
            self.transport.close()
            return
        # Without this the kernel keeps trying to send what it has of the answer, for minutes.
        _set_option(self.transport, socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.transport.abort()

    def send_400_response(self, msg: str) -> None:
        """Answer what is not HTTP, in the form of our other errors; uvicorn calls this."""
        self.refuse(HttpError(400, "The request is not valid HTTP/1.1."))

    def shutdown(self) -> None:
        """Begin to drain, as uvicorn asks."""
        if not self.transport.is_closing():
            super().shutdown()

    @property
    def _owes_request(self) -> bool:
        """Whether the client is in the middle of sending a request, or has not begun with its first."""
        if self.conn.their_state is h11.IDLE:
            return self.cycle is None or self._num_received > 0
        return self.conn.their_state is h11.SEND_BODY

    def _left_unread_s(self, now: float) -> float:
        """Return how long the bytes that wait to be sent have been the same."""
        num_unread = self.transport.get_write_buffer_size()
        if num_unread != self._num_unread:
            self._num_unread, self._unread_since = num_unread, now
        return now - self._unread_since if num_unread else 0.0

    def _answer(self, error: HttpError) -> None:
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.write(_on_the_wire(error))

    def _give_up(self, reason: str) -> None:
        logger.warning("a client was given up: %s", reason, extra={"fields": {"client": self.client}})
        self.end()

    def _move_on(self) -> None:
        self._since = self.loop.time()
        self._num_received = 0


def _set_option(transport: asyncio.Transport, level: int, name: int, value: int | bytes) -> None:
    with contextlib.suppress(OSError):  # the client is gone
        transport.get_extra_info("socket").setsockopt(level, name, value)


def _on_the_wire(error: HttpError) -> bytes:
    """Return an error as a whole HTTP answer, the last of its connection."""
    body = json.dumps(error.body()).encode()
    headers = {
        "Content-Type": "application/json",
        "Content-Length": str(len(body)),
        "Connection": "close",
        **error.headers,
    }
    lines = [f"HTTP/1.1 {error.status} {http.HTTPStatus(error.status).phrase}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode() + body
