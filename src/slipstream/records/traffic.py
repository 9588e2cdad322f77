"""Texts that a server answered, kept for learning: numbered files of token ids in one folder, bounded in all.

A folder of learning holds `traffic/part-NNNNNN.jsonl`, a JSON object a line (`prompt` and `answer`, token ids);
`drafts/`, what was trained; and `deployed.json`, which of them the server shall use. The server writes the traffic and
the trainer the rest, so the two may be on different machines that share the folder.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from slipstream.errors import DataError

DEPLOYED = "deployed.json"
RETURNED = "returned.json"
_PART_TOKENS = 4096
_PART = re.compile(r"part-[0-9]+\.jsonl")


@dataclass(frozen=True)
class Answered:
    """One answer: the ids of its prompt and its own."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        """Both together."""
        return len(self.prompt) + len(self.answer)


@dataclass(frozen=True)
class Deployed:
    """A draft that the trainer found better, and by how much on traffic it had held back (tokens a pass)."""

    number: int
    draft: str
    before: float
    after: float


class TrafficWriter:
    """Adds answers to a folder; the oldest files go when there are more than `max_tokens` in all."""

    def __init__(self, folder: Path, max_tokens: int) -> None:
        self._folder, self._max_tokens = folder / "traffic", max_tokens
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise DataError(f"{folder}: cannot be made ({error.strerror or error}); name another (--learn).") from error
        self._tokens = {path: sum(one.num_tokens for one in read_part(path)) for path in part_paths(folder)}
        self._number = max((int(path.stem[5:]) for path in self._tokens), default=0)
        self._waiting: list[Answered] = []

    @property
    def num_tokens(self) -> int:
        """Tokens in the folder."""
        return sum(self._tokens.values())

    def add(self, answers: Sequence[Answered]) -> None:
        """Keep answers; they are in a file once there are enough for one, or at `flush`."""
        self._waiting += answers
        if sum(one.num_tokens for one in self._waiting) >= _PART_TOKENS:
            self.flush()

    def flush(self) -> None:
        """Write what waits, and delete what is too old; what cannot be written is dropped, so that nothing piles up."""
        answers, self._waiting = self._waiting, []
        if not answers:
            return
        self._number += 1
        path = self._folder / f"part-{self._number:06d}.jsonl"
        lines = [json.dumps(asdict(one), separators=(",", ":")) for one in answers]
        write_whole(path, "\n".join(lines) + "\n")
        self._tokens[path] = sum(one.num_tokens for one in answers)
        while self.num_tokens > self._max_tokens and len(self._tokens) > 1:
            oldest = min(self._tokens)
            oldest.unlink(missing_ok=True)
            del self._tokens[oldest]


def part_paths(folder: Path) -> list[Path]:
    """Return a folder's files of traffic, oldest first."""
    return sorted(path for path in (folder / "traffic").glob("part-*.jsonl") if _PART.fullmatch(path.name))


def read_part(path: Path) -> list[Answered]:
    """Read one file; lines that are no answers are left out, for anybody may have touched them."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return []  # deleted meanwhile, as the oldest are
    found = []
    for line in lines:
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict) and all(_are_ids(value.get(name)) for name in ("prompt", "answer")):
            found.append(Answered(tuple(value["prompt"]), tuple(value["answer"])))
    return found


def read_deployed(folder: Path) -> Deployed | None:
    """Return what the trainer wants used, or None where there is nothing yet, or nothing that can be read."""
    return _read(folder / DEPLOYED)


def read_returned(folder: Path) -> Deployed | None:
    """Return the draft that the server gave up last."""
    return _read(folder / RETURNED)


def write_deployed(folder: Path, deployed: Deployed, name: str = DEPLOYED) -> None:
    """Say which draft shall be used (or, as RETURNED, was given up)."""
    write_whole(folder / name, json.dumps(asdict(deployed), indent=2) + "\n")


def write_whole(path: Path, text: str) -> None:
    """Write a file that only its owner may read, whole or not at all."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        temporary.touch(mode=0o600)
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        raise DataError(f"{path}: could not be written ({error.strerror or error}).") from error


def _read(path: Path) -> Deployed | None:
    try:
        value = Deployed(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None
    figures = isinstance(value.before, int | float) and isinstance(value.after, int | float)
    return value if isinstance(value.number, int) and isinstance(value.draft, str) and figures else None


def _are_ids(value: Any) -> bool:  # parsed JSON
    return isinstance(value, list) and bool(value) and all(isinstance(item, int) and item >= 0 for item in value)
