"""Compare drafts by what they are for: tokens a pass on the same prompts, beside their size; no answer may change."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal

from slipstream.checkpoint.embedded import embedded_draft
from slipstream.checkpoint.hub import resolve
from slipstream.engine.build import build_engine
from slipstream.engine.engine import Engine
from slipstream.engine.loading import Loaded, read_draft
from slipstream.errors import ConfigError
from slipstream.models.eagle3 import Eagle3Draft
from slipstream.speculation.sampling import SamplingParams
from slipstream.speculation.statistics import AcceptanceStats
from slipstream.speculation.tree import TreeShape
from slipstream.train.prompts import Messages
from slipstream.train.repetition import loop_end

NGRAM = "ngram"
AUTO = "auto"


@dataclass
class DraftResult:
    """One draft's answers to the prompts.

    Args:
        shape: the trees it drafted; n-gram lookup drafts chains of their depth.
        nbytes: the size of the draft's files; 0 for n-gram lookup.
        straight: statistics of the answers that do not loop: a loop is easy to draft.
        num_identical: answers equal, token for token, to those of plain decoding.
    """

    name: str
    shape: TreeShape
    nbytes: int
    stats: AcceptanceStats = field(default_factory=AcceptanceStats)
    straight: AcceptanceStats = field(default_factory=AcceptanceStats)
    num_answers: int = 0
    num_looping: int = 0
    num_identical: int = 0


def compare_drafts(
    loaded: Loaded,
    drafts: Sequence[str],
    shapes: Sequence[TreeShape],
    prompts: Sequence[Messages],
    params: SamplingParams,
    as_served: bool = False,
    advance: Callable[[str, int], None] = lambda name, count: None,
) -> list[DraftResult]:
    """Answer the prompts without a draft, then with each in every shape; `advance` hears of finished answers.

    Args:
        loaded: a target loaded without a draft.
        drafts: folders, hub ids, "ngram", or "auto" (the draft that ships).
        as_served: read drafts as serving does, in INT8 where the CPU kernels run; otherwise as they are stored.
    """
    asked = [loaded.tokenizer.encode_chat(messages) for messages in prompts]
    plain = _answers(loaded.engine, loaded, asked, params, partial(advance, "no draft"))
    results = []
    for name in drafts:
        folder = _folder(name)
        draft: Eagle3Draft | Literal["ngram"] = "ngram"
        if folder is not None:
            dtype = None if as_served else loaded.target.embed_tokens.dtype
            draft = read_draft(folder, loaded.target, dtype, loaded.ops)
        for shape in shapes:
            engine = build_engine(loaded.target, draft, shape, loaded.engine.config, loaded.ops)
            result = DraftResult(name, shape, 0 if folder is None else _weight_file_bytes(folder))
            answers = _answers(engine, loaded, asked, params, partial(advance, name))
            _count(result, answers, [tokens for tokens, _ in plain])
            results.append(result)
    return results


def _folder(name: str) -> Path | None:
    """Return where a draft lies; None for n-gram lookup."""
    if name == NGRAM:
        return None
    if name != AUTO:
        return resolve(name)
    shipped = embedded_draft()
    if shipped is None:
        raise ConfigError("This copy of slipstream ships no draft, so 'auto' names none; give a folder.")
    return shipped


def _count(
    result: DraftResult, answers: Sequence[tuple[list[int], AcceptanceStats]], expected: Sequence[list[int]]
) -> None:
    """Add answers to a result, beside those of plain decoding."""
    for (tokens, stats), plain in zip(answers, expected, strict=True):
        result.num_answers += 1
        result.num_identical += tokens == plain
        result.stats.add(stats)
        if loop_end(tokens) is None:
            result.straight.add(stats)
        else:
            result.num_looping += 1


def _answers(
    engine: Engine,
    loaded: Loaded,
    asked: Sequence[list[int]],
    params: SamplingParams,
    finished: Callable[[int], None],
) -> list[tuple[list[int], AcceptanceStats]]:
    """Return every answer's tokens and statistics, in order."""
    if params.seed is None:
        raise ConfigError("Comparing drafts needs a seed: answers are compared token for token.")
    ids = [engine.add(prompt, params, params.seed, loaded.tokenizer.eos_token_ids) for prompt in asked]
    tokens: dict[int, list[int]] = {request_id: [] for request_id in ids}
    stats: dict[int, AcceptanceStats] = {}
    while engine.has_work:
        for emission in engine.step():
            tokens[emission.request_id] += [token.token_id for token in emission.tokens]
            if emission.finish_reason is not None:
                stats[emission.request_id] = emission.stats
                finished(1)
    return [(tokens[request_id], stats[request_id]) for request_id in ids]


def _weight_file_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir() if path.suffix in (".safetensors", ".bin", ".gguf"))
