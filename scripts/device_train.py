"""Train the shipped draft on a lent GPU in a few short calls: check, generate, train, ablate, write.

Needs torch, tokenizers, jinja2, yaml and (for a .gguf target) the gguf package; no terminal libraries.
"""

import argparse
import copy
import itertools
import json
import logging
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from slipstream.checkpoint.spec import ModelSpec, RopeSpec
from slipstream.kernels import KvLayer
from slipstream.models.llama import LlamaDecoder
from slipstream.train import sampling, static_cache
from slipstream.train.corpus import Corpus, Text, join, read_corpus
from slipstream.train.generate import GenerationRequest, Generator, GeneratorConfig
from slipstream.train.objective import DraftShape, Objective, new_draft
from slipstream.train.packing import Packer, to_device
from slipstream.train.recipe import Recipe, make_recipe, read_recipe
from slipstream.train.run import Paths, TrainingRun, continue_from, summary
from slipstream.train.state import load_state
from slipstream.train.trainer import Hooks, Progress, TrainConfig, Trainer
from slipstream.train.vocab import choose_vocab
from slipstream.train.world import World

log = logging.getLogger("device_train")

SMOLLM2 = ModelSpec(
    architecture="LlamaForCausalLM",
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    rms_eps=1e-5,
    rope=RopeSpec(theta=100_000.0, rotary_dim=64),
    max_position=2048,
    tie_embeddings=True,
    eos_token_ids=(2,),
)


def main() -> None:
    """Run one of the phases."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("phase", nargs="+", choices=["check", "generate", "choose", "train", "write", "ablate"])
    parser.add_argument("--target")
    parser.add_argument("--name", default="embedded", help="what the record calls the target")
    parser.add_argument("--recipe", type=Path, default=Path("recipes/train/embedded.yaml"))
    parser.add_argument("--data", type=Path, default=Path("carry/data"))
    parser.add_argument("--work", type=Path, default=Path("/tmp/slipstream-train"))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--init-from", type=Path, help="a draft folder to start from instead of fresh weights")
    parser.add_argument("--generate-s", type=float, help="stop generating after this long")
    parser.add_argument("--stop-after-s", type=float, help="stop training at a checkpoint after this long")
    parser.add_argument("--lr", type=float, action="append", default=[], help="candidates of the phase choose")
    parser.add_argument("--variant", action="append", default=[], help="variants of the phase ablate")
    parser.add_argument("--ablate-s", type=float, default=45.0, help="training time of each variant")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="change the recipe")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--small", action="store_true", help="check with toy sizes")
    arguments = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = True
    recipe = _changed(read_recipe(arguments.recipe), arguments.set)
    device = torch.device(arguments.device)
    log.info("%s, torch %s", torch.cuda.get_device_name() if device.type == "cuda" else "cpu", torch.__version__)
    if "check" in arguments.phase:
        check(device, arguments.small)
    if rest := [phase for phase in arguments.phase if phase != "check"]:
        _run_phases(rest, arguments, recipe, device)


def _run_phases(phases: list[str], arguments: argparse.Namespace, recipe: Recipe, device: torch.device) -> None:
    started = time.monotonic()
    run = TrainingRun(arguments.target, recipe, Paths(arguments.data, arguments.work), device)
    run.name = arguments.name
    log.info("target loaded in %.1f s, digest %s", time.monotonic() - started, run.digest[:16])
    if "generate" in phases:
        _generate(run, arguments.generate_s)
    corpus = read_corpus(run.paths.corpus)
    for name, texts in run.eval_sets().items():
        log.info("eval set %s: %d texts, %d answer tokens", name, len(texts), texts.num_answer_tokens)
    if "choose" in phases:
        _choose_lr(run, corpus, arguments.ablate_s, arguments.lr)
    chosen = run.paths.work / "chosen.json"
    if chosen.is_file():
        lr = json.loads(chosen.read_text())["lr"]
        run.recipe = replace(run.recipe, train=replace(run.recipe.train, lr=lr))
    if arguments.init_from is not None:
        draft, vocab = continue_from(run, arguments.init_from)
    else:
        vocab = run.vocab(corpus)
        log.info("draft vocabulary %d covers %.2f%% of answer tokens", len(vocab.token_ids_V), 100 * vocab.coverage)
        draft = run.new_draft(vocab)
    if "train" in phases:
        state = run.train(draft, vocab, corpus, _report, arguments.stop_after_s)
        log.info("at step %d of %d%s", state.step, state.total_steps, ", finished" if state.finished else "")
    if "write" in phases:
        loaded = load_state(run.paths.work / "state.pt", device)
        assert loaded is not None, "train first"
        state, tensors, _ = loaded
        with torch.no_grad():
            for name, parameter in draft.named_parameters():
                if name in tensors:
                    parameter.copy_(tensors[name])
        record = run.write(arguments.out, draft, vocab, state, "sglang")
        for line in summary(record.results):
            log.info("%s", line)
    if "ablate" in phases:
        _ablate(run, corpus, arguments.ablate_s, arguments.variant)


def _generate(run: TrainingRun, seconds: float | None) -> None:
    ticks = itertools.count(1)

    def report(tally: object, stats: object) -> None:
        if next(ticks) % 25 == 0:
            log.info("%s | %d tok/s, %.0f s", tally, stats.tokens_per_s, stats.seconds)

    corpus = run.generate(report, seconds)
    log.info(
        "corpus: %d texts, %.2fM tokens, %.2fM answer tokens", len(corpus), len(corpus.ids) / 1e6,
        corpus.num_answer_tokens / 1e6,
    )  # fmt: skip
    for index in np.linspace(0, len(corpus) - 1, 12).astype(int).tolist():
        log.info(
            "--- %s", run.speaker.tokenizer.decode(corpus.text(index).ids, skip_special=True)[:300].replace("\n", " / ")
        )


def _report(progress: Progress) -> None:
    accuracy = " ".join(f"{value:.3f}" for value in progress.accuracy)
    log.info(
        "step %5d/%d loss %.4f acc %s lr %.2e norm %.2f | %dk tok/s, %.0f s, %.0f s left %s",
        progress.step, progress.total_steps, progress.loss, accuracy, progress.lr, progress.grad_norm,
        progress.tokens_per_s / 1000, progress.seconds, progress.seconds_left, progress.acceptance or "",
    )  # fmt: skip


def _ablate(run: TrainingRun, corpus: Corpus, seconds: float, names: list[str]) -> None:
    """Train variants for the same short time each; print the acceptance each reaches."""
    base, shape = run.recipe.train, run.recipe.draft
    variants = {
        "base": (base, shape),
        "lr x2": (replace(base, lr=2 * base.lr), shape),
        "lr / 2": (replace(base, lr=base.lr / 2), shape),
        "unroll 4": (replace(base, unroll=4), shape),
        "unroll 6": (replace(base, unroll=6), shape),
        "frozen head": (replace(base, freeze_head=True), shape),
        "rows / 2": (replace(base, rows_per_step=base.rows_per_step // 2), shape),
        "vocabulary 8192": (base, replace(shape, vocab_size=8192)),
        "pre-norm": (base, replace(shape, feedback="pre_norm")),
        "no feature norm": (base, replace(shape, feature_norm="none")),
    }
    for name in names or list(variants):
        _short_run(run, corpus, replace(run.recipe, train=variants[name][0], draft=variants[name][1]), name, seconds)


def _choose_lr(run: TrainingRun, corpus: Corpus, seconds: float, candidates: list[float]) -> None:
    """Try learning rates for a short time each and remember the one whose loss is lowest for the phases that follow.

    A trial ends within its first pass over the corpus, so its loss is on texts it has not seen; the evaluation sets,
    whose figures are printed beside it, decide nothing.
    """
    scores = {}
    for lr in candidates:
        recipe = replace(run.recipe, train=replace(run.recipe.train, lr=lr))
        scores[lr] = _short_run(run, corpus, recipe, f"lr {lr:g}", seconds)
    best = max(scores, key=lambda lr: scores[lr])
    (run.paths.work / "chosen.json").write_text(
        json.dumps({"lr": best, "scores": {str(k): v for k, v in scores.items()}})
    )
    log.info("chosen lr %g", best)


def _short_run(run: TrainingRun, corpus: Corpus, recipe: Recipe, name: str, seconds: float) -> float:
    config = replace(recipe.train, steps=None, time_budget_s=seconds, log_every=100, eval_every=0)
    variant = copy.copy(run)
    variant.recipe = replace(recipe, train=config)
    vocab = variant.vocab(corpus)
    draft = variant.new_draft(vocab)
    objective = Objective(run.speaker.model, draft, vocab, config.decay)
    packer = Packer(corpus, config.row_length, config.rows_per_step, config.unroll, config.seed)
    seen: list[Progress] = []
    with tempfile.TemporaryDirectory() as folder:
        Trainer(objective, packer, config, World(), Path(folder)).fit(Hooks(seen.append))
    walks = {key: measured.walks for key, measured in run.measure(draft, vocab).items()}
    table = " ".join(f"{key} {w[3].acceptance_length:.3f}/{w[6].acceptance_length:.3f}" for key, w in walks.items())
    last = seen[-1]
    log.info("VARIANT %-16s %4d steps loss %.3f acc %.3f | %s", name, last.step, last.loss, last.accuracy[0], table)
    return -last.loss


def check(device: torch.device, small: bool) -> None:
    """Compare the fast kernels with the plain ones, and time generation and training on a random model."""
    spec = replace(SMOLLM2, num_layers=6, vocab_size=2048) if small else SMOLLM2
    if device.type == "cuda":
        _check_kernels(device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    target = LlamaDecoder(spec)
    with torch.no_grad():
        for parameter in target.parameters():
            if parameter.dim() == 2:
                parameter.normal_(0, 0.03)
    target = target.to(device, dtype).requires_grad_(False).eval()
    for rows in (8,) if small else (2048, 4096):
        _time_generation(target, rows, 20 if small else 320)
    rng = np.random.default_rng(0)
    texts = []
    for _ in range(60 if small else 4000):
        length = int(rng.integers(150, 500))
        texts.append(Text(rng.integers(3, spec.vocab_size, length).tolist(), [(int(rng.integers(40, 120)), length)]))
    for rows, unroll in ((2, 3),) if small else ((32, 5), (64, 5), (32, 4)):
        _time_training(target, join(texts), rows, unroll, 1024 if small else 12_288)


def _check_kernels(device: torch.device) -> None:
    from slipstream.train import triton_decode

    torch.manual_seed(0)
    shape = (64, 3, 736, 64)
    layer = KvLayer(*(torch.randn(shape, device=device).bfloat16() for _ in range(2)))
    q = torch.randn(64, 9, 64, device=device).bfloat16()
    lengths = torch.randint(1, 737, (64,), device=device)
    for window in (None, 100):
        plain = static_cache.decode_attention(
            q.float(), KvLayer(layer.keys_SGd.float(), layer.values_SGd.float()), lengths, 0.125, window
        )
        fast = triton_decode.decode_attention(q, layer, lengths, 0.125, window).float()
        error = float((plain - fast).norm() / plain.norm())
        log.info("decode attention, window %s: relative error %.2e", window, error)
        assert error < 1e-2
    logits = torch.randn(256, 49152, device=device) * 4
    temperature, top_p = torch.rand(256, device=device), torch.rand(256, device=device) * 0.5 + 0.5
    temperature[:64] = 0
    uniform = torch.rand(256, 3, device=device)
    same = sampling.sample(logits, temperature, top_p, uniform) == triton_decode.sample(
        logits, temperature, top_p, uniform
    )
    log.info("sampling: %.1f%% of rows equal", 100 * float(same.float().mean()))
    assert bool(same[:64].all()) and float(same.float().mean()) > 0.97


class _Endless:
    """Requests without end, for timing."""

    def take(self, count: int) -> list[GenerationRequest]:
        """Return as many as asked for."""
        return [GenerationRequest(i, list(range(3, 80)), 200, 0.7 * (i % 2), 0.95) for i in range(count)]

    def give(self, result: object) -> None:
        """Forget it."""


def _time_generation(target: LlamaDecoder, rows: int, steps: int) -> None:
    begun = time.monotonic()
    generator = Generator(target, [2], GeneratorConfig(rows=rows, max_length=736, check_every=32))
    log.info("generator of %d rows ready in %.1f s", rows, time.monotonic() - begun)
    checks = itertools.count()
    stats = generator.run(_Endless(), stop=lambda: next(checks) * 32 >= steps + 224)
    log.info("generation, %d rows: %.0f tok/s (%d texts, %.1f s)", rows, stats.tokens_per_s, stats.texts, stats.seconds)
    if target.embed_tokens.device.type == "cuda":
        torch.cuda.synchronize()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(50):
            generator._advance()
        end.record()
        torch.cuda.synchronize()
        log.info(
            "  one decode step: %.2f ms; memory %.1f GB",
            start.elapsed_time(end) / 50,
            torch.cuda.max_memory_allocated() / 1e9,
        )
    del generator
    torch.cuda.empty_cache()


def _time_training(target: LlamaDecoder, corpus: Corpus, rows: int, unroll: int, vocab_size: int) -> None:
    vocab = choose_vocab(corpus, target.spec.vocab_size, vocab_size, [0, 1, 2])
    draft = new_draft(DraftShape(vocab_size=vocab_size).spec(target.spec), target, vocab, 0)
    objective = Objective(target, draft, vocab)
    config = TrainConfig(steps=1, rows_per_step=rows, unroll=unroll)
    packer = Packer(corpus, 1024, rows, unroll, 0)
    trainer = Trainer(objective, packer, config, World(), Path("/tmp/unused"))
    device = target.embed_tokens.device
    batch = to_device(packer.batch(0), device)
    losses, begun, timed = [], 0.0, 3 if rows <= 2 else 12
    for step in range(3 + timed):
        if step == 3:
            trainer._synchronize()
            begun = time.monotonic()
        out, _ = trainer._step(batch, 1e-3)
        losses.append(out.loss.detach())
    trainer._synchronize()
    seconds = (time.monotonic() - begun) / timed
    log.info(
        "training, %d rows, unroll %d: %.1f ms a step, %.0fk tok/s; loss %.3f -> %.3f; memory %.1f GB", rows, unroll,
        1000 * seconds, rows * 1.024 / seconds, float(losses[0]), float(losses[-1]),
        torch.cuda.max_memory_allocated() / 1e9 if device.type == "cuda" else 0.0,
    )  # fmt: skip
    assert float(losses[-1]) < float(losses[0])
    if device.type == "cuda":
        _profile(trainer, batch)


def _profile(trainer: Trainer, batch: object) -> None:
    """Say where a step's time goes, by kernel."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        trainer._step(batch, 1e-3)
        torch.cuda.synchronize()
    events = sorted(profiler.key_averages(), key=lambda e: -e.self_device_time_total)
    total = sum(event.self_device_time_total for event in events)
    log.info("  kernels: %.1f ms", total / 1000)
    for event in events[:14]:
        log.info("  %6.2f ms %5d x %s", event.self_device_time_total / 1000, event.count, event.key[:90])


def _changed(recipe: Recipe, changes: list[str]) -> Recipe:
    content = recipe.as_dict()
    for change in changes:
        name, _, value = change.partition("=")
        section, _, key = name.partition(".")
        content[section][key] = (
            None if value == "none" else float(value) if "." in value or "e" in value else int(value)
        )
    return make_recipe(content, "recipe with --set")


if __name__ == "__main__":
    main()
