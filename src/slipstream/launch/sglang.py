"""SGLang's spelling of a launch."""

from collections.abc import Mapping

from slipstream.launch.command import Command, Launch, render_flags

ALGORITHMS = {"eagle3": "EAGLE3", "ngram": "NGRAM"}


class SglangServer:
    """`python -m sglang.launch_server`."""

    health_path = "/health"
    version_path = "/get_server_info"

    def command(self, launch: Launch) -> Command:
        """Render the launch command."""
        argv = [*(launch.program or ("python", "-m", "sglang.launch_server")), "--model", launch.model]
        argv += ["--revision", launch.revision] if launch.revision else []
        argv += ["--tp", str(launch.topology.tp)]
        argv += ["--ep", str(launch.topology.ep)] if launch.topology.ep > 1 else []
        argv += ["--host", launch.host] if launch.host else []
        argv += ["--port", str(launch.port)]
        argv += ["--context-length", str(launch.context)] if launch.context else []
        argv += render_flags(launch.flags)
        argv += _speculative_flags(launch)
        return Command(tuple(argv), launch.env, launch.image)

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
        argv += ["--speculative-num-steps", str(spec.num_steps), "--speculative-eagle-topk", str(spec.topk)]
    return [*argv, "--speculative-num-draft-tokens", str(spec.positions())]
