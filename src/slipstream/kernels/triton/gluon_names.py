"""Names of Gluon that differ between the versions of Triton we allow (3.6 and later)."""

from triton.experimental.gluon import language as gl

thread_barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier
"""Lets the threads of a program wait for each other; called `barrier` from Triton 3.7 on."""
