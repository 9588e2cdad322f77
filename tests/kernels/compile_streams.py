"""Compile the product whose warps are of two kinds for sm_90, as BF16 and as FP8, and print one JSON line for each.

A program of its own: kernels compile only where Triton's interpreter was not chosen.
"""

import json
import re
import sys

import triton
from compile_kernels import TARGETS, _stack
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from slipstream.kernels.triton.launch import launch_options
from slipstream.kernels.triton.wide_streams import stream_kernel

CASES = {  # type, weight rows of a tile, whether two of them, warps, stages, whether sums are left for later
    "bf16 gated": ("bf16", 64, True, 4, 3, False),
    "bf16 later": ("bf16", 128, False, 8, 5, True),
    "fp8 gated": ("fp8e4nv", 128, True, 8, 4, False),
    "fp8 later": ("fp8e4nv", 64, False, 4, 4, True),
}
WAIT = "griddepcontrol.wait"


def compiled(type: str, block_n: int, pair: bool, warps: int, stages: int, later: bool) -> dict[str, object]:
    element = gl.bfloat16 if type == "bf16" else gl.float8e4nv
    block_k = 64 if type == "bf16" else 128

    def tiles(rows: int) -> str:
        layout = gl.NVMMASharedLayout.get_default_for([rows, block_k], element)
        return f"tensordesc<{type}[{rows}, {block_k}],{layout!r}>"

    signature = {
        "x_first": tiles(128), "x_second": tiles(32), "w_tiles": tiles(block_n), "x_scale_ptr": "*fp32",
        "w_scale_ptr": "*fp32", "y_ptr": "*fp32" if later else "*bf16", "M": "i32", "N": "i32", "steps": "i32",
        "y_stride": "i32", "part_stride": "i32",
    }  # fmt: skip
    constants = {
        "FIRST": 128, "SECOND": 32, "BLOCK_N": block_n, "PAIR": pair, "BLOCK_K": block_k, "STAGES": stages,
        "LATER": later, "FP8": type != "bf16", "SILU": not later, "PDL": True, "num_warps": warps,
    }  # fmt: skip
    names = stream_kernel.arg_names
    divisible = ("x_scale_ptr", "w_scale_ptr", "y_ptr", "N", "y_stride", "part_stride")
    source = GluonASTSource(
        stream_kernel,
        {name: signature.get(name, "constexpr") for name in names},
        constants,
        {(names.index(name),): [["tt.divisibility", 16]] for name in divisible},
    )
    options = {"num_warps": warps, **launch_options(dependent=False), **({"maxnreg": 128} if warps == 4 else {})}
    found = triton.compile(source, target=TARGETS["sm_90"], options=options)
    ptx = found.asm["ptx"]
    asks = [match.start() for match in re.finditer(r"cp\.async\.bulk\.tensor\S*global", ptx)]
    first_wait = min(m.start() for m in re.finditer(WAIT, ptx) if m.start() > asks[0])
    return {
        "shared": found.metadata.shared,
        "spills": _stack(found.asm["cubin"]),
        "matrix": len(re.findall(rf"wgmma\S*\.{'e4m3' if type != 'bf16' else 'bf16'}", ptx)),
        "asked_before_inputs": sum(ask < first_wait for ask in asks),
        "asked_after": sum(ask > first_wait for ask in asks),
        "weights": stages * (1 + pair),
        "rows": 2 * stages,
        "step": 3 + pair,
        "folded": len(re.findall(r"fma\.rn\.f32", ptx)),
    }


def main() -> None:
    for name, case in CASES.items():
        sys.stdout.write(json.dumps({"name": name, **compiled(*case)}) + "\n")


if __name__ == "__main__":
    main()
