"""Compile every Triton kernel that ships, for the architectures named, and print one JSON line for each.

A program of its own: kernels compile only where Triton's interpreter was not chosen.
"""

import argparse
import importlib
import json
import re
import subprocess
import sys
import tempfile

import triton
from before_wait import WAIT, touched_before_wait
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompilationError, make_backend

from slipstream.kernels.triton.launch import launch_options
from slipstream.kernels.triton.tuning import read_tuning
from slipstream.kernels.triton.variants import Variant

MODULES = ("gemm.split_k", "gemm.small_m_launch", "gemm.wide_linear", "gemm.int4", "gemm.quantize", "gemm.mxfp4",
           "gemm.split_k_reduce", "norm", "rope", "gather", "attention.dispatch", "attention.windowed", "sampling",
           "speculative", "moe.dispatch", "moe.router", "mla.attention", "mla.heads",
           "slipstream.kernels.training.triton_variants")  # fmt: skip
TARGETS = {
    "sm_90": GPUTarget("cuda", 90, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
    "gfx950": GPUTarget("hip", "gfx950", 64),
}
COUNTS = ("T", "M", "num_rows", "num_pairs", "num_pieces", "num_splits", "num_requests", "num_tokens", "num_tiles")
MATRIX = {  # what a product looks like in each assembly
    "bf16": (r"wgmma\S*bf16|mma\.sync\S*bf16", r"v_mfma_f32_\d+x\d+x\d+\S*bf16"),
    "fp8": (r"wgmma\S*e4m3|mma\.sync\S*e4m3", r"v_mfma_\S*(fp8|f8f6f4)"),
    "fp4": (r"mma\S*e2m1", r"v_mfma_scale_f32_\S*f8f6f4"),
    "int8": (r"wgmma\S*s8|mma\.sync\S*s8", r"v_mfma_i32_\S*i8"),
}


def compile_variant(variant: Variant, architecture: str) -> dict[str, object]:
    """Return the size and the kind of code a variant becomes."""
    names = variant.kernel.arg_names
    signature = {name: variant.signature.get(name, "constexpr") for name in names}
    attrs = {(names.index(name),): [["tt.divisibility", 16]] for name in variant.divisible}
    tuning = read_tuning(architecture)
    constants = {**variant.constants, **({"PDL": True} if "PDL" in names and tuning.dependent_launch else {})}
    source = ASTSource(variant.kernel, signature, constants, attrs)
    options = {"num_warps": variant.num_warps, "num_stages": variant.num_stages}
    options |= launch_options(dependent=False, instruction=tuning.instruction if variant.matrix != "none" else 0)
    options |= {"maxnreg": variant.registers} if variant.registers else {}
    compiled = triton.compile(source, target=TARGETS[architecture], options=options)
    cuda = architecture.startswith("sm_")
    text = compiled.asm["ptx" if cuda else "amdgcn"]
    pattern = None if variant.matrix == "none" else MATRIX[variant.matrix][0 if cuda else 1]
    return {
        "name": variant.name,
        "architecture": architecture,
        "registers": None if cuda else _number(r"\.vgpr_count:\s+(\d+)", text),
        "shared": compiled.metadata.shared,
        "spills": _stack(compiled.asm["cubin"]) if cuda else _number(r"\.vgpr_spill_count:\s+(\d+)", text),
        "scalar_spills": 0 if cuda else _number(r"\.sgpr_spill_count:\s+(\d+)", text),
        "matrix": variant.matrix,
        "matrix_found": pattern is None or re.search(pattern, text) is not None,
        "folded": len(re.findall(r"fma\.rn\.f32", text)) if cuda else None,
        "bytes": len(compiled.asm["cubin" if cuda else "hsaco"]),
        "unfenced": cuda and _unfenced(text),
        "overlap": _overlap(compiled.asm) if constants.get("PDL") else None,
        "refuses_one": _refuses_one(variant, constants) if cuda else [],
    }  # fmt: skip


def _refuses_one(variant: Variant, constants: dict[str, object]) -> list[str]:
    """Return the counts that a kernel does not compile for where they are 1, which Triton makes a constant."""
    target = TARGETS["sm_90"]
    backend = make_backend(target)
    options = backend.parse_options({"num_warps": variant.num_warps})
    refused = []
    for parameter in variant.kernel.params:
        if parameter.name not in COUNTS or parameter.do_not_specialize or parameter.name not in variant.signature:
            continue
        values = {**constants, parameter.name: 1}
        signature = {
            name: "constexpr" if name in values else variant.signature[name] for name in variant.kernel.arg_names
        }
        context = ir.context()
        ir.load_dialects(context)
        backend.load_dialects(context)
        source = ASTSource(variant.kernel, signature, values)
        try:
            source.make_ir(
                target, options, backend.get_codegen_implementation(options), backend.get_module_map(), context
            )
        except CompilationError as error:
            refused.append(f"{parameter.name}: {error}")
    return refused


def _overlap(asm: dict[str, str]) -> dict[str, object]:
    """Return how a kernel overlaps its neighbours: what it touches before its wait, and if it waits to start the next.

    Args:
        asm: Triton's GPU code, and the assembly, where nothing may have moved up past the wait either.
    """
    touched, ptx = touched_before_wait(asm["ttgir"]), asm["ptx"]
    above = re.findall(r"\b(?:ld|st|red|atom)\.global|\bcp\.async\.c", ptx[: ptx.find(WAIT)])
    return {
        "waits": touched is not None,
        "touches": sorted(touched or ()),
        "accesses": len(above),
        "starts_next_late": WAIT in ptx and ptx.find("griddepcontrol.launch_dependents") > ptx.find(WAIT),
    }


def _unfenced(ptx: str) -> bool:
    """Tell whether a matrix instruction may read what copies have written with no fence between the two."""
    copied = False
    for line in ptx.splitlines():
        if "cp.async.wait_" in line:
            copied = True
        elif "fence.proxy.async" in line:
            copied = False
        elif "wgmma.mma_async" in line and copied:
            return True
    return False


def _stack(cubin: bytes) -> int:
    """Return the bytes a CUDA kernel keeps outside its registers."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        return _number(r"STACK:(\d+)", subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def _number(pattern: str, text: str) -> int:
    return int(re.search(pattern, text)[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("architectures", nargs="+", choices=sorted(TARGETS))
    parser.add_argument("--modules", nargs="*", default=MODULES)
    arguments = parser.parse_args()
    for name in arguments.modules:
        full = name if name.startswith("slipstream.") else f"slipstream.kernels.triton.{name}"
        if importlib.util.find_spec(full) is None:
            continue
        module = importlib.import_module(full)
        for architecture in arguments.architectures:
            for variant in module.variants(architecture):
                sys.stdout.write(json.dumps(compile_variant(variant, architecture)) + "\n")
                sys.stdout.flush()


if __name__ == "__main__":
    main()
