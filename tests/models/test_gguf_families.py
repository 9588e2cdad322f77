"""GGUF files of families with experts give the logits of the folder they were made of, from their stored blocks."""

import gguf
import pytest
import torch
from gguf.quants import quantize

from slipstream.checkpoint.reader import open_checkpoint
from slipstream.kernels import select
from slipstream.models.load import load_target
from slipstream.models.moe import Experts
from tiny_families import folder_of, some_tokens
from tiny_moe import VOCAB, passes

CPU = torch.device("cpu")
FFN_NORM = {"qwen3moe": "ffn_norm", "gpt-oss": "post_attention_norm"}  # as llama.cpp's converter has them
NAMES = {"qwen3moe": "Qwen3-MoE, all experts", "gpt-oss": "gpt-oss"}


def write_gguf(path, kind, target, experts):
    """Write what llama.cpp's converter writes: stacks of each expert's gate, up and down, the rest by block."""
    spec, writer = target.spec, gguf.GGUFWriter(path, kind)
    writer.add_block_count(spec.num_layers)
    writer.add_context_length(spec.max_position)
    writer.add_embedding_length(spec.hidden_size)
    writer.add_feed_forward_length(spec.intermediate_size)
    writer.add_head_count(spec.num_heads)
    writer.add_head_count_kv(spec.num_kv_heads)
    writer.add_key_length(spec.head_dim)
    writer.add_value_length(spec.head_dim)
    writer.add_layer_norm_rms_eps(spec.rms_eps)
    writer.add_rope_freq_base(spec.rope.theta)
    writer.add_expert_count(spec.moe.num_experts)
    writer.add_expert_used_count(spec.moe.routing.top_k)
    writer.add_expert_feed_forward_length(spec.moe.intermediate_size)
    if kind == "gpt-oss":
        writer.add_sliding_window(spec.narrowest_window)
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(spec.rope.factor)
        writer.add_rope_scaling_orig_ctx_len(spec.rope.original_max_position)
    writer.add_token_list([f"t{i}" for i in range(VOCAB)])

    def add(name, tensor, quant=None):
        array = tensor.detach().float().contiguous().numpy()
        if quant is None:
            writer.add_tensor(name, array)
        else:
            writer.add_tensor(name, quantize(array, quant), raw_dtype=quant)

    add("token_embd.weight", target.embed_tokens.weight)
    add("output_norm.weight", target.norm.weight)
    add("output.weight", target.lm_head.weight)
    for index, layer in enumerate(target.layers):
        attention, moe = layer.self_attn, layer.mlp
        add(f"blk.{index}.attn_norm.weight", layer.input_layernorm.weight)
        add(f"blk.{index}.{FFN_NORM[kind]}.weight", layer.post_attention_layernorm.weight)
        linears = {"attn_output": (attention.o_proj.weight, attention.o_proj.bias)}
        sizes = list(attention.qkv_proj.parts.values())
        biases = [None] * 3 if attention.qkv_proj.bias is None else attention.qkv_proj.bias.split(sizes)
        for name, weight, bias in zip("qkv", attention.qkv_proj.weight.split(sizes), biases, strict=True):
            linears[f"attn_{name}"] = (weight, bias)
        linears["ffn_gate_inp"] = (moe.gate.weight, moe.gate.bias_E)
        for name, (weight, bias) in linears.items():
            add(f"blk.{index}.{name}.weight", weight)
            if bias is not None:
                add(f"blk.{index}.{name}.bias", bias)
        if attention.q_norm is not None:
            add(f"blk.{index}.attn_q_norm.weight", attention.q_norm.weight)
            add(f"blk.{index}.attn_k_norm.weight", attention.k_norm.weight)
        if attention.sinks is not None:
            add(f"blk.{index}.attn_sinks.weight", attention.sinks)
        stacks = dict(zip(("gate", "up"), moe.experts.gate_up_weight.chunk(2, 1), strict=True))
        stacks["down"] = moe.experts.down_weight
        for name, stack in stacks.items():
            add(f"blk.{index}.ffn_{name}_exps.weight", stack, experts)
        if moe.experts.gate_up_bias is not None:
            stacks = dict(zip(("gate", "up"), moe.experts.gate_up_bias.chunk(2, 1), strict=True))
            for name, stack in (stacks | {"down": moe.experts.down_bias}).items():
                add(f"blk.{index}.ffn_{name}_exps.bias", stack)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(
    ("kind", "experts"),
    [("qwen3moe", None), ("qwen3moe", gguf.GGMLQuantizationType.Q8_0), ("gpt-oss", gguf.GGMLQuantizationType.MXFP4)],
)
def test_a_gguf_with_experts_gives_the_folders_logits(kind, experts, tmp_path):
    folder = load_target(open_checkpoint(folder_of(NAMES[kind], tmp_path / "folder")), torch.float32, CPU)
    path = write_gguf(tmp_path / "model.gguf", kind, folder, experts)
    plain = load_target(open_checkpoint(path), torch.float32, CPU)  # blocks expanded
    assert plain.spec.moe == folder.spec.moe and plain.spec.blocks == folder.spec.blocks
    tokens_T = some_tokens(24)
    expected, _ = passes(plain, tokens_T, [24], True)
    if experts is None:
        torch.testing.assert_close(expected, passes(folder, tokens_T, [24], True)[0], atol=1e-4, rtol=0)
        return
    kept = load_target(open_checkpoint(path), torch.float32, CPU, ops=select(CPU, "reference"))
    formats = {part.packed[0].format for part in kept.modules() if isinstance(part, Experts)}
    assert formats == {experts.name.lower()}
    got, _ = passes(kept, tokens_T, [24], True)
    error_T = (got - expected).norm(dim=1) / expected.norm(dim=1)
    # MXFP4's weights are only decoded; Q8_0 rounds inputs to codes as well, by which a token may change an expert.
    assert error_T.max() < 1e-4 if kind == "gpt-oss" else error_T.median() < 0.03
