"""The device a user names: auto, cpu or cuda[:N]."""

import torch

from slipstream.errors import ConfigError


def named_device(name: str) -> torch.device:
    """Return the device of that name, "auto" being a GPU if there is one; raises ConfigError if it is not here."""
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "auto":
        return torch.device("cuda" if num_gpus else "cpu")
    kind, colon, index = name.partition(":")
    if name != "cpu" and (kind != "cuda" or (colon != "" and not index.isdecimal())):
        raise ConfigError(f"device is {name!r}; it is auto, cpu or cuda[:N].")
    if kind == "cuda" and not num_gpus:
        raise ConfigError(f"device is {name}, but torch sees no GPU here; run `slipstream doctor`.")
    if kind == "cuda" and int(index or 0) >= num_gpus:
        raise ConfigError(f"device is {name}, but torch sees {num_gpus} GPUs here, counted from 0.")
    return torch.device(name)
