"""What the CPU kernels do must not end the process or hold it up: each case runs in a process of its own."""

import os
import resource
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from cpu_samples import causal
from layer_samples import make_target

from slipstream.errors import KernelError
from slipstream.kernels.attention_batch import KvLayer
from slipstream.kernels.cpu.library import NativeEngine
from slipstream.kernels.cpu.ops import CpuOps
from slipstream.models.context import KvCache, PagedContext

pytestmark = pytest.mark.usefixtures("fast_ops")  # which skips where the kernels are not built
AT_EXIT = """
import threading, torch
from slipstream.kernels.cpu.library import NativeEngine

started = threading.Event()

def norm():  # without torch, whose own calls may end a process when a thread is stopped within them
    engine, x, weight = NativeEngine(2), torch.ones(4000, 2048), torch.ones(2048)
    arguments = engine.handle, x.data_ptr(), 2048, weight.data_ptr(), x.data_ptr(), 4000, 2048, 1e-5
    while True:
        engine.library.slip_rms_norm(*arguments)
        started.set()

threading.Thread(target=norm, daemon=True).start()
started.wait()
"""
OUT_OF_MEMORY = """
import resource, torch
from slipstream.errors import KernelError
from slipstream.kernels import RowSampling
from slipstream.kernels.cpu.ops import CpuOps

ops, vocab = CpuOps(2), 8_000_000
logits, ids = torch.zeros(1, vocab), torch.arange(vocab)
logits[0, 7] = 1.0
rows = RowSampling(torch.zeros(1), torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64))
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (8 << 20), used + (8 << 20)))
try:
    ops.top_k(logits, ids, rows, 1)
except KernelError as error:
    assert "ran out of memory" in str(error), error
else:
    raise SystemExit("there was memory")
assert ops.top_k(logits[:, :100], ids[:100], rows, 1)[1].tolist() == [[7]]
"""
"""A process of its own from the start: one that has computed before may hold enough free memory."""


def in_a_process(body: Callable[[], object]) -> None:
    """Run `body` in a fork of this process, and expect it to return within half a minute."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            signal.alarm(30)
            body()
            status = 0
        except BaseException:  # noqa: BLE001  # nothing of pytest may run in the fork
            traceback.print_exc()
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def leave_memory(num_bytes: int) -> None:
    """Let this process have so much more address space than it has now."""
    limit = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + num_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def test_many_layers_whose_width_is_no_multiple_of_16_stay_within_their_phases(generator):
    target = make_target(generator, num_layers=40, intermediate_size=100)
    batch = causal([3, 3], [17, 20], 16, generator)
    ids = torch.randint(0, 90, (6,), generator=generator)

    def states(ops: CpuOps) -> torch.Tensor:
        num_pages = int(batch.page_table_RP.max()) + 1
        kv = KvCache.allocate(target.kv_shape, num_pages, 16, torch.float32, torch.device("cpu"))
        index = batch.kv_index_T
        request = torch.tensor([0, 0, 0, 1, 1, 1])
        slots = batch.page_table_RP[request, index // 16].long() * 16 + index % 16
        return target(ids, PagedContext(ops, index, slots, batch, kv), ()).last_TD

    def compare() -> None:
        assert torch.equal(states(CpuOps(1)), states(CpuOps(2)))

    in_a_process(compare)


@pytest.mark.skipif(sys.platform != "linux", reason="limits its address space")
def test_a_call_works_after_one_that_ran_out_of_memory():
    subprocess.run([sys.executable, "-c", OUT_OF_MEMORY], check=True, timeout=600)


@pytest.mark.skipif(sys.platform != "linux", reason="limits its address space")
def test_more_threads_than_can_be_had_are_refused():
    def ask() -> None:
        leave_memory(100 << 20)
        with pytest.raises(KernelError, match="could not start 2000 threads"):
            NativeEngine(2000)

    in_a_process(ask)


def test_a_fork_computes_alone_and_lets_go_of_an_engine(generator):
    ops, x, weight = CpuOps(2), torch.randn(4, 64, generator=generator), torch.randn(32, 64, generator=generator)
    expected = ops.linear(x, weight)
    owned = [ops]
    del ops

    def let_go() -> None:
        assert torch.equal(owned[0].linear(x, weight), expected)
        owned.clear()

    in_a_process(let_go)
    assert torch.equal(owned[0].linear(x, weight), expected)


def test_two_threads_share_an_engine(generator):
    long, short = causal([40], [2000], 16, generator), causal([3, 3], [200, 20], 16, generator)
    num_slots = (int(long.page_table_RP.max()) + 1) * 16
    layer = KvLayer(*(torch.randn(num_slots, 2, 64, generator=generator) for _ in "kv"))
    asked = [(batch, torch.randn(rows, 4, 64, generator=generator)) for batch, rows in ((long, 40), (short, 6))]

    def compete() -> None:
        ops = CpuOps(2)
        expected = [ops.attention(query, layer, batch, 0.1, None) for batch, query in asked]
        wrong: list[int] = []

        def repeat(index: int) -> None:
            batch, query = asked[index]
            for _ in range(100):
                if not torch.equal(ops.attention(query, layer, batch, 0.1, None), expected[index]):
                    wrong.append(index)

        threads = [threading.Thread(target=repeat, args=(index,)) for index in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong

    in_a_process(compete)


def test_a_process_ends_while_a_thread_is_within_a_call():
    subprocess.run([sys.executable, "-c", AT_EXIT], check=True, timeout=600)
