"""The other side of `process.Peer`: runs inside the peer's own environment and answers lines of JSON.

Started as `python host.py WORKER.py SETTINGS`. The worker's file defines a class `Worker`; SETTINGS are its arguments,
and each line names a method and that method's arguments. Nothing but the standard library may be imported here.
"""

import json
import os
import runpy
import sys
import traceback
from typing import TextIO


def main() -> None:
    """Build the worker, then answer until the parent closes the pipe."""
    worker_file, settings = sys.argv[1], json.loads(sys.argv[2])
    replies = _take_stdout()
    try:
        worker = runpy.run_path(worker_file)["Worker"](**settings)
        _reply(replies, {"ready": worker.about})
        for line in sys.stdin:
            message = json.loads(line)
            _reply(replies, {"answer": getattr(worker, message["call"])(**message["arguments"])})
    except Exception as error:  # noqa: BLE001 - whatever went wrong in foreign code, the parent has to hear of it
        traceback.print_exc()
        _reply(replies, {"error": f"{type(error).__name__}: {error}"})


def _take_stdout() -> TextIO:
    """Keep standard output for replies, and send what libraries print there to standard error."""
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return replies


def _reply(replies: TextIO, value: dict[str, object]) -> None:
    replies.write(json.dumps(value) + "\n")
    replies.flush()


if __name__ == "__main__":
    main()
