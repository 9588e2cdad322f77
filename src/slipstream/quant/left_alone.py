"""What a quantization copies as it is, and why: for the person who wonders where the bytes went."""

from dataclasses import dataclass

from slipstream.quant.plan import Item, QuantizePlan
from slipstream.quant.select import EMBEDDINGS, excluded_by


@dataclass(frozen=True)
class LeftAlone:
    """Tensors that one reason keeps as they are; `names` are their modules, in order."""

    reason: str
    names: tuple[str, ...]
    nbytes: int


def left_alone(plan: QuantizePlan) -> list[LeftAlone]:
    """Return what a plan copies, by reason, the most bytes first."""
    by_reason: dict[str, list[Item]] = {}
    for shard in plan.shards:
        for item in shard.items:
            if not item.stored:
                by_reason.setdefault(_reason(item, plan), []).append(item)
    groups = [
        LeftAlone(reason, tuple(item.module or item.info.name for item in items), sum(i.info.nbytes for i in items))
        for reason, items in by_reason.items()
    ]
    return sorted(groups, key=lambda group: -group.nbytes)


def _reason(item: Item, plan: QuantizePlan) -> str:
    if item.info.name.endswith(".weight") and item.module in plan.selection.kept:
        pattern = excluded_by(item.module, plan.options.exclude)
        return "engines read it unquantized" if pattern is None else f"--exclude {pattern}"
    if EMBEDDINGS.fullmatch(item.module.rpartition(".")[2]):
        return "embeddings: looked up, not multiplied"
    if len(item.info.shape) < 2:
        return "vectors: norms, biases, index tables"
    return "not the weight of a linear layer"
