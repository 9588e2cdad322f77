"""A tiny Kimi-K2.5 with Kimi's own tokenizer, whose weights are made so that strings end, and a draft for it.

It has the published architecture and names. Its blocks add nothing, so that a token's successor depends on that token
alone. Every token has a score of its own, and scores are so far apart that whatever is sampled an answer under a schema
ends: a thought or answer that may end does, a string is closed before anything is added to it, an array or object as
soon as it may be (at once, where it has just been opened: one that holds others of its kind would otherwise go on for
ever), and a value that ends by itself (null, true, a digit) is preferred to one that has to be closed.
"""

import json
import shutil
from pathlib import Path

import torch
from tests.tiny_moe import BY_HEAD, LIGHTSEEK, as_kimi, deepseek, draft_shapes, save, tensors_of, weights, write

from slipstream.checkpoint.tokenizer import Tokenizer

CONTEXT = 8192
_ENDS, _QUOTE, _CLOSES, _SEPARATES, _WORD, _DIGIT, _OPENS, _SPACES = 55.0, 45.0, 35.0, 28.0, 25.0, 20.0, 15.0, -10.0
_CLOSES_AT_ONCE = 30.0  # added for what closes an array or object, right after what opens one
_SCORES = {
    **dict.fromkeys(("</think>", "<|tool_call_end|>", "<|tool_calls_section_end|>", "<|im_end|>"), _ENDS),
    '"': _QUOTE,
    **dict.fromkeys("}]", _CLOSES),
    **dict.fromkeys((",", ":"), _SEPARATES),
    **{word[:length]: _WORD for word in ("null", "true", "false") for length in range(1, len(word) + 1)},
    **dict.fromkeys("0123456789", _DIGIT),
    **dict.fromkeys("{[", _OPENS),
}
_HEAD, _FAST = 32, 4  # a head's size; of its rotary pairs, those that turn fast
_SHARPNESS = 10.0
_CONSTANT = 8.0  # the part that all embeddings share, and that scores are read from; a second one marks what opens
# What a chat becomes, part by part as in Kimi-K2.5's own: reasoning stays after the last answer that calls no tool.
TEMPLATE = """
{%- macro text(content) -%}
{%- if content is string -%}{{ content }}{%- elif content -%}{%- for part in content -%}{{ part.text }}{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
{%- macro calls(message) -%}
<|tool_calls_section_begin|>
{%- for call in message.tool_calls -%}
<|tool_call_begin|>{{ call.id }}<|tool_call_argument_begin|>
{%- if call.function.arguments is string -%}{{ call.function.arguments }}{%- else -%}
{{ call.function.arguments | tojson }}{%- endif -%}
<|tool_call_end|>
{%- endfor -%}
<|tool_calls_section_end|>
{%- endmacro -%}
{%- set seen = namespace(last=-1) -%}
{%- for message in messages -%}
{%- if message.role == "assistant" and not message.tool_calls -%}{%- set seen.last = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- if tools -%}
<|im_system|>tool_declare<|im_middle|>
{%- if tools_ts_str -%}{{ tools_ts_str }}{%- else -%}{{ tools | tojson }}{%- endif -%}
<|im_end|>
{%- endif -%}
{%- for message in messages -%}
{%- if message.role == "user" -%}<|im_user|>
{%- elif message.role == "assistant" -%}<|im_assistant|>
{%- else -%}<|im_system|>{%- endif -%}
{{ message.name or message.role }}<|im_middle|>
{%- if message.role == "assistant" -%}
<think>{%- if loop.index0 > seen.last -%}{{ message.reasoning_content or "" }}{%- endif -%}</think>
{%- elif message.role == "tool" -%}## Return of {{ message.tool_call_id }}{{ "\\n" }}{%- endif -%}
{{ text(message.content) }}{%- if message.tool_calls -%}{{ calls(message) }}{%- endif -%}<|im_end|>
{%- endfor -%}
{%- if add_generation_prompt -%}<|im_assistant|>assistant<|im_middle|>
{%- if thinking is defined and not thinking -%}<think></think>{%- else -%}<think>{%- endif -%}
{%- endif -%}
"""


def write_tiny_kimi(tokenizer_folder: Path, folder: Path, template: str = TEMPLATE) -> tuple[Path, Path]:
    """Write the target and a draft for it; returns their folders.

    Args:
        tokenizer_folder: has Kimi's tiktoken.model and tokenizer_config.json.
    """
    target, draft = folder / "kimi", folder / "draft"
    target.mkdir(parents=True, exist_ok=True)
    (target / "chat_template.jinja").write_text(template, encoding="utf-8")
    if (draft / "config.json").exists():
        return target, draft
    for name in ("tiktoken.model", "tokenizer_config.json"):
        shutil.copy(tokenizer_folder / name, target / name)
    tokenizer = Tokenizer.load(target)
    size = tokenizer.vocab_size
    plain = save(deepseek(vocab_size=size, max_position_embeddings=CONTEXT), folder / "plain")
    as_kimi(plain, folder / "rewritten")
    tensors = tensors_of(folder / "rewritten")
    for name, value in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            value.zero_()
    texts = [tokenizer.token_text(i) for i in range(size)]
    embeddings = tensors["language_model.model.embed_tokens.weight"]
    embeddings[:, 0] = _CONSTANT
    embeddings[:, 1] = torch.tensor([_CONSTANT * text.endswith(("{", "[")) for text in texts])
    tensors["language_model.model.norm.weight"].fill_(1.0)
    head = tensors["language_model.lm_head.weight"]
    width = head.shape[1]
    head[:, 0] = torch.tensor([_score(text) for text in texts]) / width**0.5
    head[:, 1] = torch.tensor([_CLOSES_AT_ONCE * (text in ("}", "]")) for text in texts]) / width**0.5
    config = json.loads((folder / "rewritten" / "config.json").read_text())
    config["eos_token_id"] = tokenizer.added_token_ids["<|im_end|>"]
    write(target, config, tensors)
    sizes = {"vocab_size": size, "draft_vocab_size": size, "max_position_embeddings": CONTEXT}
    write(draft, {**LIGHTSEEK, **sizes, "norm_before_residual": True}, _follower(head))
    return target, draft


def _follower(head: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return a draft that reads the last token alone, as the target does, and so knows what it would choose.

    A draft sees that token's embedding through its attention only. Queries and keys are the same for every token and
    turn fast with their positions, so each position attends to itself; values are embeddings, and nothing else is left.
    """
    size, width = head.shape
    tensors = weights({**draft_shapes(BY_HEAD), "lm_head.weight": (size, width)})
    for name, value in tensors.items():
        value.fill_(1.0) if value.dim() == 1 else value.zero_()
        if name.endswith("hidden_norm.weight"):
            value.zero_()  # of features and of what was fed back
    tensors["lm_head.weight"] = head.clone()
    attention = {name: tensors[f"midlayer.self_attn.{name}_proj.weight"] for name in "qkvo"}
    attention["v"][:width, :width] = torch.eye(width)
    attention["o"][:, :width] = torch.eye(width)
    for rows in attention["q"].split(_HEAD), attention["k"].split(_HEAD):
        for head_rows in rows:
            head_rows[:_FAST, 0] = _SHARPNESS  # embeddings have the same number there
    return tensors


def _score(text: str) -> float:
    """Return how much a token is liked wherever a grammar allows it."""
    if not text.strip():
        return _SPACES
    return _SCORES.get(text, 0.0)
