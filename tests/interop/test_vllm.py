"""vLLM on a CPU serves the embedded model under our launcher, and its own benchmark agrees with our client."""

import asyncio
import json
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from slipstream.bench.client import Client, open_session
from slipstream.bench.launch.process import ServerProcess
from slipstream.bench.measure import measure_point
from slipstream.bench.peers.environments import vllm_environment
from slipstream.bench.plan import build_plan, server_command
from slipstream.bench.recipe_file import load_recipe
from slipstream.bench.sweep import RunOptions, run_plan
from slipstream.records.store import read_records
from tests.bench.test_sweep import Quiet, free_port
from tests.bench.test_verbs import call

pytestmark = pytest.mark.interop
SLIPSTREAM = "from slipstream.cli.main import main; main()"
RECIPE = Path(__file__).parents[2] / "recipes/bench/embedded-vllm.yaml"


def model():
    embedded = pytest.importorskip("slipstream.checkpoint.embedded")
    return embedded.embedded_model()


@pytest.fixture
def settings():
    """Overrides that make the shipped recipe small and point it at the environment with vLLM."""
    return [
        f"servers.vllm.program=[{vllm_environment() / 'vllm'}, serve]",
        f"servers.vllm.model={model()}",
        f"servers.vllm.port={free_port()}",
        f"servers.slipstream.program=[{sys.executable}, -c, {SLIPSTREAM!r}, serve]",
        f"servers.slipstream.port={free_port()}",
        "concurrency=[1, 4]",
        "seeds=[1, 2]",
        "schedule.rounds=1",
    ]


def test_the_shipped_recipe_measures_vllm_arm_by_arm(settings, tmp_path):
    plan = build_plan(load_recipe(RECIPE, settings))
    arms = sorted({p.key.arm for p in plan.points() if p.launch.server == "vllm"})
    assert "vllm-no-spec" in arms and "vllm-ngram" in arms
    options = RunOptions(tmp_path)
    asyncio.run(run_plan(build_plan(plan.loaded, arms), options, Quiet()))
    records = read_records([tmp_path / "points"]).points
    assert {record.key.arm for record in records} == set(arms)
    assert [record.reasons for record in records if record.status == "invalid"] == []
    assert all(record.provenance.versions["server"].startswith("vllm 0.") for record in records)
    assert all((record.acceptance is not None) == ("no-spec" not in record.key.arm) for record in records)
    made = call("report", tmp_path)
    assert made.exit_code == 0, made.output


@pytest.mark.parametrize("arm", ["vllm-no-spec", "no-spec", "ngram"])
def test_vllm_bench_serve_agrees_with_our_client_on_the_same_server(settings, tmp_path, arm):
    if not arm.startswith("vllm"):
        pytest.importorskip("slipstream.cli.serve")
    plan = build_plan(load_recipe(RECIPE, settings), [arm], ["chat"])
    point = next(p for p in plan.points() if p.key.concurrency == 4)

    async def both():
        async with open_session() as session:
            url = point.launch.url()
            log = tmp_path / "vllm.log"
            server = await ServerProcess.start(server_command(point.launch), url, log)
            try:
                await server.wait_healthy(session, "/health", 600)
                client = await Client.connect(session, url)
                ours, theirs = [], []
                await measure_point(client, point, plan.loaded.recipe)
                for seed in range(3):  # alternating, so that a drift of the machine meets both
                    result = await measure_point(client, point, plan.loaded.recipe)
                    assert result.reasons == ()
                    ours.append((result.latency.tpot_ms.mean, result.throughput.output_tok_s))
                    result = tmp_path / f"{seed}.json"
                    theirs.append(await asyncio.to_thread(vllm_bench, point, client.model, result))
                return ours, theirs
            finally:
                await server.stop()

    ours, theirs = asyncio.run(both())
    for index, name in enumerate(("TPOT", "throughput")):
        mine, other = (statistics.median(row[index] for row in rows) for rows in (ours, theirs))
        assert mine == pytest.approx(other, rel=0.05), name


def vllm_bench(point, served_name, result):
    """Run the other client with the same number of equally long requests; return its mean TPOT and throughput."""
    prompts = result.with_suffix(".jsonl")
    lines = Path(point.load.workload.path).read_text().splitlines()
    prompts.write_text("".join(line + "\n" for line in lines))
    command = [
        vllm_environment() / "vllm", "bench", "serve", "--backend", "openai-chat", "--endpoint", "/v1/chat/completions",
        "--base-url", point.launch.url(), "--model", served_name, "--tokenizer", model(), "--dataset-name", "custom",
        "--dataset-path", prompts, "--custom-output-len", point.load.workload.output_tokens,
        "--skip-chat-template", "--num-prompts", point.load.num_requests,
        "--max-concurrency", point.load.concurrency, "--ignore-eos", "--temperature", "0",
        "--save-result", "--result-dir", result.parent, "--result-filename", result.name, "--disable-tqdm",
    ]  # fmt: skip
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    content = json.loads(result.read_text())
    return content["mean_tpot_ms"], content["output_throughput"]
