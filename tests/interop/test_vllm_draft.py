"""vLLM on a CPU loads the shipped draft, as it is and as a P-EAGLE draft, and a DFlash draft that was solved for.

It accepts as much of each as our engine does.
"""

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch

from slipstream.bench.peers.environments import vllm_environment
from slipstream.checkpoint.draft_rewrite import rewrite_draft
from slipstream.checkpoint.embedded import embedded_draft
from slipstream.checkpoint.reader import open_checkpoint
from slipstream.checkpoint.writer import CheckpointWriter
from slipstream.engine.llm import LLM
from slipstream.models.load import load_target
from slipstream.speculation.sampling import SamplingParams
from slipstream.speculation.statistics import AcceptanceStats
from slipstream.speculation.tree import TreeShape
from slipstream.train.data.prompts import read_prompts
from tests.interop.recalled_draft import write_recalled_draft

pytestmark = pytest.mark.interop
HERE = Path(__file__).parent
CHAIN = 3
PROMPTS = read_prompts(HERE.parents[1] / "recipes/bench/prompts/mixed.jsonl")[:20]
GREEDY = SamplingParams(max_tokens=128, temperature=0.0)


@pytest.fixture(scope="module", params=["shipped", "P-EAGLE", "DFlash", "DFlash with a window"])
def for_vllm(request, tmp_path_factory, embedded_folder):
    """The shipped draft written in vLLM's dialect, which counts captured layers otherwise; or a DFlash draft.

    With masks it was never trained for, its first guess of a pass is as good as ever, and the others are bad ones.
    """
    folder = tmp_path_factory.mktemp("draft")
    if request.param.startswith("DFlash"):
        return dflash_draft(folder / "dflash", embedded_folder, 3 if request.param.endswith("window") else None)
    source = open_checkpoint(embedded_draft())
    if request.param == "P-EAGLE":
        with CheckpointWriter(folder / "masked") as writer:
            for name in source.names():
                writer.add(name, source.tensor(name))
            writer.add("mask_hidden", torch.randn(1, 1, 1728, generator=torch.Generator().manual_seed(0)).bfloat16())
            writer.write_json("config.json", {**source.config, "mask_token_id": 28})
        source = open_checkpoint(folder / "masked")
    rewrite_draft(source.folder, "vllm", folder / "vllm")
    return folder / "vllm"


def dflash_draft(folder, target, window):
    """Write a draft that recalls some of the texts; one with a window is blind to the furthest of what it looks at."""
    plain = LLM(target, None, device="cpu", dtype="float32").generate(PROMPTS[:8], GREEDY)
    model = load_target(open_checkpoint(target), torch.float32, torch.device("cpu"))
    write_recalled_draft(folder, model, [[*one.prompt_tokens, *one.token_ids] for one in plain])
    if window is not None:
        config = json.loads((folder / "config.json").read_text())
        changed = {"layer_types": ["sliding_attention"], "sliding_window": window, "use_sliding_window": True}
        (folder / "config.json").write_text(json.dumps(config | changed | {"max_window_layers": 0}))
    return folder


def test_vllm_accepts_a_draft_as_our_engine_does(for_vllm, embedded_folder, tmp_path):
    tree = TreeShape.chain(CHAIN)
    llm = LLM(embedded_folder, for_vllm, tree=tree, device="cpu", dtype="float32", borrowed_tokens=0)  # as vLLM drafts
    ours = llm.generate(PROMPTS, GREEDY)
    stats = AcceptanceStats()
    for completion in ours:
        stats.add(completion.stats)
    asked = tmp_path / "prompts.json"
    asked.write_text(json.dumps([list(completion.prompt_tokens) for completion in ours]))
    script = vllm_environment() / "python", HERE / "vllm_acceptance.py"
    command = [*script, embedded_folder, for_vllm, CHAIN, asked, tmp_path / "result.json"]
    room = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1"}  # GiB; by default it takes what the machine has
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False, env=room)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    theirs = json.loads((tmp_path / "result.json").read_text())
    same = sum(list(mine.token_ids) == other for mine, other in zip(ours, theirs["tokens"], strict=True))
    accepted = 1 + theirs["accepted"] / theirs["drafts"]
    print(theirs["by_position"], stats.accepted)  # noqa: T201
    print(f"ours {stats.acceptance_length:.3f}, vLLM {accepted:.3f}; {same} of {len(ours)} texts equal")  # noqa: T201
    assert theirs["by_position"] == pytest.approx(stats.accepted, rel=0.03, abs=8)
    assert accepted == pytest.approx(stats.acceptance_length, rel=0.03)
    assert same >= 0.8 * len(ours)
