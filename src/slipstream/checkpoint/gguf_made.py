"""Tensors that a GGUF file stores in parts, and what a reader makes of them."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from slipstream.checkpoint.gguf_header import GgufTensor


@dataclass(frozen=True)
class KvUp:
    """DeepSeek's kv_b_proj, which llama.cpp cuts by head into keys, transposed, and values; made when asked for.

    Args:
        keys: [heads, rank, width of a key without its positions].
        values: [heads, width of a value, rank].
    """

    keys: GgufTensor
    values: GgufTensor

    @property
    def name(self) -> str:
        """The name of the keys' part."""
        return self.keys.name

    @property
    def shape(self) -> tuple[int, ...]:
        """Rows of all heads' keys and values, by rank; the keys' own where the parts are none of one layer."""
        if (len(self.keys.shape), len(self.values.shape)) != (3, 3) or self.keys.shape[:2] != self.values.shape[::2]:
            return self.keys.shape
        heads, rank, width = self.keys.shape
        return (heads * (width + self.values.shape[1]), rank)

    @property
    def quant_type(self) -> GGMLQuantizationType:
        """Float32: blocks of the transposed part lie across what a row is here."""
        return GGMLQuantizationType.F32

    @property
    def nbytes(self) -> int:
        """What both parts take in the file."""
        return self.keys.nbytes + self.values.nbytes

    @property
    def data(self) -> np.ndarray[Any, np.dtype[Any]]:
        """The weight, expanded anew at each call."""
        keys, values = (dequantize(part.data, part.quant_type) for part in (self.keys, self.values))
        joined = np.concatenate([keys.swapaxes(1, 2), values], axis=1)
        return np.ascontiguousarray(joined.reshape(-1, joined.shape[-1]), dtype=np.float32)


MadeTensor = GgufTensor | KvUp
