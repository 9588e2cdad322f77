"""Names of Gluon that differ between the versions of Triton we allow (3.6 and later)."""
# Triton gives kernel arguments their types when it compiles, so Python has none to check.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# ruff: noqa: ANN001, ANN201

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import tma

thread_barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier
"""Lets the threads of a program wait for each other; called `barrier` from Triton 3.7 on."""

_RENAMED = hasattr(tma, "async_load")  # with Triton 3.9
async_load = async_copy.async_load if _RENAMED else async_copy.async_copy_global_to_shared
"""Copies from pointers to shared memory (cp.async)."""
tma_load = tma.async_load if _RENAMED else tma.async_copy_global_to_shared
"""Copies a box of a tensor to shared memory (TMA)."""
tma_store = tma.async_store if _RENAMED else tma.async_copy_shared_to_global
"""Copies shared memory to a box of a tensor (TMA)."""


@builtin
def reinterpret(block, dtype, shape, layout, _semantic=None):
    """Return the same shared memory as a block of another type, shape or layout."""
    method = block.reinterpret if hasattr(block, "reinterpret") else block._reinterpret
    return method(dtype, shape, layout, _semantic=_semantic)
