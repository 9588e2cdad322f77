"""Give every parameter of a model its memory and its values, from a checkpoint that has just those tensors."""

import logging
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from slipstream.checkpoint.source import TensorSource
from slipstream.errors import CheckpointError
from slipstream.kernels import Ops
from slipstream.models.accounting import Place, check_tensors
from slipstream.models.layers import Embedding, Linear
from slipstream.models.moe import Experts
from slipstream.models.packing import GgufBlocks, check_uniform, checkpoint_modules, packed_source
from slipstream.models.rope import Rotary
from slipstream.quant.packed import MixedWeight, PackedWeight, join_rows, join_runs, reorder_rows, stack_experts
from slipstream.quant.scheme import dequantize

_log = logging.getLogger(__name__)
_EXPANDED = ("int4_zero",)  # what no kernel multiplies as it is stored
_DENSE = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


class Filler:
    """Checks a checkpoint's accounts, then fills a model whose parameters are on the meta device.

    Args:
        small: the model is a draft, whose layers may be expanded where the kernels do not read their format.
    """

    def __init__(
        self,
        source: TensorSource,
        names: dict[str, str],
        ops: Ops | None,
        dtype: torch.dtype,
        device: torch.device,
        small: bool = False,
    ) -> None:
        self._source = source
        self._names = names
        self._ops = ops
        self._dtype = dtype
        self._device = device
        self._packs = packed_source(source, ops)
        self._modules = checkpoint_modules(names)
        self._expands_unread = small and ops is not None and ops.row_invariant  # torch's products are not
        self._expanded: set[str] = set()

    def fill(self, model: nn.Module, wanted: dict[str, Place]) -> None:
        """Take `wanted` (our tensor names to places) from the checkpoint, and nothing else may be in it."""
        packed = self._kept_as_stored(wanted)
        shapes = {name: place.shape for name, place in wanted.items() if name not in packed}
        for name, stored in packed.items():
            module = name.removesuffix(".weight")
            shapes |= {f"{module}.{suffix}": shape for suffix, shape in stored.items()}
        check_tensors(self._source, self._names, shapes)
        if isinstance(self._packs, GgufBlocks):
            self._packs.say_expanded([self._names[name] for name in wanted if name not in packed], self._dtype)
        for part in model.modules():
            if isinstance(part, Rotary):
                part.fill(self._device)
        for name, place in wanted.items():
            if name not in packed:
                self._copy(name, place)
        self._reorder({place.module for name, place in wanted.items() if name not in packed})
        self._pack({name: wanted[name] for name in packed})

    def _kept_as_stored(self, wanted: dict[str, Place]) -> dict[str, dict[str, tuple[int, ...]]]:
        """Return what packed weights are stored as; a GGUF's layers with a part that cannot be kept are expanded."""
        packed = {name: stored for name, place in wanted.items() if (stored := self._stored(name, place)) is not None}
        if isinstance(self._packs, GgufBlocks):
            dense = {place.module for name, place in wanted.items() if name not in packed and name.endswith(".weight")}
            packed = {name: stored for name, stored in packed.items() if wanted[name].module not in dense}
        return packed

    def _stored(self, name: str, place: Place) -> dict[str, tuple[int, ...]] | None:
        """Return what a packed weight is stored as; None for a dense one."""
        module = self._modules.get(name.removesuffix(".weight"))
        may_be_packed = isinstance(place.module, Linear | Embedding | Experts) and name.endswith(".weight")
        if self._packs is None or module is None or not may_be_packed:
            return None
        return self._packs.stored(module, place.shape)

    def _copy(self, name: str, place: Place) -> None:
        if place.is_elsewhere:
            return
        values = self._source.part(self._names[name], place.window)
        if values.dtype not in _DENSE:
            info = self._source.info(self._names[name])
            raise CheckpointError(
                f"{info.file}: tensor {info.name} is stored as {info.dtype}, and no quantization_config says "
                "how to read it; fetch config.json and the weights again."
            )
        if not _all_finite(values):
            raise CheckpointError(
                f"{self._source.info(self._names[name]).file}: tensor {self._names[name]} holds NaN or infinite "
                "values; the file is damaged or the training run diverged."
            )
        if (place.offset, place.factor) != (0, 1):
            values = values.float() * place.factor + place.offset
        parameter = getattr(place.module, place.parameter)
        if parameter.is_meta:
            empty = torch.empty(parameter.shape, dtype=place.dtype or self._dtype, device=self._device)
            parameter = nn.Parameter(empty, requires_grad=False)
            setattr(place.module, place.parameter, parameter)
        rows = parameter if place.expert is None else parameter[place.expert]
        rows[place.start : place.start + len(values)].copy_(values)

    def _reorder(self, modules: set[nn.Module]) -> None:
        """Bring the rows of dense layers into the order the model computes in."""
        for module in modules:
            order = module.row_order() if isinstance(module, Linear) else None
            if isinstance(module, Linear) and module.weight is not None and order is not None:
                module.weight.copy_(module.weight[order.to(self._device)])

    def _pack(self, packed: dict[str, Place]) -> None:
        """Join the parts of each layer in order and hand them over in the kernels' layout."""
        parts: dict[nn.Module, list[str]] = {}
        for name, place in packed.items():
            if not place.is_elsewhere:
                parts.setdefault(place.module, []).append(name)
        for module, names in parts.items():
            if isinstance(module, Experts):
                self._pack_experts(module, names, packed)
                continue
            assert isinstance(module, Linear | Embedding)
            expected = len(module.parts) if isinstance(module, Linear) else 1
            check_uniform(str(self._source.folder), names[0], len(names) == expected)
            if isinstance(self._packs, GgufBlocks):
                self._pack_runs(module, names, packed)
                continue
            joined = self._join(names, packed)
            if isinstance(module, Linear) and (order := module.row_order()) is not None:
                joined = reorder_rows(joined, order)
            prepared = self._prepared(module, joined)
            if prepared is not None:
                module.pack(prepared)
                continue
            assert isinstance(module, Linear), "tables of embeddings are kept as stored"
            self._note_expanded(names[0], joined.format, module.stays_dense)
            dense = dequantize(joined).to(device=self._device, dtype=self._dtype)
            module.weight = nn.Parameter(dense, requires_grad=False)

    def _prepared(self, module: Linear | Embedding, weight: PackedWeight) -> PackedWeight | None:
        """Return a weight in the kernels' layout; None for a layer that is expanded instead."""
        if isinstance(module, Linear) and (module.stays_dense or weight.format in _EXPANDED):
            return None
        weight = weight.to(self._device)
        prepared = weight if self._ops is None else self._ops.prepare(weight)
        is_unread = isinstance(module, Linear) and prepared is weight
        return None if is_unread and self._expands_unread else prepared

    def _pack_runs(self, module: Linear | Embedding, names: list[str], packed: dict[str, Place]) -> None:
        """Hand over what a GGUF stores, whose joined layers may mix formats: more bits for v than for q and k."""
        runs = [run.to(self._device) for run in join_runs(self._read(names, packed))]
        prepared = [run if self._ops is None else self._ops.prepare(run) for run in runs]
        if isinstance(module, Embedding):
            [table] = prepared
            module.pack(table)
        else:
            assert module.row_order() is None and not module.stays_dense, "no GGUF has latent attention"
            module.pack(prepared[0] if len(prepared) == 1 else MixedWeight(tuple(prepared)))

    def _note_expanded(self, name: str, format: str, cut: bool = False) -> None:
        """Say, once for each kind of layer, that it is not kept as stored."""
        kind = name.removesuffix(".weight").rpartition(".")[2]
        if kind not in self._expanded:
            self._expanded.add(kind)
            _log.info(
                "%s: %s layers are stored as %s and expanded to %s, since %s.",
                self._source.folder,
                kind,
                format,
                str(self._dtype).removeprefix("torch."),
                "attention multiplies by parts of them" if cut else "no kernel here multiplies it",
            )

    def _pack_experts(self, module: Experts, names: list[str], packed: dict[str, Place]) -> None:
        """Stack the experts of a layer as they are stored, reading one at a time."""
        check_uniform(str(self._source.folder), names[0], len(names) == 3 * module.held.size)

        def each(parameter: str) -> Iterator[PackedWeight]:
            first: PackedWeight | None = None
            for expert in range(module.held.size):
                own = [name for name in names[3 * expert : 3 * expert + 3] if packed[name].parameter == parameter]
                joined = self._join(own, packed)
                first = first or joined
                self._check_same(own[0], first.format, joined.format)
                yield joined

        if self._join(names[:1], packed).format in _EXPANDED:
            self._note_expanded(names[0], _EXPANDED[0])
            for parameter in ("gate_up_weight", "down_weight"):
                dense = torch.stack([dequantize(part).to(self._dtype) for part in each(parameter)]).to(self._device)
                setattr(module, parameter, nn.Parameter(dense, requires_grad=False))
            return
        module.pack(
            stack_experts(each("gate_up_weight"), module.held.size, self._device),
            stack_experts(each("down_weight"), module.held.size, self._device),
        )

    def _join(self, names: list[str], packed: dict[str, Place]) -> PackedWeight:
        read = self._read(names, packed)
        for name, part in zip(names, read, strict=True):
            self._check_same(name, read[0].format, part.format)
        return join_rows(read)

    def _read(self, names: list[str], packed: dict[str, Place]) -> list[PackedWeight]:
        assert self._packs is not None
        windows = {name: packed[name].window for name in names}
        return [self._packs.read(self._modules[name.removesuffix(".weight")], *windows[name]) for name in names]

    def _check_same(self, name: str, first: str, format: str) -> None:
        if format != first:
            raise CheckpointError(
                f"{self._source.folder}: {self._names.get(name, name)} is stored as {format}, the layers it is joined "
                f"with (q, k, v; gate, up; the experts of a block) as {first}; quantize them alike."
            )


def _all_finite(values: Tensor) -> bool:
    """Tell whether every number is finite; if their sum is, they are, and a sum takes a fraction of looking at each."""
    return bool(torch.isfinite(values.sum())) or bool(torch.isfinite(values).all())
