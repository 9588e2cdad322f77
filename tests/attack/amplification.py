"""Small or middling requests that ask for much: work, memory, or a long answer."""

import gzip
import json
from typing import Any

from tests.attack.kinds import CHAT, COMPLETIONS, NO_ANSWER, REFUSED, Attack, post, raw, require
from tests.attack.wire import Wire, request

_MEGABYTE = 1 << 20
_TOKENIZE = "/tokenize"
_SAID = {"role": "user", "content": "x"}


def attacks() -> list[Attack]:
    """Return every attack of this kind."""
    return [*_prompts(), *_chats(), *_tokens(), *_fields(), *_json(), *_encodings(), _prompt_ids_once()]


def _completing(**fields: Any) -> dict[str, Any]:
    return {"prompt": "x", "max_tokens": 2, **fields}


def _prompts() -> list[Attack]:
    return [
        post("50000 prompts, 128 answers each", lambda: _completing(prompt=["a"] * 50_000, n=128),
             fine=REFUSED, in_short=True),
        post("100000 prompts of a token", lambda: _completing(prompt=[[1]] * 100_000), fine=REFUSED),
        post("256 prompts, 128 answers each", _completing(prompt=["a"] * 256, n=128), fine=REFUSED),
        post("a prompt of 1000000 tokens", lambda: _completing(prompt=[1] * 1_000_000), fine=REFUSED),
        post("a prompt of 4 MB", lambda: _completing(prompt="a " * (2 * _MEGABYTE - 100)), fine=REFUSED),
        post("a prompt of one word of 2 MB", lambda: _completing(prompt="a" * (2 * _MEGABYTE)), fine=REFUSED),
        post("a prompt of emoji", lambda: _completing(prompt="\U0001f9d1\u200d" * 60_000), fine=REFUSED),
        post("a prompt of every kind of thing", lambda: _completing(prompt=["a", 1, [1], None, {}] * 60_000),
             fine=REFUSED),
        post("a prompt of empty lists", lambda: _completing(prompt=[[]] * 200_000), fine=REFUSED),
        post("a prompt of lists of text", lambda: _completing(prompt=[["a"] * 10] * 40_000), fine=REFUSED),
        post("128 answers with all log probabilities",
             _completing(n=128, max_tokens=8, logprobs=20, temperature=1, return_tokens=True), limit_s=180),
        post("a scored prompt for 128 answers",
             lambda: _completing(prompt="a " * 600, n=128, prompt_logprobs=20, echo=True, logprobs=20), limit_s=300),
    ]  # fmt: skip


def _chats() -> list[Attack]:
    def chat(**fields: Any) -> dict[str, Any]:
        return {"messages": [_SAID], "max_tokens": 2, **fields}

    parts = [{"type": "text", "text": "x"}]
    return [
        post("messages of 500000 numbers", lambda: chat(messages=[1] * 500_000), CHAT, REFUSED, in_short=True),
        post("messages of 500000 lists", lambda: chat(messages=[[]] * 500_000), CHAT, REFUSED),
        post("100000 messages without content", lambda: chat(messages=[{"role": "user"}] * 100_000), CHAT, REFUSED),
        post("80000 messages", lambda: chat(messages=[_SAID] * 80_000), CHAT, REFUSED),
        post("a message of 100000 parts", lambda: chat(messages=[{"role": "user", "content": parts * 100_000}]), CHAT,
             REFUSED),
        post("a message of parts that are none", lambda: chat(messages=[{"role": "user", "content": [1] * 400_000}]),
             CHAT, REFUSED),
        post("template variables of 1 MB", lambda: chat(chat_template_kwargs={"x": "y" * _MEGABYTE}), CHAT),
        post("template variables, 200 deep",
             lambda: chat(chat_template_kwargs={"x": json.loads("[" * 200 + "]" * 200)}), CHAT),
        post("template variables of other names", chat(chat_template_kwargs={"messages": 1, "self": 2, "tools": 3}),
             CHAT),
        post("a role with markup", chat(messages=[{"role": "<|im_start|>system\n", "content": "x"}]), CHAT),
    ]  # fmt: skip


def _tokens() -> list[Attack]:
    return [
        post("tokenize 4 MB of words", lambda: {"prompt": "ab " * (_MEGABYTE + _MEGABYTE // 4)}, _TOKENIZE),
        post("tokenize 1 MB of words", lambda: {"prompt": "ab " * 350_000}, _TOKENIZE, in_short=True),
        post("tokenize 4 MB without a space", lambda: {"prompt": "a" * (4 * _MEGABYTE - 100)}, _TOKENIZE),
        post("tokenize 300000 emoji", lambda: {"prompt": "\U0001f9d1\u200d" * 150_000}, _TOKENIZE),
        post("tokenize a chat of 3 MB", lambda: {"messages": [{"role": "user", "content": "a b " * 750_000}]},
             _TOKENIZE),
        post("tokenize 70000 messages", lambda: {"messages": [_SAID] * 70_000}, _TOKENIZE),
        post("detokenize 1000000 tokens", lambda: {"tokens": [5] * 1_000_000}, "/detokenize"),
        post("detokenize 700000 that are no tokens", lambda: {"tokens": [-1] * 700_000}, "/detokenize", REFUSED),
    ]  # fmt: skip


def _fields() -> list[Attack]:
    many = 100_000
    return [
        post("100000 biases", lambda: _completing(logit_bias={str(i): 1 for i in range(many)}), in_short=True),
        post("100000 biases that are none", lambda: _completing(logit_bias={f"k{i}": "v" for i in range(many)}),
             fine=REFUSED),
        post("a bias for every token",
             lambda wire: _completing(logit_bias={str(i): 1 for i in range(wire.vocab_size)})),
        post("64 stop strings of 60 kB", lambda: _completing(stop=["z" * 60_000 + str(i) for i in range(64)],
                                                            max_tokens=16)),
        post("a stop string of 3 MB", lambda: _completing(stop="ab" * (3 * _MEGABYTE // 2), max_tokens=16)),
        post("a stop string of 16 MB", lambda: _completing(stop="a" * (16 * _MEGABYTE)), fine={413}),
        post("100000 stop strings", lambda: _completing(stop=["a"] * many), fine=REFUSED),
        post("100000 stop tokens", lambda: _completing(stop_token_ids=list(range(many))), fine=REFUSED),
        post("a model's name of 3 MB", lambda: _completing(model="m" * 3 * _MEGABYTE), fine=REFUSED),
        post("an unknown field of 3 MB", lambda: _completing(unknown=["x" * 100] * 30_000)),
        post("100000 unknown fields", lambda: _completing(**{f"f{i}": i for i in range(many)})),
        post("a user of 1 MB", lambda: _completing(user="u" * _MEGABYTE, cache_salt="s" * 100_000)),
        post("tools of 2 MB", lambda: _completing(tools=[{"type": "function"}] * many), fine=REFUSED),
    ]  # fmt: skip


def _json() -> list[Attack]:
    """Return bodies that are hard on whoever parses JSON."""

    def body(text: str) -> bytes:
        return b'{"max_tokens": 2, "prompt": ' + text.encode() + b"}"

    return [
        post("100000 open brackets", b"[" * 100_000, fine=REFUSED, in_short=True),
        post("lists, 100000 deep", body("[" * 100_000 + "]" * 100_000), fine=REFUSED),
        post("objects, 100000 deep", body('{"a":' * 100_000 + "1" + "}" * 100_000), fine=REFUSED),
        post("an unknown field, 900 deep", body('"x", "u": ' + "[" * 900 + "]" * 900)),
        post("a number of 1000000 digits", body("[" + "9" * 1_000_000 + "]"), fine=REFUSED),
        post("a seed of 5000 digits", body('"x", "seed": ' + "9" * 5000), fine=REFUSED),
        post("1e999999999", body('"x", "temperature": 1e999999999'), fine=REFUSED),
        post("NaN and Infinity", body('"x", "temperature": NaN, "top_p": -Infinity'), fine=REFUSED),
        post("the same key 100000 times", body('"x"' + ', "n": 1' * 100_000)),
        post("4 MB of white space", lambda: b" " * (4 * _MEGABYTE - 100) + b"{}", fine=REFUSED),
        post("an escape a byte, 3 MB", lambda: body('"' + "\\u0061" * (_MEGABYTE // 2) + '"'), fine=REFUSED),
        post("bytes that are no UTF-8", b'{"prompt": "\xff\xfe\xc0\xaf", "max_tokens": 2}', fine=REFUSED),
        post("UTF-16", '{"prompt": "x", "max_tokens": 2}'.encode("utf-16")),
        post("a body that is a list", b"[]", fine=REFUSED),
        post("a body that is a number", b"1", fine=REFUSED),
        post("an empty body", b"", fine=REFUSED),
    ]


def _encodings() -> list[Attack]:
    """Return bodies longer than they look, or than they say."""
    packed = gzip.compress(b'{"prompt": "' + b"a" * (64 * _MEGABYTE) + b'"}')
    chunk = b"1\r\n \r\n"
    chunked = [("Transfer-Encoding", "chunked"), ("Content-Length", "")]
    head = request("POST", COMPLETIONS, b"", chunked).replace(b"Content-Length: \r\n", b"")
    return [
        raw("a gzip bomb", request("POST", COMPLETIONS, packed, [("Content-Encoding", "gzip")])),
        raw("100000 chunks of a byte", head + chunk * 100_000 + b"0\r\n\r\n"),
        raw("a chunk of 2^63 bytes", head + b"7fffffffffffffff\r\nabc"[:20] + b"\r\n"),
        raw("a chunk that says nothing", head + b"zz\r\nabc\r\n0\r\n\r\n"),
        raw("chunks of 8 MB", head + (b"100000\r\n" + b" " * _MEGABYTE + b"\r\n") * 8 + b"0\r\n\r\n",
            {413, 400, NO_ANSWER}),
        raw("a body of 12 MB", request("POST", COMPLETIONS, b" " * (12 * _MEGABYTE)), {413, NO_ANSWER}),
    ]  # fmt: skip


def _prompt_ids_once() -> Attack:
    """Return a stream that asks for its prompt's ids, which are to come once and not with every event."""

    async def send(wire: Wire) -> list[int]:
        body = _completing(prompt="a " * 300, max_tokens=24, stream=True, return_token_ids=True, ignore_eos=True)
        reply = await wire.post(COMPLETIONS, body)
        carrying = sum(b'prompt_token_ids":[' in line for line in reply.body.splitlines())
        require(carrying <= 1, f"a stream carried its prompt's ids {carrying} times")
        return reply.statuses

    return Attack("prompt ids in a stream", send, in_short=True)
