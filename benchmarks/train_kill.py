"""Kill `slipstream train` at random moments, take it up again, and compare the draft with that of an undisturbed run.

    PYTHONPATH=src python benchmarks/train_kill.py --out FOLDER [--time-budget-s 600] [--kills 3] [--seed 0]

The undisturbed run makes the plan; the other gets a copy of it, is killed (SIGKILL) at moments drawn over the time the
first took, and must end with the same bytes. Further arguments go to `slipstream train`, after `--`.
"""

import argparse
import hashlib
import json
import random
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path


def main() -> int:
    """Run both, print a line of JSON, and say by the exit status whether the drafts are the same."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--time-budget-s", default="600")
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("more", nargs="*")
    asked = parser.parse_args()
    command = [sys.executable, "-c", "from slipstream.cli.main import app; app()", "train", asked.model]
    command += ["--time-budget-s", asked.time_budget_s, *asked.more, "--out"]
    begun = time.monotonic()
    subprocess.run([*command, str(asked.out / "whole")], check=True)
    whole_s = time.monotonic() - begun
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    (asked.out / "killed-work").mkdir(parents=True)
    shutil.copy(asked.out / "whole-work" / "plan.json", asked.out / "killed-work")
    draw = random.Random(asked.seed)
    lives = []
    for _ in range(asked.kills):
        lives.append(round(draw.uniform(0.05, 0.6) * whole_s, 1))
        process = subprocess.Popen([*command, str(asked.out / "killed")])
        try:
            process.wait(lives[-1])
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    subprocess.run([*command, str(asked.out / "killed")], check=True)
    digests = [_digest(asked.out / name) for name in ("whole", "killed")]
    found = {"seconds": round(whole_s, 1), "peak_gb": round(peak / 1e6, 2), "killed_after_s": lives, "sha256": digests}
    print(json.dumps({**found, "same": digests[0] == digests[1]}))
    return int(digests[0] != digests[1])


def _digest(folder: Path) -> str:
    """Return the hash of a draft's weights, whatever the number of files they are in."""
    files = sorted(folder.glob("model*.safetensors"))
    return hashlib.sha256(b"".join(path.name.encode() + path.read_bytes() for path in files)).hexdigest()


if __name__ == "__main__":
    sys.exit(main())
