"""Other programs beside ours: each in a process of its own, with its own packages, asked over lines of JSON."""

from pathlib import Path


def llama_worker_file() -> Path:
    """Return the file that `process.Peer` runs for llama.cpp; only its own environment can import it."""
    return Path(__file__).parent / "llama_worker.py"
