from types import SimpleNamespace

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import quantize
from gguf_samples import GATE, HIDDEN, K, Q, tiny_weights, write_gguf
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, pre_tokenizers
from transformers import GemmaTokenizer, LlamaConfig
from transformers.convert_slow_tokenizer import TikTokenConverter, generate_merges
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

from slipstream.checkpoint.config import model_spec
from slipstream.checkpoint.gguf_file import GgufReader
from slipstream.checkpoint.gguf_tokenizer import gguf_tokenizer
from slipstream.checkpoint.names import hf_name
from slipstream.checkpoint.reader import open_checkpoint
from slipstream.errors import CheckpointError


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_tensors_come_out_as_transformers_has_them(tmp_path, architecture):
    source = open_checkpoint(write_gguf(tmp_path / "m.gguf", architecture))
    expected = tiny_weights()
    assert source.names() == sorted(expected)
    for name, tensor in expected.items():
        assert torch.equal(source.tensor(name), tensor), name
        assert torch.equal(source.rows(name, 3, 9), tensor[3:9]), name
        assert source.info(name).shape == tuple(tensor.shape)
        assert source.info(name).dtype == "F32"


@pytest.mark.parametrize("quant", [gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.Q4_1])
def test_packed_rows_are_reordered_whole_and_dequantise_to_the_same_values(tmp_path, quant):
    reader = GgufReader(write_gguf(tmp_path / "m.gguf", quant=quant))
    for name in (Q, K, GATE):
        expected = gguf.quants.dequantize(quantize(tiny_weights()[name].numpy(), quant), quant)
        assert np.array_equal(reader.tensor(name).numpy(), expected)
        assert np.array_equal(reader.rows(name, 5, 20).numpy(), expected[5:20])
        raw = reader.raw(name)
        assert raw.quant_type == quant.name
        assert raw.shape == tuple(expected.shape)
        assert np.array_equal(gguf.quants.dequantize(raw.data, quant), expected)
        assert reader.info(name).nbytes == raw.data.nbytes


def test_metadata_and_blocks_are_those_the_gguf_package_reads(tmp_path):
    path = write_gguf(
        tmp_path / "m.gguf",
        quant=gguf.GGMLQuantizationType.Q8_0,
        metadata=[
            lambda writer: writer.add_array("some.numbers", [1.5, 2.5]),
            lambda writer: writer.add_int64("some.big", -(2**40)),
            lambda writer: writer.add_bool("some.flag", True),
        ],
    )
    ours, theirs = GgufReader(path), gguf.GGUFReader(path)
    expected = {key: field.contents() for key, field in theirs.fields.items() if not key.startswith("GGUF.")}
    assert dict(ours.metadata) == expected
    for tensor in theirs.tensors:
        if "attn" not in tensor.name:
            raw = ours.raw(hf_name(tensor.name))
            assert raw.quant_type == tensor.tensor_type.name
            assert np.array_equal(raw.data, tensor.data)


@settings(max_examples=40, deadline=None)
@given(cut=st.floats(0, 1, exclude_max=True))
def test_a_file_cut_anywhere_is_refused_by_name(tmp_path_factory, cut):
    whole = write_gguf(tmp_path_factory.mktemp("gguf") / "m.gguf")
    content = whole.read_bytes()
    path = whole.with_name("cut.gguf")
    path.write_bytes(content[: int(cut * (len(content) - 32))])  # the last tensor may be padded
    with pytest.raises(CheckpointError, match=r"cut\.gguf: (is truncated|cannot be read)"):
        GgufReader(path)


def test_the_config_comes_from_the_metadata(tmp_path):
    reader = GgufReader(write_gguf(tmp_path / "m.gguf", "qwen3"))
    spec = model_spec(reader.config, tmp_path / "m.gguf")
    assert (spec.architecture, spec.qk_norm, spec.tie_embeddings) == ("Qwen3ForCausalLM", True, True)
    assert (spec.vocab_size, spec.head_dim, spec.num_kv_heads) == (261, 16, 2)
    assert (spec.rms_eps, spec.rope.theta, spec.max_position) == (1e-5, 500000.0, 256)
    assert (spec.bos_token_id, spec.eos_token_ids) == (0, (1,))
    with_head = write_gguf(tmp_path / "h.gguf", extra={"output.weight": np.ones((270, HIDDEN), np.float32)})
    assert GgufReader(with_head).config["tie_word_embeddings"] is False


def test_llama_3s_rope_scaling_is_recovered_from_its_divisors(tmp_path):
    scaling = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling["original_max_position_embeddings"] = 8192
    config = LlamaConfig(hidden_size=64, num_attention_heads=4, rope_parameters={"rope_theta": 500000.0, **scaling})
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = 1 / 500000.0 ** (torch.arange(0, 16, 2) / 16)
    divisors = (plain / scaled).numpy().astype(np.float32)
    reader = GgufReader(write_gguf(tmp_path / "m.gguf", extra={"rope_freqs.weight": divisors}))
    assert reader.config["rope_scaling"] == scaling
    assert "rope_freqs.weight" not in reader.names()
    odd = write_gguf(tmp_path / "odd.gguf", extra={"rope_freqs.weight": divisors[::-1].copy()})
    with pytest.raises(CheckpointError, match="not those of Llama 3"):
        GgufReader(odd)


def test_yarn_is_read_from_the_metadata(tmp_path):
    metadata = [
        lambda writer: writer.add_rope_scaling_type(gguf.RopeScalingType.YARN),
        lambda writer: writer.add_rope_scaling_factor(4.0),
        lambda writer: writer.add_rope_scaling_orig_ctx_len(64),
    ]
    reader = GgufReader(write_gguf(tmp_path / "m.gguf", metadata=metadata))
    rope = model_spec(reader.config, tmp_path / "m.gguf").rope
    assert (rope.scaling, rope.factor, rope.original_max_position) == ("yarn", 4.0, 64)


def test_files_that_cannot_be_read_are_refused_by_name(tmp_path):
    (tmp_path / "text.gguf").write_text("not a model" * 10)
    with pytest.raises(CheckpointError, match=r"text\.gguf: is truncated or not a GGUF file"):
        GgufReader(tmp_path / "text.gguf")
    with pytest.raises(CheckpointError, match="'gemma', which slipstream cannot read"):
        GgufReader(write_gguf(tmp_path / "g.gguf", "gemma"))
    with pytest.raises(CheckpointError, match=r"no llama model has: blk\.0\.ffn_gate_exps\.weight"):
        GgufReader(write_gguf(tmp_path / "e.gguf", extra={"blk.0.ffn_gate_exps.weight": np.ones(3, np.float32)}))


def test_the_tokenizer_comes_from_the_metadata(tmp_path):
    add_bos = [lambda writer: writer.add_add_bos_token(True), lambda writer: writer.add_chat_template("hi")]
    built = gguf_tokenizer(GgufReader(write_gguf(tmp_path / "m.gguf", metadata=add_bos)))
    ids = built.tokenizer.encode("a hi<|eos|><tool>").ids
    tokens = [built.tokenizer.id_to_token(i) for i in ids]
    assert tokens == ["<|bos|>", "a", "Ġhi", "<|eos|>", "<tool>"]
    assert built.tokenizer.decode(ids) == "a hi<tool>"
    assert built.settings["chat_template"] == "hi"
    assert (built.settings["bos_token"], built.settings["eos_token"]) == ("<|bos|>", "<|eos|>")


@pytest.mark.parametrize(
    ("pre", "pattern"),
    [
        ("qwen2", PRETOKENIZE_REGEX),
        ("llama-bpe", TikTokenConverter.__init__.__defaults__[1]),
        ("gpt-4o", GGUF_PRE_TOKENIZER_SPLITS["gpt-4o"]),
        ("glm4", TikTokenConverter.__init__.__defaults__[1]),
    ],
)
def test_named_pre_tokenizers_split_as_transformers_does(tmp_path, pre, pattern):
    built = gguf_tokenizer(GgufReader(write_gguf(tmp_path / "m.gguf", pre=pre)))
    reference = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(pattern), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    text = "I'M here, 12345 times!!\r\n\n  def f(x):\n\treturn 日本語 🙂 don't"
    assert built.tokenizer.pre_tokenizer.pre_tokenize_str(text) == reference.pre_tokenize_str(text)


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("deepseek-v3", ["abc", " ", "123", "45", " ", "日本語", "x", ".y", "\n\n"]),
        ("kimi-k2", ["abc", " ", "123", "45", " ", "日本語", "x", ".y", "\n\n"]),
    ],
)
def test_pre_tokenizers_of_deepseek_and_kimi_cut_numbers_and_han_from_words(tmp_path, pre, pieces):
    built = gguf_tokenizer(GgufReader(write_gguf(tmp_path / "m.gguf", pre=pre)))
    text = "".join(pieces)
    cut = [text[slice(*span)] for _, span in built.tokenizer.pre_tokenizer.pre_tokenize_str(text)]
    assert cut == pieces


PIECES = {"<unk>": 2, "<s>": 3, "<end_of_turn>": 3, "<table>": 4, **{f"<0x{byte:02X}>": 6 for byte in range(256)}}
WORDS = [*"▁abelth\n", "he", "th", "the", "▁the", "▁t", "\n\n", "ab", "ba", "▁▁", "▁▁▁"]  # the best first


def pieces(words=WORDS, prefix=False):
    """Return a file whose tokenizer is SentencePiece's, as Gemma's is: pieces and their scores."""
    metadata = {
        "model": "llama",
        "tokens": [*PIECES, *words],
        "token_type": [*PIECES.values(), *[1] * len(words)],
        "scores": [0.0] * len(PIECES) + [-float(rank) for rank in range(len(words))],
        "unknown_token_id": 0,
        "bos_token_id": 1,
        "add_space_prefix": prefix,
        "add_bos_token": True,
    }
    metadata = {f"tokenizer.ggml.{key}": value for key, value in metadata.items()}
    config = {"max_position_embeddings": 256}
    return SimpleNamespace(path="m.gguf", metadata=metadata, config=config, text=metadata.__getitem__)


@pytest.mark.parametrize("text", ["the  tale", " the   bab\n\nel", "é<table>ab", "thethe ba"])
def test_sentencepiece_joins_pieces_as_transformers_does_with_the_merges_it_generates(text):
    built = gguf_tokenizer(pieces())
    vocab = {token: i for i, token in enumerate([*PIECES, *WORDS])}
    merges = generate_merges(vocab, {word: -rank for rank, word in enumerate(WORDS)})
    theirs = GemmaTokenizer(vocab=vocab, merges=merges, bos_token="<s>", eos_token="<end_of_turn>")
    theirs.add_tokens([AddedToken("<table>", normalized=False)])
    ids = built.tokenizer.encode(text, add_special_tokens=False).ids
    assert ids == theirs.encode(text, add_special_tokens=False)
    assert built.tokenizer.decode(ids) == text
    assert built.tokenizer.encode(text).ids == [1, *ids]
    assert built.ends == (vocab["<end_of_turn>"],)


def test_a_leading_space_that_sentencepiece_adds_is_taken_away_again():
    built = gguf_tokenizer(pieces(prefix=True))
    ids = built.tokenizer.encode("the bab", add_special_tokens=False).ids
    assert built.tokenizer.id_to_token(ids[0]) == "▁the"
    assert built.tokenizer.decode(ids) == "the bab"


def test_a_piece_too_long_to_be_halved_is_refused():
    with pytest.raises(CheckpointError, match="longer than 128 characters"):
        gguf_tokenizer(pieces([*WORDS, "a" * 129]))


def test_a_tokenizer_that_cannot_be_built_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"'gpt2' with pre-tokenizer 'chameleon'.*smollm"):
        gguf_tokenizer(GgufReader(write_gguf(tmp_path / "m.gguf", pre="chameleon")))
