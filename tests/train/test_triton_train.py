"""Training's fused kernels against the plain operations, on a GPU or in Triton's interpreter."""

import pytest
import torch

from interpreted import DEVICE
from slipstream.errors import KernelError
from slipstream.kernels.training import ops as ops_module
from slipstream.kernels.training.fused import CHECKS, FusedOps
from slipstream.kernels.training.loss import Labels, make_teacher, soft_cross_entropy
from slipstream.kernels.training.ops import TrainOps, train_ops
from slipstream.kernels.training.seen import Seen

PLAIN, FUSED = TrainOps(DEVICE), FusedOps(DEVICE)


def _away(a, b):
    a, b = a.detach().double(), b.detach().double()
    return float((a - b).norm() / a.norm().clamp(min=1e-12))


def _random(generator, *shape, dtype=torch.bfloat16):
    return torch.randn(shape, generator=generator).to(DEVICE, dtype)


@pytest.mark.parametrize("part", CHECKS)
def test_each_part_passes_the_check_that_decides_whether_it_is_used(part):
    CHECKS[part](DEVICE)


def test_a_fused_part_that_is_wrong_is_found_out(monkeypatch):
    monkeypatch.setattr(FusedOps, "silu_mul", lambda self, x: TrainOps.silu_mul(self, x) * 1.1)
    with pytest.raises(KernelError, match="away from the plain one"):
        CHECKS["pointwise"](DEVICE)


@pytest.mark.parametrize("length", [64, 150])
@pytest.mark.parametrize("steps", [1, 2, 4])
def test_attention_and_its_gradients_are_the_exact_ones(length, steps):
    generator = torch.Generator().manual_seed(length + steps)
    cuts = torch.randint(1, length, (2, 3), generator=generator)
    text = (torch.arange(length)[None, None] >= cuts[..., None]).sum(1).to(DEVICE)
    text[1, length - 7 :] = -1
    qkv = _random(generator, 2, length, 8, 32)  # queries, keys and values lie side by side, as a product leaves them
    later = [_random(generator, 2, length, 2, 32) for _ in range(2 * (steps - 1))]
    grad = _random(generator, 2, length, 4, 32)

    def run(ops, dtype):
        leaves = [x.to(dtype).requires_grad_() for x in (qkv, *later)]
        q, k, v = leaves[0].split([4, 2, 2], 2)
        own = leaves[1:]
        out = ops.draft_attention(q, [k, *own[: steps - 1]], [v, *own[steps - 1 :]], Seen(text), 0.2)
        return [out, *torch.autograd.grad(out, leaves, grad.to(dtype))]

    for exact, fused in zip(run(PLAIN, torch.float64), run(FUSED, torch.bfloat16), strict=True):
        assert fused.dtype == torch.bfloat16
        assert _away(exact, fused) < 0.01


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_slot_of_packed_rows_sees_its_own_text_only(dtype):
    generator = torch.Generator().manual_seed(0)
    text = torch.tensor([[0] * 70 + [1] * 5 + [2] * 95], device=DEVICE)
    q, k, v = (_random(generator, 1, 170, heads, 64, dtype=dtype) for heads in (6, 2, 2))
    together = FUSED.packed_attention(q, k, v, Seen(text), 0.125)
    for part in (slice(0, 70), slice(70, 75), slice(75, 170)):
        alone = [x[:, part].double() for x in (q, k, v)]
        exact = PLAIN.packed_attention(*alone, Seen(text[:, part]), 0.125)
        assert _away(exact, together[:, part]) < (0.005 if dtype == torch.bfloat16 else 0.001)


@pytest.mark.parametrize("hard_share", [0.0, 0.4])
def test_the_loss_and_its_gradients_are_those_of_the_plain_version(hard_share):
    generator = torch.Generator().manual_seed(1)
    full, width, vocab, rows = 9000, 32, 5000, 12  # both vocabularies take more than one look
    head_full = _random(generator, full, width, dtype=torch.float32)
    last = _random(generator, rows, width, dtype=torch.float32)
    token_ids = torch.randperm(full, generator=generator)[:vocab].sort().values.to(DEVICE)
    draft_index = torch.full((full,), -1, device=DEVICE)
    draft_index[token_ids] = torch.arange(vocab, device=DEVICE)
    hidden = last[1:11] + 0.3 * _random(generator, 10, width, dtype=torch.float32)
    labels = Labels(torch.arange(1, 11, device=DEVICE), torch.rand(10, generator=generator).to(DEVICE), hard_share)
    results = []
    for ops in (PLAIN, FUSED):
        teacher = make_teacher(last, head_full, token_ids, draft_index, ops)
        leaves = [hidden.clone().requires_grad_(), head_full[token_ids].clone().requires_grad_()]
        step = soft_cross_entropy(*leaves, teacher, labels, ops)
        results.append([teacher, step, torch.autograd.grad(step.loss, leaves)])
    (plain, plain_step, plain_grads), (fused, fused_step, fused_grads) = results
    assert torch.equal(plain.logits_NV, fused.logits_NV) and torch.equal(plain.best_N, fused.best_N)
    assert 0 < int(plain.inside_N.sum()) < rows and torch.equal(plain.inside_N, fused.inside_N)
    assert torch.equal(plain_step.agreed_N, fused_step.agreed_N) and bool(plain_step.agreed_N.any())
    torch.testing.assert_close(plain.log_total_N, fused.log_total_N)
    torch.testing.assert_close(plain_step.loss, fused_step.loss)
    for a, b in zip(plain_grads, fused_grads, strict=True):
        torch.testing.assert_close(a, b)


def test_what_lies_between_products_and_its_gradients_are_the_exact_ones():
    generator = torch.Generator().manual_seed(2)
    x, weight = _random(generator, 2, 37, 1, 96), _random(generator, 96)
    angles = torch.rand(2, 37, 8, generator=generator).to(DEVICE)
    grad = _random(generator, 2, 37, 3, 32)

    def run(ops, dtype):
        leaves = [t.to(dtype).requires_grad_() for t in (x, weight)]
        normed = ops.rms_norm(leaves[0][:, :, 0], leaves[1], 1e-5)
        heads = ops.rotate(normed.unflatten(-1, (3, 32)), angles.cos(), angles.sin())  # half of each head turns
        some = ops.rotate(heads[:, :, 1:], angles.cos(), angles.sin())
        out = ops.silu_mul(torch.cat([heads, some, heads[:, :, :1]], 2).flatten(-2)).unflatten(-1, (3, 32))
        return [out, *torch.autograd.grad(out, leaves, grad.to(dtype))]

    for exact, fused in zip(run(PLAIN, torch.float64), run(FUSED, torch.bfloat16), strict=True):
        assert _away(exact, fused) < 0.01


def test_a_norm_of_what_needs_no_gradient_still_teaches_its_weight():
    generator = torch.Generator().manual_seed(4)
    x, grad = _random(generator, 70, 96), _random(generator, 70, 96)
    weight = _random(generator, 96).requires_grad_()
    plain, fused = (torch.autograd.grad(ops.rms_norm(x, weight, 1e-5), weight, grad)[0] for ops in (PLAIN, FUSED))
    assert _away(plain, fused) < 0.01


def test_shapes_and_precisions_without_kernels_are_left_to_the_plain_operations():
    generator = torch.Generator().manual_seed(3)
    seen = Seen(torch.zeros(1, 9, dtype=torch.int64, device=DEVICE))
    for width, dtype in ((24, torch.bfloat16), (32, torch.float32)):
        q, k, v = (_random(generator, 1, 9, 2, width, dtype=dtype) for _ in range(3))
        assert torch.equal(FUSED.packed_attention(q, k, v, seen, 0.2), PLAIN.packed_attention(q, k, v, seen, 0.2))


def test_a_cpu_trains_with_the_plain_operations():
    assert type(train_ops(torch.device("cpu"))) is TrainOps


def test_what_does_not_work_on_a_gpu_is_left_out_and_said(monkeypatch, caplog):
    refused = (frozenset({"loss"}), {"attention": "OutOfResources: shared memory"})
    monkeypatch.setattr(ops_module, "_fused_parts", lambda device: refused)
    chosen = train_ops(torch.device("cuda"))
    assert isinstance(chosen, FusedOps)
    assert "without fused kernels for attention, and is slower: OutOfResources" in caplog.text
    monkeypatch.setattr(ops_module, "USE_FUSED", False)
    assert type(train_ops(torch.device("cuda"))) is TrainOps
