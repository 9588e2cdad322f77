"""Compiling kernels ahead, side by side: what runs meanwhile only says which kernels it would launch."""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from triton import AsyncCompileMode, JITFunction


@contextmanager
def compiling_ahead() -> Iterator[None]:
    """Have kernels compiled by threads instead of launched; they are ready when this ends.

    Triton offers to compile a kernel without launching it one call at a time (`warmup`); here every launch is one, so
    that a whole pass of a model tells what it needs. Results of kernels mean nothing meanwhile.
    """
    launch = JITFunction.run

    def compiled(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:  # as Triton has it
        return launch(self, *args, grid=grid, warmup=True, **kwargs)

    JITFunction.run = compiled
    try:
        with ThreadPoolExecutor(os.cpu_count()) as threads, AsyncCompileMode(threads):
            yield
    finally:
        JITFunction.run = launch
