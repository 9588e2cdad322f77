"""Read a tokenizer.json that somebody else wrote: what could unfold or backtrack without end is refused.

How much longer replacements make a text is worked out. What patterns cost is not told by looking at them, so they are
tried in a child process with limits, on texts made to bring out the worst in them.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as FastTokenizer

from slipstream.checkpoint.confined import Confined, LimitError, Limits
from slipstream.checkpoint.files import parse_json, read_bytes, short
from slipstream.checkpoint.gguf_tokenizer import LONGEST_TOKEN
from slipstream.errors import CheckpointError

MAX_BYTES = 128 << 20
_TRIAL = Limits(cpu_s=4.0, memory_bytes=2 << 30, answer_bytes=1 << 20)
_MAX_ID = 1 << 24
_MAX_GROWTH = 4096
_MAX_ITEMS = 256
"""Steps of a normalizer, items of a template: more than any tokenizer has."""
_REPEATS = 1000
_MAX_PIECES = 60
_PARTS = ("normalizer", "pre_tokenizer", "post_processor", "decoder")
_TRIED = ("normalizer", "pre_tokenizer")
_WITH_PATTERNS = ("Replace", "Split", "Precompiled")


def read_tokenizer(path: Path) -> FastTokenizer:
    """Return the tokenizer of a tokenizer.json; CheckpointError if it is none, or takes too much time or memory."""
    content = read_bytes(path, MAX_BYTES)
    try:
        settings = parse_json(content)
    except ValueError as error:
        raise CheckpointError(f"{path}: is not valid JSON ({error}); fetch the file again.") from error
    if not isinstance(settings, dict) or not isinstance(settings.get("model"), dict):
        raise CheckpointError(f"{path}: is not a tokenizer this version can read (it has no 'model').")
    _check_tokens(path, settings)
    _check_growth(path, settings)
    _try_patterns(path, settings)
    try:
        return FastTokenizer.from_buffer(content)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # tokenizers raises Exception, and its panics are no Exceptions
        raise CheckpointError(f"{path}: is not a tokenizer this version can read ({short(str(error))}).") from error


def _check_tokens(path: Path, settings: Mapping[str, Any]) -> None:
    """Refuse tokens that are too long to be given out one by one, and ids that no table can be made for."""
    vocab, added = settings["model"].get("vocab"), settings.get("added_tokens") or []
    named = list(vocab.items()) if isinstance(vocab, dict) else []
    if isinstance(vocab, list):  # Unigram's: pairs of a token and its score
        named = [(entry[0], i) for i, entry in enumerate(vocab) if isinstance(entry, list) and entry]
    if isinstance(added, list):
        named += [(token.get("content"), token.get("id")) for token in added if isinstance(token, dict)]
    for token, token_id in named:
        if not isinstance(token, str) or not isinstance(token_id, int) or not 0 <= token_id < _MAX_ID:
            raise CheckpointError(f"{path}: token {short(str(token))!r} has id {short(str(token_id))}; it is damaged.")
        if len(token) > LONGEST_TOKEN:
            raise CheckpointError(
                f"{path}: token {token_id} has {len(token)} characters; at most {LONGEST_TOKEN} are read."
            )


def _check_growth(path: Path, settings: Mapping[str, Any]) -> None:
    """Refuse parts that could make a text longer by a factor no tokenizer has, on the way in or out."""
    for name in _PARTS:
        parts = list(_nested(settings.get(name)))
        growth = math.prod(_growth(part) for part in parts[:_MAX_ITEMS])
        longest = max(
            (len(value) for part in parts for value in part.values() if isinstance(value, list | dict)), default=0
        )
        if len(parts) > _MAX_ITEMS or longest > _MAX_ITEMS or growth > _MAX_GROWTH:
            raise CheckpointError(
                f"{path}: its {name} has {len(parts)} steps which may make a text {growth} times as long; the file is "
                "damaged or malicious."
            )


def _growth(part: Mapping[str, Any]) -> int:
    """Return how many times longer a text may be after one step."""
    content, pattern = part.get("content"), part.get("pattern")
    replaced = pattern.get("String") if isinstance(pattern, dict) else None
    longest = max((len(value) for value in (content, part.get("prepend")) if isinstance(value, str)), default=0)
    return max(1, -(-longest // max(1, len(replaced) if isinstance(replaced, str) else 1)))


def _nested(part: Any) -> Iterator[Mapping[str, Any]]:  # foreign JSON
    """Yield a part and those inside it."""
    if not isinstance(part, dict):
        return
    yield part
    for key in ("normalizers", "pretokenizers", "decoders", "processors"):
        inner = part.get(key)
        for item in inner if isinstance(inner, list) else []:
            yield from _nested(item)


def _try_patterns(path: Path, settings: Mapping[str, Any]) -> None:
    """Raise CheckpointError unless a child process gets quickly through texts that patterns like to choke on."""
    parts = {name: settings.get(name) for name in _TRIED}
    if not any(part.get("type") in _WITH_PATTERNS for value in parts.values() for part in _nested(value)):
        return
    tiny = {"version": "1.0", "added_tokens": [], "model": {"type": "WordLevel", "vocab": {"?": 0}, "unk_token": "?"}}
    child = Confined("slipstream.checkpoint.tokenizer_program", _TRIAL)
    try:
        answer = child.call({"tokenizer": json.dumps({**tiny, **parts}), "texts": _hard_texts(parts)})
    except LimitError as error:
        raise CheckpointError(
            f"{path}: its patterns cannot be run on a text of {_REPEATS} characters ({error}); the file is damaged or "
            "malicious."
        ) from error
    finally:
        child.close()
    if "failed" in answer:
        raise CheckpointError(f"{path}: is not a tokenizer this version can read ({answer['failed']}).")


def _hard_texts(parts: Mapping[str, Any]) -> list[str]:
    """Return short texts repeated: common characters, and whatever the file's own patterns name."""
    pieces = ["a", " ", "\n", "1", ".", "A", "é", "字", "\ufdfa", "aA", "a ", "a.", " \n", "ab1. "]
    for value in parts.values():
        for part in _nested(value):
            pattern = part.get("pattern")
            for text in pattern.values() if isinstance(pattern, dict) else []:
                if isinstance(text, str):
                    pieces += [text[:64], *sorted(set(re.sub(r"\\[a-zA-Z]", "", text[:1000])))]
    texts = [piece for piece in dict.fromkeys(pieces) if piece][:_MAX_PIECES]
    return [(piece * -(-_REPEATS // len(piece)))[:_REPEATS] + end for piece in texts for end in ("", "\u0001")]
