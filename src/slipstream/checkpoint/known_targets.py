"""Published targets by the sizes that a draft shares with its own: which of them a draft may have been made for."""

from typing import NamedTuple

from slipstream.checkpoint.spec import BlockDraftSpec, DraftSpec


class KnownTarget(NamedTuple):
    """A published model's name and the sizes a draft must agree with."""

    name: str
    hidden_size: int
    vocab_size: int
    num_layers: int


KNOWN_TARGETS = (
    KnownTarget("Llama-3.2-1B", 2048, 128256, 16),
    KnownTarget("Llama-3.2-3B", 3072, 128256, 28),
    KnownTarget("Llama-3.1-8B", 4096, 128256, 32),
    KnownTarget("Llama-3.1-70B and 3.3-70B", 8192, 128256, 80),
    KnownTarget("Llama-4-Scout and Maverick", 5120, 202048, 48),
    KnownTarget("Qwen2.5-7B and Qwen2.5-VL-7B", 3584, 152064, 28),
    KnownTarget("Qwen2.5-32B and Qwen2.5-VL-32B", 5120, 152064, 64),
    KnownTarget("Qwen2.5-72B and Qwen2.5-VL-72B", 8192, 152064, 80),
    KnownTarget("Qwen3-1.7B", 2048, 151936, 28),
    KnownTarget("Qwen3-4B and Qwen3-VL-4B", 2560, 151936, 36),
    KnownTarget("Qwen3-8B and Qwen3-VL-8B", 4096, 151936, 36),
    KnownTarget("Qwen3-14B", 5120, 151936, 40),
    KnownTarget("Qwen3-32B and Qwen3-VL-32B", 5120, 151936, 64),
    KnownTarget("Qwen3-30B-A3B, Qwen3-Coder-30B-A3B and Qwen3-VL-30B-A3B", 2048, 151936, 48),
    KnownTarget("Qwen3-235B-A22B and Qwen3-VL-235B-A22B", 4096, 151936, 94),
    KnownTarget("Qwen3-Coder-480B-A35B", 6144, 151936, 62),
    KnownTarget("gpt-oss-20b", 2880, 201088, 24),
    KnownTarget("gpt-oss-120b", 2880, 201088, 36),
    KnownTarget("GLM-4.5-Air", 4096, 151552, 46),
    KnownTarget("GLM-4.5, 4.6 and 4.7", 5120, 151552, 92),
    KnownTarget("GLM-4.7-Flash", 2048, 154880, 47),
    KnownTarget("gemma-3-1b", 1152, 262144, 26),
    KnownTarget("gemma-3-4b", 2560, 262208, 34),
    KnownTarget("gemma-3-12b", 3840, 262208, 48),
    KnownTarget("gemma-3-27b", 5376, 262208, 62),
    KnownTarget("gemma-4-12B", 3840, 262144, 48),
    KnownTarget("gemma-4-26B-A4B", 2816, 262144, 30),
    KnownTarget("gemma-4-31B", 5376, 262144, 60),
    KnownTarget("Mistral-Small-24B", 5120, 131072, 40),
    KnownTarget("Phi-4", 5120, 100352, 40),
    KnownTarget("Phi-4-mini", 3072, 200064, 32),
    KnownTarget("DeepSeek-V3 and R1", 7168, 129280, 61),
    KnownTarget("Kimi-K2, K2.5 and K2.6", 7168, 163840, 61),
    KnownTarget("MiniMax-M2, M2.1 and M2.5", 3072, 200064, 62),
)
"""Sizes as each model's config.json on the Hugging Face hub has them."""


def targets_of(draft: DraftSpec | BlockDraftSpec) -> tuple[str, ...]:
    """Return the published targets whose sizes a draft has; one that captures late states has few."""
    last = max(draft.captured_layers or (0,))
    return tuple(
        known.name
        for known in KNOWN_TARGETS
        if (known.hidden_size, known.vocab_size) == (draft.target_hidden_size, draft.vocab_size)
        and last <= known.num_layers
    )
