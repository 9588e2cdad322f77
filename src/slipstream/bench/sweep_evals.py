"""The evaluations of a sweep: each arm answers the same questions on the server that was just measured."""

import logging
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from slipstream.bench.client import Client
from slipstream.bench.evals.gsm8k import Gsm8kData, load_data, prompts
from slipstream.bench.evals.run import Gsm8kSettings, run_gsm8k
from slipstream.bench.plan import Block, make_launch, server_command
from slipstream.bench.recipe import Recipe
from slipstream.launch.command import Launch
from slipstream.records.evals import Gsm8kRecord
from slipstream.records.schema import SchemaError
from slipstream.records.store import RecordError, read_record, set_aside, sha256_of, write_record

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class EvalTask:
    """GSM8K for one arm on one topology."""

    arm: str
    topology: str
    launch: Launch
    config_sha256: str

    def path(self, out: Path) -> Path:
        """Return where its record lies."""
        return out / "evals" / f"gsm8k.{self.topology}.{self.arm}.json"


def read_questions(recipe: Recipe, folder: Path | None) -> Gsm8kData | None:
    """Return what a recipe asks, if it asks and is given a folder; EvalError if it cannot be asked from there."""
    asked = recipe.evals.gsm8k
    if asked is None or folder is None:
        return None
    data = load_data(folder)
    prompts(data, asked.num_shots, asked.max_tokens, asked.chat, asked.limit)
    return data


def missing_evals(block: Block, recipe: Recipe, out: Path, data: Gsm8kData | None) -> list[EvalTask]:
    """Return the evaluations that this block's servers could run and that have no record under these settings yet."""
    if data is None:
        return []
    tasks: dict[Path, EvalTask] = {}
    for point in block.points:
        sha256 = _config_sha256(point.launch, recipe, data)
        task = EvalTask(point.key.arm, point.key.topology, point.launch, sha256)
        tasks.setdefault(task.path(out), task)
    return [task for path, task in tasks.items() if not _is_done(path, task, recipe, data)]


async def run_eval(task: EvalTask, client: Client, recipe: Recipe, out: Path, data: Path) -> None:
    """Ask every question and write the record."""
    asked = recipe.evals.gsm8k
    assert asked is not None, "only called for a recipe that asks GSM8K"
    settings = Gsm8kSettings(data, asked.num_shots, asked.max_tokens, asked.chat, asked.limit, asked.concurrency)
    record = await run_gsm8k(client, task.arm, settings)
    set_aside(task.path(out))
    write_record(task.path(out), replace(record, config_sha256=task.config_sha256))


def _config_sha256(launch: Launch, recipe: Recipe, data: Gsm8kData) -> str:
    """Identify what is asked of which server, on whatever port."""
    asked = recipe.evals.gsm8k
    assert asked is not None, "there are questions only for a recipe that asks them"
    command = server_command(replace(launch, port=recipe.servers[launch.server].port))
    return sha256_of([asdict(asked), data.sha256, command.argv, command.env, command.image])


def _is_done(path: Path, task: EvalTask, recipe: Recipe, data: Gsm8kData) -> bool:
    if not path.exists():
        return False
    try:
        record = read_record(path)
    except (RecordError, SchemaError) as error:
        log.warning("%s: measured again: %s", path.name, error)
        return False
    # An arm may have a server for each workload; any of them stands for it.
    arm, topology = recipe.arms[task.arm], task.launch.topology
    launches = [make_launch(recipe, arm, topology, workload) for workload in recipe.workloads.values()]
    known = {_config_sha256(launch, recipe, data) for launch in launches}
    if not isinstance(record, Gsm8kRecord) or record.config_sha256 not in known:
        log.warning("%s: measured again: it was measured under other settings", path.name)
        return False
    return True
