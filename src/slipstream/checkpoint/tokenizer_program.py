"""The child process that tries out the patterns of a tokenizer.json, on texts made to hurt it."""

import time
from collections.abc import Mapping
from typing import Any

from tokenizers import Tokenizer

_MAX_S_PER_TEXT = 0.3
"""Of processor time; the usual patterns take a millisecond for a thousand characters."""


def handle(request: Mapping[str, Any]) -> dict[str, str]:
    """Return nothing, or what `failed`; what takes very long ends this process."""
    try:
        tokenizer = Tokenizer.from_str(request["tokenizer"])
        for text in request["texts"]:
            started = time.process_time()
            tokenizer.encode(text)
            if (seconds := time.process_time() - started) > _MAX_S_PER_TEXT:
                return {"failed": f"its patterns take {seconds:.1f} s for a text of {len(text)} characters"}
    except BaseException as error:  # noqa: BLE001 (tokenizers raises Exception, and panics are no Exceptions)
        return {"failed": f"{type(error).__name__}: {str(error)[:500]}"}
    return {}
