"""`slipstream serve --engine` says in each engine's words what it was told in ours, for every node of any cluster."""

import json
import os
import subprocess

import pytest
import torch
import typer
from safetensors.torch import save_file
from typer.testing import CliRunner

from slipstream.cli.foreign_line import LaunchLine
from slipstream.cli.serve import serve
from slipstream.errors import ConfigError
from slipstream.launch.manifest import manifest
from slipstream.launch.nodes import Nodes
from slipstream.launch.settings import Draft, Speculation, Topology
from slipstream.launch.spread import files_of, spread
from tests.launch.settings import launch

APP = typer.Typer()
APP.command(cls=LaunchLine)(serve)
TWO = Nodes(("a=10.0.0.1", "b=10.0.0.2"))
EAGLE = {"draft": Draft("org/draft", "bf16"), "speculation": Speculation("eagle3", 3)}


def printed(line: str) -> str:
    """Return what a command line prints instead of starting it."""
    result = CliRunner().invoke(APP, [*line.split(), "--print", "lines"])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return " ".join(result.output.replace("\\\n", "").split())


def test_vllm_is_told_of_its_nodes_by_its_own_flags():
    first, other = spread(launch(topology=Topology(tp=8, pp=2), nodes=TWO, **EAGLE)).server
    shared = (
        "vllm serve org/target --port 8000 --host {} --tensor-parallel-size 8 --pipeline-parallel-size 2 "
        '--speculative-config {{"model":"org/draft","method":"eagle3","num_speculative_tokens":3}} '
        "--nnodes 2 --node-rank {} --master-addr 10.0.0.1 --master-port 29500"
    )
    assert " ".join(first.command.argv) == shared.format("10.0.0.1", 0)
    assert " ".join(other.command.argv) == shared.format("10.0.0.2", 1) + " --headless"
    assert other.command.env == {"VLLM_HOST_IP": "10.0.0.2"}
    assert launch(nodes=TWO).url() == "http://10.0.0.1:8000"


def test_a_dflash_draft_goes_to_other_engines_as_it_is_by_a_method_of_its_own(tmp_path):
    config = {"architectures": ["DFlashDraftModel"], "dflash_config": {"block_size": 16}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({"fc.weight": torch.zeros(1)}, tmp_path / "model.safetensors")
    vllm = printed(f"--engine=vllm m --draft {tmp_path}")
    assert f'{{"model":"{tmp_path}","method":"dflash","num_speculative_tokens":15}}' in vllm
    sglang = printed(f"--engine=sglang m --draft {tmp_path} --depth 7")
    assert "--speculative-algorithm DFLASH" in sglang and "--speculative-num-draft-tokens 8" in sglang
    assert "num-steps" not in sglang
    with pytest.raises(ConfigError, match="SGLang drafts chains only with DFlash"):
        printed(f"--engine=sglang m --draft {tmp_path} --width 2 --budget 9")


def test_ray_is_started_before_vllm_is():
    nodes = Nodes(TWO.hosts, cluster="ray", port=6379, interface="ib0")
    processes = spread(launch(program=("/opt/bin/vllm", "serve"), topology=Topology(tp=4), nodes=nodes))
    assert [" ".join(process.command.argv) for process in processes.cluster] == [
        "/opt/bin/ray start --head --port 6379 --include-dashboard false --node-ip-address 10.0.0.1 "
        "--disable-usage-stats --block",
        "/opt/bin/ray start --address 10.0.0.1:6379 --node-ip-address 10.0.0.2 --disable-usage-stats --block",
    ]
    (server,) = processes.server
    assert server.command.argv[-2:] == ("--distributed-executor-backend", "ray")
    assert server.command.env["RAY_ADDRESS"] == "10.0.0.1:6379"
    assert {process.command.env["NCCL_SOCKET_IFNAME"] for process in (*processes.cluster, server)} == {"ib0"}


def test_our_options_are_said_in_the_engines_words():
    line = "org/target --draft none --tp 2 --dtype bfloat16 --max-requests 64 --max-context 4096 --no-prefix-cache"
    line += " --tool-call-parser minimax_m2 --served-model-name m --engine-args --seed=7 --engine-env A=b"
    assert printed(f"{line} --engine vllm") == (
        "# here export A=b vllm serve org/target --port 8000 --host 127.0.0.1 --tensor-parallel-size 2 --max-model-len "
        "4096 --dtype bfloat16 --max-num-seqs 64 --no-enable-prefix-caching --tool-call-parser minimax_m2 "
        "--served-model-name m --enable-auto-tool-choice --seed 7"
    )
    assert printed(f"{line} --engine sglang") == (
        "# here export A=b python -m sglang.launch_server --model org/target --tp 2 --host 127.0.0.1 --port 8000 "
        "--context-length 4096 --dtype bfloat16 --max-running-requests 64 --disable-radix-cache --tool-call-parser "
        "minimax-m2 --served-model-name m --seed 7"
    )


def test_fp8_keys_are_asked_for_in_the_engines_words():
    assert "--kv-cache-dtype fp8" in printed("m --kv-cache-dtype fp8 --engine vllm")
    line = "m --kv-cache-dtype fp8 --draft-kv-cache-dtype fp8 --engine sglang"
    assert "--kv-cache-dtype fp8_e4m3 --speculative-draft-kv-cache-dtype fp8_e4m3" in printed(line)


def test_the_engines_own_flags_are_handed_on_as_they_are():
    line = "--enforce-eager m --engine vllm --engine-args --seed=7 --attention-backend FLASH_ATTN --max-num-seqs 8"
    line += " --speculative-config {}"
    assert printed(line) == (
        "# here vllm serve m --port 8000 --host 127.0.0.1 --tensor-parallel-size 1 --max-num-seqs 8 "
        "--speculative-config '{}' --enforce-eager --seed 7 --attention-backend FLASH_ATTN"
    )
    line = (
        "--engine=sglang --model-path m --speculative-algorithm EAGLE3 --cuda-graph-bs 1 2 4 --disable-overlap-schedule"
    )
    assert printed(line) == (
        "# here python -m sglang.launch_server --model m --tp 1 --host 127.0.0.1 --port 8000 "
        "--speculative-algorithm EAGLE3 --cuda-graph-bs 1 2 4 --disable-overlap-schedule"
    )


def test_our_own_engine_goes_to_the_nodes_with_all_it_was_told():
    line = "org/target --draft org/draft --depth 5 --budget 0 --tp 4 --served-model-name m --served-model-name n"
    assert printed(f"{line} --no-prefix-cache --nodes a=10.0.0.1,b=10.0.0.2 --node-port 29600").endswith(
        "# on b slipstream serve org/target --port 8000 --host 10.0.0.2 --tp 4 --draft org/draft --depth 5 --budget 0 "
        "--served-model-name m --served-model-name n --no-prefix-cache --nnodes 2 --node-rank 1 "
        "--rendezvous 10.0.0.1:29600"
    )


def test_a_draft_of_this_folder_goes_to_the_nodes_by_its_whole_path_and_is_looked_for_there(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "draft").mkdir()
    said = printed("org/target --draft draft --tp 2 --nodes a,b")
    assert said.count(f"--draft {tmp_path / 'draft'} ") == 2
    flags = {"draft": str(tmp_path / "draft")}
    assert files_of(launch(server="slipstream", flags=flags)) == (str(tmp_path / "draft"),)
    for name in ("auto", "none", "ngram", "org/draft"):
        assert f"--draft {name} " in printed(f"org/target --draft {name} --tp 2 --nodes a,b")
        assert files_of(launch(server="slipstream", flags={"draft": name})) == ()


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("m --engine vllm --drain-timeout 3", "--drain-timeout is an option of slipstream's own engine, and vllm has"),
        ("m --engine vllm --draft ngram --width 4", "vLLM drafts chains only"),
        ("m --engine sglang --draft ngram --tp 2 --pp 2", "SGLang starts no EAGLE-3 or n-gram drafts with pipeline"),
        ("m --engine sglang --ray --nodes a,b --tp 2", "SGLang is started by its own multi-node flags here"),
        ("m --pp 2", "--pp 2: slipstream's own engine has no pipeline stages. Put all devices into --tp"),
        (
            "m --engine vllm --draft-kv-cache-dtype fp8",
            "--draft-kv-cache-dtype is an option of slipstream's own engine",
        ),
        ("m --engine vllm --tp 3 --nodes a,b", "tp3 takes 3 devices in all, which 2 nodes cannot share evenly"),
        ("m --engine vllm --tp 2 --nodes a,a", "nodes are a, a; name at least two, each once"),
        ("m --engine vllm --tp 2 --nodes a,b --rsh ssh", "it must say {node} where the node's name belongs"),
        ("m --engine vllm --tp 2 --nodes 2", "--nodes is 2; name them, as in --nodes a,b"),
        ("m --engine vllm --draft d --speculative-config {}", "Speculation is described twice"),
        ("m --engine vllm --ray", "--ray is about several machines; name them with --nodes"),
        ("m --engine vllm --engine-env A", "--engine-env A: write it as NAME=VALUE"),
        ("m --engine vllm --engine-args seven", "'seven' belongs to no flag"),
        ("m --engine vllm --engine-args '", "No closing quotation"),
        ("m --engine vllm --engine-program 'vllm", "No closing quotation"),
        ("m --engine vllm --engine-args=--seed=1 --engine-args=--seed=2", "--seed is given twice"),
        ("m --engine sglang --api-key a --api-key b", "--api-key is given 2 times; sglang takes one"),
    ],
)
def test_what_an_engine_cannot_do_is_refused_with_what_to_do_instead(line, words):
    with pytest.raises(ConfigError) as error:
        printed(line)
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("host", "url"),
    [("::1", "http://[::1]:8000"), ("::", "http://127.0.0.1:8000"), ("10.0.0.3", "http://10.0.0.3:8000")],
)
def test_a_server_is_reached_at_its_address_of_either_kind(host, url):
    assert launch(host=host).url() == url


def test_what_runs_in_a_pod_or_a_job_listens_where_others_reach_it():
    for form, host in (("kubernetes", "0.0.0.0"), ("slurm", "0.0.0.0"), ("lines", "127.0.0.1")):
        result = CliRunner().invoke(APP, ["m", "--draft", "none", "--engine", "vllm", "--image", "i", "--print", form])
        assert result.exit_code == 0, result.output
        assert f"--host {host}" in result.output, form


def stand_in_commands(folder, **programs: str) -> dict[str, str]:
    """Put programs of these names first on the path."""
    for name, script in programs.items():
        (folder / name).write_text(f"#!/bin/bash\n{script}\n")
        (folder / name).chmod(0o755)
    return {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}


def test_a_slurm_job_runs_each_nodes_command_with_addresses_it_finds_out(tmp_path):
    environment = stand_in_commands(
        tmp_path,
        hostname="echo 10.0.0.1",
        ip='echo "10.0.0.1 dev eth0 src 10.0.0.$((SLURM_NODEID + 1)) uid 0"',
        srun='while [ "$1" != bash ]; do shift; done; for SLURM_NODEID in 0 1; do export SLURM_NODEID; "$@"; done',
        vllm='echo "$VLLM_HOST_IP: $*"',
    )
    job = manifest(launch(topology=Topology(tp=8, pp=2), nodes=TWO, **EAGLE), "slurm", 8)
    assert "#SBATCH --nodes=2\n" in job and "#SBATCH --gpus-per-node=8\n" in job
    said = subprocess.run(["bash"], input=job, capture_output=True, text=True, check=True, env=environment).stdout
    where, first, other = said.splitlines()
    assert where == "vllm will answer at http://10.0.0.1:8000"
    assert first.startswith("10.0.0.1: serve org/target") and "--node-rank 0 --master-addr 10.0.0.1" in first
    assert other.startswith("10.0.0.2: serve org/target") and other.endswith("--headless")
    assert '"method":"eagle3"' in other


def test_kubernetes_gets_numbered_pods_that_find_the_first(tmp_path):
    text = manifest(launch(topology=Topology(tp=16), nodes=TWO, host="0.0.0.0"), "kubernetes", 8)
    service, pods = (json.loads(part) for part in text.split("\n---\n"))
    assert service["spec"]["clusterIP"] == "None"
    assert pods["spec"]["replicas"] == 2 and pods["spec"]["serviceName"] == service["metadata"]["name"]
    (container,) = pods["spec"]["template"]["spec"]["containers"]
    assert container["resources"] == {"limits": {"nvidia.com/gpu": "8"}}
    environment = stand_in_commands(tmp_path, vllm='echo "$VLLM_HOST_IP: $*"')
    environment |= {"HOSTNAME": "vllm-serve-1", "POD_IP": "10.0.0.2"}
    said = subprocess.run(container["command"], capture_output=True, text=True, check=True, env=environment).stdout
    assert said.startswith("10.0.0.2: serve org/target")
    assert "--node-rank 1 --master-addr vllm-serve-0.vllm-serve" in said and said.endswith("--headless\n")


def test_a_job_with_ray_waits_until_every_node_has_joined(tmp_path):
    status = "Active:\\n 1 node_a\\n 1 node_b\\nPending:\\n 1 node_c"
    environment = stand_in_commands(
        tmp_path,
        ray=f'[ "$1" = start ] && echo "ray $*" || printf "{status}\\n"',
        vllm='echo "vllm $RAY_ADDRESS $*"',
    )
    nodes = Nodes(TWO.hosts, cluster="ray", port=6379)
    text = manifest(launch(topology=Topology(tp=4), nodes=nodes), "kubernetes", 2)
    script = json.loads(text.split("\n---\n")[1])["spec"]["template"]["spec"]["containers"][0]["command"]
    environment |= {"HOSTNAME": "vllm-serve-0", "POD_IP": "10.0.0.1"}
    said = subprocess.run(script, capture_output=True, text=True, check=True, env=environment).stdout.splitlines()
    assert any(line.startswith("ray start --head --port 6379") for line in said)
    assert any(line.startswith("vllm vllm-serve-0.vllm-serve:6379 serve org/target") for line in said)
