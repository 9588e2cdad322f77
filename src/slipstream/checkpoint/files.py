"""Open the files of a checkpoint somebody else wrote: regular ones only, inside its folder, of a bounded size.

A name in an index, a symbolic link or a pipe in the place of a file must not lead slipstream to wait forever, to fill
the memory, or to a file the checkpoint has no business with.
"""

import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from slipstream.errors import CheckpointError

MAX_JSON_BYTES = 64 << 20
"""Of config.json and its like; the largest index (a trillion parameters in 200,000 tensors) has 30 MB."""
_MAX_CONTAINERS = 3_000_000
"""Objects and lists in one JSON text: an empty list has two bytes in the file and sixty in memory."""
_KINDS: dict[str, Callable[[int], bool]] = {
    "a folder": stat.S_ISDIR,
    "a pipe": stat.S_ISFIFO,
    "a socket": stat.S_ISSOCK,
    "a device": lambda mode: stat.S_ISCHR(mode) or stat.S_ISBLK(mode),
}


def find_file(folder: Path, name: str) -> Path | None:
    """Return the path of a file in a checkpoint folder; None if nothing has that name.

    What has the name but is no regular file, or lies outside the folder, is a CheckpointError. A hub cache keeps files
    as links into the `blobs` folder of the same repository, so those count as inside.
    """
    path = folder / name
    if not os.path.lexists(path):
        return None
    check_inside(path, folder)
    check_regular(path)
    return path


def check_inside(path: Path, folder: Path) -> None:
    """Raise CheckpointError unless the path, all links followed, lies in the folder or in its hub cache's blobs."""
    if not lies_inside(path, folder):
        raise CheckpointError(
            f"{path}: leads to {path.resolve()}, outside the checkpoint's folder, and is not opened. Put the file "
            f"itself into {folder}, or name the folder it lies in."
        )


def lies_inside(path: Path, folder: Path) -> bool:
    """Tell whether a path, all links followed, lies in the folder or in the blobs of its hub cache."""
    root = folder.resolve()
    roots = [root, *([root.parent.parent / "blobs"] if root.parent.name == "snapshots" else [])]
    try:
        end = path.resolve()
    except (OSError, RuntimeError) as error:  # a loop of links is a RuntimeError before Python 3.13
        raise CheckpointError(f"{path}: cannot be followed to a file ({error}).") from error
    return any(end.is_relative_to(allowed) for allowed in roots)


def check_regular(path: Path) -> int:
    """Return the size of a regular file; a CheckpointError for anything else, which may never end or never answer."""
    try:
        found = path.stat()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror or error}).") from error
    if stat.S_ISREG(found.st_mode):
        return found.st_size
    kind = next((kind for kind, is_kind in _KINDS.items() if is_kind(found.st_mode)), "no regular file")
    raise CheckpointError(f"{path}: is {kind}, where a file is needed; put the checkpoint's own file there.")


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading; never waits, whatever the path has become since it was looked at."""
    check_regular(path)
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror or error}).") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise CheckpointError(f"{path}: is no regular file.")
    return os.fdopen(descriptor, "rb")


def read_bytes(path: Path, limit: int) -> bytes:
    """Return the content of a file of at most `limit` bytes."""
    with open_regular(path) as file:
        try:
            content = file.read(limit + 1)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read ({error.strerror or error}).") from error
    if len(content) > limit:
        raise CheckpointError(
            f"{path}: has {path.stat().st_size} bytes, and no checkpoint's has more than {limit}; fetch the file again."
        )
    return content


def read_text(path: Path, limit: int) -> str:
    """Return the text of a UTF-8 file of at most `limit` bytes."""
    try:
        return read_bytes(path, limit).decode("utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path}: is not text in UTF-8 ({error}); fetch the file again.") from error


def read_json(path: Path, limit: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """Return a JSON object from a file; anything else is a CheckpointError that names the file."""
    try:
        value = parse_json(read_bytes(path, limit))
    except ValueError as error:
        raise CheckpointError(f"{path}: is not valid JSON ({error}); fetch the file again.") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: holds a JSON {type(value).__name__} where an object is needed.")
    return value


def parse_json(text: bytes) -> Any:  # foreign JSON
    """Return the value of a JSON text; a ValueError if it is none, or one made to exhaust memory or the stack."""
    if text.count(b"[") + text.count(b"{") > _MAX_CONTAINERS:
        raise ValueError(f"it has more than {_MAX_CONTAINERS} objects and lists")
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deep") from error


def listed(names: list[str], most: int = 4) -> str:
    """Return names for a message: the first few, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{', '.join(short(name) for name in names[:most])}{more}"


def short(text: str, most: int = 120) -> str:
    """Return a foreign text as a message can show it, however long it is."""
    return text if len(text) <= most else f"{text[:most]}... ({len(text)} characters)"


def shown(value: object, most: int = 120) -> str:
    """Return a foreign value as a message can show it, strings in quotes."""
    if isinstance(value, list | tuple | dict) and len(value) > most:
        return f"a {type(value).__name__} of {len(value)} entries"
    return repr(short(value, most)) if isinstance(value, str) else short(repr(value), most)
