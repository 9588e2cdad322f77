"""The processes of a run: one, or several started by torchrun, whose gradients add up to those of one."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor


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
            dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        return World(dist.get_rank(), dist.get_world_size(), device)

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
