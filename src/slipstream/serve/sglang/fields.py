"""What becomes of the fields of SGLang's `/generate` that this server does not act on."""

from slipstream.serve.fields import Others

_OFF = (None, False)
_NONE = (None,)
_NO_MEDIA = "no image, sound or film is read, and a request that has one is refused"
_OTHER_SERVERS = "chooses among several servers, or goes from one to another; this is one"

OF_GENERATE = Others(
    refused={
        "background": _OFF,
        "bootstrap_host": _NONE,
        "bootstrap_pair_key": _NONE,
        "bootstrap_port": _NONE,
        "bootstrap_room": _NONE,
        "custom_logit_processor": _NONE,
        "data_parallel_rank": (None, 0),
        "decode_tp_size": _NONE,
        "disagg_prefill_dp_rank": (None, 0),
        "encoder_urls": (None, []),
        "image_data": (None, []),
        "video_data": (None, []),
        "audio_data": (None, []),
        "input_embeds": (None, []),
        "lora_id": _NONE,
        "lora_path": _NONE,
        "max_thinking_tokens": _NONE,
        "modalities": (None, [], ["text"]),
        "multi_item_delimiter_indices": (None, []),
        "positional_embed_overrides": _NONE,
        "priority": (None, 0),
        "return_entropy": _OFF,
        "return_flat_raw_output_top_logprobs": _OFF,
        "return_flat_raw_top_logprobs": _OFF,
        "return_hidden_states": _OFF,
        "return_indexer_topk": _OFF,
        "return_routed_experts": _OFF,
        "return_sampling_mask": _OFF,
        "routed_dp_rank": (None, 0),
        "sampling_logprobs_mode": _NONE,
        "session_params": (None, {}),
        "token_ids_logprob": (None, []),
        "token_indices_to_pool": (None, []),
        "watermark": (None, False, {}),
    },
    harmless={
        "conversation_id": _OTHER_SERVERS,
        "custom_labels": "labels for the other server's metrics",
        "external_trace_header": "for the other server's traces",
        "http_worker_ipc": _OTHER_SERVERS,
        "image_max_dynamic_patch": _NO_MEDIA,
        "images_config": _NO_MEDIA,
        "kv_hints": "hints to the other server's cache",
        "log_metrics": "whether the other server's metrics count it; these count everything",
        "max_dynamic_patch": _NO_MEDIA,
        "min_dynamic_patch": _NO_MEDIA,
        "mm_content_hashes": _NO_MEDIA,
        "mm_hashes": _NO_MEDIA,
        "mm_processor_kwargs": _NO_MEDIA,
        "need_wait_for_mm_inputs": _NO_MEDIA,
        "no_logs": "no prompt or answer is logged, unless the server was started with --log-prompts",
        "num_items_assigned": _NO_MEDIA,
        "received_time": "for the other server's traces",
        "return_bytes": "for images, of which none is made",
        "return_flat_raw_top_logprobs_b64": "says how to write log probabilities that are refused by name",
        "routed_experts_start_len": "the experts themselves are refused by name",
        "routing_key": _OTHER_SERVERS,
        "session_id": _OTHER_SERVERS,
        "use_audio_in_video": _NO_MEDIA,
        "video_config": _NO_MEDIA,
        "video_max_dynamic_patch": _NO_MEDIA,
    },
)

OF_SAMPLING = Others(
    refused={
        "beam_width": (None, 1),
        "custom_params": (None, {}),
        "ebnf_full_assistant": _OFF,
        "stop_regex": (None, [], ""),
        "stop_regex_strs": (None, [], ""),
        "stop_strs": (None, [], ""),
        "structural_tag": (None, ""),
        "watermark": (None, False, {}),
    },
    harmless={
        "is_normalized": "the other server's own note",
        "spaces_between_special_tokens": "none of the tokenizers read here puts spaces there",
        "stop_regex_max_len": "the other server's own note",
        "stop_str_max_len": "the other server's own note",
        "stream_interval": "how many tokens one event of a stream has; the text is the same",
    },
)
"""Those of its `sampling_params`."""
