"""vLLM's spelling of a launch."""

import json
from collections.abc import Mapping
from pathlib import Path

from slipstream.launch.command import Command, Launch, NodePart, compact_json, render_flags
from slipstream.launch.nodes import Nodes, Place, exchange_interface


class VllmServer:
    """`vllm serve`; chains only, experts spread over the whole tensor-parallel group or not at all."""

    health_path = "/health"
    version_path = "/version"

    def command(self, launch: Launch) -> Command:
        """Render `vllm serve`."""
        argv = [*(launch.program or ("vllm", "serve")), launch.model, "--port", str(launch.port)]
        argv += ["--host", launch.host] if launch.host else []
        argv += ["--revision", launch.revision] if launch.revision else []
        argv += ["--tensor-parallel-size", str(launch.topology.tp)]
        argv += ["--pipeline-parallel-size", str(launch.topology.pp)] if launch.topology.pp > 1 else []
        argv += ["--enable-expert-parallel"] if launch.topology.ep > 1 else []
        argv += ["--max-model-len", str(launch.context)] if launch.context else []
        argv += render_flags(launch.flags)
        if launch.speculation:
            argv += ["--speculative-config", compact_json(_speculative_config(launch))]
        return Command(tuple(argv), launch.env, launch.image)

    def node_part(self, nodes: Nodes, place: Place) -> NodePart:
        """Return the flags of its multi-node executor, or of Ray's, and the address its workers listen at."""
        address = {"VLLM_HOST_IP": place.address} if place.has_address else {}
        env = {**address, **exchange_interface(nodes)}
        if nodes.cluster == "ray":
            return NodePart(
                ("--distributed-executor-backend", "ray"), {**env, "RAY_ADDRESS": f"{place.first}:{place.port}"}
            )
        flags = ["--nnodes", str(place.count), "--node-rank", place.rank]
        flags += ["--master-addr", place.first, "--master-port", str(place.port)]
        return NodePart(tuple(flags if place.is_first else [*flags, "--headless"]), env)

    def refusal(self, launch: Launch) -> str:
        """Refuse trees."""
        spec = launch.speculation
        if spec is not None and (spec.topk != 1 or spec.positions() != spec.num_steps + 1):
            return "vLLM drafts chains only. Leave the tree's width and budget out."
        return ""

    def version(self, document: Mapping[str, object]) -> str:
        """Read `{"version": ...}`."""
        return f"vllm {document.get('version', 'unknown')}"


def _speculative_config(launch: Launch) -> dict[str, object]:
    assert launch.speculation is not None, "only called for arms that speculate"
    config: dict[str, object] = {}
    if launch.draft:
        config["model"] = launch.draft.path or launch.draft.id
    config["method"] = launch.speculation.method
    config["num_speculative_tokens"] = launch.speculation.num_steps
    if launch.draft and launch.draft.path and _drafts_in_one_pass(Path(launch.draft.path)):
        config["parallel_drafting"] = True
    if launch.speculation.draft_tp is not None:
        config["draft_tensor_parallel_size"] = launch.speculation.draft_tp
    if launch.draft and launch.draft.revision:
        config["revision"] = launch.draft.revision
    if launch.speculation.method == "ngram":
        config["prompt_lookup_max"] = 3
    return config


def _drafts_in_one_pass(folder: Path) -> bool:
    """Tell whether a draft is P-EAGLE's, as `slipstream export` marks it: vLLM has to be told."""
    try:
        return json.loads((folder / "config.json").read_text(encoding="utf-8")).get("parallel_drafting") is True
    except (OSError, ValueError, AttributeError):
        return False
