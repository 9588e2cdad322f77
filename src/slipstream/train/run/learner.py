"""Adapting a draft to traffic, round by round: train on what a server kept, judge on what was held back, deploy.

A round takes the latest texts, leaves out what the target cannot have written, sets aside those whose prompt's hash
says so, trains the draft in use on the rest and on general texts, and moves the result halfway back to the draft that
learning started from. It is judged (`verdict.py`) on the target's own answers to the prompts set aside, and on general
texts of other kinds than those rehearsed.
"""

import hashlib
import logging
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np
import torch

from slipstream.checkpoint.embedded import embedded_draft
from slipstream.checkpoint.hub import is_embedded, resolve
from slipstream.checkpoint.reader import open_checkpoint
from slipstream.checkpoint.tokenizer import Tokenizer
from slipstream.checkpoint.writer import CheckpointWriter
from slipstream.errors import DataError
from slipstream.models.eagle3 import Eagle3Draft
from slipstream.models.load import load_draft
from slipstream.records.traffic import (
    Answered,
    Deployed,
    part_paths,
    read_deployed,
    read_part,
    read_returned,
    write_deployed,
)
from slipstream.train.data.corpus import (
    Corpus,
    DraftVocab,
    Text,
    coverage,
    exchange_tokens,
    join,
    read_shard,
    write_shard,
)
from slipstream.train.data.generate import GenerationRequest, GeneratorConfig
from slipstream.train.data.make_data import greedy_texts, requests_of
from slipstream.train.data.prompts import as_asked, read_families
from slipstream.train.data.speaker import Speaker
from slipstream.train.draft.capture import Capture, CaptureHooks, wanted_manifest
from slipstream.train.draft.features import FeatureStore
from slipstream.train.draft.objective import Emphasis, Objective, renew_vocab
from slipstream.train.draft.packing import Packer
from slipstream.train.draft.target import load_and_digest, target_dtype
from slipstream.train.draft.walk import rounds_by_text
from slipstream.train.run.output import add_draft, check_trainable, mix, round_weights, weights_digest
from slipstream.train.run.phases import hardware, packed_engine, versions
from slipstream.train.run.recipe import TrainConfig
from slipstream.train.run.trainer import Hooks, Progress, Trainer
from slipstream.train.run.trial import PROMPT_SETS
from slipstream.train.run.verdict import Bars, Rounds, Verdict, judge, own_texts
from slipstream.train.run.world import World

log = logging.getLogger(__name__)

CHAIN = 3
_HELD_OUT_OF = 5  # prompts, one is held back
_KEPT_DRAFTS = 3
_GENERAL_FILES = ("maths.yaml", "chat.yaml")
_GENERAL_TOKENS = 96  # of an answer, at most
_OF_A_FAMILY = 2  # prompts
_FAMILIES_KEPT_OUT_OF = 3  # one is for the guards
_MOST_REPEATS = 8  # of a general text


@dataclass(frozen=True)
class LearnSettings:
    """How rounds go.

    Args:
        fresh_tokens: of answers since the last round, before the next begins.
        round_tokens: prompts included, that a round looks at; the latest.
        longest: texts of more tokens are cut off there.
        general_share: of the tokens trained on, as far as repeats allow: texts that the draft shall not forget.
        new_tokens: share of the draft's vocabulary that a round may exchange.
        halfway: back to the draft that learning started from; not for a start that knows nothing.
    """

    fresh_tokens: int = 6_000
    round_tokens: int = 60_000
    longest: int = 1_024
    steps: int = 240
    lr: float = 4e-4
    general_share: float = 0.33
    new_tokens: float = 0.15
    halfway: bool = True
    bars: Bars = field(default_factory=Bars)

    def training(self) -> TrainConfig:
        """Return the settings of a round's steps."""
        return TrainConfig(
            steps=self.steps, row_length=self.longest, rows_per_step=1, unroll=CHAIN, whole_vocabulary=False,
            hard_share=0.3, optimizer="muon", lr=self.lr, warmup=0.1, log_every=40,
        )  # fmt: skip


class Learner:
    """A target, the draft in use and a folder of traffic."""

    def __init__(
        self,
        folder: Path,
        target: str,
        draft: str,
        device: torch.device,
        settings: LearnSettings,
        report: Callable[[str], None] = log.info,
    ) -> None:
        source = open_checkpoint(target)
        path = Path(getattr(source, "path", source.folder))
        self._folder, self._name, self._device, self._settings, self._say = folder, target, device, settings, report
        model, self._digest = load_and_digest(source, target_dtype(None, device), device, settings.longest + 64)
        self._target = model
        self._speaker = Speaker(model, Tokenizer.load(path), self._digest, packed_engine(target, device))
        self._generator = GeneratorConfig(rows=8, max_length=settings.longest)
        self._first = _draft_folder(draft)
        check_trainable(self._first)
        self._seen = 0
        found = read_deployed(folder)
        self._number = 0 if found is None else found.number

    def run(self, pause_s: float = 5.0) -> None:
        """Hold rounds for ever, each when there is enough new traffic."""
        self._general()
        while True:
            if self._fresh() < self._settings.fresh_tokens:
                time.sleep(pause_s)
                continue
            self.hold_round()

    def hold_round(self) -> Verdict | None:
        """Adapt the draft to the traffic there is; deploy what is better. None where there is nothing to judge by."""
        parts = part_paths(self._folder)
        answers = [one for path in parts for one in read_part(path)]
        self._seen = int(parts[-1].stem[5:]) if parts else 0
        texts = self._texts(answers)
        if not texts:
            self._say("learning: no traffic yet")
            return None
        work = self._folder / "round"
        shutil.rmtree(work, ignore_errors=True)
        try:
            return self._round(texts, work)
        finally:
            shutil.rmtree(work, ignore_errors=True)

    def _round(self, texts: list[Text], work: Path) -> Verdict | None:
        in_use, first = self._draft(self._in_use()), self._draft(self._first)
        traffic = join(texts)
        own = own_texts(self._target, traffic, self._states(in_use, traffic, work / "traffic"))
        if foreign := own.count(False):
            self._say(f"learning: {foreign} of {len(texts)} answers are not the target's own, and are left out")
        texts = [text for text, mine in zip(texts, own, strict=True) if mine]
        learnt = [text for text in texts if not _is_held_back(text)]
        held = self._answered_anew([text for text in texts if _is_held_back(text)])
        if not held or not learnt:
            self._say(f"learning: {len(texts)} answers are too few for a round")
            return None
        general, guards = self._general()
        begun = time.monotonic()
        adapted, state = self._adapt(in_use, join([*learnt, *self._replay(learnt, general)]), work)
        if self._settings.halfway:  # most of the gain stays, and other traffic loses about a third as much
            mix(adapted, first, 0.5)
            round_weights(adapted)
        seconds = time.monotonic() - begun
        held_back, guarding = join(held), join(guards)
        at_held, at_guards = work / "held", work / "guards"
        verdict = judge(
            (self._rounds(in_use, held_back, at_held), self._rounds(adapted, held_back, at_held)),
            (self._rounds(first, guarding, at_guards), self._rounds(adapted, guarding, at_guards)),
            self._settings.bars,
        )
        self._say(f"learning: {len(learnt)} answers learnt, {len(held)} held back; {verdict}")
        if not verdict.refused:
            self._deploy(adapted, verdict, join(learnt), state, seconds)
        return verdict

    def _adapt(self, draft: Eagle3Draft, corpus: Corpus, work: Path) -> tuple[Eagle3Draft, list[dict[str, object]]]:
        """Return the draft trained on over a corpus, some of its vocabulary exchanged for the corpus's."""
        adapted = self._draft(self._in_use())
        most = int(self._settings.new_tokens * len(draft.token_ids_V))
        chosen_V = exchange_tokens(draft.token_ids_V, corpus, self._target.spec.vocab_size, most)
        vocab = DraftVocab(chosen_V, self._target.spec.vocab_size, coverage(corpus, chosen_V))
        if not chosen_V.equal(draft.token_ids_V.cpu()):
            renew_vocab(adapted, self._target, vocab)
        adapted.requires_grad_(True)
        self._target.requires_grad_(False)
        config = self._settings.training()
        emphasis = Emphasis(config.decay, config.hard_share, config.whole_vocabulary)
        objective = Objective(self._target, adapted.train(), vocab, emphasis)
        store = self._states(adapted, corpus, work / "learnt")
        packer = Packer(corpus, config.row_length, config.rows_per_step, config.unroll, config.seed, store)

        def report(progress: Progress) -> None:
            log.info("step %d of %d, loss %.3f", progress.step, progress.total_steps, progress.loss)

        state = Trainer(objective, packer, config, World(device=self._device), work).fit(Hooks(report))
        round_weights(adapted)
        return adapted.eval(), state.history

    def _deploy(
        self, draft: Eagle3Draft, verdict: Verdict, corpus: Corpus, history: list[dict[str, object]], seconds: float
    ) -> None:
        """Write the draft and say that it shall serve; older ones go, but for the last few."""
        self._number += 1
        name = f"drafts/draft-{self._number:04d}"
        record = {
            "target": self._name,
            "target_digest": self._digest,
            "started_from": weights_digest(self._in_use()),
            "learnt_from": {"texts": len(corpus), "tokens": len(corpus.ids), "answers": corpus.num_answer_tokens},
            "settings": asdict(self._settings),
            "verdict": asdict(verdict),
            "history": history,
            "seconds": seconds,
            "versions": versions(),
            "hardware": hardware(self._device),
        }
        (self._folder / "drafts").mkdir(exist_ok=True)
        with CheckpointWriter(self._folder / name, overwrite=True) as writer:
            add_draft(writer, draft, "sglang", self._name)
            writer.write_json("slipstream.json", record)
        write_deployed(self._folder, Deployed(self._number, name, verdict.before, verdict.after))
        for old in sorted((self._folder / "drafts").glob("draft-*"))[:-_KEPT_DRAFTS]:
            shutil.rmtree(old, ignore_errors=True)

    def _in_use(self) -> Path:
        """Return the folder of the draft that serves: the last deployed, unless the server gave it up."""
        deployed, returned = read_deployed(self._folder), read_returned(self._folder)
        if deployed is None or (returned is not None and returned.number >= deployed.number):
            return self._first
        path = self._folder / deployed.draft
        return path if path.is_dir() else self._first

    def _draft(self, folder: Path) -> Eagle3Draft:
        return load_draft(open_checkpoint(folder), self._target, torch.float32, self._settings.longest + 64)

    def _fresh(self) -> int:
        """Return how many answer tokens have come since the last round."""
        new = [path for path in part_paths(self._folder) if int(path.stem[5:]) > self._seen]
        return sum(len(one.answer) for path in new for one in read_part(path))

    def _texts(self, answers: Sequence[Answered]) -> list[Text]:
        """Return the latest answers, each once, as texts that fit."""
        longest, left, texts = self._settings.longest, self._settings.round_tokens, dict[Answered, Text]()
        top = self._target.spec.vocab_size
        for one in reversed(answers):
            ids = [*one.prompt, *one.answer][:longest]
            if len(ids) - len(one.prompt) < 2 * CHAIN or max(ids) >= top or one in texts:
                continue
            left -= len(ids)
            if left < 0:
                break
            texts[one] = Text(ids, [(len(one.prompt), len(ids))])
        return list(texts.values())

    def _answered_anew(self, texts: Sequence[Text]) -> list[Text]:
        """Return texts with the target's greedy answers in place of theirs: what is judged by must be its own words."""
        lengths: dict[tuple[int, ...], int] = {}
        for text in texts:
            start, end = text.spans[0]
            prompt = tuple(text.ids[:start])
            lengths[prompt] = max(end - start, lengths.get(prompt, 0))
        asked = [GenerationRequest(number, *item) for number, item in enumerate(lengths.items())]
        return greedy_texts(self._speaker, asked, self._generator)

    def _general(self) -> tuple[list[Text], list[Text]]:
        """Return general texts by the target to train on, and others to guard by; written once, into the folder."""
        found = []
        for name, prompts in zip(("rehearsed", "guards"), general_prompts(), strict=True):
            path = self._folder / f"{name}.safetensors"
            if not path.is_file():
                messages = [[as_asked(prompt)] for prompt in prompts]
                asked = requests_of(self._speaker, messages, _GENERAL_TOKENS, self._generator)
                texts = greedy_texts(self._speaker, asked, self._generator)
                if not texts:
                    raise DataError("The target answers no general prompt at length: there is nothing to guard by.")
                write_shard(path, texts, {"name": name})
            corpus = read_shard(path)
            found.append([corpus.text(number) for number in range(len(corpus))])
        self._speaker.close()
        return found[0], found[1]

    def _replay(self, learnt: Sequence[Text], general: Sequence[Text]) -> list[Text]:
        """Return general texts, as many as make the share asked for, each eight times at most."""
        share = self._settings.general_share
        wanted = sum(len(text.ids) for text in learnt) * share / (1 - share)
        repeats, part = divmod(min(_MOST_REPEATS, wanted / max(1, sum(len(text.ids) for text in general))), 1)
        spread = [text for at, text in enumerate(general) if int((at + 1) * part) > int(at * part)]
        return [*(list(general) * int(repeats)), *spread]

    def _states(self, draft: Eagle3Draft, corpus: Corpus, folder: Path) -> FeatureStore:
        """Run the target over a corpus, once; a folder that is complete is only opened."""
        config = replace(self._settings.training(), rows_per_step=1)
        index = DraftVocab(draft.token_ids_V.cpu(), self._target.spec.vocab_size, 1.0)
        objective = Objective(self._target, draft, index)
        wanted = wanted_manifest(objective, corpus, self._digest, config, World(device=self._device))
        return Capture(objective, corpus, wanted, folder).run(World(device=self._device), CaptureHooks())

    def _rounds(self, draft: Eagle3Draft, corpus: Corpus, folder: Path) -> Rounds:
        objective = Objective(
            self._target, draft, DraftVocab(draft.token_ids_V.cpu(), self._target.spec.vocab_size, 1.0)
        )
        return rounds_by_text(objective, corpus, CHAIN, self._states(draft, corpus, folder))


def general_prompts() -> tuple[list[str], list[str]]:
    """Return prompts to rehearse with and prompts to guard by, which share no template."""
    families = [family for name in _GENERAL_FILES for family in read_families(PROMPT_SETS / name)]
    guards = [prompt for family in read_families(PROMPT_SETS / "held_out.yaml") for prompt in family]
    rehearsed: list[str] = []
    for number, family in enumerate(families):
        (rehearsed if number % _FAMILIES_KEPT_OUT_OF else guards).extend(family[:_OF_A_FAMILY])
    return rehearsed, guards


def _draft_folder(draft: str) -> Path:
    if not is_embedded(draft):
        return resolve(draft)
    shipped = embedded_draft()
    assert shipped is not None, "the package brings it"
    return shipped


def _is_held_back(text: Text) -> bool:
    """Tell by its prompt alone, so that the same question is never on both sides."""
    prompt = np.asarray(text.ids[: text.spans[0][0]], np.uint32).tobytes()
    return hashlib.blake2b(prompt, digest_size=4).digest()[0] % _HELD_OUT_OF == 0
