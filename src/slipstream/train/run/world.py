"""The processes of a run: one, or several started by torchrun, whose gradients add up to those of one."""

import datetime
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from slipstream.engine.device import named_device

# One process makes the data while the others wait, and that may take long.
_PATIENCE = datetime.timedelta(days=2)


@dataclass(frozen=True)
class World:
    """This process's place among `size`; one process needs no communication at all."""

    rank: int = 0
    size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @staticmethod
    def join(device: torch.device) -> "World":
        """Return the place torchrun gave this process, joining the others; alone where torchrun is not in use."""
        if not dist.is_torchelastic_launched():
            return World(device=device)
        if not dist.is_initialized():
            dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=_PATIENCE)
        return World(dist.get_rank(), dist.get_world_size(), device)

    def wait(self) -> None:
        """Wait until every process has come here."""
        self.agree(False)

    def leave(self) -> None:
        """Part from the others, at the end."""
        if self.size > 1:
            dist.destroy_process_group()

    def sum(self, values: Tensor) -> Tensor:
        """Add a tensor up over processes."""
        if self.size > 1:
            values = values.clone()
            dist.all_reduce(values)
        return values

    def sum_gradients(self, parameters: Sequence[Tensor]) -> None:
        """Add gradients up over processes, in one message."""
        if self.size == 1:
            return
        gradients = [p.grad for p in parameters if p.grad is not None]
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(flat)
        start = 0
        for gradient in gradients:
            gradient.copy_(flat[start : start + gradient.numel()].view_as(gradient))
            start += gradient.numel()

    def agree(self, flag: bool) -> bool:
        """Tell whether any process says yes."""
        return flag if self.size == 1 else bool(self.sum(torch.tensor(float(flag), device=self.device)) > 0)

    def first(self, value: int) -> int:
        """Return the first process's value everywhere."""
        if self.size == 1:
            return value
        shared = torch.tensor(value if self.rank == 0 else 0, device=self.device)
        return int(self.sum(shared))


def local_device(name: str) -> torch.device:
    """Return the device asked for, "auto" being a GPU if there is one; processes of one machine take a GPU each."""
    device = named_device(name)
    if device.type == "cuda" and dist.is_torchelastic_launched():
        device = torch.device("cuda", dist.get_node_local_rank())
        torch.cuda.set_device(device)
    return device
