"""Builders of small checkpoint folders to quantize."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

HIDDEN, INNER, VOCAB = 64, 96, 40


def draft_tensors(seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    """Return the tensors of a random EAGLE-3 draft."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * 0.02).to(dtype)

    return {
        "embed_tokens.weight": normal(VOCAB, HIDDEN),
        "fc.weight": normal(HIDDEN, 3 * HIDDEN),
        "lm_head.weight": normal(VOCAB, HIDDEN),
        "norm.weight": normal(HIDDEN) + 1,
        "midlayer.input_layernorm.weight": normal(HIDDEN) + 1,
        "midlayer.self_attn.q_proj.weight": normal(HIDDEN, 2 * HIDDEN),
        "midlayer.self_attn.k_proj.weight": normal(HIDDEN // 2, 2 * HIDDEN),
        "midlayer.self_attn.v_proj.weight": normal(HIDDEN // 2, 2 * HIDDEN),
        "midlayer.self_attn.o_proj.weight": normal(HIDDEN, HIDDEN),
        "midlayer.mlp.gate_proj.weight": normal(INNER, HIDDEN),
        "midlayer.mlp.up_proj.weight": normal(INNER, HIDDEN),
        "midlayer.mlp.down_proj.weight": normal(HIDDEN, INNER),
        "d2t": torch.arange(VOCAB),
    }


def write_folder(folder: Path, tensors: dict[str, torch.Tensor], shards: int = 1) -> Path:
    """Write tensors as a checkpoint folder with a tokenizer file and a note beside them."""
    folder.mkdir(parents=True)
    names = sorted(tensors)
    files = [f"model-{i + 1:05d}-of-{shards:05d}.safetensors" for i in range(shards)]
    files = ["model.safetensors"] if shards == 1 else files
    weight_map = {}
    for i, file in enumerate(files):
        part = {name: tensors[name] for name in names[i::shards]}
        save_file(part, folder / file, {"format": "pt"})
        weight_map.update(dict.fromkeys(part, file))
    if shards > 1:
        index = {"metadata": {}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(
        json.dumps({"architectures": ["LlamaForCausalLMEagle3"], "hidden_size": HIDDEN})
    )
    (folder / "tokenizer.json").write_text("{}")
    (folder / "README.md").write_text("a draft")
    return folder
