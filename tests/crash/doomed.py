"""Runs a program that is to end badly: at its n-th change of a folder, or soon after, it is killed or its disk fills.

Plans come in on standard input, one JSON object to a line; each is run in a fork of this process, so that torch is
imported once, and its wait status is answered on a line. Changes are seen through Python's audit events, before they
happen. Writes by native code are not among them; the moment after an event is what meets those. A plan:

    module, arguments  what to run: a module with a function `main`, and the arguments it finds in sys.argv
    watch              the folder whose changes count
    at                 the change at which it happens, counted from 1; 0 for never
    after_s            how long after that change
    action             "kill" (SIGKILL, as by kill -9 or for want of memory), or "fill" (the disk of `watch`)
    count              a file that gets the number of changes when the program ends by itself
    output             a file for what it prints
"""

import atexit
import errno
import importlib
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

TIMEOUT_S = 300
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
CHANGES = ("os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.truncate", "os.link", "os.symlink")


class Doom:
    """Counts the changes of a folder and acts at one of them."""

    def __init__(self, plan: dict) -> None:
        self._plan = plan
        self._watch = plan["watch"]
        self._lock = threading.RLock()
        self._acting = False
        self.changes = 0

    def hear(self, event: str, arguments: tuple) -> None:
        if event == "open":
            path, _, flags = arguments
            if not isinstance(flags, int) or not flags & WRITING:
                return
        elif event in CHANGES:
            path = arguments[0]
        else:
            return
        if not isinstance(path, str | os.PathLike) or not os.fspath(path).startswith(self._watch):
            return
        with self._lock:
            if self._acting:
                return
            self.changes += 1
            self._acting = self.changes == self._plan["at"]
            act = self._acting
        if act:
            self._act()

    def _act(self) -> None:
        if not self._plan["after_s"]:
            self._happen()
        else:
            threading.Thread(target=self._happen, daemon=True).start()

    def _happen(self) -> None:
        time.sleep(self._plan["after_s"])
        if self._plan["action"] == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        fill(Path(self._watch))


def fill(folder: Path) -> None:
    """Leave no room on the disk of a folder."""
    with (folder / "hog").open("ab", buffering=0) as hog:
        for size in (1 << 20, 1 << 12, 1):
            try:
                while True:
                    hog.write(bytes(size))
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise


def serve() -> dict | None:
    """Return the plan of a fork; in the first process, None when there are no more."""
    for line in sys.stdin:
        plan = json.loads(line)
        pid = os.fork()
        if pid == 0:
            return plan
        _, status = os.waitpid(pid, 0)
        sys.stdout.write(f"{os.waitstatus_to_exitcode(status)}\n")
        sys.stdout.flush()
    return None


def run(plan: dict) -> None:
    signal.alarm(TIMEOUT_S)  # whatever hangs ends by SIGALRM
    output = os.open(plan["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for old, new in ((os.open(os.devnull, os.O_RDONLY), 0), (output, 1), (output, 2)):
        os.dup2(old, new)
    doom = Doom(plan)
    sys.addaudithook(doom.hear)
    atexit.register(lambda: Path(plan["count"]).write_text(str(doom.changes)))
    sys.argv = ["slipstream", *plan["arguments"]]
    importlib.import_module(plan["module"]).main()


if __name__ == "__main__":
    importlib.import_module("torch").set_num_threads(1)
    for name in sys.argv[1:]:
        importlib.import_module(name)
    if (chosen := serve()) is not None:
        run(chosen)
