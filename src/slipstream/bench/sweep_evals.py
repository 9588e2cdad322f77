"""The evaluations of a sweep: each arm answers the same questions on the server that was just measured."""

from dataclasses import dataclass
from pathlib import Path

from slipstream.bench.client import Client
from slipstream.bench.evals.run import Gsm8kSettings, run_gsm8k
from slipstream.bench.plan import Block
from slipstream.bench.recipe import Recipe
from slipstream.launch.command import Launch
from slipstream.records.store import write_record


@dataclass(frozen=True)
class EvalTask:
    """GSM8K for one arm on one topology."""

    arm: str
    topology: str
    launch: Launch

    def path(self, out: Path) -> Path:
        """Return where its record lies."""
        return out / "evals" / f"gsm8k.{self.topology}.{self.arm}.json"


def missing_evals(block: Block, recipe: Recipe, out: Path, data: Path | None) -> list[EvalTask]:
    """Return the evaluations that this block's servers could run and that have no record yet."""
    if recipe.evals.gsm8k is None or data is None:
        return []
    tasks: dict[Path, EvalTask] = {}
    for point in block.points:
        task = EvalTask(point.key.arm, point.key.topology, point.launch)
        tasks.setdefault(task.path(out), task)
    return [task for path, task in tasks.items() if not path.exists()]


async def run_eval(task: EvalTask, client: Client, recipe: Recipe, out: Path, data: Path) -> None:
    """Ask every question and write the record."""
    asked = recipe.evals.gsm8k
    assert asked is not None, "only called for a recipe that asks GSM8K"
    settings = Gsm8kSettings(data, asked.num_shots, asked.max_tokens, asked.chat, asked.limit, asked.concurrency)
    write_record(task.path(out), await run_gsm8k(client, task.arm, settings))
