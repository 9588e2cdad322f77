"""Quantized mixtures of experts run as stored, in the arithmetic of their format, whoever wrote them."""

import json
from pathlib import Path

import pytest
import torch
from decoded import assert_runs_as_decoded
from safetensors.torch import load_file

from slipstream.checkpoint.reader import open_checkpoint
from slipstream.errors import CheckpointError
from slipstream.models.load import load_target
from slipstream.models.moe import Experts
from slipstream.quant.load import read_scheme
from slipstream.quant.packed import ExpertWeights
from slipstream.quant.scheme import dequantize
from tiny_moe import EXPERTS_ONLY, as_kimi, blocks, deepseek, minimax, quantized, save, tensors_of, write

CPU = torch.device("cpu")
DATA = Path(__file__).parents[1] / "data"
MINIMAX_EXPERTS = ("*self_attn*",)
# scheme, group size, dialect, layers kept dense, and what the experts are then stored as
DEEPSEEK_CASES = [
    ("w4a8", None, "quark", EXPERTS_ONLY, "w4a8"),
    ("int4_fp8", None, "quark", EXPERTS_ONLY, "int4_fp8"),
    ("mxfp4", None, "quark", EXPERTS_ONLY, "mxfp4_act"),
    ("mxfp4_weight_only", None, "quark", EXPERTS_ONLY, "mxfp4"),
    ("int4", 32, "compressed-tensors", EXPERTS_ONLY, "int4_group"),
    ("int4", None, "quark", EXPERTS_ONLY, "int4_per_channel"),
    ("ptpc_fp8", None, "quark", (), "fp8_per_channel"),
    ("w4a8", None, "quark", (), "w4a8"),
]
MINIMAX_CASES = [
    ("w4a8", None, "quark", MINIMAX_EXPERTS, "w4a8"),
    ("mxfp4", None, "quark", MINIMAX_EXPERTS, "mxfp4_act"),
    ("ptpc_fp8", None, "quark", (), "fp8_per_channel"),
]


@pytest.fixture(scope="module")
def deepseek_folder(tmp_path_factory):
    return save(deepseek(q_lora_rank=64).to(torch.bfloat16), tmp_path_factory.mktemp("deepseek"))


@pytest.fixture(scope="module")
def minimax_folder(tmp_path_factory):
    return save(minimax().to(torch.bfloat16), tmp_path_factory.mktemp("minimax"))


@pytest.mark.parametrize(("name", "group_size", "dialect", "exclude", "format"), DEEPSEEK_CASES)
def test_deepseek_runs_in_the_arithmetic_it_is_stored_for(
    deepseek_folder, tmp_path, name, group_size, dialect, exclude, format
):
    folder = quantized(deepseek_folder, tmp_path / "out", name, group_size, dialect, exclude)
    model = assert_runs_as_decoded(folder, tmp_path)
    assert_stays_packed(model, format)
    assert (model.layers[1].self_attn.o_proj.packed is None) == bool(exclude)


@pytest.mark.parametrize(("name", "group_size", "dialect", "exclude", "format"), MINIMAX_CASES)
def test_minimax_runs_in_the_arithmetic_it_is_stored_for(
    minimax_folder, tmp_path, name, group_size, dialect, exclude, format
):
    folder = quantized(minimax_folder, tmp_path / "out", name, group_size, dialect, exclude)
    assert_stays_packed(assert_runs_as_decoded(folder, tmp_path), format)


def assert_stays_packed(model: torch.nn.Module, format: str) -> None:
    """Experts hold codes no wider than they are stored, and nothing dense beside them."""
    bits = {"fp8_per_channel": 8, "fp8_block": 8}.get(format, 4)
    found = [module for module in model.modules() if isinstance(module, Experts)]
    assert found
    for experts in found:
        assert experts.gate_up_weight is None and experts.down_weight is None
        for stack in experts.packed:
            assert isinstance(stack, ExpertWeights) and stack.format == format
            assert stack.codes.nbytes * 8 == bits * stack.num_experts * stack.out_features * stack.in_features


@pytest.mark.parametrize("family", ["minimax", "deepseek"])
def test_fp8_blocks_run_as_stored(family, tmp_path):
    """Widths that fill no whole number of blocks, so that joined layers meet inside one."""
    if family == "minimax":
        model = minimax(hidden_size=192, intermediate_size=160, num_hidden_layers=2)
    else:
        model = deepseek(hidden_size=192, moe_intermediate_size=160, num_hidden_layers=2, kv_lora_rank=144)
    folder = blocks(save(model, tmp_path / "dense"), tmp_path / "fp8", ("lm_head", "embed", ".gate.", "norm"))
    packed = assert_runs_as_decoded(folder, tmp_path)
    assert_stays_packed(packed, "fp8_block")
    if family == "deepseek":
        assert packed.layers[0].self_attn.kv_b_proj.packed is None, "absorbing needs its rows as numbers"


def test_kimi_wrapped_and_packed_loads_under_its_own_names(deepseek_folder, tmp_path):
    plain = quantized(deepseek_folder, tmp_path / "plain", "int4", 32, "compressed-tensors", EXPERTS_ONLY)
    kimi = load_target(open_checkpoint(as_kimi(plain, tmp_path / "kimi")), torch.float32, CPU)
    expected = load_target(open_checkpoint(plain), torch.float32, CPU)
    for ours, theirs in zip(kimi.layers[1:], expected.layers[1:], strict=True):
        for a, b in zip(ours.mlp.experts.packed, theirs.mlp.experts.packed, strict=True):
            assert torch.equal(a.codes, b.codes) and torch.equal(a.scales["scale"], b.scales["scale"])


def test_experts_that_compressed_tensors_wrote_are_read_to_its_numbers():
    tensors = load_file(DATA / "compressed" / "kimi_int4.safetensors")
    config = json.loads((DATA / "compressed" / "kimi_int4.json").read_text())
    stored = [name for name in tensors if not name.startswith("truth.")]
    scheme = read_scheme(config, stored, DATA)
    assert len(scheme.modules) == 6
    for module in scheme.modules:
        truth = tensors[f"truth.{module}.weight"]
        parts = {name.rpartition(".")[2]: tensors[name] for name in stored if name.startswith(f"{module}.")}
        assert torch.equal(dequantize(scheme.pack(module, parts, *truth.shape)), truth)


@pytest.mark.parametrize("sample", ["w4a8_int", "int4_fp8", "mxfp4", "mxfp4_weight_only", "int4_wo_32", "ptpc_fp8"])
def test_experts_that_quark_wrote_are_stacked_as_it_meant_them(sample, tmp_path):
    """Quark writes an expert as any linear layer; its own files of one layer stand for each expert here."""
    tensors = tensors_of(
        save(deepseek(num_hidden_layers=2, moe_intermediate_size=128, n_routed_experts=4), tmp_path / "bf16")
    )
    quark = load_file(DATA / "quark" / f"{sample.removesuffix('_weight_only')}.safetensors")
    tensors = {name: value for name, value in tensors.items() if ".experts." not in name}
    for name, value in quark.items():
        if ".mlp." in name:
            leaf = name.partition(".mlp.")[2]
            tensors |= {f"model.layers.1.mlp.experts.{expert}.{leaf}": value.clone() for expert in range(4)}
    config = json.loads((tmp_path / "bf16" / "config.json").read_text())
    written = json.loads((DATA / "quark" / f"{sample}.json").read_text())
    config["quantization_config"] = written.get("quantization_config", written)
    folder = write(tmp_path / "quark", config, tensors)
    experts = load_target(open_checkpoint(folder), torch.float32, CPU).layers[1].mlp.experts
    source = load_file(DATA / "quark" / "source" / "model.safetensors")
    up = source["midlayer.mlp.up_proj.weight"].float()
    for expert in range(4):
        decoded = dequantize(experts.packed[0].expert(expert))
        assert decoded.shape == (256, 64)
        error = (decoded[128:] - up).norm() / up.norm()
        assert error < 0.2, "the nibbles or the scales were read in another order than they were written"


def test_experts_of_mixed_formats_are_refused(deepseek_folder, tmp_path):
    folder = quantized(deepseek_folder, tmp_path / "out", "w4a8", None, "quark", (*EXPERTS_ONLY, "*experts.3.*"))
    with pytest.raises(CheckpointError, match="some are quantized and some are not"):
        load_target(open_checkpoint(folder), torch.float32, CPU)


def test_a_quantization_nobody_runs_is_refused_by_name(deepseek_folder, tmp_path):
    config = json.loads((deepseek_folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "hqq", "bits": 3}
    folder = write(tmp_path / "hqq", config, tensors_of(deepseek_folder))
    with pytest.raises(CheckpointError, match=r"quant_method 'hqq'; slipstream reads quark, compressed-tensors, fp8"):
        load_target(open_checkpoint(folder), torch.float32, CPU)
