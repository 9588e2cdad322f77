"""Kimi's tiktoken.model gives the ids of tiktoken's own algorithm, and its special tokens keep their ids."""

import base64
import json
from collections import Counter
from itertools import pairwise

import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.checkpoint.tiktoken_file import KIMI_SPLIT
from slipstream.checkpoint.tokenizer import Tokenizer
from slipstream.errors import CheckpointError

CORPUS = (
    "the then they HELLO Hello it's 中文字符中文 日本語テスト 1234 aaaa aaabab naïve été\n\n  def f(x):\n    return x"
)
SPECIAL = {0: "[BOS]", 1: "[EOS]", 2: "<|im_end|>", 3: "<|im_user|>", 4: "<|im_assistant|>", 17: "<|im_middle|>"}
TEMPLATE = (
    "{%- for message in messages -%}<|im_user|>{{ message['role'] }}<|im_middle|>{{ message['content'] }}<|im_end|>"
    "{%- endfor -%}{%- if add_generation_prompt -%}<|im_assistant|>assistant<|im_middle|>{%- endif -%}"
)
texts = st.text(alphabet="abehlot HELO'sN,.!\n\t1234中文字日本語テストé\u0301𝔘🦙", max_size=60)


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


def reference_ids(text: str, ranks: dict[bytes, int]) -> list[int]:
    """Encode as tiktoken does: per piece, merge the pair of the lowest rank, leftmost first, until none is known."""
    ids = []
    for piece in pieces(text):
        parts = [piece] if piece in ranks else [bytes([byte]) for byte in piece]
        while True:
            known = [(ranks[a + b], i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in ranks]
            if not known:
                break
            at = min(known)[1]
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        ids += [ranks[part] for part in parts]
    return ids


RANKS = train(256 + 48)
FIRST = len(RANKS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kimi")
    lines = [f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in RANKS.items()]
    (folder / "tiktoken.model").write_text("".join(lines))
    added = {str(FIRST + offset): {"content": name, "special": True} for offset, name in SPECIAL.items()}
    added[str(FIRST + 30)] = {"content": "<think>", "special": False}
    config = {"bos_token": "[BOS]", "eos_token": "[EOS]", "added_tokens_decoder": added}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": FIRST + 2}))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder):
    return Tokenizer.load(folder)


@settings(max_examples=300, deadline=None)
@given(text=texts)
def test_ids_are_those_of_tiktokens_own_algorithm_and_decode_to_the_text(tokenizer, text):
    ids = tokenizer.encode(text)
    assert ids == reference_ids(text, RANKS)
    assert tokenizer.decode(ids) == text


def test_special_tokens_keep_their_ids_and_the_rest_are_reserved(tokenizer):
    assert tokenizer.vocab_size == FIRST + 256
    assert tokenizer.encode("[BOS]the<|im_middle|>") == [FIRST, *reference_ids("the", RANKS), FIRST + 17]
    assert tokenizer.encode(f"<|reserved_token_{FIRST + 255}|>") == [FIRST + 255]
    assert tokenizer.bos_token_id == FIRST
    assert tokenizer.eos_token_ids == (FIRST + 2, FIRST + 1)


def test_only_tokens_marked_special_are_skipped(tokenizer):
    ids = tokenizer.encode("<think>the<|im_end|>")
    assert ids[0] == FIRST + 30
    assert tokenizer.decode(ids) == "<think>the"
    assert tokenizer.decode(ids, skip_special=False) == "<think>the<|im_end|>"


def test_a_chat_is_rendered_by_the_template_file(tokenizer):
    ids = tokenizer.encode_chat([{"role": "user", "content": "the 中文"}])
    text = tokenizer.decode(ids, skip_special=False)
    assert text == "<|im_user|>user<|im_middle|>the 中文<|im_end|><|im_assistant|>assistant<|im_middle|>"
    assert ids[-1] == FIRST + 17


def test_characters_split_over_tokens_stream_whole(tokenizer):
    detokenizer = tokenizer.detokenizer()
    text = "naïve 🦙 日本語"
    assert "".join(detokenizer.push([token_id]) for token_id in tokenizer.encode(text)) + detokenizer.finish() == text


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["YQ== 0", "not base64! 1"], "line 2 is no base64 token"),
        (["YQ== 0", "Yg== 5"], "ranks are not 0 to 1"),
        (["YQ== 0", "Yg== 1"], "no token for 254 of the 256 bytes"),
    ],
)
def test_a_damaged_file_is_named_with_its_line(tmp_path, lines, message):
    (tmp_path / "tiktoken.model").write_text("\n".join(lines))
    with pytest.raises(CheckpointError, match=message):
        Tokenizer.load(tmp_path)


def test_a_special_token_outside_its_place_is_refused(folder, tmp_path):
    (tmp_path / "tiktoken.model").write_bytes((folder / "tiktoken.model").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": {"7": {"content": "[X]"}}}))
    with pytest.raises(CheckpointError, match=r"'\[X\]' under '7'"):
        Tokenizer.load(tmp_path)
