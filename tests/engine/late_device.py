"""A device that runs late: what an engine hands to it waits, in order, until somebody waits for it, as on a GPU."""

from collections import deque
from collections.abc import Callable

import torch

from slipstream.engine.graphs import CycleLauncher, Upload
from slipstream.engine.pages import PageAllocator
from slipstream.engine.rows import Rows
from slipstream.engine.runner import Runner


class LateDevice:
    """Puts off cycles and uploads until a cycle's output is read, or until other work is given to the device.

    A page that is freed is filled with NaN as late as the device can see to it, behind everything launched before: a
    key that somebody still reads there, or that nobody wrote again before it counted, cannot go unnoticed.
    """

    def __init__(self, monkeypatch) -> None:
        self._waiting: deque[Callable[[], object]] = deque()
        self._patch = monkeypatch
        self._put_off_cycles()
        self._put_off_uploads()
        for owner, name in ((Rows, "load"), (Rows, "hand_back"), (CycleLauncher, "prepare"), (Runner, "forward")):
            self._run_first(owner, name)

    def spoil_freed_pages(self, engine) -> None:
        """Fill pages of this engine with NaN when their last holder lets go of them and nobody could take them up."""
        allocator: PageAllocator = engine._pages
        kv, release = engine._runner.kv, allocator.release

        def spoil(pages: list[int]) -> None:
            for page in pages:
                for layer in kv.layers:
                    for part in (layer.keys_SGd, layer.values_SGd):
                        part[page * kv.page_size : (page + 1) * kv.page_size] = torch.nan

        def released(pages) -> None:
            release(pages)
            freed = [page for page in pages if not allocator._holders[page] and page not in allocator._key_of]
            self._waiting.append(lambda: spoil(freed))

        allocator.release = released

    def _put_off_cycles(self) -> None:
        start = CycleLauncher.launch

        def launch(launcher, kind):
            output = []
            self._waiting.append(lambda: output.append(start(launcher, kind)))
            return _LateOutput(self, output)

        self._patch.setattr(CycleLauncher, "launch", launch)

    def _put_off_uploads(self) -> None:
        def send(upload, values) -> None:
            upload._turn = (upload._turn + 1) % len(upload._staged)
            staged = upload._staged[upload._turn]
            staged.copy_(values)
            self._waiting.append(lambda: upload._destination.copy_(staged))

        self._patch.setattr(Upload, "send", send)

    def _run_first(self, owner: type, name: str) -> None:
        work = getattr(owner, name)

        def after_the_rest(*args):
            while self._waiting:
                self._waiting.popleft()()
            return work(*args)

        self._patch.setattr(owner, name, after_the_rest)

    def run_until(self, output: list) -> None:
        """Run what waits, up to the cycle that fills `output` and no further."""
        while not output:
            self._waiting.popleft()()


class _LateOutput:
    def __init__(self, device: LateDevice, output: list) -> None:
        self._device = device
        self._output = output

    def read(self) -> list[list[int]]:
        self._device.run_until(self._output)
        rows: list[list[int]] = self._output[0].read()
        return rows
