"""A step asks the host for nothing: every operation of its parts could be captured in a CUDA graph."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from slipstream.executors.cuda_graph.state import Loaded, StepModels
from slipstream.executors.cuda_graph.step import StepKind
from slipstream.executors.cuda_graph.tree_step import make_step
from slipstream.kernels.reference.ops import ReferenceOps
from slipstream.models.context import KvCache
from slipstream.speculation.sampling import SamplingParams
from slipstream.speculation.tree import TreeShape
from step_parts import buffers_of, run_step
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

    def sample(self, *args):
        with _disable_current_modes():
            return super().sample(*args)

    def top_k(self, *args):
        with _disable_current_modes():
            return super().top_k(*args)


WARM = SamplingParams(temperature=0.8, top_p=0.9, presence_penalty=0.5, logprobs=3)


DYNAMIC = TreeShape(depth=3, width=2, budget=6)
STATIC = TreeShape(paths=((0,), (1,), (0, 0), (0, 1), (0, 0, 0)))


@pytest.mark.parametrize(
    ("num_drafted", "simulated", "tree"),
    [
        (0, (), None),
        (3, (), None),
        (3, (0.8, 0.5, 0.2), None),
        (1, (), None),
        (6, (), DYNAMIC),
        (6, (0.8, 0.5, 0.2, 0.0, 0.0, 0.0), DYNAMIC),
        (5, (), STATIC),
    ],
)
def test_a_step_asks_the_host_for_nothing(num_drafted, simulated, tree):
    kv, draft_kv = (KvCache.allocate(model.kv_shape, 25, 4, torch.float32, DEVICE) for model in (TARGET, DRAFT))
    models = StepModels(KernelsThatMayAsk(DEVICE), TARGET, kv, (1, 2, 4), DRAFT, draft_kv)
    buffers = buffers_of(models, 4, 6, num_drafted + 1, simulated)
    for place, committed in enumerate((2, 5, 9)):
        buffers.state.load(place, Loaded(committed, 7, 3, 100, place, 0.8), range(6 * place, 6 * place + 6))
        buffers.sampling.load(place, WARM, 3, (1, 2), (), ())
    step = make_step(models, buffers, StepKind(4, num_drafted, 24, tree=tree))
    with torch.inference_mode(), Captured():
        run_step(step)
        run_step(step)
    assert (step.out_RE[:3, 0] >= 1).all()
    assert step.out_RE[3, 0] == 0, "a place not in use emits nothing"
    assert buffers.state.rows.committed_R[3] == 0


def test_the_check_itself_catches_a_value_read_by_the_host():
    with pytest.raises(AssertionError, match="asks the host"), Captured():
        bool(torch.ones(1).any())
    with pytest.raises(AssertionError, match="size is a value"), Captured():
        torch.ones(3)[torch.ones(3) > 0]
