"""A server's command line read back into a recipe's settings: flags, environment, and how it drafts."""

import json
import re
import shlex
from dataclasses import dataclass, field
from typing import Any, Literal

from slipstream.bench.recipe_file import RecipeError
from slipstream.launch.settings import FlagValue

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_PROGRAMS = (("vllm", "serve"), ("sglang.launch_server",), ("sglang", "serve"))
# What a recipe says elsewhere: the target, the port, the topology, the context.
_SAID_ELSEWHERE = frozenset(
    {"model", "model-path", "port", "host", "tensor-parallel-size", "tp", "tp-size", "enable-expert-parallel", "ep"}
    | {"ep-size", "expert-parallel-size", "max-model-len", "context-length"}
)
_SGLANG = "speculative-"
_VLLM_KEYS = {"method", "model", "num_speculative_tokens", "draft_tensor_parallel_size"}


@dataclass(frozen=True)
class LineSpeculation:
    """How a line drafts, in a recipe's words."""

    method: Literal["eagle3", "ngram"]
    draft: str
    num_steps: int
    topk: int | None = None
    num_draft_tokens: int | None = None
    draft_tp: int | None = None


@dataclass(frozen=True)
class ServerLine:
    """What a line says beyond what a recipe says elsewhere (target, port, topology, context)."""

    flags: dict[str, FlagValue] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    speculation: LineSpeculation | None = None

    def is_given(self) -> bool:
        """Tell whether there was a line at all."""
        return bool(self.flags or self.env or self.speculation)


def read_server_line(text: str) -> ServerLine:
    """Read `NAME=VALUE ... vllm serve MODEL --flag value ...` (or SGLang's launcher); nothing in it is dropped."""
    try:
        words = shlex.split(text.replace("\\\n", " "), comments=True)
    except ValueError as error:
        raise RecipeError(f"--line cannot be read as a command ({error}).") from error
    env: dict[str, str] = {}
    while words and (match := _ASSIGNMENT.fullmatch(words[0])):
        env[match[1]] = match[2]
        words.pop(0)
    start = next((i + len(p) for i in range(len(words)) for p in _PROGRAMS if tuple(words[i : i + len(p)]) == p), None)
    if start is None:
        raise RecipeError("--line starts neither `vllm serve` nor `python -m sglang.launch_server`.")
    flags = _flags(words[start:])
    if variables := [word for word in words if "$" in word]:
        raise RecipeError(f"--line has {variables[0]}, a variable of its script; give the line as its log shows it.")
    speculation = _vllm_speculation(flags) or _sglang_speculation(flags)
    kept = {name: value for name, value in flags.items() if name not in _SAID_ELSEWHERE}
    return ServerLine(kept, env, speculation)


def _flags(words: list[str]) -> dict[str, FlagValue]:
    flags: dict[str, FlagValue] = {}
    values: dict[str, list[str]] = {}
    current = ""
    for word in words:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            current = name.replace("_", "-")
            if current in values:
                raise RecipeError(f"--line gives --{current} twice.")
            values[current] = [value] if equals else []
        elif current:
            values[current].append(word)
    for name, given in values.items():
        flags[name] = True if not given else given[0] if len(given) == 1 else tuple(given)
    return flags


def _vllm_speculation(flags: dict[str, FlagValue]) -> LineSpeculation | None:
    text = flags.pop("speculative-config", None)
    if text is None:
        return None
    try:
        config: Any = json.loads(str(text))
    except ValueError as error:
        raise RecipeError(f"--line: --speculative-config is not JSON ({error}).") from error
    if not isinstance(config, dict) or set(config) - _VLLM_KEYS:
        raise RecipeError(f"--line: --speculative-config {text} says more than {', '.join(sorted(_VLLM_KEYS))}.")
    if config.get("method") != "eagle3":
        raise RecipeError(f"--line drafts by {config.get('method')!r}; a recipe can say eagle3.")
    draft_tp = config.get("draft_tensor_parallel_size")
    return LineSpeculation("eagle3", str(config["model"]), int(config["num_speculative_tokens"]), draft_tp=draft_tp)


def _sglang_speculation(flags: dict[str, FlagValue]) -> LineSpeculation | None:
    algorithm = flags.pop(f"{_SGLANG}algorithm", None)
    if algorithm is None:
        return None
    if str(algorithm).upper() != "EAGLE3":
        raise RecipeError(f"--line drafts by {algorithm}; a recipe can say EAGLE3.")
    draft = flags.pop(f"{_SGLANG}draft-model-path", flags.pop(f"{_SGLANG}draft-model", None))
    numbers = [flags.pop(f"{_SGLANG}{name}", None) for name in ("num-steps", "eagle-topk", "num-draft-tokens")]
    if draft is None or any(number is None for number in numbers):
        raise RecipeError("--line: EAGLE3 needs its draft's path, num-steps, eagle-topk and num-draft-tokens.")
    steps, topk, tokens = (int(str(number)) for number in numbers)
    return LineSpeculation("eagle3", str(draft), steps, topk, tokens)
