"""The shipped recipes of published experiments render to the published commands, flag by flag."""

import json
from pathlib import Path

import pytest

from slipstream.bench.plan import build_plan
from slipstream.bench.plan_text import plan_rows, plan_text
from slipstream.bench.recipe_file import load_recipe

RECIPES = Path(__file__).parents[2] / "recipes" / "bench"

SGLANG_ENV = """
TRITON_MAX_CACHE_SIZE=2147483648 AITER_FLYDSL_MOE_COMPARE_STAGE2=0 AITER_FLYDSL_MOE_COMPARE=0 AITER_FLYDSL_DEBUG=0
AITER_ENFORCE_DSL=1 DSL2_ROOT=/opt/FlyDSL AITER_USE_FLYDSL_MOE=1 AITER_USE_FLYDSL_MOE_STAGE1=1
AITER_USE_FLYDSL_MOE_STAGE2=1 MLIR_PATH=/opt/mlir_install CK_TILE_FLOAT_TO_BFLOAT16_DEFAULT=3 AITER_W4A8_USE_INT8=1
SGLANG_DISABLE_CUDNN_CHECK=1 SGLANG_USE_AITER=1 SGLANG_NUMA_BIND_V2=1
"""
SGLANG_SERVER = """
python -m sglang.launch_server --model amd/Kimi-K2.5-W4A8 --tp 8 --attention-backend aiter --host 0.0.0.0 --port 9527
--mem-fraction-static 0.80 --trust-remote-code --disable-radix-cache --enable-torch-compile
--numa-node 0 0 0 0 1 1 1 1
"""
SGLANG_SPECULATION = """
--speculative-algorithm EAGLE3 --speculative-draft-model-path /path/to/kimi-k2.5-eagle3
--speculative-num-steps {n} --speculative-eagle-topk 1 --speculative-num-draft-tokens {d}
"""
SGLANG_CLIENT = """
python3 -m sglang.bench_serving --model amd/Kimi-K2.5-W4A8 --dataset-name random --random-input 10240
--random-output 512 --num-prompts {prompts} --max-concurrency {concurrency} --request-rate inf --port 9527
--random-range-ratio 1.0
"""
VLLM_SERVER = """
vllm serve amd/Kimi-K2.5-MXFP4 --port 8888 --tensor-parallel-size 4 --gpu-memory-utilization 0.90
--max-model-len {context} --no-enable-prefix-caching --trust-remote-code --mm-encoder-tp-mode data
"""
VLLM_SPECULATION = (
    '{"model":"%s","method":"eagle3","num_speculative_tokens":6,"draft_tensor_parallel_size":1}'  # as published
)
VLLM_CLIENT = """
vllm bench serve --model amd/Kimi-K2.5-MXFP4 --backend vllm --dataset-name random --random-input-len 1024
--random-output-len 1024 --random-range-ratio 0.8 --num-prompts {prompts} --max-concurrency {concurrency}
--request-rate inf --ignore-eos --use-chat-template --trust-remote-code
"""
MINIMAX_SERVER = """
vllm serve MiniMaxAI/MiniMax-M2.5 --port 8888 --tensor-parallel-size {tp} --enable-expert-parallel
--gpu-memory-utilization 0.95 --max-model-len 2304 --kv-cache-dtype fp8 --block-size 32
--attention-backend ROCM_AITER_FA --reasoning-parser minimax_m2 --no-enable-prefix-caching
"""


def flags_of(argv):
    """Split a command into its program and a mapping of each flag to its values; a repeated flag is a mistake."""
    words = argv.split() if isinstance(argv, str) else list(argv)
    program, flags, current = [], {}, None
    for word in words:
        if word.startswith("--"):
            assert word not in flags, f"{word} given twice"
            current = flags[word] = []
        elif current is None:
            program.append(word)
        else:
            current.append(word)
    return program, flags


def env_of(text):
    return dict(pair.split("=", 1) for pair in text.split())


@pytest.fixture(scope="module")
def rows():
    def find(recipe, **wanted):
        plan = build_plan(load_recipe(RECIPES / recipe))
        return [row for row in plan_rows(plan) if all(row[key] == value for key, value in wanted.items())]

    return find


@pytest.mark.parametrize(
    ("arm", "n", "d", "tuned"),
    [
        ("eagle3", 3, 4, False),
        ("eagle3-tuned", 3, 4, True),
        ("eagle3-n2-d3", 2, 3, False),
        ("eagle3-n4-d6", 4, 6, False),
    ],
)
def test_kimi_on_sglang_starts_with_the_published_command_and_environment(rows, arm, n, d, tuned):
    (row, *_) = rows("kimi-k2.5-w4a8-sglang.yaml", arm=arm, workload="10k-512")
    assert flags_of(row["argv"]) == flags_of(SGLANG_SERVER + SGLANG_SPECULATION.format(n=n, d=d))
    extra = {"FLYDSL_MOE_STAGE1_SCHED": "0", "AITER_FLYDSL_STAGE2_TILE_K": "256"} if tuned else {}
    assert row["env"] == env_of(SGLANG_ENV) | extra


def test_kimi_on_sglang_without_a_draft_is_the_same_command_without_the_speculative_flags(rows):
    (row, *_) = rows("kimi-k2.5-w4a8-sglang.yaml", arm="no-spec", workload="10k-512")
    assert flags_of(row["argv"]) == flags_of(SGLANG_SERVER)
    assert row["env"] == env_of(SGLANG_ENV)


@pytest.mark.parametrize(("concurrency", "prompts"), [(2, 10), (40, 160)])
def test_kimi_on_sglang_is_loaded_as_published(rows, concurrency, prompts):
    (row, *_) = rows("kimi-k2.5-w4a8-sglang.yaml", arm="eagle3", workload="10k-512", concurrency=concurrency, seed=1)
    program, flags = flags_of(row["reference_client"])
    # The published command says neither seed nor warm-ups; a rerun has to.
    assert flags.pop("--seed") == ["1"]
    assert flags.pop("--warmup-requests") == [str(concurrency)]
    assert (program, flags) == flags_of(SGLANG_CLIENT.format(concurrency=concurrency, prompts=prompts))


@pytest.mark.parametrize(
    ("arm", "draft", "context", "image"),
    [
        ("fp8", "amd/kimi-k2.5-eagle3-fp8", 2304, "nightly-fb1ac806c55a6dc96fe92261b80c8550e9c39d2f"),
        ("bf16", "lightseekorg/kimi-k2.5-eagle3", 2248, "v0.19.0"),
        ("no-spec", None, 2304, "nightly-fb1ac806c55a6dc96fe92261b80c8550e9c39d2f"),
    ],
)
def test_kimi_on_vllm_starts_with_the_published_command_image_and_environment(rows, arm, draft, context, image):
    (row, *_) = rows("kimi-k2.5-mxfp4-vllm.yaml", arm=arm, workload="1k1k", topology="tp4")
    program, flags = flags_of(row["argv"])
    config = flags.pop("--speculative-config", None)
    assert config == ([VLLM_SPECULATION % draft] if draft else None)
    assert (program, flags) == flags_of(VLLM_SERVER.format(context=context))
    assert row["image"] == f"vllm/vllm-openai-rocm:{image}"
    assert row["env"] == {
        "VLLM_ROCM_USE_AITER": "1",
        "VLLM_ROCM_USE_AITER_FP4_ASM_GEMM": "1",
        "VLLM_ROCM_QUICK_REDUCE_QUANTIZATION": "INT4",
        "VLLM_ROCM_USE_AITER_RMSNORM": "0",
    }


@pytest.mark.parametrize("concurrency", [4, 8, 16, 32, 64])
def test_kimi_on_vllm_is_loaded_as_published(rows, concurrency):
    found = rows("kimi-k2.5-mxfp4-vllm.yaml", arm="fp8", workload="1k1k", topology="tp4", concurrency=concurrency)
    assert sorted(row["seed"] for row in found) == list(range(10))
    program, flags = flags_of(found[0]["reference_client"])
    # The card's loop leaves these out; its text gives the warm-ups, and the server it starts listens on 8888.
    assert flags.pop("--port") == ["8888"]
    assert flags.pop("--num-warmups") == [str(2 * concurrency)]
    assert flags.pop("--seed") == ["0"]
    assert (program, flags) == flags_of(VLLM_CLIENT.format(concurrency=concurrency, prompts=10 * concurrency))


@pytest.mark.parametrize("tp", [4, 8])
def test_minimax_on_vllm_starts_as_in_the_pull_request(rows, tp):
    (row, *_) = rows("minimax-m2.5-vllm.yaml", arm="bf16", workload="1k1k", topology=f"tp{tp}-ep{tp}")
    program, flags = flags_of(row["argv"])
    assert json.loads(flags.pop("--speculative-config")[0]) == {
        "model": "thoughtworks/MiniMax-M2.5-Eagle3",
        "method": "eagle3",
        "num_speculative_tokens": 3,
        "draft_tensor_parallel_size": 1,
    }
    assert (program, flags) == flags_of(MINIMAX_SERVER.format(tp=tp))
    assert row["env"] == {"VLLM_ROCM_USE_AITER": "1", "VLLM_ROCM_QUICK_REDUCE_QUANTIZATION": "INT4"}


def test_every_workload_of_a_matrix_is_scheduled(rows):
    found = rows("minimax-m2.5-vllm.yaml")
    cells = {(row["topology"], row["workload"], row["concurrency"], row["arm"], row["seed"]) for row in found}
    assert len(found) == len(cells) == 2 * 4 * 5 * 2 * 5
    assert {row["workload"] for row in found} == {"1k1k", "1k8k", "8k1k", "chat"}


def test_the_plan_warns_of_second_causes_and_of_settings_the_server_will_change():
    vllm = plan_text(build_plan(load_recipe(RECIPES / "kimi-k2.5-mxfp4-vllm.yaml")))
    assert "arm bf16 differs from no-spec in image, context besides how it drafts" in vllm
    sglang = plan_text(build_plan(load_recipe(RECIPES / "kimi-k2.5-w4a8-sglang.yaml")))
    assert "eagle3-n4-d6: with topk 1 SGLang verifies num_steps + 1 = 5 positions" in sglang
    assert "export AITER_FLYDSL_STAGE2_TILE_K=256" in sglang


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.yaml")), ids=lambda path: path.name)
def test_every_shipped_recipe_is_valid_and_plans(path):
    plan = build_plan(load_recipe(path))
    assert next(plan.points(), None) is not None
    assert plan_text(plan).startswith(plan.loaded.recipe.name)


def test_slipstream_is_told_to_draft_nothing_rather_than_left_to_choose(tmp_path):
    shipped = "/shipped/draft"
    settings = [f"drafts.bf16.path={shipped}", "arms.eagle3-bf16.optional=false"]
    rows = plan_rows(build_plan(load_recipe(RECIPES / "embedded.yaml", settings)))
    commands = {row["arm"]: flags_of(row["argv"]) for row in rows}
    assert commands["no-spec"][0] == ["slipstream", "serve", "embedded"]
    assert commands["no-spec"][1]["--draft"] == ["none"]
    assert commands["ngram"][1]["--draft"] == ["ngram"]
    chain = {"--draft": [shipped], "--depth": ["3"], "--width": ["1"], "--budget": ["3"]}
    assert commands["eagle3-bf16"][1].items() >= chain.items()
