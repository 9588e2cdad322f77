"""Runs another project's own server tests against our server, and compares what fails with a written list.

    python -m tests.peers.run vllm                       # fetches vLLM's source distribution
    python -m tests.peers.run sglang --source CHECKOUT

Every failure must match a line of expected_<suite>.toml, which says why; one that does not, and a line that matches
nothing, end the run with status 1. Each folder of tests is a process of its own, and its outcomes a file in --out: a
run that was broken off goes on with --resume.
"""

import argparse
import contextlib
import dataclasses
import fnmatch
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.peers import hub
from tests.peers.suites import SUITES, Suite, files_of, source_of, version_of
from tests.serve.interop import python_of

from slipstream.checkpoint.embedded_folder import embedded_folder

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
FOLDER_S = 3600  # for the tests of one folder
TEST_S = 120
INTERRUPT_S = 60
_REFUSAL = re.compile(r"\bError code: \d|\bHTTPError: [45]\d\d|\bassert [45]\d\d == 200\b|\b[45]\d\d != 200\b")


@dataclass(frozen=True)
class Expected:
    """Tests that fail, and why.

    Args:
        may_pass: whether they do depends on what is sampled, or on how busy the machine is; an answer with an error
            status depends on neither, and is not explained by it.
    """

    why: str
    patterns: tuple[str, ...]
    may_pass: bool = False


@dataclass(frozen=True)
class Verdict:
    """How a run compares with what was expected of it."""

    passed: int
    skipped: int
    explained: Counter[str]
    unexplained: dict[str, str]
    idle: tuple[str, ...]

    @property
    def summary(self) -> str:
        """The counts, the reasons, and what is not as it should be."""
        lines = [f"{self.passed} passed, {self.skipped} skipped by the project itself"]
        lines += [f"{count:4d} failed: {why}" for why, count in self.explained.most_common()]
        lines += [f"UNEXPLAINED {name}\n    {why}" for name, why in self.unexplained.items()]
        lines += [f"EXPECTED, BUT NOTHING FAILS: {pattern}" for pattern in self.idle]
        return "\n".join(lines)


def read_expected(suite: str) -> list[Expected]:
    """Return the list of a suite's failures that are explained."""
    file = HERE / f"expected_{suite}.toml"
    if not file.exists():
        return []
    tables = tomllib.loads(file.read_text(encoding="utf-8"))["failures"]
    return [Expected(table["why"], tuple(table["tests"]), table.get("may_pass", False)) for table in tables]


def compare(outcomes: dict[str, dict[str, str]], expected: list[Expected]) -> Verdict:
    """Hold outcomes against the list; the first line that matches a failure explains it."""
    explained: Counter[str] = Counter()
    unexplained: dict[str, str] = {}
    met: set[str] = set()
    failed = {name: outcome.get("why", "") for name, outcome in outcomes.items() if outcome["outcome"] == "failed"}
    for name, said in failed.items():
        for one in expected:
            if one.may_pass and _REFUSAL.search(said):
                continue
            matching = [pattern for pattern in one.patterns if fnmatch.fnmatchcase(name, _glob(pattern))]
            met.update(matching)
            if matching:
                explained[one.why] += 1
                break
        else:
            unexplained[name] = said.splitlines()[0] if said else ""
    kinds = Counter(outcome["outcome"] for outcome in outcomes.values())
    patterns = [pattern for one in expected for pattern in one.patterns if not one.may_pass]
    idle = tuple(pattern for pattern in patterns if pattern not in met)
    return Verdict(kinds["passed"], kinds["skipped"], explained, unexplained, idle)


def _glob(pattern: str) -> str:
    """Let only `*` be special: names of tests have brackets of their own."""
    return "*" + "".join(f"[{letter}]" if letter in "[?" else letter for letter in pattern)


def run_with_plugin(suite: Suite, source: Path, out: Path, tests: Sequence[str]) -> None:
    """Run some of a project's tests with their launcher replaced; outcomes go to a file."""
    home = out.parent / "hub"
    hub.fill(home, hub.names_in(source / place for place in suite.models_in), embedded_folder())
    command = [str(python_of(suite.client)), "-P", "-m", "pytest", "-p", suite.plugin, "-p", "no:cacheprovider"]
    command += ["-c", os.devnull]  # not our own settings, which pytest finds by the paths below
    command += ["--rootdir", ".", "--timeout", str(TEST_S), "-q", "--tb=short", "--continue-on-collection-errors"]
    command += ["--slipstream-python", sys.executable, "--slipstream-source", str(ROOT / "src")]
    command += ["--slipstream-out", str(out), *tests]
    offline = {"HF_HOME": str(home), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    env = {**os.environ, **offline, "PYTHONPATH": str(HERE)}
    command += [part for test in suite.endless for part in ("--deselect", test)]
    with subprocess.Popen(command, cwd=source, env=env, start_new_session=True) as process:
        try:
            process.wait(FOLDER_S)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)  # pytest ends the server it has started
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(INTERRUPT_S)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # what does not listen, and what was left behind


def main() -> None:
    """Run one suite."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suite", choices=sorted(SUITES))
    parser.add_argument("--source", type=Path, help="the project's source")
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "peers", help="where outcomes and logs go")
    parser.add_argument("--resume", action="store_true", help="leave out folders that have outcomes there")
    parser.add_argument("tests", nargs="*", help="instead of the suite's own files")
    given = parser.parse_intermixed_args()
    suite = SUITES[given.suite]
    work = given.out.resolve() / suite.name
    work.mkdir(parents=True, exist_ok=True)
    source = source_of(suite, given.source, given.out.resolve())
    outcomes: dict[str, dict[str, str]] = {}
    tests = given.tests or files_of(suite, source)
    for folder, together in itertools.groupby(tests, lambda test: test.rpartition("/")[0]):
        out = work / f"{folder.replace('/', '.')}.json"
        if not (given.resume and out.exists()):
            out.unlink(missing_ok=True)
            run_with_plugin(suite, source, out, list(together))
        if out.exists():  # a folder may have no test that starts a server
            outcomes |= json.loads(out.read_text(encoding="utf-8"))["outcomes"]
    verdict = compare(outcomes, read_expected(suite.name))
    if given.tests:  # lines about others say nothing
        verdict = dataclasses.replace(verdict, idle=())
    sys.stdout.write(f"{suite.name} {version_of(source)}\n{verdict.summary}\n")
    sys.exit(1 if verdict.unexplained or verdict.idle else 0)


if __name__ == "__main__":
    main()
