"""A file of kernel choices for a server: which kernels, and tile shapes in place of the shipped ones."""

from dataclasses import dataclass, field
from pathlib import Path

import yaml

from slipstream.errors import ConfigError
from slipstream.kernels import KernelChoice
from slipstream.records.schema import SchemaError, read


@dataclass(frozen=True)
class KernelSettings:
    """What the file may say.

    Args:
        kernels: a kernel path by name (`slipstream doctor`).
        experts: tile shapes of the experts' products by name: `block_t`, `stage1.block_n`, `stage2.block_k`, ...
    """

    kernels: KernelChoice = "auto"
    experts: dict[str, int] = field(default_factory=dict)


def read_kernel_settings(path: Path | None) -> KernelSettings:
    """Read the file (YAML or JSON); without one, everything is as shipped."""
    if path is None:
        return KernelSettings()
    try:
        value = yaml.safe_load(path.read_text(encoding="utf-8"))
        return read(KernelSettings, value or {}, path.name)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"--kernel-settings {path}: cannot be read ({error}).") from error
    except SchemaError as error:
        raise ConfigError(f"--kernel-settings {error}") from error
