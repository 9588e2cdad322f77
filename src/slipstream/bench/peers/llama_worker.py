"""llama.cpp as a peer: greedy decoding through its C interface; runs in an environment that has llama-cpp-python."""

import ctypes
import time
from pathlib import Path

import llama_cpp  # type: ignore[import-not-found]  # only in the peer's own environment
import numpy as np

FORMATS = {"Q4_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0, "Q8_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0}
_PROMPT_BATCH = 2048


def quantize(source: Path, made: Path, format: str) -> None:
    """Write a GGUF in another of llama.cpp's formats, by its own quantizer; a file that is there is kept."""
    if made.exists():
        return
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype, params.nthread, params.allow_requantize = FORMATS[format], 2, True
    partial = made.with_suffix(".partial")
    if llama_cpp.llama_model_quantize(str(source).encode(), str(partial).encode(), ctypes.byref(params)):
        raise RuntimeError(f"llama.cpp could not quantize {source} to {format}.")
    partial.rename(made)


class Worker:
    """A model and, for each number of sequences asked for, a context of its own.

    Args:
        model: a GGUF file.
        format: "" takes the file as it is; "Q4_0" or "Q8_0" quantizes it first, once, beside `made`.
        made: folder for quantized files.
        context: tokens of a sequence, prompt and answer together.
    """

    def __init__(self, model: str, format: str, made: str, threads: int, context: int) -> None:
        llama_cpp.llama_backend_init()
        path = Path(model)
        if format:
            quantize(path, Path(made) / f"{path.stem}-{format}.gguf", format)
            path = Path(made) / f"{path.stem}-{format}.gguf"
        self._model = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())
        if not self._model:
            raise RuntimeError(f"llama.cpp cannot load {path}.")
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._threads, self._tokens = threads, context
        self._contexts: dict[int, object] = {}
        self._batch = llama_cpp.llama_batch_init(_PROMPT_BATCH, 0, 1)
        self._last: list[int] = []
        self._lengths: list[int] = []
        info = llama_cpp.llama_print_system_info().decode()
        self.about = {
            "version": f"llama-cpp-python {llama_cpp.__version__}",
            "weight_bytes": llama_cpp.llama_model_size(self._model),
            "details": info,
        }

    def start(self, prompts: list[list[int]]) -> tuple[float, list[int]]:
        """Compute the prompts; return the seconds it took and the first token of each answer."""
        self._context = self._contexts.get(len(prompts)) or self._new_context(len(prompts))
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), True)
        self._lengths = [0] * len(prompts)
        began = time.perf_counter()
        self._last = [self._read(row, prompt) for row, prompt in enumerate(prompts)]
        return time.perf_counter() - began, self._last

    def step(self) -> tuple[float, list[int]]:
        """Decode one more token of every answer; return the seconds it took and the tokens."""
        began = time.perf_counter()
        self._last = self._decode([(row, [token]) for row, token in enumerate(self._last)])
        return time.perf_counter() - began, self._last

    def run(self, prompts: list[list[int]], tokens: int) -> list[tuple[float, int, list[int]]]:
        """Answer prompts together; return (seconds since the start, prompt, tokens) of everything emitted."""
        clock, last = self.start(prompts)
        events = [(clock, row, [token]) for row, token in enumerate(last)]
        for _ in range(tokens - 1):
            seconds, last = self.step()
            clock += seconds
            events += [(clock, row, [token]) for row, token in enumerate(last)]
        return events

    def _read(self, row: int, prompt: list[int]) -> int:
        """Compute a prompt in as many calls as it takes, and return the likeliest token after it."""
        parts = [prompt[at : at + _PROMPT_BATCH] for at in range(0, len(prompt), _PROMPT_BATCH)]
        return [self._decode([(row, part)])[0] for part in parts][-1]

    def _decode(self, parts: list[tuple[int, list[int]]]) -> list[int]:
        """Append tokens to sequences in one call, and return the likeliest next token of each."""
        batch, count, ends = self._batch, 0, []
        for row, tokens in parts:
            for token in tokens:
                batch.token[count] = token
                batch.pos[count] = self._lengths[row]
                batch.n_seq_id[count] = 1
                batch.seq_id[count][0] = row
                batch.logits[count] = 0
                self._lengths[row] += 1
                count += 1
            batch.logits[count - 1] = 1
            ends.append(count - 1)
        batch.n_tokens = count
        if llama_cpp.llama_decode(self._context, batch):
            raise RuntimeError(f"llama_decode failed over {count} tokens; the context holds {self._tokens} a sequence.")
        found = (llama_cpp.llama_get_logits_ith(self._context, end) for end in ends)
        return [int(np.ctypeslib.as_array(row, (self._vocab_size,)).argmax()) for row in found]

    def _new_context(self, num_sequences: int) -> object:
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = self._tokens * num_sequences
        params.n_batch, params.n_seq_max = _PROMPT_BATCH, num_sequences
        params.n_threads = params.n_threads_batch = self._threads
        context = llama_cpp.llama_init_from_model(self._model, params)
        if not context:
            raise RuntimeError(f"llama.cpp has no room for {num_sequences} sequences of {self._tokens} tokens.")
        self._contexts[num_sequences] = context
        return context
