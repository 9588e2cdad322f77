"""How fast this device's memory is read: the denominator of every "percent of floor"."""
# Triton gives kernel arguments their types when it compiles, so Python has none to check.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# ruff: noqa: ANN001, ANN202

import torch
import triton
import triton.language as tl

_BLOCK = 8192
_BYTES = 8 << 30


@triton.jit
def _read_kernel(x_ptr, out_ptr, steps, BLOCK: tl.constexpr):
    """Add up `steps` blocks that lie one after another."""
    program = tl.program_id(0).to(tl.int64)
    at = x_ptr + program * steps * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.int32)
    for step in range(steps):
        total += tl.load(at + step * BLOCK)
    tl.store(out_ptr + program, tl.sum(total, 0))


def read_bandwidth(device: torch.device) -> float:
    """Return the bytes a second that a read-only pass over 8 GiB reaches: the best of five."""
    steps = 16
    num_programs = _BYTES // 4 // _BLOCK // steps
    x = torch.zeros(num_programs * steps * _BLOCK, dtype=torch.int32, device=device)
    out = torch.empty(num_programs, dtype=torch.int32, device=device)
    best = float("inf")
    for _ in range(6):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]  # torch's
        start.record()
        _read_kernel[(num_programs,)](x, out, steps, BLOCK=_BLOCK, num_warps=8, num_stages=4)
        end.record()
        end.synchronize()
        best = min(best, start.elapsed_time(end))
    return x.nbytes / (best * 1e-3)
