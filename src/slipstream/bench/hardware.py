"""Finds out what machine this is, for the record."""

import os
import platform
import shutil
import subprocess
from pathlib import Path

from slipstream.records.point import Hardware


def find_hardware() -> Hardware:
    """Return the processor, memory and accelerators of this machine."""
    devices, driver = _nvidia() or _amd() or ((), "")
    return Hardware(
        machine=f"{platform.system()} {platform.release()} {platform.machine()}",
        cpu=_cpu_name(),
        num_cpus=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1),
        memory_gib=_memory_gib(),
        devices=devices,
        driver=driver,
    )


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or "unknown"


def _memory_gib() -> float:
    if not hasattr(os, "sysconf"):
        return 0.0
    return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)


def _nvidia() -> tuple[tuple[str, ...], str] | None:
    rows = _run("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")
    cells = [[cell.strip() for cell in row.split(",")] for row in rows]
    full = [row for row in cells if len(row) == 3]
    return (tuple(f"{name}, {memory}" for name, memory, _ in full), f"NVIDIA {full[0][2]}") if full else None


def _amd() -> tuple[tuple[str, ...], str] | None:
    rows = _run("rocm-smi", "--showproductname", "--showdriverversion", "--csv")
    cards = [row.split(",") for row in rows if row.startswith("card")]
    drivers = [row.split(",", 1)[1] for row in rows if row.startswith("system")]
    if not cards:
        return None
    return tuple(", ".join(cells[1:3]) for cells in cards), f"AMD {drivers[0] if drivers else 'unknown'}"


def _run(*command: str) -> list[str]:
    if shutil.which(command[0]) is None:
        return []
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    return done.stdout.splitlines() if done.returncode == 0 else []
