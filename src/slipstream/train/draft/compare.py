"""Compare drafts by what they are for: tokens a pass on the same prompts, beside their size; no answer may change."""

import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from slipstream.checkpoint.embedded import embedded_draft
from slipstream.checkpoint.hub import is_embedded, resolve
from slipstream.engine.build import AnyDraft, build_engine
from slipstream.engine.config import PATIENCE_S
from slipstream.engine.engine import Engine
from slipstream.engine.loading import Loaded
from slipstream.engine.read_draft import read_any_draft
from slipstream.errors import ConfigError
from slipstream.models.eagle3 import Eagle3Draft
from slipstream.speculation.sampling import SamplingParams
from slipstream.speculation.statistics import AcceptanceStats
from slipstream.speculation.tree import TreeShape
from slipstream.train.data.generate import loop_end
from slipstream.train.data.prompts import Messages
from slipstream.train.draft.walk import length_name

NGRAM = "ngram"
NO_DRAFT = "no draft"
COPYING = " and copying"
"""Behind a draft's name: tokens copied from the text stand beside its own."""
_WARM_UP_TOKENS = 8

Answer = tuple[list[int], AcceptanceStats]
"""An answer's tokens and its statistics."""


@dataclass
class DraftResult:
    """One draft's answers to the prompts.

    Args:
        shape: the trees it drafted (n-gram lookup drafts chains of their depth); None for plain decoding.
        nbytes: the size of the draft's files; 0 for n-gram lookup.
        by_answer: each answer's statistics, in order.
        straight: statistics of the answers that do not loop: a loop is easy to draft.
        by_length: statistics by the prompt's length (`length_name`).
        num_identical: answers equal, token for token, to those of plain decoding.
        speeds: tokens a second, prompts included, for each group of prompts that were answered together.
    """

    name: str
    shape: TreeShape | None
    nbytes: int
    stats: AcceptanceStats = field(default_factory=AcceptanceStats)
    by_answer: list[AcceptanceStats] = field(default_factory=list)
    straight: AcceptanceStats = field(default_factory=AcceptanceStats)
    by_length: dict[str, AcceptanceStats] = field(default_factory=dict)
    num_answers: int = 0
    num_looping: int = 0
    num_identical: int = 0
    speeds: list[float] = field(default_factory=list)


def compare_drafts(
    loaded: Loaded,
    drafts: Sequence[str],
    shapes: Sequence[TreeShape],
    prompts: Sequence[Messages],
    params: SamplingParams,
    as_served: bool = False,
    advance: Callable[[int], None] = lambda count: None,
) -> list[DraftResult]:
    """Answer the prompts without a draft and with each in every shape; plain decoding is the first result.

    Prompts are answered in groups, as many together as the engine takes. Everybody answers a group before the next
    begins, and who is first changes from group to group: speeds of one group can be compared, whatever else the
    machine does meanwhile.

    Args:
        loaded: a target loaded without a draft. If its settings say how many tokens to copy, each draft is followed by
            itself with so many beside its own.
        drafts: folders, hub ids, "ngram", or "auto" (the draft that ships).
        as_served: read drafts as serving does, in INT8 where the CPU kernels run; otherwise as they are stored.
        advance: hears of finished answers.
    """
    if params.seed is None:
        raise ConfigError("Comparing drafts needs a seed: answers are compared token for token.")
    asked = [loaded.tokenizer.encode_chat(messages) for messages in prompts]
    _check_lengths(asked, loaded.engine.config.max_context, params.max_tokens)
    plain = _Runner(DraftResult(NO_DRAFT, None, 0), loaded.engine)
    runners = [plain, *_runners(loaded, drafts, shapes, as_served)]
    ends = loaded.tokenizer.eos_token_ids
    for runner in runners:
        runner.answer(asked[:1], dataclasses.replace(params, max_tokens=_WARM_UP_TOKENS, min_tokens=0), ends)
    at_once = loaded.engine.config.max_requests
    for number, start in enumerate(range(0, len(asked), at_once)):
        group = asked[start : start + at_once]
        first = number % len(runners)
        answers: dict[int, list[Answer]] = {}
        for index in (*range(first, len(runners)), *range(first)):
            started = time.perf_counter()
            answers[index] = runners[index].answer(group, params, ends)
            num_tokens = sum(len(tokens) for tokens, _ in answers[index])
            runners[index].result.speeds.append(num_tokens / (time.perf_counter() - started))
            advance(len(group))
        for index, runner in enumerate(runners):
            _count(runner.result, group, answers[index], [tokens for tokens, _ in answers[0]])
    return [runner.result for runner in runners]


def _check_lengths(asked: Sequence[list[int]], max_context: int, max_tokens: int) -> None:
    """Raise ConfigError unless every prompt has room for an answer, before any is written."""
    longest = max(range(len(asked)), key=lambda number: len(asked[number]))
    if len(asked[longest]) >= max_context:
        wanted = len(asked[longest]) + max_tokens
        raise ConfigError(
            f"Prompt {longest + 1} has {len(asked[longest]):,} tokens, and the context holds {max_context:,}. Give "
            f"--max-context {wanted} (as much as the model allows), or leave the prompt out."
        )


@dataclass(frozen=True)
class _Runner:
    """One way of decoding, and what came of it."""

    result: DraftResult
    engine: Engine

    def answer(self, group: Sequence[list[int]], params: SamplingParams, ends: Sequence[int]) -> list[Answer]:
        """Return every answer's tokens and statistics, in order."""
        assert params.seed is not None, "`compare_drafts` looked"
        ids = [self.engine.add(prompt, params, params.seed, ends) for prompt in group]
        tokens: dict[int, list[int]] = {request_id: [] for request_id in ids}
        stats: dict[int, AcceptanceStats] = {}
        while self.engine.has_work:
            for emission in self.engine.step(PATIENCE_S):
                tokens[emission.request_id] += [token.token_id for token in emission.tokens]
                stats[emission.request_id] = emission.stats
        return [(tokens[request_id], stats[request_id]) for request_id in ids]


def _runners(loaded: Loaded, drafts: Sequence[str], shapes: Sequence[TreeShape], as_served: bool) -> list[_Runner]:
    """Build an engine for each draft in every shape, over the same target, alone and with copied tokens beside it."""
    # The first engine may have taken what memory there is; the others make do with what its requests need.
    config = dataclasses.replace(loaded.engine.config, num_pages=None)
    copied_tokens = config.copied_tokens or 0
    runners = []
    for name in drafts:
        folder = _folder(name)
        draft: AnyDraft = "ngram"
        if folder is not None:
            dtype = None if as_served else loaded.target.embed_tokens.dtype
            draft = read_any_draft(folder, loaded.target, dtype, loaded.ops)
        nbytes = 0 if folder is None else _weight_file_bytes(folder)
        copies = isinstance(draft, Eagle3Draft) and copied_tokens > 0
        arms = {name: 0} if not copies else {name: 0, name + COPYING: copied_tokens}
        for shape in shapes:
            for arm, copied in arms.items():
                own = dataclasses.replace(config, copied_tokens=copied)
                engine = build_engine(loaded.target, draft, shape, own, loaded.ops)
                # n-gram lookup makes chains, whatever was asked for.
                runners.append(_Runner(DraftResult(arm, engine.drafter.shape, nbytes), engine))
    return runners


def _folder(name: str) -> Path | None:
    """Return where a draft lies; None for n-gram lookup."""
    if name == NGRAM:
        return None
    if not is_embedded(name):
        return resolve(name)
    shipped = embedded_draft()
    if shipped is None:
        raise ConfigError(f"This copy of slipstream ships no draft, so {name!r} names none; give a folder.")
    return shipped


def _count(
    result: DraftResult, prompts: Sequence[list[int]], answers: Sequence[Answer], expected: Sequence[list[int]]
) -> None:
    """Add answers to a result, beside those of plain decoding."""
    for prompt, (tokens, stats), plain in zip(prompts, answers, expected, strict=True):
        result.num_answers += 1
        result.num_identical += tokens == plain
        result.stats.add(stats)
        result.by_answer.append(stats)
        result.by_length.setdefault(length_name(len(prompt)), AcceptanceStats()).add(stats)
        if loop_end(tokens) is None:
            result.straight.add(stats)
        else:
            result.num_looping += 1


def _weight_file_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir() if path.suffix in (".safetensors", ".bin", ".gguf"))
