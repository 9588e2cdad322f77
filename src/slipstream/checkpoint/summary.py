"""What a checkpoint holds, in plain values: for `slipstream inspect`, records and reports."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.checkpoint.captures import Captures
from slipstream.checkpoint.config import model_spec
from slipstream.checkpoint.dflash_config import read_dflash
from slipstream.checkpoint.draft_config import is_dflash, is_draft, read_draft
from slipstream.checkpoint.fields import quantization_config
from slipstream.checkpoint.files import short, shown
from slipstream.checkpoint.known_targets import targets_of
from slipstream.checkpoint.source import TensorInfo, TensorSource
from slipstream.checkpoint.spec import BlockDraftSpec, DraftSpec, ModelSpec
from slipstream.errors import CheckpointError

_INTEGER_BITS = {"U8": 8, "I8": 8, "I16": 16, "I32": 32, "I64": 64}
_NOT_PARAMETERS = ("d2t", "t2d", "_scale", "_scale_2", "_scale_inv", "_zero_point", "_shape", "input_scale",
                   "qzeros", ".scales", "g_idx", "_scales")  # fmt: skip


@dataclass(frozen=True)
class DtypeRow:
    """The tensors of one stored type; `num_parameters` counts packed values singly."""

    dtype: str
    num_tensors: int
    num_parameters: int
    nbytes: int


@dataclass(frozen=True)
class CheckpointSummary:
    """A checkpoint at a glance.

    Args:
        spec: None when slipstream cannot run the architecture; `problem` then says why.
        captures: a draft's captured layers, as the file spells them and as slipstream reads them; None for a target,
            and for a draft that leaves them to its target's default.
        quantization: the scheme in a few words, None when the weights are plain.
        made_for: the target a draft names as its own, if it names one.
        same_sizes: published targets whose sizes a draft has.
    """

    path: Path
    kind: str
    architecture: str
    spec: ModelSpec | DraftSpec | BlockDraftSpec | None
    problem: str | None
    num_parameters: int
    nbytes: int
    dtypes: tuple[DtypeRow, ...]
    tensors: tuple[TensorInfo, ...]
    files: tuple[Path, ...]
    quantization: str | None
    captures: Captures | None
    made_for: str | None = None
    same_sizes: tuple[str, ...] = ()


def summarise(source: TensorSource, target_layers: int | None = None) -> CheckpointSummary:
    """Describe a checkpoint from its headers alone; `target_layers` helps to read a draft's captured layers."""
    config = source.config
    draft = is_draft(config)
    spec: ModelSpec | DraftSpec | BlockDraftSpec | None = None
    captures, problem = None, None
    try:
        if is_dflash(config):
            spec, captures = read_dflash(config, source.folder, target_layers)
        elif draft:
            spec, captures = read_draft(config, source.folder, target_layers)
        else:
            spec = model_spec(config, source.folder)
    except CheckpointError as error:
        problem = str(error)
    tensors = tuple(source.info(name) for name in source.names())
    quantization = quantization_config(config)
    rows = _dtype_rows(tensors, _weight_bits(quantization))
    architectures = config.get("architectures")
    architecture = architectures[0] if isinstance(architectures, list) and architectures else "unknown"
    files = tuple(sorted({tensor.file for tensor in tensors}))
    return CheckpointSummary(
        path=files[0] if len(files) == 1 and files[0].suffix == ".gguf" else source.folder,
        kind="draft" if draft else "target",
        architecture=short(str(architecture)),
        spec=spec,
        problem=problem,
        num_parameters=sum(row.num_parameters for row in rows),
        nbytes=sum(row.nbytes for row in rows),
        dtypes=rows,
        tensors=tensors,
        files=files,
        quantization=_quantization(quantization, rows),
        captures=captures,
        made_for=_made_for(config) if draft else None,
        same_sizes=targets_of(spec) if isinstance(spec, DraftSpec | BlockDraftSpec) else (),
    )


def _made_for(config: Mapping[str, Any]) -> str | None:  # foreign JSON
    """Return the target that speculators' dialect records."""
    verifier = config.get("speculators_config")
    verifier = verifier.get("verifier") if isinstance(verifier, Mapping) else None
    name = verifier.get("name_or_path") if isinstance(verifier, Mapping) else None
    return short(name) if isinstance(name, str) and name else None


def _dtype_rows(tensors: Iterable[TensorInfo], weight_bits: int | None) -> tuple[DtypeRow, ...]:
    rows: dict[str, DtypeRow] = {}
    for tensor in tensors:
        old = rows.get(tensor.dtype, DtypeRow(tensor.dtype, 0, 0, 0))
        rows[tensor.dtype] = DtypeRow(
            tensor.dtype,
            old.num_tensors + 1,
            old.num_parameters + _num_parameters(tensor, weight_bits),
            old.nbytes + tensor.nbytes,
        )
    return tuple(sorted(rows.values(), key=lambda row: -row.nbytes))


def _num_parameters(tensor: TensorInfo, weight_bits: int | None) -> int:
    if tensor.name.endswith(_NOT_PARAMETERS) or tensor.dtype == "BOOL":
        return 0
    stored_bits = _INTEGER_BITS.get(tensor.dtype)
    if stored_bits is None or weight_bits is None:
        return tensor.num_elements
    return tensor.num_elements * (stored_bits // weight_bits)


def _weight_bits(quantization: Any) -> int | None:  # foreign JSON
    """Return the bits of one weight in a quantised checkpoint whose packing hides them, where it says so."""
    if isinstance(quantization, Mapping) and quantization.get("bits") in (4, 8):  # AWQ, GPTQ
        return int(quantization["bits"])
    if isinstance(quantization, Mapping) and quantization.get("quant_method") == "mxfp4":
        return 4
    text = str(_weight_part(quantization))
    for digits, bits in (("4", 4), ("6", 6), ("8", 8)):
        if any(f"{kind}{digits}" in text for kind in ("int", "fp", "num_bits': ")):
            return bits
    return None


def _weight_part(quantization: Any) -> Any:  # foreign JSON
    if not isinstance(quantization, Mapping):
        return None
    groups = quantization.get("config_groups")
    if isinstance(groups, Mapping) and groups:
        first = next(iter(groups.values()))
        return first.get("weights") if isinstance(first, Mapping) else None
    whole = quantization.get("global_quant_config")
    if not isinstance(whole, Mapping):
        return None
    weight = whole.get("weight")
    # Two-stage schemes list the outer format first and the stored one last.
    return weight[-1] if isinstance(weight, list) and weight else weight


def _quantization(quantization: Any, rows: tuple[DtypeRow, ...]) -> str | None:  # foreign JSON
    if not isinstance(quantization, Mapping):
        packed = [row for row in rows if row.dtype.startswith(("Q", "IQ"))]
        return f"GGUF, mostly {packed[0].dtype}" if packed else None
    words = [short(str(quantization.get("quant_method", "unknown method")))]
    weight = _weight_part(quantization)
    if isinstance(weight, Mapping):
        keys = ("dtype", "num_bits", "type", "qscheme", "strategy", "group_size")
        details = " ".join(f"{weight[key]}" for key in keys if weight.get(key) is not None)
        words.append(f"weights {short(details)}")
    elif quantization.get("bits") is not None:
        words.append(f"{shown(quantization['bits'])} bits")
    elif isinstance(block := quantization.get("weight_block_size"), list):
        words.append(f"blocks of {short(' x '.join(map(str, block)))}")
    lists = ("exclude", "ignore", "modules_to_not_convert")
    left_out = next((found for key in lists if isinstance(found := quantization.get(key), list) and found), ())
    if left_out:
        words.append(f"{len(left_out)} patterns left out")
    return ", ".join(words)
