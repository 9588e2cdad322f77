"""An engine on a thread of its own: commands run between two steps, and a listener hears what every step gave."""

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from slipstream.engine.config import PATIENCE_S
from slipstream.engine.engine import Engine
from slipstream.engine.output import Emission
from slipstream.errors import RankLostError, StepError

logger = logging.getLogger(__name__)


class Listener(Protocol):
    """Hears what the engine does, on the engine's thread."""

    def emitted(self, emissions: Sequence[Emission]) -> None:
        """Take what one step gave."""
        ...

    def failed(self, error: StepError) -> None:
        """Take note that a step failed and its requests were ended; the engine goes on."""
        ...

    def ended(self, error: Exception | None) -> None:
        """Take note that nothing runs any more: it was asked to stop (None), or cannot go on."""
        ...


class EngineThread:
    """Runs an engine for callers on any thread."""

    def __init__(self, engine: Engine, listener: Listener) -> None:
        self._engine = engine
        self._listener = listener
        self._commands: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._stopping = False
        self._over = False
        self._lost: RankLostError | None = None

    @property
    def alive(self) -> bool:
        """Whether the thread runs and has the whole model to run."""
        return self._thread.is_alive() and not self._over and self._lost is None

    @property
    def ending(self) -> bool:
        """Whether no step will run any more; commands that were on their way are still run."""
        return self._stopping

    @property
    def lost(self) -> RankLostError | None:
        """Which rank was lost, if one was: then nothing can go on."""
        return self._lost

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()
        self._engine.when_lost(self._lose)

    def command(self, command: Callable[[], None]) -> bool:
        """Have a command run between two steps; False if the thread is over."""
        with self._wake:
            if self._over:
                return False
            self._commands.append(command)
            self._wake.notify()
        self._engine.hurry()
        return True

    def stop(self) -> None:
        """End the thread after the step it is at, and wait for that."""
        self.command(self._stop)
        self._thread.join()

    def _stop(self) -> None:
        self._stopping = True

    def _lose(self, error: RankLostError) -> None:
        """Take note, on the thread that watches the ranks, that one is lost; wake the engine's thread if it waits."""
        self._lost = error
        with self._wake:
            self._wake.notify()

    def _run(self) -> None:
        problem: Exception | None = None
        try:
            while not self._stopping:
                for command in self._next_commands():
                    command()
                if self._engine.has_work and not self._stopping:
                    self._step()
        except RankLostError as error:
            logger.error("%s Every answer under way is given up; start anew.", error)
            self._lost = problem = error
        except Exception as error:  # the listener tells every caller
            logger.error("the engine's thread cannot go on: %s", error, exc_info=error)
            problem = error
        finally:
            self._stopping = True
            with self._wake:
                self._over = True
            for command in self._commands:
                command()
            self._listener.ended(problem)

    def _next_commands(self) -> deque[Callable[[], None]]:
        """Wait until there is something to do; return the commands to run first."""
        with self._wake:
            idle = not self._commands and not self._engine.has_work and self._lost is None
        if idle:
            self._engine.rest()
        with self._wake:
            while not self._commands and not self._engine.has_work and self._lost is None:
                self._wake.wait()
            if self._lost is not None:
                raise self._lost
            commands, self._commands = self._commands, deque()
        return commands

    def _step(self) -> None:
        try:
            emissions = self._engine.step(PATIENCE_S)
        except StepError as error:
            self._listener.failed(error)
        else:
            self._listener.emitted(emissions)
