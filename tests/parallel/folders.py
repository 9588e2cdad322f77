"""Tiny checkpoints on disk whose sizes four ranks can split."""

import json
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models

from slipstream.checkpoint.config import model_config
from slipstream.checkpoint.draft_export import draft_config
from slipstream.checkpoint.names import draft_name
from slipstream.models.accounting import places
from slipstream.models.target import Target
from tiny import follower_draft, tiny_target

VOCAB = 64


class Pair(NamedTuple):
    target: Path
    draft: Path


def write_pair(folder: Path) -> Pair:
    """Write a random target and a draft that follows it, with a head of its own."""
    target = tiny_target(vocab_size=VOCAB)
    write_target(folder / "target", target)
    draft = follower_draft(target)
    own = {name: place for name, place in places(draft).items() if name != "embed_tokens.weight"}
    tensors = {draft_name(name, "sglang"): values(place) for name, place in own.items()}
    write(folder / "draft", tensors, draft_config(draft.spec, "sglang"))
    return Pair(folder / "target", folder / "draft")


def write_target(folder: Path, target: Target) -> Path:
    """Write a target's checkpoint."""
    found = places(target).items()
    tensors = {name if name.startswith("lm_head") else f"model.{name}": values(place) for name, place in found}
    write(folder, tensors, model_config(target.spec))
    return folder


def values(place) -> torch.Tensor:
    rows = getattr(place.module, place.parameter)
    return rows[place.start : place.start + place.shape[0]].detach().clone()


def write(folder: Path, tensors: dict[str, torch.Tensor], config: dict) -> None:
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
    tokenizer.decoder = decoders.Fuse()
    (folder / "tokenizer.json").write_text(tokenizer.to_str())
    (folder / "tokenizer_config.json").write_text("{}")
