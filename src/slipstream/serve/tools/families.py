"""Which syntax a model writes its calls and its reasoning in: by flag, or from its chat template."""

from dataclasses import dataclass

from slipstream.errors import ConfigError
from slipstream.serve.tools import element_calls, gemma4, harmony, json_calls, marked_calls
from slipstream.serve.tools.element_calls import Elements
from slipstream.serve.tools.parser import NewId, Syntax, random_id
from slipstream.serve.tools.reasoning import END, REASONING, START, Reasoning


@dataclass(frozen=True)
class Family:
    """A syntax of tool calls.

    Args:
        markers: what begins or ends its parts; in some models these are special tokens.
        channels: whether its answers are messages on channels (`harmony.py`).
        elements: what its parameters are written as, where they are no JSON but elements.
    """

    name: str
    syntax: Syntax
    markers: tuple[str, ...]
    new_id: NewId = random_id
    channels: bool = False
    elements: Elements | None = None


def _of_elements(name: str, spelling: Elements) -> Family:
    return Family(name, element_calls.elements(spelling), spelling.markers, elements=spelling)


_KIMI = (
    marked_calls.KIMI_SECTION,
    marked_calls.KIMI_SECTION_END,
    marked_calls.KIMI_CALL,
    marked_calls.KIMI_ARGUMENTS,
    marked_calls.KIMI_CALL_END,
)
_DEEPSEEK = (
    marked_calls.DEEPSEEK_SECTION,
    marked_calls.DEEPSEEK_SECTION_END,
    marked_calls.DEEPSEEK_CALL,
    marked_calls.DEEPSEEK_SEPARATOR,
    marked_calls.DEEPSEEK_CALL_END,
)
_MISTRAL = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")
FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        Family("kimi_k2", marked_calls.kimi_k2, _KIMI),
        _of_elements("minimax_m2", element_calls.MINIMAX),
        _of_elements("qwen3_coder", element_calls.QWEN3_CODER),
        _of_elements("glm45", element_calls.GLM_ON_LINES),
        _of_elements("glm47", element_calls.GLM),
        Family("gemma4", gemma4.gemma4, gemma4.MARKERS),
        Family("hermes", json_calls.hermes, ("<tool_call>", "</tool_call>")),
        Family("llama3_json", json_calls.llama3_json, ("<|python_tag|>",)),
        Family("mistral", json_calls.mistral, _MISTRAL, json_calls.mistral_id),
        Family("mistral_v11", json_calls.mistral, _MISTRAL, json_calls.mistral_id),
        Family("deepseek_v3", marked_calls.deepseek, _DEEPSEEK),
        Family("deepseek_v31", marked_calls.deepseek, _DEEPSEEK),
        Family("openai", harmony.channels(), harmony.MARKERS, channels=True),
    )
}
_ALIASES = {
    "deepseek": "deepseek_v3",
    "deepseekv3": "deepseek_v3",
    "deepseekv31": "deepseek_v31",
    "qwen25": "hermes",
    "qwen": "hermes",
    "llama3": "llama3_json",
    "minimax-m2": "minimax_m2",
    "gpt-oss": "openai",
    "glm": "glm45",
    "qwen3_xml": "qwen3_coder",
}
_REASONING_ALIASES = {
    "qwen3-thinking": "qwen3",
    "deepseek-r1": "deepseek_r1",
    "minimax": "minimax_m2",
    "minimax-m2": "minimax_m2",
    "gpt-oss": "openai_gptoss",
    "glm47": "glm45",
}
OFF = "none"


def tool_family(flag: str | None, template: str | None) -> Family | None:
    """Return the syntax of a model's calls: the flag's, or the one its template writes; None if there is none."""
    name = _ALIASES.get(flag, flag) if flag is not None else _tools_in(template or "")
    if name is None or name == OFF:
        return None
    if name not in FAMILIES:
        raise ConfigError(f"--tool-call-parser is {flag}; this server knows {', '.join(FAMILIES)} and {OFF}.")
    return FAMILIES[name]


def reasoning_family(flag: str | None, template: str | None) -> Reasoning | None:
    """Return how a model reasons: as the flag says, or as its template does; None if it does not."""
    name = _REASONING_ALIASES.get(flag, flag) if flag is not None else _reasoning_in(template or "")
    if name is None or name == OFF:
        return None
    if name not in REASONING:
        raise ConfigError(f"--reasoning-parser is {flag}; this server knows {', '.join(REASONING)} and {OFF}.")
    return REASONING[name]


def _tools_in(template: str) -> str | None:
    """Return the family whose markers a template writes; one that knows no tools gets them in Hermes's."""
    if harmony.CHANNEL in template:
        return "openai"
    if marked_calls.KIMI_CALL in template:
        return "kimi_k2"
    if "minimax:tool_call" in template:
        return "minimax_m2"
    if marked_calls.DEEPSEEK_CALL in template:
        return "deepseek_v3" if "```json" in template else "deepseek_v31"
    if "[TOOL_CALLS]" in template:
        return "mistral_v11" if "[ARGS]" in template else "mistral"
    if "<tool_call>" in template:
        return _behind_tool_call(template)
    if gemma4.CALL in template and gemma4.CALL_END in template:
        return "gemma4"
    if "<|python_tag|>" in template or ('"parameters"' in template and "<|eot_id|>" in template):
        return "llama3_json"
    return None if "tools" in template else "hermes"


def _behind_tool_call(template: str) -> str:
    """Return which of the families that share `<tool_call>` a template writes."""
    if element_calls.GLM.key in template:
        on_lines = element_calls.GLM.key_end + element_calls.GLM.value not in template
        return "glm45" if on_lines else "glm47"
    return "qwen3_coder" if element_calls.QWEN3_CODER.call in template else "hermes"


def _reasoning_in(template: str) -> str | None:
    if harmony.CHANNEL in template:
        return "openai_gptoss"
    if gemma4.THOUGHT in template and gemma4.THOUGHT_END in template:
        return "gemma4"
    if END not in template and START not in template:
        return None
    if marked_calls.KIMI_CALL in template:
        return "kimi_k2"
    if "minimax:tool_call" in template:
        return "minimax_m2"
    if marked_calls.DEEPSEEK_CALL in template:
        return "deepseek_r1"
    return "glm45" if element_calls.GLM.key in template else "qwen3"
