"""Reads drafts for a target that is loaded, in the precision that the kernels at hand draft fastest in."""

from pathlib import Path

import torch

from slipstream.checkpoint.draft_config import is_dflash
from slipstream.checkpoint.gguf_file import GgufReader
from slipstream.checkpoint.reader import open_checkpoint
from slipstream.checkpoint.source import TensorSource
from slipstream.kernels import Ops
from slipstream.models.block_draft import BlockDraft
from slipstream.models.eagle3 import Eagle3Draft
from slipstream.models.load import load_block_draft, load_draft
from slipstream.models.packing import quantize_linears
from slipstream.models.target import Target


def read_any_draft(
    path: str | Path, target: Target, dtype: torch.dtype | None, ops: Ops, split: bool = False
) -> Eagle3Draft | BlockDraft:
    """Read a draft of either kind, as `read_draft` does."""
    source = open_checkpoint(path)
    if is_dflash(source.config):
        return _read_block_draft(source, target, dtype, ops)
    return _read_eagle(source, target, dtype, ops, split)


def read_draft(
    path: str | Path, target: Target, dtype: torch.dtype | None, ops: Ops, split: bool = False
) -> Eagle3Draft:
    """Read an EAGLE-3 draft; without a dtype, dense weights become INT8 where the CPU kernels run (exact all the same).

    A draft only guesses, so its precision costs acceptance at most, and INT8 costs next to none.
    """
    return _read_eagle(open_checkpoint(path), target, dtype, ops, split)


def _read_eagle(source: TensorSource, target: Target, dtype: torch.dtype | None, ops: Ops, split: bool) -> Eagle3Draft:
    kept_for = None if isinstance(source, GgufReader) and ops.name != "cpu" else ops  # as a target's blocks
    dense = dtype or target.embed_tokens.dtype
    draft = load_draft(source, target, dense, target.rotary.cos_Pr.shape[0], kept_for, split)
    if dtype is None and ops.name == "cpu":
        quantize_linears(draft, ops, but=target.lm_head)
    return draft


def _read_block_draft(source: TensorSource, target: Target, dtype: torch.dtype | None, ops: Ops) -> BlockDraft:
    dense = dtype or target.embed_tokens.dtype
    draft = load_block_draft(source, target, dense, target.rotary.cos_Pr.shape[0], ops)
    if dtype is None and ops.name == "cpu":
        quantize_linears(draft, ops, but=target.lm_head)
    return draft
