"""Reads a recipe file, refusing duplicates, unknown keys and comparisons that cannot be run."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from slipstream.bench.recipe import Arm, Recipe, Workload
from slipstream.checkpoint.embedded import embedded_draft
from slipstream.errors import ConfigError
from slipstream.launch.settings import Topology
from slipstream.records.schema import SchemaError, read
from slipstream.records.store import sha256_of

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_+-]*")


class RecipeError(ConfigError):
    """A recipe cannot be run as written."""


@dataclass(frozen=True)
class LoadedRecipe:
    """A checked recipe, where it came from, and the hash of what it says."""

    recipe: Recipe
    path: Path
    sha256: str


def load_recipe(path: Path, overrides: Sequence[str] = ()) -> LoadedRecipe:
    """Read and check a recipe; `overrides` are `dotted.key=value` pairs (values in YAML) laid over the file first."""
    value = read_yaml(path)
    for override in overrides:
        _override(value, override)
    try:
        recipe = read(Recipe, value, path.name)
    except SchemaError as error:
        raise RecipeError(str(error)) from error
    problems = find_problems(recipe)
    if problems:
        raise RecipeError("\n".join(f"{path.name}: {problem}" for problem in problems))
    return LoadedRecipe(_with_paths(recipe, path.parent), path, sha256_of(value))


def read_yaml(path: Path) -> Any:  # YAML holds anything until the schema has looked at it
    """Read a YAML file in which no key may be given twice."""
    try:
        return yaml.load(path.read_text(encoding="utf-8"), Loader=_StrictLoader)
    except OSError as error:
        raise RecipeError(f"{path}: cannot be read ({error.strerror}).") from error
    except UnicodeDecodeError as error:
        raise RecipeError(f"{path}: is not a text file in UTF-8 ({error}).") from error
    except yaml.YAMLError as error:
        raise RecipeError(f"{path.name}: {' '.join(str(error).split())}") from error


def token_ids_between(text: str) -> tuple[int, int]:
    """Read FIRST:LAST, as options give token ranges."""
    first, separator, last = text.partition(":")
    if not (separator and first.isdigit() and last.isdigit() and int(first) < int(last)):
        raise RecipeError(f"--token-range {text!r}: write it as FIRST:LAST.")
    return int(first), int(last)


def find_problems(recipe: Recipe) -> list[str]:
    """Return everything wrong with a recipe that its parts could not see alone, as sentences."""
    problems = [
        f"{what} {name!r} is not a usable name; use letters, digits, '-', '_' and '+'."
        for what, names in (("arm", recipe.arms), ("workload", recipe.workloads))
        for name in names
        if not NAME.fullmatch(name)
    ]
    if recipe.baseline not in recipe.arms:
        problems.append(f"baseline {recipe.baseline!r} is not an arm; arms are {', '.join(recipe.arms)}.")
    if not recipe.servers:
        return [*problems, "at least one server is needed."]  # whatever follows asks an arm's server
    if not recipe.workloads or not recipe.topologies:
        problems.append("at least one workload and one topology are needed.")
    problems += _list_problems("concurrency", recipe.concurrency, 1)
    problems += _list_problems("seeds", recipe.seeds, 0)
    if recipe.schedule.rounds > max(1, len(recipe.seeds)):
        problems.append(f"{recipe.schedule.rounds} rounds need at least as many seeds; there are {len(recipe.seeds)}.")
    names = [topology.name() for topology in recipe.topologies]
    problems += [f"topology {name} is given twice." for name in sorted({n for n in names if names.count(n) > 1})]
    for topology in recipe.topologies:
        problems += _topology_problems(recipe, topology)
    for name, arm in recipe.arms.items():
        problems += [f"arm {name}: {problem}" for problem in _arm_problems(recipe, arm)]
        if arm.against is not None and (arm.against not in recipe.arms or arm.against == name):
            problems.append(f"arm {name}: 'against' names {arm.against!r}, which is not another arm.")
        for workload_name, workload in recipe.workloads.items():
            problems += _length_problems(recipe, name, arm, workload_name, workload)
    return problems


def context_of(recipe: Recipe, arm: Arm, workload: Workload) -> int | None:
    """Return the context the server is started with, most specific first; None leaves it to the server."""
    for declared in (workload.context, arm.context):
        if declared is not None:
            return declared
    return recipe.servers[recipe.server_of(arm)].context


def _with_paths(recipe: Recipe, folder: Path) -> Recipe:
    """Make paths that begin with a dot lead from the recipe's folder, and "embedded" the draft that ships."""

    def resolve(name: str | None) -> str | None:
        return str((folder / name).resolve()) if name is not None and name.startswith(".") else name

    def draft_path(name: str | None) -> str | None:
        return str(embedded_draft()) if name == "embedded" else resolve(name)

    return replace(
        recipe,
        drafts={key: replace(draft, path=draft_path(draft.path)) for key, draft in recipe.drafts.items()},
        servers={key: replace(server, model=resolve(server.model)) for key, server in recipe.servers.items()},
        workloads={
            key: replace(workload, path=str((folder / workload.path).resolve()) if workload.path else None)
            for key, workload in recipe.workloads.items()
        },
    )


def _list_problems(name: str, values: tuple[int, ...], least: int) -> list[str]:
    problems = [] if values else [f"{name} is empty."]
    if len(set(values)) < len(values):
        problems.append(f"{name} holds a value twice.")
    if any(value < least for value in values):
        problems.append(f"{name} must not go below {least}.")
    return problems


def _topology_problems(recipe: Recipe, topology: Topology) -> list[str]:
    devices = max(1, recipe.machine.gpus) * (1 if recipe.nodes is None else len(recipe.nodes.hosts))
    problems = []
    needed = topology.devices()
    if needed > devices:
        problems.append(f"topology {topology.name()} needs {needed} devices; {recipe.machine.name} has {devices}.")
    for name, arm in recipe.arms.items():
        server = recipe.server_of(arm)
        if server == "vllm" and topology.ep not in (1, topology.tp):
            problems.append(f"arm {name}: vLLM spreads experts over all of tp, so ep is 1 or {topology.tp}.")
        draft_tp = arm.speculation.draft_tp if arm.speculation else None
        if draft_tp not in (None, 1, topology.tp):
            problems.append(f"arm {name}: draft_tp {draft_tp} is neither 1 nor tp {topology.tp}.")
    return problems


def _arm_problems(recipe: Recipe, arm: Arm) -> list[str]:
    if arm.server is None and len(recipe.servers) != 1:
        return [f"says no 'server' and the recipe has {len(recipe.servers)}; name one."]
    server = recipe.server_of(arm)
    if server not in recipe.servers:
        return [f"server {server!r} has no entry under 'servers'."]
    if arm.draft is not None and arm.draft not in recipe.drafts:
        return [f"draft {arm.draft!r} is not among the drafts ({', '.join(recipe.drafts) or 'none'})."]
    spec = arm.speculation
    if spec and server == "vllm" and (spec.topk != 1 or spec.positions() != spec.num_steps + 1):
        return ["vLLM drafts chains only: topk is 1 and num_draft_tokens is num_steps + 1."]
    if spec and spec.draft_tp is not None and server == "sglang":
        return ["draft_tp can be set on vLLM and slipstream only, not on sglang."]
    if server == "slipstream" and (recipe.target.revision or any(t.ep > 1 for t in recipe.topologies)):
        return ["slipstream serve takes neither a target revision nor ep; give a folder, and leave ep out."]
    return []


def _length_problems(recipe: Recipe, arm_name: str, arm: Arm, name: str, workload: Workload) -> list[str]:
    if recipe.server_of(arm) not in recipe.servers:
        return []
    needed = (workload.input_tokens or 0) + workload.output_tokens
    context = context_of(recipe, arm, workload) or recipe.target.context
    problems = []
    if context > recipe.target.context:
        problems.append(
            f"arm {arm_name}, workload {name}: context {context} exceeds the target's {recipe.target.context}."
        )
    if needed > context:
        problems.append(f"arm {arm_name}, workload {name}: {needed} tokens do not fit in a context of {context}.")
    if workload.kind == "random" and recipe.target.token_range is None:
        problems.append(f"workload {name}: random prompts need target.token_range, the token ids to draw from.")
    return problems


def _override(value: Any, override: str) -> None:
    key, separator, text = override.partition("=")
    if not separator:
        raise RecipeError(f"--set {override!r}: write it as dotted.key=value.")
    *parents, last = key.split(".")
    for part in parents:
        if not isinstance(value, dict) or not isinstance(value.setdefault(part, {}), dict):
            raise RecipeError(f"--set {key}: {part!r} is not a mapping in this recipe.")
        value = value[part]
    value[last] = yaml.safe_load(text)


class _StrictLoader(yaml.SafeLoader):
    """SafeLoader that refuses a key given twice, which YAML would settle silently by taking the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, str | int | float) and key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is given twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)
