"""The draft in use, the one before it, and what each has served: a draft is exchanged between two steps.

What is emitted never depends on the draft, so any draft may take over at any time, and a bad one costs speed alone.
Requests under way keep the draft's keys they have: guesses made over another draft's keys are worse for a while.
"""

import threading
from dataclasses import dataclass, field
from pathlib import Path

import torch

from slipstream.checkpoint.hub import resolve
from slipstream.engine.build import borrowers_of
from slipstream.engine.engine import Engine
from slipstream.engine.read_draft import read_draft
from slipstream.errors import ConfigError
from slipstream.executors.distributed import LeadingExecutor
from slipstream.executors.eager import EagerExecutor
from slipstream.kernels import Ops, beside, one_pool
from slipstream.models.eagle3 import Eagle3Draft
from slipstream.models.load import captured_layers
from slipstream.speculation.borrowed import Borrowers
from slipstream.speculation.eagle3_drafter import Eagle3Drafter

AS_STARTED = "as started"
"""What the draft is called that an engine was built with."""


@dataclass(frozen=True)
class ReadDraft:
    """A draft that may take over."""

    name: str
    draft: Eagle3Draft
    borrowers: Borrowers | None = field(default=None, repr=False)


@dataclass(frozen=True)
class Served:
    """What a draft served: decoding passes of the target while it was in use, the tokens that came of them, and how
    many of its own it was asked for (`drafted`) and were kept (`kept`).
    """

    name: str
    passes: int = 0
    tokens: int = 0
    drafted: int = 0
    kept: int = 0

    def __add__(self, other: "Served") -> "Served":
        """Add what was served under the same name since."""
        counts = (getattr(self, name) + getattr(other, name) for name in ("passes", "tokens", "drafted", "kept"))
        return Served(self.name, *counts)

    @property
    def acceptance_length(self) -> float:
        """Tokens a pass."""
        return self.tokens / self.passes if self.passes else 1.0


class DraftShelf:
    """Reads drafts on any thread, and exchanges an engine's on the engine's own, between two steps."""

    def __init__(self, engine: Engine, name: str = AS_STARTED) -> None:
        self._engine = engine
        self._name = name
        self._reading = threading.Lock()
        self._ops: Ops | None = None  # what drafts are read with
        self._before: ReadDraft | None = None
        self._served = {name: Served(name)}
        self._counted = Served("")

    @property
    def name(self) -> str:
        """The draft in use."""
        return self._name

    @property
    def name_before(self) -> str | None:
        """The draft that `go_back` returns to."""
        return None if self._before is None else self._before.name

    def served(self) -> list[Served]:
        """Return what every draft has served so far, in the order of their first use; any thread may ask."""
        since, now = self._since(), self._name
        return [one + since if one.name == now else one for one in list(self._served.values())]

    def read(self, path: str | Path) -> ReadDraft:
        """Read a draft and see whether it can take over; ConfigError or CheckpointError if not.

        On any thread but the engine's, which goes on decoding: on one core, and waiting for nothing that a step uses.
        """
        executor, drafter = self._parts()
        runner = executor.runner
        with self._reading, one_pool(runner.ops):
            ops = self._ops = self._ops or beside(runner.ops)
            draft = read_draft(resolve(path), runner.model, None, ops)
            _check_alike(str(path), drafter, draft, captured_layers(draft.spec, runner.model.spec))
            like = drafter.borrowers
            borrowers = None if like is None else borrowers_of(runner.model, draft, self._engine.config, ops, like)
        return ReadDraft(str(path), draft, borrowers)

    def use(self, chosen: ReadDraft) -> None:
        """Have the next step draft with another draft."""
        executor, _ = self._parts()
        self._count()
        with torch.inference_mode():
            before = executor.swap_draft(chosen.draft, chosen.borrowers)
        self._before = ReadDraft(self._name, before.draft, before.borrowers)
        self._name = chosen.name
        self._served.setdefault(chosen.name, Served(chosen.name))

    def go_back(self) -> None:
        """Return to the draft before this one."""
        if self._before is None:
            raise ConfigError("There is no draft to return to: none was exchanged yet.")
        self.use(self._before)

    def _parts(self) -> tuple[EagerExecutor, Eagle3Drafter]:
        executor = self._engine.executor
        if not isinstance(executor, EagerExecutor) or isinstance(executor, LeadingExecutor):
            raise ConfigError("The model is split over several processes, and drafts cannot be exchanged there yet.")
        if not isinstance(executor.drafter, Eagle3Drafter):
            raise ConfigError(
                f"What drafts here is {executor.drafter.name}; start with an EAGLE-3 draft (--draft) to exchange it."
            )
        return executor, executor.drafter

    def _count(self) -> None:
        """Give what was served since the last exchange to the draft in use."""
        since = self._since()
        self._served[self._name] += since
        self._counted += since

    def _since(self) -> Served:
        stats, before = self._engine.stats.acceptance, self._counted
        return Served(
            "",
            stats.decoding_passes - before.passes,
            stats.emitted - stats.prompt_passes - before.tokens,
            stats.drafted - before.drafted,
            sum(stats.accepted) - before.kept,
        )


def _check_alike(path: str, drafter: Eagle3Drafter, draft: Eagle3Draft, captured: tuple[int, ...]) -> None:
    """Refuse a draft that needs other keys, features or buffers than those there are."""
    mine, other = drafter.draft.spec, draft.spec
    names = (
        "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "intermediate_size", "feature_norm",
        "feedback", "draft_vocab_size", "sliding_window", "qk_norm", "residual", "rope", "mask_token_id",
    )  # fmt: skip
    differs = [name for name in names if getattr(mine, name) != getattr(other, name)]
    if captured != drafter.captured_layers:
        differs.append("captured_layers")
    if differs:
        raise ConfigError(
            f"{path}: differs from the draft in use in {', '.join(differs)}. A draft of another shape needs a restart "
            "(--draft); to take over while serving it must be one trained on from the draft in use, or like it."
        )
