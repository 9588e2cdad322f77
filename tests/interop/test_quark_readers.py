"""vLLM's and SGLang's own code reads what slipstream writes: every layer by its right scheme, fc and lm_head alone."""

import dataclasses
import json
import sys
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).parents[1] / "quant"))

from folders import draft_tensors, write_folder

from dense import dense_context
from slipstream.checkpoint.draft_export import draft_config
from slipstream.checkpoint.names import draft_name
from slipstream.checkpoint.reader import open_checkpoint
from slipstream.checkpoint.spec import RopeSpec
from slipstream.models.accounting import places
from slipstream.models.eagle3 import Eagle3Draft
from slipstream.models.load import load_target
from slipstream.quant.plan import QuantizeOptions, plan_quantize
from slipstream.quant.quantize import quantize
from slipstream.quant.scheme import scheme_named
from tiny import DRAFT_SPEC, OPS, randomise

pytestmark = pytest.mark.interop

# The names each engine gives the layers of an EAGLE-3 draft of a 61-layer target.
VLLM_DRAFT = [
    f"model.layers.61.{name}"
    for name in ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
]
SGLANG_DRAFT = ["model.qkv_proj", "model.self_attn.o_proj", "model.gate_up_proj", "model.down_proj"]
TARGET = [f"model.layers.{i}.{name.partition('.61.')[2]}" for i in range(2) for name in VLLM_DRAFT]
JOINED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
VLLM_SCHEMES = [
    ("ptpc_fp8", None, "QuarkW8A8Fp8"),
    ("fp8", None, "QuarkW8A8Fp8"),
    ("w8a8_int8", None, "QuarkW8A8Int8"),
    ("int4", 32, "QuarkW4A16Int4"),
    ("mxfp4", None, "QuarkOCP_MX"),
    ("mxfp4_weight_only", None, "QuarkOCP_MX"),
    ("int4", None, "ValueError: Quark W4A16 weight.group_size must be a positive int, got None"),
]
SGLANG_SCHEMES = [("ptpc_fp8", "QuarkW8A8Fp8"), ("fp8", "QuarkW8A8Fp8"), ("mxfp4", "QuarkW4A4MXFP4")]


def quantized(source, out, name, group_size=None, dialect="quark", **options):
    scheme = QuantizeOptions(scheme_named(name, group_size), dialect=dialect, **options)
    quantize(plan_quantize(source, scheme), out)
    return out


@pytest.fixture(scope="module")
def draft(tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp("draft") / "draft", draft_tensors())


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, max_position_embeddings=256, tie_word_embeddings=False,
        bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("target") / "target"
    model = transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, mean=1.0 if parameter.dim() == 1 else 0.0, std=0.06)
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(("name", "group_size", "scheme"), VLLM_SCHEMES)
def test_vllm_maps_every_layer_of_a_draft(readers, draft, tmp_path, name, group_size, scheme):
    out = quantized(draft, tmp_path / "out", name, group_size)
    found = readers("vllm_layers.py", out, "{}", "model.fc", "lm_head", *VLLM_DRAFT)
    assert found == {"model.fc": "dense", "lm_head": "dense", **dict.fromkeys(VLLM_DRAFT, scheme)}


@pytest.mark.parametrize(("name", "scheme"), SGLANG_SCHEMES)
def test_sglang_maps_every_layer_of_a_draft(readers, draft, tmp_path, name, scheme):
    out = quantized(draft, tmp_path / "out", name)
    found = readers("sglang_layers.py", out, "{}", "model.fc", "fc", "lm_head", *SGLANG_DRAFT)
    assert found == {"model.fc": "dense", "fc": "dense", "lm_head": "dense", **dict.fromkeys(SGLANG_DRAFT, scheme)}


@pytest.mark.parametrize("script", ["vllm_layers.py", "sglang_layers.py"])
def test_a_target_with_layers_left_out_is_mapped_as_meant(readers, target, tmp_path, script):
    out = quantized(target, tmp_path / "out", "ptpc_fp8", exclude=("model.layers.1.mlp.*", "re:.*layers.0.*[qkv]_proj"))
    found = readers(script, out, json.dumps(JOINED), "lm_head", *TARGET)
    dense = {"lm_head", "model.layers.1.mlp.gate_up_proj", "model.layers.1.mlp.down_proj"}
    dense.add("model.layers.0.self_attn.qkv_proj")
    assert {name for name, scheme in found.items() if scheme == "dense"} == dense
    assert set(found.values()) == {"dense", "QuarkW8A8Fp8"}


@pytest.mark.parametrize("dialect", ["quark", "compressed-tensors"])
@pytest.mark.parametrize(("name", "group_size"), [("ptpc_fp8", None), ("w8a8_int8", None), ("int4", 32)])
def test_vllm_runs_a_quantized_target_to_the_same_log_probabilities(
    readers, target, tmp_path, name, group_size, dialect
):
    out = quantized(target, tmp_path / "out", name, group_size, dialect)
    prompt = torch.randint(3, 512, (24,), generator=torch.Generator().manual_seed(2)).tolist()
    theirs = torch.tensor(readers("vllm_logits.py", out, json.dumps({"prompt": prompt, "draft": None}))["logprobs"])
    ours = log_probabilities(out, prompt)
    lost = (log_probabilities(target, prompt) - ours).square().mean().sqrt().item()
    apart = (theirs - ours).square().mean().sqrt().item()
    # They compute in BF16, we in float32: below what the format itself costs. A wrong reading is apart by 1 and more.
    assert apart < lost < 0.5, (apart, lost)


def test_vllm_runs_our_fp8_draft_and_its_tokens_are_those_without_it(readers, target, tmp_path):
    spec = dataclasses.replace(
        DRAFT_SPEC, vocab_size=512, draft_vocab_size=512, hidden_size=256, target_hidden_size=256,
        intermediate_size=512, head_dim=64, rope=RopeSpec(theta=10000.0, rotary_dim=64), captured_layers=(0, 1, 2),
    )  # fmt: skip
    draft = Eagle3Draft(spec)
    randomise(draft, 5, 0.06)
    folder = tmp_path / "draft"
    folder.mkdir()
    tensors = {
        draft_name(name, "vllm"): getattr(place.module, place.parameter)[place.start : place.start + place.shape[0]]
        for name, place in places(draft).items()
    }
    save_file({name: rows.to(torch.bfloat16).clone() for name, rows in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(draft_config(spec, "vllm")))
    out = quantized(folder, tmp_path / "out", "ptpc_fp8")
    prompt = torch.randint(3, 512, (24,), generator=torch.Generator().manual_seed(2)).tolist()
    plain = readers("vllm_logits.py", target, json.dumps({"prompt": prompt, "draft": None}))
    drafted = readers("vllm_logits.py", target, json.dumps({"prompt": prompt, "draft": str(out)}))
    assert drafted["tokens"] == plain["tokens"]


def log_probabilities(folder, prompt):
    model = load_target(open_checkpoint(folder), torch.float32, torch.device("cpu"))
    tokens_T = torch.tensor(prompt)
    with torch.inference_mode():
        hidden = model(tokens_T, dense_context(model.kv_shape, len(prompt), page_size=8))
        logits_TV = model.logits(hidden.last_TD, OPS)
    return logits_TV.log_softmax(-1)[:-1].gather(1, tokens_T[1:, None])[:, 0]
