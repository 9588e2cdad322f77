"""SGLang's spelling of a launch."""

from collections.abc import Mapping

from slipstream.launch.command import Command, Launch, NodePart, render_flags
from slipstream.launch.nodes import Nodes, Place, exchange_interface

ALGORITHMS = {"eagle3": "EAGLE3", "dflash": "DFLASH", "ngram": "NGRAM"}


class SglangServer:
    """`python -m sglang.launch_server`."""

    health_path = "/health"
    version_path = "/get_server_info"

    def command(self, launch: Launch) -> Command:
        """Render the launch command."""
        argv = [*(launch.program or ("python", "-m", "sglang.launch_server")), "--model", launch.model]
        argv += ["--revision", launch.revision] if launch.revision else []
        argv += ["--tp", str(launch.topology.tp)]
        argv += ["--pp-size", str(launch.topology.pp)] if launch.topology.pp > 1 else []
        argv += ["--ep", str(launch.topology.ep)] if launch.topology.ep > 1 else []
        argv += ["--host", launch.host] if launch.host else []
        argv += ["--port", str(launch.port)]
        argv += ["--context-length", str(launch.context)] if launch.context else []
        argv += render_flags(launch.flags)
        argv += _speculative_flags(launch)
        return Command(tuple(argv), launch.env, launch.image)

    def node_part(self, nodes: Nodes, place: Place) -> NodePart:
        """Return its multi-node flags, and the address its processes listen at."""
        flags = ("--nnodes", str(place.count), "--node-rank", place.rank)
        address = {"SGLANG_HOST_IP": place.address} if place.has_address else {}
        env = {**address, **exchange_interface(nodes)}
        return NodePart((*flags, "--dist-init-addr", f"{place.first}:{place.port}"), env)

    def refusal(self, launch: Launch) -> str:
        """Refuse drafts over pipeline stages, trees of blocks, and Ray."""
        if launch.topology.pp > 1 and launch.speculation is not None:
            return (
                "SGLang starts no EAGLE-3 or n-gram drafts with pipeline stages (0.5.23). Put all devices into tp, or "
                "leave the draft out."
            )
        spec = launch.speculation
        if spec is not None and spec.method == "dflash" and (spec.topk != 1 or spec.positions() != spec.num_steps + 1):
            return "SGLang drafts chains only with DFlash. Leave the tree's width and budget out."
        if launch.nodes is not None and launch.nodes.cluster == "ray":
            return "SGLang is started by its own multi-node flags here. Leave Ray out."
        return ""

    def version(self, document: Mapping[str, object]) -> str:
        """Read the version out of the server's own description."""
        return f"sglang {document.get('version', 'unknown')}"


def _speculative_flags(launch: Launch) -> list[str]:
    """Render speculation in SGLang's flags."""
    spec = launch.speculation
    if spec is None:
        return []
    argv = ["--speculative-algorithm", ALGORITHMS[spec.method]]
    if launch.draft:
        argv += ["--speculative-draft-model-path", launch.draft.path or launch.draft.id]
        argv += ["--speculative-draft-model-revision", launch.draft.revision] if launch.draft.revision else []
    if spec.method == "eagle3":
        argv += ["--speculative-num-steps", str(spec.num_steps), "--speculative-eagle-topk", str(spec.topk)]
    return [*argv, "--speculative-num-draft-tokens", str(spec.positions())]
