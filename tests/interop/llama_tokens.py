"""Decode greedily with llama.cpp in float32. Arguments: a GGUF, a JSON request {"prompt": [...], "count": N}."""

import ctypes
import json
import sys

import llama_cpp
import numpy as np

GGML_TYPE_F32 = 0


def decode(context: object, tokens: list[int], vocab_size: int) -> np.ndarray:
    """Append tokens, and return the logits after the last."""
    array = (llama_cpp.llama_token * len(tokens))(*tokens)
    if llama_cpp.llama_decode(context, llama_cpp.llama_batch_get_one(array, len(tokens))):
        raise SystemExit("llama_decode failed")
    return np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(context, -1), (vocab_size,)).copy()


if __name__ == "__main__":
    path, request = sys.argv[1], json.loads(sys.argv[2])
    silent = llama_cpp.llama_log_callback(lambda level, text, data: None)
    llama_cpp.llama_log_set(silent, ctypes.c_void_p(0))
    model = llama_cpp.llama_model_load_from_file(path.encode(), llama_cpp.llama_model_default_params())
    if not model:
        raise SystemExit(f"llama.cpp cannot load {path}")
    params = llama_cpp.llama_context_default_params()
    params.n_ctx, params.n_threads, params.n_threads_batch = 256, 1, 1
    params.type_k = params.type_v = GGML_TYPE_F32
    params.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
    context = llama_cpp.llama_init_from_model(model, params)
    vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    answer, margins, feed = [], [], request["prompt"]
    for _ in range(request["count"]):
        logits = decode(context, feed, vocab_size)
        second, first = np.sort(logits)[-2:]
        feed = [int(logits.argmax())]
        answer += feed
        margins.append(float(first - second))
    sys.stdout.write("\n" + json.dumps({"tokens": answer, "margins": margins}) + "\n")
