"""Where a step's time goes: kernels by name, each with the time that passed until it ended.

Kernels overlap, since each may start while the one before drains, so their own times add up to more than a step takes.
The time from one kernel's end to the next one's is that kernel's here: these add up to the whole.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch.profiler import ProfilerActivity, profile

STEPS = 8


@dataclass(frozen=True)
class KernelShare:
    """One kernel in a step: how often it ran, and the microseconds that its ends account for."""

    name: str
    count: float
    microseconds: float


def kernel_shares(step: Callable[[], object]) -> list[KernelShare]:
    """Profile some steps; the dearest kernel comes first."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(STEPS):
            step()
        torch.cuda.synchronize()
    spans = [
        (event.name, event.time_range.start, event.time_range.end)
        for event in seen.events() or ()
        if event.device_type == torch.autograd.DeviceType.CUDA
    ]
    return shares(spans, STEPS)


def shares(spans: Iterable[tuple[str, float, float]], steps: int) -> list[KernelShare]:
    """Share out the time of (name, start, end) in microseconds; time in which nothing ran is shared out as well."""
    spent: dict[str, float] = defaultdict(float)
    counts: dict[str, int] = defaultdict(int)
    last: float | None = None
    for name, start, end in sorted(spans, key=lambda span: span[2]):
        spent[name] += end - (start if last is None else last)
        counts[name] += 1
        last = end
    found = [KernelShare(name, counts[name] / steps, spent[name] / steps) for name in spent]
    return sorted(found, key=lambda share: -share.microseconds)


def report(found: list[KernelShare], most: int = 16) -> str:
    """Return a line for each of the dearest kernels, and one for the rest."""
    lines = [f"    {share.microseconds:9.1f} us {share.count:7.1f} x {share.name[:90]}" for share in found[:most]]
    rest = found[most:]
    if rest:
        lines.append(f"    {sum(s.microseconds for s in rest):9.1f} us {sum(s.count for s in rest):7.1f} x all others")
    return "\n".join(lines)
