"""Families as their publishers quantize them: the numbers of the dequantized model, or within the format's rounding."""

import json
import logging
from pathlib import Path

import pytest
import torch
from decoded import assert_runs_as_decoded

from slipstream.checkpoint.fields import Fields
from slipstream.checkpoint.reader import open_checkpoint
from slipstream.models.layers import Linear
from slipstream.models.load import load_target
from slipstream.models.moe import Experts
from slipstream.quant.compressed import compressed_layout
from slipstream.quant.formats import mxfp4
from slipstream.quant.scheme import dequantize
from slipstream.quant.word_columns import awq_layout, gptq_layout
from tiny_families import folder_of, some_tokens, tiny
from tiny_moe import blocks, passes, quantized, save, tensors_of, write

CPU = torch.device("cpu")
GROUP = 16


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


def compressed(scheme: str, group_size: int | None = None):
    """Quantize as Red Hat's llm-compressor does, with experts by themselves."""
    return lambda dense, out: quantized(dense, out, scheme, group_size, "compressed-tensors", ())


def fp8_blocks(dense: Path, out: Path) -> Path:
    """Quantize to FP8 blocks as Qwen and DeepSeek publish them."""
    return blocks(dense, out, ("lm_head", "embed", ".gate.", "norm", "visual"))


def compressed_blocks(dense: Path, out: Path) -> Path:
    """Quantize to FP8 blocks as llm-compressor's FP8_BLOCK writes them."""
    folder = fp8_blocks(dense, out / "inv")
    config = json.loads((folder / "config.json").read_text())
    weights = {"type": "float", "num_bits": 8, "strategy": "block", "block_structure": [128, 128], "symmetric": True}
    inputs = {"type": "float", "num_bits": 8, "strategy": "group", "group_size": 128, "dynamic": True}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    config["quantization_config"] = {
        "quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }  # fmt: skip
    renamed = {name.replace("_scale_inv", "_scale"): value for name, value in tensors_of(folder).items()}
    return write(out / "blocks", config, renamed)


# What the families beyond Llama's are published in: by their makers, or by Red Hat with llm-compressor.
SHIPPED = {
    "Qwen3-MoE, Qwen's FP8": ("Qwen3-MoE", fp8_blocks, "fp8_block"),
    "Qwen3-MoE, INT4": ("Qwen3-MoE", compressed("int4", 16), "int4_group"),
    "Qwen3-VL, Qwen's FP8": ("Qwen3-VL", fp8_blocks, "fp8_block"),
    "GLM-4.5, Z.ai's FP8": ("GLM-4.5", compressed("ptpc_fp8"), "fp8_per_channel"),
    "GLM-4.6, FP8 blocks": ("GLM-4.5", compressed_blocks, "fp8_block"),
    "GLM-4.7-Flash, FP8": ("GLM-4.7-Flash", compressed("ptpc_fp8"), "fp8_per_channel"),
    "Llama 4 Maverick, Meta's FP8": ("Llama 4", compressed("ptpc_fp8"), "fp8_per_channel"),
    "Llama 4 Scout, INT4": ("Llama 4", compressed("int4", 16), "int4_group"),
    "Gemma 3, FP8": ("Gemma 3", compressed("ptpc_fp8"), "fp8_per_channel"),
    "Gemma 3, INT8": ("Gemma 3", compressed("w8a8_int8"), "w8a8_int8"),
    "Gemma 3, INT4": ("Gemma 3", compressed("int4", 16), "int4_group"),
    "Gemma 4, FP8": ("Gemma 4", compressed("ptpc_fp8"), "fp8_per_channel"),
    "Gemma 4 MoE, FP8": ("Gemma 4 MoE", compressed("ptpc_fp8"), "fp8_per_channel"),
    "Gemma 4, FP8 blocks": ("Gemma 4", compressed_blocks, "fp8_block"),
    "Phi-4, FP8 blocks": ("Phi-4, whole blocks", compressed_blocks, "fp8_block"),
    "Phi-4, INT4": ("Phi-4", compressed("int4", 16), "int4_group"),
    "Phi-4-mini, FP8": ("Phi-4-mini", compressed("ptpc_fp8"), "fp8_per_channel"),
}


@pytest.mark.parametrize("name", SHIPPED)
def test_a_family_as_it_is_published_is_the_dequantized_model(name, tmp_path):
    family, quantize, format = SHIPPED[name]
    folder = quantize(experts_apart(folder_of(family, tmp_path / "dense"), tmp_path / "apart"), tmp_path / "packed")
    model = assert_runs_as_decoded(folder, tmp_path)
    linear = {part.packed.format for part in model.modules() if isinstance(part, Linear) and part.packed is not None}
    assert linear == {format}
    assert model.spec.moe is None or formats(model) == {format}


def experts_apart(folder: Path, out: Path) -> Path:
    """Write each expert's matrices by themselves, as quantizers do, where a family publishes them in stacks."""
    config, tensors = json.loads((folder / "config.json").read_text()), tensors_of(folder)
    stacks = [name for name in tensors if name.endswith((".experts.gate_up_proj", ".experts.down_proj"))]
    for name in stacks:
        stack, above = tensors.pop(name), name.rpartition(".")[0]
        # Llama 4 stores [in, out], Gemma 4 [out, in].
        stack = stack.transpose(1, 2) if config["model_type"] == "llama4_text" else stack
        parts = ("gate_proj", "up_proj") if name.endswith("gate_up_proj") else ("down_proj",)
        for expert, matrix in enumerate(stack):
            rows = zip(parts, matrix.chunk(len(parts)), strict=True)
            tensors |= {f"{above}.{expert}.{part}.weight": value for part, value in rows}
    return write(out, config, tensors)


@pytest.mark.parametrize("name", ["Gemma 4", "Gemma 4 MoE"])
def test_a_quantized_gemma_4_is_the_dequantized_model(name, tmp_path):
    """Blocks without value projections join what they have, and the router stays as it is."""
    folder = quantized(folder_of(name, tmp_path / "dense"), tmp_path / "int4", "int4", 16, "compressed-tensors", ())
    packed, dense = (load_target(open_checkpoint(folder), torch.float32, CPU) for _ in range(2))
    for part in dense.modules():
        if isinstance(part, Linear) and part.packed is not None:
            part.weight = torch.nn.Parameter(dequantize(part.packed).float(), requires_grad=False)
    assert dense.layers[-1].self_attn.qkv_proj.packed.format == "int4_group"
    tokens_T = some_tokens(24)
    expected_TV = passes(dense, tokens_T, [24], True)[0]
    torch.testing.assert_close(passes(packed, tokens_T, [24], True)[0], expected_TV, atol=1e-4, rtol=0)


def words(codes: torch.Tensor, axis: int, order: tuple[int, ...]) -> torch.Tensor:
    """Pack eight codes along an axis into a word, nibble k being entry order[k]."""
    groups = codes.unflatten(axis, (-1, 8)).movedim(axis + 1, 0).to(torch.int64)
    packed = sum(groups[entry] << (4 * nibble) for nibble, entry in enumerate(order))
    return torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32)


def as_words(kind: str, folder: Path, out: Path, group: int = GROUP) -> tuple[Path, Path]:
    """Write a folder's linear layers in words of eight codes, and the same folder with the numbers they stand for.

    Args:
        kind: "awq", "gptq", or "compressed" for what compressed-tensors makes of asymmetric INT4.
        group: how many inputs share a scale; 0 for all of a row.
    """
    stored, decoded = {}, {}
    for name, value in tensors_of(folder).items():
        decoded[name] = stored[name] = value
        if value.dim() != 2 or any(part in name for part in ("embed", "lm_head", ".gate.", "norm", "visual")):
            continue
        grouped = value.t().unflatten(0, (-1, group or value.shape[1]))  # inputs first: [groups, of a group, outputs]
        symmetric = kind == "gptq"
        low, high = (-grouped.abs().amax(1),) * 2 if symmetric else (grouped.amin(1), grouped.amax(1))
        scale = (-low / 7.5 if symmetric else (high - low) / 15).half().float()
        zero = torch.full_like(scale, 8.0) if symmetric else (-low / scale).round().clamp(0, 15)
        codes = (grouped / scale[:, None] + zero[:, None]).round().clamp(0, 15)
        decoded[name] = ((codes - zero[:, None]) * scale[:, None]).flatten(0, 1).t().contiguous()
        del stored[name]
        layer = packed_layer(kind, codes.flatten(0, 1), zero, scale.half())
        stored |= {f"{name.removesuffix('.weight')}.{suffix}": tensor for suffix, tensor in layer.items()}
    config = json.loads((folder / "config.json").read_text())
    weights = {"type": "int", "num_bits": 4, "symmetric": False, "strategy": "group" if group else "channel"}
    own = {
        "awq": {"bits": 4, "group_size": group, "zero_point": True, "version": "gemm"},
        "gptq": {"bits": 4, "group_size": group, "sym": True, "desc_act": False},
        "compressed": {"config_groups": {"g": {"targets": ["Linear"], "weights": weights | {"group_size": group}}}},
    }[kind]
    method = "compressed-tensors" if kind == "compressed" else kind
    described = {**config, "quantization_config": {"quant_method": method, **own}}
    return write(out / "stored", described, stored), write(out / "decoded", config, decoded)


def packed_layer(kind: str, codes: torch.Tensor, zero: torch.Tensor, scale: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return one layer's tensors by suffix; what comes in has inputs first."""
    order, inputs = tuple(range(8)), len(codes)
    if kind == "compressed":  # outputs first, and the zero points of eight rows in a word
        return {
            "weight_packed": words(codes.t(), 1, order), "weight_zero_point": words(zero.t(), 0, order),
            "weight_scale": scale.t().contiguous(), "weight_shape": torch.tensor([codes.shape[1], inputs]),
        }  # fmt: skip
    if kind == "gptq":
        index = (torch.arange(inputs) // (inputs // len(scale))).int()
        return {
            "qweight": words(codes, 0, order), "qzeros": words(zero - 1, 1, order), "scales": scale, "g_idx": index,
        }  # fmt: skip
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    return {"qweight": words(codes, 1, order), "qzeros": words(zero, 1, order), "scales": scale}


def test_words_of_awq_and_gptq_hold_codes_as_their_writers_put_them():
    # AutoAWQ packs the codes 0 to 7 into 0x75316420; AutoGPTQ stores the zero point 8 of symmetric layers as 7.
    columns, group = 8, 8
    awq = awq_layout(Fields({"group_size": group}, Path("config.json")))
    word = torch.full((columns, 1), 0x75316420, dtype=torch.int32)
    zeros, scales = torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, 8)
    packed = awq.pack({"qweight": word, "qzeros": zeros, "scales": scales}, 8, columns)
    assert dequantize(packed)[:, 0].tolist() == list(range(8))
    gptq = gptq_layout(Fields({"group_size": group, "sym": True}, Path("config.json")))
    word = torch.full((1, 8), 0x76543210, dtype=torch.int32)
    zeros = torch.full((1, 1), 0x77777777, dtype=torch.int32)
    packed = gptq.pack({"qweight": word, "qzeros": zeros, "scales": scales}, 8, columns)
    assert dequantize(packed)[0].tolist() == [float(code - 8) for code in range(8)]


def test_asymmetric_words_are_those_that_compressed_tensors_packs():
    """Its pack_to_int32 (0.20.0) makes them of codes -8 to 7 in each row, and of zero points -8 to -1 and 0 to 7."""
    layout = compressed_layout("int4_zero", 8)
    word = torch.tensor([0x76543210, 0xFEDCBA98 - 2**32], dtype=torch.int32)
    tensors = {"weight_packed": word.expand(8, 2), "weight_zero_point": word[None], "weight_scale": torch.ones(8, 2)}
    got = dequantize(layout.pack(tensors, 8, 16))
    rows, columns = torch.arange(8)[:, None], torch.arange(16)
    codes, zeros = columns - 8, torch.where(columns < 8, rows - 8, rows)
    assert torch.equal(got, (codes - zeros).float())


WORDS = [
    *((family, kind, GROUP) for family in ("Qwen3-MoE, all experts", "GLM-4.5", "Phi-4") for kind in ("awq", "gptq")),
    ("Qwen2.5-VL", "awq", GROUP),
    ("Phi-4-mini", "awq", GROUP),
    *((family, "compressed", GROUP) for family in ("Qwen3-MoE, all experts", "Phi-4", "Gemma 3")),
    ("Phi-4", "compressed", 0),
]


@pytest.mark.parametrize(("family", "kind", "group"), WORDS)
def test_words_of_eight_codes_are_the_numbers_they_stand_for(family, kind, group, tmp_path, caplog):
    """Phi stores q, k, v and gate, up in one layer, which AWQ and GPTQ join by columns of words."""
    stored, decoded = as_words(kind, folder_of(family, tmp_path / "dense"), tmp_path, group)
    with caplog.at_level(logging.INFO):
        ours = load_target(open_checkpoint(stored), torch.float32, CPU)
    assert formats(ours) == ({"int4_group"} if ours.spec.moe and kind == "gptq" else set())
    assert ("stored as int4_zero and expanded to float32, since no kernel here multiplies it" in caplog.text) == (
        kind != "gptq"
    )
    tokens_T = some_tokens(24)
    expected, _ = passes(load_target(open_checkpoint(decoded), torch.float32, CPU), tokens_T, [24], True)
    torch.testing.assert_close(passes(ours, tokens_T, [24], True)[0], expected, atol=1e-3, rtol=0)


@pytest.mark.parametrize("dialect", ["quark", "compressed-tensors"])
@pytest.mark.parametrize("scheme", ["ptpc_fp8", "fp8"])
def test_joined_layers_keep_their_stored_form_and_their_scales(scheme, dialect, tmp_path):
    """Phi's q, k, v are quantized as the one layer they are stored as, by row or with one scale."""
    dense = folder_of("Phi-4", tmp_path / "dense")
    folder = quantized(dense, tmp_path / "fp8", scheme, None, dialect, ())
    packed = load_target(open_checkpoint(folder), torch.float32, CPU)
    whole = load_target(open_checkpoint(dense), torch.float32, CPU)
    for ours, theirs in zip(packed.layers, whole.layers, strict=True):
        for part in ("self_attn.qkv_proj", "mlp.gate_up_proj"):
            got, expected = dequantize(ours.get_submodule(part).packed), theirs.get_submodule(part).weight
            assert (got - expected).norm() / expected.norm() < 0.05


def test_stacks_in_fp8_blocks_are_the_experts_they_stand_for(tmp_path):
    """Qwen3-VL-MoE in FP8: codes [E, in, out], and a scale for each 128 by 128 of them."""
    folder = folder_of("Qwen3-VL-MoE, wide experts", tmp_path / "dense")
    config = json.loads((folder / "config.json").read_text())
    stored, decoded = {}, {}
    for name, value in tensors_of(folder).items():
        stored[name] = decoded[name] = value
        if ".experts." not in name:
            continue
        matrices = value.transpose(1, 2)
        padded = torch.nn.functional.pad(matrices, (0, -matrices.shape[2] % 128, 0, -matrices.shape[1] % 128))
        scale = padded.unflatten(1, (-1, 128)).unflatten(3, (-1, 128)).abs().amax((2, 4)) / 448
        spread = scale.repeat_interleave(128, 1).repeat_interleave(128, 2)[:, : matrices.shape[1], : matrices.shape[2]]
        stored[name] = (matrices / spread).to(torch.float8_e4m3fn)
        stored[f"{name}_scale_inv"] = scale
        decoded[name] = stored[name].float() * spread
    quantization = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    packed_folder = write(tmp_path / "fp8", {**config, "quantization_config": quantization}, stored)
    packed = load_target(open_checkpoint(packed_folder), torch.float32, CPU)
    dense = load_target(open_checkpoint(write(tmp_path / "decoded", config, decoded)), torch.float32, CPU)
    assert formats(packed) == {"fp8_block"}
    for layer, expected in zip(packed.layers, dense.layers, strict=True):
        for ours, theirs in zip(layer.mlp.experts.packed, expected.mlp.experts.weights, strict=True):
            assert all(torch.equal(dequantize(ours.expert(e)), theirs.codes[e]) for e in range(ours.num_experts))
