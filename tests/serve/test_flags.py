"""Launch lines of other servers mean here what they mean there, or are refused."""

import json

import pytest
import typer
from typer.testing import CliRunner

from slipstream.cli.foreign_line import LaunchLine
from slipstream.cli.serve import serve
from slipstream.errors import ConfigError
from slipstream.models.topology import Topology
from slipstream.speculation.tree import TreeShape

APP = typer.Typer()
APP.command(cls=LaunchLine)(serve)


@pytest.fixture
def launched(monkeypatch):
    """Run a command line up to the point where it would load the model, and return what it would run."""

    def launch(line: str, *more: str):
        found = {}
        monkeypatch.setattr(
            "slipstream.serve.server.serve",
            lambda options, config, simulated: found.update(options=options, config=config, simulated=simulated),
        )
        monkeypatch.setattr("slipstream.serve.logs.set_up_logs", lambda *_: None)
        result = CliRunner().invoke(APP, [*line.split(), *more])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        assert result.exit_code == 0, result.output
        return found

    return launch


def test_without_flags_the_embedded_model_is_served_on_loopback(launched):
    found = launched("")
    assert found["options"].model == "embedded"
    assert found["options"].draft == "auto"
    assert found["config"].host == "127.0.0.1"
    assert found["config"].model_name == "embedded"
    assert found["simulated"] == ()


def test_an_sglang_line_runs_with_the_same_meaning(launched):
    found = launched(
        "--model-path org/target --speculative-algorithm EAGLE3 --speculative-draft-model-path org/draft "
        "--speculative-num-steps 5 --speculative-eagle-topk 4 --speculative-num-draft-tokens 8 --tp 1 "
        "--mem-fraction-static 0.75 --disable-radix-cache --context-length 2048 --trust-remote-code --port 30000"
    )
    options = found["options"]
    assert (options.model, options.draft) == ("org/target", "org/draft")
    assert options.tree == TreeShape(depth=5, width=4, budget=7)
    assert options.tree.num_nodes == 8
    assert options.memory_fraction == 0.75
    assert options.max_context == 2048
    assert options.engine.prefix_cache is False
    assert found["config"].port == 30000


def test_a_vllm_line_runs_with_the_same_meaning(launched):
    config = {"method": "eagle3", "model": "org/draft", "num_speculative_tokens": 3, "draft_tensor_parallel_size": 1}
    found = launched(
        "org/target --tensor-parallel-size 1 --gpu-memory-utilization 0.9 --max-model-len 4096 --max-num-seqs 16 "
        "--no-enable-prefix-caching --served-model-name a --served-model-name b --speculative-config",
        json.dumps(config),
    )
    options = found["options"]
    assert (options.model, options.draft, options.tree) == ("org/target", "org/draft", TreeShape.chain(3))
    assert (options.memory_fraction, options.max_context) == (0.9, 4096)
    assert options.max_requests == 16
    assert options.engine.prefix_cache is False
    assert (found["config"].model_name, found["config"].aliases) == ("a", ("b",))


def test_lines_that_draft_blocks_run_with_the_same_meaning(launched):
    sglang = "m --speculative-algorithm DFLASH --speculative-draft-model-path d --speculative-num-draft-tokens 16"
    vllm = json.dumps({"method": "dflash", "model": "d", "num_speculative_tokens": 15})
    for options in (launched(sglang)["options"], launched("m --speculative-config", vllm)["options"]):
        assert (options.draft, options.tree) == ("d", TreeShape.chain(15))
    assert launched(sglang.replace("--speculative-num-draft-tokens 16", ""))["options"].tree is None


def test_our_own_flags_and_ngram(launched, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("one\n\ntwo\n")
    found = launched(
        f"m --draft ngram --depth 6 --simulated-acceptance 0.9,0.5 --api-key zero --api-key-file {keys} --num-pages 99 "
        "--borrowed-tokens 7"
    )
    assert (found["options"].draft, found["options"].tree) == ("ngram", TreeShape.chain(6))
    assert found["options"].engine.num_pages == 99
    assert found["options"].engine.borrowed_tokens == 7
    assert found["config"].api_keys == ("zero", "one", "two")
    assert found["simulated"] == (0.9, 0.5)
    assert launched("m --speculative-algorithm NGRAM")["options"].draft == "ngram"
    synthetic = {"method": "ngram", "num_speculative_tokens": 2, "rejection_sample_method": "synthetic"}
    synthetic["synthetic_acceptance_rates"] = [0.8, 0.2]
    assert launched("m --speculative-config", json.dumps(synthetic))["simulated"] == (0.8, 0.2)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("m", Topology()),
        ("m --tp-size 8", Topology(8)),
        ("m --tensor-parallel-size 8 --enable-expert-parallel", Topology(8, 8)),
        ("m --tp 8 --ep-size 4 --draft d --draft-tp 8", Topology(8, 4, 8)),
        (
            'm --tp 4 --speculative-config {"model":"d","num_speculative_tokens":3,"draft_tensor_parallel_size":4}',
            Topology(4, 1, 4),
        ),
    ],
)
def test_a_line_says_how_the_model_is_split(launched, line, expected):
    assert launched(line)["options"].topology == expected


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("m --tp 0", "tp is 0"),
        ("m --tp 4 --ep 3", "ep must divide tp"),
        ("m --tp 4 --ep 2 --enable-expert-parallel", "give one"),
        ("m --tp 4 --draft-tp 2", "1 .the draft whole. or tp .4."),
        ("m --model-path n", "named twice"),
        ("m --speculative-algorithm EAGLE --speculative-draft-model-path d", "EAGLE3, DFLASH and NGRAM"),
        ("m --speculative-algorithm EAGLE3", "needs --speculative-draft-model-path"),
        ("m --speculative-draft-model-path d", "needs --speculative-algorithm"),
        ("m --speculative-algorithm DFLASH", "needs --speculative-draft-model-path"),
        ("m --speculative-algorithm DFLASH --speculative-draft-model-path d --speculative-num-steps 3", "leave it out"),
        ("m --speculative-algorithm EAGLE3 --speculative-draft-model-path d --speculative-num-steps 3", "Give all of"),
        ("m --speculative-algorithm NGRAM --speculative-draft-model-path d", "leave it out"),
        ("m --draft d --speculative-algorithm NGRAM", "described twice"),
        ("m --simulated-acceptance high", "give rates"),
        ("m --max-context 0", "max_context is 0"),
        ("m --memory-fraction nan", "memory_fraction is nan"),
        ("m --memory-fraction 2", "memory_fraction is 2.0"),
        ("m --speculative-config {", "not JSON"),
        ("m --speculative-config []", "object"),
        ('m --speculative-config {"method":"eagle3","model":"d"}', "num_speculative_tokens"),
        (
            'm --speculative-config {"method":"medusa","model":"d","num_speculative_tokens":3}',
            "eagle3, dflash and ngram",
        ),
        ('m --speculative-config {"method":"eagle3","num_speculative_tokens":3}', "needs a model"),
        ('m --speculative-config {"model":"d","num_speculative_tokens":3,"quantization":"fp8"}', "quantization"),
        (
            'm --speculative-config {"model":"d","num_speculative_tokens":3,"draft_tensor_parallel_size":4}',
            "draft_tp is 4",
        ),
    ],
)
def test_what_cannot_be_honoured_is_refused(launched, line, words):
    with pytest.raises(ConfigError, match=words):
        launched(line)


@pytest.mark.parametrize(
    "flag",
    ["--api-key", "--admin-api-key", "--served-model-name", "--draft", "--port", "--speculative-config.method"],
)
def test_a_flag_that_ends_the_line_without_its_value_is_refused(launched, flag):
    """`--api-key $UNSET` must not start a server that is open to everybody."""
    with pytest.raises(ConfigError, match=f"{flag} needs a value"):
        launched(f"org/target {flag}")
    with pytest.raises(ConfigError, match=f"{flag} needs a value"):
        launched(f"org/target {flag} --enable-metrics")


@pytest.mark.parametrize(("steps", "topk", "tokens"), [(3, 1, 5), (3, 2, 40), (3, 1, 1)])
def test_sglang_numbers_that_contradict_each_other_are_refused(launched, steps, topk, tokens):
    with pytest.raises(ConfigError, match="num-draft-tokens"):
        launched(
            f"m --speculative-algorithm EAGLE3 --speculative-draft-model-path d --speculative-num-steps {steps} "
            f"--speculative-eagle-topk {topk} --speculative-num-draft-tokens {tokens}"
        )


def test_limits_on_clients_are_flags(launched):
    config = launched(
        "--max-connections 9 --read-timeout 1.5 --write-timeout 2 --keep-alive-timeout 3 --open-metrics "
        "--allowed-host api.example.org --allowed-host 10.0.0.7"
    )["config"]
    assert (config.max_connections, config.read_timeout_s, config.write_timeout_s) == (9, 1.5, 2)
    assert (config.keep_alive_timeout_s, config.open_metrics) == (3, True)
    assert config.allowed_hosts == ("api.example.org", "10.0.0.7")
    with pytest.raises(ConfigError, match="read_timeout_s is 0"):
        launched("--read-timeout 0")


def test_kernels_and_tiles_are_set_by_a_file(launched, tmp_path):
    file = tmp_path / "tuned.yaml"
    file.write_text("kernels: reference\nexperts: {stage2.block_k: 256, block_t: 16}\n")
    options = launched(f"m --kernel-settings {file}")["options"]
    assert (options.kernels, options.tiles) == ("reference", {"stage2.block_k": 256, "block_t": 16})
    assert (launched("m")["options"].kernels, launched("m")["options"].tiles) == ("auto", {})
    file.write_text("expert: {}\n")
    with pytest.raises(ConfigError, match="unknown key 'expert'"):
        launched(f"m --kernel-settings {file}")
    with pytest.raises(ConfigError, match="cannot be read"):
        launched(f"m --kernel-settings {tmp_path / 'nowhere'}")
