"""Keeps a server running until it is stopped: says where it listens, and reports a process that ends by itself."""

import asyncio
import contextlib
import signal
from collections.abc import Callable
from pathlib import Path

from slipstream.launch.command import Launch
from slipstream.launch.process import LaunchError
from slipstream.launch.server import Server


async def keep_running(launch: Launch, log: Path, when_healthy: Callable[[str], None]) -> None:
    """Run a server until SIGTERM or SIGINT, which end it on every node.

    Args:
        when_healthy: told the server's address once it answers.

    Raises:
        LaunchError: it does not start, or a process of it ends by itself; the others are ended, too.
    """
    loop = asyncio.get_running_loop()
    told_to_stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, told_to_stop.set)
    running = asyncio.create_task(_run(launch, log, when_healthy))
    stopping = asyncio.create_task(told_to_stop.wait())
    await asyncio.wait({running, stopping}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if not running.done():
        running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running


async def _run(launch: Launch, log: Path, when_healthy: Callable[[str], None]) -> None:
    server = await Server.start(launch, log)
    try:
        await server.wait_healthy(launch.start_timeout_s)
        when_healthy(server.url)
        await server.wait_ended()
        others = "" if launch.nodes is None else " What ran on the other nodes was ended."
        raise LaunchError(f"{server.death()}.{others}")
    finally:
        await server.stop()
