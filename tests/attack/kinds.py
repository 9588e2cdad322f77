"""An attack as data: its name, how it is sent, and which answers are fine."""

from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from tests.attack.wire import Violation, Wire

Send = Callable[[Wire], Awaitable[Sequence[int]]]
Body = dict[str, Any] | bytes
Maker = Callable[[], Body] | Callable[[Wire], Body]

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
NO_ANSWER = 0
REFUSED = frozenset({400, 401, 403, 404, 405, 408, 413, 414, 415, 421, 426, 429, 431})
ANY = frozenset({200, *REFUSED})
"""What may come back where nothing more is promised than that it is no 5xx."""


@dataclass(frozen=True)
class Attack:
    """One thing to do to the server.

    Args:
        send: does it, and returns the statuses that came back; raises Violation where more than a status is wrong.
        fine: the statuses that are no violation; 0 stands for a connection closed without an answer.
        limit_s: how long it may take; past that the server owed an answer and gave none.
        in_short: whether it belongs to the short form.
    """

    name: str
    send: Send
    fine: frozenset[int] = ANY
    limit_s: float = 60.0
    in_short: bool = False


def post(name: str, body: Body | Maker, path: str = COMPLETIONS, fine: Iterable[int] = ANY, **more: Any) -> Attack:
    """Return the attack that posts a body; a large one is made when it is sent."""

    async def send(wire: Wire) -> list[int]:
        return (await wire.post(path, made(body, wire))).statuses

    return Attack(name, send, frozenset(fine), **more)


def raw(name: str, data: bytes, fine: Iterable[int] = (*ANY, NO_ANSWER), **more: Any) -> Attack:
    """Return the attack that sends bytes; closing the connection is a fine answer to nonsense."""

    async def send(wire: Wire) -> list[int]:
        return (await wire.raw(data)).statuses

    return Attack(name, send, frozenset(fine), **more)


def made(body: Body | Maker, wire: Wire) -> Body:
    """Return a body that may still have to be made, perhaps from what the wire knows of the model."""
    if not callable(body):
        return body
    return body(wire) if body.__code__.co_argcount else body()  # type: ignore[call-arg]  # one of the two


def require(condition: bool, sentence: str) -> None:
    """Raise Violation unless the condition holds."""
    if not condition:
        raise Violation(sentence)
