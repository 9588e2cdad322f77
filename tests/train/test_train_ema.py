"""The running average of a draft's weights: what it is, that it is what is measured and left, and that it resumes."""

import pytest
import torch

from slipstream.errors import ConfigError
from slipstream.train.run.recipe import TrainConfig
from slipstream.train.run.trainer import Hooks
from training import objective_for, random_texts, train

TEXTS = random_texts(60, seed=2)


def weights(objective):
    return {n: p.detach().clone() for n, p in objective.draft.named_parameters() if not n.startswith("embed_tokens")}


def test_the_draft_is_left_with_the_average_of_the_weights_after_each_step(target, tmp_path):
    objective, corpus, _ = objective_for(target, TEXTS)
    expected = weights(objective)
    plain = []
    trainer = train(objective, corpus, tmp_path / "plain", 6, log_every=1)
    trainer.fit(Hooks(report=lambda progress: plain.append(weights(objective))))
    for step, after in enumerate(plain):
        keep = min(0.4, (1 + step) / (10 + step))
        expected = {name: keep * mean + (1 - keep) * after[name] for name, mean in expected.items()}
    averaged, corpus, _ = objective_for(target, TEXTS)
    train(averaged, corpus, tmp_path / "ema", 6, log_every=1, ema=0.4).fit(Hooks())
    for name, weight in weights(averaged).items():
        torch.testing.assert_close(weight, expected[name], rtol=1e-5, atol=1e-6)
    assert not torch.equal(averaged.draft.fc.weight, objective.draft.fc.weight)


def test_what_is_measured_is_the_average_and_training_goes_on_from_the_weights(target, tmp_path):
    plain, corpus, _ = objective_for(target, TEXTS)
    losses, averaged_losses, measured = [], [], []
    train(plain, corpus, tmp_path / "a", 6, log_every=1).fit(Hooks(report=lambda p: losses.append(p.loss)))
    averaged, corpus, _ = objective_for(target, TEXTS)

    def evaluate():
        measured.append(weights(averaged))
        return {}

    trainer = train(averaged, corpus, tmp_path / "b", 6, log_every=1, eval_every=2, ema=0.9)
    trainer.fit(Hooks(report=lambda p: averaged_losses.append(p.loss), evaluate=evaluate))
    assert averaged_losses == losses
    assert all(torch.equal(measured[-1][name], weight) for name, weight in weights(averaged).items())


def test_a_run_with_an_average_resumes_to_the_same_weights_and_a_finished_one_gives_them_again(target, tmp_path):
    straight, corpus, _ = objective_for(target, TEXTS)
    train(straight, corpus, tmp_path / "a", 8, log_every=2, ema=0.9).fit(Hooks())
    halves, corpus, _ = objective_for(target, TEXTS)
    assert train(halves, corpus, tmp_path / "b", 8, log_every=2, ema=0.9).fit(Hooks(), stop_after_s=-1.0).step == 2
    for _ in range(2):
        again, corpus, _ = objective_for(target, TEXTS, seed=99)
        assert train(again, corpus, tmp_path / "b", 8, log_every=2, ema=0.9).fit(Hooks()).finished
        for name, weight in weights(straight).items():
            assert torch.equal(weights(again)[name], weight), name


def test_a_run_does_not_change_its_average_halfway_and_an_impossible_one_is_refused(target, tmp_path):
    objective, corpus, _ = objective_for(target, TEXTS)
    train(objective, corpus, tmp_path, 2).fit(Hooks())
    with pytest.raises(ConfigError, match=r"other settings \(ema\)"):
        train(objective, corpus, tmp_path, 4, ema=0.9).fit(Hooks())
    with pytest.raises(ConfigError, match="between 0 and 1"):
        TrainConfig(steps=1, ema=1.0)
