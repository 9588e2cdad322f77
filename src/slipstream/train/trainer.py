"""The training loop: AdamW under a cosine, checkpoints that continue bit for bit, and a budget of wall-clock time."""

import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from slipstream.errors import ConfigError
from slipstream.train.errors import TrainingError
from slipstream.train.moving_average import MovingAverage
from slipstream.train.objective import Objective, StepOutput
from slipstream.train.optimizer import OPTIMIZERS, Optimizer
from slipstream.train.packing import Batch, Packer, prefetch, to_device
from slipstream.train.precision import TARGET_DTYPES
from slipstream.train.state import TrainState, load_state, save_state
from slipstream.train.world import World

_PROBE_STEPS = 8
_SAVING_SHARE = 20  # a state that takes a second to write is written three times a minute at most
_MAY_CHANGE = ("steps", "time_budget_s", "stop_at", "checkpoint_every_s")


@dataclass(frozen=True)
class TrainConfig:
    """The settings of a run.

    Args:
        steps: how many; None plans them from `time_budget_s` and the speed measured at the start.
        row_length: tokens in a packed row.
        rows_per_step: rows of one step, over all processes.
        unroll: draft steps unrolled; weights fall by `decay` from one to the next.
        first_alone: share of the steps, at the start, that unroll only once: later drafted tokens build on the first,
            and a step of one costs a third of a step of three.
        whole_vocabulary: have the target's best token looked for in its whole vocabulary, and leave out slots where the
            draft does not know it. False looks among the draft's tokens only and leaves out slots whose text goes on
            with another: the same for greedy texts, and the target's head, most of the work of a small one, shrinks.
        hard_share, miss_weight: see `slipstream.train.objective.Emphasis`.
        optimizer: "adamw", or "muon" for the blocks' matrices with AdamW for the head, the norms and the biases.
        stop_at: leave off after this step though the rate falls as if all `steps` were to come.
        warmup, final_lr: shares of the steps and of the learning rate.
        freeze_head: keep the head as the target's rows.
        ema: share of itself that the running average of the weights keeps at each step (0.999); the draft measured and
            written is then that average.
        target_dtype: the target's precision in writing data, training and measuring: bfloat16, float16 or float32; by
            default bfloat16 on a GPU and float32 on a CPU, as the draft's activations always are.
    """

    steps: int | None = None
    time_budget_s: float | None = None
    stop_at: int | None = None
    row_length: int = 1024
    rows_per_step: int = 32
    unroll: int = 5
    first_alone: float = 0.0
    whole_vocabulary: bool = True
    decay: float = 0.8
    hard_share: float = 0.0
    miss_weight: float = 1.0
    optimizer: str = "adamw"
    lr: float = 1e-3
    head_lr_scale: float = 1.0
    warmup: float = 0.03
    final_lr: float = 0.05
    clip: float = 1.0
    weight_decay: float = 0.0
    freeze_head: bool = False
    ema: float | None = None
    target_dtype: str | None = None
    seed: int = 0
    log_every: int = 20
    eval_every: int = 0
    checkpoint_every_s: float = 30.0

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.time_budget_s is None):
            raise ConfigError("Give either steps or time_budget_s, not both and not neither.")
        for name in ("steps", "row_length", "rows_per_step", "unroll", "log_every", "stop_at"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 1.")
        for name in ("hard_share", "miss_weight", "first_alone"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it lies between 0 and 1.")
        for name in ("time_budget_s", "lr"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(f"{name} is {value}; it must be a number above 0.")
        if self.optimizer not in OPTIMIZERS:
            raise ConfigError(f"optimizer is {self.optimizer!r}; it is {' or '.join(OPTIMIZERS)}.")
        if self.ema is not None and not 0.0 < self.ema < 1.0:
            raise ConfigError(f"ema is {self.ema}; it must lie between 0 and 1, such as 0.999.")
        if self.target_dtype is not None and self.target_dtype not in TARGET_DTYPES:
            raise ConfigError(f"target_dtype is {self.target_dtype!r}; it is {', '.join(TARGET_DTYPES)}.")


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

    def __init__(self, objective: Objective, packer: Packer, config: TrainConfig, world: World, folder: Path) -> None:
        self._objective, self._packer, self._config, self._world = objective, packer, config, world
        self._path = folder / "state.pt"
        self._device = objective.target.embed_tokens.device
        draft = objective.draft
        assert draft.lm_head.weight is not None
        draft.lm_head.weight.requires_grad_(not config.freeze_head)
        self._named = {name: p for name, p in draft.named_parameters() if p.requires_grad}
        self._optimizer = Optimizer(self._named, config.optimizer, config.head_lr_scale, config.weight_decay)
        self._average = None if config.ema is None else MovingAverage(self._named, config.ema)

    def fit(self, hooks: Hooks, stop_after_s: float | None = None) -> TrainState:
        """Train to the last step, or until `stop_after_s` has passed; either way the state is on disk at the end.

        With `ema` the draft is left with the averaged weights; those that training goes on from are in the state.
        """
        started = hooks.clock()
        state = self._restore() or TrainState(0, self._plan(hooks), [], asdict(self._config))
        if self._config.steps is not None:
            state = TrainState(state.step, self._config.steps, state.history, state.config)
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
                    state = TrainState(step, state.total_steps, state.history, state.config)
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
        mine = self._tensors()
        if set(tensors) != set(mine) or any(tensors[n].shape != p.shape for n, p in mine.items()):
            raise TrainingError(f"{self._path}: belongs to a draft of another shape; train into another folder.")
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
