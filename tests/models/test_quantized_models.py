"""Quantized checkpoints run: a target stays close to itself, and a quantized draft changes no token."""

import json

import pytest
import torch
import transformers
from safetensors.torch import save_file

from dense import dense_context
from slipstream.checkpoint.draft_export import draft_config
from slipstream.checkpoint.names import draft_name
from slipstream.checkpoint.reader import open_checkpoint
from slipstream.kernels.cpu.ops import CpuOps
from slipstream.kernels.cpu.weights import PANEL_FORMATS
from slipstream.models.accounting import places
from slipstream.models.load import load_draft, load_target
from slipstream.models.packing import quantize_linears
from slipstream.quant.plan import QuantizeOptions, plan_quantize
from slipstream.quant.quantize import quantize
from slipstream.quant.scheme import SCHEMES, dequantize, scheme_named
from slipstream.speculation.sampling import SamplingParams
from tiny import OPS, engine_of, run, tiny_draft, tiny_target

CASES = [*((name, None, "quark") for name in SCHEMES), ("int4", 32, "quark"), ("int4", 32, "compressed-tensors")]
# How far logits may move, relative to their spread: about the square root of a layer's error, added up.
BOUNDS = {"ptpc_fp8": 0.12, "fp8": 0.12, "w8a8_int8": 0.04, "int4": 0.4, "mxfp4_weight_only": 0.4}
CONFIG = transformers.LlamaConfig(
    vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=128, tie_word_embeddings=False,
)  # fmt: skip


def quantized(source, out, name, group_size, dialect):
    options = QuantizeOptions(scheme_named(name, group_size), dialect=dialect)
    quantize(plan_quantize(source, options), out)
    return open_checkpoint(out)


def logits(model, tokens_T):
    with torch.inference_mode():
        hidden = model(tokens_T, dense_context(model.kv_shape, len(tokens_T), page_size=8))
        return model.logits(hidden.last_TD, OPS)


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory):
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("target")
    model = transformers.AutoModelForCausalLM.from_config(CONFIG).to(torch.bfloat16)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, mean=1.0 if parameter.dim() == 1 else 0.0, std=0.1)
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(("name", "group_size", "dialect"), CASES)
def test_a_quantized_target_gives_nearly_the_same_logits(target_folder, tmp_path, name, group_size, dialect):
    device = torch.device("cpu")
    dense = load_target(open_checkpoint(target_folder), torch.float32, device)
    packed = load_target(quantized(target_folder, tmp_path / "out", name, group_size, dialect), torch.float32, device)
    assert all(layer.self_attn.qkv_proj.packed is not None for layer in packed.layers)
    assert packed.lm_head.packed is None
    tokens_T = torch.randint(0, 97, (32,), generator=torch.Generator().manual_seed(1))
    expected_TV, got_TV = logits(dense, tokens_T), logits(packed, tokens_T)
    error = (got_TV - expected_TV).norm() / expected_TV.norm()
    assert 0 < error < BOUNDS.get(name, 0.6)


def test_quantizing_a_draft_leaves_a_head_it_shares_with_the_target_alone():
    target = tiny_target()
    draft = tiny_draft(target)
    draft.lm_head = target.lm_head
    quantize_linears(draft, OPS, but=target.lm_head)
    assert draft.fc.packed is not None
    assert target.lm_head.weight is not None and target.lm_head.packed is None


@pytest.mark.parametrize(("name", "group_size", "dialect"), CASES)
def test_a_quantized_draft_changes_no_token(tmp_path, name, group_size, dialect):
    target = tiny_target()
    draft = tiny_draft(target, intermediate_size=64)
    folder = tmp_path / "draft"
    folder.mkdir()
    tensors = {
        draft_name(key, "sglang"): getattr(place.module, place.parameter)[place.start : place.start + place.shape[0]]
        for key, place in places(draft).items()
        if key != "embed_tokens.weight"
    }
    save_file({key: value.to(torch.bfloat16).clone() for key, value in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(draft_config(draft.spec, "sglang")))
    source = quantized(folder, tmp_path / "out", name, group_size, dialect)
    packed = load_draft(source, target, torch.float32)
    assert packed.layers[0].mlp.down_proj.packed is not None and packed.fc.packed is None
    _check_expanded_on_a_cpu(source, target, packed)
    prompts, params = [[3, 14, 15], [9, 2, 6, 5]], [SamplingParams(max_tokens=12, temperature=0.8)] * 2
    plain = run(engine_of(target), prompts, params, [1, 2])
    assert run(engine_of(target, packed), prompts, params, [1, 2]) == plain


def _check_expanded_on_a_cpu(source, target, packed):
    """Layers in formats that the CPU kernels do not read become dense, with the numbers that were stored."""
    down = load_draft(source, target, torch.float32, ops=CpuOps(1)).layers[0].mlp.down_proj
    stored = packed.layers[0].mlp.down_proj.packed
    assert (down.packed is None) == (stored.format not in PANEL_FORMATS)
    assert down.packed is not None or torch.equal(down.weight, dequantize(stored))
