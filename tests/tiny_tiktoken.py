"""A tiny tokenizer in Kimi's files, trained on a line of text."""

import base64
import json
from collections import Counter
from itertools import pairwise
from pathlib import Path

import regex

from slipstream.checkpoint.tiktoken_file import KIMI_SPLIT

CORPUS = (
    "the then they HELLO Hello it's 中文字符中文 日本語テスト 1234 aaaa aaabab naïve été\n\n  def f(x):\n    return x"
)
SPECIAL = {0: "[BOS]", 1: "[EOS]", 2: "<|im_end|>", 3: "<|im_user|>", 4: "<|im_assistant|>", 17: "<|im_middle|>"}
TEMPLATE = (
    "{%- for message in messages -%}<|im_user|>{{ message['role'] }}<|im_middle|>{{ message['content'] }}<|im_end|>"
    "{%- endfor -%}{%- if add_generation_prompt -%}<|im_assistant|>assistant<|im_middle|>{%- endif -%}"
)


def pieces(text: str) -> list[bytes]:
    return [piece.encode() for piece in regex.findall(KIMI_SPLIT, text, regex.V1)]


def train(size: int) -> dict[bytes, int]:
    """Return ranks as plain byte-pair training gives them."""
    ranks = {bytes([byte]): byte for byte in range(256)}
    words = Counter(pieces(CORPUS))
    split = {word: [bytes([byte]) for byte in word] for word in words}
    while len(ranks) < size:
        pairs = Counter()
        for word, parts in split.items():
            for pair in pairwise(parts):
                pairs[pair] += words[word]
        best = max(pairs, key=lambda pair: (pairs[pair], pair))
        ranks.setdefault(best[0] + best[1], len(ranks))
        split = {word: merged(parts, best) for word, parts in split.items()}
    return ranks


def merged(parts: list[bytes], pair: tuple[bytes, bytes]) -> list[bytes]:
    out: list[bytes] = []
    for part in parts:
        if out and (out[-1], part) == pair:
            out[-1] += part
        else:
            out.append(part)
    return out


RANKS = train(256 + 48)
FIRST = len(RANKS)


def write_tokenizer(folder: Path) -> Path:
    """Write the files Kimi ships its tokenizer in."""
    lines = [f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in RANKS.items()]
    (folder / "tiktoken.model").write_text("".join(lines))
    added = {str(FIRST + offset): {"content": name, "special": True} for offset, name in SPECIAL.items()}
    added[str(FIRST + 30)] = {"content": "<think>", "special": False}
    config = {"bos_token": "[BOS]", "eos_token": "[EOS]", "added_tokens_decoder": added}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": FIRST + 2}))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder
