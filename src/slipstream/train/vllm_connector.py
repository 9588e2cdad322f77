"""A connector for vLLM that writes the states of its requests where there is no GPU; vLLM imports it, nobody else.

vLLM's `extract_hidden_states` keeps chosen layers' states in a cache of their own, and its example connector stores
them when a request ends, one safetensors file each (`hidden_states` [tokens, layers, width] and `token_ids`). That one
copies through CUDA streams. This one stands in for it on vLLM's CPU build; with a GPU it is vLLM's own, unchanged.
"""

from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1 import (  # type: ignore[import-not-found]  # only vLLM has it
    example_hidden_states_connector as example,
)


class StatesConnector(example.ExampleHiddenStatesConnector):  # type: ignore[misc]  # Any, then
    """Writes a finished request's states to `shared_storage_path`, whatever the device."""

    def _submit_async_write(self, pending: Any) -> None:  # vLLM's PendingSave
        if torch.cuda.is_available():
            super()._submit_async_write(pending)
            return
        if not self._is_tp_rank_zero:
            return
        blocks, size = torch.tensor(pending.block_ids, dtype=torch.long), self._block_size
        slots = (blocks[:, None] * size + torch.arange(size)).flatten()
        states = example.extract_from_kv_cache(self._kv_cache, slots, len(pending.token_ids)).contiguous()
        tensors = {"hidden_states": states, "token_ids": pending.token_ids.clone()}
        lock = self._lock_fds.pop(pending.req_id, None)
        copied = _Copied()
        self._req_copy_events[pending.req_id] = copied
        future = self._executor.submit(self._write_tensors, tensors, copied, pending.filename, lock)
        self._req_futures[pending.req_id] = future
        future.add_done_callback(lambda done: self._on_write_done(pending.req_id, done))


class _Copied:
    """Stands for the CUDA event of a copy that is over."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        """Wait for nothing."""
