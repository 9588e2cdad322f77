"""The flags of other servers' launch lines, turned into our settings. One we cannot honour is an error.

SGLang counts `--speculative-num-draft-tokens` with the root, we count drafted nodes; vLLM's `num_speculative_tokens`
is a chain's length.
"""

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.engine.loading import LoadOptions
from slipstream.errors import ConfigError
from slipstream.models.topology import Topology
from slipstream.serve.config import LearnConfig
from slipstream.speculation.tree import TreeShape

_SGLANG_FLAGS = ("speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens")
_VLLM_KEYS = frozenset(
    {
        "method",
        "model",
        "num_speculative_tokens",
        "draft_tensor_parallel_size",
        "rejection_sample_method",
        "synthetic_acceptance_rates",
    }
)


@dataclass(frozen=True)
class Speculation:
    """What a launch line says about speculation; None where it says nothing."""

    draft: str | None = None
    tree: TreeShape | None = None
    simulated_acceptance: tuple[float, ...] | None = None
    draft_tp: int | None = None


@dataclass(frozen=True)
class SglangFlags:
    """SGLang's flags for speculation, as given."""

    speculative_algorithm: str | None = None
    speculative_draft_model_path: str | None = None
    speculative_num_steps: int | None = None
    speculative_eagle_topk: int | None = None
    speculative_num_draft_tokens: int | None = None


DEFAULT_TREE = TreeShape()


def learning(folder: Path | None, max_tokens: int, elsewhere: bool, options: LoadOptions) -> LearnConfig | None:
    """Return what --learn asks for, with the command of the trainer beside the server."""
    if folder is None:
        return None
    if options.topology.tp > 1 or options.draft in ("ngram", "none"):
        raise ConfigError("--learn adapts an EAGLE-3 draft of a target on one device; leave out --tp and name a draft.")
    line = (sys.executable, "-m", "slipstream", "learn", str(folder), "--target", str(options.model))
    trainer = () if elsewhere else (*line, "--draft", str(options.draft), "--device", options.device)
    return LearnConfig(folder, max_tokens, trainer)


def named_model(model: str | None, model_path: str | None) -> str:
    """Return the model a launch line names, in either way, or the embedded one."""
    if model is not None and model_path is not None:
        raise ConfigError("The model is named twice: as MODEL and with --model-path (--model).")
    named = model if model is not None else model_path
    return "embedded" if named is None else named


def own_speculation(
    draft: str | None, depth: int | None, width: int | None, budget: int | None, simulated: str | None
) -> Speculation:
    """Return what our own flags ask for."""
    tree = None
    if depth is not None or width is not None or budget is not None:
        tree = TreeShape(
            depth=DEFAULT_TREE.depth if depth is None else depth,
            width=DEFAULT_TREE.width if width is None else width,
            budget=DEFAULT_TREE.budget if budget is None else budget,
        )
    try:
        rates = None if simulated is None else tuple(float(rate) for rate in simulated.split(",") if rate)
    except ValueError:
        raise ConfigError(f"--simulated-acceptance is {simulated!r}; give rates such as 0.8,0.6,0.4.") from None
    return Speculation(draft, tree, rates)


def keys_in(file: Path | None) -> tuple[str, ...]:
    """Return the API keys of a file, one a line."""
    if file is None:
        return ()
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"--api-key-file {file}: cannot be read ({error.strerror or error}).") from error
    keys = tuple(line.strip() for line in lines if line.strip())
    if not keys:
        raise ConfigError(f"--api-key-file {file}: holds no key, which would let everybody in.")
    return keys


def topology(tp: int, ep: int | None, deal_experts: bool, draft_tp: int | None, speculation: Speculation) -> Topology:
    """Return the split the launch line asks for; vLLM's flag for experts gives every rank whole ones."""
    if deal_experts and ep not in (None, tp):
        raise ConfigError(f"--ep is {ep}, but --enable-expert-parallel means --ep {tp} (the tp ranks); give one.")
    if draft_tp is not None and speculation.draft_tp not in (None, draft_tp):
        raise ConfigError(
            f"--draft-tp is {draft_tp}, and draft_tensor_parallel_size in --speculative-config is "
            f"{speculation.draft_tp}; give one."
        )
    return Topology(tp, tp if deal_experts else ep or 1, draft_tp or speculation.draft_tp or 1)


def sglang_speculation(flags: SglangFlags) -> Speculation:
    """Return what SGLang's flags ask for."""
    algorithm = flags.speculative_algorithm
    numbers = [getattr(flags, name) for name in _SGLANG_FLAGS]
    if algorithm is None:
        given = [name for name in (*_SGLANG_FLAGS, "speculative_draft_model_path") if getattr(flags, name) is not None]
        if given:
            raise ConfigError(f"{_option(given[0])} needs --speculative-algorithm (EAGLE3, DFLASH or NGRAM).")
        return Speculation()
    if algorithm.upper() not in ("EAGLE3", "DFLASH", "NGRAM"):
        raise ConfigError(f"--speculative-algorithm is {algorithm}; this server knows EAGLE3, DFLASH and NGRAM.")
    if algorithm.upper() == "DFLASH":
        return _sglang_block(flags)
    if any(number is None for number in numbers) and any(number is not None for number in numbers):
        raise ConfigError(f"Give all of {', '.join(map(_option, _SGLANG_FLAGS))}, or none of them.")
    tree = None if numbers[0] is None else _sglang_tree(*numbers)
    if algorithm.upper() == "NGRAM":
        if flags.speculative_draft_model_path is not None:
            raise ConfigError("--speculative-algorithm NGRAM has no --speculative-draft-model-path; leave it out.")
        return Speculation("ngram", tree)
    if flags.speculative_draft_model_path is None:
        raise ConfigError("--speculative-algorithm EAGLE3 needs --speculative-draft-model-path.")
    return Speculation(flags.speculative_draft_model_path, tree)


def vllm_speculation(text: str | None) -> Speculation:
    """Return what vLLM's --speculative-config asks for."""
    if text is None:
        return Speculation()
    try:
        config = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"--speculative-config is not JSON ({error}).") from error
    if not isinstance(config, dict):
        raise ConfigError("--speculative-config must be a JSON object.")
    if unknown := sorted(set(config) - _VLLM_KEYS):
        raise ConfigError(
            f"--speculative-config has {unknown[0]!r}, which this server cannot honour. It knows "
            f"{', '.join(sorted(_VLLM_KEYS))}."
        )
    draft_tp = config.get("draft_tensor_parallel_size")
    if draft_tp is not None and (not isinstance(draft_tp, int) or isinstance(draft_tp, bool)):
        raise ConfigError(f"--speculative-config: draft_tensor_parallel_size is {draft_tp!r}; it is a whole number.")
    return Speculation(_vllm_draft(config), _vllm_chain(config), _vllm_rates(config), draft_tp)


def first_named(*found: Speculation) -> Speculation:
    """Return the one launch line's worth that says anything; two are an error."""
    speaking = [one for one in found if one != Speculation()]
    if len(speaking) > 1:
        raise ConfigError(
            "Speculation is described twice: use --draft, or SGLang's flags, or vLLM's --speculative-config."
        )
    return speaking[0] if speaking else Speculation()


def _sglang_block(flags: SglangFlags) -> Speculation:
    """Return what SGLang's flags ask of a DFlash draft, whose chain has a node for each token of a block."""
    given = [name for name in _SGLANG_FLAGS[:2] if getattr(flags, name) is not None]
    if given:
        raise ConfigError(f"--speculative-algorithm DFLASH has no {_option(given[0])}; leave it out.")
    if flags.speculative_draft_model_path is None:
        raise ConfigError("--speculative-algorithm DFLASH needs --speculative-draft-model-path.")
    nodes = flags.speculative_num_draft_tokens
    tree = None if nodes is None else _sglang_tree(nodes - 1, 1, nodes)
    return Speculation(flags.speculative_draft_model_path, tree)


def _sglang_tree(num_steps: int, topk: int, num_draft_tokens: int) -> TreeShape:
    if num_draft_tokens < 2:
        raise ConfigError(
            f"--speculative-num-draft-tokens is {num_draft_tokens}; it counts the root, so 2 is the least."
        )
    if topk == 1 and num_draft_tokens != num_steps + 1:
        raise ConfigError(
            f"--speculative-num-draft-tokens is {num_draft_tokens}; a chain (--speculative-eagle-topk 1) of "
            f"{num_steps} steps has {num_steps + 1}."
        )
    shape = TreeShape(depth=num_steps, width=topk, budget=num_draft_tokens - 1)
    if shape.num_nodes != num_draft_tokens:
        raise ConfigError(
            f"--speculative-num-draft-tokens is {num_draft_tokens}; {num_steps} steps of top-{topk} make only "
            f"{shape.num_nodes} nodes with the root."
        )
    return TreeShape.chain(num_steps) if topk == 1 else shape


def _vllm_draft(config: Mapping[str, Any]) -> str:
    method, model = config.get("method"), config.get("model")
    if method == "ngram":
        if model not in (None, "ngram"):
            raise ConfigError("--speculative-config: method ngram has no model; leave it out.")
        return "ngram"
    if method not in (None, "eagle3", "dflash"):
        raise ConfigError(f"--speculative-config: method is {method!r}; this server knows eagle3, dflash and ngram.")
    if not isinstance(model, str):
        raise ConfigError(
            f"--speculative-config: method {method or 'eagle3'} needs a model (a draft's folder or hub id)."
        )
    return model


def _vllm_chain(config: Mapping[str, Any]) -> TreeShape:
    length = config.get("num_speculative_tokens")
    if not isinstance(length, int) or isinstance(length, bool):
        raise ConfigError("--speculative-config needs num_speculative_tokens, a whole number.")
    return TreeShape.chain(length)


def _vllm_rates(config: Mapping[str, Any]) -> tuple[float, ...] | None:
    method, rates = config.get("rejection_sample_method", "standard"), config.get("synthetic_acceptance_rates")
    if method == "standard" and rates is None:
        return None
    if method != "synthetic" or not isinstance(rates, list) or not all(isinstance(r, int | float) for r in rates):
        raise ConfigError(
            "--speculative-config: rejection_sample_method is standard, or synthetic with synthetic_acceptance_rates."
        )
    return tuple(float(rate) for rate in rates)


def _option(field: str) -> str:
    return "--" + field.replace("_", "-")
