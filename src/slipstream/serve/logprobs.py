"""Log probabilities in the forms of OpenAI's two APIs and of vLLM's `prompt_logprobs`."""

from collections.abc import Sequence

from slipstream.checkpoint.tokenizer import IncrementalDetokenizer, Tokenizer
from slipstream.engine.output import EmittedToken, TokenLogprob
from slipstream.serve.stream import Json, json_text
from slipstream.serve.ticket import Job

_LOWEST = -9999.0  # JSON has no infinity; vLLM's figure for a token that cannot come


def finite(logprob: float) -> float:
    """Return a log probability as JSON can say it."""
    return max(_LOWEST, logprob)


class Offsets:
    """Where each token of a text begins, in characters; pieces of a character begin where the character does."""

    def __init__(self, tokenizer: Tokenizer, job: Job, echo: bool) -> None:
        """Begin at the answer, or with `echo` at the prompt."""
        self._detokenizer: IncrementalDetokenizer = tokenizer.detokenizer(skip_special=job.skip_special)
        self._length = 0
        self.of_prompt: list[int] = []
        if echo:
            # Special tokens are part of a prompt that was sent as tokens; those put before a text are not part of it.
            whole = tokenizer.detokenizer(skip_special=False)
            for token in job.prompt:
                self.of_prompt.append(self._length)
                self._length += len(whole.push([token]))
            self._length += len(whole.finish())
            extra = 0 if job.prompt_text is None else max(0, self._length - len(job.prompt_text))
            self.of_prompt = [max(0, offset - extra) for offset in self.of_prompt]
            self._length -= extra

    def take(self, token: int) -> int:
        """Return where the answer's next token begins."""
        begins = self._length
        self._length += len(self._detokenizer.push([token]))
        return begins


class LogprobWriter:
    """Writes the log probabilities of any number of requests.

    Args:
        as_ids: write tokens as `token_id:N` instead of as text, which two tokens may share.
    """

    def __init__(self, tokenizer: Tokenizer, as_ids: bool) -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids
        self._around: dict[int, tuple[str, str]] = {}

    def chat(self, tokens: Sequence[EmittedToken]) -> Json:
        """Return the log probabilities of a chat's tokens."""
        found = [token.logprob for token in tokens if token.logprob is not None]
        return {
            "content": [
                {
                    **self._named(logprob.token_id, logprob.logprob),
                    "top_logprobs": [self._named(token, value) for token, value in logprob.top],
                }
                for logprob in found
            ],
            "refusal": None,
        }

    def chat_entries(self, tokens: Sequence[EmittedToken]) -> str:
        """Return the `content` of a chat's log probabilities as JSON text, without its brackets.

        Twenty alternatives to each token make it thirty times as long as the answer, so what stands around the number
        of a token is written once and kept.
        """
        return ",".join([self._entry(token.logprob) for token in tokens if token.logprob is not None])

    def _entry(self, logprob: TokenLogprob) -> str:
        top = []
        for token, value in logprob.top:
            before, after = self._around.get(token) or self._keep(token)
            top.append(f"{before}{finite(value)!r}{after}}}")
        before, after = self._around.get(logprob.token_id) or self._keep(logprob.token_id)
        return f'{before}{finite(logprob.logprob)!r}{after},"top_logprobs":[{",".join(top)}]}}'

    def _keep(self, token: int) -> tuple[str, str]:
        """Return what stands before and after a token's number, and keep it."""
        before, after = json_text(self._named(token, 0.5)).rsplit("0.5", 1)
        around = before, after.removesuffix("}")
        if token < self._tokenizer.vocab_size:  # a model may have more ids than that
            self._around[token] = around
        return around

    def completion(
        self, tokens: Sequence[EmittedToken], offsets: Offsets, head: Sequence[tuple[int, TokenLogprob | None]]
    ) -> Json:
        """Return the log probabilities of a completion's tokens, those of an echoed prompt (`head`) before them."""
        found = [token.logprob for token in tokens if token.logprob is not None]
        entries = [*head, *((logprob.token_id, logprob) for logprob in found)]
        begins = [*offsets.of_prompt[: len(head)], *(offsets.take(logprob.token_id) for logprob in found)]
        return {
            "tokens": [self._token(token) for token, _ in entries],
            "token_logprobs": [None if logprob is None else finite(logprob.logprob) for _, logprob in entries],
            "top_logprobs": [None if logprob is None else self._top(logprob) for _, logprob in entries],
            "text_offset": begins,
        }

    def prompt(self, scored: Sequence[TokenLogprob | None]) -> list[Json | None]:
        """Return vLLM's log probabilities of a prompt, by token id."""
        return [None if one is None else self._prompt_entry(one) for one in scored]

    def _prompt_entry(self, scored: TokenLogprob) -> Json:
        pairs = dict([*scored.top, (scored.token_id, scored.logprob)])
        ranks = {token: rank for rank, (token, _) in enumerate(scored.top, start=1)}
        return {
            str(token): {
                "logprob": finite(value),
                "rank": ranks.get(token, scored.rank),
                "decoded_token": self._tokenizer.token_text(token),
            }
            for token, value in pairs.items()
        }

    def _token(self, token: int) -> str:
        return f"token_id:{token}" if self._as_ids else self._tokenizer.token_text(token)

    def _named(self, token: int, value: float) -> Json:
        return {
            "token": self._token(token),
            "logprob": finite(value),
            "bytes": list(self._tokenizer.token_bytes(token)),
        }

    def _top(self, logprob: TokenLogprob) -> dict[str, float]:
        """Return alternatives by text, the token itself first; of two with one text the likelier stays."""
        top: dict[str, float] = {}
        for token, value in ((logprob.token_id, logprob.logprob), *logprob.top):
            text, shown = self._token(token), finite(value)
            top[text] = max(shown, top.get(text, shown))
        return top
