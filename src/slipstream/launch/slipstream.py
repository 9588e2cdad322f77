"""slipstream's own server; its figures can be checked with `vllm bench serve`."""

from collections.abc import Mapping

from slipstream.launch.command import Command, Launch, NodePart, render_flags
from slipstream.launch.nodes import Nodes, Place, exchange_interface


class SlipstreamServer:
    """`slipstream serve`."""

    health_path = "/health"
    version_path = "/version"

    def command(self, launch: Launch) -> Command:
        """Render `slipstream serve`."""
        argv = [*(launch.program or ("slipstream", "serve")), launch.model, "--port", str(launch.port)]
        argv += ["--host", launch.host] if launch.host else []
        argv += ["--tp", str(launch.topology.tp)] if launch.topology.tp > 1 else []
        argv += ["--ep", str(launch.topology.ep)] if launch.topology.ep > 1 else []
        argv += ["--max-context", str(launch.context)] if launch.context else []
        argv += render_flags(launch.flags, repeat=True)
        argv += _drafting(launch)
        return Command(tuple(argv), launch.env, launch.image)

    def node_part(self, nodes: Nodes, place: Place) -> NodePart:
        """Return torchrun's words, as `slipstream serve` takes them."""
        flags = ("--nnodes", str(place.count), "--node-rank", place.rank)
        return NodePart((*flags, "--rendezvous", f"{place.first}:{place.port}"), exchange_interface(nodes))

    def refusal(self, launch: Launch) -> str:
        """Refuse pipeline stages, and Ray."""
        if launch.topology.pp > 1:
            return (
                f"--pp {launch.topology.pp}: slipstream's own engine has no pipeline stages. Put all devices into --tp "
                "(or take --engine vllm or sglang)."
            )
        if launch.nodes is not None and launch.nodes.cluster == "ray":
            return "slipstream's own engine starts its processes itself. Leave Ray out."
        return ""

    def version(self, document: Mapping[str, object]) -> str:
        """Read `{"version": ...}`."""
        return f"slipstream {document.get('version', 'unknown')}"


def _drafting(launch: Launch) -> list[str]:
    spec = launch.speculation
    if "draft" in launch.flags:
        return []
    if spec is None:
        return ["--draft", "none"]  # left out, the server would take the draft that ships with the model
    draft = "ngram" if launch.draft is None else launch.draft.path or launch.draft.id
    # The server counts drafted nodes, recipes count the root among them as SGLang does.
    shape = {"depth": spec.num_steps, "width": spec.topk, "budget": spec.positions() - 1}
    draft_tp = [] if spec.draft_tp is None else ["--draft-tp", str(spec.draft_tp)]
    return ["--draft", draft, *draft_tp, *(word for name, value in shape.items() for word in (f"--{name}", str(value)))]
