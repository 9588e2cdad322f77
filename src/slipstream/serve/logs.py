"""Structured logs: one JSON object a line, with the fields a record carries.

Much of what is logged was sent by a client. Whatever it holds, it stays within its record and moves no cursor.
"""

import json
import logging
import re
import sys
from typing import Any, TextIO

from slipstream.errors import ConfigError

LEVELS = ("debug", "info", "warning", "error")

# What ends a line or steers a terminal: C0, DEL and C1 controls, the Unicode line ends, and marks that change the
# direction of writing; lone surrogates, too, which cannot be encoded.
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]")
_BARE = re.compile(r"[^\s\"'=]+")


def escaped(text: str) -> str:
    """Return a text with every control character written as JSON writes it."""
    return _CONTROL.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


class JsonFormatter(logging.Formatter):
    """Writes time, level, logger, message and the record's own `fields`."""

    def format(self, record: logging.LogRecord) -> str:
        """Return a record as one line of JSON."""
        line: dict[str, Any] = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S") + f".{int(record.msecs):03d}",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage().rstrip(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return escaped(json.dumps(line, ensure_ascii=False, default=str))


class PlainFormatter(logging.Formatter):
    """Writes the same for people: a time, the message, fields as name=value."""

    def format(self, record: logging.LogRecord) -> str:
        """Return a record as one readable line; a traceback follows, indented, so that no line of it is a record."""
        fields = " ".join(f"{name}={_value(value)}" for name, value in getattr(record, "fields", {}).items())
        head = f"{self.formatTime(record, '%H:%M:%S')} {record.levelname:<7} {record.getMessage().rstrip()}"
        line = escaped(f"{head} {fields}".rstrip())
        if not record.exc_info:
            return line
        traceback = self.formatException(record.exc_info)
        return "\n    ".join([line, *(escaped(part) for part in traceback.split("\n"))])


def _value(value: object) -> str:
    """Return a field's value, in quotes where it could be taken for more than one field."""
    text = str(value)
    return text if not isinstance(value, str) or _BARE.fullmatch(text) else json.dumps(text, ensure_ascii=False)


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
