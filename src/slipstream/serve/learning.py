"""Learning while serving: answers are kept as token ids, a trainer beside the server adapts the draft, and a better one
takes over between two steps.

Nothing that is answered depends on the draft, so the worst a bad one does is to guess badly; then the server returns to
the one before.
"""

import logging
import subprocess
import threading
from collections import deque
from collections.abc import Callable, Sequence

from slipstream.engine.drafts import DraftShelf
from slipstream.engine.request import FinishReason
from slipstream.errors import SlipstreamError
from slipstream.records.traffic import (
    RETURNED,
    Answered,
    Deployed,
    TrafficWriter,
    read_deployed,
    read_returned,
    write_deployed,
)
from slipstream.serve.config import LearnConfig
from slipstream.serve.ticket import Job
from slipstream.serve.worker import EngineWorker

logger = logging.getLogger(__name__)

_LOOK_S = 2.0
_LEAST_ANSWER = 8  # tokens: less says nothing about a draft
_WAITING = 4096  # answers between two looks; more are dropped
_JUDGED_TOKENS = 2000  # drafted by a draft in use, before it is compared with the one before
_LEAST_SHARE = 0.9  # of the share of drafted tokens that one had kept; below, the server returns


class Learning:
    """Keeps a server's answers, and has it use what the trainer makes of them."""

    def __init__(self, config: LearnConfig, worker: EngineWorker, shelf: DraftShelf) -> None:
        self._config, self._worker, self._shelf = config, worker, shelf
        self._writer = TrafficWriter(config.folder, config.max_tokens)
        self._answers: deque[Answered] = deque(maxlen=_WAITING)
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, name="learning", daemon=True)
        self._trainer: subprocess.Popen[bytes] | None = None
        returned = read_returned(config.folder)
        self._seen = 0 if returned is None else returned.number
        self._in_use: Deployed | None = None
        self.deployed = 0
        self.returned = 0

    @property
    def num_tokens(self) -> int:
        """Tokens of traffic in the folder."""
        return self._writer.num_tokens

    def keep(self, job: Job, tokens: Sequence[int], reason: FinishReason) -> None:
        """Take in an answer that is over; on the engine's thread, so nothing is written here.

        What came with a cache salt belongs to one tenant and is not kept; neither is what a grammar has shaped.
        """
        free = job.params.grammar is None and not job.params.cache_salt and job.speculate
        if free and reason in (FinishReason.STOP, FinishReason.LENGTH) and len(tokens) >= _LEAST_ANSWER:
            self._answers.append(Answered(tuple(job.prompt), tuple(tokens)))

    def start(self) -> None:
        """Begin to write, to look for drafts, and to train."""
        if self._config.trainer:
            self._trainer = subprocess.Popen(["nice", "-n", "19", *self._config.trainer], stdin=subprocess.DEVNULL)
        logger.info(
            "learning: answers are kept as token ids in %s, at most %s tokens",
            self._config.folder,
            f"{self._config.max_tokens:,}",
        )
        self._thread.start()

    def stop(self) -> None:
        """Write what is left, and end the trainer; what it was at is taken up next time."""
        self._ends.set()
        self._thread.join()
        if self._trainer is not None:
            self._trainer.terminate()
            self._trainer.wait()

    def look(self) -> None:
        """Write what has come, see whether there is a better draft, and whether the last one holds."""
        self._writer.add([self._answers.popleft() for _ in range(len(self._answers))])
        found = read_deployed(self._config.folder)
        if found is not None and found.number > self._seen:
            self._seen = found.number
            self._use(found)
        elif self._in_use is not None:
            self._judge(self._in_use)

    def _run(self) -> None:
        while not self._ends.wait(_LOOK_S):
            self._reported(self.look)
            if self._trainer is not None and self._trainer.poll() is not None:
                logger.error("learning: the trainer ended (%d); answers are kept on", self._trainer.returncode)
                self._trainer = None
        self._reported(self._write_all)

    def _write_all(self) -> None:
        self._writer.add([self._answers.popleft() for _ in range(len(self._answers))])
        self._writer.flush()

    @staticmethod
    def _reported(work: Callable[[], None]) -> None:
        """Do something; what goes wrong (a full disk, a damaged draft) goes to the log, and serving goes on."""
        try:
            work()
        except SlipstreamError as error:
            logger.error("learning: %s", error)

    def _use(self, found: Deployed) -> None:
        """Read a draft here, while the engine decodes, and hand it over between two steps."""
        draft = self._shelf.read(self._config.folder / found.draft)
        self._worker.between_steps(lambda: self._shelf.use(draft))
        self._in_use = found
        self.deployed += 1
        logger.info(
            "learning: draft %d is used from now on (%.2f tokens a pass on held-back traffic, %.2f before)",
            found.number,
            found.after,
            found.before,
        )

    def _judge(self, used: Deployed) -> None:
        """Return to the draft before if this one is clearly worse in use."""
        served = {one.name: one for one in self._shelf.served()}
        now, before = served[self._shelf.name], served.get(self._shelf.name_before or "")
        if before is None or min(now.drafted, before.drafted) < _JUDGED_TOKENS:
            return
        # Of drafted tokens: how often there is drafting at all depends on the load, not on the draft.
        share, share_before = now.kept / now.drafted, before.kept / before.drafted
        if share < _LEAST_SHARE * share_before:
            self._worker.between_steps(self._shelf.go_back)
            self.returned += 1
            write_deployed(self._config.folder, used, RETURNED)
            logger.warning(
                "learning: of what draft %d drafted %.0f%% were kept, of the one before %.0f%%: back to that",
                used.number,
                100 * share,
                100 * share_before,
            )
        self._in_use = None
