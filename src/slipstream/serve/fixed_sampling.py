"""Sampling that a model's maker prescribes (off by default): other values are refused, as the maker's service does."""

from collections.abc import Mapping
from dataclasses import dataclass

from slipstream.errors import ConfigError
from slipstream.serve.defaults import SamplingDefaults
from slipstream.serve.errors import HttpError
from slipstream.serve.protocol import ChatRequest, CompletionRequest


@dataclass(frozen=True)
class FixedSampling:
    """The only values of sampling settings, by field; what a request leaves out has the defaults."""

    name: str
    allowed: Mapping[str, tuple[float, ...]]
    defaults: SamplingDefaults


# Kimi's service: 0.6 without thinking, 1.0 with it (0 for tests that want the same answer twice), the rest as is.
_KIMI = FixedSampling(
    "kimi",
    {"temperature": (0.0, 0.6, 1.0), "top_p": (0.95,), "presence_penalty": (0,), "frequency_penalty": (0,), "n": (1,)},
    SamplingDefaults(temperature=1.0, top_p=0.95),
)
FIXED_SAMPLING = {_KIMI.name: _KIMI}


def fixed_sampling(name: str | None) -> FixedSampling | None:
    """Return what --fixed-sampling names."""
    if name is None:
        return None
    if name not in FIXED_SAMPLING:
        raise ConfigError(f"--fixed-sampling is {name!r}; it knows {', '.join(sorted(FIXED_SAMPLING))}.")
    return FIXED_SAMPLING[name]


def check_fixed(request: ChatRequest | CompletionRequest, fixed: FixedSampling) -> None:
    """Raise for a setting that is not as prescribed."""
    for field, allowed in fixed.allowed.items():
        value = getattr(request, field)
        if value is not None and value not in allowed:
            choices = " or ".join(f"{one:g}" for one in allowed)
            raise HttpError(
                400,
                f"{field} is {value:g}; this server takes {choices} only (--fixed-sampling {fixed.name}).",
                param=field,
            )
