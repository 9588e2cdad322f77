"""Quantized mixtures of experts run as stored, in the arithmetic of their format, whoever wrote them."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from slipstream.checkpoint.reader import CheckpointReader, open_checkpoint
from slipstream.errors import CheckpointError
from slipstream.kernels.reference.ops import ReferenceOps
from slipstream.models.layers import Linear
from slipstream.models.load import load_target
from slipstream.models.moe import Experts
from slipstream.quant.formats import fp8, int8, mxfp4
from slipstream.quant.load import packed_weight, read_scheme
from slipstream.quant.packed import ExpertWeights
from slipstream.quant.scheme import dequantize
from tiny_families import folder_of
from tiny_moe import EXPERTS_ONLY, VOCAB, as_kimi, blocks, deepseek, minimax, passes, quantized, save, tensors_of, write

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


class DequantizedOps(ReferenceOps):
    """Float32 products with decoded weights, of inputs that took a round trip through the format's own rounding."""

    def __init__(self, formats: dict[int, str]) -> None:
        super().__init__(CPU)
        self._formats = formats

    def linear(self, x_TD, weight_ND, bias_N=None):
        return super().linear(rounded(x_TD, self._formats.get(weight_ND.data_ptr(), "dense")), weight_ND, bias_N)

    def experts(self, x_TD, gate_up, down, expert_ids_TK, weights_TK, activation=None):
        format = self._formats.get(gate_up.codes.data_ptr(), "dense")
        out_TD = torch.zeros_like(x_TD)
        for expert in range(gate_up.num_experts):
            token, k = (expert_ids_TK == expert).nonzero(as_tuple=True)
            gate, up = (rounded(x_TD[token], format) @ gate_up.codes[expert].t()).chunk(2, -1)
            hidden = rounded(torch.nn.functional.silu(gate) * up, format)
            out_TD.index_add_(0, token, weights_TK[token, k, None] * (hidden @ down.codes[expert].t()))
        return out_TD


def rounded(x_TD: torch.Tensor, format: str) -> torch.Tensor:
    """Return inputs as a format sees them."""
    if not len(x_TD):
        return x_TD
    if format == "w4a8":
        codes, scale = int8.quantize_rows(x_TD)
        return codes.float() * scale[..., None]
    if format in ("fp8_per_channel", "int4_fp8"):
        codes, scale = fp8.quantize_rows(x_TD)
        return codes.float() * scale[..., None]
    if format == "fp8_block":
        return torch.cat([rounded(part, "int4_fp8") for part in x_TD.split(fp8.BLOCK, -1)], -1)
    return mxfp4.requantize_rows(x_TD) if format == "mxfp4_act" else x_TD


def decoded_folder(folder: Path, out: Path) -> Path:
    """Write the same checkpoint with every quantized weight decoded to float32."""
    source = CheckpointReader(folder)
    scheme = read_scheme(source.config, source.names(), folder)
    tensors = tensors_of(folder)
    for module in scheme.modules:
        parts = [name for name in tensors if name.rpartition(".")[0] == module and not name.endswith(".bias")]
        stored = {name.rpartition(".")[2]: tensors.pop(name) for name in parts}
        rows, columns = shape_of(module, stored, source.config)
        tensors[f"{module}.weight"] = dequantize(packed_weight(source, scheme, module, rows, columns))
    config = {key: value for key, value in source.config.items() if key != "quantization_config"}
    return write(out, config, tensors)


def shape_of(module: str, stored: dict[str, torch.Tensor], config: dict) -> tuple[int, int]:
    weight = stored.get("weight", stored.get("weight_packed"))
    per_entry = {torch.int32: 8, torch.uint8: 2}.get(weight.dtype, 1)
    return weight.shape[0], weight.shape[1] * per_entry


def formats_of(packed: torch.nn.Module, dense: torch.nn.Module) -> dict[int, str]:
    """Return the format of each layer of the packed model by the address of the dense one's weight."""
    found = {}
    for theirs, ours in zip(packed.modules(), dense.modules(), strict=True):
        if isinstance(theirs, Linear) and theirs.packed is not None:
            found[ours.weight.data_ptr()] = theirs.packed.format
        if isinstance(theirs, Experts) and theirs.packed is not None:
            found[ours.gate_up_weight.data_ptr()] = theirs.packed[0].format
    return found


def assert_runs_as_decoded(folder: Path, tmp_path: Path) -> torch.nn.Module:
    packed = load_target(open_checkpoint(folder), torch.float32, CPU)
    dense = load_target(open_checkpoint(decoded_folder(folder, tmp_path / "decoded")), torch.float32, CPU)
    tokens_T = torch.randint(0, VOCAB, (24,), generator=torch.Generator().manual_seed(3))
    got, _ = passes(packed, tokens_T, [24], prompt=True)
    ops = DequantizedOps(formats_of(packed, dense))
    expected, _ = passes(dense, tokens_T, [24], prompt=True, path=ops)
    # Sums in another order may tip an input over a rounding boundary: far below a format's own error of 1 to 30 %.
    assert (got - expected).norm() / expected.norm() < 2e-3
    absorbed, _ = passes(packed, tokens_T, [24], prompt=False)
    assert (absorbed - expected).norm() / expected.norm() < 2e-2
    return packed


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


@pytest.mark.parametrize("name", ["Qwen3-MoE", "GLM-4.5"])
def test_families_in_fp8_blocks_run_as_decoded(name, tmp_path):
    kept = ("lm_head", "embed", ".gate.", "norm")
    assert_runs_as_decoded(blocks(folder_of(name, tmp_path / "dense"), tmp_path / "fp8", kept), tmp_path)
