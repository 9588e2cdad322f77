"""Compile the products of 1 to 4 rows in which one warp asks for weights, and print one JSON line for each.

A program of its own: kernels compile only where Triton's interpreter was not chosen.
"""

import argparse
import json
import re
import sys
from pathlib import Path

import triton
from compile_kernels import TARGETS, _stack
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from slipstream.kernels.triton.gemm.hopper_gemv import lean_kernel
from slipstream.kernels.triton.gemm.hopper_gemv_launch import REGISTERS, LeanPlan, plan_of
from slipstream.kernels.triton.launch import launch_options
from slipstream.kernels.triton.tuning import read_tuning

QKV, OUT, GATE_UP, DOWN = (6144, 4096, "rope"), (4096, 4096, "plain"), (28672, 4096, "silu"), (4096, 14336, "plain")
SHIPPED = read_tuning("sm_90").linear_few
WEIGHTS = ("w_first", "w_second", "w_third")
CASES = {  # format, shape and end, rows, norm, codes, parts of a row of which something was left, what is left here
    "fp8 qkv 1": ("fp8", QKV, 1, True, "norm", 128, "none"),
    "fp8 qkv 4, codes of a norm": ("fp8", QKV, 4, True, "norm", 128, "none"),
    "fp8 gate_up 2, codes of a norm": ("fp8", GATE_UP, 2, True, "norm", 128, "maxima"),
    "fp8 gate_up 4, codes of a norm": ("fp8", GATE_UP, 4, True, "norm", 128, "maxima"),
    "fp8 qkv 4": ("fp8", QKV, 4, False, "none", 1, "none"),
    "fp8 o 1": ("fp8", OUT, 1, False, "maxima", 32, "squares"),
    "fp8 o 4": ("fp8", OUT, 4, False, "maxima", 32, "none"),
    "fp8 gate_up 1": ("fp8", GATE_UP, 1, True, "norm", 128, "maxima"),
    "fp8 gate_up 4": ("fp8", GATE_UP, 4, False, "none", 1, "maxima"),
    "fp8 down 1": ("fp8", DOWN, 1, False, "maxima", 128, "squares"),
    "fp8 down 4": ("fp8", DOWN, 4, False, "maxima", 128, "none"),
    "dense qkv 1": ("dense", QKV, 1, True, "none", 128, "none"),
    "dense qkv 4": ("dense", QKV, 4, True, "none", 128, "none"),
    "dense o 1": ("dense", OUT, 1, False, "none", 1, "squares"),
    "dense o 4": ("dense", OUT, 4, False, "none", 1, "squares"),
    "dense down 1": ("dense", DOWN, 1, False, "none", 1, "squares"),
    "dense down 4": ("dense", DOWN, 4, False, "none", 1, "squares"),
}


def compiled(name: str, keep: Path | None) -> dict[str, object]:
    format, (num_outputs, num_inputs, end), rows, norm, codes, left, leaves = CASES[name]
    config, fp8 = SHIPPED[f"{format}:{num_outputs}:{num_inputs}"], format == "fp8"
    itemsize, code = (1, "fp8e4nv") if fp8 else (2, "bf16")
    plan = plan_of(config, rows, num_inputs // config.split_k, itemsize, end, codes, 64)
    assert isinstance(plan, LeanPlan), name
    layout = gl.NVMMASharedLayout(128, 8 * itemsize, 2)
    boxes = zip(WEIGHTS, (*plan.boxes(), *plan.boxes()[:1] * 2), strict=False)
    signature = {
        **{weight: f"tensordesc<{code}[{rows}, {128 // itemsize}],{layout!r}>" for weight, rows in boxes},
        "x_ptr": f"*{code}" if codes == "none" else "*bf16", "x_scale_ptr": "*fp32", "w_scale_ptr": "*fp32",
        "bias_ptr": "*bf16", "residual_ptr": "*bf16", "y_ptr": "*bf16", "norm_ptr": "*bf16", "left_ptr": "*fp32",
        "leave_ptr": "*fp32", "keys_ptr": "*bf16", "values_ptr": "*bf16", "slots_ptr": "*i64",
        "positions_ptr": "*i64", "cos_ptr": "*fp32", "sin_ptr": "*fp32", "M": "i32", "N": "i32", "K": "i32",
        "num_parts": "i32", "x_stride": "i32", "residual_stride": "i32", "y_stride": "i32", "slot_stride": "i32",
        "eps": "fp32", "trigger": "i32",
    }  # fmt: skip
    constants = {
        **plan.constants(), "HAS_BIAS": False, "HAS_RESIDUAL": end == "plain",
        "NORM": norm, "LEFT": left, "LEFT_LEVELS": left.bit_length() - 1, "LEAVES": leaves, "LEAVE_LEVELS": 5,
        "HEADS": 32, "GROUPS": 8, "HALF": 64, "PDL": True, "num_warps": 4,
    }  # fmt: skip
    names = lean_kernel.arg_names
    divisible = [n for n, t in signature.items() if (t.startswith("*") or t == "i32") and n not in ("M", "trigger")]
    source = GluonASTSource(
        lean_kernel,
        {n: signature.get(n, "constexpr") for n in names},
        constants,
        {(names.index(n),): [["tt.divisibility", 16]] for n in divisible},
    )
    options = {"num_warps": 4, **launch_options(dependent=False), "maxnreg": REGISTERS}
    found = triton.compile(source, target=TARGETS["sm_90"], options=options)
    if keep is not None:
        for kind in ("ptx", "ttgir"):
            (keep / f"{name.replace(' ', '_')}.{kind}").write_text(found.asm[kind])
        (keep / f"{name.replace(' ', '_')}.cubin").write_bytes(found.asm["cubin"])
    ptx = found.asm["ptx"]
    waits = [match.start() for match in re.finditer(r"griddepcontrol\.wait", ptx)]
    reads = [match.start() for match in re.finditer(r"ld\.global", ptx)]
    return {
        "name": name,
        "plan": str(plan),
        "shared": found.metadata.shared,
        "spills": _stack(found.asm["cubin"]),
        "matrix": len(re.findall(rf"wgmma\S*\.{'e4m3' if fp8 else 'bf16'}", ptx)),
        "waits": len(waits),
        "reads_before": sum(read < min(waits) for read in reads),
        "known_before": norm or fp8,  # a norm's weights, and scales of weights
        "folded": 0 if fp8 else len(re.findall(r"fma\.rn\.f32", ptx)),  # making codes is fused by intent
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--keep", type=Path)
    arguments = parser.parse_args()
    for name in arguments.names or CASES:
        sys.stdout.write(json.dumps(compiled(name, arguments.keep)) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
