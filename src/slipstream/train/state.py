"""A run's state on disk: everything the next step depends on, replaced whole or not at all."""

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slipstream.train.corpus import disk_error
from slipstream.train.errors import TrainingError

_VERSION = 1


@dataclass(frozen=True)
class TrainState:
    """Where a run stands; batches follow from `step` alone. History and config are JSON for records, hence Any."""

    step: int
    total_steps: int
    history: list[dict[str, Any]]
    config: dict[str, Any]

    @property
    def finished(self) -> bool:
        """Whether every step was taken."""
        return self.step >= self.total_steps


def save_state(path: Path, state: TrainState, tensors: dict[str, Tensor], optimizer: dict[str, Any]) -> None:
    """Write the state under a temporary name, force it to the disk, and rename."""
    content = {
        "version": _VERSION,
        "state": asdict(state),
        "tensors": tensors,
        "optimizer": optimizer,
        "random": torch.get_rng_state(),
    }
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except (OSError, RuntimeError) as error:  # torch's writer wraps a full disk in a RuntimeError
        temporary.unlink(missing_ok=True)
        raise disk_error(path, error) from error


def load_state(path: Path, device: torch.device) -> tuple[TrainState, dict[str, Tensor], dict[str, Any]] | None:
    """Read a state back, or return None where there is none; the random state is set as it was."""
    if not path.is_file():
        return None
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise TrainingError(f"{path}: cannot be read ({reason}); delete it to start over.") from error
    if content.get("version") != _VERSION:
        raise TrainingError(f"{path}: was written by another version of slipstream; delete it to start over.")
    torch.set_rng_state(content["random"])
    tensors = {name: tensor.to(device) for name, tensor in content["tensors"].items()}
    return TrainState(**content["state"]), tensors, content["optimizer"]
