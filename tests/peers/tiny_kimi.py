"""A tiny Kimi-K2.5 with Kimi's own tokenizer, whose weights are made so that strings end.

Its layers are random, so it has nothing to say; under a schema a random model also never closes a string. Here one
dimension of the residual stream is the same for every token (the embedding sets it, no layer writes to it), and the
head reads from it a large logit for tokens that only close things: quotes, brackets, braces, the end of a call and of
an answer, and a smaller one for commas. So a string ends as soon as the schema lets it, at any temperature up to 1.
"""

import json
import shutil
from pathlib import Path

import torch
from tests.tiny_moe import as_kimi, deepseek, save

from slipstream.checkpoint.tokenizer import Tokenizer

_CLOSING = ("<|tool_call_end|>", "<|tool_calls_section_end|>", "<|im_end|>")
_TEMPLATE = (
    "{% if tools %}<|im_system|>tool_declare<|im_middle|>{{ tools_ts_str or tools | tojson }}<|im_end|>{% endif %}"
    "{% for m in messages %}<|im_{{ m.role if m.role in ('user', 'assistant') else 'system' }}|>{{ m.role }}"
    "<|im_middle|>{{ m.content }}{% if m.tool_calls %}<|tool_calls_section_begin|>{% for c in m.tool_calls %}"
    "<|tool_call_begin|>{{ c.id }}<|tool_call_argument_begin|>{{ c.function.arguments }}<|tool_call_end|>{% endfor %}"
    "<|tool_calls_section_end|>{% endif %}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>{% endif %}"
)


def write_tiny_kimi(tokenizer_folder: Path, folder: Path) -> Path:
    """Write the checkpoint.

    Args:
        tokenizer_folder: has Kimi's tiktoken.model and tokenizer_config.json.
    """
    if (folder / "config.json").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(tokenizer_folder / "tiktoken.model", folder)
    settings = json.loads((tokenizer_folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    settings = {name: value for name, value in settings.items() if name != "auto_map"}
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": _TEMPLATE}))
    tokenizer = Tokenizer.load(folder)
    ends = tokenizer.encode("<|im_end|>", add_special=False)
    model = deepseek(
        vocab_size=163840,
        num_hidden_layers=2,
        max_position_embeddings=16384,
        bos_token_id=163584,
        eos_token_id=ends[0],
    )
    _let_strings_end(model.state_dict(), tokenizer)
    as_kimi(save(model, folder / "deepseek"), folder)
    shutil.rmtree(folder / "deepseek")
    return folder


def _let_strings_end(tensors: dict[str, torch.Tensor], tokenizer: Tokenizer) -> None:
    for name, value in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            value[..., 0, :] = 0.0  # nothing writes to the first dimension
    tensors["model.embed_tokens.weight"][:, 0] = 3.0
    tensors["model.norm.weight"][0] = 1.0
    head = tensors["lm_head.weight"]
    head[:, 0] = 0.0
    for token in range(tokenizer.vocab_size):
        text = tokenizer.token_text(token)
        if text in _CLOSING or (text and not set(text) - set('"]}')):
            head[token, 0] = 3.0
        elif text == ",":
            head[token, 0] = 1.5
