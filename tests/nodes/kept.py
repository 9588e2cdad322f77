"""`slipstream serve` with nodes, as a user runs it: a process with a first line on standard output once it is ready."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

from tests.nodes.namespaces import INTERFACE, wait_for

RSH = "ip netns exec {node}"
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src")}


class Kept:
    """A launcher, what it said, and the logs of what it started."""

    def __init__(self, machines, folder: Path, *arguments: object) -> None:
        nodes = ",".join(f"{machine.name}={machine.address}" for machine in machines)
        where = ["--nodes", nodes, "--rsh", RSH, "--interface", INTERFACE]
        command = [sys.executable, "-m", "slipstream", "serve", *map(str, arguments), *where]
        self.folder = folder
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=folder, env=ENVIRONMENT
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=lambda: self.lines.extend(self.process.stdout))
        self._reader.start()

    def wait_ready(self, seconds: float) -> str:
        """Wait until it says where it listens, and return that."""
        wait_for(lambda: self.address() or self.process.poll() is not None, seconds, self.said)
        assert self.address(), self.said()
        return self.address()

    def address(self) -> str:
        return next((line.split(" at ")[1].split()[0] for line in self.lines if " serves " in line), "")

    def stop(self) -> int:
        """Tell it to end, as Ctrl-C does, and return its exit status."""
        self.process.send_signal(signal.SIGINT)
        return self.wait()

    def wait(self) -> int:
        code = self.process.wait(90)
        self._reader.join()
        return code

    def said(self) -> str:
        logs = sorted((self.folder / "out/serve").glob("*.log"))
        return "".join(self.lines) + "".join(f"\n{log.name}:\n{log.read_text()[-3000:]}" for log in logs)
