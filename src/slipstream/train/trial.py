"""The beginning of a run with a time budget: a few texts and steps, timed, and the plan that follows from them."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from slipstream.train.corpus import Corpus, read_corpus
from slipstream.train.errors import DataError
from slipstream.train.generate import GenerationStats
from slipstream.train.make_data import Report, Watch, make_corpus
from slipstream.train.objective import new_draft
from slipstream.train.optimizer import Optimizer
from slipstream.train.packing import Packer, to_device
from slipstream.train.plan import Plan, Speeds, check_asked, make_plan, read_plan, write_plan
from slipstream.train.run import TrainingRun
from slipstream.train.seen import Seen
from slipstream.train.sizes import sizes

_TRIAL_SHARE, _TRIAL_MOST = 0.05, 0.5  # of the budget: how long the first texts take, and how long they may
_TRIAL_TEXTS = 16
_WRITING_S, _WRITING_SHARE = 4.0, 0.05
_ANSWER_SHARE = 0.9  # of tokens written: the rest is user turns cut off, loops, and duplicates


@dataclass(frozen=True)
class Trial:
    """What is tried, and by whom: `asked` names the run, `begun` is when it started (`time.monotonic`)."""

    asked: dict[str, Any]
    begun: float
    report: Report = lambda tally, stats: None


def settle_plan(run: TrainingRun, trial: Trial) -> Plan:
    """Return the plan in the run's folder, or make one: texts written for it are the first of the corpus."""
    if run.world.rank == 0 and read_plan(run.paths.work) is None:
        write_plan(run.paths.work, _make(run, trial))
    run.world.wait()
    plan = read_plan(run.paths.work)
    assert plan is not None, "the first process has just written it"
    check_asked(plan, trial.asked, run.paths.work)
    run.recipe = plan.recipe
    return plan


def _make(run: TrainingRun, trial: Trial) -> Plan:
    budget_s = float(trial.asked["budget_s"])
    loading_s = time.monotonic() - trial.begun
    written = _first_texts(run, trial.report, budget_s)
    corpus = read_corpus(run.paths.corpus)
    speeds = Speeds(
        written.tokens_per_s,
        _ANSWER_SHARE,
        len(corpus.ids) / max(1, corpus.num_answer_tokens),
        *_step_seconds(run, corpus),
    )
    spent = {
        "loading": loading_s,
        "trial": time.monotonic() - trial.begun - loading_s,
        "measuring": _measuring_s(run, speeds),
        "writing": min(_WRITING_S, _WRITING_SHARE * budget_s),
    }
    store = run.device.type == "cpu"  # states go to disk as fast as a CPU makes them, and are small
    plan = make_plan(trial.asked, run.recipe, speeds, spent, store)
    spec = run.speaker.model.spec
    need = sizes(plan.recipe, spec, run.device, plan.recipe.data.answer_tokens)
    states = plan.corpus_tokens * 4 * spec.hidden_size * run.speaker.model.embed_tokens.dtype.itemsize
    return replace(plan, memory_bytes=need.memory, disk_bytes=need.disk + store * states)


def _first_texts(run: TrainingRun, report: Report, budget_s: float) -> GenerationStats:
    """Write texts for a few seconds, and until there are enough to try steps on."""
    seen = GenerationStats(0, 0, 0.0)

    def enough(tally: Any, seconds: float) -> bool:  # as `Watch` has it
        done = seconds > _TRIAL_SHARE * budget_s and tally.kept >= _TRIAL_TEXTS
        return done or seconds > _TRIAL_MOST * budget_s

    def told(tally: Any, stats: GenerationStats) -> None:
        nonlocal seen
        seen = stats
        report(tally, stats)

    tally = make_corpus(run.speaker, run.recipe, run.paths.data, run.paths.corpus, Watch(told, enough))
    if tally.kept < _TRIAL_TEXTS and not seen.tokens:
        raise DataError(f"Only {tally.kept} texts finished in time; give a larger budget.")
    return seen


def _step_seconds(run: TrainingRun, corpus: Corpus) -> tuple[float, float, float]:
    """Return what the target's part of a step takes, a step that unrolls once, and a whole one; nothing is learnt."""
    config = run.recipe.train
    draft = new_draft(run.recipe.draft.spec(run.speaker.model.spec), run.speaker.model, vocab := run.vocab(corpus), 0)
    objective = run.objective(draft, vocab)
    packer = Packer(corpus, config.row_length, 1, config.unroll, config.seed)
    rows = [packer.row_ids(number)[0] for number in range(min(config.rows_per_step, packer.steps_per_epoch))]
    batch = to_device(packer.pack([rows[i % len(rows)] for i in range(config.rows_per_step)]), run.device)
    seen = Seen(batch.text_BT)
    last, captured = objective.features(batch.ids_BT, batch.positions_BT, seen)
    features_s = _clock(run.device, lambda: objective.features(batch.ids_BT, batch.positions_BT, seen))
    batch = replace(batch, states_LBTD=torch.stack([*captured, last]))
    named = {name: p for name, p in draft.named_parameters() if p.requires_grad}
    optimizer = Optimizer(named, config.optimizer)

    def step(unroll: int) -> None:
        optimizer.zero_grad()
        objective(replace(batch, steps=batch.steps[:unroll])).loss.backward()  # type: ignore[no-untyped-call]  # torch's
        optimizer.step(0.0)

    step(config.unroll)
    return features_s, _clock(run.device, lambda: step(1)), _clock(run.device, lambda: step(config.unroll))


def _clock(device: torch.device, work: Callable[[], object], repeats: int = 3) -> float:
    """Return the seconds that work usually takes."""
    seconds = []
    for _ in range(repeats):
        begun = time.monotonic()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.monotonic() - begun)
    return float(np.median(seconds))


def _measuring_s(run: TrainingRun, speeds: Speeds) -> float:
    """Estimate what answering and walking the evaluation sets takes, of 32 prompts each at most."""
    config = run.recipe.train
    tokens = sum(min(item.first or 32, 32) * item.max_new for item in run.recipe.files.evaluate)
    row_tokens = config.rows_per_step * config.row_length
    return 2 * tokens / max(speeds.written_per_s, 1e-9) + 4 * tokens * speeds.features_s / row_tokens
