"""The plan of a run with a time budget: how many tokens and steps, decided once and followed ever after.

Speeds are measured at the beginning of a run. What comes of them is written to `plan.json` in the work folder before
anything depends on it, and a run that is taken up again reads it: the same tokens, the same steps, the same draft.
"""

import itertools
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from slipstream.errors import ConfigError, DataError
from slipstream.train.data.corpus import disk_error
from slipstream.train.run.recipe import Recipe, make_recipe

PLAN_FILE = "plan.json"
EPOCHS = 3
"""Passes over the data that a short run makes: new text costs more than another look at what there is."""
_USED = 0.92  # of the budget: what was measured in seconds may go slower for minutes
_MEASURED = ((20_480, 1.27), (240_128, 1.88), (33e6, 2.82), (146e6, 3.02))
"""Tokens trained on, prompts and every pass counted, and the embedded model's acceptance on GSM8K, K = 3."""


@dataclass(frozen=True)
class Speeds:
    """What was measured on this machine at the start of the run.

    Args:
        written_per_s: tokens the target writes a second, all texts together.
        answer_share: part of them that ends up in answers that are kept.
        tokens_per_answer_token: tokens of the corpus, prompts included, for each of an answer.
        features_s, first_s, step_s: seconds that a step's part of the target takes, of a step that unrolls once
            (without the target), and of a whole step (likewise).
    """

    written_per_s: float
    answer_share: float
    tokens_per_answer_token: float
    features_s: float
    first_s: float
    step_s: float


@dataclass(frozen=True)
class Plan:
    """A run's tokens and steps; `recipe` has them filled in.

    Args:
        asked: what the user gave: target, budget and settings; another demand is another run.
        store: run the target over the corpus once and train from what is stored.
        phases: seconds by phase, an estimate.
    """

    asked: dict[str, Any]
    recipe: Recipe
    speeds: Speeds
    store: bool
    corpus_tokens: int
    phases: dict[str, float]
    memory_bytes: int = 0
    disk_bytes: int = 0

    @property
    def trained_tokens(self) -> int:
        """Tokens of all steps together."""
        train = self.recipe.train
        assert train.steps is not None
        return train.steps * train.rows_per_step * train.row_length

    @property
    def acceptance(self) -> float:
        """The acceptance to expect, by what the embedded model's drafts reached."""
        return expected_acceptance(self.trained_tokens)

    def lines(self) -> list[str]:
        """Say it, for people."""
        train, data = self.recipe.train, self.recipe.data
        minutes = ", ".join(f"{name} {_time(seconds)}" for name, seconds in self.phases.items())
        longer = expected_acceptance(4 * self.trained_tokens)
        return [
            f"plan: {data.answer_tokens:,} answer tokens ({self.corpus_tokens:,} with prompts), {train.steps:,} steps "
            f"of {train.rows_per_step * train.row_length:,} tokens, {train.unroll} drafted tokens, vocabulary "
            f"{self.recipe.draft.vocab_size:,}",
            f"time: {minutes}; {_time(sum(self.phases.values()))} in all",
            f"memory: about {self.memory_bytes / 1e9:.1f} GB; disk: about {self.disk_bytes / 1e9:.2f} GB, in the work "
            "folder",
            f"acceptance to expect: about {self.acceptance:.1f} tokens a pass (chains of 3); with four times the time "
            f"about {longer:.1f}. An estimate, from the embedded model's drafts on GSM8K (docs/train.md): other "
            "targets and prompts differ",
        ]


def make_plan(asked: dict[str, Any], recipe: Recipe, speeds: Speeds, spent: Mapping[str, float], store: bool) -> Plan:
    """Share out what is left of the budget that was asked for.

    Args:
        spent: seconds of phases that are over, or known: loading, trial, measuring, writing.
    """
    budget_s = float(asked["budget_s"])
    left = _USED * budget_s - sum(spent.values())
    if left < 0.2 * budget_s:
        raise ConfigError(
            f"Of a budget of {budget_s:.0f} s, {sum(spent.values()):.0f} s go to loading, trying and measuring, which "
            f"leaves too little for data and training; give {5 * math.ceil(sum(spent.values()) / 3)} s or more."
        )
    train = recipe.train
    per_token = train.rows_per_step * train.row_length
    step_s = train.first_alone * speeds.first_s + (1 - train.first_alone) * speeds.step_s
    step_s += 0.0 if store else speeds.features_s
    per_answer = {
        "data": 1 / (speeds.written_per_s * speeds.answer_share),
        "features": store * speeds.tokens_per_answer_token * speeds.features_s / per_token,
        "training": EPOCHS * speeds.tokens_per_answer_token * step_s / per_token,
    }
    answers = min(recipe.data.answer_tokens, int(left / sum(per_answer.values())))
    corpus_tokens = int(answers * speeds.tokens_per_answer_token)
    data_s, features_s = answers * per_answer["data"], answers * per_answer["features"]
    steps = max(1, int((left - data_s - features_s) / step_s))
    phases = {**spent, "data": data_s, "training": steps * step_s, **({"features": features_s} if store else {})}
    order = ("loading", "trial", "data", "features", "training", "measuring", "writing")
    planned = replace(
        recipe,
        data=replace(recipe.data, answer_tokens=answers),
        train=replace(train, steps=steps, time_budget_s=None),
    )
    phases = {name: phases[name] for name in order if name in phases}
    return Plan(asked, planned, speeds, store, corpus_tokens, phases)


def expected_acceptance(tokens: float) -> float:
    """Return the acceptance that so much training gave the embedded model, between what was measured."""
    logs = [(math.log(count), length) for count, length in _MEASURED]
    at = min(math.log(max(tokens, 1)), logs[-1][0])
    for (low, below), (high, above) in itertools.pairwise(logs):
        if at <= high:
            return max(1.0, below + (above - below) * (at - low) / (high - low))
    return logs[-1][1]


def write_plan(folder: Path, plan: Plan) -> None:
    """Put the plan into the work folder, whole or not at all."""
    path = folder / PLAN_FILE
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(asdict(plan), indent=2) + "\n", encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        raise disk_error(path, error) from error


def read_plan(folder: Path) -> Plan | None:
    """Return the plan an earlier call made, or None."""
    path = folder / PLAN_FILE
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        recipe = make_recipe(content.pop("recipe"), str(path))
        return Plan(**{**content, "recipe": recipe, "speeds": Speeds(**content["speeds"])})
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path}: cannot be read ({error}); delete {folder} to start over.") from error


def check_asked(plan: Plan, asked: Mapping[str, Any], folder: Path) -> None:
    """Refuse the plan of a run that somebody asked for in other words."""
    if differs := [name for name, value in asked.items() if plan.asked.get(name) != value]:
        raise ConfigError(
            f"{folder / PLAN_FILE}: was made for another run ({', '.join(differs)} differ). Give what was given then "
            f"to go on with it, name another place (--work, or --out, which it follows), or delete {folder}."
        )


def _time(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.1f} min"
