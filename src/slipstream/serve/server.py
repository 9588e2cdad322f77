"""Running the server: load, say what was chosen, serve, and on SIGTERM let answers under way finish."""

import asyncio
import contextlib
import gc
import logging
import signal
import socket
import sys
import time
from collections.abc import Iterator
from types import FrameType
from typing import cast

import uvicorn
from fastapi import FastAPI

from slipstream.engine.loading import Loaded, LoadOptions, load
from slipstream.serve.admin import warn_if_simulated
from slipstream.serve.app import build_app
from slipstream.serve.config import ServeConfig
from slipstream.serve.connection import Connection
from slipstream.serve.defaults import sampling_defaults
from slipstream.serve.errors import HttpError
from slipstream.serve.generate import Generator
from slipstream.serve.listener import Listener, bound_sockets, connections_that_fit
from slipstream.serve.worker import EngineWorker

logger = logging.getLogger(__name__)

_COLLECT = (10_000, 20, 20)  # objects made (and not freed), and younger collections, between two collections
_SWITCH_S = 0.001  # a thread that computes in Python lets another have the lock; the usual 5 ms add up over writes
_FLUSH_S = 2.0  # for clients to read why their answers ended


def serve(options: LoadOptions, config: ServeConfig, simulated_acceptance: tuple[float, ...] = ()) -> None:
    """Load a model and serve it until SIGTERM or SIGINT; returns once everything has ended."""
    if options.hosts.node_rank == 0:  # the others only compute
        check_address(config)
    loaded = load(options)
    loaded.engine.simulate_acceptance(simulated_acceptance)
    app = build_app(loaded.engine, loaded.tokenizer, config, int(time.time()))
    log_summary(loaded, config)
    avoid_pauses()
    try:
        server_for(app, config).run()
    finally:
        loaded.close()


def avoid_pauses() -> None:
    """Set this process up so that neither garbage nor a busy thread stops streams; called once everything is loaded."""
    gc.collect()
    gc.freeze()  # else collections look through all of torch's objects again and again, 80 to 160 ms each
    gc.set_threshold(*_COLLECT)
    sys.setswitchinterval(_SWITCH_S)


def check_address(config: ServeConfig) -> None:
    """Raise ConfigError if the address cannot be listened on; asked before a model is loaded, not after."""
    for bound in bound_sockets(config.host, config.port):
        bound.close()


def log_summary(loaded: Loaded, config: ServeConfig) -> None:
    """Say once what runs: model, draft, tree, memory, kernels, and who may call."""
    for line in loaded.summary:
        logger.info(line)
    guards = "API keys needed" if config.api_keys else "no API keys"
    origins = ", ".join(config.cors_origins) or "no other origins"
    logger.info(
        "serving %s at http://%s:%d (%s; browsers: %s; at most %d answers waiting)",
        config.model_name,
        config.host,
        config.port,
        guards,
        origins,
        config.max_waiting,
    )
    defaults = sampling_defaults(config.generation_config, loaded.tokenizer.origin).changed
    if defaults and config.fixed_sampling is None:
        said = ", ".join(f"{name} {value:g}" for name, value in defaults.items())
        logger.info("requests that leave sampling out get %s (--generation-config none to change that)", said)
    if not config.is_local and not config.api_keys:
        logger.warning("the server listens on %s without API keys: anybody who reaches it may use it.", config.host)
    warn_if_simulated(loaded.engine.simulated_acceptance)


def server_for(app: FastAPI, config: ServeConfig) -> "DrainingServer":
    """Return a server that refuses new requests once it is told to stop, and then drains."""
    settings = uvicorn.Config(
        app,
        http="h11",  # also where httptools is installed: `Connection` is made for it, and parsing is no bottleneck
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=max(1, round(config.keep_alive_timeout_s)),
        timeout_graceful_shutdown=max(1, round(config.drain_timeout_s + 2 * _FLUSH_S)),  # if all else fails
    )
    return DrainingServer(settings, app.state.service.worker, app.state.service.generator, config)


class DrainingServer(uvicorn.Server):
    """uvicorn's server, with connections that are bounded in number and time, and an orderly end."""

    def __init__(
        self, settings: uvicorn.Config, worker: EngineWorker, generator: Generator, config: ServeConfig
    ) -> None:
        super().__init__(settings)
        self._worker = worker
        self._generator = generator
        self._limits = config
        self._listener: Listener | None = None
        self._background: list[asyncio.Task[None]] = []

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start the application, then listen, on the sockets or on the configured address."""
        await super().startup(sockets=[])  # uvicorn's own listeners have no bound
        bound = bound_sockets(self._limits.host, self._limits.port) if sockets is None else sockets
        limit = connections_that_fit(self._limits.max_connections)
        self._listener = Listener(self._connection, self._connections, limit)
        self._listener.start(bound)
        for one in bound:
            logger.info("listening on %s port %d", *one.getsockname()[:2])
        self._background.append(asyncio.create_task(self._tend()))

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Let answers under way finish; what is left after the drain time-out ends with an error."""
        assert self._listener is not None, "the server was started"
        await self._listener.stop()
        self._background.append(asyncio.create_task(self._end_after_drain()))
        await super().shutdown(sockets)
        for task in self._background:
            task.cancel()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle SIGTERM and SIGINT while serving; a drained server has ended well, so they are not raised again."""
        numbers = (signal.SIGINT, signal.SIGTERM)
        before = {number: signal.signal(number, self.handle_exit) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to drain; a second signal ends at once."""
        logger.info("%s: letting %d answers finish", signal.Signals(sig).name, self._worker.num_open)
        self._worker.draining = True
        super().handle_exit(sig, frame)

    @property
    def _connections(self) -> set[Connection]:
        return cast("set[Connection]", self.server_state.connections)  # all of them come from _connection

    def _connection(self, refusal: HttpError | None) -> Connection:
        return Connection(self.config, self.server_state, self.lifespan.state, self._limits, refusal=refusal)

    async def _tend(self) -> None:
        """Look after the connections for as long as there are any."""
        clock = asyncio.get_running_loop().time
        pause_s = min(1.0, self._limits.read_timeout_s / 4, self._limits.write_timeout_s / 4)
        while True:
            due = clock() + pause_s
            await asyncio.sleep(pause_s)
            if clock() > due + 1.0:
                continue  # the event loop was held up, and with it what clients had sent
            for connection in list(self._connections):
                connection.tend(clock())

    async def _end_after_drain(self) -> None:
        await asyncio.sleep(self._limits.drain_timeout_s)
        if num_requests := self._generator.end_all():
            logger.warning("%d requests were not finished within --drain-timeout; they end with a 503", num_requests)
        for connection in list(self._connections):
            if connection.waits:
                connection.end()
        await asyncio.sleep(_FLUSH_S)
        for connection in list(self._connections):  # whoever does not even read the error
            connection.end()
