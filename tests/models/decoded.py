"""A quantized checkpoint held to the same one with every weight decoded, inputs rounded as the format rounds them."""

from pathlib import Path

import torch

from slipstream.checkpoint.reader import CheckpointReader, open_checkpoint
from slipstream.kernels.reference.activations import gated
from slipstream.kernels.reference.experts import SILU
from slipstream.kernels.reference.ops import ReferenceOps
from slipstream.models.layers import Linear
from slipstream.models.load import load_target
from slipstream.models.moe import Experts
from slipstream.quant.formats import fp8, int8, mxfp4
from slipstream.quant.load import packed_weight, read_scheme
from slipstream.quant.scheme import dequantize
from tiny_moe import VOCAB, passes, tensors_of, write

CPU = torch.device("cpu")


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
            both_TN = rounded(x_TD[token], format) @ gate_up.codes[expert].t()
            hidden = rounded(gated(both_TN, activation or SILU), format)
            out_TD.index_add_(0, token, weights_TK[token, k, None] * (hidden @ down.codes[expert].t()))
        return out_TD


def rounded(x_TD: torch.Tensor, format: str) -> torch.Tensor:
    """Return inputs as a format sees them."""
    if not len(x_TD):
        return x_TD
    if format in ("w4a8", "w8a8_int8"):
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
    """Compare logits over a text longer than every window; return the quantized model."""
    packed = load_target(open_checkpoint(folder), torch.float32, CPU)
    dense = load_target(open_checkpoint(decoded_folder(folder, tmp_path / "decoded")), torch.float32, CPU)
    tokens_T = torch.randint(0, VOCAB, (24,), generator=torch.Generator().manual_seed(3))
    got, _ = passes(packed, tokens_T, [24], prompt=True)
    ops = DequantizedOps(formats_of(packed, dense))
    expected, _ = passes(dense, tokens_T, [24], prompt=True, path=ops)
    error_T = (got - expected).norm(dim=1) / expected.norm(dim=1)
    # Sums in another order may tip a token's input over a rounding boundary: far below a format's error of 1 to 30 %.
    assert error_T.median() < 1e-4 and error_T.square().mean().sqrt() < 1e-2
    absorbed, _ = passes(packed, tokens_T, [24], prompt=False)
    assert (absorbed - expected).norm() / expected.norm() < 2e-2
    return packed
