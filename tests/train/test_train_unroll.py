import pytest
import torch

from slipstream.kernels.training import attention
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


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("narrow", [False, True])
def test_texts_attended_to_one_by_one_gather_what_whole_rows_do(window, narrow):
    torch.manual_seed(0)
    text = torch.tensor([[0] * 5 + [1] * 4 + [-1] * 3, [0] * 12])
    seen = Seen(text, window)
    slots = torch.tensor([[1, 2, 7, 7], [3, 4, 8, 11]]) if narrow else torch.arange(12).expand(2, -1)
    heads = [(slots.shape[1], 4), (12, 2), (slots.shape[1], 2), (12, 2), (slots.shape[1], 2)]
    q, key, own_key, value, own_value = leaves = [
        torch.randn(2, length, count, 3, dtype=torch.float64, requires_grad=True) for length, count in heads
    ]
    parts = q, [key, own_key], [value, own_value]
    both = (
        attention.draft_attention(*parts, seen.bias_at(slots, torch.float64), 0.3),
        attention.draft_attention_by_text(*parts, seen, slots, 0.3),
    )
    torch.testing.assert_close(*both)
    weights = torch.randn_like(both[0])
    for one, other in zip(*(torch.autograd.grad((out * weights).sum(), leaves) for out in both), strict=True):
        torch.testing.assert_close(one, other)
    if window is None and not narrow:
        whole = attention.packed_attention(q, key, value, seen.bias(torch.float64), 0.3)
        by_text = attention.packed_attention_by_text(q, key, value, seen, 0.3)
        torch.testing.assert_close(whole[text >= 0], by_text[text >= 0])


@pytest.mark.parametrize("window", [None, 16])
@pytest.mark.parametrize("num_layers", [1, 2])
def test_slots_unrolled_by_themselves_have_the_states_and_gradients_of_whole_rows(target, window, num_layers):
    objective, corpus, _ = objective_for(target, random_texts(9, seed=3), num_layers=num_layers, window=window)
    draft = objective.draft
    batch = Packer(corpus, 96, 2, 4, seed=0).batch(0)
    seen = Seen(batch.text_BT)
    _, captured = objective.features(batch.ids_BT, batch.positions_BT, seen)
    weights = torch.randn(4, *batch.slots_BS.shape, draft.spec.hidden_size)
    kept = torch.ones_like(batch.slots_BS, dtype=torch.bool)
    kept[:, 1:] = batch.slots_BS[:, 1:] != batch.slots_BS[:, :-1]  # a row with fewer slots repeats its last one
    states, gradients = [], []
    for slots_BS in (batch.slots_BS, None):
        draft.zero_grad()
        ctx = UnrollContext(objective.ops, batch.positions_BT, seen)
        steps = [hidden.normed_TD for hidden in unroll(draft, captured, batch.ids_BT, ctx, 4, slots_BS)]
        if slots_BS is None:
            at = batch.slots_BS[..., None].expand(-1, -1, steps[0].shape[-1])
            steps = [step.gather(1, at) for step in steps]
        found = torch.stack(steps)
        (found * weights * kept[None, ..., None]).sum().backward()
        states.append(found.detach())
        gradients.append({name: p.grad for name, p in draft.named_parameters() if p.grad is not None})
    assert batch.slots_BS.shape[1] < 96
    torch.testing.assert_close(*states)
    assert gradients[0].keys() == gradients[1].keys() and len(gradients[0]) > 5
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradient, gradients[1][name], rtol=1e-4, atol=1e-4, msg=name)


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
