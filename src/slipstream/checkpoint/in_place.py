"""Put a finished folder in its place: a process killed at any moment leaves the old one, the new one or neither.

Two renames replace a folder, and a kill may come between them: what was set aside is put back by the next writer.
Unfinished folders of killed processes are told from those of living ones by a lock that ends with its process.
"""

import contextlib
import os
import re
import shutil
import sys
from pathlib import Path


def put_in_place(work: Path, folder: Path) -> None:
    """Rename a finished folder to its name; an earlier one stays aside until the new one is there."""
    if not folder.exists():
        work.rename(folder)
        return
    aside = _aside(folder)
    _remove(aside)
    folder.rename(aside)
    try:
        work.rename(folder)
    except OSError:
        aside.rename(folder)
        raise
    _remove(aside)


def mend(folder: Path) -> None:
    """Put back what a killed process had set aside, or remove it where the new folder is there."""
    aside = _aside(folder)
    if not os.path.lexists(aside):
        return
    if folder.exists():
        _remove(aside)
    else:
        aside.rename(folder)


class WorkFolder:
    """A hidden folder beside its final place, which no other process takes for a dead one's while this one lives."""

    def __init__(self, folder: Path, token: str) -> None:
        self.path = folder.parent / f".{folder.name}.{token}.partial"
        self._descriptor = -1
        for left in _unfinished(folder):
            _remove_if_dead(left)
        while True:
            self.path.mkdir(parents=True, exist_ok=True)
            if sys.platform == "win32":
                return
            self._descriptor = os.open(self.path, os.O_RDONLY)
            _lock(self._descriptor)
            if self.path.exists():  # nobody swept it before it was locked
                return
            os.close(self._descriptor)

    def close(self) -> None:
        """Remove it, unless it was renamed, and let go of the lock."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _aside(folder: Path) -> Path:
    return folder.parent / f".{folder.name}.previous"


def _unfinished(folder: Path) -> list[Path]:
    if sys.platform == "win32" or not folder.parent.is_dir():
        return []
    # Between name and suffix stands a token; `.NAME.partial` is a resumable pass's own (quant/destination.py).
    pattern = re.compile(rf"\.{re.escape(folder.name)}\.\w+\.partial")
    return [path for path in folder.parent.iterdir() if pattern.fullmatch(path.name)]


def _remove_if_dead(path: Path) -> None:
    with contextlib.suppress(OSError):  # another process sweeps it too
        descriptor = os.open(path, os.O_RDONLY)
        try:
            if _lock(descriptor):
                shutil.rmtree(path, ignore_errors=True)
        finally:
            os.close(descriptor)


def _lock(descriptor: int) -> bool:
    """Take a folder's lock; False if another process has it, or the file system has no locks."""
    import fcntl  # POSIX only

    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
