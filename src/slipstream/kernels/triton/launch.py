"""Programmatic dependent launch (PDL), prefetches and fences, who of a group is last, compiling ahead."""
# Triton gives kernel arguments their types when it compiles, so Python has none to check.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# ruff: noqa: ANN001, ANN201

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import triton
import triton.language as tl
from triton import AsyncCompileMode, JITFunction
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def let_next_start(PDL: tl.constexpr):
    """Let the next kernel's programs start as SMs come free, once all programs here have come this far."""
    if PDL:
        gdc_launch_dependents()


@triton.jit
def wait_for_previous(PDL: tl.constexpr):
    """Wait until the kernel before has written everything; it waited for the one before itself, and so on.

    At least one program of a kernel launched with PDL must call this, and every one before its first read or write of
    what the kernels before may still touch.
    """
    if PDL:
        gdc_wait()


@triton.jit
def wait_for_inputs(PDL: tl.constexpr):
    """Let the next kernel start, then wait for the one before."""
    let_next_start(PDL)
    wait_for_previous(PDL)


@triton.jit
def wait_then_let_start(PDL: tl.constexpr):
    """Wait for the kernel before, and only then let the next one start.

    Whatever was written before the kernel before is then there for the next kernel, before it waits itself.
    """
    wait_for_previous(PDL)
    let_next_start(PDL)


@triton.jit
def keep_order(PDL: tl.constexpr):
    """Keep loads before this point before it; a barrier the compiler knows of would end the pipelining of its loop."""
    if PDL:
        tl.inline_asm_elementwise("bar.sync 0; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def prefetch(at):
    """Prefetch the lines that hold these addresses to L2."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [at.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def prefetch_bytes(at, num_bytes):
    """Prefetch so many bytes from each of these addresses on to L2, both multiples of 16: one TMA request each."""
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;", "=r,l,r", [at.to(tl.int64), num_bytes],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def show_copies(PDL: tl.constexpr):
    """Let the next matrix instruction see what copies have brought into shared memory; called right before it.

    Hopper's instructions read shared memory by another way than copies write it, and PTX wants a fence between the two.
    Triton puts it there from 3.7 on (triton-lang/triton #9610).
    """
    if PDL:
        tl.inline_asm_elementwise(
            "fence.proxy.async.shared::cta; // dummy $0", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def arrived_last(counter_ptr, num_programs):
    """Count this program in, after its stores; tell the last of `num_programs`, and set the counter back to zero.

    What the others stored is then visible, and may be read in any order: nothing depends on who was last.
    """
    tl.debug_barrier()
    before = tl.atomic_add(counter_ptr, 1, sem="acq_rel", scope="gpu")
    last = before == num_programs - 1
    if last:
        tl.store(counter_ptr, 0)
    return last


@triton.jit
def arrived_last_at(counters, num_programs, mask):
    """Count this program in at several counters at once; tell as 1 where it is last, and set those back to zero."""
    tl.debug_barrier()
    before = tl.atomic_add(counters, 1, mask=mask, sem="acq_rel", scope="gpu")
    last = mask & (before == num_programs - 1)
    tl.store(counters, 0, mask=last)
    return last.to(tl.int32)


def launch_options(dependent: bool, instruction: int = 0) -> dict[str, Any]:
    """Return the launch's further arguments: CUDA alone knows dependent launches, AMD alone a choice of instructions.

    No product is folded into a sum: the compiler does so where it can see both, in a block of keys that needs no mask
    and not in one that does, and a row's bits would depend on the rows beside it.

    Args:
        instruction: rows and columns of AMD's matrix instruction, one for all tiles so that bits stay; 0 is not AMD.
    """
    options: dict[str, Any] = {"enable_fp_fusion": False, **({"launch_pdl": True} if dependent else {})}
    return {**options, "matrix_instr_nonkdim": instruction} if instruction else options


@contextmanager
def compiling_ahead(*, ignore_errors: bool = False) -> Iterator[None]:
    """Have kernels compiled by threads instead of launched; they are ready when this ends.

    Triton offers to compile a kernel without launching it one call at a time (`warmup`); here every launch is one, so
    that a whole pass of a model tells what it needs. Results of kernels mean nothing meanwhile.
    """
    launch = JITFunction.run

    def compiled(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:  # as Triton has it
        return launch(self, *args, grid=grid, warmup=True, **kwargs)

    JITFunction.run = compiled
    try:
        with (
            ThreadPoolExecutor(os.cpu_count()) as threads,
            AsyncCompileMode(threads, ignore_errors=ignore_errors),
        ):
            yield
    finally:
        JITFunction.run = launch
