"""A server's command inside its image: docker or podman, with the host's network, devices and model cache."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Literal

from slipstream.errors import ConfigError
from slipstream.launch.command import Command, Launch

Runtime = Literal["docker", "podman"]
Images = Literal["docker", "podman", "inside"]
"""What is done about a recipe's image: a container of it is started, or this program runs inside it already."""
_NVIDIA, _AMD = Path("/dev/nvidiactl"), Path("/dev/kfd")
_CACHE_INSIDE = "/root/.cache/huggingface"


def in_container(command: Command, launch: Launch, runtime: Runtime) -> Command:
    """Return the command that runs another one in its image; the image's own entry point is not used.

    Folders of this machine that the launch names (model, draft) are mounted where they are, read-only.
    """
    from huggingface_hub.constants import HF_HOME  # a quarter of a second, and only containers need it

    if not command.image:
        raise ConfigError(f"{launch.server}: the recipe names no image to run it in; leave --images out.")
    if shutil.which(runtime) is None:
        raise ConfigError(f"--images {runtime}: there is no such program here.")
    words = [runtime, "run", "--rm", "--network", "host", "--ipc", "host", "--shm-size", "16g", *_devices(runtime)]
    words += ["--volume", f"{HF_HOME}:{_CACHE_INSIDE}", "--env", f"HF_HOME={_CACHE_INSIDE}"]
    for folder in _folders(launch):
        words += ["--volume", f"{folder}:{folder}:ro"]
    for name, value in command.env.items():
        words += ["--env", f"{name}={value}"]
    program, *arguments = command.argv
    return replace(command, argv=(*words, "--entrypoint", program, command.image, *arguments), env={})


def _devices(runtime: Runtime) -> list[str]:
    """Return what gives a container this machine's accelerators."""
    if _AMD.exists():
        return ["--device", "/dev/kfd", "--device", "/dev/dri", "--group-add", "video"]
    if _NVIDIA.exists():
        return ["--gpus", "all"] if runtime == "docker" else ["--device", "nvidia.com/gpu=all"]
    return []


def _folders(launch: Launch) -> list[str]:
    draft = (launch.draft.path or launch.draft.id) if launch.draft else None
    named = [name for name in (launch.model, draft) if name is not None and Path(name).is_absolute()]
    return list(dict.fromkeys(named))
