"""One whole answer: its tokens and text, why it ended, and what speculation did for it."""

from collections.abc import Sequence
from dataclasses import dataclass

from slipstream.engine.output import Emission, EmittedToken
from slipstream.engine.request import FinishReason
from slipstream.speculation.statistics import AcceptanceStats


@dataclass(frozen=True)
class Completion:
    """One answer.

    Args:
        tokens: each token with the text it let out, and where on the draft's path it was guessed (0: not drafted).
        seed: the same seed gives the same text again, with a draft or without (docs/exact.md says where).
        stats: passes, drafted and accepted tokens; `stats.acceptance_length` is the tokens a pass.
    """

    prompt_tokens: tuple[int, ...]
    tokens: tuple[EmittedToken, ...]
    text: str
    finish_reason: FinishReason
    seed: int
    stats: AcceptanceStats

    @property
    def token_ids(self) -> list[int]:
        """The answer's tokens."""
        return [token.token_id for token in self.tokens]

    def __str__(self) -> str:
        """Return the answer's text."""
        return self.text

    @staticmethod
    def of(emissions: Sequence[Emission]) -> "Completion":
        """Put together what the steps of one request gave it."""
        last = emissions[-1]
        assert last.finish_reason is not None, "the answer is over"
        return Completion(
            prompt_tokens=last.prompt,
            tokens=tuple(token for emission in emissions for token in emission.tokens),
            text="".join(emission.text for emission in emissions),
            finish_reason=last.finish_reason,
            seed=last.seed,
            stats=last.stats,
        )
