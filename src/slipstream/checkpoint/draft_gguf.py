"""Write an EAGLE-3 draft as llama.cpp reads one: a GGUF file of architecture eagle3."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter, RopeScalingType
from gguf.quants import quantize
from torch import Tensor

from slipstream.checkpoint.config import draft_spec, model_spec
from slipstream.checkpoint.gguf_config import ROPE_FREQS, llama3_divisors
from slipstream.checkpoint.gguf_families import DRAFT, gguf_draft_name
from slipstream.checkpoint.gguf_file import GgufReader
from slipstream.checkpoint.names import canonical_draft_name, canonical_names
from slipstream.checkpoint.reader import open_checkpoint
from slipstream.checkpoint.source import TensorSource
from slipstream.checkpoint.spec import DraftSpec, ModelSpec, RopeSpec
from slipstream.checkpoint.writer import FolderExistsError
from slipstream.errors import CheckpointError

_NUM_FEATURES = 3  # llama.cpp refuses any other number of captured layers
_STORED = {torch.bfloat16: GGMLQuantizationType.BF16, torch.float16: GGMLQuantizationType.F16}


def write_gguf_draft(source: TensorSource, target: str | Path, path: Path) -> None:
    """Write a draft for llama.cpp; matrices keep their type, norms become float32.

    Args:
        source: a draft, in any dialect.
        target: what the draft was trained for, whose layers and words llama.cpp takes from the draft's file; the words
            of a folder's tokenizer are left to the target's own GGUF.
        path: the file to write, which must not exist.
    """
    opened = open_checkpoint(target)
    target_spec = model_spec(opened.config, opened.folder)
    spec = draft_spec(source.config, source.folder, target_spec.num_layers)
    _refuse(spec, source)
    if path.exists():
        raise FolderExistsError(f"{path}: is already there. Name another file, or move it away first.")
    partial = path.with_name(f".{path.name}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        writer = GGUFWriter(partial, DRAFT)
        _add_shape(writer, spec, target_spec)
        _add_words(writer, spec, opened)
        for name, values in _tensors(source, spec):
            writer.add_tensor(name, values[0], raw_dtype=values[1])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        partial.replace(path)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be written ({error}). Free space or choose another place.") from error
    finally:
        partial.unlink(missing_ok=True)


def _refuse(spec: DraftSpec, source: TensorSource) -> None:
    """Raise CheckpointError for what llama.cpp's EAGLE-3 does not compute."""
    problems = {
        "a norm for each captured layer (EAGLE-3.1's fc_norm)": spec.feature_norm == "per_layer",
        "a feedback after the final norm (norm_output)": spec.feedback == "post_norm",
        f"{spec.num_layers} blocks": spec.num_layers != 1,
        f"{spec.num_features} captured layers": spec.num_features != _NUM_FEATURES,
        "latent attention": spec.mla is not None,
        "masks for tokens not drafted yet (P-EAGLE)": spec.mask_token_id is not None,
        "query and key norms": spec.qk_norm,
        "biases": spec.qkv_bias or spec.mlp_bias,
        "a sliding window": spec.sliding_window is not None,
        f"rope scaling {spec.rope.scaling!r}": spec.rope.scaling == "longrope",
        "packed weights": any(key in source.config for key in ("quantization_config", "compression_config")),
    }
    if found := [what for what, there in problems.items() if there]:
        raise CheckpointError(
            f"{source.folder}: has {' and '.join(found)}, which llama.cpp's EAGLE-3 does not compute. It runs drafts "
            f"of one Llama block over {_NUM_FEATURES} captured layers; train one for it with "
            f"`--set draft.feature_norm=none --set draft.feedback=pre_norm` and without draft.window."
        )


def _add_shape(writer: GGUFWriter, spec: DraftSpec, target: ModelSpec) -> None:
    writer.add_block_count(spec.num_layers)
    writer.add_context_length(spec.max_position)
    writer.add_embedding_length(spec.hidden_size)
    writer.add_feed_forward_length(spec.intermediate_size)
    writer.add_head_count(spec.num_heads)
    writer.add_head_count_kv(spec.num_kv_heads)
    writer.add_key_length(spec.head_dim)
    writer.add_value_length(spec.head_dim)
    writer.add_layer_norm_rms_eps(spec.rms_eps)
    writer.add_rope_dimension_count(spec.rope.rotary_dim)
    writer.add_rope_freq_base(spec.rope.theta)
    if spec.rope.scaling in ("linear", "yarn"):
        writer.add_rope_scaling_type(RopeScalingType(spec.rope.scaling))
        writer.add_rope_scaling_factor(spec.rope.factor)
    if spec.rope.scaling == "yarn":
        writer.add_rope_scaling_orig_ctx_len(spec.rope.original_max_position)
        writer.add_rope_scaling_yarn_beta_fast(spec.rope.beta_fast)
        writer.add_rope_scaling_yarn_beta_slow(spec.rope.beta_slow)
    captured = spec.captured_layers or target.default_captured_layers()
    writer.add_array(f"{DRAFT}.target_layers", list(captured))  # llama.cpp counts the blocks applied, as we do
    writer.add_uint32(f"{DRAFT}.target_hidden_size", spec.target_hidden_size)
    writer.add_bool(f"{DRAFT}.norm_before_residual", spec.residual == "normed")
    writer.add_bool(f"{DRAFT}.norm_before_fc", spec.feature_norm == "concat")


def _add_words(writer: GGUFWriter, spec: DraftSpec, target: TensorSource) -> None:
    """Give the draft the target's tokenizer where it has llama.cpp's form, otherwise the number of its tokens."""
    writer.add_vocab_size(spec.vocab_size)
    if not isinstance(target, GgufReader):
        writer.add_tokenizer_model("none")
        return
    for key, value in target.metadata.items():
        if key.startswith("tokenizer."):
            _add_value(writer, key, value)


def _add_value(writer: GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, list):
        writer.add_array(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    else:
        writer.add_float32(key, value)


def _tensors(source: TensorSource, spec: DraftSpec) -> list[tuple[str, tuple[np.ndarray[Any, Any], Any]]]:
    """Return what llama.cpp reads of a draft, by its names: arrays, and the type they are stored as."""
    found: list[tuple[str, tuple[np.ndarray[Any, Any], Any]]] = []
    for ours, theirs in canonical_names(source.names(), canonical_draft_name).items():
        if ours == "t2d":  # what d2t says, once more
            continue
        tensor = source.tensor(theirs)
        if ours == "d2t":
            tokens = tensor.long() + torch.arange(len(tensor))
            found.append(("d2t", (tokens.numpy(), GGMLQuantizationType.I64)))
            continue
        name = gguf_draft_name(ours)
        if name is None:
            raise CheckpointError(f"{source.folder}: tensor {theirs!r} has no place in llama.cpp's EAGLE-3.")
        if heads := {"attn_q": spec.num_heads, "attn_k": spec.num_kv_heads}.get(name.split(".")[-2]):
            tensor = _permuted(tensor, heads)
        stored = _STORED.get(tensor.dtype) if tensor.dim() > 1 else None
        values = tensor.float().contiguous().numpy()
        found.append((name, (values, None) if stored is None else (quantize(values, stored), stored)))
    if spec.rope.scaling == "llama3":
        found.append((ROPE_FREQS, (_divisors(spec.rope), None)))
    return found


def _permuted(tensor: Tensor, heads: int) -> Tensor:
    """Reorder q or k rows from rotary halves to the neighbouring pairs that llama.cpp rotates."""
    return tensor.reshape(heads, 2, len(tensor) // heads // 2, -1).transpose(1, 2).reshape(tensor.shape)


def _divisors(rope: RopeSpec) -> np.ndarray[Any, Any]:
    divisors = llama3_divisors(
        rope.theta, rope.rotary_dim, rope.factor, rope.low_freq_factor, rope.high_freq_factor,
        rope.original_max_position,
    )  # fmt: skip
    return divisors.astype(np.float32)
