"""vLLM's own acceptance of a draft. Arguments: target, draft, tokens to draft, file of prompts (ids), file to write.

A draft whose config.json says `parallel_drafting` is P-EAGLE's, which vLLM must be told, and one whose architecture is
DFlash's drafts by that method.
"""

import json
import sys
from pathlib import Path

from vllm import LLM, SamplingParams, TokensPrompt

if __name__ == "__main__":
    target, draft, depth, prompts, out = sys.argv[1:]
    config = json.loads((Path(draft) / "config.json").read_text())
    masked, blocks = config.get("parallel_drafting", False), config["architectures"] == ["DFlashDraftModel"]
    speculative = {"method": "dflash" if blocks else "eagle3", "model": draft, "num_speculative_tokens": int(depth)}
    llm = LLM(
        target,
        dtype="float32",
        speculative_config=speculative | ({"parallel_drafting": True} if masked else {}),
        enforce_eager=True,
        max_model_len=1024,
        max_num_seqs=8,
        disable_log_stats=False,
    )
    asked = [TokensPrompt(prompt_token_ids=ids) for ids in json.loads(Path(prompts).read_text())]
    outputs = llm.generate(asked, SamplingParams(temperature=0.0, max_tokens=128), use_tqdm=False)
    counts = {metric.name: metric for metric in llm.get_metrics() if "spec_decode" in metric.name}
    result = {
        "drafts": counts["vllm:spec_decode_num_drafts"].value,
        "accepted": counts["vllm:spec_decode_num_accepted_tokens"].value,
        "by_position": counts["vllm:spec_decode_num_accepted_tokens_per_pos"].values,
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
    }
    Path(out).write_text(json.dumps(result))
