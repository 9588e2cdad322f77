"""Families as their publishers quantize them: the numbers of the dequantized model, or within the format's rounding."""

import json

import torch
from safetensors.torch import load_file

from slipstream.checkpoint.reader import open_checkpoint
from slipstream.models.load import load_target
from slipstream.models.moe import Experts
from slipstream.quant.formats import mxfp4
from tiny_families import folder_of, some_tokens, tiny
from tiny_moe import passes, quantized, save, tensors_of, write

CPU = torch.device("cpu")


def formats(model: torch.nn.Module) -> set[str]:
    return {part.packed[0].format for part in model.modules() if isinstance(part, Experts) and part.packed is not None}


def test_gpt_oss_in_mxfp4_is_the_dequantized_model(tmp_path):
    """Stacks of codes [E, rows, blocks, 16] with a scale for each block, gate and up in turns, as OpenAI has them."""
    theirs = tiny("gpt-oss")
    folder = save(theirs, tmp_path / "dense")
    stored, decoded = {}, {}
    for name, value in tensors_of(folder).items():
        if name.endswith(("gate_up_proj", "down_proj")) and ".experts." in name:
            packed = [mxfp4.encode(matrix.t().contiguous(), "best") for matrix in value]
            codes, scales = (torch.stack(parts) for parts in zip(*packed, strict=True))
            stored[f"{name}_blocks"] = codes.view(*codes.shape[:2], -1, 16)
            stored[f"{name}_scales"] = scales
            decoded[name] = torch.stack([mxfp4.decode(*parts).t() for parts in packed])
        else:
            stored[name] = value
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    ours = load_target(open_checkpoint(write(tmp_path / "mxfp4", config, stored)), torch.float32, CPU)
    assert formats(ours) == {"mxfp4"}
    theirs.load_state_dict(decoded, strict=False)
    tokens_T = some_tokens(24)
    with torch.inference_mode():
        expected_TV = theirs(tokens_T[None]).logits[0]
    torch.testing.assert_close(passes(ours, tokens_T, [24], True)[0], expected_TV, atol=1e-4, rtol=0)


def test_compressed_tensors_int4_experts_load_as_stored(tmp_path):
    dense = folder_of("Qwen3-MoE", tmp_path / "dense")
    folder = quantized(
        dense, tmp_path / "int4", "int4", 32, "compressed-tensors", ("*self_attn*", "model.layers.1.mlp.*")
    )
    assert formats(load_target(open_checkpoint(folder), torch.float32, CPU)) == {"int4_group"}
    assert any(name.endswith("weight_packed") for path in folder.glob("*.safetensors") for name in load_file(path))
