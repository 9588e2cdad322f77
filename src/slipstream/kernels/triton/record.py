"""Which kernels a pass launches on a GPU that need not be here: launches are recorded, and nothing runs.

Tensors are on torch's "meta" device, which has shapes and no numbers. Dispatch code runs as it does on the GPU, so what
is recorded is what would be launched there; `slipstream doctor --kernels` prints it, and tests compile it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from triton import JITFunction
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from slipstream.errors import KernelError

META = torch.device("meta")
_AMD = ("gfx942", "gfx950")
_PROCESSORS = {"sm_80": 108, "sm_89": 142, "sm_90": 132, "sm_100": 148, "sm_120": 188, "gfx942": 304, "gfx950": 256}
ARCHITECTURES = tuple(_PROCESSORS)
"""What launches can be recorded for, as A100, L40S, H200, B200, RTX 6000, MI300X and MI355X have processors."""


@dataclass(frozen=True)
class Recorded:
    """One launch, with what its kernel would be compiled from.

    Args:
        source: Triton's source object: function, types of arguments, constants.
        constants: the compile-time arguments, by name.
    """

    name: str
    module: str
    source: Any
    target: GPUTarget
    options: dict[str, Any]
    constants: dict[str, Any]

    @property
    def key(self) -> tuple[str, ...]:
        """What tells one compiled kernel from another."""
        return (self.module, self.name, self.source.hash(), str(sorted(self.options.items(), key=lambda item: item[0])))


@contextmanager
def recording(architecture: str) -> Iterator[list[Recorded]]:
    """Let dispatch code believe in a GPU of this architecture, and collect what it launches there."""
    target, launches = target_of(architecture), list[Recorded]()
    here = SimpleNamespace(
        get_current_device=lambda: architecture, get_current_stream=lambda device: 0, get_current_target=lambda: target
    )

    def record(
        self: Any, _key: Any, signature: Any, _device: Any, constants: Any, options: Any, attrs: Any, _warmup: Any
    ) -> None:  # in place of JITFunction._do_compile
        names = {path: self.arg_names[path[0]] for path in constants if len(path) == 1}
        launches.append(
            Recorded(
                self.fn.__name__,
                self.fn.__module__.removeprefix("slipstream.kernels."),
                self.ASTSource(self, signature, constants, attrs),
                target,
                dict(options.__dict__),
                {name: constants[path] for path, name in names.items()},
            )
        )

    amd = architecture in _AMD
    properties = SimpleNamespace(gcnArchName=architecture, multi_processor_count=_PROCESSORS[architecture])
    capability = (9, 0) if amd else divmod(int(architecture.removeprefix("sm_")), 10)
    before = driver._active
    driver.set_active(here)
    try:
        with (
            patch.object(JITFunction, "_do_compile", record),
            patch("torch.version.hip", "recorded" if amd else None),
            patch("torch.cuda.get_device_capability", lambda device=None: capability),
            patch("torch.cuda.get_device_properties", lambda device=None: properties),
        ):
            yield launches
    finally:
        driver._active = before


def target_of(architecture: str) -> GPUTarget:
    """Return Triton's name of an architecture."""
    if architecture not in ARCHITECTURES:
        raise KernelError(f"There is no architecture {architecture!r}; it is one of {', '.join(ARCHITECTURES)}.")
    if architecture in _AMD:
        return GPUTarget("hip", architecture, 64)
    return GPUTarget("cuda", int(architecture.removeprefix("sm_")), 32)
