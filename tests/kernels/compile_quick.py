"""Compile attention's short chain for sm_90, and print one JSON line for each way it runs.

A program of its own: kernels compile only where Triton's interpreter was not chosen.
"""

import json
import re
import sys

import triton
from before_wait import WAIT, touched_before_wait
from compile_kernels import TARGETS, _stack
from triton.experimental.gluon._runtime import GluonASTSource

from slipstream.kernels.triton.attention.hopper_launch import quick_options
from slipstream.kernels.triton.attention.hopper_split_kv import quick_kernel
from slipstream.kernels.triton.attention.tile import DESCRIPTION
from slipstream.kernels.triton.launch import launch_options
from slipstream.kernels.triton.tuning import read_tuning

HEADS = ((32, 8, 128), (9, 3, 64))
"""Heads of queries, heads of keys, and their width."""


def compiled(heads: int, groups: int, width: int, queries: int, maxima: bool) -> dict[str, object]:
    config = read_tuning("sm_90").attention
    repeats = heads // groups
    constants = {
        "HEADS": heads, "GROUPS": groups, "D": width, "ROWS": 16, "TOKENS": 16 // repeats, "BLOCK": config.block,
        "PAGE": 16, "EARLY": True, "MAXIMA": maxima, "PDL": True, **quick_options(config, queries, repeats, 16),
    }  # fmt: skip
    signature = dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "out_ptr"), "*bf16")
    signature |= {name: "*i64" if name in ("index_ptr", "ancestors_ptr") else "*i32" for name in DESCRIPTION}
    signature |= dict.fromkeys(("sums_ptr", "partial_ptr", "maxima_ptr"), "*fp32") | {"counter_ptr": "*i32"}
    signature |= {"num_splits": "i32", "slot_stride": "i32", "pages_stride": "i32", "scale": "fp32"}
    names = quick_kernel.arg_names
    divisible = [name for name in signature if name.endswith("_ptr") and name not in DESCRIPTION]
    options = {"maxnreg": constants.pop("maxnreg"), **launch_options(dependent=True)}
    source = GluonASTSource(
        quick_kernel,
        {name: signature.get(name, "constexpr") for name in names},
        constants,
        {(names.index(name),): [["tt.divisibility", 16]] for name in (*divisible, "slot_stride")},
    )
    options |= {"num_warps": constants["num_warps"]}
    found = triton.compile(source, target=TARGETS["sm_90"], options=options)
    ptx = found.asm["ptx"]
    return {
        "name": f"{heads} heads of {width} over {groups}, {queries} queries{', maxima' if maxima else ''}",
        "shared": found.metadata.shared,
        "spills": _stack(found.asm["cubin"]),
        "matrix": len(re.findall(r"mma\.sync\S*bf16", ptx)),
        "folded": len(re.findall(r"fma\.rn\.f32", ptx)),
        "touches": sorted(touched_before_wait(found.asm["ttgir"]) or ()),
        "waits": len(re.findall(re.escape(WAIT), ptx)),
    }


def main() -> None:
    for shape in HEADS:
        for queries, maxima in ((1, True), (2, False)):
            sys.stdout.write(json.dumps(compiled(*shape, queries, maxima)) + "\n")


if __name__ == "__main__":
    main()
