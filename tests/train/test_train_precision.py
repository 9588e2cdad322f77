"""The target's precision in training: what is float16, what never is, and what a run says of it."""

import pytest
import torch

from slipstream.checkpoint.reader import open_checkpoint
from slipstream.errors import ConfigError
from slipstream.kernels.training.seen import Seen
from slipstream.train.draft.objective import Objective
from slipstream.train.draft.packing import Packer, UnrollContext
from slipstream.train.draft.target import check_range, load_and_digest
from slipstream.train.draft.walk import measure
from slipstream.train.run.recipe import TrainConfig, change_recipe, make_recipe
from slipstream.train.run.trainer import Hooks
from training import RECIPE, greedy_texts, objective_for, random_texts, tiny_target, train, write_target_folder


@pytest.fixture
def half():
    return in_float16(tiny_target())


def in_float16(target):
    for parameter in target.parameters():
        parameter.data = parameter.data.half()
    return target


def test_a_draft_is_unrolled_and_learns_in_float32_beside_a_target_in_float16(target, half):
    losses, gradients = [], []
    for each in (target, half):
        objective, corpus, _ = objective_for(each, random_texts(60, seed=2), draft_vocab=96)
        batch = Packer(corpus, 128, 4, 3, 0).batch(0)
        loss = objective(batch).loss
        loss.backward()
        losses.append(loss.item())
        gradients.append({n: p.grad for n, p in objective.draft.named_parameters() if p.requires_grad})
    assert losses[1] != losses[0] and losses[1] == pytest.approx(losses[0], rel=1e-3)
    for name, gradient in gradients[1].items():
        assert gradient.dtype == torch.float32
        assert float((gradient - gradients[0][name]).norm() / gradients[0][name].norm()) < 0.01, name
    seen = Seen(batch.text_BT)
    last, captured = objective.features(batch.ids_BT, batch.positions_BT, seen)
    assert {states.dtype for states in (last, *captured)} == {torch.float16}
    ctx = UnrollContext(objective.ops, batch.positions_BT, seen)
    for hidden in objective.unroll(captured, batch.ids_BT, ctx, 2, batch.slots_BS):
        assert hidden.normed_TD.dtype == hidden.feedback_TD.dtype == torch.float32


def test_a_draft_learns_the_same_in_bfloat16_on_a_cpu(target):
    objective, corpus, vocab = objective_for(target, random_texts(60, seed=2), draft_vocab=96)
    batch, gradients = Packer(corpus, 128, 4, 3, 0).batch(0), []
    for dtype in (None, torch.bfloat16):
        each = Objective(target, objective.draft, vocab, dtype=dtype)
        objective.draft.zero_grad()
        each(batch).loss.backward()
        gradients.append({n: p.grad.clone() for n, p in each.draft.named_parameters() if p.requires_grad})
    for name, gradient in gradients[1].items():
        assert gradient.dtype == torch.float32
        difference = float((gradient - gradients[0][name]).norm() / gradients[0][name].norm())
        assert 0 < difference < 0.05, name


def test_a_draft_overfits_texts_of_a_target_in_float16(half, tmp_path):
    half.norm.weight.fill_(15.0)
    objective, corpus, _ = objective_for(half, greedy_texts(half, 32, max_new=16), draft_vocab=96)
    seen = []
    train(objective, corpus, tmp_path, 120, lr=1e-2, unroll=2, log_every=20).fit(Hooks(report=seen.append))
    assert seen[-1].accuracy[0] > 0.9
    assert measure(objective, corpus).walks[3].acceptance_length > 2.2


@pytest.mark.parametrize("settings", [{}, {"optimizer": "muon", "ema": 0.9}])
def test_a_run_with_a_target_in_float16_resumes_to_the_same_weights(half, tmp_path, settings):
    texts, settings = random_texts(60, seed=2), {"log_every": 2, "target_dtype": "float16", **settings}
    straight, corpus, _ = objective_for(half, texts)
    train(straight, corpus, tmp_path / "a", 8, **settings).fit(Hooks())
    halves, corpus, _ = objective_for(half, texts)
    assert train(halves, corpus, tmp_path / "b", 8, **settings).fit(Hooks(), stop_after_s=-1.0).step == 2
    again, corpus, _ = objective_for(half, texts, seed=99)
    assert train(again, corpus, tmp_path / "b", 8, **settings).fit(Hooks()).finished
    for (name, a), b in zip(straight.draft.named_parameters(), again.draft.parameters(), strict=True):
        assert torch.equal(a, b), name
    with pytest.raises(ConfigError, match=r"other settings \(target_dtype\)"):
        train(again, corpus, tmp_path / "b", 9, **{**settings, "target_dtype": None}).fit(Hooks())


def test_a_targets_digest_is_the_same_in_every_precision(tmp_path):
    source = open_checkpoint(write_target_folder(tmp_path / "target"))
    loaded = {
        dtype: load_and_digest(source, dtype, torch.device("cpu"), 64)
        for dtype in (torch.bfloat16, torch.float16, torch.float32)
    }
    assert {model.embed_tokens.dtype for model, _ in loaded.values()} == set(loaded)
    assert len({digest for _, digest in loaded.values()}) == 1


def test_a_target_that_float16_cannot_hold_is_refused_with_the_remedy():
    check_range(in_float16(tiny_target()), [5, 6, 7])
    heavy, loud = tiny_target(), tiny_target()
    heavy.layers[1].mlp.down_proj.weight[0, 0] = 1e5
    loud.layers[1].mlp.down_proj.weight.fill_(6e4)
    with pytest.raises(ConfigError, match=r"layers\.1\.mlp\.down_proj\.weight .* 65504; set train\.target_dtype to bf"):
        check_range(in_float16(heavy), [5, 6, 7])
    with pytest.raises(ConfigError, match=r"first prompt .* 65504; set train\.target_dtype to bfloat16 or float32"):
        check_range(in_float16(loud), [5, 6, 7])


def test_a_recipe_names_the_precision_or_leaves_it_to_the_device():
    recipe = make_recipe(RECIPE, "test")
    assert recipe.train.target_dtype is None
    assert change_recipe(recipe, ["train.target_dtype=float16"]).train.target_dtype == "float16"
    with pytest.raises(ConfigError, match="target_dtype is 'float8'; it is bfloat16, float16, float32"):
        change_recipe(recipe, ["train.target_dtype=float8"])
    with pytest.raises(ConfigError, match="target_dtype"):
        change_recipe(recipe, ["train.target_dtype=16"])
    assert TrainConfig(steps=1).target_dtype is None
