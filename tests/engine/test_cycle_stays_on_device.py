"""A cycle asks the host for nothing: every operation of it could be captured in a CUDA graph."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from slipstream.engine.cycle import Cycle, CycleKind, CycleModels, CycleState
from slipstream.kernels.reference.ops import ReferenceOps
from slipstream.models.context import KvCache
from tiny import DEVICE, tiny_draft, tiny_target

TARGET = tiny_target()
DRAFT = tiny_draft(TARGET)
ASKS_THE_HOST = {"_local_scalar_dense", "nonzero", "masked_select", "lift_fresh", "unique", "repeat_interleave.Tensor"}


class Captured(TorchDispatchMode):
    """Refuses what a capture would refuse: values read by the host, shapes that depend on values, host constants."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name().removeprefix("aten::")
        assert name not in ASKS_THE_HOST and name.partition(".")[0] not in ASKS_THE_HOST, f"{name} asks the host"
        if name.startswith(("index.", "index_put")):
            assert all(index is None or index.dtype != torch.bool for index in args[1]), "a mask's size is a value"
        return func(*args, **(kwargs or {}))


class KernelsThatMayAsk(ReferenceOps):
    """The reference, whose attention and rule look at values; kernels for graphs are tested for themselves."""

    def attention(self, *args):
        with _disable_current_modes():
            return super().attention(*args)

    def choose(self, *args):
        with _disable_current_modes():
            return super().choose(*args)

    def top_k(self, *args):
        with _disable_current_modes():
            return super().top_k(*args)


@pytest.mark.parametrize("kind", [CycleKind(4, 0), CycleKind(4, 3), CycleKind(4, 3, (0.8, 0.5, 0.2)), CycleKind(4, 1)])
def test_a_cycle_asks_the_host_for_nothing(kind):
    kv, draft_kv = (KvCache.allocate(model.kv_shape, 12, 4, torch.float32, DEVICE) for model in (TARGET, DRAFT))
    models = CycleModels(KernelsThatMayAsk(DEVICE), TARGET, kv, (1, 2, 4), DRAFT, draft_kv)
    state = CycleState.allocate(models, 4, 6)
    state.pages_RP[:3] = torch.arange(6, dtype=torch.int32)
    state.active_R[:3] = 1
    state.committed_R[:3] = torch.tensor([2, 5, 9])
    state.drafts_until_R[:] = 100
    cycle = Cycle(models, state, kind)
    with torch.inference_mode(), Captured():
        cycle.run()
        cycle.run()
    assert (cycle.out_RE[:3, 0] >= 1).all()
    assert cycle.out_RE[3, 0] == 0, "a row not in use emits nothing"
    assert state.committed_R[3] == 0


def test_the_check_itself_catches_a_value_read_by_the_host():
    with pytest.raises(AssertionError, match="asks the host"), Captured():
        bool(torch.ones(1).any())
    with pytest.raises(AssertionError, match="size is a value"), Captured():
        torch.ones(3)[torch.ones(3) > 0]
