"""`slipstream serve`: an OpenAI-compatible server, started with our flags or with another server's."""

from typing import TYPE_CHECKING, cast

import typer

from slipstream.cli import options
from slipstream.cli import serve_options as o

if TYPE_CHECKING:
    from slipstream.engine.config import KvCacheDtype


# Longer than a function should be: each flag is a line here and a line below, and splitting it would repeat them.
def serve(
    context: typer.Context,
    model: o.Model = None,
    draft: o.Draft = None,
    depth: o.Depth = None,
    width: o.Width = None,
    budget: o.Budget = None,
    host: o.Host = "127.0.0.1",
    port: o.Port = 8000,
    served_model_name: o.ServedModelName = None,
    device: o.Device = "auto",
    dtype: o.Dtype = "auto",
    tp: o.Tp = 1,
    ep: o.Ep = None,
    draft_tp: o.DraftTp = None,
    pp: o.Pp = 1,
    nnodes: o.Nnodes = 1,
    node_rank: o.NodeRank = 0,
    rendezvous: o.Rendezvous = "",
    max_context: options.MaxContext = None,
    max_requests: o.MaxRequests = None,
    max_batch_tokens: o.MaxBatchTokens = None,
    page_size: o.PageSize = 16,
    num_pages: o.NumPages = None,
    memory_fraction: o.MemoryFraction = None,
    kv_cache_dtype: o.KvCacheDtype = "auto",
    draft_kv_cache_dtype: o.DraftKvCacheDtype = None,
    prefill_share: o.PrefillShare = 0.5,
    prefix_cache: o.PrefixCache = True,
    draft_window: o.DraftWindow = None,
    borrowed_tokens: o.BorrowedTokens = 64,
    copied_tokens: o.CopiedTokens = None,
    earlier_tokens: o.EarlierTokens = 0,
    kernel_settings: o.KernelSettings = None,
    simulated_acceptance: o.SimulatedAcceptance = None,
    api_key: o.ApiKey = None,
    api_key_file: o.ApiKeyFile = None,
    admin_key: o.AdminKey = None,
    open_metrics: o.OpenMetrics = False,
    allowed_host: o.AllowedHost = None,
    root_path: o.RootPath = "",
    cors_origin: o.CorsOrigin = None,
    max_connections: o.MaxConnections = 2048,
    max_waiting: o.MaxWaiting = 256,
    max_body_bytes: o.MaxBodyBytes = 4 << 20,
    max_output_tokens: o.MaxOutputTokens = None,
    generation_config: o.GenerationConfig = "auto",
    fixed_sampling: o.FixedSampling = None,
    request_timeout: o.RequestTimeout = 600.0,
    read_timeout: o.ReadTimeout = 20.0,
    write_timeout: o.WriteTimeout = 60.0,
    keep_alive_timeout: o.KeepAliveTimeout = 75.0,
    drain_timeout: o.DrainTimeout = 30.0,
    tool_call_parser: o.ToolCallParser = None,
    reasoning_parser: o.ReasoningParser = None,
    allow_special_in_content: o.AllowSpecialInContent = False,
    log_level: o.LogLevel = "info",
    log_json: o.LogJson = False,
    log_prompts: o.LogPrompts = False,
    learn: o.Learn = None,
    learn_tokens: o.LearnTokens = 2_000_000,
    learn_elsewhere: o.LearnElsewhere = False,
    model_path: o.ModelPath = None,
    enable_expert_parallel: o.EnableExpertParallel = False,
    disable_radix_cache: o.DisableRadixCache = False,
    trust_remote_code: o.TrustRemoteCode = False,
    enable_auto_tool_choice: o.EnableAutoToolChoice = False,
    speculative_algorithm: o.SpeculativeAlgorithm = None,
    speculative_draft_model_path: o.SpeculativeDraftModelPath = None,
    speculative_num_steps: o.SpeculativeNumSteps = None,
    speculative_eagle_topk: o.SpeculativeEagleTopk = None,
    speculative_num_draft_tokens: o.SpeculativeNumDraftTokens = None,
    speculative_config: o.SpeculativeConfig = None,
    engine_name: o.Engine = "slipstream",
    nodes: o.Nodes = None,
    rsh: o.Rsh = None,
    ray: o.Ray = False,
    node_port: o.NodePort = 29500,
    interface: o.Interface = None,
    engine_program: o.EngineProgram = None,
    engine_args: o.EngineArgs = "",
    engine_env: o.EngineEnv = None,
    export_dir: o.ExportDir = None,
    start_timeout: o.StartTimeout = 1800.0,
    image: o.Image = "",
    print_form: o.Print = None,
) -> None:
    r"""Serve a model over an OpenAI-compatible API, with exact speculative decoding.

    Examples:
      slipstream serve

      slipstream serve path/to/target --draft path/to/draft --depth 5

      slipstream serve path/to/target --draft path/to/draft --tp 8 --ep 8

      slipstream serve --model-path T --speculative-algorithm EAGLE3 --speculative-draft-model-path D \
        --speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4

      slipstream serve path/to/target --draft path/to/draft --engine vllm --tp 8 --pp 2 --nodes a,b
    """
    from slipstream.cli.serve_elsewhere import is_elsewhere, serve_elsewhere

    if is_elsewhere(context):
        serve_elsewhere(context)
        return
    from slipstream.engine.config import EngineConfig
    from slipstream.engine.loading import LoadOptions
    from slipstream.ranks.hosts import Hosts
    from slipstream.serve import flags
    from slipstream.serve.config import ServeConfig
    from slipstream.serve.fixed_sampling import fixed_sampling as prescribed
    from slipstream.serve.kernel_settings import read_kernel_settings
    from slipstream.serve.logs import set_up_logs
    from slipstream.serve.server import serve as run

    set_up_logs(log_level, log_json)
    counts = speculative_num_steps, speculative_eagle_topk, speculative_num_draft_tokens
    sglang = flags.SglangFlags(speculative_algorithm, speculative_draft_model_path, *counts)
    own = flags.own_speculation(draft, depth, width, budget, simulated_acceptance)
    wanted = flags.first_named(own, flags.sglang_speculation(sglang), flags.vllm_speculation(speculative_config))
    engine = EngineConfig(
        page_size=page_size,
        num_pages=num_pages,
        kv_cache_dtype=cast("KvCacheDtype", kv_cache_dtype),  # checked there
        draft_kv_cache_dtype=cast("KvCacheDtype | None", draft_kv_cache_dtype),
        prefill_share=prefill_share,
        prefix_cache=prefix_cache and not disable_radix_cache,
        borrowed_tokens=borrowed_tokens,
        copied_tokens=copied_tokens,
        earlier_tokens=earlier_tokens,
    )
    chosen = read_kernel_settings(kernel_settings)
    options = LoadOptions(
        flags.named_model(model, model_path),
        wanted.draft or "auto",
        wanted.tree or (flags.DEFAULT_TREE if wanted.simulated_acceptance else None),
        device,
        dtype,
        chosen.kernels,
        chosen.experts,
        max_context=max_context,
        max_requests=max_requests,
        max_batch_tokens=max_batch_tokens,
        memory_fraction=memory_fraction,
        engine=engine,
        topology=flags.topology(tp, ep, enable_expert_parallel, draft_tp, wanted),
        hosts=Hosts(nnodes, node_rank, rendezvous),
        draft_window=draft_window,
    )
    names = tuple(served_model_name or [str(options.model)])  # "auto" is "embedded" by now
    config = ServeConfig(
        names[0],
        names[1:],
        host,
        port,
        api_keys=(*(api_key or ()), *flags.keys_in(api_key_file)),
        admin_key=admin_key,
        open_metrics=open_metrics,
        allowed_hosts=tuple(allowed_host or ()),
        root_path=root_path.rstrip("/"),
        cors_origins=tuple(cors_origin or ()),
        max_connections=max_connections,
        max_waiting=max_waiting,
        max_body_bytes=max_body_bytes,
        generation_config=generation_config,
        fixed_sampling=prescribed(fixed_sampling),
        max_output_tokens=max_output_tokens,
        request_timeout_s=request_timeout,
        read_timeout_s=read_timeout,
        write_timeout_s=write_timeout,
        keep_alive_timeout_s=keep_alive_timeout,
        drain_timeout_s=drain_timeout,
        tool_call_parser=tool_call_parser,
        reasoning_parser=reasoning_parser,
        allow_special_in_content=allow_special_in_content,
        log_prompts=log_prompts,
        learn=flags.learning(learn, learn_tokens, learn_elsewhere, options),
    )
    run(options, config, wanted.simulated_acceptance or ())
