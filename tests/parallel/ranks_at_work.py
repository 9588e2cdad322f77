"""Four gloo processes that stay up for a session of tests, and run what they are handed on groups of themselves."""

import multiprocessing
import traceback
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist

from slipstream.models.parallel import Ranks

SIZE = 4


class RanksAtWork:
    """Runs functions `f(ranks, *args)` on the first `size` of the processes; they must be importable by name."""

    def __init__(self, folder: Path) -> None:
        server = multiprocessing.get_context("forkserver")
        server.set_forkserver_preload(["parallel.programs"])  # torch is loaded once, not by every process
        self._ends: list[Connection] = []
        self._processes = []
        for rank in range(SIZE):
            mine, theirs = server.Pipe()
            process = server.Process(target=_work, args=(rank, theirs, folder / "store"), daemon=True)
            process.start()
            theirs.close()
            self._ends.append(mine)
            self._processes.append(process)

    def run(self, size: int, function, *args, experts: int = 1) -> list:
        """Return what the function gave on each rank."""
        for end in self._ends[:size]:
            end.send((size, experts, function, args))
        answers = [end.recv() for end in self._ends[:size]]
        failed = [text for ok, text in answers if not ok]
        assert not failed, failed[0]
        return [value for _, value in answers]

    def close(self) -> None:
        for end in self._ends:
            end.send(None)
        for process in self._processes:
            process.join()


def _work(rank: int, end: Connection, store: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=SIZE)
    groups = {size: dist.new_group(list(range(size))) for size in (2, SIZE)}
    while (job := end.recv()) is not None:
        size, experts, function, args = job
        try:
            end.send((True, function(Ranks(rank, size, experts, groups[size]), *args)))
        except Exception:  # noqa: BLE001 (whatever it is, the test is told)
            end.send((False, traceback.format_exc()))
    dist.destroy_process_group()
