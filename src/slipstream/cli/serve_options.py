"""The options of `slipstream serve`: our own, and the names of other servers' launch lines beside them."""

from pathlib import Path
from typing import Annotated, Literal

import typer

_OTHERS = "Names other servers use"
_ELSEWHERE = "Another engine, or several machines"

Model = Annotated[str | None, typer.Argument(help="A folder, a .gguf file, a hub id, or 'embedded'.")]
Draft = Annotated[
    str | None, typer.Option(help="A draft's folder or hub id, 'ngram', 'none', or 'auto' (the default).")
]
Depth = Annotated[int | None, typer.Option(help="Drafted tokens on the longest path of a tree.")]
Width = Annotated[int | None, typer.Option(help="Nodes expanded on each level; 1 is a chain.")]
Budget = Annotated[int | None, typer.Option(help="Drafted nodes the target checks; 0 is all.")]
Host = Annotated[str, typer.Option(help="Address to listen on.")]
Port = Annotated[int, typer.Option(help="Port to listen on.")]
ServedModelName = Annotated[list[str] | None, typer.Option(help="What clients call the model; repeatable.")]
Device = Annotated[str, typer.Option(help="auto, cpu, or cuda[:N].")]
Tp = Annotated[
    int,
    typer.Option(
        "--tp",
        "--tp-size",
        "--tensor-parallel-size",
        help="Ranks, a GPU each, that the model is split over; started here unless torchrun did.",
    ),
]
Ep = Annotated[
    int | None,
    typer.Option(
        "--ep",
        "--ep-size",
        "--expert-parallel-size",
        help="Groups of the --tp ranks that experts are dealt to; 1 splits each expert over all ranks.",
    ),
]
DraftTp = Annotated[
    int | None, typer.Option(help="1 keeps the draft whole, on the first rank; --tp's value splits it too.")
]
Nnodes = Annotated[int, typer.Option(help="Machines that the --tp ranks are dealt to; each runs this command.")]
NodeRank = Annotated[int, typer.Option(help="Which of the machines this is, from 0; the first has the server.")]
Rendezvous = Annotated[
    str,
    typer.Option(
        "--rendezvous",
        "--rdzv-endpoint",
        "--dist-init-addr",
        "--nccl-init-addr",
        help="HOST:PORT of the first machine, where the others find it.",
    ),
]
Dtype = Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")]
MaxRequests = Annotated[
    int | None,
    typer.Option(
        "--max-requests",
        "--max-num-seqs",
        "--max-running-requests",
        help="Answers made at once; by default 32 on a CPU and 64 on a GPU.",
    ),
]
MaxBatchTokens = Annotated[
    int | None,
    typer.Option(
        "--max-batch-tokens",
        "--max-num-batched-tokens",
        "--chunked-prefill-size",
        help="Tokens of one step; by default 512 on a CPU and 8192 on a GPU (fewer while others decode).",
    ),
]
PageSize = Annotated[int, typer.Option("--page-size", "--block-size", help="Tokens a page holds.")]
NumPages = Annotated[int | None, typer.Option(help="Pages of the KV cache.")]
MemoryFraction = Annotated[
    float | None,
    typer.Option(
        "--memory-fraction",
        "--mem-fraction-static",
        "--gpu-memory-utilization",
        help="Share of the device's memory for weights and KV cache.",
    ),
]
KvCacheDtype = Annotated[
    str,
    typer.Option(
        help="Keys and values: auto (the type the target computes in) or fp8 (E4M3 with a scale for each token and "
        "head, in half the bytes). Texts are then those of that cache, the same with any draft."
    ),
]
DraftKvCacheDtype = Annotated[
    str | None, typer.Option(help="Likewise for the draft's own keys and values.", show_default="as the target's")
]
PrefillShare = Annotated[
    float,
    typer.Option(help="In a full batch, a step on a GPU may take this share more time for prompts beside it."),
]
PrefixCache = Annotated[
    bool,
    typer.Option(
        "--prefix-cache/--no-prefix-cache",
        "--enable-prefix-caching/--no-enable-prefix-caching",
        help="Keep pages of earlier prompts; --no-prefix-cache keeps none.",
    ),
]
KernelSettings = Annotated[
    Path | None,
    typer.Option(help="A YAML file: kernels (a path by name) and experts (tile shapes); no answer depends on either."),
]
DraftWindow = Annotated[
    int | None,
    typer.Option(min=1, help="The draft attends to the last so many tokens; by default as it was trained."),
]
BorrowedTokens = Annotated[
    int,
    typer.Option(help="On a CPU: tokens of a request's own text, unknown to the draft, that it may propose; 0: none."),
]
CopiedTokens = Annotated[
    int | None,
    typer.Option(help="On a CPU: nodes copied from the text beside a draft's, at most; 0: none. [default: as pays]"),
]
EarlierTokens = Annotated[
    int,
    typer.Option(help="Tokens of earlier answers that may be copied too; timing may tell what others were answered."),
]
SimulatedAcceptance = Annotated[
    str | None, typer.Option(help="Measurements only: keep drafted tokens by these rates, such as 0.8,0.6,0.4.")
]
ApiKey = Annotated[list[str] | None, typer.Option(help="A key clients must send; repeatable.")]
ApiKeyFile = Annotated[Path | None, typer.Option(help="A file with one key a line.")]
AdminKey = Annotated[str | None, typer.Option(help="The key of /admin.")]
OpenMetrics = Annotated[
    bool,
    typer.Option(
        "--open-metrics",
        help="Let everybody read /metrics; with API keys it needs one of them, or the admin key. /health, /docs, "
        "/openapi.json and the playground's page are always open.",
    ),
]
AllowedHost = Annotated[
    list[str] | None,
    typer.Option(
        help="A name clients may call the server by (their Host header), beside localhost and its addresses; "
        "repeatable, '*' for any. The default is any, but loopback names only on a loopback --host without API keys.",
    ),
]
RootPath = Annotated[str, typer.Option(help="The prefix a proxy serves this server under, such as /llm.")]
CorsOrigin = Annotated[list[str] | None, typer.Option(help="A web origin that may call; repeatable.")]
MaxConnections = Annotated[
    int, typer.Option(help="Clients connected at once, as far as the limit on open files allows (ulimit -n).")
]
MaxWaiting = Annotated[int, typer.Option(help="Answers that may wait; more are refused with 429.")]
MaxBodyBytes = Annotated[int, typer.Option(help="Largest body of a request.")]
MaxOutputTokens = Annotated[int | None, typer.Option(help="Most tokens of one answer.")]
GenerationConfig = Annotated[
    str,
    typer.Option(
        help="Sampling of requests that leave it out: auto (the model's generation_config.json), none (OpenAI's "
        "defaults), or a folder that has that file.",
    ),
]
FixedSampling = Annotated[
    str | None, typer.Option(help="Refuse other sampling settings than the model's maker prescribes; knows: kimi.")
]
RequestTimeout = Annotated[float, typer.Option(help="Seconds one request may take.")]
ReadTimeout = Annotated[
    float, typer.Option(help="Seconds a client may take to send a request's head, or 16 KiB or the rest of its body.")
]
WriteTimeout = Annotated[float, typer.Option(help="Seconds a client may leave bytes of its answer unread.")]
KeepAliveTimeout = Annotated[
    float, typer.Option(help="Seconds a connection may stay open between two requests; rounded, 1 at least.")
]
DrainTimeout = Annotated[float, typer.Option(help="Seconds answers may go on after SIGTERM; then they end with a 503.")]
ToolCallParser = Annotated[
    str | None,
    typer.Option(
        help="How the model writes tool calls: kimi_k2, minimax_m2, qwen3_coder, glm45, glm47, gemma4, hermes, "
        "llama3_json, mistral, mistral_v11, deepseek_v3, deepseek_v31, openai (gpt-oss) or none. "
        "Its chat template tells, by default.",
    ),
]
ReasoningParser = Annotated[
    str | None,
    typer.Option(
        help="How the model marks its reasoning: kimi_k2, minimax_m2, deepseek_r1, qwen3, glm45, gemma4, "
        "openai_gptoss or none. "
        "Its chat template tells, by default.",
    ),
]
AllowSpecialInContent = Annotated[
    bool,
    typer.Option(
        "--allow-special-in-content", help="Let control tokens that a message's text spells be control tokens."
    ),
]
LogLevel = Annotated[str, typer.Option(help="debug, info, warning or error.")]
LogJson = Annotated[bool, typer.Option("--log-json", help="Write the log as JSON, one object a line.")]
LogPrompts = Annotated[bool, typer.Option("--log-prompts", help="Write prompts and answers to the log.")]
Learn = Annotated[
    Path | None,
    typer.Option(help="Keep answers here, as token ids, and have the draft learn from them while serving."),
]
LearnTokens = Annotated[int, typer.Option(min=10_000, help="The most tokens that are kept; the oldest go.")]
LearnElsewhere = Annotated[
    bool,
    typer.Option(
        "--learn-elsewhere",
        help="Start no trainer: `slipstream learn` runs on another machine that shares the folder.",
    ),
]
ModelPath = Annotated[
    str | None, typer.Option("--model-path", "--model", rich_help_panel=_OTHERS, help="The same as MODEL.")
]
EnableExpertParallel = Annotated[
    bool, typer.Option("--enable-expert-parallel", rich_help_panel=_OTHERS, help="The same as --ep with --tp's value.")
]
DisableRadixCache = Annotated[
    bool, typer.Option("--disable-radix-cache", rich_help_panel=_OTHERS, help="The same as --no-prefix-cache.")
]
TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", rich_help_panel=_OTHERS, help="Not needed: no checkpoint's code is run.")
]
EnableAutoToolChoice = Annotated[
    bool, typer.Option("--enable-auto-tool-choice", rich_help_panel=_OTHERS, help="Not needed: tools need no switch.")
]
SpeculativeAlgorithm = Annotated[str | None, typer.Option(rich_help_panel=_OTHERS, help="EAGLE3, DFLASH or NGRAM.")]
SpeculativeDraftModelPath = Annotated[
    str | None,
    typer.Option(
        "--speculative-draft-model-path", "--speculative-draft-model", rich_help_panel=_OTHERS, help="As --draft."
    ),
]
SpeculativeNumSteps = Annotated[int | None, typer.Option(rich_help_panel=_OTHERS, help="As --depth.")]
SpeculativeEagleTopk = Annotated[int | None, typer.Option(rich_help_panel=_OTHERS, help="As --width.")]
SpeculativeNumDraftTokens = Annotated[
    int | None, typer.Option(rich_help_panel=_OTHERS, help="As --budget, plus one for the root.")
]
SpeculativeConfig = Annotated[
    str | None, typer.Option(rich_help_panel=_OTHERS, help="vLLM's JSON: method, model, num_speculative_tokens.")
]
Engine = Annotated[
    Literal["slipstream", "vllm", "sglang"],
    typer.Option(
        "--engine",
        rich_help_panel=_ELSEWHERE,
        help="Who serves: this engine, or an installed vLLM or SGLang, with the draft in its dialect and its own API.",
    ),
]
Pp = Annotated[
    int,
    typer.Option(
        "--pp",
        "--pp-size",
        "--pipeline-parallel-size",
        rich_help_panel=_ELSEWHERE,
        help="Pipeline stages of --tp devices each (vllm, sglang).",
    ),
]
Nodes = Annotated[
    str | None,
    typer.Option(
        rich_help_panel=_ELSEWHERE,
        help="Machines to start it on, as a,b or a=10.0.0.1,b=10.0.0.2 (name for --rsh, address for the others); the "
        "first answers. A number with --print slurm or kubernetes.",
    ),
]
Rsh = Annotated[
    str | None,
    typer.Option(
        rich_help_panel=_ELSEWHERE, help="What runs a program on a node; {node} is its name.", show_default="ssh {node}"
    ),
]
Ray = Annotated[
    bool,
    typer.Option("--ray", rich_help_panel=_ELSEWHERE, help="Start a Ray cluster on the nodes, for vLLM's executor."),
]
NodePort = Annotated[
    int, typer.Option(rich_help_panel=_ELSEWHERE, help="Port of the first node where the others find it.")
]
Interface = Annotated[
    str | None, typer.Option(rich_help_panel=_ELSEWHERE, help="Network interface between nodes, such as eth0.")
]
EngineProgram = Annotated[
    str | None,
    typer.Option(rich_help_panel=_ELSEWHERE, help="How the engine is called, such as '/opt/venv/bin/vllm serve'."),
]
EngineArgs = Annotated[
    str, typer.Option(rich_help_panel=_ELSEWHERE, help="More of the engine's own flags, as one quoted text.")
]
EngineEnv = Annotated[
    list[str] | None, typer.Option(rich_help_panel=_ELSEWHERE, help="NAME=VALUE for the engine; repeatable.")
]
ExportDir = Annotated[
    Path | None,
    typer.Option(
        rich_help_panel=_ELSEWHERE,
        help="Where the draft is written in the engine's dialect; every node has to see it.",
        show_default="the user's cache",
    ),
]
StartTimeout = Annotated[
    float, typer.Option(rich_help_panel=_ELSEWHERE, help="Seconds until the engine has to answer.")
]
Image = Annotated[str, typer.Option(rich_help_panel=_ELSEWHERE, help="Container image for --print kubernetes.")]
Print = Annotated[
    Literal["lines", "slurm", "kubernetes"] | None,
    typer.Option(
        "--print", rich_help_panel=_ELSEWHERE, help="Start nothing; print each node's line, or a job for a cluster."
    ),
]
