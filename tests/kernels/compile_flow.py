"""Compile attention whose keys a warp of its own asks for, for sm_90, and print one JSON line for each kernel.

A program of its own: kernels compile only where Triton's interpreter was not chosen.
"""

import json
import re
import sys

import triton
from compile_kernels import TARGETS, _stack
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from slipstream.kernels.triton.attention.hopper_launch import flow_options
from slipstream.kernels.triton.attention.persistent_ws import flow_kernel
from slipstream.kernels.triton.attention.tile import SPLITS_IN_GROUP
from slipstream.kernels.triton.attention.work_list import walks_kernel
from slipstream.kernels.triton.launch import launch_options
from slipstream.kernels.triton.tuning import AttentionConfig, read_tuning

WAIT = "griddepcontrol.wait"


def attending(config: AttentionConfig, requests: int, width: int, page: int) -> dict[str, object]:
    box = f"tensordesc<bf16[{page}, 64],{gl.NVMMASharedLayout(128, 16, 2)!r}>"
    signature = {
        "keys": box, "values": box, "q_ptr": "*bf16", "out_ptr": "*bf16", "walks_ptr": "*i32", "pages_ptr": "*i32",
        "index_ptr": "*i64", "ancestors_ptr": "*i64", "sums_ptr": "*fp32", "partial_ptr": "*fp32",
        "counter_ptr": "*i32", "num_requests": "i32", "num_results": "i32", "pages_stride": "i32", "scale": "fp32",
    }  # fmt: skip
    options = flow_options(config)
    registers = options.pop("maxnreg")
    constants = {
        "HEADS": 32, "GROUPS": 8, "WIDTH": width, "ROWS": 16, "REQUESTS": requests, "BLOCK": 64, "PAGE": page,
        "IN_GROUP": SPLITS_IN_GROUP, "EARLY": True, "PDL": True, **options,
    }  # fmt: skip
    divisible = ("q_ptr", "out_ptr", "walks_ptr", "sums_ptr", "partial_ptr", "counter_ptr")
    name = f"{config.flow_stages} blocks, {requests} requests, heads of {width}, pages {page}"
    return compiled(name, flow_kernel, signature, constants, divisible, num_warps=4, maxnreg=registers)


def walking(requests: int, queries: int, page: int) -> dict[str, object]:
    """Compile what lays out the walks of a pass."""
    signature = {
        "walks_ptr": "*i32", "starts_ptr": "*i32", "lens_ptr": "*i32", "pages_ptr": "*i32", "index_ptr": "*i64",
        "num_requests": "i32", "pages_stride": "i32",
    }  # fmt: skip
    constants = {
        "TOKENS": 4, "REQUESTS": requests, "QUERIES": queries, "BLOCK": 64, "PAGE": page, "IN_GROUP": SPLITS_IN_GROUP,
        "PDL": True,
    }  # fmt: skip
    name = f"walks, {requests} requests, {queries} queries, pages {page}"
    return compiled(name, walks_kernel, signature, constants, ("walks_ptr",), num_warps=1)


def compiled(name, kernel, signature, constants, divisible, **options) -> dict[str, object]:
    names = kernel.arg_names
    source = GluonASTSource(
        kernel,
        {name: signature.get(name, "constexpr") for name in names},
        constants,
        {(names.index(name),): [["tt.divisibility", 16]] for name in divisible},
    )
    found = triton.compile(source, target=TARGETS["sm_90"], options={**options, **launch_options(dependent=False)})
    ptx = found.asm["ptx"]
    waits = [match.start() for match in re.finditer(WAIT, ptx)]
    return {
        "name": name,
        "shared": found.metadata.shared,
        "spills": _stack(found.asm["cubin"]),
        "matrix": re.findall(r"mma\.sync\.\S+", ptx),
        "asks": len(re.findall(r"cp\.async\.bulk\.tensor\S*global", ptx)),
        "waits": len(waits),
        "read_before_wait": len(re.findall(r"ld\.volatile\.global", ptx[: waits[0]])),
        "cached_before_wait": len(re.findall(r"ld\.global\.(?!cg)", ptx[: waits[0]])),
        "stored_before_wait": len(re.findall(r"\b(?:st|red|atom)\.global", ptx[: waits[0]])),
        "accesses_before_wait": len(re.findall(r"\b(?:ld|st|red|atom)\.(?:volatile\.)?global", ptx[: waits[0]])),
        "folded": len(re.findall(r"fma\.rn\.f32", ptx)),
    }


def main() -> None:
    ships = read_tuning("sm_90").attention
    for case in ((ships, 64, 128, 16), (ships, 64, 64, 32), (ships, 32, 64, 64)):
        sys.stdout.write(json.dumps(attending(*case)) + "\n")
    for walk in ((64, 4, 16), (64, 1, 16), (32, 4, 64)):
        sys.stdout.write(json.dumps(walking(*walk)) + "\n")


if __name__ == "__main__":
    main()
