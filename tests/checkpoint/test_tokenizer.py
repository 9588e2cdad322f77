import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as FastTokenizer
from transformers import AutoTokenizer

from slipstream.checkpoint.tokenizer import Tokenizer
from slipstream.errors import CheckpointError, RequestError

VARIED = [
    "",
    " ",
    "Hello, world!",
    "  leading and trailing  ",
    "line one\nline two\r\n\n\n\ttabbed",
    "def f(x: int) -> dict[str, int]:\n    return {'a': x ** 2}  # naïve\n",
    "1234567890 3.14159 0x1F 1,000,000 ½ ²",
    "emoji 🙂👩‍👩‍👧‍👦🏳️‍🌈 and flags 🇫🇷",
    "日本語のテキスト、한국어, العربية, עברית, हिन्दी",
    "I'm you're they'll we've he'd IT'S",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|>",
    "a\u0301 ﬁ \u200b\u00a0 \ufffd",
    "x" * 300,
]
MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": 'Say <b>hi</b> & "bye"\n'},
    {"role": "assistant", "content": "hi 🙂"},
    {"role": "user", "content": "Again."},
]


@pytest.fixture(scope="module")
def reference(embedded_folder):
    return AutoTokenizer.from_pretrained(embedded_folder)


@pytest.mark.embedded
class TestEmbeddedTokenizer:
    @pytest.mark.parametrize("text", VARIED)
    def test_agrees_with_transformers_on_varied_text(self, embedded_tokenizer, reference, text):
        ids = embedded_tokenizer.encode(text)
        assert ids == reference.encode(text)
        for skip in (True, False):
            assert embedded_tokenizer.decode(ids, skip) == reference.decode(ids, skip_special_tokens=skip)
        assert embedded_tokenizer.decode(ids, skip_special=False) == text

    @settings(max_examples=60, deadline=None)
    @given(text=st.text(max_size=60))
    def test_agrees_with_transformers_on_any_text(self, embedded_tokenizer, reference, text):
        assert embedded_tokenizer.encode(text) == reference.encode(text)

    @pytest.mark.parametrize("text", VARIED)
    def test_the_bytes_of_tokens_make_the_text(self, embedded_tokenizer, text):
        ids = embedded_tokenizer.encode(text)
        assert b"".join(map(embedded_tokenizer.token_bytes, ids)) == text.encode()

    def test_digits_are_single_tokens(self, embedded_tokenizer):
        assert len(embedded_tokenizer.encode("1234567")) == 7

    @pytest.mark.parametrize("messages", [MESSAGES, MESSAGES[1:2], MESSAGES[1:3]])
    @pytest.mark.parametrize("generate", [True, False])
    def test_chats_are_rendered_and_encoded_as_transformers_does(
        self, embedded_tokenizer, reference, messages, generate
    ):
        expected = reference.apply_chat_template(messages, tokenize=False, add_generation_prompt=generate)
        assert embedded_tokenizer.render_chat(messages, generate) == expected
        ids = reference.apply_chat_template(messages, add_generation_prompt=generate, return_dict=True)["input_ids"]
        assert embedded_tokenizer.encode_chat(messages, generate) == ids

    def test_knows_its_special_tokens(self, embedded_tokenizer, reference):
        assert embedded_tokenizer.eos_token_ids == (2,)
        assert embedded_tokenizer.bos_token_id == 1
        assert embedded_tokenizer.vocab_size == 49152 == len(reference)
        assert embedded_tokenizer.special_token_ids == frozenset(range(17))

    def test_is_the_same_when_loaded_from_the_gguf_file(self, embedded_folder, embedded_tokenizer):
        from_gguf = Tokenizer.load(embedded_folder / "model.gguf")
        for text in VARIED:
            assert from_gguf.encode(text) == embedded_tokenizer.encode(text)
        assert from_gguf.render_chat(MESSAGES) == embedded_tokenizer.render_chat(MESSAGES)
        assert from_gguf.eos_token_ids == (2,)

    @settings(max_examples=100, deadline=None)
    @given(ids=st.lists(st.integers(0, 49151), max_size=30), skip=st.booleans())
    def test_streamed_text_joined_is_the_text_of_any_ids(self, embedded_tokenizer, ids, skip):
        assert "".join(stream(embedded_tokenizer, ids, skip)) == embedded_tokenizer.decode(ids, skip)

    @settings(max_examples=60, deadline=None)
    @given(text=st.text(max_size=30))
    def test_streamed_pieces_are_never_half_a_character(self, embedded_tokenizer, text):
        ids = embedded_tokenizer.encode(text)
        pieces = stream(embedded_tokenizer, ids)
        assert "".join(pieces) == embedded_tokenizer.decode(ids)
        if "\ufffd" not in embedded_tokenizer.decode(ids):  # the vocabulary lacks some bytes
            assert all("\ufffd" not in piece for piece in pieces)

    def test_a_split_emoji_waits_for_its_last_byte(self, embedded_tokenizer):
        assert len(embedded_tokenizer.encode("🦥")) > 1
        pieces = stream(embedded_tokenizer, embedded_tokenizer.encode("🦥!"))
        assert pieces[0] == ""
        assert "🦥" in pieces

    def test_bytes_that_stay_incomplete_come_with_finish(self, embedded_tokenizer):
        first = embedded_tokenizer.encode("🦥")[:1]
        detokenizer = embedded_tokenizer.detokenizer()
        assert detokenizer.push(first) == ""
        assert detokenizer.finish() == "\ufffd"
        assert detokenizer.push(embedded_tokenizer.encode("new")) == "new"


def stream(tokenizer, ids, skip=True):
    detokenizer = tokenizer.detokenizer(skip)
    return [*(detokenizer.push([token_id]) for token_id in ids), detokenizer.finish()]


def sentencepiece_like(tmp_path, **settings):
    """A tokenizer that drops the first token's leading space and falls back on bytes, as Llama 2's does."""
    words = ["<unk>", "</s>", "▁Hello", "▁world", "lo", "▁", *(f"<0x{byte:02X}>" for byte in range(256))]
    fast = FastTokenizer(models.BPE({word: i for i, word in enumerate(words)}, [], byte_fallback=True))
    fast.add_special_tokens([AddedToken("</s>", special=True)])
    fast.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    fast.enable_truncation(4)
    fast.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "</s>"}, **settings}))
    return Tokenizer.load(tmp_path)


@settings(max_examples=100, deadline=None)
@given(ids=st.lists(st.integers(1, 261), max_size=25), skip=st.booleans())
def test_streaming_keeps_the_spaces_of_decoders_that_drop_the_first(tmp_path_factory, ids, skip):
    tokenizer = sentencepiece_like(tmp_path_factory.mktemp("spm"))
    assert "".join(stream(tokenizer, ids, skip)) == tokenizer.decode(ids, skip)


def test_a_run_of_byte_tokens_waits_for_its_end(tmp_path):
    tokenizer = sentencepiece_like(tmp_path)
    bytes_of_e_acute = [6 + byte for byte in "é".encode()]
    assert stream(tokenizer, [2, *bytes_of_e_acute, 4]) == ["Hello", "", "", "élo", ""]
    assert stream(tokenizer, bytes_of_e_acute) == ["", "", "é"]


def test_half_a_surrogate_pair_is_refused(tmp_path):
    with pytest.raises(RequestError, match="surrogate"):
        sentencepiece_like(tmp_path).encode("a\ud800b")


def test_truncation_left_in_the_file_is_switched_off(tmp_path):
    assert len(sentencepiece_like(tmp_path).encode("lolololololo")) > 4


def test_an_answer_ends_at_the_generation_configs_ids_and_the_tokenizers_own(tmp_path):
    (tmp_path / "config.json").write_text('{"eos_token_id": 9}')
    assert sentencepiece_like(tmp_path).eos_token_ids == (9, 1)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 8]}')
    assert sentencepiece_like(tmp_path).eos_token_ids == (7, 8, 1)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ messages[0].content | tojson }}", '"é<\\n"'),
        ("{% generation %}{{ messages[0]['role'] }}{% endgeneration %}", "user"),
        ("{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{% endfor %}x", "x"),
        ("{{ eos_token }}{{ 1 if tools is none else 0 }}{{ mood }}", "</s>1calm"),
        ("{{ strftime_now('%Y') | length }}", "4"),
        ("{%- if true %}\n  {% set a = 1 %}\nline\n{% endif %}", "line\n"),
    ],
)
def test_templates_find_the_functions_they_use(tmp_path, template, expected):
    tokenizer = sentencepiece_like(tmp_path, chat_template=template)
    assert tokenizer.render_chat([{"role": "user", "content": "é<\n"}], mood="calm") == expected


def test_a_template_may_be_a_file_or_one_of_several(tmp_path):
    several = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    assert sentencepiece_like(tmp_path, chat_template=several).render_chat(MESSAGES) == "plain"
    (tmp_path / "chat_template.jinja").write_text("from the file")
    assert sentencepiece_like(tmp_path, chat_template=several).render_chat(MESSAGES) == "from the file"


@pytest.mark.parametrize(
    ("template", "error", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", RequestError, "refuses .* roles must alternate"),
        ("{{ messages[0].content.nothing.more }}", RequestError, "the chat template fails"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", RequestError, "SecurityError"),
        ("{% if %}", CheckpointError, "not valid Jinja"),
        (None, CheckpointError, "has no chat template"),
    ],
)
def test_what_goes_wrong_in_a_template_is_a_sentence(tmp_path, template, error, message):
    with pytest.raises(error, match=message):
        sentencepiece_like(tmp_path, chat_template=template).render_chat(MESSAGES)


def test_a_chat_without_messages_and_a_folder_without_tokenizer_are_refused(tmp_path):
    with pytest.raises(RequestError, match="at least one message"):
        sentencepiece_like(tmp_path, chat_template="x").render_chat([])
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: is not a tokenizer"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"has no tokenizer\.json"):
        Tokenizer.load(tmp_path)
