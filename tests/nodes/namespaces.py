"""Network namespaces of this machine as machines: each has interfaces, ports and a loopback of its own."""

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

INTERFACE = "eth0"
_NUMBERS = itertools.count()


@dataclass(frozen=True)
class Machine:
    """One of them: `name` is what `ip netns exec` calls it, `address` where the others reach it."""

    name: str
    address: str

    def inside(self, *command: object) -> list[str]:
        """Return the command as it runs inside."""
        return ["ip", "netns", "exec", self.name, *map(str, command)]

    def unplug(self) -> None:
        """Cut the machine off the network without a word to anybody, as a lost power line would."""
        _ip("-n", self.name, "link", "set", INTERFACE, "down")

    def processes(self) -> list[int]:
        """Return the processes that run inside."""
        return [int(pid) for pid in _ip("netns", "pids", self.name).split()]


@contextlib.contextmanager
def two_machines() -> Iterator[tuple[Machine, Machine]]:
    """Make two machines that reach each other, and that this one reaches; whatever runs in them ends with them."""
    if shutil.which("ip") is None:
        pytest.skip("network namespaces need the program ip (iproute2)")
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    number = (os.getpid() + next(_NUMBERS)) % 10000  # the kernel takes its time to forget an older network
    tag, network = f"slip{number}", f"10.199.{number % 250}"
    made = [Machine(f"{tag}{letter}", f"{network}.{index}") for index, letter in ((1, "a"), (2, "b"))]
    try:
        try:
            _ip("link", "add", tag, "type", "bridge")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network can be made here: {error.stderr.strip()}")
        _ip("addr", "add", f"{network}.254/24", "dev", tag)
        _ip("link", "set", tag, "up")
        for machine in made:
            outside = f"v{machine.name}"
            _ip("netns", "add", machine.name)
            _ip("link", "add", outside, "type", "veth", "peer", "name", INTERFACE, "netns", machine.name)
            _ip("link", "set", outside, "master", tag, "up")
            _ip("-n", machine.name, "addr", "add", f"{machine.address}/24", "dev", INTERFACE)
            for interface in (INTERFACE, "lo"):
                _ip("-n", machine.name, "link", "set", interface, "up")
        yield made[0], made[1]
    finally:
        for machine in made:
            if Path(f"/run/netns/{machine.name}").exists():
                for pid in machine.processes():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                _ip("netns", "del", machine.name)
        subprocess.run(["ip", "link", "del", tag], check=False, capture_output=True)


def wait_for(condition: Callable[[], object], seconds: float, why: Callable[[], str] = str) -> float:
    """Wait until something holds and return the seconds that took; fail with `why` when time is up."""
    start = time.monotonic()
    while not condition():
        assert time.monotonic() < start + seconds, why()
        time.sleep(0.05)
    return time.monotonic() - start


def _ip(*arguments: str) -> str:
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True).stdout
