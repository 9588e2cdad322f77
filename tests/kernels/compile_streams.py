"""Compile the products whose warps are of two kinds for sm_90, as they ship, and print one JSON line for each.

A program of its own: kernels compile only where Triton's interpreter was not chosen.
"""

import json
import re
import sys

import triton
from compile_kernels import TARGETS, _stack
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from slipstream.kernels.triton.gemm.wide_linear import fitted, row_pieces
from slipstream.kernels.triton.gemm.wide_streams import stream_kernel
from slipstream.kernels.triton.launch import launch_options
from slipstream.kernels.triton.tuning import WideConfig, read_tuning

FEW, MANY = (32, 40, 64), (96, 128, 160, 192, 256)
"""Rows of every width a token tile has."""
USUAL_FEW, USUAL_MANY = 40, 160
"""Those of 40 requests of one node and of four."""
GATED = ("28672:4096",)
"""The shape whose outputs are gates and the rows `up`."""
QUERIES_KEYS_VALUES = ("6144:4096", "6144:8192")
"""Shapes whose sums a rotation adds, which lets attention start at once: they settle."""
WAIT = "griddepcontrol.wait"
START = "griddepcontrol.launch_dependents"
Case = tuple[str, WideConfig, tuple[int, int], bool, bool]


def shipped() -> dict[Case, None]:
    """Return what streams: format, tiles, pieces of the rows, whether with SiLU, and whether it settles.

    Every width of rows for the first tiles that stream of a format, and for those with SiLU; for others the usual one.
    """
    tuning, found, seen = read_tuning("sm_90"), {}, set()
    for name, config in tuning.wide_linear.items():
        shape, few, _ = name.partition("/")
        format, _, outputs = shape.partition(":")
        if not config.stream:
            continue
        silu, every, usual = outputs in GATED, (FEW if few else MANY), (USUAL_FEW if few else USUAL_MANY)
        widths = every if silu or (format, few) not in seen else (usual,)
        seen.add((format, few))
        for num_rows in widths:
            pieces = row_pieces(num_rows)
            settles = config.later and outputs in QUERIES_KEYS_VALUES
            found[format, fitted(config, pieces, format, silu, tuning.shared_bytes), pieces, silu, settles] = None
    return found


def compiled(
    format: str, config: WideConfig, pieces: tuple[int, int], silu: bool, settles: bool
) -> dict[str, object]:  # fmt: skip
    type, element = ("fp8e4nv", gl.float8e4nv) if format == "fp8" else ("bf16", gl.bfloat16)
    (first, second), warps, stages, later = pieces, config.num_warps, config.num_stages, config.later

    def tiles(rows: int) -> str:
        layout = gl.NVMMASharedLayout.get_default_for([rows, config.block_k], element)
        return f"tensordesc<{type}[{rows}, {config.block_k}],{layout!r}>"

    signature = {
        "x_first": tiles(first), "x_second": tiles(second or 16), "w_tiles": tiles(config.block_n),
        "x_scale_ptr": "*fp32", "w_scale_ptr": "*fp32", "y_ptr": "*fp32" if later else "*bf16", "M": "i32", "N": "i32",
        "steps": "i32", "y_stride": "i32", "part_stride": "i32",
    }  # fmt: skip
    constants = {
        "FIRST": first, "SECOND": second, "BLOCK_N": config.block_n, "PAIR": config.pair, "BLOCK_K": config.block_k,
        "STAGES": stages, "LATER": later, "FP8": format == "fp8", "SILU": silu,
        "AT_ONCE": config.at_once, "SETTLES": settles, "PDL": True, "num_warps": warps,
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
    row_tiles = 1 + (second > 0)
    before_start = ptx[: ptx.find(START)]
    return {
        "name": f"{format} {first}+{second} rows {config}",
        "settles": settles,
        "starts": ptx.count(START),
        # No label lies between the wait and what follows it, so who comes here has waited.
        "starts_next_late": WAIT in before_start and "$L__" not in before_start[before_start.rfind(WAIT) :],
        "shared": found.metadata.shared,
        "spills": _stack(found.asm["cubin"]),
        "matrix": len(re.findall(rf"wgmma\S*\.{'e4m3' if format == 'fp8' else 'bf16'}", ptx)),
        "asked_before_inputs": sum(ask < first_wait for ask in asks),
        "asked_after": sum(ask > first_wait for ask in asks),
        "weights": stages * (1 + config.pair),
        "rows": row_tiles * stages,
        "step": row_tiles + 1 + config.pair,
        "folded": len(re.findall(r"fma\.rn\.f32", ptx)),
    }


def main() -> None:
    for case in shipped():
        sys.stdout.write(json.dumps({**compiled(*case)}) + "\n")


if __name__ == "__main__":
    main()
