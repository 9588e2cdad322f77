"""Compile what multiplies and attends in passes of many rows for sm_90, and print one JSON line for each kernel.

A program of its own: kernels compile only where Triton's interpreter was not chosen.
"""

import json
import re
import sys

import triton
from compile_kernels import TARGETS, _stack
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from slipstream.kernels.triton.attention.hopper_prefill import hopper_prefill_kernel
from slipstream.kernels.triton.gemm.hopper_ws import hopper_ws_kernel
from slipstream.kernels.triton.gemm.hopper_ws_launch import tile_of
from slipstream.kernels.triton.launch import launch_options


def gemm(rows: int, outputs: int, kind: str, silu: bool, split: bool) -> dict[str, object]:
    tile = tile_of(rows, outputs, kind=kind, silu=silu, split=split, programs=132)
    type, element, block_k = ("fp8e4nv", gl.float8e4nv, 128) if kind == "fp8" else ("bf16", gl.bfloat16, 64)

    def boxes(rows: int, columns: int, type: str = type, element: gl.dtype = element) -> str:
        layout = gl.NVMMASharedLayout.get_default_for([rows, columns], element)
        return f"tensordesc<{type}[{rows}, {columns}],{layout!r}>"

    numbers = ("M", "N", "tiles_m", "tiles_n", "splits", "split_steps", "residual_stride")
    width = tile.block_n // (1 + tile.pair)
    signature = {
        "x_desc": boxes(64, block_k), "w_desc": boxes(width, block_k), "y_desc": boxes(64, width, "bf16", gl.bfloat16),
        "x_scale_ptr": "*fp32", "w_scale_ptr": "*fp32", "bias_ptr": "*bf16", "residual_ptr": "*bf16",
        **dict.fromkeys(numbers, "i32"),
    }  # fmt: skip
    constants = {
        "BLOCK_N": tile.block_n, "BLOCK_K": block_k, "SPLIT": split, "STAGES": tile.stages, "FP8": kind == "fp8",
        "PAIR": tile.pair, "SILU": silu, "HAS_BIAS": False, "HAS_RESIDUAL": split, "PDL": True, "num_warps": 4,
    }  # fmt: skip
    divisible = ("x_scale_ptr", "w_scale_ptr", "residual_ptr", "N", "residual_stride")
    return compiled(f"{kind} {rows} rows {tile}", hopper_ws_kernel, signature, constants, divisible)


def attention(heads: int, groups: int, width: int, page: int) -> dict[str, object]:
    box = f"tensordesc<bf16[{page}, 64],{gl.NVMMASharedLayout(128, 16, 2)!r}>"
    signature = {
        "keys": box, "values": box, "q_ptr": "*bf16", "out_ptr": "*bf16", "starts_ptr": "*i32", "lens_ptr": "*i32",
        "pages_ptr": "*i32", "index_ptr": "*i64", "ancestors_ptr": "*i64", "num_requests": "i32",
        "pages_stride": "i32", "scale": "fp32",
    }  # fmt: skip
    constants = {
        "HEADS": heads, "GROUPS": groups, "WIDTH": width, "REQUESTS": 16, "PAGE": page, "STAGES": 3, "PDL": True,
        "num_warps": 4,
    }  # fmt: skip
    name = f"attention, {heads} heads of {width}, {groups} of keys"
    return compiled(name, hopper_prefill_kernel, signature, constants, ("q_ptr", "out_ptr"))


def compiled(name, kernel, signature, constants, divisible) -> dict[str, object]:
    names = kernel.arg_names
    source = GluonASTSource(
        kernel,
        {name: signature.get(name, "constexpr") for name in names},
        constants,
        {(names.index(name),): [["tt.divisibility", 16]] for name in divisible},
    )
    found = triton.compile(source, target=TARGETS["sm_90"], options={"num_warps": 4, **launch_options(dependent=False)})
    ptx = found.asm["ptx"]
    return {
        "name": name,
        "shared": found.metadata.shared,
        "spills": _stack(found.asm["cubin"]),
        "matrix": len(re.findall(r"wgmma\S*\.(?:e4m3|bf16)", ptx)),
        "loads": len(re.findall(r"cp\.async\.bulk\.tensor\S*global", ptx)),
        "folded": len(re.findall(r"fma\.rn\.f32", ptx)),
    }


def main() -> None:
    cases = [(8192, 28672, "dense", True, False), (8192, 6144, "dense", False, True), (384, 4096, "dense", False, True)]
    cases += [(8192, 28672, "fp8", True, False), (8192, 4096, "fp8", False, True)]
    for case in cases:
        sys.stdout.write(json.dumps(gemm(*case)) + "\n")
    for shape in ((32, 8, 128, 16), (9, 3, 64, 16)):
        sys.stdout.write(json.dumps(attention(*shape)) + "\n")


if __name__ == "__main__":
    main()
