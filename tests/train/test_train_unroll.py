import pytest
import torch

from slipstream.kernels.training.attention import DraftAttention
from slipstream.kernels.training.seen import Seen
from slipstream.train.draft.packing import Packer, UnrollContext, unroll
from training import draft_step_by_step, objective_for, random_texts


def test_the_written_out_gradient_of_draft_attention_is_the_true_one():
    torch.manual_seed(0)
    text = torch.tensor([[0, 0, 0, 1, 1], [0, 0, 0, 0, -1]])
    bias = Seen(text).bias(torch.float64)
    q = torch.randn(2, 4, 5, 3, dtype=torch.float64, requires_grad=True)
    keys_values = [torch.randn(2, 2, 5, 3, dtype=torch.float64, requires_grad=True) for _ in range(6)]
    assert torch.autograd.gradcheck(lambda *xs: DraftAttention.apply(xs[0], bias, *xs[1:]), (q, *keys_values))


@pytest.mark.parametrize(
    ("feedback", "feature_norm", "window"),
    [("pre_norm", "none", None), ("pre_norm", "per_layer", None), ("post_norm", "none", None),
     ("post_norm", "per_layer", None), ("post_norm", "per_layer", 16)],
)  # fmt: skip
def test_training_and_serving_give_the_same_draft_logits(target, feedback, feature_norm, window):
    texts = random_texts(3, seed=1)
    objective, corpus, _ = objective_for(target, texts, feedback=feedback, feature_norm=feature_norm)
    if window is not None:
        objective.draft.see_last(window)
    batch = Packer(corpus, 128, 1, 4, seed=0).batch(0)
    seen = Seen(batch.text_BT)
    with torch.no_grad():
        _, captured = objective.features(batch.ids_BT, batch.positions_BT, seen)
        ctx = UnrollContext(objective.ops, batch.positions_BT, seen)
        steps = [
            objective.draft.logits(hidden.normed_TD[0], objective.ops)
            for hidden in unroll(objective.draft, captured, batch.ids_BT, ctx, 4)
        ]
        second = int((batch.text_BT[0] == 1).nonzero()[0])
        length = int((batch.text_BT[0] == 1).sum())
        ids = batch.ids_BT[0, second : second + length]
        for slot in range(length - 5):
            served = draft_step_by_step(objective, ids, slot, 4)
            trained = torch.stack([step[second + slot] for step in steps])
            torch.testing.assert_close(trained, served, rtol=1e-4, atol=1e-4)
