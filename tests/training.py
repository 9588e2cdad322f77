"""A tiny target to train drafts for, texts, and drafting step by step as serving does it."""

import numpy as np
import torch

from slipstream.checkpoint.config import model_config
from slipstream.checkpoint.spec import ModelSpec, RopeSpec
from slipstream.checkpoint.writer import CheckpointWriter
from slipstream.engine.build import build_engine
from slipstream.engine.config import EngineConfig
from slipstream.kernels import AttentionBatch, select
from slipstream.kernels.training.ops import TrainOps
from slipstream.kernels.training.seen import Seen
from slipstream.models.accounting import places
from slipstream.models.context import KvCache, PagedContext
from slipstream.models.target import Target
from slipstream.train.data.corpus import Text, choose_vocab, join
from slipstream.train.data.generate import GenerationRequest, Generator
from slipstream.train.draft.objective import DraftShape, Objective, new_draft
from slipstream.train.draft.packing import PackedContext, Packer
from slipstream.train.run.output import RunRecord
from slipstream.train.run.recipe import TrainConfig
from slipstream.train.run.trainer import Hooks, Trainer
from slipstream.train.run.world import World

EOS = 2
PAGE = 16

# A whole run of `slipstream train` on the tiny target, in seconds.
RECIPE = {
    "draft": {"vocab_size": 64},
    "files": {"prompts": ["train.jsonl"], "evaluate": [{"name": "held-out", "file": "test.jsonl", "max_new": 40}]},
    "data": {
        "answer_tokens": 4000, "magpie": 0.2, "maths": 0.1, "file_repeats": 8, "second_turn": 0.1, "max_prompt": 120,
        "max_answer": 40, "shard_texts": 64,
    },
    "generate": {"rows": 16, "max_length": 360},
    "train": {
        "steps": 60, "row_length": 384, "rows_per_step": 2, "unroll": 3, "lr": 0.01, "log_every": 10, "eval_every": 30,
    },
}  # fmt: skip


def tiny_spec(vocab_size=96):
    return ModelSpec(
        architecture="LlamaForCausalLM",
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=64,
        num_layers=6,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        rms_eps=1e-5,
        rope=RopeSpec(theta=10_000.0, rotary_dim=8),
        max_position=1024,
        tie_embeddings=True,
        eos_token_ids=(EOS,),
    )


def tiny_target(seed=0, scale=0.2, vocab_size=96):
    model = Target(tiny_spec(vocab_size))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(0, scale, generator=generator)
    return model.requires_grad_(False).eval()


def random_texts(count, seed=0, low=12, high=40, vocab_size=96):
    rng = np.random.default_rng(seed)
    texts = []
    for _ in range(count):
        length = int(rng.integers(low, high))
        start = int(rng.integers(3, length - 6))
        texts.append(Text(rng.integers(3, vocab_size, length).tolist(), [(start, length)]))
    return texts


def objective_for(target, texts, draft_vocab=48, seed=0, **shape):
    corpus = join(texts)
    vocab = choose_vocab(corpus, target.spec.vocab_size, draft_vocab, forced=[0, 1, EOS])
    spec = DraftShape(vocab_size=draft_vocab, **shape).spec(target.spec)
    draft = new_draft(spec, target, vocab, seed)
    return Objective(target, draft, vocab), corpus, vocab


class ListSource:
    def __init__(self, requests):
        self.waiting, self.results = list(requests), {}

    def take(self, count):
        taken, self.waiting = self.waiting[:count], self.waiting[count:]
        return taken

    def give(self, result):
        self.results[result.request.key] = result


def paged(ops, kv, start, count):
    index = torch.arange(start, start + count)
    batch = AttentionBatch(
        torch.tensor([0, count], dtype=torch.int32),
        torch.tensor([start + count], dtype=torch.int32),
        torch.arange(8, dtype=torch.int32)[None],
        index,
        torch.full((count,), -1, dtype=torch.int64),
        PAGE,
    )
    return PagedContext(ops, index, index, batch, kv)


def draft_step_by_step(objective, ids, slot, steps):
    """Draft as serving does: the target over the text so far, draft-extend, then one token at a time."""
    ops = select(torch.device("cpu"))
    target, draft = objective.target, objective.draft
    kv = KvCache.allocate(target.kv_shape, 8, PAGE, torch.float32, torch.device("cpu"))
    hidden = target(ids[: slot + 1], paged(ops, kv, 0, slot + 1), draft.spec.captured_layers)
    draft_kv = KvCache.allocate(draft.kv_shape, 8, PAGE, torch.float32, torch.device("cpu"))
    out = draft(draft.fuse(hidden.captured, ops), ids[1 : slot + 2], paged(ops, draft_kv, 0, slot + 1))
    logits = [draft.logits(out.normed_TD[-1:], ops)]
    feedback = out.feedback_TD[-1:]
    for step in range(1, steps):
        token = ids[slot + 1 + step : slot + 2 + step]
        out = draft(feedback, token, paged(ops, draft_kv, slot + step, 1))
        logits.append(draft.logits(out.normed_TD, ops))
        feedback = out.feedback_TD
    return torch.cat(logits)


def greedy(target, prompt, max_new):
    """Return what plain greedy decoding writes after a prompt."""
    ids = list(prompt)
    ops = TrainOps(torch.device("cpu"))
    while len(ids) < len(prompt) + max_new:
        row = torch.tensor([ids])
        ctx = PackedContext(ops, torch.arange(len(ids))[None], Seen(torch.zeros_like(row)))
        ids.append(int(target.logits(target(row, ctx).last_TD[0, -1], ops).argmax()))
        if ids[-1] == EOS:
            break
    return ids[len(prompt) :]


def engine_over(target, rows, max_length, **settings):
    config = EngineConfig(max_context=max_length, max_requests=rows, **settings)
    return build_engine(target, None, None, config, select(torch.device("cpu"), "reference"))


def greedy_texts(target, count, max_new=24, seed=0):
    generator = torch.Generator().manual_seed(seed)
    prompts = torch.randint(3, 96, (count, 8), generator=generator).tolist()
    source = ListSource([GenerationRequest(i, prompt, max_new) for i, prompt in enumerate(prompts)])
    Generator(engine_over(target, 16, 64), [EOS], stop_loops=False).run(source)
    return [
        Text([*prompts[i], *source.results[i].tokens], [(8, 8 + len(source.results[i].tokens))]) for i in range(count)
    ]


def train(objective, corpus, folder, steps, started_from=None, **settings):
    config = TrainConfig(
        steps=steps, **{"row_length": 128, "rows_per_step": 4, "unroll": 3, "log_every": 5, **settings}
    )
    packer = Packer(corpus, config.row_length, config.rows_per_step, config.unroll, config.seed)
    return Trainer(objective, packer, config, World(), folder, started_from)


def assert_learns(target, folder):
    """Assert that a few steps of training teach a draft something about a target of at least 96 tokens."""
    objective, corpus, _ = objective_for(target.requires_grad_(False), random_texts(8, vocab_size=96))
    seen = []
    settings = {"row_length": 64, "rows_per_step": 2, "lr": 1e-2, "unroll": 2, "log_every": 1}
    train(objective, corpus, folder, 3, **settings).fit(Hooks(report=seen.append))
    assert seen[-1].loss < seen[0].loss


class CharTokenizer:
    """A ChatML tokenizer whose tokens are characters: 0 is unused, 1 opens a turn, 2 ends it."""

    special_token_ids = frozenset({0, 1, EOS})
    eos_token_ids = (EOS,)
    has_chat_template = True

    def encode(self, text, add_special=True):
        ids, at = [], 0
        while at < len(text):
            special = {"<s>": 1, "<e>": EOS}.get(text[at : at + 3])
            ids.append(special if special is not None else 3 + (ord(text[at]) - 10) % 117)
            at += 3 if special is not None else 1
        return ids

    def decode(self, ids, skip_special=True):
        return "".join(chr(i - 3 + 10) for i in ids if i >= 3)

    def render_chat(self, messages, add_generation_prompt=True):
        if messages[0]["role"] != "system":
            messages = [{"role": "system", "content": "Be good."}, *messages]
        text = "".join(f"<s>{m['role'][0]}\n{m['content']}<e>\n" for m in messages)
        return text + ("<s>a\n" if add_generation_prompt else "")


TEMPLATE = (
    "{% for m in messages %}{% if loop.first and m['role'] != 'system' %}<s>system\nBe good.<e>\n{% endif %}"
    "<s>{{ m['role'] }}\n{{ m['content'] }}<e>\n{% endfor %}{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)


def write_target_folder(folder, unused_tokens=0):
    """Write a tiny target with a character tokenizer and a chat template, as a Hugging Face folder."""
    from tokenizers import AddedToken, Tokenizer, decoders, models

    characters = ["\n", *(chr(code) for code in range(32, 127))]
    vocab = {"<unk>": 0, "<s>": 1, "<e>": EOS, **{c: 3 + i for i, c in enumerate(characters)}}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in ("<unk>", "<s>", "<e>")])
    tokenizer.decoder = decoders.Fuse()
    target = tiny_target(vocab_size=len(vocab) + unused_tokens, scale=0.3)
    with CheckpointWriter(folder) as writer:
        for name, place in places(target).items():
            if name != "lm_head.weight":
                rows = getattr(place.module, place.parameter)[place.start : place.start + place.shape[0]]
                writer.add(f"model.{name}", rows)
        writer.write_json("config.json", model_config(target.spec))
        writer.write_text("tokenizer.json", tokenizer.to_str())
        writer.write_json("tokenizer_config.json", {"eos_token": "<e>", "chat_template": TEMPLATE})
    return folder


TRAIN_SETTINGS = {"rows_per_step": 1, "row_length": 8, "unroll": 2, "decay": 0.8, "lr": 1e-3}


def run_record(results):
    """Return the record of a run that never was."""
    return RunRecord(
        target="tiny",
        target_digest="0" * 64,
        recipe={"train": TRAIN_SETTINGS, "data": {"magpie": 0.6, "maths": 0.2}, "files": {"prompts": []}},
        corpus={"texts": 3, "answer_tokens": 40, "tokens": 60, "shards": []},
        coverage=0.99,
        history=[{"step": 5}],
        results=results,
        versions={},
        hardware="a test",
        seconds={"training": 60.0},
    )  # fmt: skip
