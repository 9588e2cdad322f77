"""Tensor names: every dialect's spelling to ours and back, for targets, drafts and GGUF files."""

import re
from collections.abc import Callable, Iterable
from typing import Literal

from slipstream.checkpoint.families import FAMILIES
from slipstream.checkpoint.spec import ModelSpec
from slipstream.errors import CheckpointError

NameDialect = Literal["sglang", "vllm", "speculators"]

# Buffers that old exporters saved and every model recomputes.
_HARMLESS = re.compile(r"(^|\.)(rotary_emb\.inv_freq|rotary_emb\.(cos|sin)_cached|attn\.masked_bias)$")
_LATER_HIDDEN_NORM = re.compile(r"layers\.([1-9]\d*)\.hidden_norm\.")
_LATER_INPUT_NORM = re.compile(r"layers\.([1-9]\d*)\.input_layernorm\.")

_DRAFT_PREFIXES = ("draft_model.", "model.")
# Leading parts of a draft's names: SafeAILab and SpecForge say midlayer; early EAGLE-3.1 files aux_norm_*.
_DRAFT_RENAMES = {
    "midlayer.": "layers.0.",
    "aux_norm_low.": "fc_norm.0.",
    "aux_norm_mid.": "fc_norm.1.",
    "aux_norm_high.": "fc_norm.2.",
    "draft_id_to_target_id": "d2t",
}

# MiniMax-M2 spells its experts as Mixtral does; replaced in this order.
_BLOCK_SPARSE = {
    ".block_sparse_moe.e_score_correction_bias": ".mlp.gate.e_score_correction_bias",
    ".block_sparse_moe.": ".mlp.",
    ".w1.": ".gate_proj.",
    ".w3.": ".up_proj.",
    ".w2.": ".down_proj.",
}
# Gemma norms what goes into attention and the feed-forward part, and what comes out; replaced all at once.
_NORMS_AROUND = {
    "post_attention_layernorm": "attention_out_norm",
    "pre_feedforward_layernorm": "post_attention_layernorm",
    "post_feedforward_layernorm": "feed_forward_out_norm",
}
# Gemma 4's experts stand beside the dense part, with norms of their own.
_BESIDE = {
    ".experts.": ".beside.mixture.experts.",
    ".router.proj.": ".beside.mixture.gate.",
    ".router.per_expert_scale": ".beside.mixture.gate.expert_scale",
    ".router.scale": ".beside.gate_norm.weight",
    ".post_feedforward_layernorm_1.": ".beside.dense_out_norm.",
    ".pre_feedforward_layernorm_2.": ".beside.input_norm.",
    ".post_feedforward_layernorm_2.": ".beside.out_norm.",
}
# Llama 4's and gpt-oss's words, in this order.
_OTHER_WORDS = {".feed_forward.": ".mlp.", ".shared_expert.": ".shared_experts.", ".mlp.router.": ".mlp.gate."}
_OTHER_SENSES = re.compile(
    r"(model\.)?(vision_tower|vision_model|visual|mm_projector|multi_modal_projector|audio_tower|embed_vision|embed_audio"
    r"|vision_embedder)\."
)
_BLOCK_NUMBER = re.compile(r"model\.layers\.(\d+)\.")

_TARGET_PREFIXES = ("model.language_model.", "language_model.model.", "language_model.", "model.")

_GGUF_GLOBAL = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_GGUF_BLOCK = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_HF_GLOBAL = {theirs: ours for ours, theirs in _GGUF_GLOBAL.items()}
_HF_BLOCK = {theirs: ours for ours, theirs in _GGUF_BLOCK.items()}
_GGUF_NAME = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_HF_NAME = re.compile(r"model\.layers\.(\d+)\.([\w.]+)\.(weight|bias)")


def is_harmless(name: str) -> bool:
    """Whether a tensor may be left unread: a buffer that the model computes for itself."""
    return _HARMLESS.search(name) is not None


def canonical_draft_name(name: str) -> str:
    """Return our name for a tensor of a draft checkpoint, whatever tool wrote it."""
    for prefix in _DRAFT_PREFIXES:
        name = name.removeprefix(prefix)
    for theirs, ours in _DRAFT_RENAMES.items():
        if name.startswith(theirs):
            name = ours + name.removeprefix(theirs)
    # Only the first block has two inputs to norm; SGLang calls the later blocks' single norm hidden_norm.
    return _LATER_HIDDEN_NORM.sub(r"layers.\1.input_layernorm.", name)


def draft_name(canonical: str, dialect: NameDialect) -> str:
    """Return the name that a dialect's readers expect for a tensor of a draft."""
    if dialect != "sglang":
        return canonical
    if canonical.startswith("layers.0."):
        return "midlayer." + canonical.removeprefix("layers.0.")
    return _LATER_INPUT_NORM.sub(r"layers.\1.hidden_norm.", canonical)


def canonical_target_name(name: str, norms_around: bool = False) -> str:
    """Return our name for a tensor of a target: `model.layers.N...`, `model.norm.weight`, `lm_head.weight`"""
    if norms_around:
        above, _, last = name.rpartition(".")
        before, _, module = above.rpartition(".")
        name = f"{before}.{_NORMS_AROUND[module]}.{last}" if module in _NORMS_AROUND else name
        name = f"{above}.out_scale.weight" if last == "layer_scalar" else name
        for theirs, ours in _BESIDE.items():
            name = name.replace(theirs, ours)
    for prefix in _TARGET_PREFIXES:
        if name.startswith(prefix):
            name = name.removeprefix(prefix)
            break
    if ".block_sparse_moe." in name:
        for theirs, ours in _BLOCK_SPARSE.items():
            name = name.replace(theirs, ours)
    for theirs, ours in _OTHER_WORDS.items():
        name = name.replace(theirs, ours)
    return name if name.startswith("lm_head.") else f"model.{name}"


def left_out_of_target(name: str, spec: ModelSpec) -> str | None:
    """Return what a tensor belongs to that a target leaves out, in words; None for one that it needs.

    Models that also see come with a vision tower, and mixtures of experts with blocks that predict several tokens,
    numbered after the last block.
    """
    if FAMILIES[spec.architecture].sees and _OTHER_SENSES.match(name):
        return "the vision tower and other parts for pictures and sound, as slipstream runs the text part only, are"
    block = _BLOCK_NUMBER.match(canonical_target_name(name)) if spec.moe is not None else None
    if block is not None and int(block[1]) >= spec.num_layers:
        return "the blocks for multi-token prediction, in whose place a draft goes, are"
    return None


def canonical_names(names: Iterable[str], rename: Callable[[str], str]) -> dict[str, str]:
    """Map our names to a checkpoint's own, without harmless buffers; one tensor spelled twice is an error."""
    result: dict[str, str] = {}
    for name in names:
        if is_harmless(name):
            continue
        ours = rename(name)
        if ours in result:
            raise CheckpointError(
                f"Tensors {result[ours]!r} and {name!r} both stand for {ours!r}; the checkpoint is ambiguous."
            )
        result[ours] = name
    return result


def hf_name(gguf_name: str) -> str | None:
    """Return the Hugging Face name of a llama-family GGUF tensor, or None for a name that is not one."""
    if match := _GGUF_NAME.fullmatch(gguf_name):
        number, part, suffix = match.groups()
        return f"model.layers.{number}.{_GGUF_BLOCK[part]}.{suffix}" if part in _GGUF_BLOCK else None
    part, _, suffix = gguf_name.rpartition(".")
    return f"{_GGUF_GLOBAL[part]}.{suffix}" if part in _GGUF_GLOBAL else None


def gguf_name(hf_name: str) -> str | None:
    """Return the GGUF name of a llama-family tensor, or None for a name that has none."""
    if match := _HF_NAME.fullmatch(hf_name):
        number, part, suffix = match.groups()
        return f"blk.{number}.{_HF_BLOCK[part]}.{suffix}" if part in _HF_BLOCK else None
    part, _, suffix = hf_name.rpartition(".")
    return f"{_HF_GLOBAL[part]}.{suffix}" if part in _HF_GLOBAL else None
