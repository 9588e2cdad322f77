"""Read a GGUF file as if it were a Hugging Face folder: same names, same layout, float32."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor

from slipstream.checkpoint.files import listed, shown
from slipstream.checkpoint.gguf_config import ROPE_FREQS, gguf_config
from slipstream.checkpoint.gguf_families import ARCHITECTURES, PERMUTED, hf_tensors
from slipstream.checkpoint.gguf_header import read_gguf_header
from slipstream.checkpoint.gguf_made import MadeTensor
from slipstream.checkpoint.gguf_metadata import GgufMetadata
from slipstream.checkpoint.source import TensorInfo, check_rows, check_window
from slipstream.checkpoint.span import Window
from slipstream.errors import CheckpointError

# What llama.cpp adds to Gemma's norms when it writes them, and transformers when it computes.
_NORM_OFFSET = {"gemma3": 1.0}


class RawTensor(NamedTuple):
    """A tensor as stored: packed rows, the ggml type's name, and the logical shape (rows first)."""

    data: np.ndarray[Any, np.dtype[Any]]
    quant_type: str
    shape: tuple[int, ...]


class GgufReader:
    """A GGUF file opened for reading (memory-mapped): a target, or an EAGLE-3 draft as llama.cpp writes them.

    `tensor` and `rows` give float32 in the layout transformers expects: names translated, experts one by one, and the
    query and key rows of llama-family files put back in half-rotation order. `raw` gives the stored blocks under
    the same names.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        header = read_gguf_header(path)
        self._fields = header.metadata
        self._stored = header.tensors
        metadata = GgufMetadata(header.metadata, path)
        self._kind = metadata.kind
        if self._kind not in ARCHITECTURES:
            raise CheckpointError(
                f"{path}: general.architecture is {shown(self._kind)}, which slipstream cannot read from GGUF. "
                f"It reads {', '.join(ARCHITECTURES)}."
            )
        self._tensors = self._translate()
        self._config = gguf_config(metadata, self._tensors.keys(), self._stored)

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
        return TensorInfo(name, tensor.shape, tensor.quant_type.name, self._path, tensor.nbytes)

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
        return torch.from_numpy(self._dequantize(name, chosen, start))

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

    def _tensor(self, name: str) -> MadeTensor:
        if name not in self._tensors:
            raise CheckpointError(f"{self._path}: has no tensor named {name!r}.")
        return self._tensors[name]

    def _dequantize(self, name: str, data: np.ndarray[Any, Any], start: int = 0) -> np.ndarray[Any, Any]:
        """Return the values of rows from `start` on, as a folder would hold them."""
        kind = self._tensor(name).quant_type
        if kind == GGMLQuantizationType.I64:  # d2t: llama.cpp stores tokens, everybody else what to add to their index
            return np.asarray(data - np.arange(start, start + len(data)))
        try:
            # A copy in every case: float tensors would otherwise stay views of the read-only file.
            values = np.array(dequantize(data, kind), dtype=np.float32)
        except NotImplementedError as error:
            raise CheckpointError(
                f"{self._path}: tensor {name!r} is stored as {kind.name}, which the gguf package cannot read."
            ) from error
        return values - np.float32(_NORM_OFFSET.get(self._kind, 0.0)) if name.endswith("norm.weight") else values

    def _permuted_heads(self, name: str) -> int | None:
        if self._kind not in PERMUTED:
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

    def _translate(self) -> dict[str, MadeTensor]:
        tensors, unknown = hf_tensors(
            (tensor for tensor in self._stored.values() if tensor.name != ROPE_FREQS), self._kind
        )
        if unknown:
            raise CheckpointError(f"{self._path}: holds tensors that no {self._kind} model has: {listed(unknown, 8)}.")
        return tensors


def _unpermute(values: Tensor, heads: int) -> Tensor:
    """Reorder q or k rows from neighbouring rotary pairs to rotary halves, within each head."""
    pairs = values.reshape(heads, values.shape[0] // heads // 2, 2, *values.shape[1:])
    return pairs.transpose(1, 2).reshape(values.shape).contiguous()
