"""The load of another benchmark client's command line, and the same figures measured with our client."""

import argparse
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NoReturn

from slipstream.bench.client import Client, Sampling, ServerError
from slipstream.bench.measure import Measurement, failures_in_words, make_prompts, scrape
from slipstream.bench.metrics import latency_of, throughput_of
from slipstream.bench.recipe import Workload
from slipstream.bench.reference_client import Load
from slipstream.bench.server_metrics import read_acceptance
from slipstream.bench.traffic import LoadRun
from slipstream.errors import ConfigError
from slipstream.flags.line import OwnFlag, settle
from slipstream.flags.table import flag_table

ClientName = Literal["vllm", "sglang"]
TIMEOUT_S = 6 * 3600.0
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")
_SCRIPTS = {
    "sglang.bench_serving": "sglang",
    "sglang.benchmark.serving": "sglang",
    "benchmark_serving.py": "vllm",  # vLLM's older client, and InferenceX's copy of it
}
_BACKENDS = ("vllm", "openai", "sglang", "sglang-native", "sglang-oai")
_COUNTS = {"--num-prompts": 1000, "--random-input-len": 1024, "--random-output-len": 1024, "--max-concurrency": None}
_TEXTS = ("--model", "--served-model-name", "--base-url", "--host", "--port", "--backend", "--dataset-path")
_SWITCHES = {
    "vllm": ("--ignore-eos", "--use-chat-template", "--skip-chat-template"),
    "sglang": ("--disable-ignore-eos", "--apply-chat-template"),
}
_OUTPUT_OF_FILES = {"vllm": ("--custom-output-len", 256), "sglang": ("--sharegpt-output-len", 256)}
_WARMUPS = {"vllm": ("--num-warmups", 0), "sglang": ("--warmup-requests", 1)}


@dataclass(frozen=True)
class LikeLine:
    """What a line asks for: which server, which load; and what was left aside."""

    client: ClientName
    url: str
    load: Load
    notices: tuple[str, ...] = ()


def read_line(words: Sequence[str]) -> LikeLine:
    """Read a line of `vllm bench serve` or `sglang.bench_serving`; what cannot be honoured is an error."""
    client, arguments = _client(words)
    own = {name: OwnFlag(takes_value) for name, takes_value in known_flags(client).items()}
    settled = settle(arguments, own, flag_table("vllm_bench" if client == "vllm" else "sglang_bench"))
    given = _parser(client).parse_args(list(settled.words))
    if given.backend not in (None, *_BACKENDS):
        raise ConfigError(f"--backend is {given.backend}; this client speaks {', '.join(_BACKENDS)} (completions).")
    host = "127.0.0.1" if given.host in (None, "0.0.0.0") else given.host
    url = given.base_url or f"http://{host}:{given.port or {'vllm': 8000, 'sglang': 30000}[client]}"
    rate = float(given.request_rate)
    load = Load(
        _workload(client, given),
        given.max_concurrency or given.num_prompts,
        given.num_prompts,
        getattr(given, _name(_WARMUPS[client][0])),
        given.seed,
        None if math.isinf(rate) else rate,
    )
    return LikeLine(client, url, load, settled.notices)


async def measure_like(
    client: Client, line: LikeLine, token_range: tuple[int, int], on_request: Callable[[], None] = lambda: None
) -> Measurement:
    """Send a line's requests between two readings of the server's counters."""
    load, workload = line.load, line.load.workload
    sampling = Sampling(workload.temperature, None, workload.ignore_eos)
    prompts = await make_prompts(client, load, token_range)
    if load.num_warmups:
        warmups = await make_prompts(
            client, replace(load, num_requests=load.num_warmups, seed=load.seed + 1), token_range
        )
        await LoadRun(client, sampling, load.concurrency, TIMEOUT_S).run(warmups, load.seed)
    before = await scrape(client)
    run = LoadRun(client, sampling, load.concurrency, TIMEOUT_S)
    exchanges = await run.run(prompts, load.seed, load.request_rate, on_request)
    after = await scrape(client)
    failed = [exchange for exchange in exchanges if exchange.result.error]
    return Measurement(
        reasons=(failures_in_words(failed, len(exchanges)),) if failed else (),
        throughput=throughput_of(exchanges, 1),
        latency=latency_of(exchanges),
        acceptance=read_acceptance(before, after) if before and after else None,
        requests=tuple(exchange.result for exchange in exchanges),
    )


async def token_range_of(client: Client) -> tuple[int, int]:
    """Return the server's token ids, where it tells how many there are, or those that every usual vocabulary has."""
    try:
        size = (await client.get_json("/tokenizer_info")).get("vocab_size")
    except ServerError:
        size = None
    return (0, size if isinstance(size, int) and size > 0 else 32000)


def known_flags(client: ClientName) -> dict[str, bool]:
    """Return the flags of a client that say what is sent, and whether each takes a value."""
    values = (*_TEXTS, *_COUNTS, "--request-rate", "--random-range-ratio", "--seed", "--temperature", "--dataset-name")
    values += (_OUTPUT_OF_FILES[client][0], _WARMUPS[client][0])
    return dict.fromkeys(values, True) | dict.fromkeys(_SWITCHES[client], False)


def _client(words: Sequence[str]) -> tuple[ClientName, list[str]]:
    left = list(words)
    while left and (_ASSIGNMENT.match(left[0]) or left[0].startswith("python") or left[0] == "-m"):
        left.pop(0)
    if left[:3] == ["vllm", "bench", "serve"]:
        return "vllm", left[3:]
    script = left[0].rpartition("/")[2] if left else ""
    if script in _SCRIPTS:
        return "vllm" if _SCRIPTS[script] == "vllm" else "sglang", left[1:]
    raise ConfigError(
        f"{' '.join(words[:4]) or 'The line'}: is no benchmark client known here. They are `vllm bench serve`, "
        "`python -m sglang.bench_serving` and InferenceX's benchmark_serving.py."
    )


def _parser(client: ClientName) -> argparse.ArgumentParser:
    """Return a parser with the client's own defaults; it takes shortened flags, as theirs does."""
    parser = _Parser(prog=client, add_help=False)
    for name in _TEXTS:
        parser.add_argument(name)
    for name, count in _COUNTS.items():
        parser.add_argument(name, type=int, default=128 if (client, name) == ("vllm", "--random-output-len") else count)
    for name, count in (_OUTPUT_OF_FILES[client], _WARMUPS[client]):
        parser.add_argument(name, type=int, default=count)
    for name in _SWITCHES[client]:
        parser.add_argument(name, action="store_true")
    parser.add_argument("--request-rate", default="inf")
    parser.add_argument("--random-range-ratio", type=float, default=0.0)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default={"vllm": 0, "sglang": 42}[client])
    parser.add_argument("--dataset-name", default={"vllm": "random", "sglang": "sharegpt"}[client])
    return parser


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Raise what the command line shows, instead of ending the program."""
        raise ConfigError(f"The line of {self.prog}'s client cannot be read: {message}.")


def _workload(client: ClientName, given: argparse.Namespace) -> Workload:
    if client == "vllm":
        ignore_eos, chat = given.ignore_eos, given.use_chat_template
    else:
        ignore_eos, chat = not given.disable_ignore_eos, given.apply_chat_template
    if given.dataset_name == "custom":
        chat = not given.skip_chat_template if client == "vllm" else chat
        output = getattr(given, _name(_OUTPUT_OF_FILES[client][0]))
        return Workload("prompts", output, None, 1.0, given.dataset_path, chat, ignore_eos, given.temperature)
    if given.dataset_name not in ("random", "random-ids"):
        raise ConfigError(f"--dataset-name is {given.dataset_name}; random, random-ids and custom can be sent.")
    ratio, lengths = given.random_range_ratio, (given.random_output_len, given.random_input_len)
    if client == "vllm" and not given.use_chat_template:
        # vLLM draws from L (1 - r) to L (1 + r); the copy with --use-chat-template, and SGLang, from r L to L.
        lengths = tuple(math.floor(length * (1 + ratio)) for length in lengths)
        ratio = (1 - ratio) / (1 + ratio)
    return Workload("random", *lengths, max(ratio, 1e-6), None, chat, ignore_eos, given.temperature)


def _name(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")
