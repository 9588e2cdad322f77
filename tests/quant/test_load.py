"""Foreign checkpoints: what others wrote is read as they meant it, and what is mislabelled is mended or refused."""

import copy
import json
import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from slipstream.errors import CheckpointError
from slipstream.quant.load import read_scheme
from slipstream.quant.scheme import dequantize

GOLDEN = Path(__file__).parent.parent / "data" / "quark"
MODULE = "midlayer.self_attn.q_proj"
SOURCE = load_file(GOLDEN / "source" / "model.safetensors")
WEIGHT = SOURCE[f"{MODULE}.weight"]
HERE = Path("checkpoint")
# Relative mean squared error a right reading stays below; a wrong one is above 0.5.
BOUNDS = {
    "ptpc_fp8": 8e-4, "fp8": 8e-4, "int4_wo_per_channel": 0.02, "int4_wo_32": 0.015, "w8a8_int": 1e-4,
    "w4a8_int": 0.02, "int4_fp8": 0.03, "mxfp4": 0.015,
}  # fmt: skip


def golden(name: str) -> tuple[dict[str, object], dict[str, torch.Tensor]]:
    config = {"quantization_config": json.loads((GOLDEN / f"{name}.json").read_text())}
    return config, load_file(GOLDEN / f"{name}.safetensors")


def read(config, tensors, module=MODULE, weight=WEIGHT):
    scheme = read_scheme(config, tensors, HERE)
    stored = scheme.tensors_for(module, *weight.shape)
    assert {f"{module}.{suffix}" for suffix in stored} == {name for name in tensors if name.startswith(f"{module}.")}
    return scheme.pack(module, {suffix: tensors[f"{module}.{suffix}"] for suffix in stored}, *weight.shape)


def relative_error(packed, weight=WEIGHT) -> float:
    return ((dequantize(packed) - weight).square().sum() / weight.float().square().sum()).item()


@pytest.mark.parametrize("name", BOUNDS)
def test_quarks_own_files_are_read_as_they_were_meant(name):
    assert relative_error(read(*golden(name))) < BOUNDS[name]


def test_mislabelled_int4_is_mended_with_a_notice(caplog):
    with caplog.at_level(logging.WARNING):
        read(*golden("int4_wo_per_channel"))
    assert "packs in order but writes pack_method 'reorder'" in caplog.text


@pytest.mark.parametrize("version", ["0.11.1", "0.12+5bd6865d5ca", "0.13"])
def test_versions_with_bf16_scales_are_read(version):
    config, tensors = golden("ptpc_fp8")
    config["quantization_config"]["version"] = version
    for name in tensors:
        if name.endswith("_scale"):
            tensors[name] = tensors[name].bfloat16()
    assert relative_error(read(config, tensors)) < 9e-4


def in_memory_int4():
    """Return what Quark's in-memory export makes of the same codes: reordered words, zero points, BF16 scales."""
    config, tensors = golden("int4_wo_per_channel")
    order = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])
    out = {}
    for name, tensor in tensors.items():
        if name.endswith(".weight"):
            nibbles = (tensor[..., None].long() >> (4 * torch.arange(8))) & 15
            word = (nibbles[..., order] << (4 * torch.arange(8))).sum(-1)
            out[name] = torch.where(word >= 2**31, word - 2**32, word).to(torch.int32)
            out[f"{name}_zero_point"] = torch.zeros(tensor.shape[0] // 8, dtype=torch.int32)
        else:
            out[name] = tensor.bfloat16()
    return config, out


def test_the_in_memory_export_is_read_in_the_order_it_names(caplog):
    with caplog.at_level(logging.WARNING):
        packed = read(*in_memory_int4())
    assert torch.equal(packed.codes, read(*golden("int4_wo_per_channel")).codes)
    assert len(caplog.records) == 1  # the notice of the second reading only


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("quant_method", ["quark"], "'quantization_config.quant_method' is"),
        ("export", "x", "'quantization_config.export' is 'x' where an object"),
        ("layer_quant_config", 5, "'quantization_config.layer_quant_config' is 5"),
        ("global_quant_config.weight", [5], "'quantization_config.global_quant_config.weight' is 5"),
        ("global_quant_config.weight.dtype", {}, r"global_quant_config\.weight\.dtype' is {}"),
        ("global_quant_config.weight.qscheme", [], r"global_quant_config\.weight\.qscheme' is \[\]"),
        ("global_quant_config.input_tensors", {"dtype": []}, r"input_tensors\.dtype' is \[\]"),
    ],
)
def test_a_quantization_config_of_another_type_is_refused_by_field(path, value, words):
    config, tensors = golden("int4_wo_per_channel")
    place = config["quantization_config"]
    *parents, last = path.split(".")
    for parent in parents:
        place = place[parent]
    place[last] = value
    with pytest.raises(CheckpointError, match=f"config.json: field .*{words}"):
        read_scheme(config, tensors, HERE)


@pytest.mark.parametrize(
    "group",
    [5, {"weights": 5}, {"weights": {"num_bits": "4"}}, {"weights": {"strategy": "group"}}, {"targets": ["re:("]}],
)
def test_a_group_of_another_type_is_refused_by_field(group):
    quantization = {"quant_method": "compressed-tensors", "config_groups": {"g": group}}
    with pytest.raises(CheckpointError, match=r"field 'quantization_config\.config_groups\.g"):
        read_scheme({"quantization_config": quantization}, {f"{MODULE}.weight_packed": WEIGHT}, HERE)


def test_scales_that_are_no_numbers_are_refused():
    config, tensors = golden("ptpc_fp8")
    tensors[f"{MODULE}.weight_scale"][3] = float("nan")
    with pytest.raises(CheckpointError, match=f"{MODULE}.weight_scale holds NaN"):
        read(config, tensors)


def test_asymmetric_weights_and_unknown_methods_are_refused_by_name():
    config, tensors = golden("int4_wo_per_channel")
    asymmetric = copy.deepcopy(config)
    asymmetric["quantization_config"]["global_quant_config"]["weight"].update(dtype="uint4", symmetric=False)
    with pytest.raises(CheckpointError, match="uint4 per_channel weights"):
        read(asymmetric, tensors)
    with pytest.raises(CheckpointError, match="quant_method 'bitsandbytes'"):
        read_scheme({"quantization_config": {"quant_method": "bitsandbytes"}}, tensors, HERE)
    config, tensors = in_memory_int4()
    tensors[f"{MODULE}.weight_zero_point"][0] = 3
    with pytest.raises(CheckpointError, match="values other than zero"):
        read(config, tensors)
    config, tensors = golden("ptpc_fp8")
    tensors[f"{MODULE}.weight_scale"] = tensors[f"{MODULE}.weight_scale"][:-1]
    with pytest.raises(CheckpointError, match=r"q_proj\.weight_scale is float32 \[63\]"):
        read(config, tensors)


def test_layers_without_scales_are_dense_whatever_the_exclude_list_says():
    config, tensors = golden("ptpc_fp8")
    config["quantization_config"]["exclude"] = ["re:.*elsewhere"]
    scheme = read_scheme(config, [*tensors, "fc.weight"], HERE)
    assert not scheme.is_quantized("fc") and scheme.is_quantized(MODULE)
    assert read_scheme({}, tensors, HERE) is None


def test_kimis_official_int4_is_read():
    weight = WEIGHT.float()
    groups = weight.unflatten(1, (-1, 32))
    scale = (groups.abs().amax(-1) / 7).bfloat16()
    codes = (groups / scale.float()[..., None]).round().clamp(-8, 7).flatten(1).long() + 8
    words = (codes.unflatten(1, (-1, 8)) << (4 * torch.arange(8))).sum(-1)
    module = "language_model.model.layers.1.mlp.experts.0.up_proj"
    tensors = {
        f"{module}.weight_packed": torch.where(words >= 2**31, words - 2**32, words).to(torch.int32),
        f"{module}.weight_scale": scale,
        f"{module}.weight_shape": torch.tensor(weight.shape, dtype=torch.int32),
    }
    group = {
        "targets": ["Linear"],
        "weights": {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32},
        "input_activations": None,
    }
    quantization = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"g": group}}
    packed = read({"text_config": {"quantization_config": quantization}}, tensors, module)
    expected = (codes - 8).float() * scale.float().repeat_interleave(32, 1)
    assert torch.equal(dequantize(packed), expected)


def test_fp8_in_blocks_of_128_is_read_also_at_ragged_edges():
    generator = torch.Generator().manual_seed(1)
    codes = torch.randn(200, 300, generator=generator).to(torch.float8_e4m3fn)
    scale = torch.rand(2, 3, generator=generator) + 0.5
    tensors = {"a.proj.weight": codes, "a.proj.weight_scale_inv": scale}
    quantization = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    packed = read({"quantization_config": quantization}, tensors, "a.proj", codes)
    expected = codes.float().clone()
    for i in range(2):
        for j in range(3):
            expected[128 * i : 128 * i + 128, 128 * j : 128 * j + 128] *= scale[i, j]
    assert torch.equal(dequantize(packed), expected)


def test_dimensions_of_one_do_not_matter_but_others_do():
    config, tensors = golden("int4_fp8")
    tensors[f"{MODULE}.weight_scale"] = tensors[f"{MODULE}.weight_scale"].reshape(1)
    tensors[f"{MODULE}.weight_scale_2"] = tensors[f"{MODULE}.weight_scale_2"].reshape(-1, 1)
    assert relative_error(read(config, tensors)) < BOUNDS["int4_fp8"]
    tensors[f"{MODULE}.weight"] = tensors[f"{MODULE}.weight"].t().contiguous()
    with pytest.raises(CheckpointError, match=r"q_proj\.weight is int32"):
        read(config, tensors)
