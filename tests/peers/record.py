"""Writes down how another project's tests went; a pytest plugin, imported by that project's Python."""

import json
from pathlib import Path
from typing import Any


class Recorder:
    """Keeps one outcome a test: passed, failed (with the last line of why), or skipped."""

    def __init__(self, file: Path, extra: dict[str, Any]) -> None:
        self._file = file
        self._extra = extra
        self._outcomes: dict[str, dict[str, str]] = {}

    def pytest_collectreport(self, report: Any) -> None:
        """Take in that a file cannot be read: its tests would be missing without a word."""
        if report.failed:
            why = str(report.longrepr).strip().splitlines()
            self._outcomes[report.nodeid] = {"outcome": "failed", "when": "collect", "why": why[-1] if why else ""}
            self.pytest_runtest_logfinish()

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Take in the report of a test's set-up, call or end."""
        name = report.nodeid
        if report.failed:
            text = str(report.longrepr)
            errors = [line[1:].strip() for line in text.splitlines() if line.startswith("E ")]
            self._outcomes[name] = {"outcome": "failed", "when": report.when, "why": "\n".join(errors[:12])[:1500]}
        elif report.skipped:
            self._outcomes.setdefault(name, {"outcome": "skipped", "why": str(report.longrepr)[-300:]})
        elif report.when == "call":
            self._outcomes.setdefault(name, {"outcome": "passed"})

    def pytest_runtest_logfinish(self) -> None:
        """Write the file after each test: a run that is broken off has told something, too."""
        self._file.write_text(json.dumps({**self._extra, "outcomes": self._outcomes}, indent=1) + "\n")
