"""Running the server: load, say what was chosen, serve, and on SIGTERM let answers under way finish."""

import contextlib
import logging
import signal
import socket
import time
from collections.abc import Iterator
from types import FrameType

import uvicorn
from fastapi import FastAPI

from slipstream.engine.loading import Loaded, LoadOptions, load
from slipstream.errors import ConfigError
from slipstream.serve.admin import warn_if_simulated
from slipstream.serve.app import build_app
from slipstream.serve.config import ServeConfig
from slipstream.serve.worker import EngineWorker

logger = logging.getLogger(__name__)


def serve(options: LoadOptions, config: ServeConfig, simulated_acceptance: tuple[float, ...] = ()) -> None:
    """Load a model and serve it until SIGTERM or SIGINT; returns once everything has ended."""
    check_address(config)
    loaded = load(options)
    loaded.engine.simulate_acceptance(simulated_acceptance)
    app = build_app(loaded.engine, loaded.tokenizer, config, int(time.time()))
    log_summary(loaded, config)
    try:
        server_for(app, config).run()
    finally:
        loaded.close()


def check_address(config: ServeConfig) -> None:
    """Raise ConfigError if the address cannot be listened on; asked before a model is loaded, not after."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as trial:
            trial.setsockopt(
                socket.SOL_SOCKET, socket.SO_REUSEADDR, 1
            )  # as uvicorn does; one that listens is in the way
            trial.bind(address)
    except OSError as error:
        raise ConfigError(
            f"{config.host}:{config.port} cannot be listened on ({error.strerror or error}): choose another --port or "
            "--host, or stop the program that has it."
        ) from error


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
    if not config.is_local and not config.api_keys:
        logger.warning("the server listens on %s without API keys: anybody who reaches it may use it.", config.host)
    warn_if_simulated(loaded.engine.simulated_acceptance)


def server_for(app: FastAPI, config: ServeConfig) -> uvicorn.Server:
    """Return a server that refuses new requests once it is told to stop, and then drains."""
    settings = uvicorn.Config(
        app,
        host=config.host,
        port=config.port,
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=max(1, round(config.drain_timeout_s)),
    )
    return DrainingServer(settings, app.state.service.worker)


class DrainingServer(uvicorn.Server):
    """uvicorn's server, whose first signal also closes the door to requests on open connections."""

    def __init__(self, settings: uvicorn.Config, worker: EngineWorker) -> None:
        super().__init__(settings)
        self._worker = worker

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
