"""The embedded model and its draft as vLLM reads them, and what a recipe has to be told of that."""

from pathlib import Path

from slipstream.bench.peers.environments import environments_dir, vllm_environment
from slipstream.bench.peers.process import PeerError
from slipstream.checkpoint.embedded import embedded_draft
from slipstream.checkpoint.embedded_folder import embedded_folder
from slipstream.cli.exported import exported_draft


def draft_for_vllm() -> Path:
    """Return the shipped draft in vLLM's dialect, written beside the environments on the first call."""
    shipped = embedded_draft()
    if shipped is None:
        raise PeerError("This copy of slipstream ships no draft for the embedded model.")
    return exported_draft(shipped, "vllm", environments_dir() / "models")


def vllm_settings() -> dict[str, str]:
    """Return what `recipes/bench/embedded-vllm.yaml` needs to find vLLM here, installing it if need be."""
    return {
        "servers.vllm.program": f"[{vllm_environment() / 'vllm'},serve]",
        "servers.vllm.model": str(embedded_folder()),
        "drafts.for-vllm.path": str(draft_for_vllm()),
    }
