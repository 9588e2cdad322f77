"""The lines we start other engines with are read by their own launchers as they are meant (opt in: -m interop)."""

import json
from pathlib import Path

import pytest
from tests.launch.settings import launch
from tests.peers.suites import SUITES
from tests.serve.interop import run_client

from slipstream.launch.nodes import Nodes
from slipstream.launch.options import SPELLINGS, SWITCHES, VALUES, engine_flags
from slipstream.launch.settings import Draft, Speculation, Topology
from slipstream.launch.spread import spread

pytestmark = pytest.mark.interop
SCRIPT = Path(__file__).resolve().with_name("parse_lines.py")
HOSTS = ("a=10.0.0.1", "b=10.0.0.2")
EAGLE = {"draft": Draft("org/draft", "bf16"), "speculation": Speculation("eagle3", 3)}
FIRST_WORDS = {"vllm": 2, "sglang": 3}  # `vllm serve`, `python -m sglang.launch_server`
SAMPLES = {
    "served_model_name": ["m"], "dtype": "bfloat16", "device": "cuda", "max_requests": 7, "max_batch_tokens": 512,
    "page_size": 16, "memory_fraction": 0.5, "api_key": ["k"], "admin_key": "k", "root_path": "/llm",
    "kv_cache_dtype": "fp8", "draft_kv_cache_dtype": "fp8",
    "tool_call_parser": "hermes", "reasoning_parser": "qwen3", "trust_remote_code": True,
    "enable_auto_tool_choice": True, "log_level": "info", "speculative_algorithm": "EAGLE3",
    "speculative_config": '{"method":"ngram","num_speculative_tokens":3}', "speculative_draft_model_path": "d",
    "speculative_num_steps": 3, "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 4,
}  # fmt: skip


def parsed(engine, launches):
    """Return what the engine's launcher makes of the commands of launches, node by node."""
    processes = [process for one in launches for process in spread(one).server]
    words = [process.command.argv[FIRST_WORDS[engine] :] for process in processes]
    said = run_client(
        SUITES[engine].client, ["-P", str(SCRIPT), engine, json.dumps(words)], PYTHONPATH=str(SCRIPT.parent)
    )
    found = json.loads(next(line for line in reversed(said.splitlines()) if line.startswith("[{")))
    assert [line["refused"] for line in found if "refused" in line] == []
    return found


def has(found, **expected):
    return {name: found[name] for name in expected} == expected


def test_vllm_reads_its_nodes_and_ray():
    own = launch(topology=Topology(tp=8, pp=2), nodes=Nodes(HOSTS), **EAGLE)
    ray = launch(topology=Topology(tp=8, pp=2), nodes=Nodes(HOSTS, cluster="ray"), **EAGLE)
    first, other, in_ray = parsed("vllm", [own, ray])
    sizes = {"tensor_parallel_size": 8, "pipeline_parallel_size": 2}
    shared = {"nnodes": 2, "master_addr": "10.0.0.1", "master_port": 29500, **sizes}
    assert has(first, node_rank=0, headless=False, host="10.0.0.1", port=8000, **shared)
    assert has(other, node_rank=1, headless=True, **shared)
    assert has(in_ray, distributed_executor_backend="ray", nnodes=1, **sizes)
    drafts = {"model": "org/draft", "method": "eagle3", "num_speculative_tokens": 3}
    assert first["speculative_config"] == other["speculative_config"] == in_ray["speculative_config"] == drafts


def test_sglang_reads_its_nodes():
    drafting = launch(server="sglang", topology=Topology(tp=16), nodes=Nodes(HOSTS), **EAGLE)
    staged = launch(server="sglang", topology=Topology(tp=8, pp=2), nodes=Nodes(HOSTS))
    first, other, _, staged_other = parsed("sglang", [drafting, staged])
    shared = {"nnodes": 2, "dist_init_addr": "10.0.0.1:29500", "tp_size": 16, "speculative_algorithm": "EAGLE3"}
    assert has(first, node_rank=0, host="10.0.0.1", port=8000, **shared)
    assert has(other, node_rank=1, host="10.0.0.2", speculative_draft_model_path="org/draft", **shared)
    assert has(staged_other, node_rank=1, tp_size=8, pp_size=2)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_every_option_we_translate_is_a_flag_of_the_engine(engine):
    given = {name: SAMPLES[name] for name, spelled in SPELLINGS.items() if engine in spelled}
    lines = [given, *({name: on} for name in SWITCHES for on in (True, False))]
    lines += [{option: value} for (whose, option), values in VALUES.items() if whose == engine for value in values]
    launches = [launch(server=engine, flags=engine_flags(engine, line)) for line in lines]
    assert len(parsed(engine, launches)) == len(lines)
