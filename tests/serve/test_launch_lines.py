"""Every flag of other servers' launch lines becomes one of ours, is left aside with a word, or is refused."""

import json
import runpy
from pathlib import Path

import pytest
import typer

from slipstream.cli.foreign_line import LaunchLine, own_flags
from slipstream.cli.serve import serve
from slipstream.errors import ConfigError
from slipstream.flags.line import settle, settle_environment
from slipstream.flags.table import flag_table

APP = typer.Typer()
APP.command(cls=LaunchLine)(serve)
OWN = own_flags(typer.main.get_command(APP))
TABLE = flag_table("serve")


def settled(line, *more):
    return list(settle([*line.split(), *more], OWN, TABLE).words)


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("m -tp 4", "m --tensor-parallel-size 4"),
        ("m --tensor_parallel_size=4", "m --tensor-parallel-size 4"),
        ("m --served-model-name a b --port 1", "m --served-model-name a --served-model-name b --port 1"),
        ("--served-model-name a m", "--served-model-name a m"),
        ("--model m --served-model-name a b", "--model m --served-model-name a --served-model-name b"),
        ("m --max-model-len 16k --max-num-batched-tokens 8K", "m --max-model-len 16000 --max-num-batched-tokens 8192"),
        ("m --admin-api-key k --max-queued-requests 7", "m --admin-key k --max-waiting 7"),
        ("m --generation-config vllm --dtype half", "m --generation-config none --dtype float16"),
        ("m --tool-call-parser auto --reasoning-parser kimi_k2", "m --reasoning-parser kimi_k2"),
        ('m --allowed-origins ["https://a","https://b"]', "m --cors-origin https://a --cors-origin https://b"),
        ("m --data-parallel-size 1 --cpu-offload-gb 0.0", "m"),
        ("m --kv-cache-dtype fp8_e4m3", "m --kv-cache-dtype fp8"),
        ("m --kv-cache-dtype=bfloat16", "m --kv-cache-dtype auto"),
        ("m --speculative-draft-kv-cache-dtype fp8", "m --draft-kv-cache-dtype fp8"),
        ("m --speculative-draft-sliding-window 2048", "m --draft-window 2048"),
        ("m -pp 2 --dist-init-addr h:5", "m --pipeline-parallel-size 2 --dist-init-addr h:5"),
        ("m --no-trust-remote-code --no-enable-lora -O3 -cc.mode 3", "m"),
        (
            "m --disable-prefix-caching --disable-lora --enable-cascade-attn --disable-expert-parallel",
            "m --no-enable-prefix-caching",
        ),
        ("m --enable-radix-cache --disable-trust", "m --enable-radix-cache --disable-trust"),
        ("m --no-such-flag 3 --nor-this", "m --no-such-flag 3 --nor-this"),
        ("m --draft d -- --served-model-name a", "m --draft d -- --served-model-name a"),
    ],
)
def test_a_line_is_read_as_its_own_server_reads_it(theirs, ours):
    assert settled(theirs) == ours.split()


def test_vllm_spells_speculation_in_three_ways():
    wanted = {"method": "eagle3", "model": "org/draft", "num_speculative_tokens": 3}
    lines = [
        "m --spec-method eagle3 --spec-model org/draft --spec-tokens 3",
        "m --speculative-config.method eagle3 --speculative-config.model org/draft "
        "--speculative-config.num_speculative_tokens=3",
        f"m -sc {json.dumps(wanted, separators=(',', ':'))}",
    ]
    for line in lines:
        words = settled(line)
        assert json.loads(words[words.index("--speculative-config") + 1]) == wanted


def test_flags_of_a_config_file_come_before_the_line_and_lose_to_it(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text("model: m\nport: 1\nserved_model_name: [a, b]\nenforce-eager: true\nenable-lora: false\n")
    assert settled(f"--config {file} --port 2") == (
        ["--model", "m", "--port", "1", "--served-model-name", "a", "--served-model-name", "b", "--port", "2"]
    )
    with pytest.raises(ConfigError, match="cannot be read"):
        settled("m --config /nowhere.yaml")


def test_flags_that_are_not_needed_change_nothing_and_are_named_with_the_reason():
    line = ["m"]
    for flag in TABLE.flags.values():
        if flag.fate == "not_needed":
            line += [flag.name, *{"": [], "V": ["x"], "V?": [], "V*": ["0", "1"]}[flag.arity]]
    found = settle(line, OWN, TABLE)
    assert found.words == ("m",)
    said = "\n".join(found.notices)
    assert all(flag.name in said and flag.why in said for flag in TABLE.flags.values() if flag.fate == "not_needed")
    assert len(found.notices) < 40  # one for each reason, not for each flag


def test_all_that_cannot_be_honoured_is_told_at_once_and_secrets_are_not_repeated():
    with pytest.raises(ConfigError) as told:
        settled("m --quantization-param-path p --enable-lora --ssl-keyfile-password hunter2 --hf-token hf_x")
    message = str(told.value)
    assert "--quantization-param-path cannot be honoured here: FP8 keys and values" in message
    assert "--enable-lora cannot" in message
    assert "hunter2" not in message
    assert "hf_x" not in message
    assert len(message.splitlines()) == 4


def test_the_table_says_nothing_of_what_our_own_command_line_decides():
    assert {name for name, flag in TABLE.flags.items() if name in OWN and flag.fate != "mapped"} == set()
    targets = {flag.ours.partition(".")[0] for flag in TABLE.flags.values() if flag.fate == "mapped"}
    assert targets <= OWN.keys()
    assert set(TABLE.short.values()) <= TABLE.flags.keys() | OWN.keys()


def test_variables_of_published_lines_are_told_of_and_a_key_among_them_is_refused():
    (tiles, *_), unknown = (
        settle_environment(["AITER_FLYDSL_STAGE2_TILE_K", "PATH"], TABLE.variables),
        settle_environment(["VLLM_NEW"], TABLE.variables),
    )
    assert "AITER_FLYDSL_STAGE2_TILE_K" in tiles
    assert "tile shapes" in tiles
    assert "VLLM_NEW" in unknown[0]
    assert settle_environment(["PATH", "HF_HOME"], TABLE.variables) == ()
    with pytest.raises(ConfigError, match=r"VLLM_API_KEY is set: .*--api-key"):
        settle_environment(["VLLM_API_KEY"], TABLE.variables)


def test_the_page_of_flags_is_the_table():
    root = Path(__file__).parents[2]
    script = runpy.run_path(str(root / "scripts" / "launch_flags.py"))
    assert (root / "docs" / "launch-flags.md").read_text() == script["page"](), "run scripts/launch_flags.py"
