"""Lines of other benchmark clients send here what they send there, or are refused."""

import json
from urllib.parse import urlsplit

import pytest

from slipstream.bench.like import read_line
from slipstream.errors import ConfigError
from slipstream.flags.table import flag_table
from tests.bench.fake_server import DRAFTING, Behaviour
from tests.bench.verbs import call, running

SGLANG = (
    "python3 -m sglang.bench_serving --model amd/Kimi-K2.5-W4A8 --dataset-name random --random-input 10240 "
    "--random-output 512 --num-prompts 160 --max-concurrency 40 --request-rate inf --port 9527 --random-range-ratio 1.0"
)
VLLM = (
    "vllm bench serve --model amd/Kimi-K2.5-MXFP4 --backend vllm --dataset-name random --random-input-len 1024 "
    "--random-output-len 1024 --random-range-ratio 0.8 --num-prompts 40 --max-concurrency 4 --request-rate inf "
    "--ignore-eos --use-chat-template --trust-remote-code"
)


def test_the_published_sglang_line_is_160_prompts_of_10240_tokens_on_40_streams():
    line = read_line(SGLANG.split())
    load, workload = line.load, line.load.workload
    assert (line.client, line.url) == ("sglang", "http://127.0.0.1:9527")
    assert (load.num_requests, load.concurrency, load.request_rate, load.num_warmups) == (160, 40, None, 1)
    assert (workload.input_tokens, workload.output_tokens, workload.range_ratio) == (10240, 512, 1.0)
    assert (workload.ignore_eos, workload.chat_template) == (True, False)


def test_the_published_vllm_line_has_the_lengths_of_the_client_that_has_its_flags():
    line = read_line(VLLM.split())
    workload = line.load.workload
    assert (line.url, line.load.num_requests, line.load.concurrency) == ("http://127.0.0.1:8000", 40, 4)
    assert (workload.input_tokens, workload.range_ratio, workload.chat_template) == (1024, 0.8, True)
    assert "--trust-remote-code" in line.notices[0]
    own = read_line(VLLM.replace("--use-chat-template ", "").split()).load.workload
    assert own.input_tokens == 1843
    assert own.input_tokens * own.range_ratio == pytest.approx(1024 * 0.2, rel=1e-3)


def test_clients_defaults_are_theirs():
    sglang = read_line(["SGLANG_X=1", "python", "-m", "sglang.benchmark.serving", "--dataset-name", "random-ids"])
    assert (sglang.load.num_requests, sglang.load.concurrency, sglang.load.seed) == (1000, 1000, 42)
    old = read_line(["python3", "utils/bench_serving/benchmark_serving.py", "--num-prompts", "3", "--output-len", "5"])
    assert (old.client, old.load.workload.output_tokens, old.load.workload.ignore_eos) == ("vllm", 5, False)


@pytest.mark.parametrize("line", [SGLANG, VLLM, f"{VLLM} --metric-percentiles 90,95,99"])
def test_what_is_sent_does_not_depend_on_flags_that_are_not_needed(line):
    plain = read_line(line.split())
    flags = [flag for flag in flag_table(f"{plain.client}_bench").flags.values() if flag.fate == "not_needed"]
    words = [word for flag in flags for word in (flag.name, *{"": (), "V": ("1",), "V*": ("1", "2")}[flag.arity])]
    found = read_line([*line.split(), *words])
    assert (found.client, found.url, found.load) == (plain.client, plain.url, plain.load)
    assert [flag.name for flag in flags if flag.name not in " ".join(found.notices)] == []


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("ab -n 10", "no benchmark client known here"),
        ("vllm bench serve --dataset-name sharegpt", "--dataset-name is sharegpt"),
        ("vllm bench serve --backend openai-chat", "--backend is openai-chat"),
        ("vllm bench serve --burstiness 2", "--burstiness 2 cannot be honoured"),
        ("vllm bench serve --goodput ttft:200", "there is no goodput"),
        ("vllm bench serve --metric-percentiles 25,99", "figures are mean, median, p90, p95 and p99"),
        ("python -m sglang.bench_serving --dataset-name random --lora-name a", "--lora-name cannot be honoured"),
        ("vllm bench serve --num-prompts many", "invalid int value"),
        ("vllm bench serve --no-such-flag", "unrecognized arguments: --no-such-flag"),
    ],
)
def test_what_is_not_sent_here_is_refused(line, words):
    with pytest.raises(ConfigError, match=words):
        read_line(line.split())


def test_a_line_is_measured_and_its_figures_are_shown_and_written(tmp_path):
    out = tmp_path / "figures.json"
    with running(Behaviour(**DRAFTING)) as [url]:
        line = SGLANG.replace("10240", "64").replace("512", "16").replace("160", "8").replace("40 ", "4 ")
        words = line.replace("9527", str(urlsplit(url).port)).split()
        result = call("bench", "like", "--out", out, "--token-range", "10:500", "--", *words)
    assert result.exit_code == 0, result.output
    for shown in ("8 of 8", "TTFT", "TPOT", "acceptance length"):
        assert shown in result.output
    figures = json.loads(out.read_text())
    assert figures["acceptance"]["length"] > 1
    assert figures["latency"]["tpot_ms"]["median"] > 0
