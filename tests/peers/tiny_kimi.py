"""A tiny Kimi-K2.5 with Kimi's own tokenizer, whose weights are made so that strings end, and a draft for it.

It has the published architecture and names. Its blocks add nothing, so that a token's successor depends on that token
alone, and every token has a score of its own: what closes a string, an array or an object scores highest, and null
where a list of objects would go on for ever. So answers under a schema end.
"""

import json
import shutil
from pathlib import Path

import torch
from tests.tiny_moe import BY_HEAD, LIGHTSEEK, as_kimi, deepseek, draft_shapes, save, tensors_of, weights, write

from slipstream.checkpoint.tokenizer import Tokenizer

CONTEXT = 8192
_CLOSES, _NULL, _SEPARATES, _SPACES = 30.0, 25.0, 20.0, -10.0
_CONSTANT = 8.0  # the part that all embeddings share, and that scores are read from
TEMPLATE = (
    "{%- if tools -%}<|im_system|>tool_declare<|im_middle|>{{ tools_ts_str or tools | tojson }}<|im_end|>{%- endif -%}"
    "{%- for m in messages -%}<|im_user|>{{ m.role }}<|im_middle|>{{ m.content or '' }}<|im_end|>{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|im_assistant|>assistant<|im_middle|>"
    "{%- if thinking is defined and not thinking -%}<think></think>{%- else -%}<think>{%- endif -%}{%- endif -%}"
    "{#- <|tool_calls_section_begin|><|tool_call_begin|> -#}"
)


def write_tiny_kimi(tokenizer_folder: Path, folder: Path) -> tuple[Path, Path]:
    """Write the target and a draft for it; returns their folders.

    Args:
        tokenizer_folder: has Kimi's tiktoken.model and tokenizer_config.json.
    """
    target, draft = folder / "kimi", folder / "draft"
    if (draft / "config.json").exists():
        return target, draft
    target.mkdir(parents=True, exist_ok=True)
    for name in ("tiktoken.model", "tokenizer_config.json"):
        shutil.copy(tokenizer_folder / name, target / name)
    (target / "chat_template.jinja").write_text(TEMPLATE)
    tokenizer = Tokenizer.load(target)
    size = tokenizer.vocab_size
    plain = save(deepseek(vocab_size=size, max_position_embeddings=CONTEXT), folder / "plain")
    as_kimi(plain, folder / "rewritten")
    tensors = tensors_of(folder / "rewritten")
    for name, value in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            value.zero_()
    tensors["language_model.model.embed_tokens.weight"][:, 0] = _CONSTANT
    tensors["language_model.model.norm.weight"].fill_(1.0)
    head = tensors["language_model.lm_head.weight"]
    width = head.shape[1]
    head[:, 0] = torch.tensor([_score(tokenizer.token_text(i)) for i in range(size)]) / width**0.5
    config = json.loads((folder / "rewritten" / "config.json").read_text())
    config["eos_token_id"] = tokenizer.added_token_ids["<|im_end|>"]
    write(target, config, tensors)
    follower = weights({**draft_shapes(BY_HEAD), "lm_head.weight": (size, width)})
    follower["lm_head.weight"] = head.clone()
    follower["fc.weight"] = torch.cat([torch.eye(width), torch.zeros(width, 2 * width)], dim=1)
    for name in ("midlayer.self_attn.o_proj.weight", "midlayer.mlp.down_proj.weight"):
        follower[name].zero_()
    sizes = {"vocab_size": size, "draft_vocab_size": size, "max_position_embeddings": CONTEXT}
    write(draft, {**LIGHTSEEK, **sizes}, follower)
    return target, draft


def _score(text: str) -> float:
    """Return how much a token is liked wherever a grammar allows it."""
    if not text.strip():
        return _SPACES
    if text in ('"', "}", "]", "<|tool_call_end|>", "<|tool_calls_section_end|>", "<|im_end|>"):
        return _CLOSES
    if text in ("null", "n", "nu", "nul"):
        return _NULL  # ends a list that would go on with another object
    return _SEPARATES if text in (",", ":", "{", "[", *"0123456789") else 0.0
