"""The verbs as a person calls them, and fake servers to call them on."""

import asyncio
import threading
from contextlib import contextmanager

import typer
from typer.testing import CliRunner

from slipstream.cli import bench, eval, report
from tests.bench.fake_server import FakeServer

app = typer.Typer()
app.add_typer(bench.app, name="bench")
app.add_typer(eval.app, name="eval")
app.command()(report.report)


def call(*arguments):
    return CliRunner().invoke(app, [str(a) for a in arguments], catch_exceptions=True)


@contextmanager
def running(*behaviours):
    """Run fake servers in a thread of their own, and give their addresses."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    fakes = [FakeServer(behaviour) for behaviour in behaviours]
    try:
        yield [asyncio.run_coroutine_threadsafe(fake.start(), loop).result() for fake in fakes]
    finally:
        for fake in fakes:
            asyncio.run_coroutine_threadsafe(fake.stop(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
