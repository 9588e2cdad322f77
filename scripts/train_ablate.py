"""Train variants of a recipe for the same short time each, on the data of a run, and say what each reaches.

    python scripts/train_ablate.py embedded --recipe recipes/train/embedded.yaml --data prompts --work draft-work \
        --seconds 45 --log ablations.jsonl --variant train.lr=2e-3 --variant train.unroll=4,train.hard_share=0.3 \
        --variant draft.vocab_size=8192 --variant draft.feedback=pre_norm

The corpus and the evaluation texts are those that `slipstream train` left in its work folder (made if absent). A
variant is one change or several joined by commas; the recipe unchanged is always among them. Each is logged when it
ends, as a JSON line too where a file is named, and all are in one table at the end. With --offline the target runs over
the corpus once for all variants.
"""

import argparse
import copy
import json
import logging
import shutil
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from slipstream.errors import SlipstreamError
from slipstream.train.data.corpus import Corpus
from slipstream.train.draft.capture import CaptureHooks
from slipstream.train.run.phases import Paths, TrainingRun
from slipstream.train.run.recipe import Recipe, change_recipe, read_recipe
from slipstream.train.run.trainer import Progress
from slipstream.train.run.world import local_device

log = logging.getLogger("ablate")
_FIXED = ("data.", "generate.", "files.", "train.target_dtype")


@dataclass(frozen=True)
class Variant:
    """A changed recipe, and the words for what was changed."""

    name: str
    recipe: Recipe


@dataclass(frozen=True)
class Ended:
    """What a variant reached, or why it did not."""

    variant: str
    seconds: float
    coverage: float = 0.0
    progress: Progress | None = None
    error: str | None = None


def main() -> None:
    """Run every variant."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--recipe", type=Path, required=True)
    parser.add_argument("--data", type=Path, default=Path())
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--offline", type=Path, help="folder to store the target's states in, and train from")
    parser.add_argument("--seconds", type=float, default=45.0, help="training time of each variant")
    parser.add_argument("--variant", action="append", default=[], metavar="SECTION.KEY=VALUE[,...]")
    parser.add_argument("--init-from", type=Path, help="train each variant on from this draft")
    parser.add_argument("--log", type=Path, help="file to append a JSON line to for every variant")
    parser.add_argument("--device", default="auto")
    arguments = parser.parse_args()
    recipe = read_recipe(arguments.recipe)
    try:
        variants = [_variant(recipe, text, arguments.seconds) for text in ["", *arguments.variant]]
    except SlipstreamError as error:
        parser.error(str(error))
    run = TrainingRun(
        arguments.model, _roomiest(recipe, variants), Paths(arguments.data, arguments.work),
        local_device(arguments.device),
    )  # fmt: skip
    corpus = run.generate(lambda tally, stats: None)
    run.eval_sets()
    ended = []
    for variant in variants:
        ended.append(_train(run, corpus, variant, arguments))
        _log(ended[-1], variant, run, arguments.log)
    Console().print(_table(ended))


def _variant(recipe: Recipe, text: str, seconds: float) -> Variant:
    """Return a recipe changed; what decides the data must stay, for all variants share it."""
    changes = [change for change in text.split(",") if change]
    if any(change.startswith(_FIXED) for change in changes):
        raise SlipstreamError(
            f"{text}: changes the data or the target, which all variants share; vary draft and train only."
        )
    budget = [f"train.time_budget_s={seconds}", "train.stop_at=null", "train.eval_every=0"]
    return Variant(text or "as it is", change_recipe(recipe, [*changes, *budget]))


def _roomiest(recipe: Recipe, variants: list[Variant]) -> Recipe:
    """Return the recipe with the longest rows and unroll of all, for which the target's tables are made."""
    rows, unroll = (max(getattr(each.recipe.train, key) for each in variants) for key in ("row_length", "unroll"))
    return change_recipe(recipe, [f"train.row_length={rows}", f"train.unroll={unroll}"])


def _train(run: TrainingRun, corpus: Corpus, variant: Variant, arguments: argparse.Namespace) -> Ended:
    """Train one variant in a folder of its own."""
    began = time.monotonic()
    seen: list[Progress] = []
    with tempfile.TemporaryDirectory() as folder:
        for texts in run.paths.work.glob("eval-*"):
            shutil.copy(texts, folder)
        changed = copy.copy(run)
        changed.recipe, changed.paths = variant.recipe, Paths(run.paths.data, Path(folder))
        try:
            draft, vocab = changed.start(corpus, arguments.init_from)
            store = None
            if arguments.offline is not None:
                hooks = CaptureHooks(lambda cost: log.info("offline: %s", cost))
                store = changed.store_features(draft, vocab, corpus, arguments.offline, hooks)
            changed.train(draft, vocab, corpus, seen.append, store=store)
        except SlipstreamError as error:  # the others are still worth their time
            return Ended(variant.name, time.monotonic() - began, error=str(error))
    return Ended(variant.name, time.monotonic() - began, vocab.coverage, seen[-1])


def _log(ended: Ended, variant: Variant, run: TrainingRun, path: Path | None) -> None:
    reached = ended.error or "  ".join(f"{name} {value}" for name, value in _cells(ended).items())
    log.info("%s: %s", ended.variant, reached)
    if path is not None:
        line: dict[str, Any] = {**asdict(ended), "recipe": variant.recipe.as_dict(), "target": run.digest}
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def _cells(ended: Ended) -> dict[str, str]:
    """Return what a table shows of a variant, by heading."""
    if ended.progress is None:
        return {"steps": "failed"}
    progress = ended.progress
    return {
        "steps": str(progress.step),
        "tokens/s": f"{progress.tokens_per_s:,.0f}",
        "coverage": f"{ended.coverage:.2%}",
        "loss": f"{progress.loss:.3f}",
        "accuracy": f"{progress.accuracy[0]:.1%}",
        **{name: f"{value:.3f}" for name, value in progress.acceptance.items()},
    }


def _table(ended: list[Ended]) -> Table:
    """Lay all variants side by side; a loss over another vocabulary or unroll is not the same loss."""
    cells = [_cells(each) for each in ended]
    headings = list(dict.fromkeys(name for row in cells for name in row))
    table = Table("variant", *headings, title="the same time each")
    for each, row in zip(ended, cells, strict=True):
        table.add_row(each.variant, *(row.get(heading, "") for heading in headings))
    return table


if __name__ == "__main__":
    main()
