"""The JSON the server answers with: choices, chunks, usage and log probabilities in OpenAI's forms."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from slipstream.checkpoint.tokenizer import Tokenizer
from slipstream.engine.output import EmittedToken, TokenLogprob
from slipstream.engine.request import FinishReason
from slipstream.serve.errors import HttpError
from slipstream.serve.stream import DONE, Json, server_sent_event
from slipstream.serve.ticket import Job, StepEvent
from slipstream.speculation.statistics import AcceptanceStats

Kind = Literal["chat", "completion"]

_OBJECTS = {
    ("chat", False): "chat.completion",
    ("chat", True): "chat.completion.chunk",
    ("completion", False): "text_completion",
    ("completion", True): "text_completion",
}


@dataclass(frozen=True)
class Wants:
    """What a request wants in its answer beside the text."""

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


@dataclass
class Tally:
    """What an answer came to so far."""

    job: Job
    num_tokens: int = 0
    text_length: int = 0
    started: bool = False
    stats: AcceptanceStats = field(default_factory=AcceptanceStats)

    def count(self, event: StepEvent) -> None:
        """Take in an event."""
        self.num_tokens += len(event.tokens)
        if event.stats is not None:
            self.stats = event.stats


class AnswerWriter:
    """Writes one request's answer."""

    def __init__(self, wants: Wants, tokenizer: Tokenizer, head: Json, simulated: Sequence[float]) -> None:
        """Keep what every part of the answer shares.

        Args:
            head: id, created and model.
            simulated: the rates, if acceptance is simulated; the answer then says so.
        """
        self._wants = wants
        self._tokenizer = tokenizer
        self._head = head
        self._simulated = list(simulated)

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
        return {**self._envelope(), "choices": choices, "usage": self.usage(tallies)}

    def part(self, index: int, tallies: Sequence[Tally], event: StepEvent) -> bytes:
        """Return what a stream says of an event: the role of a chat's answer with the first."""
        tally = tallies[index]
        # Not before the first token is there: clients take a stream's first event for its first token.
        opens = self._wants.kind == "chat" and not tally.started
        opening = server_sent_event(self._chunk([_opening(index)])) if opens else b""
        last = event if event.finish_reason is not None else None
        usage = self.usage(tallies) if self._wants.running_usage else None
        return opening + server_sent_event(self._chunk([self._choice(index, tally, [event], last)], usage))

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
        }
        if self._wants.speculation:
            stats = AcceptanceStats()
            for tally in tallies:
                stats.add(tally.stats)
            usage["speculation"] = speculation_json(stats, self._simulated)
        return usage

    def _chunk(self, choices: Sequence[Json], usage: Json | None = None) -> Json:
        body = {**self._envelope(), "choices": list(choices)}
        if self._wants.usage:
            body["usage"] = usage
        return body

    def _choice(self, index: int, tally: Tally, events: Sequence[StepEvent], last: StepEvent | None) -> Json:
        """Return a choice with the events' text; `last` is the event that ended the answer, if it is over."""
        wants = self._wants
        tokens = [] if wants.drop_answer else [token for event in events for token in event.tokens]
        text = "" if wants.drop_answer else "".join(event.text for event in events)
        scored = next((event.prompt_logprobs for event in events if event.prompt_logprobs is not None), None)
        is_first = not tally.started
        echoed = self._echo(tally.job) if wants.echo and is_first else ""
        tally.started = True
        choice: Json = {"index": index}
        if wants.kind == "completion":
            choice["text"] = echoed + text
        elif wants.stream:
            choice["delta"] = {"content": text} if text or last is None else {}
        else:
            choice["message"] = {"role": "assistant", "content": text, "refusal": None}
        choice["logprobs"] = self._logprobs(tally, tokens, scored if wants.echo else None)
        choice["finish_reason"] = None if last is None else _finish(last.finish_reason)
        if last is not None and last.tokens and wants.kind == "completion":
            ended_by = last.tokens[-1].token_id
            choice["stop_reason"] = ended_by if ended_by in tally.job.params.stop_token_ids else None
        tally.text_length += len(echoed) + len(text)
        if wants.token_ids:
            choice["token_ids"] = [token.token_id for token in tokens]
            if is_first:
                choice["prompt_token_ids"] = list(tally.job.prompt)
        self._extras(choice, tally.job, tokens, events, scored)
        return choice

    def _envelope(self) -> Json:
        body = {**self._head, "object": _OBJECTS[self._wants.kind, self._wants.stream]}
        if self._simulated:
            body["simulated_acceptance"] = self._simulated
        return body

    def _echo(self, job: Job) -> str:
        return self._tokenizer.decode(job.prompt, skip_special=job.skip_special)

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
                    "text": token.text,
                    "draft_position": token.draft_position,
                    "tree_nodes": event.num_drafted,
                }
                for event in events
                for token in event.tokens
            ]
        if self._wants.prompt_logprobs and scored is not None:
            choice["prompt_logprobs"] = [None if s is None else self._prompt_entry(s) for s in scored]

    def _prompt_entry(self, scored: TokenLogprob) -> Json:
        pairs = dict([*scored.top, (scored.token_id, scored.logprob)])
        ranks = {token: rank for rank, (token, _) in enumerate(scored.top, start=1)}
        return {
            str(token): {
                "logprob": value,
                "rank": ranks.get(token),
                "decoded_token": self._tokenizer.token_text(token),
            }
            for token, value in pairs.items()
        }

    def _logprobs(
        self, tally: Tally, tokens: Sequence[EmittedToken], scored: Sequence[TokenLogprob | None] | None
    ) -> Json | None:
        if self._wants.logprobs is None:
            return None
        found = [token.logprob for token in tokens if token.logprob is not None]
        if self._wants.kind == "chat":
            return {"content": [self._chat_entry(logprob) for logprob in found], "refusal": None}
        head: list[tuple[int, TokenLogprob | None]] = list(zip(tally.job.prompt, scored or (), strict=False))
        return self._completion_logprobs([*head, *((logprob.token_id, logprob) for logprob in found)], tally)

    def _chat_entry(self, logprob: TokenLogprob) -> Json:
        entry = self._named(logprob.token_id, logprob.logprob)
        return {**entry, "top_logprobs": [self._named(token, value) for token, value in logprob.top]}

    def _named(self, token: int, value: float) -> Json:
        text = self._tokenizer.token_text(token)
        return {"token": text, "logprob": value, "bytes": list(text.encode())}

    def _completion_logprobs(self, entries: Sequence[tuple[int, TokenLogprob | None]], tally: Tally) -> Json:
        offset = tally.text_length
        body: Json = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token, logprob in entries:
            text = self._tokenizer.token_text(token)
            body["tokens"].append(text)
            body["token_logprobs"].append(None if logprob is None else logprob.logprob)
            body["top_logprobs"].append(None if logprob is None else self._top(logprob))
            body["text_offset"].append(offset)
            offset += len(text)
        return body

    def _top(self, logprob: TokenLogprob) -> dict[str, float]:
        """Return alternatives by text, the token itself among them; of two with one text the likelier stays."""
        top: dict[str, float] = {}
        for token, value in (*logprob.top, (logprob.token_id, logprob.logprob)):
            top.setdefault(self._tokenizer.token_text(token), value)
        return top


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


def _opening(index: int) -> Json:
    """Return the first choice of a chat's stream, which names the role."""
    return {"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}


def _finish(reason: FinishReason | None) -> str:
    return "length" if reason is FinishReason.LENGTH else "stop"
