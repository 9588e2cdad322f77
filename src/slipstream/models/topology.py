"""How many ranks hold a model and what each gets, checked against the model before anything is loaded."""

from dataclasses import dataclass

from slipstream.checkpoint.spec import DraftSpec, ModelSpec
from slipstream.errors import ConfigError


@dataclass(frozen=True)
class Topology:
    """The split of a target and its draft.

    Args:
        tp: ranks; attention heads, feed-forward widths and the vocabulary are split over all of them.
        ep: groups the ranks form for experts. Each group holds a share of the experts, each of them split over the
            group's tp / ep ranks: 1 splits every expert over all ranks, tp gives every rank whole experts.
        draft_tp: 1 keeps the draft whole, on the first rank; tp splits it as the target is split.
    """

    tp: int = 1
    ep: int = 1
    draft_tp: int = 1

    def __post_init__(self) -> None:
        for name, value in (("tp", self.tp), ("ep", self.ep), ("draft_tp", self.draft_tp)):
            if value < 1:
                raise ConfigError(f"{name} is {value}; it must be at least 1.")
        if self.tp % self.ep:
            raise ConfigError(
                f"ep is {self.ep} and tp is {self.tp}; experts are dealt to groups of the tp ranks, so ep must divide "
                "tp (it does not multiply the ranks)."
            )
        if self.draft_tp not in (1, self.tp):
            raise ConfigError(f"draft_tp is {self.draft_tp}; it is 1 (the draft whole) or tp ({self.tp}).")

    def __str__(self) -> str:
        """Say it in a line."""
        experts = f", experts in {self.ep} groups" if self.ep > 1 else ""
        return f"{self.tp} (heads, widths and vocabulary split{experts})"

    def check(self, spec: ModelSpec) -> None:
        """Raise ConfigError unless the target splits evenly."""
        self._check_sizes("the target", spec, spec.vocab_size)
        moe = spec.moe
        if moe is None:
            if self.ep > 1:
                raise ConfigError(f"ep is {self.ep}, but {spec.architecture} has no experts. Leave it out.")
            return
        if moe.num_experts % self.ep:
            raise ConfigError(f"ep is {self.ep}, which does not divide the target's {moe.num_experts} experts.")
        if moe.shared_size % self.tp:
            raise ConfigError(
                f"tp is {self.tp}, which does not divide the {moe.shared_size} columns of the target's shared expert."
            )
        if moe.intermediate_size % (self.tp // self.ep):
            raise ConfigError(
                f"tp is {self.tp} and ep is {self.ep}, so {self.tp // self.ep} ranks split each expert, which does not "
                f"divide its {moe.intermediate_size} columns. Raise ep: tp {self.tp} and ep {self.tp} splits none."
            )

    def check_draft(self, spec: DraftSpec) -> None:
        """Raise ConfigError unless the draft splits evenly, if it is to be split."""
        if self.draft_tp > 1:
            self._check_sizes("the draft", spec, spec.draft_vocab_size)

    def _check_sizes(self, whose: str, spec: ModelSpec | DraftSpec, vocab_size: int) -> None:
        sizes = [("attention heads", spec.num_heads), ("tokens in the vocabulary", vocab_size)]
        moe = spec.moe if isinstance(spec, ModelSpec) else None
        if moe is None or moe.dense_layers:
            sizes.append(("feed-forward columns", spec.intermediate_size))
        for what, size in sizes:
            if size % self.tp:
                raise ConfigError(f"tp is {self.tp}, which does not divide {whose}'s {size} {what}.")
        by_head = spec.mla is None  # a latent is whole on every rank
        if by_head and spec.num_kv_heads % self.tp and self.tp % spec.num_kv_heads:
            raise ConfigError(
                f"tp is {self.tp}, and {whose} has {spec.num_kv_heads} key heads: one number must divide the other "
                "(with more ranks than key heads, ranks share one)."
            )
