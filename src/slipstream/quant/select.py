"""Which linear layers of a checkpoint are quantized: every one, less those others leave out, as patterns say."""

import fnmatch
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from slipstream.errors import ConfigError

# The names checkpoints give to tables of embeddings: 2-D weights that no linear layer multiplies by.
EMBEDDINGS = re.compile(r"wte|wpe|embed_(in|tokens|positions|tokens_per_layer)|(\w+_)?embed(ding)?s?")
# What others keep as it is: the draft's fusion, the head, and the routers of experts.
_KEPT = ("fc", "lm_head", "embed_out", "gate", "router", "router.proj", "shared_expert_gate")
_KEPT_ENDINGS = tuple(f".{name}" for name in _KEPT)
_FLOATS = frozenset({"F32", "F16", "BF16"})
FUSED: Mapping[str, tuple[str, ...]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
"""Layers that every engine joins into one, which must therefore share a scheme."""


@dataclass(frozen=True)
class Selection:
    """The linear layers of a checkpoint by module name: those to quantize and those to keep.

    Args:
        moot: exclude patterns that match only what is never quantized (embeddings, norms).
        stacked: stacks of experts in one tensor: they stay as they are, and readers have to be told.
    """

    quantized: tuple[str, ...]
    kept: tuple[str, ...]
    moot: tuple[str, ...] = ()
    stacked: tuple[str, ...] = ()


def linear_modules(shapes: Mapping[str, tuple[tuple[int, ...], str]]) -> list[str]:
    """Return the modules whose weight a linear layer multiplies by, from each tensor's shape and stored dtype."""
    modules = []
    for name, (shape, dtype) in shapes.items():
        module, _, parameter = name.rpartition(".")
        leaf = module.rpartition(".")[2]
        if parameter == "weight" and len(shape) == 2 and dtype in _FLOATS and not EMBEDDINGS.fullmatch(leaf):
            modules.append(module)
    return sorted(modules)


def select(
    modules: Sequence[str], exclude: Sequence[str], include: Sequence[str], others: Collection[str] = ()
) -> Selection:
    """Choose among linear modules; patterns are names, globs or `re:` expressions, and each must match something.

    Args:
        include: also quantize these, though others leave them out (fc, lm_head, routers).
        exclude: keep these; the last word. A published list also names embeddings and norms, which stay anyway.
        others: modules that are no linear layers; an exclude pattern may match one of these instead.
    """
    moot = tuple(
        pattern
        for pattern in exclude
        if not _matching(modules, pattern, "--exclude") and _matching(others, pattern, "--exclude")
    )
    included = _match_all(modules, include, "--include")
    excluded = _match_all(modules, [pattern for pattern in exclude if pattern not in moot], "--exclude")
    quantized = [
        module
        for module in modules
        if module not in excluded and (module in included or not f".{module}".endswith(_KEPT_ENDINGS))
    ]
    if not quantized:
        raise ConfigError("Nothing is left to quantize: every linear layer is excluded or of a kind that is kept.")
    chosen = set(quantized)
    kept = [module for module in modules if module not in chosen]
    _check_fused(quantized, kept)
    return Selection(tuple(quantized), tuple(kept), moot)


def matches(pattern: str, module: str) -> bool:
    """Tell whether a name, glob or `re:` expression (matched from the start, as engines do) covers a module."""
    if pattern.startswith("re:"):
        return re.match(pattern[3:], module) is not None
    return pattern == module or fnmatch.fnmatchcase(module, pattern)


def excluded_by(module: str, exclude: Sequence[str]) -> str | None:
    """Return the first pattern that keeps a module; None if none does."""
    return next((pattern for pattern in exclude if matches(_canonical(pattern), module)), None)


def reader_patterns(selection: Selection) -> list[str]:
    """Return an exclude list that Quark, vLLM and SGLang all understand, whatever prefix they give a layer.

    Quark takes names; the engines take names equal to their own (`model.fc` for a draft's `fc`) or expressions, and
    ask for joined layers by the joined name. So each kept layer is written as its name and as one expression.
    """
    quantized_leaves = {module.rpartition(".")[2] for module in selection.quantized}
    left = (*selection.kept, *selection.stacked)
    patterns: dict[str, None] = dict.fromkeys(left)
    for module in left:
        parent, _, leaf = module.rpartition(".")
        names = sorted({leaf, *(fused for fused, parts in FUSED.items() if leaf in parts)})
        leaf_pattern = re.escape(names[0]) if len(names) == 1 else f"(?:{'|'.join(map(re.escape, names))})"
        # A leaf that is kept everywhere needs no path, and engines rename the paths of drafts.
        path = f"{re.escape(parent)}\\." if parent and leaf in quantized_leaves else ""
        patterns[f"re:(?:.*\\.)?{path}{leaf_pattern}$"] = None
    return list(patterns)


def _match_all(modules: Iterable[str], patterns: Sequence[str], option: str) -> set[str]:
    modules = list(modules)
    found: set[str] = set()
    for pattern in patterns:
        hits = _matching(modules, pattern, option)
        if not hits:
            raise ConfigError(
                f"{option} {pattern!r} matches no linear layer of this checkpoint; it has "
                f"{', '.join(modules[:8])}{' and more' if len(modules) > 8 else ''}."
            )
        found |= hits
    return found


def _matching(modules: Iterable[str], pattern: str, option: str) -> set[str]:
    try:
        return {module for module in modules if matches(_canonical(pattern), module)}
    except re.error as error:
        raise ConfigError(f"{option} {pattern!r} is no valid expression: {error}.") from error


def _canonical(pattern: str) -> str:
    """Let a user name a layer by its weight."""
    return pattern.removesuffix(".weight") if not pattern.startswith("re:") else pattern


def _check_fused(quantized: Sequence[str], kept: Sequence[str]) -> None:
    left = set(kept)
    for module in quantized:
        parent, dot, leaf = module.rpartition(".")
        for fused, parts in FUSED.items():
            siblings = {f"{parent}{dot}{part}" for part in parts} if leaf in parts else set()
            if split := siblings & left:
                raise ConfigError(
                    f"{module} would be quantized and {', '.join(sorted(split))} not, but every engine joins them "
                    f"into one {fused}. Exclude all of {', '.join(parts)} there, or none."
                )
