"""Build a tokenizer from Kimi's tiktoken.model: ranked byte strings, as byte-level BPE of the `tokenizers` library."""

import base64
import binascii
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from slipstream.checkpoint.files import read_bytes, shown
from slipstream.errors import CheckpointError

FILE_NAME = "tiktoken.model"
_MAX_BYTES = 16 << 20
_LONGEST_TOKEN = 512  # bytes; every cut of a token is looked at
_RESERVED = 256  # ids after the last rank are special tokens, named or not
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
# How Kimi cuts a text before merging; the file holds no pattern, only Kimi's own code does (tokenization_kimi.py).
KIMI_SPLIT = "|".join(
    (
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTION}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTION}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)


def tiktoken_tokenizer(path: Path, settings: Mapping[str, Any]) -> Tokenizer:
    """Return the tokenizer of a tiktoken file; `settings` is tokenizer_config.json, which names special tokens."""
    ranks = read_ranks(path)
    spelled = {token: "".join(_BYTE_CHARS[byte] for byte in token) for token in ranks}
    special = _special_tokens(settings, len(ranks), path)
    vocab = {spelled[token]: rank for token, rank in ranks.items()} | {
        token.content: token_id for token_id, token in special.items()
    }
    merges = [(spelled[left], spelled[right]) for left, right in _merges(ranks)]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(KIMI_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    for is_special, add in ((True, tokenizer.add_special_tokens), (False, tokenizer.add_tokens)):
        add([token for _, token in sorted(special.items()) if token.special == is_special])
    return tokenizer


def read_ranks(path: Path) -> dict[bytes, int]:
    """Return the ranked byte strings of a file: one to a line, in base64, with its rank, which is its id."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(read_bytes(path, _MAX_BYTES).splitlines(), start=1):
        if not line.strip():
            continue
        try:
            text, rank = line.split()
            token = base64.b64decode(text, validate=True)
            if not 0 < len(token) <= _LONGEST_TOKEN:
                raise ValueError("too long or empty")
            ranks[token] = int(rank)
        except (ValueError, binascii.Error) as error:
            raise CheckpointError(
                f"{path}: line {number} is no base64 token and rank; fetch the file again."
            ) from error
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise CheckpointError(f"{path}: the ranks are not 0 to {len(ranks) - 1}; fetch the file again.")
    if missing := [byte for byte in range(256) if bytes([byte]) not in ranks]:
        raise CheckpointError(f"{path}: has no token for {len(missing)} of the 256 bytes; fetch the file again.")
    return ranks


def _merges(ranks: Mapping[bytes, int]) -> list[tuple[bytes, bytes]]:
    """Return every pair that makes a token, in the order of ranks: tiktoken merges what makes the lowest rank."""
    merges = []
    for token in sorted(ranks, key=lambda token: ranks[token]):
        pairs = ((token[:cut], token[cut:]) for cut in range(1, len(token)))
        known = [(left, right) for left, right in pairs if left in ranks and right in ranks]
        merges += sorted(known, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
    return merges


def _special_tokens(settings: Mapping[str, Any], first: int, path: Path) -> dict[int, AddedToken]:
    """Return the tokens after the last rank, by id; those without a name get Kimi's name for reserved ones."""
    tokens = {
        token_id: AddedToken(f"<|reserved_token_{token_id}|>", normalized=False, special=True)
        for token_id in range(first, first + _RESERVED)
    }
    added = settings.get("added_tokens_decoder") or {}
    if not isinstance(added, Mapping):
        raise CheckpointError(f"{path.parent / 'tokenizer_config.json'}: added_tokens_decoder is no object.")
    for key, entry in added.items():
        content = entry.get("content") if isinstance(entry, Mapping) else None
        known = key.isdecimal() and len(key) < len(str(first)) + 3 and int(key) in tokens
        if not known or not isinstance(content, str) or not 0 < len(content) <= _LONGEST_TOKEN:
            raise CheckpointError(
                f"{path.parent / 'tokenizer_config.json'}: added_tokens_decoder names {shown(content)} under "
                f"{shown(key)}; special tokens of {path.name} have ids {first} to {first + _RESERVED - 1}."
            )
        tokens[int(key)] = AddedToken(content, normalized=False, special=bool(entry.get("special", True)))
    return tokens


def _byte_chars() -> list[str]:
    """Return what byte-level BPE writes for each byte: itself if printable in Latin-1, else a letter from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


_BYTE_CHARS = _byte_chars()
