"""A tiny target and draft that vLLM's kernels for CPUs can run: wide heads, and three captured layers that differ."""

from pathlib import Path

import torch

from slipstream.checkpoint.draft_export import draft_config
from slipstream.checkpoint.names import draft_name
from slipstream.checkpoint.spec import RopeSpec
from slipstream.models.accounting import places
from tests.parallel.folders import VOCAB, Pair, values, write, write_target
from tests.tiny import tiny_draft, tiny_target

WIDE = {"head_dim": 32, "rope": RopeSpec(theta=10000.0, rotary_dim=32)}


def write_wide_pair(folder: Path) -> Pair:
    """Write a target whose blocks change little, and a draft that takes the third block's output for the last one's."""
    target = tiny_target(vocab_size=VOCAB, **WIDE)
    draft = tiny_draft(target, captured_layers=(1, 2, 3), vocab_size=VOCAB, draft_vocab_size=VOCAB, **WIDE)
    for layer in (*target.layers, *draft.layers):
        layer.self_attn.o_proj.weight.mul_(0.1)
        layer.mlp.down_proj.weight.mul_(0.1)
    width = target.spec.hidden_size
    draft.fc.weight.zero_()
    draft.fc.weight[:, -width:].copy_(torch.eye(width))
    draft.norm.weight.copy_(target.norm.weight)
    draft.lm_head.weight.copy_(target.lm_head.weight)
    write_target(folder / "target", target)
    own = {name: place for name, place in places(draft).items() if name != "embed_tokens.weight"}
    tensors = {draft_name(name, "sglang"): values(place) for name, place in own.items()}
    write(folder / "draft", tensors, draft_config(draft.spec, "sglang"))
    return Pair(folder / "target", folder / "draft")
