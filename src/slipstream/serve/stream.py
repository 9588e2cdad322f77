"""Getting an answer to a client that may read slowly or go away."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any, Protocol, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

T = TypeVar("T")
Json = dict[str, Any]

DONE = b"data: [DONE]\n\n"
STREAMED: dict[int | str, dict[str, Any]] = {
    200: {"description": "The answer, whole or as a stream.", "content": {"text/event-stream": {}}}
}
"""How the API's description names the answer of a route that streams."""
CONNECTION = "connection"
"""Where a request's state has the connection it came by."""


_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))  # json.dumps would make one each time


def json_text(value: object) -> str:
    """Return a value as JSON without spaces."""
    return _ENCODER.encode(value)


def server_sent_event(body: Json, name: str | None = None) -> bytes:
    """Return one event of a stream; some APIs name theirs."""
    head = "" if name is None else f"event: {name}\n"
    return f"{head}data: {_ENCODER.encode(body)}\n\n".encode()


class Parts(Protocol):
    """A stream's body, as it comes into being."""

    @property
    def over(self) -> bool:
        """Whether the last part was given out."""
        ...

    @property
    def is_long(self) -> bool:
        """Whether writing the next part would keep the event loop from others."""
        ...

    def part(self) -> bytes:
        """Return all that came since the last call."""
        ...

    def when_more(self, wake: Callable[[], None] | None) -> None:
        """Call `wake` on the event loop whenever there is another part; None ends that."""
        ...


class Connected(Protocol):
    """A connection that takes parts of a chunked body directly (`connection.py`)."""

    def write_part(self, make: Callable[[], bytes]) -> bool:
        """Send what `make` returns; False, and nothing is made, if that must wait or go the way of ASGI."""
        ...


class EventStream(Response):
    """Streams events until they end or the client goes away; one that does not read is made to (`connection.py`).

    A part is written to the connection where the event loop hears of it. A task that waits for parts and sends them
    through ASGI costs three times as much for each; it is there for what that cannot do: a client that reads slowly,
    a part that takes long to write, another server than ours.
    """

    media_type = "text/event-stream"

    def __init__(self, parts: Parts, close: Callable[[], None]) -> None:
        """Wrap the parts.

        Args:
            close: called once at the end, however it came.
        """
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._parts = parts
        self._close = close
        self._connection: Connected | None = None
        self._more = asyncio.Event()
        self._is_sending = False
        self._failure: Exception | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send everything; a client that is gone ends it early."""
        self._connection = scope.get("state", {}).get(CONNECTION)
        try:
            await until_disconnect(receive, self._pump(send))
        finally:
            self._parts.when_more(None)
            self._close()

    async def _pump(self, send: Send) -> None:
        """Send the head, then what `_wake` leaves, then the end."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        self._parts.when_more(self._wake)
        while await self._is_left():
            self._is_sending = True  # what comes meanwhile comes after
            part = await asyncio.to_thread(self._parts.part) if self._parts.is_long else self._parts.part()
            if part:
                await send({"type": "http.response.body", "body": part, "more_body": True})
            self._is_sending = False
            if self._parts.over:
                break
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _is_left(self) -> bool:
        """Wait until there is something for the task to do; False at the end."""
        await self._more.wait()
        self._more.clear()
        if self._failure is not None:
            raise self._failure
        return not self._parts.over

    def _wake(self) -> None:
        """Write a part at once if that is possible, and leave it to the task if not."""
        parts, connection = self._parts, self._connection
        try:
            if connection is not None and not self._is_sending and not parts.is_long:
                written = connection.write_part(parts.part)
            else:
                written = False
        except Exception as error:  # noqa: BLE001 (raised in the task of its own request: others share this call)
            self._failure, written = error, False
        if not written or parts.over:
            self._more.set()


async def until_disconnect(receive: Receive, work: Awaitable[T]) -> T | None:
    """Return what `work` returns; if the client goes away first, cancel it and return None."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        return None
    finally:
        for pending in (task, gone):
            pending.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
