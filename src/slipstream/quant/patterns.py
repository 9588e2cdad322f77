"""Which modules the patterns of a foreign quantization_config mean: names, globs, and expressions tried in a child."""

import fnmatch
from collections.abc import Collection, Sequence

from slipstream.checkpoint.confined import Confined, LimitError, Limits
from slipstream.errors import CheckpointError

_LIMITS = Limits(cpu_s=2.0, memory_bytes=1 << 30, answer_bytes=64 << 20)
_MAX_TRIALS = 20_000_000
_LONGEST_PATTERN = 1000


def matched(patterns: Sequence[str], modules: Collection[str], where: str) -> dict[str, frozenset[str]]:
    """Return the modules each pattern covers: `re:` expressions match from the start, as engines have it.

    Args:
        where: the field the patterns come from, for messages.
    """
    names = frozenset(modules)
    found = {pattern: names & {pattern} for pattern in patterns}
    globs = [p for p in patterns if not p.startswith("re:") and any(letter in p for letter in "*?[")]
    expressions = [pattern for pattern in patterns if pattern.startswith("re:")]
    if len(globs + expressions) * len(names) > _MAX_TRIALS or any(len(p) > _LONGEST_PATTERN for p in patterns):
        raise CheckpointError(
            f"{where} holds {len(globs + expressions)} patterns or very long ones; name layers instead."
        )
    for pattern in globs:
        found[pattern] |= {name for name in names if fnmatch.fnmatchcase(name, pattern)}
    if expressions:
        found |= _match_apart(expressions, sorted(names), where)
    return found


def _match_apart(expressions: list[str], names: list[str], where: str) -> dict[str, frozenset[str]]:
    child = Confined("slipstream.checkpoint.pattern_program", _LIMITS)
    try:
        hits = child.call({"patterns": [pattern.removeprefix("re:") for pattern in expressions], "names": names})
    except LimitError as error:
        raise CheckpointError(f"{where} holds an expression that cannot be matched ({error}).") from error
    finally:
        child.close()
    return {pattern: frozenset(names[i] for i in indices) for pattern, indices in zip(expressions, hits, strict=True)}
