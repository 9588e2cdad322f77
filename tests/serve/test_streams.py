"""However a stream's parts get to the client, they are the same parts, and one client's trouble is its own."""

import asyncio
import dataclasses
import json
import math
import socket

import pytest
from misbehaving import eventually

from slipstream.engine.output import EmittedToken, TokenLogprob
from slipstream.engine.request import FinishReason
from slipstream.serve.answers import AnswerWriter, Tally, Wants
from slipstream.serve.logprobs import LogprobWriter
from slipstream.serve.stream import DONE, EventStream
from slipstream.serve.ticket import Job, StepEvent
from slipstream.speculation.sampling import SamplingParams

BODY = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 60, "seed": 7, "ignore_eos": True}


def asked(server, version: str, body: dict) -> socket.socket:
    content = json.dumps({**body, "stream": True}).encode()
    connection = socket.create_connection(("127.0.0.1", server.config.port))
    connection.settimeout(30)
    head = f"POST /v1/chat/completions HTTP/{version}\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    connection.sendall(f"{head}Connection: close\r\nContent-Length: {len(content)}\r\n\r\n".encode() + content)
    return connection


def text_of(raw: bytes, index: int = 0) -> str:
    events = [json.loads(line[6:]) for line in raw.split(b"\n") if line.startswith(b"data: {")]
    choices = [event["choices"][0] for event in events if event["choices"][0]["index"] == index]
    return "".join(choice["delta"].get("content", "") for choice in choices)


def test_a_client_of_http_1_0_reads_the_same_stream_without_chunks(client, server):
    whole = client.post("/v1/chat/completions", json=BODY).json()["choices"][0]["message"]["content"]
    for version, chunked in (("1.0", False), ("1.1", True)):
        with asked(server, version, BODY) as connection:
            raw = b"".join(iter(lambda: connection.recv(1 << 16), b""))
        head, _, body = raw.partition(b"\r\n\r\n")
        assert (b"transfer-encoding: chunked" in head.lower()) == chunked
        assert text_of(body) == whole
        assert body.count(DONE) == 1
        assert body.endswith(b"0\r\n\r\n") == chunked


def test_a_client_that_reads_slowly_gets_every_part_in_order(client, server):
    body = {**BODY, "return_tokens": True, "n": 5}  # more bytes than the sockets between us take
    whole = [
        choice["message"]["content"] for choice in client.post("/v1/chat/completions", json=body).json()["choices"]
    ]
    with asked(server, "1.1", body) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 12)
        eventually(lambda: server.on_engine(lambda engine: not engine.has_work))
        raw = b"".join(iter(lambda: connection.recv(1 << 10), b""))
    assert [text_of(raw, index) for index in range(5)] == whole


class Parts:
    """Parts given one by one; the second breaks if it is told to."""

    def __init__(self, breaks: bool = False) -> None:
        self.over, self.is_long, self.wake, self.num, self.breaks = False, False, None, 0, breaks

    def when_more(self, wake) -> None:
        self.wake = wake

    def part(self) -> bytes:
        self.num += 1
        if self.breaks and self.num == 2:
            raise ValueError("this answer cannot be written")
        self.over = self.num == 3
        return b"part %d\n" % self.num


class Wire:
    """A connection that takes parts directly, unless it is full."""

    def __init__(self) -> None:
        self.full, self.direct, self.through_asgi = False, b"", b""

    def write_part(self, make) -> bool:
        if not self.full:
            self.direct += make()
        return not self.full

    async def send(self, message) -> None:
        await asyncio.sleep(0)
        self.through_asgi += message.get("body", b"")


async def streamed(parts: Parts, wire: Wire, full_at: int = 0) -> list[str]:
    closed: list[str] = []
    forever = asyncio.Event()

    async def receive():
        await forever.wait()

    stream = EventStream(parts, lambda: closed.append("closed"))
    task = asyncio.ensure_future(stream({"type": "http", "state": {"connection": wire}}, receive, wire.send))
    while parts.wake is None:
        await asyncio.sleep(0)
    for number in (1, 2, 3):
        wire.full = number == full_at
        parts.is_long = number == -full_at
        if parts.wake is not None:
            parts.wake()
        for _ in range(50):
            await asyncio.sleep(0.0005 if parts.is_long else 0)
    await asyncio.wait_for(task, 5)
    return closed


def test_parts_go_straight_to_the_connection():
    wire = Wire()
    assert asyncio.run(streamed(Parts(), wire)) == ["closed"]
    assert (wire.direct, wire.through_asgi) == (b"part 1\npart 2\npart 3\n", b"")


@pytest.mark.parametrize("full_at", [1, 2, 3, -1, -2, -3])
def test_a_full_connection_or_a_long_part_takes_the_other_way_and_nothing_is_lost_or_doubled(full_at):
    wire, parts = Wire(), Parts()
    asyncio.run(streamed(parts, wire, full_at))
    number = abs(full_at)
    assert wire.through_asgi == b"part %d\n" % number
    assert wire.direct == b"".join(b"part %d\n" % n for n in (1, 2, 3) if n != number)


def test_a_part_that_cannot_be_written_ends_its_own_request_only():
    parts, wire = Parts(breaks=True), Wire()
    with pytest.raises(ValueError, match="cannot be written"):
        asyncio.run(streamed(parts, wire))
    assert wire.direct == b"part 1\n"
    assert parts.wake is None


@pytest.mark.parametrize("kind", ["chat", "completion"])
@pytest.mark.parametrize("more", [{}, {"usage": False}, {"logprobs": 2}])
@pytest.mark.parametrize("text", ["plain", "", 'a "quoted" \\ line\n\t\u2028 ünï\U0001f600', "\0text\0"])
def test_a_text_written_into_a_ready_frame_reads_like_any_other_event(server, kind, more, text):
    """The first event of an answer is written whole, and so are all where usage runs along."""
    scores = LogprobWriter(server.tokenizer, as_ids=False)
    wants = Wants(kind, True, **more)
    head = {"id": "x", "model": "m"}
    framed = AnswerWriter(wants, server.tokenizer, scores, head, ())
    whole = AnswerWriter(dataclasses.replace(wants, running_usage=True), server.tokenizer, scores, head, ())
    tallies = [Tally(Job((1,), SamplingParams(n=2), 0)) for _ in range(2)]
    again = [Tally(Job((1,), SamplingParams(n=2), 0)) for _ in range(2)]
    tokens = (EmittedToken(3, text, 0, logprob(3)), EmittedToken(4, "!", 0, logprob(4)))
    last = StepEvent(tokens, finish_reason=FinishReason.LENGTH)
    for index, event in ((0, StepEvent(tokens)), (1, StepEvent(tokens[:1])), (1, StepEvent(tokens)), (0, last)):
        one, other = (
            [json.loads(line[6:]) for line in writer.part(index, counts, event).decode().split("\n\n") if line]
            for writer, counts in ((framed, tallies), (whole, again))
        )
        for body in (*one, *other):
            body.pop("usage", None)
        assert one == other


def logprob(token: int) -> TokenLogprob:
    return TokenLogprob(token, -0.1234567 * token, ((token, -0.1), (2 * token, -math.inf), (60, -1e-9)))
