"""Train variants of a recipe for the same short time each, on the data of a run, and say what each reaches.

    python scripts/train_ablate.py embedded --recipe recipes/train/embedded.yaml --data prompts --work draft-work \
        --seconds 45 --variant train.lr=2e-3 --variant train.unroll=4 --variant draft.vocab_size=8192

The corpus and the evaluation texts are those that `slipstream train` left in its work folder (made if absent). A
variant is one change or several joined by commas; the recipe unchanged is always among them.
"""

import argparse
import copy
import logging
import shutil
import sys
import tempfile
from pathlib import Path

from slipstream.train.corpus import Corpus
from slipstream.train.recipe import change_recipe, read_recipe
from slipstream.train.run import Paths, TrainingRun
from slipstream.train.trainer import Progress
from slipstream.train.world import local_device

log = logging.getLogger("ablate")


def main() -> None:
    """Run every variant."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--recipe", type=Path, required=True)
    parser.add_argument("--data", type=Path, default=Path())
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=45.0, help="training time of each variant")
    parser.add_argument("--variant", action="append", default=[], metavar="SECTION.KEY=VALUE[,...]")
    parser.add_argument("--init-from", type=Path, help="train each variant on from this draft")
    parser.add_argument("--device", default="auto")
    arguments = parser.parse_args()
    paths = Paths(arguments.data, arguments.work)
    run = TrainingRun(arguments.model, read_recipe(arguments.recipe), paths, local_device(arguments.device))
    corpus = run.generate(lambda tally, stats: None)
    run.eval_sets()
    for variant in ["", *arguments.variant]:
        with tempfile.TemporaryDirectory() as folder:
            _train(run, corpus, variant, arguments, Path(folder))


def _train(run: TrainingRun, corpus: Corpus, variant: str, arguments: argparse.Namespace, folder: Path) -> None:
    """Train one variant in a folder of its own and log a line."""
    for texts in run.paths.work.glob("eval-*"):
        shutil.copy(texts, folder)
    changes = [*filter(None, variant.split(",")), f"train.time_budget_s={arguments.seconds}", "train.eval_every=0"]
    changed = copy.copy(run)
    changed.recipe, changed.paths = change_recipe(run.recipe, changes), Paths(run.paths.data, folder)
    draft, vocab = changed.start(corpus, arguments.init_from)
    seen: list[Progress] = []
    changed.train(draft, vocab, corpus, seen.append)
    reached = "  ".join(f"{name} {value:.3f}" for name, value in seen[-1].acceptance.items())
    log.info(
        "%-40s %5d steps  loss %.3f  accuracy %.3f  %s",
        variant or "as it is", seen[-1].step, seen[-1].loss, seen[-1].accuracy[0], reached,
    )  # fmt: skip


if __name__ == "__main__":
    main()
