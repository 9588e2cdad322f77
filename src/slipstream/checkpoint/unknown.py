"""A target of a family that slipstream does not run: what it is, what is nearest, and what to do."""

import difflib
import re

from slipstream.checkpoint.families import FAMILIES
from slipstream.checkpoint.fields import Fields
from slipstream.checkpoint.files import shown
from slipstream.errors import CheckpointError

# Families with EAGLE-3 drafts or close relatives here, and what slipstream would have to learn for each.
_REASONS = {
    "BailingMoeForCausalLM": "Ling's first mixture of experts, for which transformers has no code to compare with",
    "BailingMoeV2ForCausalLM": "Ling 2's mixture of experts, for which transformers has no code to compare with",
    "BailingMoeLinearForCausalLM": "Ling with linear attention, whose state is no key that can be taken back",
    "Gemma2ForCausalLM": "it caps the scores of attention",
    "Gemma3nForConditionalGeneration": "it has embeddings for every block, and blocks that share keys",
    "DeepseekV32ForCausalLM": "its attention chooses keys by an index",
    "GlmMoeDsaForCausalLM": "its attention chooses keys by an index",
    "Qwen3NextForCausalLM": "some of its blocks have linear attention, whose state is no key that can be taken back",
}
_NEAREST = {"latent": "DeepseekV3ForCausalLM", "experts": "Qwen3MoeForCausalLM", "plain": "LlamaForCausalLM"}
_LONGEST = 80  # of a name that is compared
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


def unknown_family(fields: Fields, architecture: str) -> CheckpointError:
    """Return the sentence that refuses an architecture."""
    reason = _REASONS.get(architecture)
    return CheckpointError(
        f"{fields.file}: architecture {shown(architecture)} is not one that slipstream runs as a target"
        f"{_described(fields)}{': ' + reason if reason else ''}. The nearest it runs is "
        f"{_nearest(fields, architecture)}. To use an EAGLE-3 draft with this model all the same, let another engine "
        "run both: slipstream serve MODEL --draft DRAFT --engine vllm (or sglang). "
        f"Slipstream runs {', '.join(FAMILIES)}."
    )


def _described(fields: Fields) -> str:
    """Say in brackets how large the model is, as far as its config says so."""
    words = []
    for key, form in (("num_hidden_layers", "{} blocks"), ("hidden_size", "{} wide")):
        if isinstance(value := fields.values.get(key), int):
            words.append(form.format(value))
    experts = next((value for key in _EXPERTS if isinstance(value := fields.values.get(key), int)), None)
    if experts:
        words.append(f"{experts} experts")
    return f" ({', '.join(words)})" if words else ""


def _stem(architecture: str) -> str:
    return re.sub(r"(ForCausalLM|ForConditionalGeneration|LMHeadModel)$", "", architecture[:_LONGEST]).lower()


def _nearest(fields: Fields, architecture: str) -> str:
    """Return the family of the closest name, else the one with the same kind of attention and experts."""
    stems = {_stem(name): name for name in reversed(FAMILIES)}
    if close := difflib.get_close_matches(_stem(architecture), stems, n=1, cutoff=0.7):
        return stems[close[0]]
    if fields.has("kv_lora_rank"):
        return _NEAREST["latent"]
    return _NEAREST["experts" if any(fields.has(key) for key in _EXPERTS) else "plain"]
