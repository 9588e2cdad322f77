"""The sampler on the device: four kernels, whatever the rows use, without a wait for the host.

A row that uses nothing but temperature costs one pass over its logits, and early exits in two kernels.
"""

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from slipstream.kernels.sampling import MAX_TOP, Sampled, SampleRows, SamplingState, TokenMasks
from slipstream.kernels.triton.launch import launch_options
from slipstream.kernels.triton.sampling_rows import finish_kernel
from slipstream.kernels.triton.sampling_vocabulary import count_kernel, nucleus_kernel, process_kernel, weigh_kernel


@dataclass(frozen=True)
class Tiles:
    """How the kernels cut a row; no token depends on it.

    Args:
        block: tokens a program of the passes in parallel looks at together.
        taken: blocks such a program takes where there are `many` blocks in all, and programs enough without.
        cells: the most cells a row is cut into.
        row_block: tokens the last kernel looks at together, in its passes over a row.
        together: cells it looks at together.
        kept: so many tokens it can hold.
    """

    block: int = 2048
    taken: int = 4
    many: int = 2048
    cells: int = 4096
    row_block: int = 4096
    together: int = 64
    kept: int = 2048


TILES = Tiles()


def sample(
    logits_LV: Tensor,
    rows: SampleRows,
    state: SamplingState,
    masks: TokenMasks | None,
    dependent: bool,
    tiles: Tiles = TILES,
) -> Sampled:
    """Return each row's token, and log probabilities where its slot wants them."""
    assert all(each.is_contiguous() for each in (rows.slot_L, rows.position_L, rows.path_LD)), "rows lie side by side"
    (num_rows, vocab), device, stride = logits_LV.shape, logits_LV.device, logits_LV.stride(0)
    num_blocks = triton.cdiv(vocab, tiles.block)
    taken = tiles.taken if num_rows * num_blocks >= tiles.many else 1
    num_groups = triton.cdiv(num_blocks, taken)
    cell = max(2, triton.next_power_of_2(triton.cdiv(vocab, tiles.cells)))
    num_cells = triton.cdiv(vocab, cell)

    def workspace(dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.empty(num_rows, *shape, dtype=dtype, device=device)

    value, raw_value, drawn = (workspace(torch.float32, num_groups) for _ in range(3))
    entry, drawn_entry = (workspace(torch.int32, num_groups) for _ in range(2))
    sums, before, raw_sums = (workspace(torch.int64, num_groups) for _ in range(3))
    cells, raw_cells = (workspace(torch.float32, num_cells) for _ in range(2))
    processed = workspace(torch.float32, vocab)
    all_cells = triton.next_power_of_2(num_cells)
    listed, kept = workspace(torch.int32, all_cells), workspace(torch.int64, tiles.kept)
    out = Sampled(
        workspace(torch.int64),
        workspace(torch.float32),
        workspace(torch.int64, MAX_TOP),
        workspace(torch.float32, MAX_TOP),
    )
    masked = masks is not None and len(masks.words_MW) > 0
    words, mask_row = (masks.words_MW, masks.row_L) if masks is not None and masked else (state.ends_SW, rows.slot_L)
    options = launch_options(dependent)
    fixed = {"MASKED": masked, "PDL": dependent}
    process_kernel[(num_rows, num_groups)](
        logits_LV, state.records_SC, state.said_SV, state.bias_SV, state.ends_SW, words, mask_row, rows.slot_L,
        rows.position_L, rows.path_LD, processed, value, entry, raw_value, cells, raw_cells,
        vocab, stride, rows.path_LD.shape[1], words.shape[1], state.ends_SW.shape[1], num_cells,
        BLOCK=tiles.block, TAKEN=taken, CELL=cell, **fixed, num_warps=8, **options,
    )  # fmt: skip
    groups = triton.next_power_of_2(num_groups)
    weigh_kernel[(num_rows, num_groups)](
        logits_LV, state.records_SC, mask_row, rows.slot_L, rows.position_L, processed, value, raw_value, sums,
        raw_sums, drawn, drawn_entry, vocab, stride,
        BLOCK=tiles.block, TAKEN=taken, GROUPS=groups, **fixed, num_warps=8, **options,
    )  # fmt: skip
    nucleus_kernel[(num_rows, num_groups)](
        logits_LV, state.records_SC, mask_row, rows.slot_L, rows.position_L, processed, value, drawn, drawn_entry,
        before, vocab, stride,
        BLOCK=tiles.block, TAKEN=taken, GROUPS=groups, **fixed, num_warps=8, **options,
    )  # fmt: skip
    finish_kernel[(num_rows,)](
        logits_LV, state.records_SC, mask_row, rows.slot_L, rows.position_L, processed, value, entry, raw_value, cells,
        raw_cells, sums, before, raw_sums, drawn, drawn_entry, listed, kept, out.tokens_L, out.logprob_L,
        out.top_ids_LK, out.top_logprobs_LK, vocab, stride, num_groups, num_cells,
        BLOCK=tiles.row_block, GROUPS=groups, CELLS=all_cells, CELL=cell, TOGETHER=tiles.together,
        KEPT=tiles.kept, MAX_TOP=MAX_TOP, TOPS=triton.next_power_of_2(MAX_TOP), **fixed, num_warps=16, **options,
    )  # fmt: skip
    return out


def count(state: SamplingState, slot_R: Tensor, tokens_RN: Tensor, counts_R: Tensor, dependent: bool) -> None:
    """Add the first `counts` tokens of each row to what its slot has said."""
    num_rows, num_tokens = tokens_RN.shape
    count_kernel[(num_rows,)](
        state.records_SC, state.said_SV, slot_R, tokens_RN, counts_R, state.vocab_size, num_tokens,
        tokens_RN.stride(0), counts_R.stride(0), TOKENS=triton.next_power_of_2(num_tokens), PDL=dependent, num_warps=1,
        **launch_options(dependent),
    )  # fmt: skip
