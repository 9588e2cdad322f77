"""Ports for servers that tests start as programs, which take theirs a second or more after it was chosen."""

import errno
import itertools
import os
import socket

_FIRST, _EACH = 20_000, 400  # below what systems give to outgoing connections, which take any free port there
_NEXT = itertools.count(os.getpid() % 97)


def free_port(num: int = 1) -> int:
    """Return the first of `num` ports in a row that are free; each process of a test run looks in a range of its own.

    A port that the system picks for a socket bound to port 0 comes from the range it also picks from for every
    connection of every program, so it may be taken again before the server that was promised it has started.
    """
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    first = _FIRST + _EACH * (worker % 30)
    for _ in range(_EACH):
        port = first + next(_NEXT) * num % (_EACH - num)
        if all(_is_free(port + offset) for offset in range(num)):
            return port
    raise OSError(errno.EADDRINUSE, f"no {num} free ports in a row from {first} on")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
