"""The training loop: an optimizer under a cosine, states that continue bit for bit, a budget of wall-clock time."""

import hashlib
import math
import os
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slipstream.errors import ConfigError, TrainingError
from slipstream.train.data.corpus import disk_error
from slipstream.train.draft.objective import Objective, StepOutput
from slipstream.train.draft.packing import Batch, Packer, prefetch, to_device
from slipstream.train.run.optimizer import MovingAverage, Optimizer
from slipstream.train.run.recipe import TrainConfig
from slipstream.train.run.world import World

_VERSION = 1
STATE_FILE = "state.pt"


@dataclass(frozen=True)
class TrainState:
    """Where a run stands; batches follow from `step` alone. History and config are JSON for records, hence Any.

    `vocabulary` and `started_from` are digests, of the draft's tokens and of the weights it was started from ("" where
    it was new); None in a state from before they were kept.
    """

    step: int
    total_steps: int
    history: list[dict[str, Any]]
    config: dict[str, Any]
    vocabulary: str | None = None
    started_from: str | None = None

    @property
    def finished(self) -> bool:
        """Whether every step was taken."""
        return self.step >= self.total_steps


def save_state(path: Path, state: TrainState, tensors: dict[str, Tensor], optimizer: dict[str, Any]) -> None:
    """Write the state under a temporary name, force it to the disk, and rename."""
    content = {
        "version": _VERSION,
        "state": asdict(state),
        "tensors": tensors,
        "optimizer": optimizer,
        "random": torch.get_rng_state(),
    }
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except (OSError, RuntimeError) as error:  # torch's writer wraps a full disk in a RuntimeError
        temporary.unlink(missing_ok=True)
        raise disk_error(path, error) from error


def load_state(path: Path, device: torch.device) -> tuple[TrainState, dict[str, Tensor], dict[str, Any]] | None:
    """Read a state back, or return None where there is none; the random state is set as it was."""
    if not path.is_file():
        return None
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise TrainingError(f"{path}: cannot be read ({reason}); delete it to start over.") from error
    if content.get("version") != _VERSION:
        raise TrainingError(f"{path}: was written by another version of slipstream; delete it to start over.")
    torch.set_rng_state(content["random"])
    tensors = {name: tensor.to(device) for name, tensor in content["tensors"].items()}
    return TrainState(**content["state"]), tensors, content["optimizer"]


_PROBE_STEPS = 8
_SAVING_SHARE = 20  # a state that takes a second to write is written three times a minute at most
_MAY_CHANGE = ("steps", "time_budget_s", "stop_at", "checkpoint_every_s")


@dataclass(frozen=True)
class Progress:
    """What a person watches: averages since the last report."""

    step: int
    total_steps: int
    loss: float
    accuracy: tuple[float, ...]
    lr: float
    grad_norm: float
    tokens_per_s: float
    seconds: float
    seconds_left: float
    acceptance: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Hooks:
    """What the loop calls: `report` at each log step, `evaluate` (main process only) at each evaluation."""

    report: Callable[[Progress], None] = lambda progress: None
    evaluate: Callable[[], dict[str, float]] | None = None
    clock: Callable[[], float] = time.monotonic


class Trainer:
    """Trains one draft in one folder; running it again goes on where the last checkpoint was."""

    def __init__(
        self,
        objective: Objective,
        packer: Packer,
        config: TrainConfig,
        world: World,
        folder: Path,
        started_from: str | None = None,
    ) -> None:
        """Prepare the steps; `started_from` is the digest of the weights that the draft was read from, if it was."""
        self._started_from = started_from or ""
        self._objective, self._packer, self._config, self._world = objective, packer, config, world
        self._path = folder / STATE_FILE
        self._device = objective.target.embed_tokens.device
        draft = objective.draft
        self._vocabulary = hashlib.sha256(draft.token_ids_V.cpu().numpy().tobytes()).hexdigest()
        self._named = {name: p for name, p in draft.named_parameters() if p.requires_grad}
        self._optimizer = Optimizer(self._named, config.optimizer, config.head_lr_scale)
        self._average = None if config.ema is None else MovingAverage(self._named, config.ema)

    def fit(self, hooks: Hooks, stop_after_s: float | None = None) -> TrainState:
        """Train to the last step, or until `stop_after_s` has passed; either way the state is on disk at the end.

        With `ema` the draft is left with the averaged weights; those that training goes on from are in the state.
        """
        started = hooks.clock()
        state = self._restore() or self._begin(hooks)
        if self._config.steps is not None:
            state = replace(state, total_steps=self._config.steps)
        meter = _Meter(self._config, hooks.clock, state)
        saved_at, save_s = hooks.clock(), 0.0
        step = state.step
        last = min(state.total_steps, self._config.stop_at or state.total_steps)
        batches = prefetch(self._packer, step, last, self._world.rank, self._world.size)
        for batch in batches:
            lr = learning_rate(self._config, step, state.total_steps)
            out, norm = self._step(self._shortened(to_device(batch, self._device), step, state.total_steps), lr)
            if self._average is not None:
                self._average.update(step)
            meter.add(out, norm, batch.ids_BT.numel() * self._world.size)
            step += 1
            ends = step == last
            evaluates = hooks.evaluate is not None and (ends or _every(step, self._config.eval_every))
            if evaluates or ends or _every(step, self._config.log_every):
                progress = meter.read(step, lr, self._world)
                if evaluates and hooks.evaluate is not None:
                    progress = self._evaluate(progress, hooks.evaluate)
                    meter.skip_time()
                state.history.append(asdict(progress))
                hooks.report(progress)
                # Only here is the loss known to be a number, so only here may the state replace the last good one.
                overtime = stop_after_s is not None and hooks.clock() - started > stop_after_s
                overtime = self._world.agree(overtime)
                every_s = self._config.checkpoint_every_s  # 0 is at every report
                often = max(every_s, _SAVING_SHARE * save_s) if every_s > 0 else 0.0
                due = self._world.agree(hooks.clock() - saved_at > often)
                if ends or overtime or due:
                    state = replace(state, step=step)
                    begun = hooks.clock()
                    self._save(state)
                    saved_at = hooks.clock()
                    save_s = saved_at - begun
                if overtime and not ends:
                    batches.close()
                    break
        if self._average is not None:
            self._average.take()
        return state

    def _shortened(self, batch: Batch, step: int, total_steps: int) -> Batch:
        """Return the batch with one unrolled step only, at the start of a run that has the first learnt alone."""
        return replace(batch, steps=batch.steps[:1]) if step < self._config.first_alone * total_steps else batch

    def _evaluate(self, progress: Progress, evaluate: Callable[[], dict[str, float]]) -> Progress:
        with nullcontext() if self._average is None else self._average.taken():
            acceptance = evaluate() if self._world.rank == 0 else {}
        return Progress(**{**asdict(progress), "acceptance": acceptance})

    def _step(self, batch: Batch, lr: float) -> tuple[StepOutput, Tensor]:
        out = self._objective(batch, self._world.sum)
        self._optimizer.zero_grad()
        out.loss.backward()  # type: ignore[no-untyped-call]  # torch's
        parameters = list(self._named.values())
        self._world.sum_gradients(parameters)
        norm = torch.nn.utils.clip_grad_norm_(parameters, self._config.clip)
        self._optimizer.step(lr)
        return out, norm

    def _begin(self, hooks: Hooks) -> TrainState:
        return TrainState(0, self._plan(hooks), [], asdict(self._config), self._vocabulary, self._started_from)

    def _plan(self, hooks: Hooks) -> int:
        """Return the number of steps: given, or as many as fit the time, by trying a few and taking them back."""
        if self._config.steps is not None:
            return self._config.steps
        assert self._config.time_budget_s is not None
        before = {name: p.detach().clone() for name, p in self._named.items()}
        begun = hooks.clock()
        for step in range(2 * _PROBE_STEPS):
            if step == _PROBE_STEPS:
                self._synchronize()
                begun = hooks.clock()
            self._step(to_device(self._packer.batch(step, self._world.rank, self._world.size), self._device), 0.0)
        self._synchronize()
        per_step = (hooks.clock() - begun) / _PROBE_STEPS
        with torch.no_grad():
            for name, p in self._named.items():
                p.copy_(before[name])
        self._optimizer.forget()
        return self._world.first(max(1, int(0.95 * self._config.time_budget_s / max(per_step, 1e-6))))

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()

    def _restore(self) -> TrainState | None:
        loaded = load_state(self._path, self._device)
        if loaded is None:
            return None
        state, tensors, optimizer = loaded
        same = {k: v for k, v in asdict(self._config).items() if k not in _MAY_CHANGE}
        if differs := [k for k, v in same.items() if state.config.get(k) != v]:
            raise ConfigError(
                f"{self._path}: was written with other settings ({', '.join(differs)}); "
                f"use them again, or train into another folder."
            )
        if state.started_from not in (None, self._started_from):
            then = "a draft" if state.started_from else "no draft"
            now = (
                "another one" if state.started_from and self._started_from else "one" if self._started_from else "none"
            )
            raise TrainingError(
                f"{self._path}: is of a run that was started from {then}, and --init-from now names {now}. Give what "
                "was given then, or train into another folder."
            )
        mine = self._tensors()
        if set(tensors) != set(mine) or any(tensors[n].shape != p.shape for n, p in mine.items()):
            raise TrainingError(f"{self._path}: belongs to a draft of another shape; train into another folder.")
        if state.vocabulary not in (None, self._vocabulary):  # the head's rows stand for these tokens, in this order
            raise TrainingError(
                f"{self._path}: belongs to a draft of another vocabulary: the data or --init-from is not what it was. "
                "Give what was given then, or train into another folder."
            )
        for name, tensor in mine.items():
            tensor.copy_(tensors[name])
        self._optimizer.load_state_dict(optimizer)
        return state

    def _save(self, state: TrainState) -> None:
        if self._world.rank == 0:
            save_state(self._path, state, self._tensors(), self._optimizer.state_dict())

    def _tensors(self) -> dict[str, Tensor]:
        """Return what a state holds of weights, themselves and not copies."""
        averages = {} if self._average is None else self._average.named
        return {**{name: p.detach() for name, p in self._named.items()}, **averages}


class _Meter:
    """Sums losses and agreements on the device between two reports."""

    def __init__(self, config: TrainConfig, clock: Callable[[], float], state: TrainState) -> None:
        self._clock, self._total_steps, self._unroll = clock, state.total_steps, config.unroll
        self._in_float16 = config.target_dtype == "float16"
        self._loss: Tensor | None = None
        self._before = float(state.history[-1]["seconds"]) if state.history else 0.0
        self._begun = self._last = clock()
        self._reset()

    def _reset(self) -> None:
        self._losses: list[Tensor] = []
        self._agreed: list[Tensor] = []
        self._counts: list[Tensor] = []
        self._norm: Tensor | None = None
        self._tokens = 0

    def add(self, out: StepOutput, norm: Tensor, tokens: int) -> None:
        self._losses.append(out.loss.detach())
        missing = (0, self._unroll - len(out.agreed_J))  # steps that were not unrolled
        self._agreed.append(torch.nn.functional.pad(out.agreed_J, missing))
        self._counts.append(torch.nn.functional.pad(out.count_J, missing))
        self._norm = norm
        self._tokens += tokens

    def skip_time(self) -> None:
        """Leave out what passed since the last report (an evaluation)."""
        now = self._clock()
        self._begun += now - self._last
        self._last = now

    def read(self, step: int, lr: float, world: World) -> Progress:
        loss = float(world.sum(torch.stack(self._losses).sum())) / len(self._losses)
        if not math.isfinite(loss):
            wider = " Or the target's states exceed float16: try train.target_dtype bfloat16." * self._in_float16
            raise TrainingError(
                f"The loss is {loss} at step {step}. The last checkpoint is untouched: lower the learning rate "
                f"(or clip), and start again from it or in a new folder.{wider}"
            )
        agreed_J = world.sum(torch.stack(self._agreed).sum(0))
        count_J = torch.stack(self._counts).sum(0).clamp(min=1)
        accuracy = tuple((agreed_J / count_J).tolist())
        assert self._norm is not None
        norm = float(self._norm)
        now = self._clock()
        speed = self._tokens / max(now - self._last, 1e-9)
        per_step = (now - self._last) / len(self._losses)
        self._last = now
        self._reset()
        return Progress(
            step, self._total_steps, loss, accuracy, lr, norm, speed,
            self._before + now - self._begun, per_step * (self._total_steps - step),
        )  # fmt: skip


def learning_rate(config: TrainConfig, step: int, total_steps: int) -> float:
    """Return the rate of a step (from 0): linear warm-up, then a cosine down to `final_lr` of the peak."""
    warmup = max(1, round(config.warmup * total_steps))
    if step < warmup:
        return config.lr * (step + 1) / warmup
    done = (step - warmup) / max(1, total_steps - warmup)
    return config.lr * (config.final_lr + (1 - config.final_lr) * 0.5 * (1 + math.cos(math.pi * min(1.0, done))))


def _every(step: int, interval: int) -> bool:
    return interval > 0 and step % interval == 0
