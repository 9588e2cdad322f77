"""What a captured step reads and writes, made by hand: for tests of steps without an engine."""

import torch

from slipstream.executors.cuda_graph.state import BatchState, StepModels
from slipstream.executors.cuda_graph.step import Step, StepBuffers
from slipstream.executors.cuda_graph.tree_step import TreeStep
from slipstream.kernels import SamplingState, TokenMasks
from slipstream.kernels.sampling import num_words
from slipstream.speculation.simulate import thresholds


def buffers_of(
    models: StepModels, num_rows: int, num_columns: int, num_nodes: int, simulated: tuple[float, ...] = ()
) -> StepBuffers:
    """Return buffers for so many places of so many pages; no node has a mask."""
    vocab, device = models.target.spec.vocab_size, models.device
    words_MW = torch.zeros(num_rows * num_nodes + 1, num_words(vocab), dtype=torch.int32, device=device)
    row_L = torch.full((num_rows * num_nodes,), -1, dtype=torch.int64, device=device)
    rates = thresholds(simulated) if simulated else [-1] * (num_nodes - 1)
    thresholds_K = torch.tensor(rates, dtype=torch.int64, device=device)
    state = BatchState(models, num_rows, num_columns)
    return StepBuffers(state, SamplingState(num_rows, vocab, device), TokenMasks(words_MW, row_L), thresholds_K)


def run_step(step: Step | TreeStep) -> None:
    """Run all parts of a step."""
    step.draft()
    step.verify()
    step.choose()
    if step.kind.num_drafted:
        step.extend()
