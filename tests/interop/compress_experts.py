"""Compress the experts of a DeepSeek-V3 folder with the compressed-tensors library, as Kimi-K2.5 is published.

Usage: compress_experts.py SOURCE OUT. Beside the checkpoint OUT gets `truth.safetensors`: each expert's weight as the
library itself reads it back.
"""

import json
import sys
from pathlib import Path

import torch
from compressed_tensors.compressors import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import load_file, save_file

IGNORED = ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*"]


def compressed(weight: torch.Tensor, scheme: QuantizationScheme) -> dict[str, torch.Tensor]:
    groups = weight.float().unflatten(-1, (-1, scheme.weights.group_size))
    scale, zero_point = calculate_qparams(groups.amin(-1), groups.amax(-1), scheme.weights)
    state = {"weight": weight, "weight_scale": scale.to(weight.dtype), "weight_zero_point": zero_point}
    return PackedQuantizationCompressor.compress(state, scheme)


def main(source: Path, out: Path) -> None:
    args = QuantizationArgs(num_bits=4, type="int", symmetric=True, strategy="group", group_size=32)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    tensors, truth = {}, {}
    for path in sorted(source.glob("*.safetensors")):
        for name, value in load_file(path).items():
            if ".mlp.experts." not in name:
                tensors[name] = value
                continue
            module = name.removesuffix(".weight")
            state = compressed(value.to(torch.bfloat16), scheme)
            tensors |= {f"{module}.{suffix}": part.contiguous() for suffix, part in state.items()}
            truth[name] = PackedQuantizationCompressor.decompress(state, scheme)["weight"].contiguous()
    config = json.loads((source / "config.json").read_text())
    quantization = QuantizationConfig(
        config_groups={"group_0": scheme}, format="pack-quantized", ignore=IGNORED, quantization_status="compressed"
    )
    config["quantization_config"] = json.loads(quantization.model_dump_json())
    out.mkdir(parents=True)
    save_file(tensors, out / "model.safetensors")
    save_file(truth, out.parent / "truth.safetensors")
    (out / "config.json").write_text(json.dumps(config))
    print(json.dumps({"modules": len(truth)}))  # noqa: T201


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
