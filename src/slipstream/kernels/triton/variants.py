"""What a kernel is compiled with: every combination that ships is listed, so that a test can compile them all."""

from dataclasses import dataclass, field
from typing import Any, Literal

Matrix = Literal["none", "bf16", "fp8", "fp4", "int8"]


@dataclass(frozen=True)
class Variant:
    """One kernel with one set of compile-time values.

    Args:
        kernel: the triton.jit function; triton has no types of its own.
        signature: Triton's type of each run-time argument ("*bf16", "i32", "fp32", ...).
        constants: the tl.constexpr arguments.
        matrix: which matrix instructions the code must contain.
        divisible: run-time arguments known to be multiples of 16 (strides, widths and aligned pointers).
        registers: the most a thread may have; 0: as many as the compiler likes.
    """

    name: str
    kernel: Any
    signature: dict[str, str]
    constants: dict[str, Any]
    num_warps: int
    num_stages: int
    matrix: Matrix = "none"
    divisible: tuple[str, ...] = field(default=())
    registers: int = 0
