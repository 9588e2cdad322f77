"""vLLM on a CPU serves the embedded model under our launcher, and its own benchmark agrees with our client."""

import asyncio
import json
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from slipstream.bench.client import Client, open_session
from slipstream.bench.measure import make_prompts, measure_point
from slipstream.bench.peers.environments import vllm_environment
from slipstream.bench.plan import build_plan
from slipstream.bench.recipe_file import load_recipe
from slipstream.bench.sweep import RunOptions, run_plan
from slipstream.checkpoint.embedded_folder import embedded_folder
from slipstream.cli.peers import vllm_settings
from slipstream.launch.server import Server
from slipstream.records.store import read_records
from tests.bench.quiet import Quiet
from tests.bench.verbs import call
from tests.ports import free_port

pytestmark = [pytest.mark.interop, pytest.mark.embedded]
SLIPSTREAM = "from slipstream.cli.main import main; main()"
RECIPE = Path(__file__).parents[2] / "recipes/bench/embedded-vllm.yaml"
ROUNDS = 7


@pytest.fixture
def settings():
    """Overrides that point the shipped recipe at the environment with vLLM, and its ports at free ones."""
    return [
        *(f"{key}={value}" for key, value in vllm_settings().items()),
        f"servers.vllm.port={free_port()}",
        f"servers.slipstream.program=[{sys.executable}, -c, {SLIPSTREAM!r}, serve]",
        f"servers.slipstream.port={free_port()}",
    ]


def test_the_shipped_recipe_measures_vllm_beside_slipstream_arm_by_arm_in_one_report(settings, tmp_path):
    plan = build_plan(load_recipe(RECIPE, [*settings, "seeds=[1, 2]", "workloads.chat.output_tokens=24"]))
    asyncio.run(run_plan(plan, RunOptions(tmp_path), Quiet()))
    records = read_records([tmp_path / "points"]).points
    assert [record.reasons for record in records if record.status == "invalid"] == []
    assert {record.key.arm for record in records} == {"no-spec", "eagle3", "vllm-no-spec", "vllm-eagle3"}
    for record in records:
        name = "vllm 0." if record.key.arm.startswith("vllm") else "slipstream "
        assert record.provenance.versions["server"].startswith(name)
        assert (record.acceptance is not None) == (not record.key.arm.endswith("no-spec"))
    lengths = {
        arm: statistics.mean(r.acceptance.length for r in records if r.key.arm == arm)
        for arm in ("eagle3", "vllm-eagle3")
    }
    assert lengths["vllm-eagle3"] == pytest.approx(lengths["eagle3"], rel=0.1)  # one draft, two engines and roundings
    made = call("report", tmp_path, "--out", tmp_path / "report")
    assert made.exit_code == 0, made.output
    page = (tmp_path / "report/report.html").read_text()
    assert "vllm-eagle3" in page and "eagle3" in page


@pytest.mark.parametrize("arm", ["no-spec", "eagle3", "vllm-no-spec"])
def test_vllm_bench_serve_agrees_with_our_client_on_the_same_server(settings, tmp_path, arm):
    """The two clients take turns, each first in every other round; a round's ratio sees the same prompts and moment."""
    recipe = load_recipe(RECIPE, [*settings, "concurrency=[4]", "traffic.requests_per_stream=6"])
    plan = build_plan(recipe, [arm], ["chat"])
    point = next(iter(plan.points()))

    async def take_turns():
        async with open_session() as session:
            url = point.launch.url()
            server = await Server.start(point.launch, tmp_path / "server.log")
            try:
                await server.wait_healthy(600)
                client = await Client.connect(session, url)
                prompts = await make_prompts(client, point.load, recipe.recipe.target.token_range)
                given = tmp_path / "prompts.jsonl"
                given.write_text("".join(json.dumps({"prompt": p.messages[0].content}) + "\n" for p in prompts))

                async def ours():
                    result = await measure_point(client, point, recipe.recipe)
                    assert result.reasons == ()
                    return result.latency.tpot_ms.mean, result.throughput.output_tok_s

                def theirs():
                    return asyncio.to_thread(vllm_bench, point, client.model, given)

                rounds = []
                for number in range(ROUNDS):
                    if number % 2:
                        other, mine = await theirs(), await ours()
                    else:
                        mine, other = await ours(), await theirs()
                    rounds.append((mine, other))
                return rounds
            finally:
                await server.stop()

    rounds = asyncio.run(take_turns())
    for index, name in enumerate(("TPOT", "throughput")):
        ratios = [mine[index] / other[index] for mine, other in rounds]
        print(f"{arm}: our {name} to theirs, by round:", " ".join(f"{ratio:.3f}" for ratio in ratios))  # noqa: T201
        assert statistics.median(ratios) == pytest.approx(1, rel=0.05), name


def vllm_bench(point, served_name, prompts):
    """Send the same prompts, in the same order and as many at once, by the other client; return TPOT and throughput."""
    result = prompts.with_name("result.json")
    command = [
        vllm_environment() / "vllm", "bench", "serve", "--backend", "openai-chat", "--endpoint", "/v1/chat/completions",
        "--base-url", point.launch.url(), "--model", served_name, "--tokenizer", embedded_folder(),
        "--dataset-name", "custom", "--dataset-path", prompts, "--disable-shuffle",
        "--custom-output-len", point.load.workload.output_tokens, "--skip-chat-template",
        "--num-prompts", point.load.num_requests, "--num-warmups", point.load.num_warmups,
        "--max-concurrency", point.load.concurrency, "--ignore-eos", "--temperature", "0",
        "--save-result", "--result-dir", result.parent, "--result-filename", result.name, "--disable-tqdm",
    ]  # fmt: skip
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    content = json.loads(result.read_text())
    assert content["completed"] == point.load.num_requests
    assert content["total_output_tokens"] == point.load.num_requests * point.load.workload.output_tokens
    return content["mean_tpot_ms"], content["output_throughput"]
