"""`slipstream serve`'s options in the words of other engines; one that an engine has no word for is refused.

The table holds what both sides mean by the same thing. Where they differ, the engine's own flags are given as they are
(`--engine-args`), and nothing is guessed.
"""

from collections.abc import Mapping

from slipstream.errors import ConfigError
from slipstream.launch.settings import FlagValue, ServerName

SPELLINGS: dict[str, dict[ServerName, str]] = {
    "served_model_name": {"vllm": "served-model-name", "sglang": "served-model-name"},
    "dtype": {"vllm": "dtype", "sglang": "dtype"},
    "device": {"sglang": "device"},
    "max_requests": {"vllm": "max-num-seqs", "sglang": "max-running-requests"},
    "max_batch_tokens": {"vllm": "max-num-batched-tokens", "sglang": "chunked-prefill-size"},
    "page_size": {"vllm": "block-size", "sglang": "page-size"},
    "kv_cache_dtype": {"vllm": "kv-cache-dtype", "sglang": "kv-cache-dtype"},
    "draft_kv_cache_dtype": {"sglang": "speculative-draft-kv-cache-dtype"},
    "memory_fraction": {"vllm": "gpu-memory-utilization", "sglang": "mem-fraction-static"},
    "api_key": {"vllm": "api-key", "sglang": "api-key"},
    "admin_key": {"sglang": "admin-api-key"},
    "root_path": {"vllm": "root-path", "sglang": "fastapi-root-path"},
    "tool_call_parser": {"vllm": "tool-call-parser", "sglang": "tool-call-parser"},
    "reasoning_parser": {"vllm": "reasoning-parser", "sglang": "reasoning-parser"},
    "trust_remote_code": {"vllm": "trust-remote-code", "sglang": "trust-remote-code"},
    "enable_auto_tool_choice": {"vllm": "enable-auto-tool-choice"},
    "log_level": {"vllm": "uvicorn-log-level", "sglang": "log-level"},
    "speculative_config": {"vllm": "speculative-config"},
    "speculative_algorithm": {"sglang": "speculative-algorithm"},
    "speculative_draft_model_path": {"sglang": "speculative-draft-model-path"},
    "speculative_num_steps": {"sglang": "speculative-num-steps"},
    "speculative_eagle_topk": {"sglang": "speculative-eagle-topk"},
    "speculative_num_draft_tokens": {"sglang": "speculative-num-draft-tokens"},
}
"""By the name of our option; an engine that is missing has no such flag."""
SWITCHES: dict[str, dict[ServerName, tuple[str, str]]] = {
    "prefix_cache": {
        "vllm": ("enable-prefix-caching", "no-enable-prefix-caching"),
        "sglang": ("", "disable-radix-cache"),
    },
    "disable_radix_cache": {"vllm": ("no-enable-prefix-caching", ""), "sglang": ("disable-radix-cache", "")},
}
"""Flags for on and off; "" is what an engine does anyway."""
VALUES: dict[tuple[ServerName, str], dict[str, str]] = {
    ("vllm", "tool_call_parser"): {"mistral_v11": "mistral"},
    ("sglang", "tool_call_parser"): {
        "minimax_m2": "minimax-m2",
        "llama3_json": "llama3",
        "mistral_v11": "mistral",
        "deepseek_v3": "deepseekv3",
        "deepseek_v31": "deepseekv31",
        "openai": "gpt-oss",
    },
    ("sglang", "kv_cache_dtype"): {"fp8": "fp8_e4m3"},
    ("sglang", "draft_kv_cache_dtype"): {"fp8": "fp8_e4m3"},
    ("sglang", "reasoning_parser"): {
        "minimax_m2": "minimax-append-think",
        "deepseek_r1": "deepseek-r1",
        "openai_gptoss": "gpt-oss",
    },
}
"""Values that an engine spells otherwise."""
LISTS: dict[str, tuple[ServerName, ...]] = {"served_model_name": ("vllm",), "api_key": ("vllm",)}
"""Options that may be given again, and the engines whose flag takes several values, too."""


def engine_flags(engine: ServerName, given: Mapping[str, object]) -> dict[str, FlagValue]:
    """Return the engine's flags for options of ours, by name; ConfigError for one it has no word for."""
    flags: dict[str, FlagValue] = {}
    for name, value in given.items():
        if name in SWITCHES:
            flag = SWITCHES[name][engine][0 if value else 1]
            flags |= {flag: True} if flag else {}
            continue
        flag = SPELLINGS.get(name, {}).get(engine, "")
        if not flag:
            raise ConfigError(
                f"{option(name)} is an option of slipstream's own engine, and {engine} has none like it. Leave it out, "
                f"or say it in {engine}'s words with --engine-args."
            )
        spelled = _spelled(engine, name, value)
        flags |= {} if spelled == "none" else {flag: spelled}
    if engine == "vllm" and "tool-call-parser" in flags:
        flags["enable-auto-tool-choice"] = True  # without it, vLLM reads the parser's name and does not use it
    return flags


def option(name: str) -> str:
    """Return an option as it is typed."""
    return "--" + name.replace("_", "-")


def _spelled(engine: ServerName, name: str, value: object) -> FlagValue:
    if isinstance(value, list | tuple):
        values = tuple(str(item) for item in value)
        if engine in LISTS.get(name, ()):
            return values
        if len(values) > 1:
            raise ConfigError(f"{option(name)} is given {len(values)} times; {engine} takes one.")
        return values[0]
    if isinstance(value, str):
        return VALUES.get((engine, name), {}).get(value, value)
    assert isinstance(value, bool | int | float), f"{name}: {value!r} is no flag's value"
    return value
