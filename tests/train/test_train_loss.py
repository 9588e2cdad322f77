"""What the loss teaches: whole distributions, best tokens, and slots that drafting reaches."""

import pytest
import torch
from tests.training import objective_for, random_texts

from slipstream.errors import ConfigError
from slipstream.kernels.training.loss import Labels, Teacher, product_f32, soft_cross_entropy
from slipstream.kernels.training.ops import TrainOps
from slipstream.train.draft.packing import Packer
from slipstream.train.run.recipe import TrainConfig
from slipstream.train.run.trainer import Hooks, Trainer
from slipstream.train.run.world import World

PLAIN = TrainOps(torch.device("cpu"))


def _teacher(rows, width):
    logits = torch.randn(rows, width)
    return Teacher(logits, logits.logsumexp(-1), logits.argmax(-1), torch.ones(rows))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_products_in_float32_round_neither_factors_nor_sums(dtype):
    torch.manual_seed(0)
    x, weight = torch.randn(48, 576).to(dtype), torch.randn(300, 576).to(dtype)
    torch.testing.assert_close(product_f32(x, weight), (x.double() @ weight.double().t()).float(), rtol=0, atol=2e-4)
    assert torch.backends.mkldnn.matmul.fp32_precision == "none", "others multiply as they did"


@pytest.mark.parametrize("hard_share", [0.0, 0.4, 1.0])
def test_the_written_out_gradient_is_that_of_the_mixed_label(hard_share):
    torch.manual_seed(0)
    teacher, weight = _teacher(5, 11), torch.rand(5)
    hidden = torch.randn(5, 3, requires_grad=True)
    head = torch.randn(11, 3, requires_grad=True)
    ours = soft_cross_entropy(hidden, head, teacher, Labels(torch.arange(5), weight, hard_share), PLAIN)
    got = torch.autograd.grad(ours.loss, (hidden, head))
    best = torch.nn.functional.one_hot(teacher.best_N, 11)
    label = (1 - hard_share) * teacher.logits_NV.softmax(-1) + hard_share * best
    plain = -((label * (hidden @ head.t()).log_softmax(-1)).sum(-1) * weight).sum()
    torch.testing.assert_close(ours.loss, plain)
    for a, b in zip(got, torch.autograd.grad(plain, (hidden, head)), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("hard_share", [0.0, 0.3])
def test_the_written_out_gradient_is_that_of_the_overlap(hard_share):
    torch.manual_seed(0)
    teacher, weight = _teacher(5, 11), torch.rand(5)
    hidden = torch.randn(5, 3, requires_grad=True)
    head = torch.randn(11, 3, requires_grad=True)
    ours = soft_cross_entropy(hidden, head, teacher, Labels(torch.arange(5), weight, hard_share, 3.0), PLAIN)
    got = torch.autograd.grad(ours.loss, (hidden, head))
    best = torch.nn.functional.one_hot(teacher.best_N, 11)
    label = (1 - hard_share) * teacher.logits_NV.softmax(-1) + hard_share * best
    log_q = (hidden @ head.t()).log_softmax(-1)
    overlap = torch.minimum(label, log_q.exp()).sum(-1)
    share = torch.exp(-3.0 * overlap.detach())
    plain = ((share * -(label * log_q).sum(-1) + (1 - share) * (1 - overlap)) * weight).sum()
    torch.testing.assert_close(ours.loss, plain)
    for a, b in zip(got, torch.autograd.grad(plain, (hidden, head)), strict=True):
        torch.testing.assert_close(a, b)


def test_muon_lowers_the_loss_and_goes_on_from_its_state(target, tmp_path):
    def run(folder, **settings):
        objective, corpus, _ = objective_for(target, random_texts(24))
        config = TrainConfig(
            steps=12, row_length=64, rows_per_step=4, unroll=2, log_every=3, optimizer="muon", **settings
        )
        trainer = Trainer(objective, Packer(corpus, 64, 4, 2, seed=0), config, World(), folder)
        return trainer.fit(Hooks()), objective.draft

    whole, draft = run(tmp_path / "whole")
    assert whole.history[-1]["loss"] < whole.history[0]["loss"]
    run(tmp_path / "parts", stop_at=6)
    _, again = run(tmp_path / "parts")
    for (name, a), b in zip(draft.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b), name


def test_settings_out_of_range_are_refused():
    with pytest.raises(ConfigError, match="hard_share is 2"):
        TrainConfig(steps=1, hard_share=2)
    with pytest.raises(ConfigError, match="optimizer is 'sgd'"):
        TrainConfig(steps=1, optimizer="sgd")
    with pytest.raises(ConfigError, match="overlap is -1"):
        TrainConfig(steps=1, overlap=-1)
    with pytest.raises(ConfigError, match="draft_dtype is 'float16'; it is bfloat16 or float32"):
        TrainConfig(steps=1, draft_dtype="float16")
