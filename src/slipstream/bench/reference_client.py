"""The same point for each server's own benchmark client, as the second opinion on what ours measured."""

from dataclasses import dataclass

from slipstream.bench.recipe import Workload
from slipstream.launch.command import Command, Launch


@dataclass(frozen=True)
class Load:
    """The traffic of one point, as another benchmark client would be told it."""

    workload: Workload
    concurrency: int
    num_requests: int
    num_warmups: int
    seed: int
    request_rate: float | None


def reference_client(launch: Launch, load: Load) -> Command:
    """Render the point for the benchmark client of the server's own project, so that anyone can check ours."""
    if launch.server == "sglang":
        return sglang_bench_serving(launch, load)
    return vllm_bench_serve(launch, load, backend="vllm" if launch.server == "vllm" else "openai")


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


def sglang_bench_serving(launch: Launch, load: Load) -> Command:
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
