"""Read a llama-family GGUF file as if it were a Hugging Face folder: same names, same layout, float32."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from gguf.quants import dequantize
from torch import Tensor

from slipstream.checkpoint.fields import LARGEST, WIDEST_HEAD
from slipstream.checkpoint.files import listed, shown
from slipstream.checkpoint.gguf_families import ARCHITECTURES, family_config, hf_tensors
from slipstream.checkpoint.gguf_header import GgufTensor, read_gguf_header
from slipstream.checkpoint.source import TensorInfo, check_rows, check_window
from slipstream.checkpoint.span import Window
from slipstream.errors import CheckpointError

# llama.cpp rotates neighbouring pairs for these and stores q and k rows in that order; the others rotate halves.
_PERMUTED = ("llama", "mistral")
_ROPE_FREQS = "rope_freqs.weight"


class RawTensor(NamedTuple):
    """A tensor as stored: packed rows, the ggml type's name, and the logical shape (rows first)."""

    data: np.ndarray[Any, np.dtype[Any]]
    quant_type: str
    shape: tuple[int, ...]


class GgufReader:
    """A GGUF file opened for reading (memory-mapped).

    `tensor` and `rows` give float32 in the layout transformers expects: names translated, and the query and key rows
    of llama-family files put back in half-rotation order. `raw` gives the stored blocks under the same names.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        header = read_gguf_header(path)
        self._fields = header.metadata
        self._stored = header.tensors
        self._kind = self.text("general.architecture")
        if self._kind not in ARCHITECTURES:
            raise CheckpointError(
                f"{path}: general.architecture is {shown(self._kind)}, which slipstream cannot read from GGUF. "
                f"It reads {', '.join(ARCHITECTURES)}."
            )
        self._tensors = self._translate()
        self._config = self._read_config()

    @property
    def folder(self) -> Path:
        """The folder the file lies in."""
        return self._path.parent

    @property
    def path(self) -> Path:
        """The file itself."""
        return self._path

    @property
    def config(self) -> Mapping[str, Any]:
        """A config.json made from the metadata: foreign JSON, hence Any."""
        return self._config

    @property
    def metadata(self) -> Mapping[str, Any]:
        """The GGUF key-value pairs as Python values, foreign data, hence Any."""
        return self._fields

    def text(self, key: str) -> str:
        """Return a metadata string."""
        value = self._fields.get(key)
        if not isinstance(value, str):
            raise CheckpointError(f"{self._path}: metadata key {key!r} is missing or not a string.")
        return value

    def names(self) -> list[str]:
        """Return the Hugging Face names of all tensors, sorted."""
        return sorted(self._tensors)

    def info(self, name: str) -> TensorInfo:
        """Describe one tensor as stored."""
        tensor = self._tensor(name)
        return TensorInfo(name, tensor.shape, tensor.quant_type.name, self._path, tensor.data.nbytes)

    def tensor(self, name: str, device: str = "cpu") -> Tensor:
        """Read one tensor whole, dequantised to float32."""
        values = torch.from_numpy(self._dequantize(name, self._tensor(name).data))
        heads = self._permuted_heads(name)
        return (values if heads is None else _unpermute(values, heads)).to(device)

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Read rows `start` to `stop` (excluded), dequantised to float32."""
        info = self.info(name)
        check_rows(info, start, stop)
        packed = self._tensor(name).data
        heads = self._permuted_heads(name)
        if heads is None:
            chosen = packed[start:stop]
        else:
            chosen = packed[_unpermute(torch.arange(info.shape[0]), heads)[start:stop].numpy()]
        return torch.from_numpy(self._dequantize(name, chosen))

    def part(self, name: str, window: Window) -> Tensor:
        """Read a part of one tensor, dequantised to float32; whole rows are read."""
        check_window(self.info(name), window)
        first, *rest = window
        return self.rows(name, first.start, first.stop)[(slice(None), *(slice(s.start, s.stop) for s in rest))]

    def raw(self, name: str) -> RawTensor:
        """Return the stored blocks of one tensor, q and k rows in transformers' order, the rest untouched.

        A row's quantisation blocks never cross into another row, so reordering rows keeps them whole.
        """
        tensor = self._tensor(name)
        data = np.asarray(tensor.data)
        heads = self._permuted_heads(name)
        if heads is not None:
            data = data[_unpermute(torch.arange(data.shape[0]), heads).numpy()]
        return RawTensor(data, tensor.quant_type.name, tensor.shape)

    def _tensor(self, name: str) -> GgufTensor:
        if name not in self._tensors:
            raise CheckpointError(f"{self._path}: has no tensor named {name!r}.")
        return self._tensors[name]

    def _dequantize(self, name: str, data: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        kind = self._tensor(name).quant_type
        try:
            # A copy in every case: float tensors would otherwise stay views of the read-only file.
            return np.array(dequantize(data, kind), dtype=np.float32)
        except NotImplementedError as error:
            raise CheckpointError(
                f"{self._path}: tensor {name!r} is stored as {kind.name}, which the gguf package cannot read."
            ) from error

    def _permuted_heads(self, name: str) -> int | None:
        if self._kind not in _PERMUTED:
            return None
        if ".self_attn.q_proj." in name:
            heads = int(self._config["num_attention_heads"])
        elif ".self_attn.k_proj." in name:
            heads = int(self._config["num_key_value_heads"])
        else:
            return None
        if (rows := self._tensor(name).shape[0]) % (2 * heads):
            raise CheckpointError(f"{self._path}: tensor {name!r} has {rows} rows, which {heads} heads do not share.")
        return heads

    def _translate(self) -> dict[str, GgufTensor]:
        tensors: dict[str, GgufTensor] = {}
        unknown: list[str] = []
        for tensor in self._stored.values():
            found = hf_tensors(tensor, self._kind)
            tensors |= found
            if not found and tensor.name != _ROPE_FREQS:
                unknown.append(tensor.name)
        if unknown:
            raise CheckpointError(f"{self._path}: holds tensors that no {self._kind} model has: {listed(unknown, 8)}.")
        return tensors

    def _read_config(self) -> dict[str, Any]:
        heads = self._integer("attention.head_count")
        hidden = self._integer("embedding_length")
        head_dim = self._integer("attention.key_length", hidden // heads, maximum=WIDEST_HEAD)
        tokens = self._fields.get("tokenizer.ggml.tokens")
        vocab = self._integer("vocab_size", len(tokens) if isinstance(tokens, list) else None)
        window = self._integer("attention.sliding_window", 0, minimum=0)
        theta = _short(self._number("rope.freq_base", 10000.0))
        rotary_dim = self._integer("rope.dimension_count", head_dim, maximum=WIDEST_HEAD)
        config: dict[str, Any] = {
            "architectures": [ARCHITECTURES[self._kind]],
            "model_type": self._kind,
            "vocab_size": vocab,
            "hidden_size": hidden,
            "intermediate_size": self._integer("feed_forward_length"),
            "num_hidden_layers": self._integer("block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": self._integer("attention.head_count_kv", heads),
            "head_dim": head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": _short(self._number("attention.layer_norm_rms_epsilon")),
            "max_position_embeddings": self._integer("context_length"),
            "tie_word_embeddings": "lm_head.weight" not in self._tensors,
            "bos_token_id": self._fields.get("tokenizer.ggml.bos_token_id"),
            "eos_token_id": self._fields.get("tokenizer.ggml.eos_token_id"),
            "dtype": "float32",
            "rope_theta": theta,
            "rope_scaling": self._rope_scaling(theta, rotary_dim),
        }
        if self._kind == "mistral":
            config["sliding_window"] = window or None
        if rotary_dim != head_dim:
            config["partial_rotary_factor"] = rotary_dim / head_dim
        return config | family_config(self._kind, self._integer)

    def _rope_scaling(self, theta: float, rotary_dim: int) -> dict[str, Any] | None:
        kind = self._fields.get(f"{self._kind}.rope.scaling.type", "none")
        if kind in ("linear", "yarn"):
            scaling = {"rope_type": kind, "factor": _short(self._number("rope.scaling.factor"))}
            if kind == "yarn":
                scaling["original_max_position_embeddings"] = self._integer("rope.scaling.original_context_length")
                scaling["truncate"] = self._kind != "gpt-oss"
            return scaling
        if kind != "none":
            raise CheckpointError(f"{self._path}: rope scaling {shown(kind)} is not read from GGUF.")
        divisors = self._stored.get(_ROPE_FREQS)
        return None if divisors is None else self._llama3_scaling(divisors.data.astype(np.float64), theta, rotary_dim)

    def _llama3_scaling(self, factors: np.ndarray[Any, Any], theta: float, rotary_dim: int) -> dict[str, Any]:
        """Recover Llama 3's rope scaling, of which GGUF keeps only the resulting divisors."""
        low, high, original = 1.0, 4.0, 8192
        if not factors.size or not np.isfinite(factors).all():
            raise CheckpointError(f"{self._path}: {_ROPE_FREQS} is empty or holds NaN; the file is damaged.")
        factor = round(float(factors.max()), 4)
        wavelength = 2 * np.pi * theta ** (np.arange(0, rotary_dim, 2) / rotary_dim)
        smooth = np.clip((original / wavelength - low) / (high - low), 0, 1)
        expected = 1 / ((1 - smooth) / factor + smooth)
        if factors.shape != expected.shape or not np.allclose(factors, expected, rtol=1e-3):
            raise CheckpointError(
                f"{self._path}: the divisors in {_ROPE_FREQS} are not those of Llama 3's rope scaling, "
                f"the only kind slipstream recognises. Use the original Hugging Face folder."
            )
        return {
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": low,
            "high_freq_factor": high,
            "original_max_position_embeddings": original,
        }

    def _number(self, key: str, default: float | None = None) -> float:
        value = self._fields.get(f"{self._kind}.{key}", default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < math.inf:
            raise CheckpointError(
                f"{self._path}: metadata key '{self._kind}.{key}' is {shown(value)} where a number is needed."
            )
        return value

    def _integer(self, key: str, default: int | None = None, minimum: int = 1, maximum: int = LARGEST) -> int:
        value = self._number(key, default)
        if value != int(value) or not minimum <= value <= maximum:
            raise CheckpointError(
                f"{self._path}: metadata key '{self._kind}.{key}' is {shown(value)} where a whole number from "
                f"{minimum} to {maximum} is needed."
            )
        return int(value)


def _unpermute(values: Tensor, heads: int) -> Tensor:
    """Reorder q or k rows from neighbouring rotary pairs to rotary halves, within each head."""
    pairs = values.reshape(heads, values.shape[0] // heads // 2, 2, *values.shape[1:])
    return pairs.transpose(1, 2).reshape(values.shape).contiguous()


def _short(value: float) -> float:
    """Return the shortest decimal that is this float32, as the original config had it (1e-05)."""
    return float(str(np.float32(value)))
