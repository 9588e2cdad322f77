"""Tiny GGUF files, written with the gguf package."""

import gguf
import numpy as np
import torch
from gguf.quants import quantize
from tokenizers import pre_tokenizers

from slipstream.checkpoint.names import gguf_name

HEADS, KV_HEADS, HEAD_DIM, HIDDEN = 4, 2, 16, 64
Q, K, GATE = (f"model.layers.0.{part}.weight" for part in ("self_attn.q_proj", "self_attn.k_proj", "mlp.gate_proj"))


def tiny_weights():
    generator = torch.Generator().manual_seed(5)

    def random(*shape):
        return torch.randn(*shape, generator=generator)

    return {
        "model.embed_tokens.weight": random(270, HIDDEN),
        Q: random(HEADS * HEAD_DIM, HIDDEN),
        K: random(KV_HEADS * HEAD_DIM, HIDDEN),
        "model.layers.0.self_attn.k_proj.bias": random(KV_HEADS * HEAD_DIM),
        GATE: random(96, HIDDEN),
        "model.norm.weight": random(HIDDEN),
    }


def stored(name, tensor, architecture):
    """What llama.cpp's converter stores: for llama, rotary halves interleaved into neighbouring pairs per head."""
    heads = {"q": HEADS, "k": KV_HEADS}.get(name.split(".self_attn.")[-1][0]) if "self_attn" in name else None
    array = tensor.numpy()
    if architecture != "llama" or heads is None:
        return array
    halves = array.reshape(heads, 2, array.shape[0] // heads // 2, *array.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(array.shape))


def write_gguf(path, architecture="llama", quant=None, metadata=None, extra=None, pre="gpt-2"):
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(1)
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(96)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(500000.0)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<|bos|>", "<|eos|>", "<tool>", *letters, "Ġh", "Ġhi"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 4, *[1] * (len(tokens) - 3)])
    writer.add_token_merges(["Ġ h", "Ġh i"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    for add in metadata or ():
        add(writer)
    for name, tensor in tiny_weights().items():
        array = stored(name, tensor, architecture)
        kind = quant if quant is not None and array.ndim == 2 else None
        if kind is None:
            writer.add_tensor(gguf_name(name), array)
        else:
            writer.add_tensor(gguf_name(name), quantize(array, kind), raw_dtype=kind)
    for name, array in (extra or {}).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
