"""The child process that matches a checkpoint's own regular expressions, which may backtrack without end."""

import re
from collections.abc import Mapping
from typing import Any


def handle(request: Mapping[str, Any]) -> list[list[int]]:
    """Return, for each of `patterns`, the indices of the `names` it matches from their start."""
    expressions = [re.compile(pattern) for pattern in request["patterns"]]
    return [[i for i, name in enumerate(request["names"]) if each.match(name)] for each in expressions]
