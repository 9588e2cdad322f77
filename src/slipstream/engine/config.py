"""The engine's settings, checked when built and never written to again."""

from dataclasses import dataclass
from typing import Literal, get_args

from slipstream.errors import ConfigError

CudaGraphs = Literal["auto", "on", "off"]
KvCacheDtype = Literal["auto", "fp8"]

PATIENCE_S = 0.04
"""Of a step whose tokens somebody reads as they come: 25 times a second, as often as a film changes its picture."""

_USUAL_TOKENS = 512
_MAX_NODES = 64  # of a tree


@dataclass(frozen=True)
class EngineConfig:
    """How much an engine holds and does at once.

    Args:
        max_context: tokens of a request, prompt and answer together.
        page_size: tokens a page of the KV cache holds.
        num_pages: pages of the KV cache; None takes room for `max_requests` requests of 512 tokens each (or of the
            whole context, where that is shorter), and at least one whole context.
        max_requests: requests that run at once; more wait.
        max_batch_tokens: query tokens of one step; a longer prompt is computed in chunks.
        prefill_share: in a full batch, a step on a GPU may take this share more time for prompts beside those decoding.
        kv_cache_dtype: "auto" keeps keys and values in the type the target computes in; "fp8" in E4M3 with a scale for
            each token and head, in half the bytes. Tokens are then those of that cache, with any draft the same.
        draft_kv_cache_dtype: likewise for the draft's own; None does as the target.
        prefix_cache: keep the pages of finished prompts and answers for requests that start the same way.
        borrowed_tokens: tokens of a request's own text that its draft may propose though it does not know them, the
            latest so many; 0: none. On a CPU only.
        copied_tokens: nodes of a draft's tree that may be copied from the request's own text, at most; 0: none. None
            copies as far as it pays, where the draft's chains are as long as they pay. On a CPU only.
        earlier_tokens: tokens of earlier answers, the latest, that requests may copy from as well; 0: none. How fast an
            answer comes may then tell what others were answered.
        cuda_graphs: run decoding as steps captured in CUDA graphs, with the host one step behind. "auto" does so on a
            GPU; "on" without one runs the same steps uncaptured, for tests. The tokens are the same either way.
    """

    max_context: int = 4096
    page_size: int = 16
    num_pages: int | None = None
    max_requests: int = 32
    max_batch_tokens: int = 512
    prefill_share: float = 0.5
    kv_cache_dtype: KvCacheDtype = "auto"
    draft_kv_cache_dtype: KvCacheDtype | None = None
    prefix_cache: bool = True
    borrowed_tokens: int = 64
    copied_tokens: int | None = None
    earlier_tokens: int = 0
    cuda_graphs: CudaGraphs = "auto"

    def __post_init__(self) -> None:
        for name in ("max_context", "page_size", "max_requests", "max_batch_tokens"):
            value = getattr(self, name)
            if value < 1:
                raise ConfigError(f"{name} is {value}; it must be at least 1.")
        if self.prefill_share < 0:
            raise ConfigError(
                f"prefill_share is {self.prefill_share}; it must be at least 0 (0.5: half as much again)."
            )
        for name in ("borrowed_tokens", "earlier_tokens"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 0.")
        if self.copied_tokens is not None and not 0 <= self.copied_tokens < _MAX_NODES:
            raise ConfigError(f"copied_tokens is {self.copied_tokens}; it lies between 0 and {_MAX_NODES - 1}.")
        if self.cuda_graphs not in get_args(CudaGraphs):
            raise ConfigError(f"cuda_graphs is {self.cuda_graphs!r}; it is {', '.join(get_args(CudaGraphs))}.")
        for name in ("kv_cache_dtype", "draft_kv_cache_dtype"):
            dtype = getattr(self, name)
            if dtype not in (*get_args(KvCacheDtype), *([None] if name.startswith("draft") else [])):
                raise ConfigError(
                    f"{name} is {dtype!r}; it is {' or '.join(get_args(KvCacheDtype))} (E4M3, with scales)."
                )
        if self.num_pages is not None and self.num_pages < 1:
            raise ConfigError(f"num_pages is {self.num_pages}; it must be at least 1.")

    def captures(self, device_type: str) -> bool:
        """Tell whether decoding may run as captured steps on such a device."""
        return self.cuda_graphs == "on" or (self.cuda_graphs == "auto" and device_type == "cuda")

    def drafts_on_host(self, device_type: str) -> bool:
        """Tell whether steps are drafted from the host on such a device, so that requests can borrow and copy."""
        return device_type == "cpu" and not self.captures(device_type)

    def spare_pages(self, device_type: str) -> int:
        """Return how many pages the caches need beyond the requests' own: captured steps keep one for unused places."""
        return int(self.captures(device_type))

    def pages_for(self, num_tokens: int) -> int:
        """Return how many pages hold so many tokens."""
        return -(-num_tokens // self.page_size)

    def resolve_num_pages(self, extra_tokens: int) -> int:
        """Return the number of pages to allocate, given the slots a step may need past a request's last token."""
        one = self.pages_for(self.max_context + extra_tokens)
        if self.num_pages is None:
            return max(one, self.max_requests * self.pages_for(min(self.max_context, _USUAL_TOKENS) + extra_tokens))
        if self.num_pages < one:
            raise ConfigError(
                f"{self.num_pages} pages of {self.page_size} tokens cannot hold one request of max_context "
                f"{self.max_context} with {extra_tokens} drafted slots ({one} pages). "
                "Lower max_context or raise num_pages."
            )
        return self.num_pages
