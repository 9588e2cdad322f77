"""The JSON the server answers with: choices, chunks, usage and log probabilities in OpenAI's forms."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from slipstream.checkpoint.tokenizer import Tokenizer
from slipstream.engine.output import EmittedToken, TokenLogprob
from slipstream.engine.request import FinishReason
from slipstream.serve.errors import HttpError
from slipstream.serve.logprobs import LogprobWriter, Offsets
from slipstream.serve.stream import DONE, Json, json_text, server_sent_event
from slipstream.serve.ticket import Job, StepEvent
from slipstream.serve.tools.chat_json import delta_json, message_json
from slipstream.serve.tools.events import AnswerEvent, CallBegin, Message
from slipstream.serve.tools.form import PLAIN, without_marks
from slipstream.speculation.statistics import AcceptanceStats

Kind = Literal["chat", "completion"]

_TEXT = "\0text\0"  # stands for the text where the rest of an event is written ahead
_NOTHING_MORE = {"content": None, "reasoning_content": None}  # as SGLang, whose clients read both of every delta
_OBJECTS = {
    ("chat", False): "chat.completion",
    ("chat", True): "chat.completion.chunk",
    ("completion", False): "text_completion",
    ("completion", True): "text_completion",
}


@dataclass(frozen=True)
class Wants:
    """What a request wants in its answer beside the text.

    Args:
        reasons: the model reasons, so that clients read every delta's reasoning; it is null where there is none.
    """

    kind: Kind
    stream: bool
    logprobs: int | None = None
    prompt_logprobs: bool = False
    echo: bool = False
    drop_answer: bool = False
    usage: bool = True
    running_usage: bool = False
    speculation: bool = False
    tokens: bool = False
    token_ids: bool = False
    prompt_ids: bool = False
    tokens_as_ids: bool = False
    reasoning: bool = True
    reasons: bool = False


@dataclass
class Tally:
    """What an answer came to so far."""

    job: Job
    num_tokens: int = 0
    num_cached: int = 0
    num_reasoning: int = 0
    offsets: Offsets | None = None
    started: bool = False
    called: bool = False
    stats: AcceptanceStats = field(default_factory=AcceptanceStats)

    def __post_init__(self) -> None:
        self._parser = self.job.form.parser()
        self._undecided = 0

    def read(self, event: StepEvent) -> list[AnswerEvent]:
        """Return what a step's text says: content, reasoning, calls. Each step is read once, in order."""
        thinks = self._parser.thinking in ("perhaps", "inside")
        events = self._read_thoughts(event) if thinks else self._parser.feed(event.text)
        if event.finish_reason is not None:
            events += self._parser.finish()
        self.called = self.called or any(isinstance(one, CallBegin) for one in events)
        return events

    def _read_thoughts(self, event: StepEvent) -> list[AnswerEvent]:
        """Read a step token by token, and count those of the reasoning, its end marker included."""
        events: list[AnswerEvent] = []
        for token in event.tokens:
            before = self._parser.thinking
            events += self._parser.feed(token.text)
            after = self._parser.thinking
            if after == "perhaps":
                self._undecided += 1
            elif after == "inside" or (after == "closed" and before != "closed"):
                self.num_reasoning += self._undecided + 1
                self._undecided = 0
        return events

    def count(self, event: StepEvent) -> None:
        """Take in an event."""
        self.num_tokens += len(event.tokens)
        self.num_cached = max(self.num_cached, event.num_cached)
        if event.stats is not None:
            self.stats = event.stats


class _Frame(NamedTuple):
    """What stands around an event's text, and around a chat's log probabilities (`tail` is None without them)."""

    head: str
    between: str
    tail: str | None


class AnswerWriter:
    """Writes one request's answer."""

    def __init__(
        self, wants: Wants, tokenizer: Tokenizer, scores: LogprobWriter, head: Json, simulated: Sequence[float]
    ) -> None:
        """Keep what every part of the answer shares.

        Args:
            head: id, created, model and the like.
            simulated: the rates, if acceptance is simulated; the answer then says so.
        """
        self._wants = wants
        self._tokenizer = tokenizer
        self._head = head
        self._simulated = list(simulated)
        self._scores = scores
        more = wants.running_usage or wants.tokens or wants.token_ids or wants.drop_answer
        self._has_frames = not more and (wants.logprobs is None or wants.kind == "chat")
        self._frames: dict[tuple[int, str], _Frame] = {}

    @property
    def tells_of_aborts(self) -> bool:
        """Whether an answer that was called off has a form of its own: how far it came, and that it was."""
        return True

    @property
    def streams(self) -> bool:
        """Whether the answer goes out in parts."""
        return self._wants.stream

    def whole(self, tallies: Sequence[Tally], events: Sequence[Sequence[StepEvent]]) -> Json:
        """Return an answer that is not streamed."""
        choices = [
            self._choice(index, tally, own, own[-1])
            for index, (tally, own) in enumerate(zip(tallies, events, strict=True))
        ]
        body = {**self._envelope(), "choices": choices, "usage": self.usage(tallies)}
        return body | (self._of_chat_prompt(tallies[0], events[0]) if self._wants.kind == "chat" else {})

    def part(self, index: int, tallies: Sequence[Tally], event: StepEvent) -> bytes:
        """Return what a stream says of an event: the role of a chat's answer with the first."""
        tally = tallies[index]
        if tally.started and event.finish_reason is None and self._has_frames:
            return self._short_part(index, tally, event)
        # Not before the first token is there: clients take a stream's first event for its first token.
        opens = self._wants.kind == "chat" and not tally.started
        about_prompt = self._of_chat_prompt(tally, [event]) if opens and not any(t.started for t in tallies) else {}
        before = _without(self.usage(tallies), len(event.tokens)) if self._wants.running_usage else None
        opening = server_sent_event(self._chunk([_opening(index)], before) | about_prompt) if opens else b""
        last = event if event.finish_reason is not None else None
        choice = self._choice(index, tally, [event], last)
        usage = self.usage(tallies) if self._wants.running_usage else None
        silent = tally.job.form is not PLAIN and last is None and usage is None
        if (
            silent
            and not choice.get("delta")
            and not (choice["logprobs"] or self._wants.tokens or self._wants.token_ids)
        ):
            return opening  # all of the text is held back: it may be a marker
        return opening + server_sent_event(self._chunk([choice], usage))

    def end(self, tallies: Sequence[Tally]) -> bytes:
        """Return a stream's last events: usage, if it was asked for, and the word that it is over."""
        return (server_sent_event(self._chunk([], self.usage(tallies))) if self._wants.usage else b"") + DONE

    def failure(self, error: HttpError) -> bytes:
        """Return how a stream that has begun ends with an error."""
        return server_sent_event(error.body()) + DONE

    def usage(self, tallies: Sequence[Tally]) -> Json:
        """Return the usage of a request's answers; a prompt counts once, however many answers it gets."""
        answers_each = tallies[0].job.params.n
        prompt_tokens = sum(len(tally.job.prompt) for tally in tallies[::answers_each])
        emitted = 0 if self._wants.drop_answer else sum(tally.num_tokens for tally in tallies)
        usage: Json = {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": emitted,
            "total_tokens": prompt_tokens + emitted,
            "prompt_tokens_details": {"cached_tokens": sum(tally.num_cached for tally in tallies[::answers_each])},
        }
        if self._wants.kind == "chat":
            thought = sum(tally.num_reasoning for tally in tallies)
            usage |= {"completion_tokens_details": {"reasoning_tokens": thought}, "reasoning_tokens": thought}
        if self._wants.speculation:
            stats = AcceptanceStats()
            for tally in tallies:
                stats.add(tally.stats)
            usage["speculation"] = speculation_json(stats, self._simulated)
        return usage

    def _short_part(self, index: int, tally: Tally, event: StepEvent) -> bytes:
        """Return what a stream says of an event in the middle: mostly one text, in a frame that is written once."""
        if self._wants.kind == "completion":
            field, text = "text", event.text
        elif tally.job.form is PLAIN:
            field, text = "content", event.text
        else:
            delta = delta_json(tally.read(event), self._wants.reasoning)
            if not delta and self._wants.logprobs is None:
                return b""  # all of it is held back: it may be a marker
            if len(delta) != 1 or "tool_calls" in delta:
                return server_sent_event(self._chunk([self._choice(index, tally, [event], None, delta)]))
            field, text = next(iter(delta.items()))
        frame = self._frames.get((index, field)) or self._frame(index, tally, field)
        entries = "" if frame.tail is None else self._scores.chat_entries(event.tokens)
        return f"{frame.head}{json_text(text)}{frame.between}{entries}{frame.tail or ''}".encode()

    def _frame(self, index: int, tally: Tally, field: str) -> _Frame:
        """Return what stands around the text in an event that has nothing but text, and keep it."""
        event = StepEvent((EmittedToken(0, _TEXT, 0),))
        choice = self._choice(index, tally, [event], None, {field: _TEXT})
        head, rest = server_sent_event(self._chunk([choice])).decode().split(json_text(_TEXT))
        before, mark, after = rest.partition('"logprobs":{"content":[')
        frame = _Frame(head, before + mark, after if mark else None)
        self._frames[index, field] = frame
        return frame

    def _chunk(self, choices: Sequence[Json], usage: Json | None = None) -> Json:
        body = {**self._envelope(), "choices": list(choices)}
        if self._wants.usage:
            body["usage"] = usage
        return body

    def _choice(
        self,
        index: int,
        tally: Tally,
        events: Sequence[StepEvent],
        last: StepEvent | None,
        delta: Json | None = None,
    ) -> Json:
        """Return a choice with the events' text.

        Args:
            last: the event that ended the answer, if it is over.
            delta: what the events say in a chat's stream, where they were read already.
        """
        wants = self._wants
        tokens = [] if wants.drop_answer else [token for event in events for token in event.tokens]
        text = "" if wants.drop_answer else "".join(event.text for event in events)
        scored = next((event.prompt_logprobs for event in events if event.prompt_logprobs is not None), None)
        is_first = not tally.started
        echoed = echoed_text(self._tokenizer, tally.job) if wants.echo and is_first else ""
        tally.started = True
        choice: Json = {"index": index}
        if wants.kind == "completion":
            choice["text"] = echoed + text
        elif wants.stream:
            if delta is None:
                delta = delta_json([part for event in events for part in tally.read(event)], wants.reasoning)
            if delta and wants.reasons:
                delta = {**delta, "reasoning_content": delta.get("reasoning_content")}
            quiet: Json = {} if tally.job.form is not PLAIN else {"content": ""}
            choice["delta"] = delta or (quiet if last is None else dict(_NOTHING_MORE))
        else:
            message = Message()
            for part in (part for event in events for part in tally.read(event)):
                message.add(part)
            choice["message"] = message_json(message, wants.reasoning)
        choice["logprobs"] = self._logprobs(tally, tokens, scored if wants.echo else None)
        choice["finish_reason"] = None if last is None else _finish(last.finish_reason, tally)
        if last is not None:
            choice |= _stops(tally.job, last, self._tokenizer.eos_token_ids)
        if wants.token_ids or not wants.stream:
            choice["token_ids"] = [token.token_id for token in tokens] if wants.token_ids else None
        if is_first and (wants.prompt_ids or wants.kind == "completion"):
            found = list(tally.job.prompt) if wants.prompt_ids or wants.token_ids else None
            choice |= {"prompt_token_ids": found} if found or not wants.stream else {}
        self._extras(choice, tally.job, tokens, events, scored)
        return choice

    def _envelope(self) -> Json:
        body = {**self._head, "object": _OBJECTS[self._wants.kind, self._wants.stream]}
        if self._simulated:
            body["simulated_acceptance"] = self._simulated
        return body

    def _extras(
        self,
        choice: Json,
        job: Job,
        tokens: Sequence[EmittedToken],
        events: Sequence[StepEvent],
        scored: Sequence[TokenLogprob | None] | None,
    ) -> None:
        if self._wants.tokens:
            choice["seed"] = job.seed
            choice["tokens"] = [
                {
                    "id": token.token_id,
                    "text": without_marks(token.text),
                    "draft_position": token.draft_position,
                    "tree_nodes": event.num_drafted,
                }
                for event in events
                for token in event.tokens
            ]
        if self._wants.kind == "completion" and (scored is not None or not self._wants.stream):
            found = scored if self._wants.prompt_logprobs else None
            choice["prompt_logprobs"] = None if found is None else self._scores.prompt(found)

    def _of_chat_prompt(self, tally: Tally, events: Sequence[StepEvent]) -> Json:
        """Return what vLLM says of a chat's prompt, beside its choices."""
        scored = next((event.prompt_logprobs for event in events if event.prompt_logprobs is not None), None)
        found: Json = {} if self._wants.stream else {"prompt_logprobs": None, "prompt_token_ids": None}
        if self._wants.prompt_logprobs and scored is not None:
            found["prompt_logprobs"] = self._scores.prompt(scored)
        if self._wants.token_ids:
            found["prompt_token_ids"] = list(tally.job.prompt)
        return found

    def _logprobs(
        self, tally: Tally, tokens: Sequence[EmittedToken], scored: Sequence[TokenLogprob | None] | None
    ) -> Json | None:
        if self._wants.logprobs is None:
            return None
        if self._wants.kind == "chat":
            return self._scores.chat(tokens)
        if tally.offsets is None:
            tally.offsets = Offsets(self._tokenizer, tally.job, self._wants.echo)
        return self._scores.completion(tokens, tally.offsets, list(zip(tally.job.prompt, scored or (), strict=False)))


def echoed_text(tokenizer: Tokenizer, job: Job) -> str:
    """Return a prompt for an answer that begins with it: as it was sent, special tokens included."""
    return tokenizer.decode(job.prompt, skip_special=False) if job.prompt_text is None else job.prompt_text


def stopped_by(job: Job, last: StepEvent, end_tokens: Sequence[int]) -> int | str | None:
    """Return the stop string, or the token, that ended an answer; None if its length or its grammar did."""
    if last.finish_reason is not FinishReason.STOP or last.stop is not None or not last.tokens:
        return last.stop
    ended_by = last.tokens[-1].token_id
    return ended_by if ended_by in end_tokens or ended_by in job.params.stop_token_ids else None


def _stops(job: Job, last: StepEvent, end_tokens: Sequence[int]) -> Json:
    """Return what ended an answer: vLLM's field leaves the model's own end tokens out, SGLang's has them."""
    found = stopped_by(job, last, end_tokens)
    asked = isinstance(found, str) or found in job.params.stop_token_ids
    return {"stop_reason": found if asked else None, "matched_stop": found}


def speculation_json(stats: AcceptanceStats, simulated: Sequence[float]) -> Json:
    """Return acceptance statistics as JSON."""
    return {
        "emitted": stats.emitted,
        "drafted": stats.drafted,
        "accepted": sum(stats.accepted),
        "passes": stats.passes,
        "prompt_passes": stats.prompt_passes,
        "acceptance_length": round(stats.acceptance_length, 4),
        "offered_by_position": list(stats.offered),
        "accepted_by_position": list(stats.accepted),
        "simulated": bool(simulated),
    }


def _without(usage: Json, num_tokens: int) -> Json:
    """Return a usage as it was before some tokens of the answer."""
    counts = {name: usage[name] - num_tokens for name in ("completion_tokens", "total_tokens")}
    return {**usage, **counts}


def _opening(index: int) -> Json:
    """Return the first choice of a chat's stream, which names the role."""
    delta = {"role": "assistant", **_NOTHING_MORE, "content": ""}
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}


def _finish(reason: FinishReason | None, tally: Tally) -> str:
    if reason is FinishReason.LENGTH:
        return "length"
    if reason is FinishReason.ABORT:
        return "abort"  # SGLang's word
    # As at OpenAI (and in vLLM): a call that the request itself named is no reason to end.
    return "tool_calls" if tally.called and not tally.job.form.named else "stop"
