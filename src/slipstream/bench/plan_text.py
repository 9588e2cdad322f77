"""Prints a plan: every server with its exact command and environment, every point, and how to check it elsewhere."""

from collections.abc import Iterator

from slipstream.bench.arms import differences
from slipstream.bench.plan import Plan, Point, server_command
from slipstream.bench.reference_client import reference_client
from slipstream.launch.command import shell_line


def plan_text(plan: Plan) -> str:
    """Return the whole plan as text for a person."""
    return "\n".join([*_heading(plan), *_arms(plan), *_blocks(plan)]) + "\n"


def plan_rows(plan: Plan) -> list[dict[str, object]]:
    """Return every point with its commands as plain values, for a program."""
    rows: list[dict[str, object]] = []
    for point in plan.points():
        command = server_command(point.launch)
        client = reference_client(point.launch, point.load)
        rows.append(
            {
                "arm": point.key.arm,
                "topology": point.key.topology,
                "workload": point.key.workload,
                "concurrency": point.key.concurrency,
                "seed": point.key.seed,
                "requests": point.load.num_requests,
                "warmups": point.load.num_warmups,
                "image": command.image,
                "env": command.env,
                "argv": list(command.argv),
                "reference_client": list(client.argv),
            }
        )
    return rows


def _heading(plan: Plan) -> Iterator[str]:
    recipe = plan.loaded.recipe
    points = list(plan.points())
    starts = sum(len(block.launches) for block in plan.blocks)
    yield f"{recipe.name}: {recipe.about}"
    yield f"{len(points)} points on {recipe.machine.name}, {starts} server starts, arms {recipe.schedule.servers}"
    if recipe.source:
        yield f"source: {recipe.source}"
    for arm, why in plan.skipped_arms.items():
        yield f"left out: arm {arm}, because {why}"
    for note in plan.notes:
        yield f"note: {note}"


def _arms(plan: Plan) -> Iterator[str]:
    recipe = plan.loaded.recipe
    yield ""
    yield f"arms, as they differ from what they are compared with (baseline: {recipe.baseline}):"
    for name in recipe.arms:
        other = recipe.baseline_of(name)
        if name != other:
            changes = "; ".join(f"{key}: {change}" for key, change in differences(recipe, name, other).items())
            yield f"  {name} against {other}: {changes or 'in nothing'}"


def _blocks(plan: Plan) -> Iterator[str]:
    shown: set[str] = set()
    numbers: dict[str, int] = {}
    for block in plan.blocks:
        for launch in block.launches:
            command = server_command(launch)
            number = numbers.setdefault(command.sha256(), len(numbers) + 1)
            yield ""
            yield f"[server {number}] {launch.server} {launch.topology.name()}"
            if command.sha256() in shown:
                yield "  as above, started again"
                continue
            shown.add(command.sha256())
            yield from (f"  {line}" for line in ([f"# image: {command.image}"] if command.image else []))
            yield from (f"  {line}" for line in command.shell().splitlines())
        yield "  points:"
        clients: dict[str, Point] = {}
        for point in block.points:
            number = numbers[server_command(point.launch).sha256()]
            yield (
                f"    [{number}] {point.key.arm} {point.key.topology} {point.key.workload} "
                f"concurrency {point.key.concurrency} seed {point.key.seed}: "
                f"{point.load.num_requests} requests after {point.load.num_warmups} warm-ups"
            )
            clients.setdefault(f"{number} {point.key.workload} {point.key.concurrency}", point)
        yield "  the same with the server's own benchmark client (first seed of each):"
        for point in clients.values():
            client = reference_client(point.launch, point.load)
            yield f"    {shell_line(client.argv).replace(chr(92) + chr(10) + '    ', '')}"
