"""Checkpoints that store several layers, or all experts of a block, in one tensor: read as if each lay by itself.

A piece is rows of a stored tensor, perhaps every second one, perhaps of one of the matrices of a stack, which may be
stored as [in, out]; or columns, of AWQ's and GPTQ's words. Pieces go by the names that checkpoints of separate layers
have, so nothing after this module knows of the joined form; and only what is asked for is read.
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
from slipstream.checkpoint.spec import ModelSpec
from slipstream.errors import CheckpointError


@dataclass(frozen=True)
class Piece:
    """Where a tensor lies inside a stored one.

    Args:
        stored: the stored tensor's name.
        rows: which of its rows; of a vector, which entries; None for all of what pieces share, such as one scale.
        expert: which matrix of a stack; None where nothing is stacked.
        transposed: whether matrices are stored [in, out], so that a row is a stored column.
        columns: whether `rows` are columns, of a matrix that stays as it is stored.
    """

    stored: str
    rows: range | None
    expert: int | None = None
    transposed: bool = False
    columns: bool = False


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
        if piece.rows is None:
            return replace(whole, name=name)
        shape = self._matrix(piece)
        if piece.transposed:
            shape = shape[::-1]
        size = len(piece.rows)
        info = replace(whole, name=name, shape=(shape[0], size) if piece.columns else (size, *_flat(shape[1:])))
        return replace(info, nbytes=whole.nbytes * info.num_elements // max(whole.num_elements, 1))

    def tensor(self, name: str, device: str = "cpu") -> Tensor:
        """Read one tensor whole."""
        piece = self._pieces.get(name)
        if piece is None or piece.rows is None:
            return self._source.tensor(name if piece is None else piece.stored, device)
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
        if piece.rows is None:
            return self._source.part(piece.stored, window)
        if piece.columns:
            start, columns = piece.rows.start, window[1]
            span = Span(self._matrix(piece)[1], start + columns.start, start + columns.stop)
            return self._source.part(piece.stored, (window[0], span))
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


_JOINED = re.compile(
    r"(?P<above>.*\.)(?P<what>qkv_proj|gate_up_proj)\."
    r"(?P<suffix>bias|input_scale|weight(_\w+)?|qweight|qzeros|scales|g_idx)"
)
_INPUTS_FIRST = ("qweight", "qzeros", "scales")  # AWQ's and GPTQ's, stored [in, out]
_FP8_BLOCK = 128
_WORD = 8
# What an entry along the joined layers' outputs may hold, where it is not one of them.
_OUTPUTS_PER_ENTRY = {
    "qweight": _WORD, "qzeros": _WORD, "weight_zero_point": _WORD,
    "weight_scale": _FP8_BLOCK, "weight_scale_inv": _FP8_BLOCK,
}  # fmt: skip


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
        start, suffix = 0, match["suffix"]
        for part, height in _entries(source, name, suffix, parts[match["what"]]).items():
            rows = None if height is None else range(start, start + height)
            pieces[f"{match['above']}{part}.{suffix}"] = Piece(name, rows, columns=suffix in _INPUTS_FIRST)
            start += height or 0
    return pieces


def _entries(source: TensorSource, name: str, suffix: str, heights: dict[str, int]) -> Mapping[str, int | None]:
    """Return how many entries of a stored tensor each of the joined layers has; None where they share all of it."""
    info, total = source.info(name), sum(heights.values())
    outputs = info.shape[1:] if suffix in _INPUTS_FIRST else info.shape
    entries = outputs[0] if outputs else 1
    if suffix in ("weight_shape", "g_idx") or (suffix.endswith("_scale") and entries == 1):
        return dict.fromkeys(heights)
    for per_entry in (1, _OUTPUTS_PER_ENTRY.get(suffix, 1)):
        if entries * per_entry == total and not any(height % per_entry for height in heights.values()):
            return {part: height // per_entry for part, height in heights.items()}
    raise CheckpointError(
        f"{info.file}: tensor {name} has shape {list(info.shape)}, where config.json speaks of {total} rows of "
        f"{', '.join(heights)}; fetch both again."
    )


_STACKED = re.compile(
    r"(?P<above>.*\.experts\.)(?P<what>gate_up_proj|down_proj)(?P<form>|_bias|_blocks|_scales|_scale_inv)"
)
_SUFFIXES = {
    "": "weight", "_bias": "bias", "_blocks": "weight", "_scales": "weight_scale", "_scale_inv": "weight_scale_inv",
}  # fmt: skip
_BLOCK = 32  # of MXFP4, in gpt-oss's files 16 bytes of codes and one of scale


def _stacked_experts(source: TensorSource, spec: ModelSpec) -> dict[str, Piece]:
    """Take stacks of experts apart: matrices [in, out] or [out, in], biases, and MXFP4's blocks with their scales."""
    if spec.moe is None:
        return {}  # a dense member of a family that has experts, too
    inner, width = spec.moe.intermediate_size, spec.hidden_size
    gate, up = range(inner), range(inner, 2 * inner)
    if FAMILIES[spec.architecture].interleaved:
        gate, up = range(0, 2 * inner, 2), range(1, 2 * inner, 2)
    rows = {"gate_up_proj": {"gate_proj": gate, "up_proj": up}, "down_proj": {"down_proj": range(width)}}
    matrices = {"gate_up_proj": (2 * inner, width), "down_proj": (width, inner)}
    stacks = {name: match for name in source.names() if (match := _STACKED.fullmatch(name))}
    for name, match in stacks.items():
        _check_stack(source, name, match["form"], (spec.moe.num_experts, *matrices[match["what"]]))
    dense = {name: matrices[match["what"]] for name, match in stacks.items() if not match["form"]}
    # Most are published [in, out], and transformers 5 writes [out, in]; one of the two may be square, not both.
    transposed = all(source.info(name).shape[1:] == matrix[::-1] for name, matrix in dense.items())
    return {
        f"{match['above']}{expert}.{part}.{_SUFFIXES[match['form']]}": Piece(
            name,
            _blocks_of(part_rows) if match["form"] == "_scale_inv" else part_rows,
            expert,
            transposed and match["form"] in ("", "_scale_inv"),
        )
        for name, match in stacks.items()
        for expert in range(spec.moe.num_experts)
        for part, part_rows in rows[match["what"]].items()
    }


def _blocks_of(rows: range) -> range:
    """Return which blocks of FP8 hold these rows, where both begin and end together (`_check_stack`)."""
    return range(rows.start // _FP8_BLOCK, -(-rows.stop // _FP8_BLOCK))


def _check_stack(source: TensorSource, name: str, form: str, stack: tuple[int, int, int]) -> None:
    """Raise unless a stack of experts [E, out, in] has the shape of its form."""
    info, (experts, outputs, inputs) = source.info(name), stack
    blocks = (-(-outputs // _FP8_BLOCK), -(-inputs // _FP8_BLOCK))
    forms: dict[str, list[tuple[int, ...]]] = {
        "": [(experts, outputs, inputs), (experts, inputs, outputs)],
        "_bias": [(experts, outputs)],
        "_blocks": [(experts, outputs, inputs // _BLOCK, _BLOCK // 2)],
        "_scales": [(experts, outputs, inputs // _BLOCK)],
        "_scale_inv": [(experts, *blocks), (experts, *blocks[::-1])],
    }
    shapes = forms[form]
    half = outputs // 2
    if form == "_scale_inv" and "gate_up" in name and half % _FP8_BLOCK and outputs > _FP8_BLOCK:
        raise CheckpointError(
            f"{info.file}: tensor {name} has a scale for each {_FP8_BLOCK} rows, and gate ends after {half}, inside a "
            "block, which slipstream cannot take apart."
        )
    if info.shape not in shapes:
        raise CheckpointError(
            f"{info.file}: tensor {name} has shape {list(info.shape)}, where config.json speaks of {experts} experts "
            f"of {outputs} x {inputs}: {' or '.join(str(list(shape)) for shape in shapes)}; fetch both again."
        )


def _flat(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the columns of rows that are stored as blocks."""
    if len(shape) < 2:
        return shape
    count = 1
    for size in shape:
        count *= size
    return (count,)
