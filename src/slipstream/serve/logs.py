"""Structured logs: one JSON object a line, with the fields a record carries."""

import json
import logging
import sys
from typing import Any, TextIO

from slipstream.errors import ConfigError

LEVELS = ("debug", "info", "warning", "error")


class JsonFormatter(logging.Formatter):
    """Writes time, level, logger, message and the record's own `fields`."""

    def format(self, record: logging.LogRecord) -> str:
        """Return a record as one line of JSON."""
        line: dict[str, Any] = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S") + f".{int(record.msecs):03d}",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


class PlainFormatter(logging.Formatter):
    """Writes the same for people: a time, the message, fields as name=value."""

    def format(self, record: logging.LogRecord) -> str:
        """Return a record as one readable line (and a traceback, if it has one)."""
        fields = " ".join(f"{name}={value}" for name, value in getattr(record, "fields", {}).items())
        line = f"{self.formatTime(record, '%H:%M:%S')} {record.levelname:<7} {record.getMessage()} {fields}".rstrip()
        return line if not record.exc_info else f"{line}\n{self.formatException(record.exc_info)}"


def set_up_logs(level: str, as_json: bool, stream: TextIO | None = None) -> None:
    """Send every logger's records to a stream (standard error), in one form."""
    if level.lower() not in LEVELS:
        raise ConfigError(f"The log level is {level!r}; it is {', '.join(LEVELS)}.")
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter() if as_json else PlainFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for name in ("uvicorn", "uvicorn.error", "uvicorn.access"):
        logging.getLogger(name).handlers.clear()
        logging.getLogger(name).propagate = True
    logging.getLogger("uvicorn.access").disabled = True  # the gate logs requests, with their ids
