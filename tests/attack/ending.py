"""The end of a server: SIGTERM in the middle of answers, and what is in its log afterwards."""

import asyncio
import re
import signal
import subprocess
from pathlib import Path

from tests.attack.heads import FORGED
from tests.attack.kinds import COMPLETIONS, require
from tests.attack.wire import Reply, Wire

_CONTROL = re.compile(rb"[\x00-\x08\x0b-\x1f\x7f]|\xc2[\x80-\x9f]|\xe2\x80[\xa8\xa9]")
_MAX_LOG_BYTES = 20 << 20


async def drain(wire: Wire, process: "subprocess.Popen[bytes]", drain_s: float) -> list[int]:
    """Stop the server under answers that cannot end in time; every stream must end properly all the same."""
    long = {"prompt": "x", "max_tokens": 250, "n": 16, "ignore_eos": True, "stream": True, "temperature": 1, "seed": 2}
    asked = [asyncio.ensure_future(wire.post(COMPLETIONS, long)) for _ in range(6)]
    await asyncio.sleep(0.5)  # not synchronisation: they are to be anywhere when the signal comes
    process.send_signal(signal.SIGTERM)
    late = await asyncio.gather(*(_late(wire) for _ in range(8)))
    async with asyncio.timeout(drain_s + 15):
        replies = await asyncio.gather(*asked)
        while process.poll() is None:
            await asyncio.sleep(0.05)
    for reply in replies:
        ended = reply.body.rstrip().endswith((b"[DONE]", b"0")) and b"data: [DONE]" in reply.body
        require(ended or reply.status in (429, 503), "a stream that the end of the server cut has no [DONE]")
    require(process.returncode == 0, f"a drained server ended with {process.returncode}")
    wrong = [s for reply in replies for s in reply.statuses if s not in (200, 429, 503)]
    require(not wrong, f"while draining, a stream got {wrong[:3]}")
    return [s for reply in (*replies, *late) for s in reply.statuses]


async def _late(wire: Wire) -> Reply:
    try:
        reply = await wire.post(COMPLETIONS, {"prompt": "x", "max_tokens": 1})
    except OSError:
        return Reply(b"")  # nobody listens any more
    require(reply.status in (0, 200, 429, 503), f"while draining, a new request got {reply.status}")
    return reply


def check_log(path: Path) -> list[str]:
    """Return what is wrong with the log of a server that was attacked."""
    size = path.stat().st_size
    problems = [f"the log has {size >> 20} MiB"] if size > _MAX_LOG_BYTES else []
    lines = path.read_bytes().splitlines()
    if forged := [line for line in lines if line.lstrip().startswith(FORGED.encode())]:
        problems.append(f"{len(forged)} lines of the log were written by a client: {forged[0][:60]!a}")
    if control := [line for line in lines if _CONTROL.search(line)]:
        problems.append(f"{len(control)} lines of the log carry control characters: {control[0][:80]!a}")
    return problems
