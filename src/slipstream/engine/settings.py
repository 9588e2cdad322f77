"""Settings and sampling as keywords: `LLM("model", max_context=8192)`, `llm.chat(messages, temperature=0.7)`.

The two typed dictionaries repeat the fields of the dataclasses they become, so that editors and type checkers know the
keywords; a test holds them to those fields.
"""

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypedDict, get_args, get_origin, get_type_hints

from slipstream.engine.config import CudaGraphs, EngineConfig, KvCacheDtype
from slipstream.engine.loading import LoadOptions
from slipstream.errors import ConfigError, RequestError, SlipstreamError
from slipstream.kernels import KernelChoice
from slipstream.models.topology import Topology
from slipstream.speculation.grammar import Grammar
from slipstream.speculation.sampling import SamplingParams
from slipstream.speculation.tree import TreeShape


class Settings(TypedDict, total=False):
    """How to run a model, beyond its name, draft, tree and device: see LoadOptions, EngineConfig and Topology."""

    dtype: str
    kernels: KernelChoice
    tiles: Mapping[str, int]
    max_context: int | None
    memory_fraction: float | None
    page_size: int
    num_pages: int | None
    max_requests: int | None
    max_batch_tokens: int | None
    prefill_share: float
    kv_cache_dtype: KvCacheDtype
    draft_kv_cache_dtype: KvCacheDtype | None
    prefix_cache: bool
    draft_window: int | None
    borrowed_tokens: int
    copied_tokens: int | None
    earlier_tokens: int
    cuda_graphs: CudaGraphs
    tp: int
    ep: int
    draft_tp: int


class Sampling(TypedDict, total=False):
    """How a request wants its tokens chosen, and when it ends: see SamplingParams."""

    max_tokens: int
    min_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: Mapping[int, float]
    seed: int | None
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    logprobs: int | None
    prompt_logprobs: int | None
    n: int
    grammar: Grammar | None
    cache_salt: str


def load_options(
    model: str | Path | LoadOptions,
    draft: str | Path | None,
    tree: TreeShape | None,
    device: str,
    settings: Mapping[str, Any],  # checked here
) -> LoadOptions:
    """Return what an `LLM(...)` call asks for; ConfigError names a setting that is not one."""
    if isinstance(model, LoadOptions):
        if settings or (draft, tree, device) != ("auto", None, "auto"):
            raise ConfigError("LoadOptions names everything already; put draft, tree, device and settings inside it.")
        return model
    if not isinstance(model, str | Path):
        raise ConfigError(f"model is {_named(model)}; it is a folder, a .gguf file, a hub id, or 'embedded'.")
    if not isinstance(draft, str | Path | None):
        raise ConfigError(f"draft is {_named(draft)}; it is a folder, a hub id, 'auto', 'ngram', or None for no draft.")
    if not isinstance(tree, TreeShape | None):
        raise ConfigError(f"tree is {_named(tree)}; give a TreeShape, such as TreeShape(depth=5, width=4, budget=16).")
    _check(settings, get_type_hints(Settings), "LLM", "setting", ConfigError)
    engine = {field.name for field in fields(EngineConfig)} - {field.name for field in fields(LoadOptions)}
    split = {field.name for field in fields(Topology)}
    return LoadOptions(
        model,
        "none" if draft is None else draft,
        tree,
        device,
        engine=EngineConfig(**_of(settings, engine)),
        topology=Topology(**_of(settings, split)),
        **_of(settings, settings.keys() - engine - split),
    )


def sampling_params(params: SamplingParams | None, given: Mapping[str, Any]) -> SamplingParams:  # checked here
    """Return a request's sampling, given as a SamplingParams, as keywords, or not at all."""
    if params is not None and not isinstance(params, SamplingParams):
        raise RequestError(
            f"params is {_named(params)}; give a SamplingParams, or its fields by name, as in temperature=0.7."
        )
    if not given:
        return params or SamplingParams()
    _check(given, get_type_hints(Sampling), "A request", "field", RequestError)
    if params is not None:
        raise RequestError(
            f"A SamplingParams and {', '.join(given)} beside it: give one or the other, or change a copy with "
            "dataclasses.replace."
        )
    stop = given.get("stop", ())
    listed = {"stop": (stop,) if isinstance(stop, str) else tuple(stop)}
    return SamplingParams(**{**given, **listed, "stop_token_ids": tuple(given.get("stop_token_ids", ()))})


def _of(settings: Mapping[str, Any], names: set[str]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if name in names}


def _check(
    given: Mapping[str, Any], hints: Mapping[str, Any], owner: str, what: str, error: type[SlipstreamError]
) -> None:
    """Refuse a name that is not known, with the nearest that is, and a value of a wrong type."""
    for name, value in given.items():
        if name not in hints:
            near = difflib.get_close_matches(name, hints, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(hints)}."
            raise error(f"{owner} has no {what} {name!r}; {hint}")
        if not _fits(value, hints[name]):
            raise error(f"{name} is {_named(value)}; it is {_described(hints[name])}.")


def _fits(value: object, hint: Any) -> bool:  # a type as annotations write it
    origin = get_origin(hint)
    if origin is Literal:
        return value in get_args(hint)
    if origin in (Mapping, Sequence):
        return isinstance(value, origin) and not isinstance(value, str | bytes)
    if origin is UnionType:
        return any(_fits(value, part) for part in get_args(hint))
    if hint is Grammar:
        return hasattr(value, "start")
    if isinstance(value, bool):
        return hint is bool
    return isinstance(value, int | float if hint is float else hint)


def _described(hint: Any) -> str:  # a type as annotations write it
    origin = get_origin(hint)
    if origin is Literal:
        return " or ".join(map(repr, get_args(hint)))
    if origin is UnionType:
        return " or ".join(_described(part) for part in get_args(hint))
    return _WORDS[origin or hint]


_WORDS: dict[object, str] = {
    int: "a whole number",
    float: "a number",
    bool: "True or False",
    str: "text",
    NoneType: "None",
    Grammar: "a compiled grammar",
    Mapping: "a mapping",
    Sequence: "a list",
}


def _named(value: object) -> str:
    """Show a wrong value, cut where it is long, with its type."""
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({type(value).__name__})"
