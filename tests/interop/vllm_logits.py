"""Run a checkpoint in vLLM on the CPU: the log probabilities of prompt tokens. Arguments: a folder, a JSON request.

The request: {"prompt": [...], "draft": folder or null}.
"""

import json
import os
import sys

os.environ.update(VLLM_CPU_KVCACHE_SPACE="1", VLLM_LOGGING_LEVEL="ERROR", VLLM_ENABLE_V1_MULTIPROCESSING="0")

from vllm import LLM, SamplingParams

if __name__ == "__main__":
    folder, request = sys.argv[1], json.loads(sys.argv[2])
    draft = {"method": "eagle3", "model": request["draft"], "num_speculative_tokens": 3} if request["draft"] else None
    model = LLM(
        model=folder, skip_tokenizer_init=True, enforce_eager=True, max_model_len=128, dtype="bfloat16",
        speculative_config=draft,
    )  # fmt: skip
    params = SamplingParams(max_tokens=8, temperature=0, prompt_logprobs=0, detokenize=False, ignore_eos=True)
    (output,) = model.generate([{"prompt_token_ids": request["prompt"]}], params)
    logprobs = [
        entry[token].logprob for token, entry in zip(request["prompt"][1:], output.prompt_logprobs[1:], strict=True)
    ]
    sys.stdout.write("\n" + json.dumps({"logprobs": logprobs, "tokens": list(output.outputs[0].token_ids)}) + "\n")
