"""A whole run, phase by phase, each of which picks up what is already in the run's folder: data, training, output."""

import json
import logging
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

import slipstream
from slipstream.checkpoint.config import DraftDialect
from slipstream.checkpoint.hub import EMBEDDED
from slipstream.checkpoint.reader import open_checkpoint
from slipstream.checkpoint.tokenizer import Tokenizer
from slipstream.checkpoint.writer import refuse_foreign
from slipstream.engine.config import EngineConfig
from slipstream.engine.engine import Engine
from slipstream.engine.loading import Loaded, LoadOptions, load
from slipstream.errors import ConfigError
from slipstream.models.eagle3 import Eagle3Draft
from slipstream.models.layers import Linear
from slipstream.models.load import load_draft, load_ends
from slipstream.models.target import Target
from slipstream.models.topology import Topology
from slipstream.records.store import write_text
from slipstream.train.data.corpus import Corpus, DraftVocab, choose_vocab, coverage, read_corpus, shard_paths
from slipstream.train.data.make_data import Report, Watch, make_corpus, make_eval_set
from slipstream.train.data.speaker import CPU_ROWS, OpenEngine, Speaker, encode_prompt, engine_config
from slipstream.train.draft.capture import Capture, CaptureHooks, moved, wanted_manifest
from slipstream.train.draft.features import MANIFEST, FeatureStore
from slipstream.train.draft.objective import Emphasis, Objective, new_draft, renew_vocab
from slipstream.train.draft.packing import Packer
from slipstream.train.draft.server_states import ALL_HERE, Remote
from slipstream.train.draft.target import (
    SplitTarget,
    check_range,
    draft_dtype,
    dtype_name,
    load_and_digest,
    target_dtype,
    weights_digest,
)
from slipstream.train.draft.walk import Measured, measure
from slipstream.train.run.output import Lineage, RunRecord, average_with, result_record, round_weights, write_draft
from slipstream.train.run.recipe import Recipe
from slipstream.train.run.trainer import STATE_FILE, Hooks, Progress, Trainer, TrainState
from slipstream.train.run.world import World

CHAINS = (3, 6)
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Paths:
    """Where a run reads and writes: `data` holds prompt files, `work` the corpus and the state."""

    data: Path
    work: Path

    @property
    def corpus(self) -> Path:
        """The corpus's shards."""
        return self.work / "corpus"


@dataclass(frozen=True)
class Output:
    """Where a draft goes (a new folder, or one that slipstream wrote), for which readers, and the drafts behind it."""

    folder: Path
    dialect: DraftDialect = "sglang"
    lineage: Lineage = field(default_factory=Lineage)

    def __post_init__(self) -> None:
        refuse_foreign(self.folder)  # before hours of training, not after


@dataclass
class Timings:
    """Seconds spent in each phase, by name."""

    seconds: dict[str, float] = field(default_factory=dict)

    def add(self, name: str, started: float) -> None:
        """Count the time since `started` to a phase."""
        self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - started


class TrainingRun:
    """A target, a recipe and a folder; the phases may be called in separate processes, in order."""

    def __init__(
        self,
        target: str | Path | None,
        recipe: Recipe,
        paths: Paths,
        device: torch.device,
        tp: int = 1,
        remote: Remote = ALL_HERE,
    ) -> None:
        """Load the target, or split it over `tp` processes, which this one starts, or leave its work to servers."""
        recipe.files.check(paths.data)
        source = open_checkpoint(target)
        path = getattr(source, "path", source.folder)
        self.name = str(target) if target is not None else EMBEDDED
        self.recipe, self.paths, self.device, self.tp = recipe, paths, device, tp
        dtype = target_dtype(recipe.train.target_dtype, device)
        open_engine = packed_engine(self.name, device)
        self._split: Loaded | None = None
        self._evals: dict[str, Corpus] = {}
        model: Target | SplitTarget
        if remote.states:
            self._part = load_ends(source, dtype, device, _rotary_length(recipe))
            model, self.digest = self._part, weights_digest(self._part)
        elif tp == 1:
            self._part, self.digest = load_and_digest(source, dtype, device, _rotary_length(recipe))
            model = self._part
        else:
            self._split = split_target(self.name, recipe, device, tp)
            engine = self._split.engine
            model, open_engine = SplitTarget(self._split), lambda config: engine
            self._part, self.digest = self._split.target, weights_digest(self._split.target)
        if recipe.generate.max_length > model.spec.max_position:
            raise ConfigError(
                f"generate.max_length is {recipe.generate.max_length}; the target knows {model.spec.max_position} "
                f"positions."
            )
        self.speaker = Speaker(model, Tokenizer.load(Path(path)), self.digest, open_engine, remote.servers)
        self.server_states = remote.checked(self.speaker, recipe)
        if dtype == torch.float16 and not remote.states:
            if isinstance(model, SplitTarget):
                raise ConfigError("train.target_dtype is float16, whose range is not checked with --tp; say bfloat16.")
            check_range(model, encode_prompt(self.speaker.tokenizer, [{"role": "user", "content": "Hello!"}]))
        self.stored_features: str | None = None
        self.before: dict[str, Any] = {}  # a record's JSON
        # The ranks of a split target run passes, not steps of their own.
        self.world = World.join(device) if self._split is None else World(device=device)
        self.timings = Timings()

    def close(self) -> None:
        """End the other ranks of a split target, and part from other processes."""
        if self._split is not None:
            self._split.close()
        self.world.leave()

    def generate(self, report: Report, seconds: float | None = None, offline: Path | None = None) -> Corpus:
        """Make (or finish) the corpus; it stays once training has begun, or states of it are stored in `offline`."""
        started = time.monotonic()
        if self.world.rank == 0:
            marks = (self.paths.work / STATE_FILE, (offline or self.paths.work) / MANIFEST)
            begun = bool(shard_paths(self.paths.corpus)) and any(mark.is_file() for mark in marks)
            watch = Watch(report, lambda tally, passed: True) if begun else Watch.until(report, seconds)
            make_corpus(self.speaker, self.recipe, self.paths.data, self.paths.corpus, watch)
        self.world.wait()
        self.timings.add("generation", started)
        return read_corpus(self.paths.corpus)

    def eval_sets(self) -> dict[str, Corpus]:
        """Answer the held-out questions, once, in the process that measures; then the engine is closed."""
        if self.world.rank > 0:
            return {}
        self._evals = self._evals or {
            item.name: make_eval_set(
                self.speaker,
                item,
                self.paths.data,
                self.paths.work / f"eval-{item.name}.safetensors",
                self.recipe.generate,
            )
            for item in self.recipe.files.evaluate
        }
        self.speaker.close()
        return self._evals

    def _walk(self, objective: Objective) -> dict[str, Measured]:
        """Walk every evaluation set, with the states of servers where the target's blocks are not here."""
        walks = {}
        for name, texts in self.eval_sets().items():
            store = None
            if self.server_states is not None:
                folder = self.paths.work / f"eval-{name}-features"
                config = replace(self.recipe.train, row_length=int(np.diff(texts.offsets).max()))
                wanted = wanted_manifest(objective, texts, self.digest, config, World())
                store = Capture(objective, texts, wanted, folder, self.server_states).run(World(), CaptureHooks())
            walks[name] = measure(objective, texts, CHAINS, store)
        return walks

    def vocab(self, corpus: Corpus) -> DraftVocab:
        """Choose the draft's vocabulary."""
        tokenizer = self.speaker.tokenizer
        forced = tokenizer.special_token_ids.union(tokenizer.eos_token_ids)
        size = self.speaker.model.spec.vocab_size
        return choose_vocab(corpus, size, min(self.recipe.draft.vocab_size, size), forced)

    def start(self, corpus: Corpus, init_from: Path | None = None) -> tuple[Eagle3Draft, DraftVocab]:
        """Return the draft to train, fresh or read from a folder, and its vocabulary.

        A draft that is read keeps its vocabulary unless the recipe renews it.
        """
        model = self.speaker.model
        if init_from is None:
            vocab = self.vocab(corpus)
            return new_draft(self.recipe.draft.spec(model.spec), model, vocab, self.recipe.train.seed), vocab
        draft = load_draft(open_checkpoint(init_from), self._part, torch.float32)
        if draft.lm_head is model.lm_head:
            draft.lm_head = _own_head(model.lm_head)
        if self.recipe.draft.window is not None:
            draft.see_last(self.recipe.draft.window)
        if self.recipe.draft.renew_vocab:
            renew_vocab(draft, model, self.vocab(corpus))
        draft.requires_grad_(True)
        model.requires_grad_(False)
        token_ids_V = draft.token_ids_V.cpu()
        return draft.train(), DraftVocab(token_ids_V, model.spec.vocab_size, coverage(corpus, token_ids_V))

    def objective(self, draft: Eagle3Draft, vocab: DraftVocab) -> Objective:
        """Return the loss the recipe asks for."""
        config = self.recipe.train
        emphasis = Emphasis(config.decay, config.hard_share, config.whole_vocabulary, config.overlap)
        return Objective(self.speaker.model, draft, vocab, emphasis, draft_dtype(self.device, config.draft_dtype))

    def store_features(
        self, draft: Eagle3Draft, vocab: DraftVocab, corpus: Corpus, folder: Path, hooks: CaptureHooks
    ) -> FeatureStore:
        """Run the target over the corpus, once and for all, and keep on disk what training reads of it."""
        started = time.monotonic()
        objective = Objective(self.speaker.model, draft, vocab)
        wanted = wanted_manifest(objective, corpus, self.digest, self.recipe.train, self.world)
        capture = Capture(objective, corpus, wanted, folder, self.server_states)
        if not capture.manifest.same_rows(wanted):
            log.info("%s: was made in rows of another packing; its features differ from this one's by rounding", folder)
        store = capture.run(self.world, hooks)
        self.stored_features = store.manifest.digest
        self.timings.add("features", started)
        return store

    def train(
        self,
        draft: Eagle3Draft,
        vocab: DraftVocab,
        corpus: Corpus,
        report: Callable[[Progress], None],
        stop_after_s: float | None = None,
        store: FeatureStore | None = None,
        started_from: str | None = None,
    ) -> TrainState:
        """Train, or go on training, until the last step or until the time is up.

        `started_from` is the digest of the draft that was read, if one was: a state of another start is refused.
        Steps that read a store need the target's head and embedding only: its blocks wait in the host's memory.
        """
        config, target = self.recipe.train, self.speaker.model
        objective = self.objective(draft, vocab)
        packer = Packer(corpus, config.row_length, config.rows_per_step, config.unroll, config.seed, store)
        trainer = Trainer(objective, packer, config, self.world, self.paths.work, started_from)

        def evaluate() -> dict[str, float]:
            with moved(target.layers, self.device):
                return {
                    f"{name} K={chain}": round(walk.acceptance_length, 3)
                    for name, measured in self._walk(objective).items()
                    for chain, walk in measured.walks.items()
                }

        started = time.monotonic()
        with moved(target.layers, self.device if store is None else torch.device("cpu")):
            state = trainer.fit(Hooks(report, evaluate if self.eval_sets() else None), stop_after_s)
        self.timings.add("training", started)
        return state

    def average(self, draft: Eagle3Draft, folder: Path, share: float) -> None:
        """Keep a share of the draft's weights; the rest is of the one in a folder."""
        average_with(draft, load_draft(open_checkpoint(folder), self._part, torch.float32), share)

    def measure(self, draft: Eagle3Draft, vocab: DraftVocab) -> dict[str, Measured]:
        """Walk every evaluation set."""
        return self._walk(Objective(self.speaker.model, draft, vocab))

    def measure_start(self, draft: Eagle3Draft, vocab: DraftVocab) -> None:
        """Measure the draft that training starts from; a run that is taken up again knows what was found."""
        texts = [digest for corpus in self.eval_sets().values() for digest in corpus.digests]
        if not texts:
            return
        path, measured = self.paths.work / "before.json", [weights_digest(draft), repr(draft.spec), *texts]
        known = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        if known.get("measured") != measured:
            results = {name: result_record(found) for name, found in self.measure(draft, vocab).items()}
            known = {"measured": measured, "results": results}
            write_text(path, json.dumps(known, indent=1) + "\n")
        self.before = known["results"]

    def write(
        self,
        output: Output,
        draft: Eagle3Draft,
        vocab: DraftVocab,
        state: TrainState,
    ) -> RunRecord:
        """Measure the draft and write its folder; its weights are rounded first, so that what is measured is there."""
        round_weights(draft)
        corpus = read_corpus(self.paths.corpus)
        training = state.history[-1]["seconds"] if state.history else 0.0
        record = RunRecord(
            target=self.name,
            target_digest=self.digest,
            recipe=self.recipe.as_dict(),
            corpus={
                "texts": len(corpus),
                "tokens": len(corpus.ids),
                "answer_tokens": corpus.num_answer_tokens,
                "shards": list(corpus.digests),
            },
            coverage=vocab.coverage,
            history=state.history,
            results={name: result_record(measured) for name, measured in self.measure(draft, vocab).items()},
            versions=versions(),
            hardware=hardware(self.device),
            seconds={**self.timings.seconds, "training": training},
            started_from=output.lineage.started_from,
            averaged_with=output.lineage.averaged_with,
            averaged_share=output.lineage.averaged_share,
            records=output.lineage.records,
            stored_features=self.stored_features,
            before=self.before,
            precision={
                "target": dtype_name(self.speaker.model.embed_tokens.dtype),
                "draft": dtype_name(draft_dtype(self.device, self.recipe.train.draft_dtype)),
            },
        )
        write_draft(output.folder, draft, output.dialect, record, self.speaker.model.spec.architecture)
        return record


def split_target(name: str, recipe: Recipe, device: torch.device, tp: int) -> Loaded:
    """Start the ranks that hold a target, each with its part and room for the texts that are written at once."""
    config = engine_config(recipe.generate, recipe.generate.rows or CPU_ROWS)
    return load(
        LoadOptions(
            name,
            "none",
            device=str(device),
            dtype=dtype_name(target_dtype(recipe.train.target_dtype, device)),
            max_context=config.max_context,
            max_requests=config.max_requests,
            max_batch_tokens=config.max_batch_tokens,
            engine=config,
            topology=Topology(tp=tp),
        )
    )


def packed_engine(name: str, device: torch.device) -> OpenEngine | None:
    """Return what opens an engine over a GGUF's blocks as stored, which a CPU decodes fastest; None for other targets.

    Training expands such a target; its blocks beside that are a small part of the memory.
    """
    if device.type != "cpu" or (name != EMBEDDED and not name.endswith(".gguf")):
        return None

    def opened(config: EngineConfig) -> Engine:
        sizes = {name: getattr(config, name) for name in ("max_context", "max_requests", "max_batch_tokens")}
        return load(LoadOptions(name, "none", device="cpu", **sizes, engine=config)).engine

    return opened


def _rotary_length(recipe: Recipe) -> int:
    """Return how many positions the tables need: padded rows, and the steps unrolled past their end."""
    longest = max(recipe.generate.max_length, recipe.train.row_length)
    return -(-longest // 64) * 64 + max(recipe.train.unroll, *CHAINS)


def _own_head(shared: Linear) -> Linear:
    """Return a copy to train, in float32: a draft that came without a head must not change its target's."""
    assert shared.weight is not None
    own = Linear(shared.in_features, shared.rows)
    own.weight = torch.nn.Parameter(shared.weight.to(torch.float32, copy=True))
    return own


def versions() -> dict[str, str]:
    """Return what made a draft."""
    return {
        "slipstream": getattr(slipstream, "__version__", "0"),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def hardware(device: torch.device) -> str:
    """Name the device, for records."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} CPU"
