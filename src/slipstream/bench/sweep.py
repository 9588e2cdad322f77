"""Runs a plan: starts servers, measures their points, writes every record at once, and goes on after failures."""

import logging
import platform
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol

import aiohttp

from slipstream import __version__
from slipstream.bench.client import Client, ServerError, open_session
from slipstream.bench.container import Images, in_container
from slipstream.bench.evals.gsm8k import EvalError
from slipstream.bench.hardware import find_hardware
from slipstream.bench.measure import Measurement, measure_point
from slipstream.bench.plan import Block, Plan, Point, point_sha256, server_command
from slipstream.bench.recipe_file import RecipeError
from slipstream.bench.sweep_evals import EvalTask, missing_evals, read_questions, run_eval
from slipstream.launch import SERVERS
from slipstream.launch.command import Command, Launch
from slipstream.launch.process import LaunchError
from slipstream.launch.server import Server
from slipstream.records.point import Hardware, PointRecord, Provenance
from slipstream.records.schema import SchemaError
from slipstream.records.store import RecordError, read_record, set_aside, write_record

log = logging.getLogger(__name__)

DEATH_S = 1.0
"""How long a process may take to be seen dead after its connections broke."""


class Watcher(Protocol):
    """Is told how the sweep goes."""

    def sweep_started(self, points: Sequence[Point]) -> None:
        """Say which points will be measured."""
        ...

    def point_started(self, point: Point, number: int, total: int) -> None:
        """Say that a point begins."""
        ...

    def request_done(self) -> None:
        """Say that one request of the current point is finished."""
        ...

    def point_finished(self, record: PointRecord) -> None:
        """Say how the point came out."""
        ...

    def server_starting(self, launch: Launch, log_file: Path) -> None:
        """Say that a server is being started."""
        ...


@dataclass(frozen=True)
class RunOptions:
    """Where results go, and what runs already.

    Args:
        url: measure the server at this address instead of starting one.
        gsm8k_data: folder with the questions, for recipes that ask them.
        keep_going: measure the other arms where one arm's server cannot be started.
        images: run servers in their images, or say that this program runs in the one there is; None uses no image.
    """

    out: Path
    url: str | None = None
    gsm8k_data: Path | None = None
    keep_going: bool = False
    images: Images | None = None

    def command(self, launch: Launch) -> Command:
        """Return what is really run for a launch; it names an image only if that is where it runs."""
        return self.placed(server_command(launch), launch)

    def placed(self, command: Command, launch: Launch) -> Command:
        """Return a server's command as it is run: as it is, or in its image."""
        if self.url is not None or self.images is None:
            return replace(command, image="")
        return command if self.images == "inside" else in_container(command, launch, self.images)


@dataclass(frozen=True)
class RunSummary:
    """How a sweep ended; `failed_evals` says which evaluations did not finish and why, `stopped` why it ended early."""

    measured: int
    invalid: int
    skipped: int
    failed_evals: tuple[str, ...] = ()
    stopped: str = ""


async def run_plan(plan: Plan, options: RunOptions, watcher: Watcher) -> RunSummary:
    """Measure every point that has no valid record yet.

    Before anything is started, ServerError if there is no server at `options.url`, EvalError if there are no questions
    at `options.gsm8k_data`.
    """
    _check_images(plan, options)
    pending = {point.key: point for point in plan.points() if not _is_done(point, plan, options.out)}
    questions = read_questions(plan.loaded.recipe, options.gsm8k_data)
    total = sum(1 for _ in plan.points())
    sweep = _Sweep(plan, options, watcher, len(pending))
    watcher.sweep_started(list(pending.values()))
    async with open_session() as session:
        for block in plan.blocks:
            todo = [point for point in block.points if point.key in pending]
            evals = missing_evals(block, plan.loaded.recipe, options.out, questions)
            if not todo and not evals:
                continue
            if options.url is not None and not sweep.measured:
                await _check_server(session, options.url)
            await sweep.run_block(session, block, todo, evals)
            if sweep.stopped:
                break
    return RunSummary(sweep.measured, sweep.invalid, total - len(pending), tuple(sweep.failed_evals), sweep.stopped)


def record_path(out: Path, point: Point) -> Path:
    """Return where a point's record lies."""
    return out / "points" / point.key.file_name()


class _Sweep:
    def __init__(self, plan: Plan, options: RunOptions, watcher: Watcher, total: int) -> None:
        self._plan = plan
        self._options = options
        self._watcher = watcher
        self._total = total
        self._hardware = find_hardware()
        self.measured = 0
        self.invalid = 0
        self.failed_evals: list[str] = []
        self.stopped = ""

    async def run_block(
        self, session: aiohttp.ClientSession, block: Block, todo: list[Point], evals: list[EvalTask]
    ) -> None:
        """Measure points on the servers of one block; a server that died is started again for the next point."""
        wanted = [point.launch for point in todo] + [task.launch for task in evals]
        needed = {server_command(launch).sha256() for launch in wanted}
        launches = {server_command(launch).sha256(): launch for launch in block.launches}
        async with AsyncExitStack() as stack:
            servers = {sha: _Server(launches[sha], self._options, self._watcher) for sha in launches if sha in needed}
            for server in servers.values():
                stack.push_async_callback(server.stop)
            for point in todo:
                await self._run_point(session, servers[server_command(point.launch).sha256()], point)
                if self.stopped:
                    return
            for task in evals:
                await self._run_eval(session, servers[server_command(task.launch).sha256()], task)

    async def _run_eval(self, session: aiohttp.ClientSession, server: "_Server", task: EvalTask) -> None:
        assert self._options.gsm8k_data is not None, "tasks are only made when there are questions"
        try:
            client, _ = await server.ensure(session)
            await run_eval(task, client, self._plan.loaded.recipe, self._options.out, self._options.gsm8k_data)
        except (LaunchError, ServerError, EvalError) as error:
            self.failed_evals.append(f"gsm8k on {task.arm}, {task.topology}: {error}")

    async def _run_point(self, session: aiohttp.ClientSession, server: "_Server", point: Point) -> None:
        number = self.measured + 1
        started = _now()
        versions: dict[str, str] = {}
        try:
            client, server_version = await server.ensure(session)
            versions["server"] = server_version
            self._watcher.point_started(point, number, self._total)
            result = await measure_point(client, point, self._plan.loaded.recipe, self._watcher.request_done)
            death = await server.death() if result.reasons else ""
            if death:
                result = Measurement(reasons=(death, *result.reasons), requests=result.requests)
        except (LaunchError, ServerError) as error:
            self._watcher.point_started(point, number, self._total)
            result = Measurement(reasons=(str(error),))
            if isinstance(error, LaunchError) and not self._options.keep_going:
                self.stopped = f"the server of arm {point.key.arm} cannot be started: {error}"
        record = _record(
            self._plan, point, result, _Context(started, versions, self._hardware, server.url, self._options)
        )
        path = record_path(self._options.out, point)
        set_aside(path)
        write_record(path, record)
        self.measured += 1
        self.invalid += record.status == "invalid"
        self._watcher.point_finished(record)


class _Server:
    """A server of the current block: started when first needed, started again after a death, not after two."""

    def __init__(self, launch: Launch, options: RunOptions, watcher: Watcher) -> None:
        self._launch = launch
        self._options = options
        self._watcher = watcher
        self._process: Server | None = None
        self._connection: tuple[Client, str] | None = None
        self._failed_starts = 0
        self.url = options.url or launch.url()

    async def ensure(self, session: aiohttp.ClientSession) -> tuple[Client, str]:
        """Return a client for a healthy server and the server's version."""
        if self._process is not None and not self._process.is_alive():
            await self.stop()
        if self._connection is None:
            if self._options.url is None:
                await self._start()
            client = await Client.connect(session, self.url)
            self._connection = (client, await _version(client, self._launch))
        return self._connection

    async def death(self) -> str:
        """Describe how the server died during a point; empty while it lives."""
        return await self._process.death_within(DEATH_S) if self._process is not None else ""

    async def stop(self) -> None:
        """Stop the server if one was started here."""
        process, self._process, self._connection = self._process, None, None
        if process is not None:
            await process.stop()

    async def _start(self) -> None:
        if self._failed_starts >= 2:
            raise LaunchError("the server failed to start twice; its remaining points are not tried in this run")
        command = self._options.command(self._launch)
        log_file = self._options.out / "logs" / f"{self._launch.server}-{command.sha256()[:12]}.log"
        self._watcher.server_starting(self._launch, log_file)
        self._failed_starts += 1
        self._process = await Server.start(
            self._launch, log_file, lambda command: self._options.placed(command, self._launch)
        )
        try:
            await self._process.wait_healthy(self._launch.start_timeout_s)
        except LaunchError:
            await self.stop()
            raise
        self._failed_starts = 0


@dataclass(frozen=True)
class _Context:
    started_at: str
    versions: dict[str, str]
    hardware: Hardware
    url: str
    options: RunOptions


def _record(plan: Plan, point: Point, result: Measurement, context: _Context) -> PointRecord:
    recipe = plan.loaded.recipe
    command = context.options.command(point.launch)
    absent = (
        f"the recipe's image was not used: {point.launch.image}" if point.launch.image and not command.image else ""
    )
    provenance = Provenance(
        recipe=recipe.name,
        recipe_sha256=plan.loaded.sha256,
        config=point.config(recipe),
        config_sha256=point_sha256(point, recipe),
        argv=command.argv,
        env=command.env,
        image=command.image,
        url=context.url,
        versions={"slipstream": __version__, "python": platform.python_version(), **context.versions},
        hardware=context.hardware,
        started_at=context.started_at,
        finished_at=_now(),
    )
    good = [request for request in result.requests if request.error is None]
    return PointRecord(
        key=point.key,
        baseline_arm=recipe.baseline_of(point.key.arm),
        status="invalid" if result.reasons else "valid",
        num_devices=point.launch.topology.devices(),
        provenance=provenance,
        input_tokens=round(sum(r.input_tokens for r in good) / len(good)) if good else 0,
        output_tokens=point.load.workload.output_tokens,
        reasons=result.reasons,
        warnings=(*result.warnings, *([absent] if absent else [])),
        num_requests=point.load.num_requests,
        num_failed=sum(request.error is not None for request in result.requests),
        throughput=result.throughput,
        latency=result.latency,
        acceptance=result.acceptance,
        phases=result.phases,
        repetition=result.repetition,
        requests=result.requests,
    )


def _is_done(point: Point, plan: Plan, out: Path) -> bool:
    path = record_path(out, point)
    if not path.exists():
        return False
    try:
        record = read_record(path)
    except (RecordError, SchemaError) as error:
        log.warning("%s: measured again: %s", path.name, error)
        return False
    if not isinstance(record, PointRecord) or record.status == "invalid":
        return False
    if record.provenance.config_sha256 != point_sha256(point, plan.loaded.recipe):
        log.warning("%s: measured again: it was measured under other settings", path.name)
        return False
    return True


def _check_images(plan: Plan, options: RunOptions) -> None:
    images = sorted({point.launch.image for point in plan.points()})
    if options.url is None and options.images not in ("docker", "podman") and len(images) > 1:
        raise RecipeError(
            f"the arms need different images ({', '.join(image or 'none' for image in images)}), and one environment "
            "is only one of them. Start containers of them with --images docker (or podman), or run each inside its "
            "image with --arm and --images inside; the records of all go into the same folder."
        )
    if options.images in ("docker", "podman") and any(point.launch.nodes is not None for point in plan.points()):
        raise RecipeError(
            f"--images {options.images} starts containers on this machine only, and the recipe names nodes. Start "
            "the benchmark inside the image on every node, with --images inside."
        )
    arms = sorted({point.key.arm for point in plan.points()})
    if options.url is not None and len(arms) != 1:
        raise RecipeError(f"--url measures one server, so name its arm with --arm (one of {', '.join(arms)}).")


async def _check_server(session: aiohttp.ClientSession, url: str) -> None:
    """Refuse an address where no server answers, before records say of every point that it failed."""
    try:
        await Client.connect(session, url)
    except ServerError as error:
        raise ServerError(
            f"{error} Nothing was measured or written: start the server first and wait until it is ready, or leave "
            "--url out, and the recipe's own server is started."
        ) from error


async def _version(client: Client, launch: Launch) -> str:
    kind = SERVERS[launch.server]
    try:
        return kind.version(await client.get_json(kind.version_path))
    except ServerError:
        return f"{launch.server} unknown"


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
