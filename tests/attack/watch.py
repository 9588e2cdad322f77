"""What is watched from outside while the server is attacked: whether /health answers, and how much memory it has."""

import multiprocessing
import select
import socket
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

_TICK_S = 0.05
_WORTH_TELLING_S = 0.2
_ASK_AGAIN_TICKS = 40
_ASKING = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"


class Wait(NamedTuple):
    """One time that /health took long: when that began, and for how long."""

    since: float
    seconds: float


class Prober:
    """A process that asks for /health all the time, on a connection of its own each time."""

    def __init__(self, port: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._here, there = context.Pipe()
        self._process = context.Process(target=_probe, args=(port, there), daemon=True)
        self._process.start()

    def stop(self) -> list[Wait]:
        """End it; return the times that were long, with one that has not ended yet."""
        self._here.send(None)
        found: list[Wait] = self._here.recv()
        self._process.join()
        return found


def _probe(port: int, pipe: Connection) -> None:
    """Ask until something comes through the pipe.

    Waiting is counted in ticks of this process, not by the clock: where the whole machine stands still, so does the
    count, and a server is not blamed for its machine.
    """
    waits: list[Wait] = []
    while not pipe.poll():
        since, seconds, answered = time.monotonic(), 0.0, False
        while not answered and not pipe.poll():
            answered, num_ticks = _ask(port)
            seconds += num_ticks * _TICK_S
        if seconds > _WORTH_TELLING_S:
            waits.append(Wait(since, seconds))
        time.sleep(_TICK_S)
    pipe.recv()
    pipe.send(waits)


def _ask(port: int) -> tuple[bool, int]:
    """Ask once; return whether a good answer came, and how many ticks went by."""
    num_ticks = 0
    with socket.socket() as asking:
        asking.settimeout(_TICK_S)
        try:
            asking.connect(("127.0.0.1", port))
            asking.sendall(_ASKING)
            while num_ticks < _ASK_AGAIN_TICKS:
                if select.select([asking], [], [], _TICK_S)[0]:
                    if asking.recv(64).startswith(b"HTTP/1.1 200"):
                        return True, num_ticks
                    break
                num_ticks += 1
        except OSError:
            pass  # refused, reset, or no place in the queue: asked again
    time.sleep(_TICK_S)
    return False, num_ticks + 1


def tree(pid: int) -> list[int]:
    """Return a process and everything it started that still runs."""
    found = [pid]
    for one in found:
        for file in Path(f"/proc/{one}/task").glob("*/children"):
            try:
                found += [int(child) for child in file.read_text().split()]
            except OSError:
                continue  # it ended while being asked
    return found


def memory_mib(pid: int) -> float:
    """Return the memory of a process and of all it started, in MiB: what they share counts once.

    Files they have mapped count for the first of them only, and as it sees them: their share of a page that others on
    this machine have mapped as well (a library, a model) would change with what the others do.
    """
    total = sum(_kib(Path(f"/proc/{one}/smaps_rollup"), ("Pss_Anon:", "Pss_Shmem:")) for one in tree(pid))
    return (total + _kib(Path(f"/proc/{pid}/status"), ("RssFile:",))) / 1024


def _kib(file: Path, names: tuple[str, ...]) -> int:
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return 0  # it ended while being asked
    return sum(int(line.split()[1]) for line in lines if line.startswith(names))
