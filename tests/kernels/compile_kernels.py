"""Compile what passes of real models launch on an architecture, and print one JSON line for each kernel.

Launches are recorded from the dispatch code itself (`slipstream.kernels.triton.record`), so nothing is listed by hand.
A program of its own: kernels compile only where Triton's interpreter was not chosen. With --digests it compiles to
Triton's first IR and prints a digest of that: the same lines before and after a change say that no kernel changed.
"""

import argparse
import hashlib
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace

import torch
import triton
from before_wait import WAIT, touched_before_wait
from triton._C.libtriton import ir
from triton.compiler import ASTSource, CompilationError, make_backend

from slipstream.checkpoint.spec import ModelSpec, RopeSpec
from slipstream.kernels import KV_FP8, RowSampling, SampleRows, SamplingState, Sight
from slipstream.kernels.chains import ChainOutcome, ChainPlaces, ChainRows
from slipstream.kernels.ops import Ending
from slipstream.kernels.training.triton_variants import Variant
from slipstream.kernels.training.triton_variants import variants as training_variants
from slipstream.kernels.trees import Children, Growth, GrowthRows, TreeNodes, TreeOutcome
from slipstream.kernels.triton.ops import TritonOps
from slipstream.kernels.triton.record import META, Recorded, recording, target_of
from slipstream.kernels.triton.tuning import has_fp8, read_tuning
from slipstream.measure.rank_models import build_target, rank_of
from slipstream.models.fused.survey import Workload, hollow_target, hollow_weight, meta_context
from slipstream.speculation.grow import grow, plan_of
from slipstream.speculation.tree import TreeShape

LLAMA = ModelSpec("LlamaForCausalLM", 128256, 4096, 14336, 2, 32, 8, 128, 1e-5, RopeSpec(5e5, 128), 16384, False)
SMOLLM = ModelSpec("LlamaForCausalLM", 49152, 576, 1536, 2, 9, 3, 64, 1e-5, RopeSpec(1e5, 64), 8192, True)
QWEN = replace(LLAMA, architecture="Qwen3ForCausalLM", qk_norm="head", intermediate_size=12288, vocab_size=151936)
FORMATS = ("w8a8_int8", "w4a8", "int4_per_channel", "int4_group", "int4_fp8", "mxfp4", "mxfp4_act")
EXPERTS = ("w4a8", "int4_group", "int4_fp8", "mxfp4", "mxfp4_act", "fp8_block", "dense")
TREES = (TreeShape(depth=5, width=8, budget=63), TreeShape(paths=((0,), (1,), (0, 0), (0, 1), (1, 0))))
COUNTS = ("T", "M", "num_rows", "num_pairs", "num_pieces", "num_splits", "num_requests", "num_tokens", "num_tiles")
MATRIX = {  # what a product looks like in each assembly
    "bf16": (r"wgmma\S*bf16|mma\.sync\S*bf16", r"v_mfma_f32_\d+x\d+x\d+\S*b?f16"),
    "fp8": (r"wgmma\S*e4m3|mma\.sync\S*e4m3", r"v_mfma_\S*(fp8|f8f6f4)"),
    "int8": (r"wgmma\S*s8|mma\.sync\S*s8", r"v_mfma_i32_\S*i8"),
}


def passes(ops: TritonOps, few: bool) -> Iterator[None]:
    """Run everything that launches kernels, pass by pass; `few` is a choice that launches every kernel."""
    yield from _dense_passes(ops, few)
    for format in _with_fp8(("w4a8", "mxfp4_act") if few else FORMATS, ops):
        weight = ops.prepare(hollow_weight(format, 4096, 4096))
        for rows in (4,) if few else (1, 4, 40, 300):
            yield ops.packed_linear(torch.empty(rows, 4096, dtype=torch.bfloat16, device=META), weight)
    for format in _with_fp8(("w4a8", "fp8_block") if few else EXPERTS, ops):
        if ops.fused.architecture in ("sm_89", "sm_100", "sm_120"):
            continue  # latent attention does not fit
        target = build_target(replace(rank_of("kimi-k2.5", 8).target, num_layers=2), format, 8192, META)
        for requests, nodes in ((1, 4), (40, 4)) if few else ((1, 1), (1, 4), (8, 4), (40, 4)):
            yield _run(ops, target, Workload(requests, nodes))
    windowed = Sight(128, None, torch.empty(32, device=META))
    kv = meta_context(ops, hollow_target(LLAMA, ops), Workload(4, 4))
    q = torch.empty(16, 32, 128, dtype=torch.bfloat16, device=META)
    yield ops.attention(q, kv.kv.layers[0], kv.batch, 0.1, windowed)
    yield from _chosen(ops)


def _dense_passes(ops: TritonOps, few: bool) -> Iterator[None]:
    batches = ((1, 1), (1, 4), (8, 1), (8, 4), (40, 1), (40, 4), (64, 4), (12, 6), (1, 512))
    for spec, weights in ((LLAMA, "dense"), (LLAMA, "fp8_per_channel"), (SMOLLM, "dense"), (QWEN, "dense")):
        if weights != "dense" and not has_fp8(ops.fused.architecture):
            continue
        target = hollow_target(spec, ops, weights)
        for requests, nodes in batches:
            if few and (spec is not LLAMA or (requests, nodes) in ((8, 1), (40, 1), (64, 4))):
                continue
            for max_keys in (4096,) if few or spec is not LLAMA else (1024, 4096, 32768):
                yield _run(ops, target, Workload(requests, nodes, max_keys))
    for requests, nodes in ((40, 4), (1, 4), (1, 512)) if has_fp8(ops.fused.architecture) else ():
        yield _run(ops, hollow_target(LLAMA, ops), Workload(requests, nodes, 16384, keys=KV_FP8))
    for requests, nodes, max_keys in ((1, 16, 4096),) if few else ((1, 16, 4096), (1, 64, 16384), (8, 64, 32768)):
        yield _run(ops, hollow_target(LLAMA, ops), Workload(requests, nodes, max_keys, depth=5))
    target, context = hollow_target(QWEN, ops), meta_context(ops, hollow_target(QWEN, ops), Workload(8, 4))
    ending = Ending(torch.empty(8, dtype=torch.int64, device=META), meta_context(ops, target, Workload(8, 1)).batch)
    yield target(torch.empty(32, dtype=torch.int64, device=META), replace(context, ending=ending))


def _with_fp8(formats, ops) -> list[str]:
    """Return formats that an architecture has types for."""
    return [format for format in formats if "fp8" not in format or has_fp8(ops.fused.architecture)]


def _run(ops, target, workload) -> None:
    tokens = torch.empty(workload.requests * workload.nodes, dtype=torch.int64, device=META)
    target.logits(target(tokens, meta_context(ops, target, workload)).last_TD, ops)


def _chosen(ops: TritonOps) -> Iterator[None]:
    """Draft, choose and accept over a batch of 8 chains, and of 8 trees of either kind."""

    def empty(*shape, dtype=torch.int64):
        return torch.empty(*shape, dtype=dtype, device=META)

    logits, state = empty(32, 128256, dtype=torch.bfloat16), SamplingState(8, 128256, META)
    yield ops.sample(logits, SampleRows(empty(32), empty(32), empty(32, 3)), state)
    yield ops.count(state, empty(8), empty(8, 4), empty(8))
    sampling = RowSampling(empty(8, dtype=torch.float32), empty(8), empty(8))
    draft_logits, ids = empty(8, 32000, dtype=torch.bfloat16), empty(32000)
    yield ops.propose(draft_logits, ids, sampling, empty(8))
    yield ops.top_k(draft_logits, ids, sampling, 10)
    yield ops.perturb(draft_logits, ids, sampling)
    many = RowSampling(empty(256, dtype=torch.float32), empty(256), empty(256))
    yield ops.propose(empty(256, 32000, dtype=torch.bfloat16), ids, many, empty(256))
    rows = ChainRows(*(empty(8) for _ in range(3)), empty(8, dtype=torch.float32), *(empty(8) for _ in range(2)),
                     empty(8, 256, dtype=torch.int32))  # fmt: skip
    yield ops.place_chains(rows, ChainPlaces.allocate(8, 4, META), 16)
    kv = meta_context(ops, hollow_target(LLAMA, ops), Workload(8, 4)).kv
    yield ops.move_paths(kv.layers, empty(8, 5), empty(8, 5))
    yield ops.accept_chains(rows, empty(8, 4), empty(8, 4), empty(3), ChainOutcome.allocate(8, 4, META))
    grown = GrowthRows(rows.pages_RP, *(empty(8) for _ in range(2)), rows.temperature_R, rows.seed_R)
    for shape in TREES:
        growth = Growth.start(plan_of(shape, META), grown, 16)
        nodes = TreeNodes.allocate(empty(8, shape.num_nodes), empty(8, shape.num_nodes), shape.depth)
        yield ops.rerank_trees(growth, *grow(growth, _Drafted(), ops), nodes)
        outcome = TreeOutcome.allocate(8, shape.depth, META)
        yield ops.accept_trees(rows, nodes, empty(8, shape.num_nodes), empty(shape.depth), outcome)


class _Drafted:
    """Names children of 8 rows that nothing is known of."""

    feedback_LH = torch.empty(8, 4096, dtype=torch.bfloat16, device=META)

    def root_children(self, count):
        return self._of(1, count)

    def children(self, level, count):
        self.feedback_LH = level.hidden_LH
        return self._of(level.ids_RW.shape[1], count)

    def _of(self, width, count):
        tokens = torch.empty(8, width, count, dtype=torch.int64, device=META)
        return Children(torch.empty_like(tokens, dtype=torch.float32), tokens)


def recorded(architecture: str, few: bool) -> list[Recorded]:
    """Return what is launched on an architecture, every kernel once."""
    with recording(architecture) as launches, torch.no_grad():
        for _ in passes(TritonOps(META), few):
            pass
    return list({launch.key: launch for launch in launches}.values())


def representative(launches: list[Recorded]) -> list[Recorded]:
    """Return one launch of each kernel, and of kernels that overlap others in two ways, one each."""
    ways = ("EARLY", "WAITED", "WAITS_FIRST")
    found = {}
    for launch in launches:
        kind = "*fp8e4nv" in launch.source.signature.values()
        way = tuple(str(launch.constants.get(name)) for name in ways)
        found.setdefault((launch.module, launch.name, kind, way), launch)
    return list(found.values())


def described(launch: Recorded, architecture: str) -> dict[str, object]:
    """Compile a launch; return the size and the kind of code it becomes."""
    compiled = triton.compile(launch.source, target=launch.target, options=launch.options)
    matrix = _matrix(launch, architecture, compiled.asm["ttgir"])
    gluon = launch.source.ext == "ttgir"
    constants = {name: value for name, value in launch.constants.items() if isinstance(value, int | str | None)}
    row = {"name": f"{launch.module.removeprefix('triton.')}:{launch.name}", "constants": constants, "gluon": gluon}
    row |= _measured(compiled, architecture, matrix, launch.options.get("launch_pdl"), gluon)
    row["refuses_one"] = [] if gluon or not architecture.startswith("sm_") else _refuses_one(launch)
    return row


def _matrix(launch: Recorded, architecture: str, ttgir: str) -> str:
    """Return the matrix instruction a kernel's rows call for."""
    types = " ".join(map(str, launch.source.signature.values()))
    if not re.search(r"tt\.dot|warp_group_dot|mma_v2", ttgir):
        return "none"
    keys = {"k_scales_ptr", "ancestors_ptr"} & {*launch.source.signature}  # FP8 keys are multiplied as bfloat16
    if "fp8e4nv" in types and not keys:
        return "fp8" if read_tuning(architecture).fp8_dot else "bf16"
    return "int8" if launch.source.signature.get("x_ptr") == "*i8" else "bf16"  # 4-bit weights lie in bytes, too


def _measured(compiled, architecture: str, matrix: str, overlaps: bool, gluon: bool) -> dict[str, object]:
    cuda = architecture.startswith("sm_")
    text = compiled.asm["ptx" if cuda else "amdgcn"]
    pattern = None if matrix == "none" else MATRIX[matrix][0 if cuda else 1]
    row = {
        "architecture": architecture,
        "registers": None if cuda else _number(r"\.vgpr_count:\s+(\d+)", text),
        "shared": compiled.metadata.shared,
        "spills": _stack(compiled.asm["cubin"]) if cuda else _number(r"\.vgpr_spill_count:\s+(\d+)", text),
        "scalar_spills": 0 if cuda else _number(r"\.sgpr_spill_count:\s+(\d+)", text),
        "matrix": matrix,
        "matrix_found": pattern is None or re.search(pattern, text) is not None,
        "folded": len(re.findall(r"fma\.rn\.f32", text)) if cuda else None,
        "bytes": len(compiled.asm["cubin" if cuda else "hsaco"]),
        "unfenced": cuda and not gluon and _unfenced(text),
    }
    if cuda and overlaps:
        row["overlap"] = _overlap(compiled.asm)
    return row


def _refuses_one(launch: Recorded) -> list[str]:
    """Return the counts that a kernel does not compile for where they are 1, which Triton makes a constant."""
    backend = make_backend(launch.target)
    options = backend.parse_options({"num_warps": launch.options["num_warps"]})
    source, refused = launch.source, []
    for parameter in source.fn.params:
        name = parameter.name
        if name not in COUNTS or parameter.do_not_specialize or source.signature[name] == "constexpr":
            continue
        values = {**source.constants, (parameter.num,): 1}
        signature = {**source.signature, name: "constexpr"}
        context = ir.context()
        ir.load_dialects(context)
        backend.load_dialects(context)
        try:
            ASTSource(source.fn, signature, values).make_ir(
                launch.target, options, backend.get_codegen_implementation(options), backend.get_module_map(), context
            )
        except CompilationError as error:
            refused.append(f"{parameter.name}: {error}")
    return refused


def digest(launch: Recorded) -> str:
    """Return a digest of a launch's first IR, without locations, names and the order of constants, and its options."""
    backend, source, context = make_backend(launch.target), launch.source, ir.context()
    options, stages = backend.parse_options(launch.options), {}
    ir.load_dialects(context)
    backend.load_dialects(context)
    module = source.make_ir(
        launch.target, options, backend.get_codegen_implementation(options), backend.get_module_map(), context
    )
    backend.add_stages(stages, options, source.language)
    first = next(iter(stages.values()))(module, {"target": launch.target, **options.__dict__}).str_nodebug()
    lines = first.replace(f"@{launch.name}(", "@kernel(").splitlines()
    lines.sort(key=lambda line: (0, line) if "= arith.constant" in line else (1, ""))
    return hashlib.sha256("\n".join([*lines, str(sorted(launch.options.items()))]).encode()).hexdigest()[:16]


def _overlap(asm: dict[str, str]) -> dict[str, object]:
    """Return how a kernel overlaps its neighbours: what it touches before its wait, and if it waits to start the next.

    Args:
        asm: Triton's GPU code, and the assembly, where nothing may have moved up past the wait either.
    """
    touched, ptx = touched_before_wait(asm["ttgir"]), asm["ptx"]
    before = ptx[: ptx.find(WAIT)]
    starts = "griddepcontrol.launch_dependents"
    return {
        "waits": ptx.count(WAIT),
        "touches": sorted(touched or ()),
        "accesses": len(re.findall(r"\b(?:ld|st|red|atom)\.global|\bcp\.async\.c", before)),
        "stores": len(re.findall(r"\b(?:st|red|atom)\.global", before)),
        "tma": len(re.findall(r"cp\.async\.bulk\.tensor\S*global", before)),
        "starts_next_late": WAIT in ptx and ptx.find(starts) > ptx.find(WAIT),
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


def _of_variant(variant: Variant, architecture: str) -> Recorded:
    """Return one of training's kernels, which are listed by hand, as if it had been recorded."""
    names = variant.kernel.arg_names
    signature = {name: variant.signature.get(name, "constexpr") for name in names}
    constants = {(names.index(name),): value for name, value in variant.constants.items()}
    attrs = {(names.index(name),): [["tt.divisibility", 16]] for name in variant.divisible}
    source = ASTSource(variant.kernel, signature, constants, attrs)
    options = {"num_warps": variant.num_warps, "num_stages": variant.num_stages, "enable_fp_fusion": False}
    return Recorded(variant.name, "training", source, target_of(architecture), options, variant.constants)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("architectures", nargs="+")
    parser.add_argument("--all", action="store_true", help="everything, not one launch of each kernel")
    parser.add_argument("--only", default="", help="kernels whose module and name contain this")
    parser.add_argument("--list", action="store_true", help="compile nothing")
    parser.add_argument("--digests", action="store_true", help="compile to the first IR alone, and print its digest")
    arguments = parser.parse_args()
    for architecture in arguments.architectures:
        found = recorded(architecture, few=not arguments.all)
        if not arguments.all:
            found = representative(found)
        if architecture in ("sm_90", "gfx942", "gfx950"):
            found += [_of_variant(variant, architecture) for variant in training_variants(architecture)]
        for launch in found:
            if arguments.only in f"{launch.module}:{launch.name}":
                if arguments.list or arguments.digests:
                    row = {"name": launch.name} | ({"digest": digest(launch)} if arguments.digests else {})
                else:
                    row = described(launch, architecture)
                sys.stdout.write(json.dumps(row, default=str) + "\n")
                sys.stdout.flush()


if __name__ == "__main__":
    main()
