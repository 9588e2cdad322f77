"""The mixture of conversations a corpus is made of, and how its answers are sampled."""

from dataclasses import dataclass

from slipstream.errors import ConfigError


@dataclass(frozen=True)
class DataConfig:
    """The mixture and its sampling.

    Args:
        answer_tokens: stop once the answers hold this many.
        magpie, maths: shares of conversations whose user turn the target samples itself, freely or after examples of
            maths questions (`files.maths`, or `files.prompts`).
        passages: share whose user turn is a task on a passage of an earlier answer.
        tasks: share whose user turn the target samples after examples of `files.examples`; what the four shares leave
            are prompts from files, each used `file_repeats` times at most, and answered greedily once at most.
        forced_opening: share of free user turns whose first words are given.
        second_turn: share of conversations that go on.
        greedy: share of greedy answers; the others use `temperature` (drawn between the two) and `top_p`, below 1 much
            slower.
        max_prompt, max_answer: in tokens.
    """

    answer_tokens: int = 30_000_000
    magpie: float = 0.65
    maths: float = 0.2
    passages: float = 0.0
    tasks: float = 0.0
    file_repeats: int = 4
    forced_opening: float = 0.6
    default_system: float = 0.6
    second_turn: float = 0.2
    greedy: float = 0.5
    temperature: tuple[float, float] = (0.6, 0.7)
    top_p: float = 1.0
    max_prompt: int = 256
    max_answer: int = 320
    shard_texts: int = 16_384
    seed: int = 0

    def __post_init__(self) -> None:
        shares = ("magpie", "maths", "passages", "tasks", "forced_opening", "default_system", "second_turn", "greedy")
        for name in shares:
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; a share lies between 0 and 1.")
        for name in ("answer_tokens", "file_repeats", "max_prompt", "max_answer", "shard_texts"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 1.")
        if self.sampled > 1 + 1e-9:
            raise ConfigError(
                "magpie, maths, passages and tasks are shares of all conversations; together they exceed 1."
            )

    @property
    def sampled(self) -> float:
        """Share of conversations that need no prompt from a file."""
        return self.magpie + self.maths + self.passages + self.tasks
