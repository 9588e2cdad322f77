"""The whole attack: the level before, groups of attacks with neighbours beside them, and what must hold at the end."""

import asyncio
import contextlib
import re
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.serve_client import metrics

from tests.attack.hosted import HostedServer
from tests.attack.kinds import NO_ANSWER, Attack, require
from tests.attack.neighbours import Neighbours, ordinary_requests, quiet_texts
from tests.attack.sockets import SilentReaders
from tests.attack.watch import Wait, memory_mib
from tests.attack.wire import Violation, Wire

MAX_HANG_S = 2.0
MAX_GROWTH = 1.10
_RECOVERY_S = 20.0


@dataclass
class Row:
    """What a group of attacks came to."""

    group: str
    num_attacks: int = 0
    statuses: Counter[int] = field(default_factory=Counter)
    num_answers: int = 0
    longest_wait_s: float = 0.0
    peak_mib: float = 0.0
    seconds: float = 0.0
    violations: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Struck:
    """When an attack was under way."""

    group: str
    name: str
    since: float
    until: float


class Campaign:
    """Attacks one server, group by group."""

    def __init__(self, hosted: HostedServer, wire: Wire, expected: Sequence[str]) -> None:
        """Keep what is attacked.

        Args:
            expected: the neighbours' texts from the offline engine, as far as it knows them.
        """
        self.hosted = hosted
        self.wire = wire
        self.rows: dict[str, Row] = {}
        self._offline = list(expected)
        self._struck: list[Struck] = []
        self._neighbours: Neighbours | None = None
        self._clients: list[asyncio.Task[None]] = []

    async def settle(self, num_requests: int) -> None:
        """Ask ordinary things; take the memory after them for the level everything is held to."""
        await ordinary_requests(self.wire, num_requests)
        self.hosted.level_mib = memory_mib(self.hosted.process.pid)

    async def invite_neighbours(self, count: int) -> None:
        """Learn the neighbours' texts while it is quiet, hold them to the offline engine's, and let them begin."""
        texts = await quiet_texts(self.wire)
        for text, offline in zip(texts, self._offline, strict=False):
            require(text == offline, f"before any attack: {text!r} instead of the offline {offline!r}")
        self._neighbours = Neighbours(self.wire, texts, self.hosted.up)
        self._clients = [asyncio.ensure_future(self._neighbours.client(n)) for n in range(count)]

    async def strike(self, group: str, attacks: Sequence[Attack]) -> None:
        """Make a group's attacks, one after another."""
        row = self.rows.setdefault(group, Row(group))
        started, before = time.monotonic(), self._num_answers
        self.hosted.peak_since_last()
        for attack in attacks:
            row.num_attacks += 1
            since = time.monotonic()
            for problem in await self._strike(attack, row):
                row.violations.append(f"{attack.name}: {problem}")
            self._struck.append(Struck(group, attack.name, since, time.monotonic()))
        row.seconds += time.monotonic() - started
        row.num_answers += self._num_answers - before
        row.peak_mib = max(row.peak_mib, self.hosted.peak_since_last() - self.hosted.level_mib)

    async def farewell(self) -> None:
        """Let the neighbours go."""
        if self._neighbours is not None:
            self._neighbours.stop()
            await asyncio.gather(*self._clients)

    async def silent_readers(self, readers: SilentReaders) -> None:
        """Hold the server to giving up clients that do not read."""
        row = self.rows.setdefault("silence", Row("silence"))
        row.num_attacks += 1
        started, before = time.monotonic(), self._num_answers
        try:
            await readers.wait_until_given_up()
        except Violation as violation:
            row.violations.append(str(violation))
        readers.close()
        row.seconds += time.monotonic() - started
        row.num_answers += self._num_answers - before

    async def aftermath(self, num_requests: int) -> None:
        """Check, once all is quiet, that nothing is left of the attack: no request, no page, no memory."""
        row = self.rows.setdefault("aftermath", Row("aftermath"))
        started = time.monotonic()
        found: dict[str, float] = {}
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(30):
                while not found or any(found[name] for name in _LEFT):
                    await asyncio.sleep(0.1)
                    found = await asyncio.to_thread(metrics, self.wire.port)
        row.violations += [f"{name} is {found[name]:g} at the end" for name in _LEFT if found.get(name)]
        await ordinary_requests(self.wire, num_requests)
        level, now = self.hosted.level_mib, memory_mib(self.hosted.process.pid)
        row.peak_mib, row.seconds = now - level, time.monotonic() - started
        if now > MAX_GROWTH * level:
            row.violations.append(f"memory is {now:.0f} MiB; after ordinary requests it was {level:.0f}")

    def attribute(self, waits: Sequence[Wait]) -> None:
        """Give each long wait for /health, and each neighbour's trouble, to the attack it happened under."""
        for since, seconds in waits:
            if any(start - 1 <= since + seconds and since <= end + 1 for start, end in self.hosted.down):
                continue  # it was being started
            row, name = self._under(since)
            row.longest_wait_s = max(row.longest_wait_s, seconds)
            if seconds > MAX_HANG_S:
                row.violations.append(f"{name}: /health took {seconds:.1f} s")
        for when, problem in self._neighbours.wrong if self._neighbours else ():
            row, name = self._under(when)
            row.violations.append(f"{name}: {problem}")

    @property
    def _num_answers(self) -> int:
        return self._neighbours.num_answers if self._neighbours else 0

    def _under(self, when: float) -> tuple[Row, str]:
        latest = [struck for struck in self._struck if struck.since <= when]
        if not latest:
            return self.rows.setdefault("before", Row("before")), "before any attack"
        return self.rows[latest[-1].group], latest[-1].name

    async def _strike(self, attack: Attack, row: Row) -> list[str]:
        problems = []
        try:
            async with asyncio.timeout(attack.limit_s):
                statuses = await attack.send(self.wire)
            # A 503 that is fine turned a connection away, which is no answer that failed.
            row.statuses.update(NO_ANSWER if status >= 500 and status in attack.fine else status for status in statuses)
            problems += [f"status {status}" for status in sorted(set(statuses) - attack.fine)]
        except Violation as violation:
            problems.append(str(violation))
        except TimeoutError:
            problems.append(f"no answer within {attack.limit_s:g} s")
        except (OSError, ValueError, KeyError) as error:
            problems.append(f"{type(error).__name__}: {error}")
        if trouble := self.hosted.death() or await self._unreachable():
            problems.append(trouble)
            await self.hosted.restart()
        return problems

    async def _unreachable(self) -> str | None:
        """Wait a while for /health; say so if it stays away."""
        deadline = time.monotonic() + _RECOVERY_S
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError, TimeoutError):
                async with asyncio.timeout(_RECOVERY_S):
                    if (await self.wire.get("/health")).status == 200:
                        return None
            if death := self.hosted.death():
                return death
            await asyncio.sleep(0.1)
        return f"/health did not answer within {_RECOVERY_S:g} s after it; the server was ended"


_LEFT = ("slipstream_running_requests", "slipstream_waiting_requests", "slipstream_kv_usage")


async def vocabulary(wire: Wire) -> int:
    """Return how many tokens the model has, which the server says to who asks for one too high."""
    reply = await wire.post("/detokenize", {"tokens": [2**31 - 1]})
    found = re.search(rb"ids end at (\d+)", reply.body)
    require(found is not None, f"the vocabulary's size is not told: {reply.body[:100]!r}")
    assert found is not None, "checked"
    return int(found[1]) + 1
