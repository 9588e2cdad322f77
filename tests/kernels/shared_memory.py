"""Print what products of real models' shapes would ask of shared memory, by arithmetic, one JSON line for each launch.

A program of its own, since launches are recorded only where Triton's interpreter was not chosen.
"""

import json
import sys

import torch

from slipstream.kernels.triton.ops import TritonOps
from slipstream.kernels.triton.record import META, Recorded, recording
from slipstream.kernels.triton.tuning import has_fp8
from slipstream.models.fused.survey import hollow_weight

SHAPES = {  # [outputs, inputs] of QKV, output, gate and up, down, and the head
    "SmolLM2-135M": ((960, 576), (576, 576), (3072, 576), (576, 1536), (49152, 576)),
    "Llama-3.2-1B": ((3072, 2048), (2048, 2048), (16384, 2048), (2048, 8192), (128256, 2048)),
    "Qwen2.5-1.5B": ((2048, 1536), (1536, 1536), (17920, 1536), (1536, 8960), (151936, 1536)),
    "Qwen3-4B": ((6144, 2560), (2560, 4096), (19456, 2560), (2560, 9728), (151936, 2560)),
    "Mistral-7B": ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (32768, 4096)),
    "Gemma-3-4B": ((4096, 2560), (2560, 2048), (20480, 2560), (2560, 10240), (262208, 2560)),
    "Qwen2.5-14B": ((7168, 5120), (5120, 5120), (27648, 5120), (5120, 13824), (152064, 5120)),
    "Llama-3-70B rank": ((1280, 8192), (8192, 1024), (7168, 8192), (8192, 3584), (16032, 8192)),
}
ROWS = (1, 3, 4, 16, 17, 40, 64, 160, 300, 2048)
FORMATS = ("dense", "fp8_per_channel", "w8a8_int8", "w4a8", "mxfp4")


def shared_bytes(launch: Recorded) -> float | None:
    """Return the bytes of a product's stages and of the rows it holds; None where a kernel does its own accounts."""
    have, stages = launch.constants, launch.options["num_stages"]
    if launch.target.backend == "hip":
        stages = max(stages - 1, 1)  # one is in registers
    widths = {"bf16": 2, "i8": 1, "u8": 1, "fp8e4nv": 1, "fp32": 4, "fp16": 2}
    kind = str(launch.source.signature.get("w_ptr", "*bf16"))[1:]
    width = widths.get(kind, 2)
    if launch.name == "hopper_gemv_kernel":
        prepared = have["STEPS"] if have["C"] == have["STEPS"] else 2 * have["C"]
        return have["SLOTS"] * (have["SLICES"] * have["SEG"] * 128 + 16) + prepared * have["BN"] * 128
    if launch.name == "small_m_kernel":
        columns = have["BLOCK_K"] * (2 if have["TWICE"] else 1)
        return columns * width * (stages * have["BLOCK_N"] + have["BLOCK_M"])
    if launch.name == "stream_kernel":
        rows = have["FIRST"] + have["SECOND"] + have["BLOCK_N"] * (2 if have["PAIR"] else 1)
        return have["STAGES"] * (rows * have["BLOCK_K"] * (1 if have["FP8"] else 2) + 16)
    if launch.name == "_linear_kernel":
        return have["BLOCK_K"] * width * stages * (have["BLOCK_N"] + have["BLOCK_M"])
    return None


def main() -> None:
    for architecture in sys.argv[1:]:
        for model, shapes in SHAPES.items():
            for num_outputs, num_inputs in shapes:
                for format in FORMATS:
                    if format.startswith("fp8") and not has_fp8(architecture):
                        continue
                    with recording(architecture) as launches, torch.no_grad():
                        ops = TritonOps(META)
                        weight = torch.empty(num_outputs, num_inputs, dtype=torch.bfloat16, device=META)
                        if format != "dense":
                            weight = ops.prepare(hollow_weight(format, num_outputs, num_inputs))
                        for rows in ROWS:
                            launches.clear()
                            x = torch.empty(rows, num_inputs, dtype=torch.bfloat16, device=META)
                            (ops.linear if format == "dense" else ops.packed_linear)(x, weight)
                            last = launches[-1]
                            row = {"model": model, "shape": [rows, num_outputs, num_inputs], "format": format}
                            row |= {"architecture": architecture, "kernel": last.name, "bytes": shared_bytes(last)}
                            sys.stdout.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
