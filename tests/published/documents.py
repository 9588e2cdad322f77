"""Takes the command lines out of the published documents: continued lines joined, loops unrolled, exports kept."""

import re
import shlex
from dataclasses import dataclass, replace
from pathlib import Path

FOLDER = Path(__file__).parents[3] / "shared" / "published"
ABSENT = f"the published documents are not here ({FOLDER.parent.name}/{FOLDER.name} beside the repository)"
PROGRAMS = ("python", "python3", "vllm", "docker", "hf", "cd", "export", "for")
_LOOP = re.compile(r"for (\w+) in ([^;]+); do$")


@dataclass(frozen=True)
class Line:
    """A command: its words, the variables exported before it in the same document, and where it stands."""

    words: tuple[str, ...]
    env: tuple[tuple[str, str], ...]
    document: str
    number: int

    @property
    def program(self) -> str:
        """What is run: the words before the first flag."""
        return " ".join(word for word in self.words[:3] if not word.startswith("--"))

    def kind(self) -> str:
        """Say which of our verbs it is for; empty where it is for none."""
        text = " ".join(self.words)
        kinds = {
            "serve": ("python -m sglang.launch_server", "vllm serve"),
            "bench": ("python3 -m sglang.bench_serving", "vllm bench serve"),
            "quantize": ("python3 quantize_quark.py",),
        }
        return next((kind for kind, begins in kinds.items() if text.startswith(begins)), "")

    def arguments(self) -> list[str]:
        """Return the words behind those that name the program."""
        skipped = {"serve": 2 if self.words[0] == "vllm" else 3, "quantize": 2}[self.kind()]
        return list(self.words[skipped:])


def published_lines() -> list[Line]:
    """Return every command of every document."""
    return [line for path in sorted(FOLDER.glob("*.txt")) for line in lines_in(path)]


def launch_lines(lines: list[Line]) -> list[Line]:
    """Return every launch, and once more each whose document exports variables after it and says to run it again."""
    found = []
    for line in lines:
        if line.kind() == "serve":
            last = [other for other in lines if other.document == line.document][-1]
            found += [line, *([replace(line, env=last.env)] if last.env != line.env else [])]
    return found


def lines_in(path: Path) -> list[Line]:
    """Return a document's commands in order."""
    found: list[Line] = []
    env: dict[str, str] = {}
    loop: tuple[str, list[str]] | None = None
    for number, text in _joined(path.read_text(encoding="utf-8")):
        if match := _LOOP.match(text):
            loop = (match[1], match[2].split())
            continue
        if text == "done":
            loop = None
            continue
        if text.split(" ")[0] not in PROGRAMS:
            continue
        values = loop[1] if loop else [""]
        for value in values:
            words = tuple(shlex.split(_filled(text, loop[0], value) if loop else text, comments=True))
            if words[0] == "export":
                env.update(word.split("=", 1) for word in words[1:])
            found.append(Line(words, tuple(env.items()), path.name, number))
    return found


def stray_flags(path: Path) -> list[str]:
    """Return lines that begin with a flag and belong to no command."""
    return [text for _, text in _joined(path.read_text(encoding="utf-8")) if text.startswith("--")]


def _joined(text: str) -> list[tuple[int, str]]:
    lines: list[tuple[int, str]] = []
    continued = False
    for number, raw in enumerate(text.splitlines(), 1):
        line = raw.strip()
        ends = line.endswith("\\")
        part = line.removesuffix("\\").strip()
        if continued:
            lines[-1] = (lines[-1][0], f"{lines[-1][1]} {part}")
        else:
            lines.append((number, part))
        continued = ends
    return lines


def _filled(text: str, name: str, value: str) -> str:
    """Do what the shell does with a loop's variable: `$C`, and sums such as `$((C * 10))`."""
    product = re.compile(rf"\$\(\({name} \* (\d+)\)\)")
    return product.sub(lambda match: str(int(value) * int(match[1])), text).replace(f"${name}", value)
