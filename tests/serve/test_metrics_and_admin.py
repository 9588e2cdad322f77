"""Metrics tell what happened, under every name tools look for; speculation changes without a restart."""

import json
import re
from pathlib import Path

import pytest
from tiny_server import Running, tiny_engine

from slipstream.checkpoint.writer import CheckpointWriter
from slipstream.train.run.output import add_draft

TEXT = {"prompt": "once upon", "max_tokens": 30, "ignore_eos": True, "seed": 3, "temperature": 1}


def read(text: str) -> dict[str, float]:
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in text.splitlines() if line[0] != "#"}


def vllm_bench_reads(text: str) -> dict[str, object]:
    """Take the four counters as a scraper does that knows their names and nothing else of ours."""
    found = {"drafts": 0, "draft_tokens": 0, "accepted": 0, "per_position": {}}
    for line in text.splitlines():
        if not line.startswith("vllm:spec_decode"):
            continue
        value = int(float(line.split()[-1]))
        if "num_drafts" in line:
            found["drafts"] += value
        elif "num_draft_tokens" in line:
            found["draft_tokens"] += value
        elif "num_accepted_tokens_per_pos" in line:
            found["per_position"][int(re.search(r'position="(\d+)"', line)[1])] = value
        elif "num_accepted_tokens" in line:
            found["accepted"] += value
    return found


def test_metrics_add_up_to_what_the_answers_said():
    with Running(tiny_engine()) as server, server.client() as client:
        asked = {**TEXT, "speculation_stats": True}
        usages = [client.post("/v1/completions", json={**asked, "seed": s}).json()["usage"] for s in range(3)]
        text = client.get("/metrics").text
        found = read(text)
        assert found['slipstream_requests_total{reason="length"}'] == 3
        assert found["slipstream_emitted_tokens_total"] == 90
        assert found["slipstream_prompt_tokens_total"] == 27
        assert found["slipstream_ttft_seconds_count"] == 3
        assert 0 < found["slipstream_inter_token_seconds_count"] <= 90 - 3  # a first step's tokens have no gap
        assert found["slipstream_e2e_seconds_count"] == 3
        assert found["slipstream_kv_usage"] == 0
        assert found["slipstream_waiting_requests"] == 0
        for phase in ("prefill", "draft", "verify", "host"):
            assert found[f'slipstream_phase_seconds_total{{phase="{phase}"}}'] > 0
        at = {name: found[f'slipstream_decode_{name}_total{{context="64"}}'] for name in ("passes", "tokens")}
        assert at["passes"] == found["slipstream_target_passes_total"]
        assert 87 <= at["tokens"] <= 87 + 3 * 3  # an answer's last pass may give more than was asked for
        drafted = sum(usage["speculation"]["drafted"] for usage in usages)
        accepted = sum(usage["speculation"]["accepted"] for usage in usages)
        scraped = vllm_bench_reads(text)
        assert scraped["draft_tokens"] == drafted
        assert scraped["accepted"] == accepted == sum(scraped["per_position"].values())
        ours = [found[f'slipstream_accepted_tokens_total{{position="{p}"}}'] for p in range(3)]
        assert ours == list(scraped["per_position"].values())
        passes = sum(usage["speculation"]["passes"] for usage in usages) - 3  # those over the prompts emit one each
        assert found['sglang:spec_accept_length{model_name="tiny"}'] == pytest.approx(87 / passes)
        lengths = [found[f'slipstream_acceptance_length{{passes="{which}"}}'] for which in ("decoding", "drafted")]
        assert lengths[0] == found['sglang:spec_accept_length{model_name="tiny"}']
        assert lengths[1] == pytest.approx(1 + scraped["accepted"] / scraped["drafts"])
        info = client.get("/server_info").json()
        assert info["internal_states"][0]["avg_spec_accept_length"] == pytest.approx(87 / passes)


# What vLLM's two Grafana dashboards and its own test of metrics ask for, and SGLang's; none of them of other devices,
# adapters, images or transfers between servers.
VLLM_NAMES = [
    "num_requests_running",
    "num_requests_waiting",
    "num_requests_waiting_by_reason",
    "kv_cache_usage_perc",
    "prefix_cache_queries_total",
    "prefix_cache_hits_total",
    "num_preemptions_total",
    "admission_rejections_total",
    "prompt_tokens_total",
    "generation_tokens_total",
    "cache_config_info",
    "request_success_total",
]
VLLM_HISTOGRAMS = [
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "request_time_per_output_token_seconds",
    "e2e_request_latency_seconds",
    "request_queue_time_seconds",
    "request_inference_time_seconds",
    "request_prefill_time_seconds",
    "request_decode_time_seconds",
    "request_num_preemptions",
    "request_prompt_tokens",
    "request_generation_tokens",
    "request_max_num_generation_tokens",
    "request_params_n",
    "request_params_max_tokens",
    "iteration_tokens_total",
]
SGLANG_NAMES = [
    "num_running_reqs",
    "num_used_tokens",
    "token_usage",
    "gen_throughput",
    "num_queue_reqs",
    "num_grammar_queue_reqs",
    "cache_hit_rate",
    "spec_accept_length",
    "prompt_tokens_total",
    "generation_tokens_total",
    "cached_tokens_total",
    "num_requests_total",
    "time_to_first_token_seconds_bucket",
    "inter_token_latency_seconds_bucket",
    "e2e_request_latency_seconds_bucket",
    "queue_time_seconds_bucket",
]
SGLANG_DASHBOARD_NAMES = [
    "cache_hit_rate",
    "e2e_request_latency_seconds_bucket",
    "e2e_request_latency_seconds_count",
    "gen_throughput",
    "num_queue_reqs",
    "num_running_reqs",
    "time_to_first_token_seconds_bucket",
    "time_to_first_token_seconds_sum",
]


def test_other_servers_dashboards_find_their_names_and_ours_finds_its_own(client):
    client.post("/v1/completions", json={**TEXT, "n": 2, "stream": True})
    found = read(client.get("/metrics").text)
    names = {sample.partition("{")[0] for sample in found}
    wanted = {f"vllm:{name}" for name in VLLM_NAMES}
    wanted |= {f"vllm:{name}_{end}" for name in VLLM_HISTOGRAMS for end in ("bucket", "sum", "count")}
    wanted |= {f"sglang:{name}" for name in SGLANG_NAMES} | {f"sglang_{name}" for name in SGLANG_DASHBOARD_NAMES}
    dashboard = (Path(__file__).parents[2] / "docs" / "dashboards" / "slipstream.json").read_text()
    wanted |= set(re.findall(r"\bslipstream_\w+", dashboard)) - {"slipstream_simulated_acceptance"}
    assert sorted(wanted - names) == []


def test_times_of_an_answer_add_up(client):
    for seed in range(3):
        client.post("/v1/completions", json={**TEXT, "seed": seed})
    found = read(client.get("/metrics").text)
    label = '{engine="0",model_name="tiny"}'
    parts = {name: found[f"vllm:{name}_sum{label}"] for name in (
        "request_queue_time_seconds", "request_prefill_time_seconds", "request_decode_time_seconds",
    )}  # fmt: skip
    whole = found[f"vllm:e2e_request_latency_seconds_sum{label}"]
    assert sum(parts.values()) == pytest.approx(whole, rel=0.05)
    assert all(value > 0 for value in parts.values())


def test_the_tree_changes_at_run_time_and_the_text_does_not():
    with Running(tiny_engine(num_pages=200)) as server, server.client() as client:
        before = client.post("/v1/completions", json=TEXT).json()["choices"][0]["text"]
        assert client.get("/speculation").json()["tree"] == {"depth": 3, "width": 2, "budget": 6}
        changed = client.post("/admin/speculation", json={"depth": 5, "width": 1, "budget": 0})
        assert changed.json()["tree"] == {"depth": 5, "width": 1, "budget": 0}
        answer = client.post("/v1/completions", json={**TEXT, "speculation_stats": True}).json()
        assert answer["choices"][0]["text"] == before
        assert len(answer["usage"]["speculation"]["offered_by_position"]) == 5
        refused = client.post("/admin/speculation", json={"depth": 60, "width": 60})
        assert refused.status_code == 400
        assert client.get("/speculation").json()["tree"]["depth"] == 5
        assert client.post("/admin/speculation", json={"deepth": 3}).status_code == 400


def test_simulated_acceptance_is_said_in_answers_metrics_and_log(caplog):
    with Running(tiny_engine(num_pages=200)) as server, server.client() as client:
        plain = client.post("/v1/completions", json=TEXT).json()
        assert "simulated_acceptance" not in plain
        changed = client.post("/admin/speculation", json={"simulated_acceptance": [1.0, 1.0, 0.0]})
        assert changed.json()["simulated_acceptance"] == [1.0, 1.0, 0.0]
        assert "SIMULATED ACCEPTANCE" in caplog.text
        answer = client.post("/v1/completions", json={**TEXT, "speculation_stats": True}).json()
        assert answer["simulated_acceptance"] == [1.0, 1.0, 0.0]
        assert answer["usage"]["completion_tokens"] == 30
        assert answer["usage"]["speculation"]["simulated"] is True
        # The pass over the prompt drafts nothing and emits 1 token; the others emit 3 each, the last of them cut to 2.
        assert answer["usage"]["speculation"]["passes"] == 11
        assert 'slipstream_simulated_acceptance{position="0"} 1.0' in client.get("/metrics").text
        wanted = {**TEXT, "response_format": {"type": "json_object"}}
        assert client.post("/v1/completions", json=wanted).status_code == 400
        assert client.post("/admin/speculation", json={"simulated_acceptance": [0.1, 0.9]}).status_code == 400
        assert client.post("/admin/speculation", json={"simulated_acceptance": []}).status_code == 200
        assert client.post("/v1/completions", json=TEXT).json()["choices"] == plain["choices"]


def test_information_routes(client, server):
    assert client.get("/v1/models").json()["data"][0]["id"] == "tiny"
    assert client.get("/v1/models/tiny").json()["max_model_len"] == 128
    assert client.get("/v1/models/other").status_code == 404
    assert client.get("/health").json() == {"status": "ready"}
    assert client.get("/health/live").json() == {"status": "live"}
    assert client.get("/version").json()["version"]
    tokens = client.post("/tokenize", json={"prompt": "abc"}).json()
    assert tokens["count"] == 3
    assert client.post("/detokenize", json={"tokens": tokens["tokens"]}).json() == {"prompt": "abc", "text": "abc"}
    chat = client.post("/tokenize", json={"messages": [{"role": "user", "content": "x"}]}).json()
    assert server.tokenizer.decode(chat["tokens"]) == "u:x\na:"
    assert client.post("/tokenize", json={}).status_code == 400
    assert client.post("/detokenize", json={"tokens": [10**6]}).status_code == 400
    document = client.get("/openapi.json").json()
    assert "/v1/chat/completions" in document["paths"]
    for operation in (one for path in document["paths"].values() for one in path.values()):
        assert "default" in operation["responses"] and "422" not in operation["responses"]
    kinds = document["paths"]["/v1/chat/completions"]["post"]["responses"]["200"]["content"]
    assert set(kinds) == {"application/json", "text/event-stream"}
    assert list(document["paths"]["/metrics"]["get"]["responses"]["200"]["content"]) == ["text/plain"]
    page = client.get("/docs").text
    assert "/v1/chat/completions" in page
    assert "https://" not in page and "http://" not in page
    assert json.dumps(document)


def test_the_draft_is_exchanged_while_serving_and_metrics_say_which_served_what(tmp_path):
    engine = tiny_engine()
    with CheckpointWriter(tmp_path / "draft", 1 << 30) as writer:
        add_draft(writer, engine.drafter.draft, "sglang", "tiny")
    with Running(engine) as server, server.client() as client:
        before = client.post("/v1/completions", json=TEXT).json()["choices"][0]["text"]
        assert client.get("/admin/draft").json()["draft"] == "as started"
        told = client.post("/admin/draft", json={"path": str(tmp_path / "draft")}).json()
        assert (told["draft"], told["before"]) == (str(tmp_path / "draft"), "as started")
        assert client.post("/v1/completions", json=TEXT).json()["choices"][0]["text"] == before
        served = {one["draft"]: one["passes"] for one in client.get("/admin/draft").json()["served"]}
        assert min(served.values()) > 0
        found = read(client.get("/metrics").text)
        assert found['slipstream_draft_passes_total{draft="as started"}'] == served["as started"]
        assert client.post("/admin/draft", json={"go_back": True}).json()["draft"] == "as started"
        for body, words in (
            ({}, "either 'path'"), ({"path": "x", "go_back": True}, "either 'path'"),
            ({"path": str(tmp_path / "nowhere")}, "nowhere"), ({"path": ""}, "path"),
        ):  # fmt: skip
            refused = client.post("/admin/draft", json=body)
            assert refused.status_code == 400 and words in refused.text
        assert client.get("/health").status_code == 200
