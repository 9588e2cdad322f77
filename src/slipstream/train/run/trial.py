"""A run without a recipe: settings by device, memory and time; then a trial of a few texts and steps, for the plan."""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slipstream.checkpoint.spec import ModelSpec
from slipstream.errors import ConfigError, DataError
from slipstream.kernels.training.seen import Seen
from slipstream.train.data.corpus import Corpus, read_corpus
from slipstream.train.data.generate import GenerationStats, GeneratorConfig
from slipstream.train.data.make_data import Report, Watch, make_corpus
from slipstream.train.data.mixture import DataConfig
from slipstream.train.data.speaker import CPU_ROWS, GPU_ROWS
from slipstream.train.draft.features import lay_out
from slipstream.train.draft.objective import DraftShape, Objective, new_draft
from slipstream.train.draft.packing import Batch, Packer, to_device
from slipstream.train.run.optimizer import Optimizer
from slipstream.train.run.phases import TrainingRun
from slipstream.train.run.plan import Plan, Speeds, check_asked, make_plan, read_plan, write_plan
from slipstream.train.run.recipe import EvalSet, Files, Recipe, TrainConfig

PROMPT_SETS = Path(__file__).parents[1] / "data" / "prompt_sets"
SHORT_S = 1800.0
_KEPT = 40  # numbers a unit of width leaves behind, for each token and unrolled step, until the gradient has passed
_RUNTIME_BYTES = 1 << 30
_SHARE = 0.8  # of the memory that is free


@dataclass(frozen=True)
class Sizes:
    """Memory and disk of a run, in bytes: at most, and by estimate."""

    memory: int
    disk: int


def plain_recipe(target: ModelSpec, device: torch.device, budget_s: float, tp: int = 1, whole: bool = True) -> Recipe:
    """Return settings for a target nobody wrote a recipe for; the plan adds how many tokens and steps.

    Without the `whole` target (its states come from servers) only its table and head take memory here.
    """
    gpu = device.type == "cuda"
    short = budget_s < SHORT_S
    answer = 320 if gpu else 160
    prompt = 192 if gpu else 96
    data = DataConfig(
        magpie=0.3 if gpu else 0.0, maths=0.0, second_turn=0.0, greedy=0.7, temperature=(0.6, 0.7), top_p=1.0,
        max_prompt=prompt, max_answer=answer, file_repeats=4,
    )  # fmt: skip
    train = TrainConfig(
        steps=1, row_length=1024 if gpu else 512, rows_per_step=16 if gpu else 1, unroll=5 if gpu else 3,
        first_alone=0.0 if gpu else 0.4, whole_vocabulary=False, hard_share=0.3, optimizer="muon",
        lr=1e-3 if gpu else 1.5e-3, head_lr_scale=0.5, warmup=0.05 if gpu else 0.1,
        target_dtype="bfloat16" if gpu or _bfloat16_is_fast() else "float32", log_every=50 if gpu else 10,
    )  # fmt: skip
    entries = (16_384 if gpu else 4_096) if short else (32_768 if gpu else 8_192)
    recipe = Recipe(
        train,
        DraftShape(vocab_size=min(entries, target.vocab_size)),
        data,
        GeneratorConfig(max_length=prompt + answer + (0 if gpu else 64)),
        Files(prompts=("maths.yaml", "chat.yaml"), evaluate=(EvalSet("held-out", "held_out.yaml", max_new=128),)),
    )
    return _fitted(recipe, target, device, tp, whole)


def sizes(
    recipe: Recipe, target: ModelSpec, device: torch.device, answer_tokens: int, tp: int = 1, whole: bool = True
) -> Sizes:
    """Estimate what a run takes on each device of a target split over `tp`; features kept on disk are not counted."""
    itemsize = 4 if device.type == "cpu" else 2
    block = 3 * target.hidden_size * target.intermediate_size + 4 * target.hidden_size * _attention_width(target)
    draft = block + 5 * target.hidden_size**2 + recipe.draft.vocab_size * target.hidden_size
    numbers = target_numbers(target) if whole else 2 * target.vocab_size * target.hidden_size
    weights = numbers * (2 if recipe.train.target_dtype in ("bfloat16", "float16") else 4)
    rows = recipe.generate.rows or (CPU_ROWS if device.type == "cpu" else GPU_ROWS)
    blocks = (target.block_heads(index) for index in range(target.num_layers))
    heads = 2 * sum(width * kv_heads for width, kv_heads in blocks)
    keys = rows * recipe.generate.max_length * heads * itemsize if whole else 0
    memory = (weights * (2 if device.type == "cpu" else 1) + keys) // tp + 20 * draft + _step_bytes(recipe, target)
    corpus = answer_tokens * 2 * (2 if target.vocab_size < 65536 else 4)
    return Sizes(memory + _RUNTIME_BYTES, corpus + 14 * draft)


def target_numbers(target: ModelSpec) -> int:
    """Return about how many weights a target has; of experts all, though few are used for a token."""
    width = target.hidden_size
    attention = 2 * width * (_attention_width(target) + target.num_kv_heads * target.head_dim)
    dense = 3 * width * target.intermediate_size
    moe = target.moe
    layers = target.num_layers * (attention + dense)
    if moe is not None:
        one = 3 * width * moe.intermediate_size * moe.num_experts
        layers = target.num_layers * (attention + moe.beside_dense * dense)
        layers += (target.num_layers - len(moe.dense_layers)) * one
    return layers + target.vocab_size * width * (1 if target.tie_embeddings else 2)


def free_memory(device: torch.device) -> int:
    """Return the bytes that are free on a device; of a CPU, what the machine has left."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    meminfo = Path("/proc/meminfo")
    if meminfo.is_file():
        fields = dict(line.split(":", 1) for line in meminfo.read_text(encoding="ascii").splitlines())
        return int(fields["MemAvailable"].split()[0]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def _fitted(recipe: Recipe, target: ModelSpec, device: torch.device, tp: int, whole: bool) -> Recipe:
    """Return the recipe with as many rows a step, and as many texts at once, as the memory holds."""
    room = int(_SHARE * free_memory(device))
    rows = CPU_ROWS if device.type == "cpu" else GPU_ROWS
    recipe = replace(recipe, generate=replace(recipe.generate, rows=rows))
    while (need := sizes(recipe, target, device, 0, tp, whole).memory) > room:
        train, generate = recipe.train, recipe.generate
        assert generate.rows is not None
        if generate.rows > 8:
            recipe = replace(recipe, generate=replace(generate, rows=generate.rows // 2))
        elif train.rows_per_step > 1:
            recipe = replace(recipe, train=replace(train, rows_per_step=train.rows_per_step // 2))
        else:
            raise ConfigError(
                f"Training for this target takes about {need / 1e9:.0f} GB on {device}, and {room / 1e9:.0f} GB may be "
                "used. Split the target over more devices (--tp), or use a machine with more memory."
            )
    return recipe


def _step_bytes(recipe: Recipe, target: ModelSpec) -> int:
    train, itemsize = recipe.train, 4
    tokens = train.row_length * train.rows_per_step
    kept = tokens * train.unroll * _KEPT * target.hidden_size * itemsize
    opinion = tokens * 4 * (recipe.draft.vocab_size * 3 + (target.vocab_size if train.whole_vocabulary else 0))
    return kept + opinion


def _attention_width(target: ModelSpec) -> int:
    return target.num_heads * target.head_dim


def _bfloat16_is_fast() -> bool:
    """Try whether this CPU multiplies bfloat16 faster than float32; those without instructions for it do not."""
    seconds = {}
    for dtype in (torch.float32, torch.bfloat16):
        a, b = torch.ones(512, 576, dtype=dtype), torch.ones(1536, 576, dtype=dtype)
        torch.nn.functional.linear(a, b)
        begun = time.process_time()
        for _ in range(4):
            torch.nn.functional.linear(a, b)
        seconds[dtype] = time.process_time() - begun
    return seconds[torch.bfloat16] < 0.8 * seconds[torch.float32]


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
    # States go to disk as fast as a CPU makes them, and are small; those of servers are asked for once.
    store = run.device.type == "cpu" or run.server_states is not None
    return with_sizes(make_plan(trial.asked, run.recipe, speeds, spent, store), run)


def with_sizes(plan: Plan, run: TrainingRun) -> Plan:
    """Return the plan with the memory it takes on each device, and the disk."""
    model, whole = run.speaker.model, run.server_states is None
    need = sizes(plan.recipe, model.spec, run.device, plan.recipe.data.answer_tokens, run.tp, whole)
    states = plan.corpus_tokens * 4 * model.spec.hidden_size * model.embed_tokens.dtype.itemsize
    return replace(plan, memory_bytes=need.memory, disk_bytes=need.disk + plan.store * states)


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
    states_LBTD, features_s = _states(run, objective, corpus, rows, batch)
    batch = replace(batch, states_LBTD=states_LBTD)
    named = {name: p for name, p in draft.named_parameters() if p.requires_grad}
    optimizer = Optimizer(named, config.optimizer)

    def step(unroll: int) -> None:
        optimizer.zero_grad()
        objective(replace(batch, steps=batch.steps[:unroll])).loss.backward()  # type: ignore[no-untyped-call]  # torch's
        optimizer.step(0.0)

    step(config.unroll)
    return features_s, _clock(run.device, lambda: step(1)), _clock(run.device, lambda: step(config.unroll))


def _states(
    run: TrainingRun, objective: Objective, corpus: Corpus, rows: list[list[int]], batch: Batch
) -> tuple[Tensor, float]:
    """Return the target's states of a step's rows, and how long they take: run here, or asked of servers."""
    if run.server_states is None:
        seen = Seen(batch.text_BT)
        last, captured = objective.features(batch.ids_BT, batch.positions_BT, seen)
        features_s = _clock(run.device, lambda: objective.features(batch.ids_BT, batch.positions_BT, seen))
        return torch.stack([*captured, last]), features_s
    begun = time.monotonic()
    texts = run.server_states.of([corpus.text(number).ids for row in rows for number in row])
    features_s = (time.monotonic() - begun) * run.recipe.train.rows_per_step / len(rows)
    states = iter(texts)
    states_LBTD = lay_out([[next(states) for _ in row] for row in rows], run.recipe.train.row_length)
    repeated = torch.arange(run.recipe.train.rows_per_step) % len(rows)
    return states_LBTD[:, repeated].to(run.device), features_s


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
