"""Making data: the training corpus in shards, as many as asked for, and the greedy answers of the evaluation sets."""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from slipstream.errors import ConfigError, DataError
from slipstream.train.data.conversations import MAX_TURN, WINDOW, ConversationSource, Shown, Tally
from slipstream.train.data.corpus import Corpus, Text, read_notes, read_shard, shard_paths, write_shard
from slipstream.train.data.generate import (
    GenerationRequest,
    GenerationResult,
    GenerationStats,
    GeneratorConfig,
)
from slipstream.train.data.mixture import read_documents
from slipstream.train.data.prompts import Messages, read_excluded, read_prompts
from slipstream.train.data.speaker import Speaker, encode_prompt
from slipstream.train.run.recipe import EvalSet, Recipe

SAVE_EVERY_S = 15.0
_TARGET_FILE = "target.sha256"
Report = Callable[[Tally, GenerationStats], None]


@dataclass(frozen=True)
class Watch:
    """What a call of `make_corpus` tells, and when it leaves off though texts are missing."""

    report: Report = lambda tally, stats: None
    enough: Callable[[Tally, float], bool] = lambda tally, seconds: False

    @staticmethod
    def until(report: Report, seconds: float | None) -> "Watch":
        """Return one that leaves off after a time."""
        return Watch(report, lambda tally, passed: seconds is not None and passed > seconds)


def make_corpus(speaker: Speaker, recipe: Recipe, data: Path, folder: Path, watch: Watch) -> Tally:
    """Add shards to `folder` until the recipe's number of answer tokens is there, or the time is up.

    What an earlier call left counts: a call that was interrupted is simply made again, and the corpus is the one it
    would have made. What was settled is written every few seconds.
    """
    source = _source(speaker, recipe, data, folder)
    if source.finished or (source.tally.kept and watch.enough(source.tally, 0.0)):
        return source.tally
    _check_lengths(recipe)
    _make_folder(folder, speaker)
    generator = speaker.generator(recipe.generate)
    shards = _Shards(folder, source, recipe)
    started = time.monotonic()

    def stop() -> bool:
        return watch.enough(source.tally, time.monotonic() - started)

    def progress(stats: GenerationStats) -> None:
        shards.save_if_due(time.monotonic())
        watch.report(source.tally, stats)

    try:
        generator.run(source, stop, progress)
    finally:  # whoever interrupts this keeps what there is
        shards.save()
    _check_made(source, stop())
    return source.tally


def _source(speaker: Speaker, recipe: Recipe, data: Path, folder: Path) -> ConversationSource:
    """Return the conversations, gone on to where an earlier call left off."""
    files = recipe.files
    prompts, examples, maths = (
        [messages for name in names for messages in read_prompts(data / name)]
        for names in (files.prompts, files.examples, files.maths)
    )
    named = [*files.exclude, *(item.file for item in files.evaluate)]
    excluded = read_excluded(data / name for name in named)
    documents = read_documents(data / name for name in files.documents)
    _check_target(folder, speaker)
    window = WINDOW * speaker.rows(recipe.generate)
    shown = Shown(examples, maths, documents)
    source = ConversationSource(speaker.tokenizer, recipe.data, prompts, excluded, shown, window)
    texts: list[tuple[int, Text]] = []
    settled = 0
    for path in shard_paths(folder):
        notes = read_notes(path)
        shard = _texts(read_shard(path))
        numbers = notes.get("numbers", range(settled, settled + len(shard)))
        texts += zip(numbers, shard, strict=True)
        settled = notes.get("settled", settled + len(shard))
    source.resume(texts, settled)
    return source


def _check_made(source: ConversationSource, out_of_time: bool) -> None:
    """Say why there is no text, if there is none."""
    tally = source.tally
    if tally.kept:
        return
    if out_of_time and not tally.malformed + tally.excluded + tally.duplicates:
        raise DataError("No text finished in the time given for data; give more time, or lower data.max_answer.")
    raise DataError(
        f"The target gave no usable answer ({tally.malformed} malformed, {tally.excluded} excluded): is it "
        f"instruction-tuned, and is its chat template the right one?"
    )


class _Shards:
    """Writes settled texts to numbered files as they come."""

    def __init__(self, folder: Path, source: ConversationSource, recipe: Recipe) -> None:
        self._folder, self._source, self._recipe = folder, source, recipe
        self._number = len(shard_paths(folder))
        self._settled = source.num_settled
        self._saved_at = time.monotonic()

    def save_if_due(self, now: float) -> None:
        if now - self._saved_at > SAVE_EVERY_S or len(self._source.texts) >= self._recipe.data.shard_texts:
            self.save()
            self._saved_at = now

    def save(self) -> None:
        """Write what was settled since the last time; the texts' numbers tell where to go on."""
        source, recipe = self._source, self._recipe
        if source.num_settled == self._settled:
            return
        notes: dict[str, Any] = {
            "settled": source.num_settled,
            "numbers": list(source.numbers),
            "data": asdict(recipe.data),
            "files": asdict(recipe.files),
            "tally": asdict(source.tally),
        }
        write_shard(self._folder / f"shard-{self._number:05d}.safetensors", source.texts, notes)
        source.texts.clear()
        source.numbers.clear()
        self._number, self._settled = self._number + 1, source.num_settled


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
    asked = requests_of(speaker, prompts, item.max_new, config)[: item.first]
    texts = greedy_texts(speaker, asked, config)
    if not texts:
        raise DataError(f"{data / item.file}: the target answered none of its prompts at length.")
    return write_shard(path, texts, {"name": item.name, "file": item.file, "prompts": len(prompts)})


def requests_of(
    speaker: Speaker, prompts: Sequence[Messages], max_new: int, config: GeneratorConfig
) -> list[GenerationRequest]:
    """Return the prompts that fit, as served and each once, to be answered at such a length."""
    seen = dict.fromkeys(tuple(encode_prompt(speaker.tokenizer, messages)) for messages in prompts)
    fitting = (ids for ids in seen if len(ids) + max_new <= config.max_length)
    return [GenerationRequest(number, ids, max_new) for number, ids in enumerate(fitting)]


def greedy_texts(speaker: Speaker, asked: Sequence[GenerationRequest], config: GeneratorConfig) -> list[Text]:
    """Return the requests' prompts with the target's greedy answers, those of two tokens at least."""
    source = _Answers(asked)
    speaker.generator(config, stop_loops=False).run(source)
    texts = [source.text(request.key) for request in asked]
    # A walk needs at least one round: a second token.
    return [text for text in texts if text.spans[0][1] - text.spans[0][0] >= 2]


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


def _check_lengths(recipe: Recipe) -> None:
    data = recipe.data
    second = data.max_answer // 2 if data.second_turn > 0 else 0
    longest = data.max_prompt + second + max(data.max_answer, MAX_TURN if data.sampled > 0 or second else 0)
    longest = max(longest, data.max_document + data.max_answer if data.documents > 0 else 0)
    for name, room in (
        ("generate.max_length", recipe.generate.max_length),
        ("train.row_length", recipe.train.row_length),
    ):
        if room < longest:
            raise ConfigError(
                f"{name} is {room}, less than the {longest} that data.max_prompt (or max_document) and data.max_answer "
                "can add up to."
            )


def _texts(shard: Corpus) -> list[Text]:
    spans: list[list[tuple[int, int]]] = [[] for _ in range(len(shard))]
    for text, start, end in shard.spans.tolist():
        spans[text].append((start, end))
    ids = shard.ids.tolist()
    offsets = shard.offsets.tolist()
    return [Text(ids[offsets[i] : offsets[i + 1]], spans[i]) for i in range(len(shard))]
