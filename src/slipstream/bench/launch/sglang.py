"""SGLang's spelling of a launch, and `sglang.bench_serving` as the second opinion on a point."""

from collections.abc import Mapping

from slipstream.bench.launch.command import Command, Launch, Load, render_flags

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

    def reference_client(self, launch: Launch, load: Load) -> Command:
        """Render `sglang.bench_serving`, which ignores end-of-sequence unless told otherwise."""
        workload = load.workload
        argv = ["python3", "-m", "sglang.bench_serving", "--model", launch.model]
        if workload.kind == "random":
            argv += ["--dataset-name", "random", "--random-input", str(workload.input_tokens)]
            argv += ["--random-output", str(workload.output_tokens)]
        else:
            argv += ["--dataset-name", "custom", "--dataset-path", str(workload.path)]
            argv += ["--sharegpt-output-len", str(workload.output_tokens)]
        argv += ["--num-prompts", str(load.num_requests), "--max-concurrency", str(load.concurrency)]
        argv += ["--request-rate", "inf" if load.request_rate is None else f"{load.request_rate:g}"]
        argv += ["--port", str(launch.port)]
        argv += ["--random-range-ratio", str(workload.range_ratio)] if workload.kind == "random" else []
        argv += [] if workload.ignore_eos else ["--disable-ignore-eos"]
        argv += ["--apply-chat-template"] if workload.chat_template else []
        argv += ["--warmup-requests", str(load.num_warmups), "--seed", str(load.seed)]
        return Command(tuple(argv), {})

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
