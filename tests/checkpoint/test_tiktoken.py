"""Kimi's tiktoken.model gives the ids of tiktoken's own algorithm, and its special tokens keep their ids."""

import json
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.checkpoint.tokenizer import Tokenizer
from slipstream.errors import CheckpointError
from tiny_tiktoken import FIRST, RANKS, pieces, write_tokenizer

texts = st.text(alphabet="abehlot HELO'sN,.!\n\t1234中文字日本語テストé\u0301𝔘🦙", max_size=60)


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


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tokenizer(tmp_path_factory.mktemp("kimi"))


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
