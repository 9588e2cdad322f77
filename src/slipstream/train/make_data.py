"""Making data: the training corpus in shards, as many as asked for, and the greedy answers of the evaluation sets."""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from slipstream.errors import ConfigError
from slipstream.models.target import Target
from slipstream.train.conversations import MAX_TURN, ConversationSource, Tally
from slipstream.train.corpus import Corpus, Text, read_shard, shard_paths, write_shard
from slipstream.train.errors import DataError
from slipstream.train.frame import ChatTokenizer, encode_prompt
from slipstream.train.generate import (
    GenerationRequest,
    GenerationResult,
    GenerationStats,
    Generator,
    GeneratorConfig,
)
from slipstream.train.prompts import read_excluded, read_prompts
from slipstream.train.recipe import EvalSet, Recipe

_TARGET_FILE = "target.sha256"
Report = Callable[[Tally, GenerationStats], None]


@dataclass(frozen=True)
class Speaker:
    """A target that can be talked to; `digest` is that of its weights, which a corpus remembers."""

    model: Target
    tokenizer: ChatTokenizer
    digest: str = ""


def make_corpus(
    speaker: Speaker, recipe: Recipe, data: Path, folder: Path, report: Report, seconds: float | None = None
) -> Tally:
    """Add shards to `folder` until the recipe's number of answer tokens is there, or `seconds` have passed.

    What an earlier call left counts, so a call that was interrupted is simply made again.
    """
    files = recipe.files
    prompts, examples, maths = (
        [messages for name in names for messages in read_prompts(data / name)]
        for names in (files.prompts, files.examples, files.maths)
    )
    named = [*files.exclude, *(item.file for item in files.evaluate)]
    excluded = read_excluded(data / name for name in named)
    done = shard_paths(folder)
    _check_target(folder, speaker)
    # A later call must not repeat the draws of an earlier one.
    config = replace(recipe.data, seed=recipe.data.seed + 1_000_003 * len(done))
    source = ConversationSource(speaker.tokenizer, config, prompts, excluded, examples, maths)
    for path in done:
        shard = read_shard(path)
        for text in _texts(shard):
            source.remember(text)
    if source.finished:
        return source.tally
    _check_lengths(recipe)
    _make_folder(folder, speaker)
    generator = _generator(speaker, replace(recipe.generate, seed=recipe.generate.seed + config.seed))
    started = time.monotonic()
    number = len(done)

    def stop() -> bool:
        return seconds is not None and time.monotonic() - started > seconds

    def progress(stats: GenerationStats) -> None:
        nonlocal number
        if len(source.texts) >= config.shard_texts:
            number = _flush(folder, number, source, recipe)
        report(source.tally, stats)

    generator.run(source, stop, progress)
    if source.texts:
        _flush(folder, number, source, recipe)
    if source.tally.kept == 0:
        raise DataError(
            f"The target gave no usable answer ({source.tally.malformed} malformed, {source.tally.excluded} excluded): "
            f"is it instruction-tuned, and is its chat template the right one?"
        )
    return source.tally


def _check_target(folder: Path, speaker: Speaker) -> None:
    """Refuse a corpus that another target wrote: every answer must be the target's own."""
    path = folder / _TARGET_FILE
    if path.is_file() and path.read_text(encoding="utf-8").strip() != speaker.digest:
        raise DataError(
            f"{folder}: was written by another target (its weights' digest, in {path.name}, differs). Name another "
            f"place (--work, or --out, which it follows), or delete {folder.parent}."
        )


def _make_folder(folder: Path, speaker: Speaker) -> None:
    """Have the corpus's folder there, and whose it is, before anything is generated for it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / _TARGET_FILE).write_text(speaker.digest + "\n", encoding="utf-8")
    except OSError as error:
        raise DataError(
            f"{folder}: cannot be made ({error.strerror or error}); name another place (--work)."
        ) from error


def make_eval_set(speaker: Speaker, item: EvalSet, data: Path, path: Path, config: GeneratorConfig) -> Corpus:
    """Return the evaluation set's texts: each prompt as served, then the target's greedy answer. Kept in `path`."""
    if path.is_file():
        return read_shard(path)
    prompts = read_prompts(data / item.file)
    seen: dict[tuple[int, ...], None] = {}
    for messages in prompts:
        ids = encode_prompt(speaker.tokenizer, messages)
        if len(ids) + item.max_new <= config.max_length:
            seen.setdefault(tuple(ids))
    chosen = list(seen)[: item.first]
    source = _Answers([GenerationRequest(i, prompt, item.max_new) for i, prompt in enumerate(chosen)])
    rows = min(config.rows, max(1, len(chosen)))
    _generator(speaker, replace(config, rows=rows, stop_loops=False)).run(source)
    texts = [source.text(i) for i in range(len(chosen))]
    # A walk needs at least one round: a second token.
    texts = [text for text in texts if text.spans[0][1] - text.spans[0][0] >= 2]
    if not texts:
        raise DataError(f"{data / item.file}: the target answered none of its prompts at length.")
    return write_shard(path, texts, {"name": item.name, "file": item.file, "prompts": len(prompts)})


class _Answers:
    """A fixed list of requests, and their results."""

    def __init__(self, requests: Sequence[GenerationRequest]) -> None:
        self._waiting = list(requests)
        self._results: dict[int, GenerationResult] = {}

    def take(self, count: int) -> list[GenerationRequest]:
        taken, self._waiting = self._waiting[:count], self._waiting[count:]
        return taken

    def give(self, result: GenerationResult) -> None:
        self._results[result.request.key] = result

    def text(self, key: int) -> Text:
        result = self._results[key]
        prompt = list(result.request.prompt)
        return Text([*prompt, *result.tokens], [(len(prompt), len(prompt) + len(result.tokens))])


def _generator(speaker: Speaker, config: GeneratorConfig) -> Generator:
    eos = speaker.tokenizer.eos_token_ids
    if not eos:
        raise DataError("The target names no end token (eos_token_id), so its answers would never end.")
    if max(eos) >= speaker.model.spec.vocab_size:
        raise DataError(f"The end token {max(eos)} lies outside the target's vocabulary: the tokenizer is another's.")
    return Generator(speaker.model, eos, config)


def _check_lengths(recipe: Recipe) -> None:
    longest = recipe.data.max_prompt + recipe.data.max_answer // 2 + max(recipe.data.max_answer, MAX_TURN)
    for name, room in (
        ("generate.max_length", recipe.generate.max_length),
        ("train.row_length", recipe.train.row_length),
    ):
        if room < longest:
            raise ConfigError(
                f"{name} is {room}, less than the {longest} that data.max_prompt and data.max_answer can add up to."
            )


def _texts(shard: Corpus) -> list[Text]:
    spans: list[list[tuple[int, int]]] = [[] for _ in range(len(shard))]
    for text, start, end in shard.spans.tolist():
        spans[text].append((start, end))
    ids = shard.ids.tolist()
    offsets = shard.offsets.tolist()
    return [Text(ids[offsets[i] : offsets[i + 1]], spans[i]) for i in range(len(shard))]


def _flush(folder: Path, number: int, source: ConversationSource, recipe: Recipe) -> int:
    notes = {"data": asdict(recipe.data), "files": asdict(recipe.files), "tally": asdict(source.tally)}
    write_shard(folder / f"shard-{number:05d}.safetensors", source.texts, notes)
    source.texts.clear()
    return number + 1
