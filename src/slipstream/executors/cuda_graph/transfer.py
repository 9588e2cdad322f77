"""What travels between host and device, through pinned memory, so that neither waits for what it does not need."""

from collections.abc import Sequence

import torch
from torch import Tensor

from slipstream.kernels import Sampled

Values = Tensor | Sequence[int] | Sequence[Sequence[int]]


def staged(values: Values, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return values where the device can fetch them by itself; torch keeps that memory until it has."""
    here = torch.as_tensor(values, dtype=dtype)
    return here.pin_memory() if device.type == "cuda" else here


def upload(values: Values, destination: Tensor) -> None:
    """Copy values to where the device has a place for them."""
    destination.copy_(staged(values, destination.dtype, destination.device), non_blocking=True)


class Arrival:
    """Tensors on their way to the host, and the moment they are there."""

    def __init__(self, tensors: tuple[Tensor, ...]) -> None:
        self._done: torch.cuda.Event | None = None
        if tensors[0].device.type != "cuda":
            self._tensors = tuple(tensor.clone() for tensor in tensors)
            return
        self._tensors = tuple(torch.empty_like(tensor, device="cpu", pin_memory=True) for tensor in tensors)
        for there, tensor in zip(self._tensors, tensors, strict=True):
            there.copy_(tensor, non_blocking=True)
        self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._done.record()

    def wait(self) -> tuple[Tensor, ...]:
        """Return the tensors once they are there."""
        if self._done is not None:
            self._done.synchronize()
        return self._tensors


def download(sampled: Sampled) -> Arrival:
    """Send down what was sampled."""
    return Arrival((sampled.tokens_L, sampled.logprob_L, sampled.top_ids_LK, sampled.top_logprobs_LK))


def read(arrival: Arrival) -> Sampled:
    """Return what was sampled, once it is there."""
    return Sampled(*arrival.wait())
