"""What `pip install slipstream` leaves out, and the command that adds it, for whoever asks a verb that needs it."""

import functools
import importlib.util
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from slipstream.errors import ConfigError

P = ParamSpec("P")
R = TypeVar("R")

MODULES_OF: dict[str, tuple[str, ...]] = {
    "serve": ("fastapi", "uvicorn", "pydantic", "prometheus_client", "llguidance"),
    "bench": ("aiohttp",),
    "report": ("matplotlib",),
    "train": ("matplotlib",),
}
"""The modules each extra of pyproject.toml brings."""


def needs(extra: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Make a verb ask for its extra before it starts, not where it first uses it."""

    def decorate(verb: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(verb)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            for module in MODULES_OF[extra]:
                if importlib.util.find_spec(module) is None:
                    raise ConfigError(_sentence(module, extra))
            return verb(*args, **kwargs)

        return checked

    return decorate


def explained(error: ModuleNotFoundError) -> str | None:
    """Return what to install for a module that is not there; None if no extra brings it."""
    module = (error.name or "").partition(".")[0]
    for extra, modules in MODULES_OF.items():
        if module in modules:
            return _sentence(module, extra)
    return None


def _sentence(module: str, extra: str) -> str:
    return f"This needs {module}, which is not installed: pip install 'slipstream[{extra}]'"
