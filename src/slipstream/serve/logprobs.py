"""Log probabilities in the forms of OpenAI's two APIs and of vLLM's `prompt_logprobs`."""

from collections.abc import Sequence

from slipstream.checkpoint.tokenizer import IncrementalDetokenizer, Tokenizer
from slipstream.engine.output import EmittedToken, TokenLogprob
from slipstream.serve.stream import Json
from slipstream.serve.ticket import Job


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
    """Writes one request's log probabilities.

    Args:
        as_ids: write tokens as `token_id:N` instead of as text, which two tokens may share.
    """

    def __init__(self, tokenizer: Tokenizer, as_ids: bool) -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids

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

    def completion(
        self, tokens: Sequence[EmittedToken], offsets: Offsets, head: Sequence[tuple[int, TokenLogprob | None]]
    ) -> Json:
        """Return the log probabilities of a completion's tokens, those of an echoed prompt (`head`) before them."""
        found = [token.logprob for token in tokens if token.logprob is not None]
        entries = [*head, *((logprob.token_id, logprob) for logprob in found)]
        begins = [*offsets.of_prompt[: len(head)], *(offsets.take(logprob.token_id) for logprob in found)]
        return {
            "tokens": [self._token(token) for token, _ in entries],
            "token_logprobs": [None if logprob is None else logprob.logprob for _, logprob in entries],
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
            str(token): {"logprob": value, "rank": ranks.get(token), "decoded_token": self._tokenizer.token_text(token)}
            for token, value in pairs.items()
        }

    def _token(self, token: int) -> str:
        return f"token_id:{token}" if self._as_ids else self._tokenizer.token_text(token)

    def _named(self, token: int, value: float) -> Json:
        return {"token": self._token(token), "logprob": value, "bytes": list(self._tokenizer.token_bytes(token))}

    def _top(self, logprob: TokenLogprob) -> dict[str, float]:
        """Return alternatives by text, the token itself among them; of two with one text the likelier stays."""
        top: dict[str, float] = {}
        for token, value in (*logprob.top, (logprob.token_id, logprob.logprob)):
            top.setdefault(self._token(token), value)
        return top
