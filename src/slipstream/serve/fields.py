"""What becomes of request fields that this server does not act on: refused by name, or harmless to leave aside.

Every field of OpenAI's, Anthropic's, vLLM's and SGLang's requests is declared in the model of that request (and works),
or stands in one of two tables: those here are for chats and completions, other APIs add theirs. A field in neither is
unknown to all of them; it is left aside and logged.
"""

import functools
import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from slipstream.serve.errors import HttpError

logger = logging.getLogger(__name__)

_OFF = (None, False)
_NONE = (None,)
_NAME_LENGTH = 100  # of a client's own names in the log

REFUSED: dict[str, tuple[object, ...]] = {  # with the values that ask for nothing
    # Decoding that is not done here.
    "allowed_token_ids": (None, []),
    "bad_words": (None, []),
    "best_of": (None, 1),
    "custom_logit_processor": _NONE,
    "custom_params": _NONE,
    "length_penalty": (None, 1, 1.0),
    "logprob_token_ids": (None, []),
    "priority": (None, 0),
    "repetition_detection": _NONE,
    "stop_regex": (None, "", []),
    "use_beam_search": _OFF,
    "vllm_xargs": (None, {}),
    "watermark": (None, False, {}),
    "watermarking": _OFF,
    # Prompts of another kind.
    "add_special_tokens": _OFF,  # in chats; the template writes them
    "chat_template": _NONE,
    "echo": _OFF,
    "input_ids": (None, []),
    "prompt_embeds": (None, []),
    "suffix": (None, ""),
    "task": _NONE,
    # Answers of another kind.
    "audio": _NONE,
    "modalities": (None, ["text"]),
    "return_cached_tokens_details": _OFF,
    "return_flat_raw_output_top_logprobs": _OFF,
    "return_hidden_states": _OFF,
    "return_input_ids_in_sglext": _OFF,
    "return_meta_info": _OFF,
    "return_output_ids_in_sglext": _OFF,
    "return_prompt_text": _OFF,
    "return_routed_experts": _OFF,
    "return_sampling_mask": _OFF,
    "return_spec_tokens_details": _OFF,
    "return_token_offsets": _OFF,
    "sampling_logprobs_mode": _NONE,
    "verbosity": (None, "medium"),
    # Tools and reasoning.
    "documents": (None, []),
    "function_call": (None, "none"),
    "functions": (None, []),
    "include_reasoning": (None, True),
    "reasoning_effort": _NONE,
    "separate_reasoning": (None, True),  # in completions, whose text is as the model wrote it
    "stream_reasoning": (None, True),
    "thinking_token_budget": (None, -1),
    "tool_choice": (None, "none", "auto"),
    "tools": (None, []),
    "web_search_options": _NONE,
    # Adapters, sessions, and servers that work together.
    "bootstrap_host": _NONE,
    "bootstrap_port": _NONE,
    "bootstrap_room": _NONE,
    "data_parallel_rank": (None, 0),
    "disagg_prefill_dp_rank": (None, 0),
    "ec_transfer_params": (None, {}),
    "kv_transfer_params": (None, {}),
    "lora_path": _NONE,
    "routed_dp_rank": (None, 0),
    "session_params": (None, {}),
}

HARMLESS: dict[str, str] = {  # with why leaving it aside changes no answer
    "custom_labels": "labels for the other server's metrics",
    "images_config": "no image is read, and a message that has one is refused",
    "max_dynamic_patch": "no image is read, and a message that has one is refused",
    "media_io_kwargs": "no image or sound is read, and a message that has one is refused",
    "metadata": "kept for the sender by the API's owner; nothing is stored here",
    "min_dynamic_patch": "no image is read, and a message that has one is refused",
    "mm_payload": "no image or sound is read, and a message that has one is refused",
    "mm_processor_kwargs": "no image or sound is read, and a message that has one is refused",
    "moderation": "the API owner's own; there is no moderation here",
    "parallel_tool_calls": "there are no tool calls without tools",
    "prediction": "makes answers quicker there, and never changes them",
    "prompt_cache_key": "prompts are cached without it; cache_salt keeps them apart",
    "prompt_cache_options": "prompts are cached without it; cache_salt keeps them apart",
    "prompt_cache_retention": "prompts are cached as long as there is room",
    "return_flat_raw_top_logprobs_b64": "says how to write log probabilities that are refused by name",
    "return_mm_kwargs": "no image or sound is read, and a message that has one is refused",
    "routed_experts_prompt_start": "the experts themselves are refused by name",
    "routed_experts_start_len": "the experts themselves are refused by name",
    "safety_identifier": "names a user to the API's owner",
    "service_tier": "there is one tier",
    "session_id": "chooses one of several servers; this is one",
    "spaces_between_special_tokens": "none of the tokenizers read here puts spaces there",
    "store": "nothing is stored, so nothing needs to be forgotten",
    "stream_interval": "how many tokens one event of a stream has; the text is the same",
    "use_audio_in_video": "no sound is read, and a message that has one is refused",
    "video_config": "no film is read, and a message that has one is refused",
    "user": "names a user to the API's owner",
}


@dataclass(frozen=True)
class Others:
    """The fields of a kind of request that do not work.

    Args:
        refused: with the values that ask for nothing.
        harmless: with why leaving it aside changes no answer.
    """

    refused: Mapping[str, tuple[object, ...]]
    harmless: Mapping[str, str]

    def and_also(self, refused: Mapping[str, tuple[object, ...]], harmless: Mapping[str, str]) -> "Others":
        """Return these and more."""
        return Others({**self.refused, **refused}, {**self.harmless, **harmless})

    def check(self, values: Mapping[str, Any], declared: Collection[str], prefix: str = "") -> None:
        """Raise for a field that asks for something this server does not do; log, once, those that no server knows.

        Args:
            values: the request's fields, whatever JSON came.
            declared: the fields that work in this kind of request.
            prefix: where in the request `values` stand.
        """
        for name, value in values.items():
            if name in declared or name in self.harmless:
                continue
            if name not in self.refused:
                _note(prefix + name[:_NAME_LENGTH])
            elif value not in self.refused[name]:
                raise HttpError(
                    400, f"{prefix}{name} is not supported by this server; leave it out.", param=prefix + name
                )


OF_CHATS = Others(REFUSED, HARMLESS)
"""Those of chats and completions."""


@functools.lru_cache(maxsize=256)  # a client that makes names up fills neither memory nor, before the 257th, the log
def _note(name: str) -> None:
    logger.warning("a request has the field %r, which is unknown here and was ignored", name)
