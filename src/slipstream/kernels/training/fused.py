"""Training's operations with their elementwise work fused into Triton kernels; imported only where a GPU was chosen."""

from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch import Tensor

from slipstream.errors import KernelError
from slipstream.kernels.training import triton_attention, triton_loss, triton_pointwise
from slipstream.kernels.training.loss import Compared, Labels, Teacher
from slipstream.kernels.training.ops import TrainOps
from slipstream.kernels.training.seen import Seen

_HALVES = (torch.bfloat16, torch.float16)
_AGREES = 0.02
"""How far, of the plain version's norm, a fused one in bfloat16 may be from it; wrong ones are about 1 away."""


class FusedOps(TrainOps):
    """`TrainOps` with some of its parts fused: "loss", "attention" and "pointwise"; the rest stays plain."""

    name = "train, fused"

    def __init__(self, device: torch.device, parts: Collection[str] = ("loss", "attention", "pointwise")) -> None:
        super().__init__(device)
        self._parts = frozenset(parts)
        self.fuses_attention = "attention" in self._parts

    def rms_norm(self, x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        """Scale each row to unit root mean square, then by `weight_D`, in one kernel."""
        if "pointwise" not in self._parts or x_TD.dtype not in _HALVES:
            return super().rms_norm(x_TD, weight_D, eps)
        return triton_pointwise.rms_norm(x_TD, weight_D.to(x_TD.dtype), eps)

    def silu_mul(self, gate_up_TN: Tensor) -> Tensor:
        """Return silu(first half) * second half of each row."""
        if "pointwise" not in self._parts or gate_up_TN.dtype not in _HALVES:
            return super().silu_mul(gate_up_TN)
        return triton_pointwise.silu_mul(gate_up_TN)

    def rotate(self, x_THd: Tensor, cos_Tr: Tensor, sin_Tr: Tensor) -> Tensor:
        """Rotate pairs (i, i + r) of each head's first 2r values; the rest passes."""
        of_every_slot = cos_Tr.shape[:-1] == x_THd.shape[:-2]
        if "pointwise" not in self._parts or x_THd.dtype not in _HALVES or not of_every_slot:
            return super().rotate(x_THd, cos_Tr, sin_Tr)
        return triton_pointwise.rotate(x_THd, cos_Tr, sin_Tr)

    def packed_attention(self, q_BTHd: Tensor, k_BTGd: Tensor, v_BTGd: Tensor, seen: Seen, scale: float) -> Tensor:
        """Attend to what each slot of packed rows sees."""
        if "attention" not in self._parts or not triton_attention.fits(q_BTHd, k_BTGd, v_BTGd):
            return super().packed_attention(q_BTHd, k_BTGd, v_BTGd, seen, scale)
        return triton_attention.attention(q_BTHd, [k_BTGd], [v_BTGd], seen, scale)

    def draft_attention(
        self,
        q_BSHd: Tensor,
        keys: Sequence[Tensor],
        values: Sequence[Tensor],
        seen: Seen,
        scale: float,
        slots_BS: Tensor | None = None,
    ) -> Tensor:
        """Attend to the first step's keys [B, T, G, d] that each slot sees, and to each later step's own."""
        whole = slots_BS is None and "attention" in self._parts
        if not whole or not triton_attention.fits(q_BSHd, *keys, *values):
            return super().draft_attention(q_BSHd, keys, values, seen, scale, slots_BS)
        return triton_attention.attention(q_BSHd, keys, values, seen, scale)

    def read_logits(self, full_NF: Tensor, token_ids_V: Tensor, out_NV: Tensor) -> tuple[Tensor, Tensor]:
        """Copy the draft's columns of whole logits; return each row's best column of all, and logsumexp of the copy."""
        if "loss" not in self._parts:
            return super().read_logits(full_NF, token_ids_V, out_NV)
        return triton_loss.read_logits(full_NF, token_ids_V, out_NV)

    def compare(self, logits_NV: Tensor, teacher: Teacher, labels: Labels, dtype: torch.dtype) -> Compared:
        """Compare rows of the draft's logits with what they are taught; `logits_NV` may be overwritten."""
        if "loss" not in self._parts or labels.overlap is not None:
            return super().compare(logits_NV, teacher, labels, dtype)
        return triton_loss.compare(logits_NV, teacher, labels, dtype)


def _check_loss(device: torch.device) -> None:
    generator = torch.Generator().manual_seed(0)
    full, logits = (torch.randn(8, width, generator=generator).to(device) * 3 for width in (304, 96))
    token_ids = torch.randperm(304, generator=generator)[:96].to(device)
    labels = Labels(torch.arange(8, device=device).flip(0), torch.rand(8, generator=generator).to(device), 0.3)
    results = []
    for ops in (TrainOps(device), FusedOps(device)):
        taught = torch.empty(8, 96, device=device)
        best, log_total = ops.read_logits(full, token_ids, taught)
        teacher = Teacher(taught, log_total, taught.argmax(-1), (best % 5 > 0).float())
        compared = ops.compare(logits.clone(), teacher, labels, torch.bfloat16)
        results.append([taught, best, log_total, compared.loss_N, compared.agreed_N, compared.grad_NV])
    _agree(*results)


def _check_attention(device: torch.device) -> None:
    generator = torch.Generator().manual_seed(0)
    seen = Seen(torch.tensor([[0] * 20 + [1] * 59 + [-1]], device=device))
    heads = [9, *[3] * 6]
    given = [torch.randn(1, 80, count, 64, generator=generator).to(device, torch.bfloat16) for count in heads]
    results = []
    for ops in (TrainOps(device), FusedOps(device)):
        q, *rest = leaves = [x.detach().clone().requires_grad_() for x in given]
        out = ops.draft_attention(q, rest[:3], rest[3:], seen, 0.125)
        grads = torch.autograd.grad(out, leaves, out.detach().roll(1, 1))
        packed = ops.packed_attention(given[0], given[1], given[4], seen, 0.125)
        results.append([out, packed[:, :79], *grads])  # what padding gathers is nobody's
    _agree(*results)


def _check_pointwise(device: torch.device) -> None:
    generator = torch.Generator().manual_seed(0)
    given = [torch.randn(*size, generator=generator) for size in ((2, 9, 12, 64), (64,))]
    angles = torch.rand(2, 9, 32, generator=generator).to(device)
    results = []
    for ops in (TrainOps(device), FusedOps(device)):
        x, weight = leaves = [x.to(device, torch.bfloat16).requires_grad_() for x in given]
        normed = ops.rms_norm(x[:, :, :8], weight, 1e-5)
        rotated = ops.rotate(normed[:, :, 2:], angles.cos(), angles.sin())
        out = ops.silu_mul(rotated.flatten(-2))
        results.append([out, *torch.autograd.grad(out, leaves, out.detach().roll(1, 1))])
    _agree(*results)


def _agree(plain: Sequence[Tensor], fused: Sequence[Tensor]) -> None:
    for index, (one, other) in enumerate(zip(plain, fused, strict=True)):
        a, b = one.detach().double(), other.detach().double()
        away = float((a - b).norm() / a.norm().clamp(min=1e-9))
        if not away < _AGREES:
            raise KernelError(f"result {index} of the check is {away:.2g} of its norm away from the plain one.")


CHECKS: Mapping[str, Callable[[torch.device], None]] = {
    "loss": _check_loss,
    "attention": _check_attention,
    "pointwise": _check_pointwise,
}
"""For each part a trial on a device, which raises where the fused kernels fail or differ from the plain ones."""
