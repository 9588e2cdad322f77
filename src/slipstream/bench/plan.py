"""Expands a recipe into every point it will measure, the server each needs, and the order they run in."""

import dataclasses
import json
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from slipstream.bench.arms import notes_on
from slipstream.bench.recipe import Arm, Recipe, Workload
from slipstream.bench.recipe_file import LoadedRecipe, RecipeError, context_of
from slipstream.bench.reference_client import Load
from slipstream.launch.command import Command, Launch
from slipstream.launch.settings import FlagValue, Topology
from slipstream.launch.spread import spread
from slipstream.records.point import PointKey
from slipstream.records.store import sha256_of


@dataclass(frozen=True)
class Point:
    """One measurement to make."""

    key: PointKey
    launch: Launch
    load: Load
    round: int

    def config(self, recipe: Recipe) -> dict[str, object]:
        """Return the resolved settings, as they go into the record."""
        config = {
            "machine": dataclasses.asdict(recipe.machine),
            "target": dataclasses.asdict(recipe.target),
            "launch": dataclasses.asdict(self.launch),
            "load": dataclasses.asdict(self.load),
            "schedule": dataclasses.asdict(recipe.schedule),
            "timeout_s": recipe.traffic.timeout_s,
        }
        return _plain(config)


@dataclass(frozen=True)
class Block:
    """Servers that run at the same time, and the points measured on them in order."""

    launches: tuple[Launch, ...]
    points: tuple[Point, ...]


@dataclass(frozen=True)
class Plan:
    """The whole sweep; `notes` says what a reader of the results should know beforehand."""

    loaded: LoadedRecipe
    blocks: tuple[Block, ...]
    skipped_arms: dict[str, str]
    notes: tuple[str, ...]

    def points(self) -> Iterator[Point]:
        """Yield every point in the order it runs."""
        for block in self.blocks:
            yield from block.points


def server_command(launch: Launch) -> Command:
    """Render the command that starts a server; over several nodes, the one on its first."""
    return spread(launch).server[0].command


def point_sha256(point: Point, recipe: Recipe) -> str:
    """Identify what a point measures; a record with another hash was measured under other settings."""
    command = server_command(point.launch)
    return sha256_of([point.config(recipe), command.argv, command.env, command.image])


def build_plan(loaded: LoadedRecipe, only_arms: Collection[str] = (), only_workloads: Collection[str] = ()) -> Plan:
    """Expand a recipe; with `only_arms` or `only_workloads`, the part of it that they name."""
    recipe = loaded.recipe
    for wanted, have, what in ((only_arms, recipe.arms, "arm"), (only_workloads, recipe.workloads, "workload")):
        for name in wanted:
            if name not in have:
                raise RecipeError(f"{loaded.path.name}: no {what} {name!r}; there are {', '.join(have)}.")
    chosen = {name: arm for name, arm in recipe.arms.items() if not only_arms or name in only_arms}
    skipped = {name: why for name, arm in chosen.items() if (why := _absent(recipe, arm))}
    arms = [name for name in chosen if name not in skipped]
    workloads = [name for name in recipe.workloads if not only_workloads or name in only_workloads]
    blocks: list[Block] = []
    if recipe.schedule.servers == "together":
        for topology in recipe.topologies:
            blocks.append(_together(recipe, topology, arms, workloads))
    else:
        for round_index in range(recipe.schedule.rounds):
            # Reversed in every other round, so that no arm always has the warmer machine.
            ordered = arms if round_index % 2 == 0 else arms[::-1]
            for topology in recipe.topologies:
                for arm in ordered:
                    blocks += _in_turn(recipe, topology, arm, workloads, round_index)
    return Plan(loaded, tuple(blocks), skipped, tuple(notes_on(recipe, arms, workloads)))


def make_launch(recipe: Recipe, arm: Arm, topology: Topology, workload: Workload, port_offset: int = 0) -> Launch:
    """Lay an arm's and a workload's declarations over the server's common settings."""
    server = recipe.server_of(arm)
    common = recipe.servers[server]
    flags: dict[str, FlagValue] = {**common.flags, **arm.flags, **workload.flags}
    env = {name: value for name, value in {**common.env, **topology.env, **arm.env}.items() if value is not None}
    return Launch(
        server=server,
        program=common.program,
        model=common.model or recipe.target.id,
        revision=recipe.target.revision,
        port=common.port + port_offset,
        host=common.host,
        topology=topology,
        context=context_of(recipe, arm, workload),
        draft=recipe.drafts[arm.draft] if arm.draft else None,
        speculation=arm.speculation,
        flags=flags,
        env=env,
        image=common.image if arm.image is None else arm.image,
        start_timeout_s=common.start_timeout_s,
        nodes=recipe.nodes,
    )


def _together(recipe: Recipe, topology: Topology, arms: list[str], workloads: list[str]) -> Block:
    launches: dict[tuple[str, str], Launch] = {}
    ports: dict[str, int] = {}
    for arm in arms:
        for workload in workloads:
            launch = make_launch(recipe, recipe.arms[arm], topology, recipe.workloads[workload])
            offset = ports.setdefault(server_command(launch).sha256(), len(ports))
            launches[arm, workload] = dataclasses.replace(launch, port=launch.port + offset)
    points: list[Point] = []
    for round_index, seed in enumerate(recipe.seeds):
        for workload in workloads:
            for concurrency in recipe.concurrency:
                shift = len(points) // max(1, len(arms)) % max(1, len(arms))
                for arm in arms[shift:] + arms[:shift]:
                    key = PointKey(arm, topology.name(), workload, concurrency, seed)
                    points.append(_point(recipe, key, launches[arm, workload], round_index))
    unique = {server_command(launch).sha256(): launch for launch in launches.values()}
    return Block(tuple(unique.values()), tuple(points))


def _in_turn(recipe: Recipe, topology: Topology, arm: str, workloads: list[str], round_index: int) -> Iterator[Block]:
    seeds = recipe.seeds[round_index :: recipe.schedule.rounds]
    by_server: dict[str, list[Point]] = {}
    for workload in workloads:
        launch = make_launch(recipe, recipe.arms[arm], topology, recipe.workloads[workload])
        group = by_server.setdefault(server_command(launch).sha256(), [])
        for seed in seeds:
            for concurrency in recipe.concurrency:
                key = PointKey(arm, topology.name(), workload, concurrency, seed)
                group.append(_point(recipe, key, launch, round_index))
    for points in by_server.values():
        yield Block((points[0].launch,), tuple(points))


def _point(recipe: Recipe, key: PointKey, launch: Launch, round_index: int) -> Point:
    load = Load(
        workload=recipe.workloads[key.workload],
        concurrency=key.concurrency,
        num_requests=recipe.traffic.num_requests(key.concurrency),
        num_warmups=recipe.traffic.warmups_per_stream * key.concurrency,
        seed=key.seed,
        request_rate=recipe.traffic.request_rate,
    )
    return Point(key, launch, load, round_index)


def _absent(recipe: Recipe, arm: Arm) -> str:
    """Say why an optional arm cannot run here, or nothing when it can."""
    draft = recipe.drafts.get(arm.draft or "")
    if not arm.optional or draft is None or draft.path is None:
        return ""
    if Path(draft.path).expanduser().exists():
        return ""
    return f"draft {draft.id} is not at {draft.path}"


def _plain(value: object) -> dict[str, object]:
    """Return the value as JSON would give it back, so that a record equals itself after a round trip."""
    plain = json.loads(json.dumps(value))
    assert isinstance(plain, dict), "a point's settings are a mapping"
    return plain
