"""Tokens a second of writing training data: all prompts of a recipe answered once, by the embedded model.

    PYTHONPATH=src python benchmarks/train_data.py
    PYTHONPATH=/another/checkout/src python benchmarks/train_data.py

Run it in turns with another checkout to compare the two on one machine. Every text is written to its end, so that both
count the same work.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path

import torch

from slipstream.train.run.phases import Paths, TrainingRun
from slipstream.train.run.recipe import read_recipe

ROOT = Path(__file__).parents[1]


def main() -> None:
    """Write the texts and print a line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--recipe", type=Path, default=ROOT / "recipes/train/data-speed.yaml")
    parser.add_argument("--data", type=Path, default=ROOT / "src/slipstream/train/data/prompt_sets")
    parser.add_argument("--device", default="cpu")
    asked = parser.parse_args()
    recipe = read_recipe(asked.recipe)
    with tempfile.TemporaryDirectory() as work:
        run = TrainingRun(asked.model, recipe, Paths(asked.data, Path(work)), torch.device(asked.device))
        seen = []
        busy = time.process_time()
        run.generate(lambda tally, stats: seen.append(stats))
        busy = time.process_time() - busy
    last = seen[-1]
    print(
        json.dumps(
            {
                "texts": last.texts, "tokens": last.tokens, "seconds": round(last.seconds, 2),
                "tokens_per_s": round(last.tokens_per_s, 1), "cpu_s": round(busy, 1),
                "threads": torch.get_num_threads(),
            }
        )
    )  # fmt: skip


if __name__ == "__main__":
    main()
