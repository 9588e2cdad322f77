"""Captured steps that sample with the GPU's kernels (interpreted where there is none): each row by its own settings."""

from interpreted import DEVICE
from slipstream.engine.build import build_engine
from slipstream.engine.config import EngineConfig
from slipstream.kernels import select
from slipstream.kernels.reference.ops import ReferenceOps
from slipstream.kernels.triton.ops import TritonOps
from slipstream.speculation.sampling import SamplingParams
from slipstream.speculation.tree import TreeShape
from tiny import follower_draft, run, stammering_target

TARGET = stammering_target(61).to(DEVICE)
PARAMS = [
    SamplingParams(max_tokens=9, temperature=0.8, frequency_penalty=0.6, presence_penalty=0.4),
    SamplingParams(max_tokens=5, temperature=0.8),
    SamplingParams(max_tokens=7, temperature=0.9, top_p=0.8, repetition_penalty=1.3),
]
PROMPTS = [[1, 2, 3], [4, 5], [6, 7, 8, 9]]


class SamplingOnKernels(ReferenceOps):
    """Torch's operations, but for the choice of tokens."""

    sample, count = TritonOps.sample, TritonOps.count
    _dependent = _compiling = False


def answers(ops, draft, captured, numbers):
    """Return what requests get together."""
    mode = "on" if captured else "off"
    config = EngineConfig(max_context=40, page_size=4, max_requests=4, num_pages=40, cuda_graphs=mode)
    engine = build_engine(TARGET, draft, TreeShape.chain(2), config, ops)
    return run(engine, [PROMPTS[n] for n in numbers], [PARAMS[n] for n in numbers], list(numbers))


def test_batches_of_one_and_of_several_sample_each_row_by_its_own_settings():
    alone = [answers(select(DEVICE, "reference"), None, False, [number])[0] for number in range(len(PROMPTS))]
    ops = SamplingOnKernels(DEVICE)
    assert answers(ops, follower_draft(TARGET), True, range(len(PROMPTS))) == alone
