"""Says in which ways arms differ, and what a reader of their results should know before believing them."""

import dataclasses
from collections.abc import Iterator, Sequence

from slipstream.bench.recipe import Arm, Recipe

DRAFTING = ("draft", "speculation")
"""Differences that are the point of the experiment; every other one is a second cause."""


def differences(recipe: Recipe, arm_name: str, other_name: str) -> dict[str, str]:
    """Return every setting in which two arms differ, with the change in words."""
    arm, other = recipe.arms[arm_name], recipe.arms[other_name]
    found = {}
    if recipe.server_of(arm) != recipe.server_of(other):
        found["server"] = f"{recipe.server_of(other)} -> {recipe.server_of(arm)}"
    for field in dataclasses.fields(Arm):
        mine, theirs = getattr(arm, field.name), getattr(other, field.name)
        if field.name not in ("server", "optional", "against") and mine != theirs:
            found[field.name] = f"{_words(theirs)} -> {_words(mine)}"
    return found


def notes_on(recipe: Recipe, arms: Sequence[str], workloads: Sequence[str]) -> Iterator[str]:
    """Yield what limits the conclusions: second causes between arms, settings a server will change, thin statistics."""
    for name in arms:
        baseline = recipe.baseline_of(name)
        if name == baseline:
            continue
        changed = differences(recipe, name, baseline)
        drafting = [key for key in changed if key in DRAFTING]
        others = [key for key in changed if key not in DRAFTING]
        if drafting and others:
            yield (
                f"arm {name} differs from {baseline} in {', '.join(others)} besides how it drafts: "
                "the speed-up has more than one cause."
            )
    for name in arms:
        spec = recipe.arms[name].speculation
        server = recipe.server_of(recipe.arms[name])
        if spec and server == "sglang" and spec.topk == 1 and spec.positions() != spec.num_steps + 1:
            yield (
                f"arm {name}: with topk 1 SGLang verifies num_steps + 1 = {spec.num_steps + 1} positions, "
                f"whatever num_draft_tokens ({spec.positions()}) says."
            )
    if all(recipe.workloads[name].kind == "random" for name in workloads):
        yield "every workload is random tokens: acceptance will look better or worse than on real prompts."
    if len(recipe.seeds) < 3:
        yield f"{len(recipe.seeds)} seed(s): intervals need at least 2 and mean little below 3."


def _words(value: object) -> str:
    if value is None or value == {}:
        return "none"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return ", ".join(f"{k} {v}" for k, v in dataclasses.asdict(value).items() if v is not None)
    if isinstance(value, dict):
        return ", ".join(f"{k}={v}" for k, v in value.items())
    return str(value)
