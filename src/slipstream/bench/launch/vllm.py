"""vLLM's spelling of a launch, and `vllm bench serve` as the second opinion on a point."""

from collections.abc import Mapping

from slipstream.bench.launch.command import Command, Launch, Load, compact_json, render_flags


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
        argv += ["--enable-expert-parallel"] if launch.topology.ep > 1 else []
        argv += ["--max-model-len", str(launch.context)] if launch.context else []
        argv += render_flags(launch.flags)
        if launch.speculation:
            argv += ["--speculative-config", compact_json(_speculative_config(launch))]
        return Command(tuple(argv), launch.env, launch.image)

    def reference_client(self, launch: Launch, load: Load) -> Command:
        """Render `vllm bench serve`."""
        return vllm_bench_serve(launch, load, backend="vllm")

    def version(self, document: Mapping[str, object]) -> str:
        """Read `{"version": ...}`."""
        return f"vllm {document.get('version', 'unknown')}"


def vllm_bench_serve(launch: Launch, load: Load, backend: str) -> Command:
    """Render a point for `vllm bench serve`.

    `--random-range-ratio` is passed as published. Mind that recent vLLM reads a ratio r as L(1-r) to L(1+r), where the
    client behind the published figures, and ours, read r*L to L.
    """
    workload = load.workload
    argv = ["vllm", "bench", "serve", "--model", launch.model, "--port", str(launch.port), "--backend", backend]
    if workload.kind == "random":
        argv += ["--dataset-name", "random", "--random-input-len", str(workload.input_tokens)]
        argv += ["--random-output-len", str(workload.output_tokens)]
        argv += ["--random-range-ratio", f"{workload.range_ratio:g}"]
        # InferenceX's copy of this client has it; vLLM's own sends random prompts without a template.
        template = ["--use-chat-template"] if workload.chat_template else []
    else:
        argv += ["--dataset-name", "custom", "--dataset-path", str(workload.path)]
        argv += ["--custom-output-len", str(workload.output_tokens)]
        template = [] if workload.chat_template else ["--skip-chat-template"]
    argv += ["--num-prompts", str(load.num_requests), "--max-concurrency", str(load.concurrency)]
    argv += ["--request-rate", "inf" if load.request_rate is None else f"{load.request_rate:g}"]
    argv += ["--ignore-eos"] if workload.ignore_eos else []
    argv += template
    argv += ["--trust-remote-code"] if launch.flags.get("trust-remote-code") is True else []
    argv += ["--num-warmups", str(load.num_warmups), "--seed", str(load.seed)]
    return Command(tuple(argv), {})


def _speculative_config(launch: Launch) -> dict[str, object]:
    assert launch.speculation is not None, "only called for arms that speculate"
    config: dict[str, object] = {}
    if launch.draft:
        config["model"] = launch.draft.path or launch.draft.id
    config["method"] = launch.speculation.method
    config["num_speculative_tokens"] = launch.speculation.num_steps
    if launch.speculation.draft_tp is not None:
        config["draft_tensor_parallel_size"] = launch.speculation.draft_tp
    if launch.draft and launch.draft.revision:
        config["revision"] = launch.draft.revision
    if launch.speculation.method == "ngram":
        config["prompt_lookup_max"] = 3
    return config
