"""Build a tokenizer from a GGUF file's metadata: byte-level BPE with the file's pre-tokenizer, or SentencePiece's."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from slipstream.checkpoint.files import shown
from slipstream.checkpoint.gguf_file import GgufReader
from slipstream.checkpoint.gguf_sentencepiece import CONTROL, USER_DEFINED, is_run, sentencepiece_tokenizer
from slipstream.checkpoint.tiktoken_file import KIMI_SPLIT
from slipstream.errors import CheckpointError

LONGEST_TOKEN = 4096
"""More characters than any token has; a longer one would be given out with every step that emits it."""
_ENDS = ("<end_of_turn>", "<|call|>", "<|return|>")  # Gemma's and gpt-oss's, of which a file names one at most
_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_O200K_SPLIT = (  # of GPT-4o and gpt-oss: words by case, their contractions with them
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_ENDING}|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_ENDING}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEEPSEEK_SPLITS = (  # of DeepSeek-V3: numbers, then runs of Chinese and Japanese, then words
    r"\p{N}{1,3}",
    r"[一-龥぀-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_WHOLE_FIRST = ("llama-bpe", "gpt-4o", "glm4", "kimi-k2")  # a word that is a token is not merged from its parts
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")


@dataclass(frozen=True)
class GgufTokenizer:
    """A tokenizer out of a GGUF file and the settings that Hugging Face keeps in tokenizer_config.json.

    Args:
        ends: tokens that end an answer, beside the eos token.
    """

    tokenizer: Tokenizer
    settings: dict[str, Any]
    ends: tuple[int, ...]


def gguf_tokenizer(reader: GgufReader) -> GgufTokenizer:
    """Return the tokenizer a GGUF file describes."""
    model, pre = reader.text("tokenizer.ggml.model"), reader.metadata.get("tokenizer.ggml.pre", "default")
    if model not in ("gpt2", "llama") or not isinstance(pre, str) or pre not in _PRE_TOKENIZERS:
        raise CheckpointError(
            f"{reader.path}: tokenizer {shown(model)} with pre-tokenizer {shown(pre)} cannot be built from GGUF. "
            f"Slipstream builds byte-level BPE ('gpt2') with {', '.join(sorted(_PRE_TOKENIZERS))}, and SentencePiece's "
            "('llama'); for others use the original Hugging Face folder."
        )
    tokens = _strings(reader, "tokenizer.ggml.tokens")
    kinds = _kinds(reader, tokens)
    try:
        if model == "llama":
            tokenizer = sentencepiece_tokenizer(reader, tokens, kinds)
        else:
            tokenizer = _byte_pairs(reader, tokens, pre)
    except CheckpointError:
        raise
    except Exception as error:  # tokenizers raises nothing narrower
        raise CheckpointError(f"{reader.path}: its tokens and merges make no tokenizer ({error}).") from error
    _add_special_tokens(tokenizer, tokens, kinds)
    settings = _settings(reader, tokens)
    if settings["add_bos_token"]:
        bos = settings["bos_token"]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A",
            pair=f"{bos} $A {bos}:1 $B:1",
            special_tokens=[(bos, reader.metadata["tokenizer.ggml.bos_token_id"])],
        )
    return GgufTokenizer(tokenizer, settings, _ends(reader, tokens, kinds))


def _byte_pairs(reader: GgufReader, tokens: list[str], pre: str) -> Tokenizer:
    merges = [_pair(merge) for merge in _strings(reader, "tokenizer.ggml.merges")]
    vocab = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre in _WHOLE_FIRST))
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(_PRE_TOKENIZERS[pre]())
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _strings(reader: GgufReader, key: str) -> list[str]:
    value = reader.metadata.get(key)
    if not isinstance(value, list) or not all(isinstance(item, str) and len(item) <= LONGEST_TOKEN for item in value):
        raise CheckpointError(f"{reader.path}: metadata key {key!r} is missing or not a list of short strings.")
    return value


def _pair(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right


def _kinds(reader: GgufReader, tokens: list[str]) -> list[int]:
    kinds = reader.metadata.get("tokenizer.ggml.token_type")
    if not isinstance(kinds, list) or len(kinds) != len(tokens):
        raise CheckpointError(f"{reader.path}: 'tokenizer.ggml.token_type' does not match the tokens.")
    return kinds


def _ends(reader: GgufReader, tokens: list[str], kinds: list[int]) -> tuple[int, ...]:
    """Return the tokens that end a turn, by the file's word or by their names, where they are control tokens."""
    named = [reader.metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eot", "eom")]
    found = [i for i in named if isinstance(i, int) and 0 <= i < len(tokens)]
    return (*found, *(i for i, kind in enumerate(kinds) if kind == CONTROL and tokens[i] in _ENDS))


def _add_special_tokens(tokenizer: Tokenizer, tokens: list[str], kinds: list[int]) -> None:
    for kind, special in ((CONTROL, True), (USER_DEFINED, False)):
        added = [
            AddedToken(token, normalized=False, special=special)
            for token, token_kind in zip(tokens, kinds, strict=True)
            if token_kind == kind and not is_run(token)
        ]
        (tokenizer.add_special_tokens if special else tokenizer.add_tokens)(added)


def _settings(reader: GgufReader, tokens: list[str]) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": bool(reader.metadata.get("tokenizer.ggml.add_bos_token", False)),
        "clean_up_tokenization_spaces": False,
        "model_max_length": reader.config["max_position_embeddings"],
    }
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token_id = reader.metadata.get(f"tokenizer.ggml.{key}_token_id")
        if token_id is None:
            continue
        if not isinstance(token_id, int) or not 0 <= token_id < len(tokens):
            raise CheckpointError(f"{reader.path}: {key}_token_id {shown(token_id)} is not in the vocabulary.")
        settings[f"{name}_token"] = tokens[token_id]
    if settings["add_bos_token"] and "bos_token" not in settings:
        raise CheckpointError(f"{reader.path}: asks for a leading bos token, but names none.")
    template = reader.metadata.get("tokenizer.chat_template")
    if isinstance(template, str):
        settings["chat_template"] = template
    return settings


def _byte_level() -> list[pre_tokenizers.PreTokenizer]:
    return [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]


def _digits_then_byte_level() -> list[pre_tokenizers.PreTokenizer]:
    return [pre_tokenizers.Digits(individual_digits=True), *_byte_level()]


def _split_by(*patterns: str) -> list[pre_tokenizers.PreTokenizer]:
    return [
        *(pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]


_PRE_TOKENIZERS: dict[str, Callable[[], list[pre_tokenizers.PreTokenizer]]] = {
    "default": _byte_level,
    "gpt-2": _byte_level,
    "smollm": _digits_then_byte_level,
    "llama-bpe": lambda: _split_by(_LLAMA3_SPLIT),
    "qwen2": lambda: _split_by(_QWEN2_SPLIT),
    "gpt-4o": lambda: _split_by(_O200K_SPLIT),
    "chatglm-bpe": lambda: _split_by(_LLAMA3_SPLIT),
    "glm4": lambda: _split_by(_LLAMA3_SPLIT),
    "deepseek-v3": lambda: _split_by(*_DEEPSEEK_SPLITS),
    "kimi-k2": lambda: _split_by(KIMI_SPLIT),
}
