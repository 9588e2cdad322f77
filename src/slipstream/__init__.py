"""Slipstream: EAGLE-3 speculative decoding, end to end.

>>> from slipstream import LLM
>>> LLM().chat([{"role": "user", "content": "Why is the sky blue?"}]).text

The names below are imported when they are first used, so that `import slipstream` is quick and loads no torch.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from slipstream.engine.async_llm import AsyncLLM
    from slipstream.engine.completion import Completion
    from slipstream.engine.llm import LLM
    from slipstream.engine.output import Emission
    from slipstream.errors import SlipstreamError
    from slipstream.speculation.sampling import SamplingParams
    from slipstream.speculation.tree import TreeShape

__version__ = "0.1.0"
__all__ = ["LLM", "AsyncLLM", "Completion", "Emission", "SamplingParams", "SlipstreamError", "TreeShape", "__version__"]

_HOMES = {
    "LLM": "slipstream.engine.llm",
    "AsyncLLM": "slipstream.engine.async_llm",
    "Completion": "slipstream.engine.completion",
    "Emission": "slipstream.engine.output",
    "SamplingParams": "slipstream.speculation.sampling",
    "SlipstreamError": "slipstream.errors",
    "TreeShape": "slipstream.speculation.tree",
}


def __getattr__(name: str) -> object:
    """Import a public name when it is first asked for (PEP 562)."""
    if name not in _HOMES:
        raise AttributeError(f"module 'slipstream' has no attribute {name!r}; it has {', '.join(sorted(_HOMES))}")
    found: object = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = found  # the next look-up finds it without this function
    return found


def __dir__() -> list[str]:
    """List the public names, imported or not, for completion."""
    return sorted({*globals(), *_HOMES})
