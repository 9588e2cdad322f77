"""A device that runs late: what an executor hands to it waits, in order, until somebody waits for it, as on a GPU."""

from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from slipstream.engine.pages import PageAllocator
from slipstream.executors.cuda_graph import executor, prompts, transfer
from slipstream.executors.cuda_graph.capture import Capturer
from slipstream.executors.cuda_graph.prepared import Prepared
from slipstream.executors.cuda_graph.prompts import PaddedPrompts, Prompts
from slipstream.executors.cuda_graph.state import BatchState
from slipstream.executors.cuda_graph.step import Step
from slipstream.executors.eager import EagerExecutor
from slipstream.kernels import SamplingState


class LateDevice:
    """Puts off the parts of steps, prompts, and what goes up and down, until something that came down is read.

    A page that is freed is filled with NaN as late as the device can see to it, behind everything launched before: a
    key that somebody still reads there, or that nobody wrote again before it counted, cannot go unnoticed.
    """

    def __init__(self, monkeypatch) -> None:
        self._waiting: deque[Callable[[], object]] = deque()
        self._patch = monkeypatch
        self._is_at_work = False
        for owner, name in (
            (BatchState, "load"), (BatchState, "imagine"), (BatchState, "add_pages"), (BatchState, "unload"),
            (BatchState, "move"), (SamplingState, "load"), (SamplingState, "clear"), (executor, "upload"),
            (prompts, "upload"), (Prompts, "compute"), (Prompts, "choose"), (Prompts, "extend"),
        ):  # fmt: skip
            self._put_off(owner, name)
        self._patch.setattr(Capturer, "capture", lambda capturer, function: lambda: self.later(function))
        for module in (executor, transfer):
            self._patch.setattr(module, "Arrival", lambda tensors: _LateArrival(self, tensors))
        for owner in (Step, PaddedPrompts):
            self._patch.setattr(owner, "sampled", self._late_property("sampled"), raising=False)
        for name, kept in (("step", "_steps"), ("prompts", "_padded")):
            self._run_first(Prepared, name, lambda prepared, kind, kept=kept: kind not in getattr(prepared, kept))
        self._run_first(Prepared, "mixed", lambda prepared, kind, size: size not in prepared.step(kind).mixed)
        self._run_first(EagerExecutor, "_run", lambda executor, planned, step: bool(planned))

    def spoil_freed_pages(self, engine) -> None:
        """Fill pages of this engine with NaN when their last holder lets go of them and nobody could take them up."""
        allocator: PageAllocator = engine._pages
        kv, release = engine.executor.runner.kv, allocator.release

        def spoil(pages: list[int]) -> None:
            for page in pages:
                for layer in kv.layers:
                    for part in (layer.keys_SGd, layer.values_SGd):
                        part[page * kv.page_size : (page + 1) * kv.page_size] = torch.nan

        def released(pages) -> None:
            release(pages)
            freed = [page for page in pages if not allocator._holders[page] and page not in allocator._key_of]
            self.later(lambda: spoil(freed))

        allocator.release = released

    def later(self, work: Callable[[], object]) -> None:
        """Let work wait behind all that waits already."""
        self._waiting.append(work)

    def run_until(self, there: list) -> None:
        """Run what waits, up to what fills `there` and no further."""
        while not there:
            self._work()

    def _work(self) -> None:
        """Do what has waited longest; what that calls is done at once."""
        work, self._is_at_work = self._waiting.popleft(), True
        with torch.inference_mode():
            work()
        self._is_at_work = False

    def _put_off(self, owner: object, name: str) -> None:
        """Put off a function; what the host may change meanwhile is read now, as staging memory would."""
        work = getattr(owner, name)

        def put_off(*args):
            if self._is_at_work:
                return work(*args)
            staged = [list(arg) if isinstance(arg, list) else arg for arg in args]
            result: list[Any] = []
            self.later(lambda: result.append(work(*map(_there, staged))))
            return _Late(lambda: result[0])

        self._patch.setattr(owner, name, put_off)

    def _late_property(self, name: str) -> property:
        """Return an attribute that the host reads late."""

        def read(this):
            return this.__dict__[name] if self._is_at_work else _Late(lambda: this.__dict__[name])

        return property(read, lambda this, value: this.__dict__.__setitem__(name, value))

    def _run_first(self, owner: type, name: str, is_due: Callable[..., bool]) -> None:
        """Run all that waits before a method that works on the device at once."""
        work = getattr(owner, name)

        def after_the_rest(*args):
            while self._waiting and is_due(*args):
                self._work()
            return work(*args)

        self._patch.setattr(owner, name, after_the_rest)


class _Late:
    """Something whose parts are not there yet: each is a function that gives it when its turn has come."""

    def __init__(self, whole: Callable[[], Any]) -> None:
        self._whole = whole

    def __getattr__(self, name: str) -> Callable[[], Any]:
        return lambda: getattr(self._whole(), name)


def _there(value: Any) -> Any:
    return value() if callable(value) else value


class _LateArrival:
    """Tensors that come down when their turn has come."""

    def __init__(self, device: LateDevice, tensors) -> None:
        self._device, self._there = device, []
        device.later(lambda: self._there.append(tuple(_there(tensor).clone() for tensor in tensors)))

    def wait(self) -> tuple[torch.Tensor, ...]:
        self._device.run_until(self._there)
        found: tuple[torch.Tensor, ...] = self._there[0]
        return found
