"""Build SentencePiece's byte-pair tokenizers (Llama 2, Mistral 7B, Phi-3, Gemma) from a GGUF's pieces and scores.

A GGUF has no merges for these: SentencePiece joins whichever two neighbours make the piece of the highest score. Every
way to halve a piece is therefore a merge, ranked by the piece's score; of equal scores (runs of spaces and of line
breaks have the same) longer halves come first, so that a run becomes the longest piece there is.
"""

from collections.abc import Sequence
from itertools import islice

from tokenizers import Tokenizer, decoders, models, normalizers

from slipstream.checkpoint.files import shown
from slipstream.checkpoint.gguf_file import GgufReader
from slipstream.errors import CheckpointError

NORMAL, CONTROL, USER_DEFINED = 1, 3, 4
"""ggml's types of tokens."""
SPACE = "▁"
_LONGEST_PIECE = 128  # of characters; halving takes the square of them
_MOST_MERGES = 1 << 22  # eight times Gemma's


def sentencepiece_tokenizer(reader: GgufReader, tokens: Sequence[str], kinds: Sequence[int]) -> Tokenizer:
    """Return the tokenizer that a GGUF's pieces describe, without its control tokens."""
    prefix = bool(reader.metadata.get("tokenizer.ggml.add_space_prefix", True))
    unknown = reader.metadata.get("tokenizer.ggml.unknown_token_id")
    named = tokens[unknown] if isinstance(unknown, int) and 0 <= unknown < len(tokens) else None
    model = models.BPE(
        vocab={token: i for i, token in enumerate(tokens)},
        merges=_merges(reader, tokens, kinds),
        unk_token=named,
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    spaces = normalizers.Replace(" ", SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spaces]) if prefix else spaces
    steps: list[decoders.Decoder] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return tokenizer


def _merges(reader: GgufReader, tokens: Sequence[str], kinds: Sequence[int]) -> list[tuple[str, str]]:
    """Return every way to halve a piece into pieces, the best first."""
    scores = reader.metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) != len(tokens):
        raise CheckpointError(f"{reader.path}: 'tokenizer.ggml.scores' does not match the tokens.")
    pieces = {
        token: score
        for token, kind, score in zip(tokens, kinds, scores, strict=True)
        if kind == NORMAL or (kind == USER_DEFINED and is_run(token))
    }
    if too_long := next((piece for piece in pieces if len(piece) > _LONGEST_PIECE), None):
        raise CheckpointError(
            f"{reader.path}: piece {shown(too_long)} of its vocabulary is longer than {_LONGEST_PIECE} characters, "
            "as no SentencePiece model has them; fetch the file again."
        )
    found = (
        (-score, -at, at - len(piece), piece[:at], piece[at:])
        for piece, score in pieces.items()
        for at in range(1, len(piece))
        if piece[:at] in pieces and piece[at:] in pieces
    )
    halves = list(islice(found, _MOST_MERGES + 1))
    if len(halves) > _MOST_MERGES:
        raise CheckpointError(
            f"{reader.path}: its pieces can be halved in more than {_MOST_MERGES} ways, as no SentencePiece model's "
            "can; fetch the file again."
        )
    return [(left, right) for *_, left, right in sorted(halves)]


def is_run(token: str) -> bool:
    """Tell whether a piece is a run of spaces, which texts spell with other characters than the piece."""
    return not token.strip(SPACE)
