"""Tiny checkpoints under the published names: their architectures, formats and files, in folders named like hub ids."""

import json
import shutil
from pathlib import Path

import torch

from slipstream.quant.scheme import SCHEMES
from tests.tiny_moe import (
    BY_HEAD,
    EXPERTS_ONLY,
    LIGHTSEEK,
    as_kimi,
    blocks,
    deepseek,
    draft_shapes,
    minimax,
    quantized,
    save,
    weights,
    write,
)  # fmt: skip
from tests.tiny_tiktoken import FIRST, write_tokenizer

CONTEXT = 12288  # room for 10240 + 512, and for 8192 + 1024
_VOCAB = FIRST + 256  # the tokenizer reserves as many
_KEPT_BY_MINIMAX = ("gate.weight", "lm_head", "embed_tokens", "norm")


def write_published(folder: Path) -> None:
    """Write every target and BF16 draft that the documents name; two ranks can share each target's blocks."""
    sizes = {"vocab_size": _VOCAB, "max_position_embeddings": CONTEXT}
    plain = save(deepseek(**sizes, moe_intermediate_size=64), folder / "made" / "deepseek")
    kimi = as_kimi(plain, folder / "made" / "kimi")
    for name, scheme in (("amd/Kimi-K2.5-W4A8", "w4a8"), ("amd/Kimi-K2.5-MXFP4", "mxfp4")):
        assert scheme in SCHEMES
        out = folder / name
        out.parent.mkdir(parents=True, exist_ok=True)
        quantized(kimi, out, scheme, None, "quark", (*EXPERTS_ONLY, "vision_tower.*", "mm_projector.*"))
        write_tokenizer(out)
    target = folder / "MiniMaxAI" / "MiniMax-M2.5"
    blocks(save(minimax(**sizes, head_dim=128), folder / "made" / "minimax"), target, _KEPT_BY_MINIMAX)
    write_tokenizer(target)
    for name in ("lightseekorg/kimi-k2.5-eagle3", "thoughtworks/MiniMax-M2.5-Eagle3"):
        write_draft(folder / name)
    shutil.rmtree(folder / "made")


def write_draft(folder: Path) -> Path:
    """Write a draft as lightseekorg/kimi-k2.5-eagle3 is published, in BF16."""
    shapes = {**draft_shapes(BY_HEAD), "lm_head.weight": (_VOCAB, 64), "embed_tokens.weight": (_VOCAB, 64)}
    tensors = {name: value.to(torch.bfloat16) for name, value in weights(shapes).items()}
    sizes = {"vocab_size": _VOCAB, "draft_vocab_size": _VOCAB, "max_position_embeddings": CONTEXT}
    write(folder, {**LIGHTSEEK, **sizes}, tensors)
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    return folder
