"""Acceptance statistics: drafted and accepted counts by position, for a request and for an engine."""

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class AcceptanceStats:
    """Counts that add up over steps and requests.

    Position p is the p-th drafted token on a path. `offered[p]` counts passes in which something was drafted there,
    `accepted[p]` those in which it was kept, so accepted / offered is the rate at that position for any tree.
    `prompt_passes` are the passes, among all, that computed a prompt's end with nothing drafted yet: each emits the
    answer's first token, whatever the draft is worth.
    """

    passes: int = 0
    prompt_passes: int = 0
    emitted: int = 0
    drafted: int = 0
    offered: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)

    def record(self, nodes_by_depth: Sequence[int], emitted: int, accepted: int, first: bool) -> None:
        """Count one target pass.

        Args:
            nodes_by_depth: nodes drafted at each depth.
            accepted: how many of the emitted tokens had been drafted.
            first: whether the pass emitted the first token of an answer.
        """
        self.passes += 1
        self.prompt_passes += first and not nodes_by_depth
        self.emitted += emitted
        self.drafted += sum(nodes_by_depth)
        while len(self.offered) < len(nodes_by_depth):
            self.offered.append(0)
            self.accepted.append(0)
        for position, nodes in enumerate(nodes_by_depth):
            self.offered[position] += nodes > 0
            self.accepted[position] += position < accepted

    def add(self, other: "AcceptanceStats") -> None:
        """Take another's counts in."""
        self.passes += other.passes
        self.prompt_passes += other.prompt_passes
        self.emitted += other.emitted
        self.drafted += other.drafted
        longest = max(len(self.offered), len(other.offered))
        for mine, theirs in ((self.offered, other.offered), (self.accepted, other.accepted)):
            mine.extend([0] * (longest - len(mine)))
            for position, count in enumerate(theirs):
                mine[position] += count

    @property
    def acceptance_length(self) -> float:
        """Emitted tokens per decoding pass, the target's own token included; 1.0 without a draft.

        Passes over a prompt are left out, with the token each emits: SGLang's and vLLM's figures count the same way.
        """
        return (self.emitted - self.prompt_passes) / self.decoding_passes if self.decoding_passes else 1.0

    @property
    def decoding_passes(self) -> int:
        """Passes in which something was, or could have been, drafted."""
        return self.passes - self.prompt_passes

    @property
    def rates(self) -> list[float]:
        """Share of passes that kept a drafted token, by position, of those that drafted one there."""
        return [kept / tried if tried else 0.0 for kept, tried in zip(self.accepted, self.offered, strict=True)]
