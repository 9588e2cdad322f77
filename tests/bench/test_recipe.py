"""A recipe that cannot mean what it says is refused with a sentence that names the place."""

from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from slipstream.bench.arms import differences
from slipstream.bench.inferencex import Unsaid, import_entry, read_master
from slipstream.bench.plan import build_plan, server_command
from slipstream.bench.recipe_file import RecipeError, load_recipe
from slipstream.bench.server_line import read_server_line
from slipstream.bench.workload import WorkloadError, read_prompts
from tests.bench.inferencex_entry import KEY, MASTER

GOOD = """
name: tiny
about: a test
machine: {name: test box, gpus: 8}
target: {id: org/target, context: 4096, token_range: [10, 100]}
drafts: {bf16: {id: org/draft, precision: bf16}}
servers: {vllm: {port: 8000, flags: {enforce-eager: true, seed: 1}, env: {A: "1", B: "2"}}}
baseline: plain
arms:
  plain: {}
  spec: {draft: bf16, speculation: {method: eagle3, num_steps: 3}, env: {B: null, C: "3"}, flags: {seed: null}}
workloads:
  short: {kind: random, input_tokens: 32, output_tokens: 16}
concurrency: [1, 2]
seeds: [1, 2, 3]
"""


@pytest.fixture
def load(tmp_path):
    def load(text, *overrides):
        path = tmp_path / "tiny.yaml"
        path.write_text(text)
        return load_recipe(path, overrides)

    return load


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("concurency=[1]", "unknown key 'concurency'. Did you mean 'concurrency'?"),
        ("servers={}", "at least one server is needed"),
        ("target.context=40", "48 tokens do not fit in a context of 40"),
        ("servers.vllm.context=9000", "context 9000 exceeds the target's 4096"),
        ("topologies=[{tp: 16}]", "topology tp16 needs 16 devices; test box has 8"),
        ("topologies=[{tp: 8, pp: 2}]", "topology tp8-pp2 needs 16 devices; test box has 8"),
        ("nodes={hosts: [a]}", "nodes are a; name at least two, each once"),
        ("topologies=[{tp: 0}]", "tp 0 and ep 1 must be at least 1"),
        ("topologies=[{tp: 4, ep: 3}]", "ep 3 does not divide tp 4"),
        ("topologies=[{tp: 4, ep: 2}]", "vLLM spreads experts over all of tp"),
        ("topologies=[{tp: 4}, {tp: 4}]", "topology tp4 is given twice"),
        ("arms.spec.speculation.topk=4", "vLLM drafts chains only"),
        ("arms.spec.speculation.draft_tp=2", "draft_tp 2 is neither 1 nor tp 1"),
        ("arms.spec.draft=fp8", "draft 'fp8' is not among the drafts (bf16)"),
        ("arms.plain.draft=bf16", "a draft without 'speculation' would never be used"),
        ("arms.plain.server=sglang", "server 'sglang' has no entry under 'servers'"),
        ("arms.plain.server=tgi", "'tgi' is not one of 'slipstream', 'vllm', 'sglang'"),
        ("baseline=none", "baseline 'none' is not an arm"),
        ("concurrency=[1, 1]", "concurrency holds a value twice"),
        ("concurrency=[]", "concurrency is empty"),
        ("concurrency=[0]", "concurrency must not go below 1"),
        ("seeds=[true]", "expected a whole number, found True"),
        ("workloads.short.range_ratio=1.5", "range_ratio is 1.5"),
        ("workloads.short.input_tokens=null", "needs 'input_tokens'"),
        ("workloads.short.kind=prompts", "needs 'path'"),
        ("target.token_range=null", "random prompts need target.token_range"),
        ("servers.vllm.env.A=1", "expected text, found 1. Put it in quotes."),
        ("schedule.rounds=9", "9 rounds need at least as many seeds"),
    ],
)
def test_a_mistake_is_refused_where_it_is(load, change, words):
    with pytest.raises(RecipeError) as error:
        load(GOOD, change)
    assert words in str(error.value)
    assert "tiny.yaml" in str(error.value)


def test_a_key_given_twice_is_refused(load):
    with pytest.raises(RecipeError, match="key 'seeds' is given twice"):
        load(GOOD + "seeds: [4]\n")


def test_a_file_that_is_no_text_is_refused(tmp_path):
    (tmp_path / "tiny.yaml").write_bytes(b"\xff\xfe")
    with pytest.raises(RecipeError, match=r"tiny\.yaml: is not a text file in UTF-8"):
        load_recipe(tmp_path / "tiny.yaml")


def test_a_missing_key_is_named(load):
    with pytest.raises(RecipeError, match="key 'baseline' is missing"):
        load(GOOD.replace("baseline: plain\n", ""))


def test_arms_differ_only_in_what_they_declare(load):
    plan = build_plan(load(GOOD))
    commands = {point.key.arm: server_command(point.launch) for point in plan.points()}
    assert commands["plain"].env == {"A": "1", "B": "2"}
    assert commands["spec"].env == {"A": "1", "C": "3"}
    added = set(commands["spec"].argv) - set(commands["plain"].argv)
    gone = set(commands["plain"].argv) - set(commands["spec"].argv)
    assert gone == {"--seed"} or gone == {"--seed", "1"} - set(commands["spec"].argv)
    assert len(added) == 2 and "--speculative-config" in added
    assert set(differences(plan.loaded.recipe, "spec", "plain")) == {"draft", "speculation", "env", "flags"}


def test_servers_in_turn_start_once_a_round_and_change_places(load):
    plan = build_plan(load(GOOD, "schedule.rounds=3"))
    order = [block.points[0].key.arm for block in plan.blocks]
    assert order == ["plain", "spec", "spec", "plain", "plain", "spec"]
    assert [{p.key.seed for p in block.points} for block in plan.blocks[::2]] == [{1}, {2}, {3}]
    assert len({point.key for point in plan.points()}) == 2 * 2 * 3


def test_servers_together_have_their_own_ports_and_arms_take_turns_point_by_point(load):
    plan = build_plan(load(GOOD, "schedule.servers=together"))
    (block,) = plan.blocks
    assert sorted(launch.port for launch in block.launches) == [8000, 8001]
    arms = [point.key.arm for point in block.points]
    assert arms[:4] == ["plain", "spec", "spec", "plain"]
    pairs = [block.points[i : i + 2] for i in range(0, len(block.points), 2)]
    assert all(a.key.seed == b.key.seed and a.key.concurrency == b.key.concurrency for a, b in pairs)


def test_an_optional_arm_whose_draft_is_not_here_is_left_out_with_a_reason(load):
    loaded = load(GOOD, "drafts.bf16.path=/nowhere/draft", "arms.spec.optional=true")
    plan = build_plan(loaded)
    assert plan.skipped_arms == {"spec": "draft org/draft is not at /nowhere/draft"}
    assert {point.key.arm for point in plan.points()} == {"plain"}
    assert build_plan(loaded, ["plain"]).skipped_arms == {}, "nobody asked for it"


UNSAID = Unsaid((0, 1000), draft="amd/kimi-k2.5-eagle3-fp8", draft_precision="fp8", num_steps=6)


@pytest.fixture
def master(tmp_path):
    def write(text):
        path = tmp_path / "amd-master.yaml"
        path.write_text(text)
        return read_master(path)

    return write


def test_an_inferencex_entry_becomes_a_recipe_that_schedules_every_row(master, tmp_path):
    ((name, text),) = import_entry(master(MASTER), KEY, UNSAID).recipes.items()
    path = tmp_path / f"{name}.yaml"
    path.write_text(text)
    plan = build_plan(load_recipe(path))
    keys = [point.key for point in plan.points()]
    assert {key.concurrency for key in keys} == {4, 8, 16, 32, 64}
    assert {key.workload for key in keys} == {"1k1k", "1k8k"}
    assert {key.topology for key in keys} == {"tp4", "tp8"}
    assert {key.arm for key in keys} == {"no-spec", "eagle3-fp8"}
    contexts = {(p.key.workload, p.launch.context) for p in plan.points()}
    assert contexts == {("1k1k", 2304), ("1k8k", 9472)}


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("tp: 8,", "tp: 16,", "needs 16 devices"),
        ("tp: 8,", "tp: -4,", "tp -4"),
        ("tp: 4,", "tp: 4, ep: 3,", "ep 3 does not divide"),
        ("conc-end: 64", "conc-list: [4]", "give either conc-list"),
        ("isl: 1024", "isl: 0", "input_tokens"),
        ("framework: vllm", "framework: trt", "framework: trt has no launcher"),
        ("runner: mi355x", "runner: mi355x\n  draft-model: x", "unknown key 'draft_model'"),
        ("multinode: false", "multinode: true", "multinode"),
        ("runner: mi355x", "runner: mi355x\n  runner: h100", "given twice"),
    ],
)
def test_what_inferencex_would_accept_or_run_wrongly_is_refused(master, old, new, words):
    with pytest.raises((RecipeError,), match=words.replace("[", r"\[")):
        import_entry(master(MASTER.replace(old, new)), KEY, UNSAID)


def test_an_entry_that_speculates_without_naming_its_draft_asks_for_it(master):
    with pytest.raises(RecipeError, match="add --draft and --num-steps"):
        import_entry(master(MASTER), KEY, Unsaid((0, 1000)))


def test_rows_without_a_counterpart_are_named_and_the_others_imported(master):
    text = MASTER.replace("{tp: 8, spec-decoding: eagle3_fp8", "{tp: 8, dp-attn: true, spec-decoding: eagle3_fp8", 1)
    text = text.replace("{tp: 4, spec-decoding: eagle3_fp8", "{tp: 4, spec-decoding: mtp", 1)
    found = import_entry(master(text), KEY, UNSAID)
    assert len(found.left_out) == 2
    assert "1024/1024, tp 8, ep 1: dp-attn: true" in found.left_out[0]
    assert "1024/1024, tp 4, ep 1: spec-decoding: mtp says neither method nor draft" in found.left_out[1]
    (recipe,) = (yaml.safe_load(one) for one in found.recipes.values())
    assert list(recipe["workloads"]) == ["1k8k"]
    whole = import_entry(master(text), KEY, replace(UNSAID, method="eagle3"))
    assert len(whole.left_out) == 1


def test_a_servers_line_gives_flags_environment_and_draft(master):
    line = read_server_line(
        "VLLM_ROCM_USE_AITER=1 vllm serve amd/Kimi-K2.5-MXFP4 --port 8888 --tensor-parallel-size=8 "
        "--gpu-memory-utilization 0.90 --max-model-len 2304 --no-enable-prefix-caching --mm-encoder-tp-mode data "
        """--speculative-config '{"model":"d","method":"eagle3","num_speculative_tokens":6,"""
        """"draft_tensor_parallel_size":1}'"""
    )
    (text,) = import_entry(master(MASTER), KEY, Unsaid((0, 1000), line=line)).recipes.values()
    recipe = yaml.safe_load(text)
    assert recipe["servers"]["vllm"]["env"] == {"VLLM_ROCM_USE_AITER": "1"}
    assert recipe["servers"]["vllm"]["flags"] == {
        "gpu-memory-utilization": "0.90",
        "no-enable-prefix-caching": True,
        "mm-encoder-tp-mode": "data",
    }
    assert recipe["arms"]["eagle3-fp8"]["speculation"] == {"method": "eagle3", "num_steps": 6, "draft_tp": 1}
    assert recipe["drafts"]["draft"]["id"] == "d"
    sglang = read_server_line(
        "python -m sglang.launch_server --model m --speculative-algorithm EAGLE3 --speculative-draft-model-path d "
        "--speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4 --numa-node 0 1"
    )
    assert sglang.flags == {"numa-node": ("0", "1")}
    assert sglang.speculation is not None
    assert sglang.speculation.num_draft_tokens == 4


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("python train.py", "starts neither"),
        ("vllm serve m --port $PORT", "a variable of its script"),
        ("""vllm serve m --speculative-config '{"method":"mtp","num_speculative_tokens":1}'""", "drafts by 'mtp'"),
        ("""vllm serve m --speculative-config '{"method":"eagle3","temperature":1}'""", "says more than"),
        ("python -m sglang.launch_server --speculative-algorithm NEXTN", "drafts by NEXTN"),
    ],
)
def test_a_line_that_a_recipe_cannot_say_is_refused(line, words):
    with pytest.raises(RecipeError, match=words):
        read_server_line(line)


def test_yaml_written_by_import_is_plain_yaml(master):
    ((_, text),) = import_entry(master(MASTER), KEY, UNSAID).recipes.items()
    assert yaml.safe_load(text)["traffic"]["requests_per_stream"] == 10


def test_prompts_may_be_called_texts_and_other_lines_are_named(tmp_path):
    path = tmp_path / "texts.jsonl"
    path.write_text('{"text": "one"}\n{"prompt": "two"}\n')
    assert read_prompts(path, chat=False) == [("one", ()), ("two", ())]
    path.write_text('{"text": "one"}\n{"question": "two"}\n')
    with pytest.raises(WorkloadError, match="line 2: expected an object with 'prompt', 'text' or 'messages'"):
        read_prompts(path, chat=True)


def test_shipped_prompts_can_be_read():
    path = Path(__file__).parents[2] / "recipes/bench/prompts/mixed.jsonl"
    assert len(read_prompts(path, chat=True)) == 32
