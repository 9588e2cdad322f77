import pytest
import torch

from slipstream.errors import KernelError
from slipstream.kernels.cpu.library import ISAS, load_library
from slipstream.kernels.cpu.ops import CpuOps


def _available() -> list[str]:
    try:
        return list(ISAS[: load_library().slip_best_isa() + 1])
    except KernelError:
        return []


@pytest.fixture(params=_available() or [pytest.param("none", marks=pytest.mark.skip(reason="CPU kernels not built"))])
def cpu_ops(request) -> CpuOps:
    """The CPU kernels, once for each instruction set this machine runs."""
    return CpuOps(2, request.param)


@pytest.fixture
def fast_ops() -> CpuOps:
    """The CPU kernels as this machine would choose them."""
    if not _available():
        pytest.skip("CPU kernels not built")
    return CpuOps(2)


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(7)


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield
