"""Checkpoints that store several layers, or all experts of a block, in one tensor: read as if each lay by itself.

A piece is rows of a stored tensor, perhaps every second one, perhaps of one of the matrices of a stack, which may be
stored as [in, out]. Pieces go by the names that checkpoints of separate layers have, so nothing after this module
knows of the joined form; and only what is asked for is read.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from slipstream.checkpoint.families import FAMILIES
from slipstream.checkpoint.source import TensorInfo, TensorSource, check_rows, check_window
from slipstream.checkpoint.span import Span, Window
from slipstream.checkpoint.spec import ModelSpec, MoeSpec
from slipstream.errors import CheckpointError


@dataclass(frozen=True)
class Piece:
    """Where a tensor lies inside a stored one.

    Args:
        stored: the stored tensor's name.
        rows: which of its rows; of a vector, which entries.
        expert: which matrix of a stack; None where nothing is stacked.
        transposed: whether matrices are stored [in, out], so that a row is a stored column.
    """

    stored: str
    rows: range
    expert: int | None = None
    transposed: bool = False


class TakenApart:
    """A checkpoint whose joined tensors are replaced by their pieces."""

    def __init__(self, source: TensorSource, pieces: Mapping[str, Piece]) -> None:
        self._source = source
        self._pieces = pieces
        joined = {piece.stored for piece in pieces.values()}
        self._names = sorted([*(name for name in source.names() if name not in joined), *pieces])

    @property
    def folder(self) -> Path:
        """The folder the checkpoint lies in."""
        return self._source.folder

    @property
    def config(self) -> Mapping[str, Any]:
        """The parsed config.json: foreign JSON, hence Any."""
        return self._source.config

    def names(self) -> list[str]:
        """Return the names of all tensors, sorted."""
        return self._names

    def info(self, name: str) -> TensorInfo:
        """Describe one tensor; a piece has its share of the stored bytes."""
        piece = self._pieces.get(name)
        if piece is None:
            return self._source.info(name)
        whole = self._source.info(piece.stored)
        shape = self._matrix(piece)
        if piece.transposed:
            shape = shape[::-1]
        info = replace(whole, name=name, shape=(len(piece.rows), *_flat(shape[1:])))
        return replace(info, nbytes=whole.nbytes * info.num_elements // max(whole.num_elements, 1))

    def tensor(self, name: str, device: str = "cpu") -> Tensor:
        """Read one tensor whole."""
        if name not in self._pieces:
            return self._source.tensor(name, device)
        return self.part(name, tuple(Span.whole(size) for size in self.info(name).shape)).to(device)

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Read rows `start` to `stop` (excluded) of one tensor, on the CPU."""
        if name not in self._pieces:
            return self._source.rows(name, start, stop)
        info = self.info(name)
        check_rows(info, start, stop)
        return self.part(name, (Span(info.shape[0], start, stop), *map(Span.whole, info.shape[1:])))

    def part(self, name: str, window: Window) -> Tensor:
        """Read a part of one tensor, on the CPU; the rest of it is not read."""
        piece = self._pieces.get(name)
        if piece is None:
            return self._source.part(name, window)
        check_window(self.info(name), window)
        rows = piece.rows[window[0].start : window[0].stop]
        matrix = self._matrix(piece)
        total = matrix[1] if piece.transposed else matrix[0]
        first = Span(total, rows[0], rows[-1] + 1) if rows else Span(total, 0, 0)
        if piece.transposed:
            stored: Window = (window[1], first)
        elif len(matrix) > 2:  # blocks of codes, whose columns are read whole and then cut
            stored = (first, *map(Span.whole, matrix[1:]))
        else:
            stored = (first, *window[1:])
        if piece.expert is not None:
            stored = (Span(self._stack(piece), piece.expert, piece.expert + 1), *stored)
        values = self._source.part(piece.stored, stored)
        values = values[0] if piece.expert is not None else values
        values = (values.t() if piece.transposed else values)[:: piece.rows.step]
        if len(matrix) > 2:
            values = values.flatten(1)[:, window[1].start : window[1].stop]
        return values.contiguous()

    def _matrix(self, piece: Piece) -> tuple[int, ...]:
        """Return the shape of what is stored, or of one matrix of a stack."""
        shape = self._source.info(piece.stored).shape
        return shape if piece.expert is None else shape[1:]

    def _stack(self, piece: Piece) -> int:
        return self._source.info(piece.stored).shape[0]


def taken_apart(source: TensorSource, spec: ModelSpec) -> TensorSource:
    """Return the checkpoint with its joined tensors taken apart, as far as the target's family joins any."""
    form = FAMILIES[spec.architecture].joined
    find: dict[str, Callable[[TensorSource, ModelSpec], dict[str, Piece]]] = {
        "layers": _joined_layers,
        "experts": _stacked_experts,
    }
    pieces = {} if form is None else find[form](source, spec)
    return TakenApart(source, pieces) if pieces else source


_JOINED = re.compile(r"(?P<above>.*\.)(?P<what>qkv_proj|gate_up_proj)\.(?P<suffix>weight|bias)")


def _joined_layers(source: TensorSource, spec: ModelSpec) -> dict[str, Piece]:
    """Take q, k, v and gate, up apart, as Phi stores them."""
    q, kv, inner = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim, spec.intermediate_size
    parts = {
        "qkv_proj": {"q_proj": q, "k_proj": kv, "v_proj": kv},
        "gate_up_proj": {"gate_proj": inner, "up_proj": inner},
    }
    pieces = {}
    for name in source.names():
        if (match := _JOINED.fullmatch(name)) is None:
            continue
        heights = parts[match["what"]]
        _check_rows(source, name, sum(heights.values()))
        start = 0
        for part, height in heights.items():
            pieces[f"{match['above']}{part}.{match['suffix']}"] = Piece(name, range(start, start + height))
            start += height
    return pieces


_STACKED = re.compile(r"(?P<above>.*\.experts\.)(?P<what>gate_up_proj|down_proj)")


def _stacked_experts(source: TensorSource, spec: ModelSpec) -> dict[str, Piece]:
    """Take stacks of experts apart, each expert's matrices stored [in, out] or [out, in]."""
    assert spec.moe is not None, "a family of experts"
    inner, width = spec.moe.intermediate_size, spec.hidden_size
    rows = {
        "gate_up_proj": {"gate_proj": range(inner), "up_proj": range(inner, 2 * inner)},
        "down_proj": {"down_proj": range(width)},
    }
    inputs = {"gate_up_proj": (width, 2 * inner), "down_proj": (inner, width)}
    stacks = {name: match for name in source.names() if (match := _STACKED.fullmatch(name))}
    for name, match in stacks.items():
        _check_stack(source, name, spec.moe, inputs[match["what"]])
    # Published files have [in, out], those that transformers 5 writes [out, in]; one matrix may be square, not both.
    transposed = all(source.info(name).shape[1:] == inputs[match["what"]] for name, match in stacks.items())
    return {
        f"{match['above']}{expert}.{part}.weight": Piece(name, part_rows, expert, transposed)
        for name, match in stacks.items()
        for expert in range(spec.moe.num_experts)
        for part, part_rows in rows[match["what"]].items()
    }


def _check_stack(source: TensorSource, name: str, moe: MoeSpec, matrix: tuple[int, int]) -> None:
    info = source.info(name)
    if info.shape not in ((moe.num_experts, *matrix), (moe.num_experts, *matrix[::-1])):
        raise CheckpointError(
            f"{info.file}: tensor {name} has shape {list(info.shape)}, where config.json speaks of {moe.num_experts} "
            f"experts of {list(matrix)}; fetch both again."
        )


def _check_rows(source: TensorSource, name: str, expected: int) -> None:
    info = source.info(name)
    if not info.shape or info.shape[0] != expected:
        raise CheckpointError(
            f"{info.file}: tensor {name} has shape {list(info.shape)}, where config.json speaks of {expected} rows; "
            "fetch both again."
        )


def _flat(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the columns of rows that are stored as blocks."""
    if len(shape) < 2:
        return shape
    count = 1
    for size in shape:
        count *= size
    return (count,)
