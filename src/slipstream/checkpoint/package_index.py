"""Fetch one package through the package index the user has configured, with the installer that is there."""

import importlib.util
import shutil
import subprocess
import sys
import venv
from collections.abc import Sequence
from pathlib import Path


class FetchError(Exception):
    """No installer could fetch the package; the message is the last one's own."""


def fetch_package(requirement: str, folder: Path) -> Path:
    """Return `folder` with the requirement's wheel in it, or with the files of that wheel.

    The environment's own pip is asked where it has one. Where it has none (`uv tool install` makes such environments)
    uv is asked, which unpacks, and without uv the pip that the standard library carries. Each obeys its own
    configuration: index, proxy, certificates.
    """
    folder.mkdir()
    if importlib.util.find_spec("pip") is not None:
        _run(_pip_download(sys.executable, requirement, folder))
    elif (uv := shutil.which("uv")) is not None:
        command = [uv, "pip", "install", "--quiet", "--no-deps", "--no-cache", "--python", sys.executable]
        _run([*command, "--target", str(folder), requirement])
    else:
        python = _environment_with_pip(folder.with_name(f"{folder.name}-pip"))
        _run(_pip_download(python, requirement, folder))
    return folder


def _pip_download(python: str, requirement: str, folder: Path) -> list[str]:
    command = [python, "-m", "pip", "download", "--quiet", "--no-deps", "--disable-pip-version-check"]
    return [*command, "--dest", str(folder), requirement]


def _environment_with_pip(folder: Path) -> str:
    try:
        venv.create(folder, with_pip=True, symlinks=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise FetchError("there is neither pip nor uv here, and Python cannot make an environment with pip") from error
    return str(folder / "bin" / "python")


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        raise FetchError(lines[-1].strip() if lines else f"{command[0]}: exit status {done.returncode}")
