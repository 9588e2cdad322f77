"""The kernels training runs on: torch's fused ones, with weights kept in float32 and cast where they are used."""

import logging
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from slipstream.kernels.reference.ops import ReferenceOps
from slipstream.kernels.training import attention, loss
from slipstream.kernels.training.loss import Compared, Labels, Teacher
from slipstream.kernels.training.seen import Seen

USE_FUSED = True
"""Whether training on a GPU may use the fused kernels beside this; read when an objective is made."""
_log = logging.getLogger(__name__)


class TrainOps(ReferenceOps):
    """The reference operations in the activations' precision, differentiable, with fewer launches.

    Activations set the precision (see `slipstream.train.draft.target`). A float32 master weight is cast at each use,
    so its gradients add up in float32, whatever the number of unrolled steps.
    """

    name = "train"
    fuses_attention = False

    def linear(self, x_TD: Tensor, weight_ND: Tensor, bias_N: Tensor | None = None) -> Tensor:
        """Multiply by a dense weight stored [out, in], in the precision of `x_TD`."""
        bias = None if bias_N is None else bias_N.to(x_TD.dtype)
        return torch.nn.functional.linear(x_TD, weight_ND.to(x_TD.dtype), bias)

    def rms_norm(self, x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        """Scale each row to unit root mean square, then by `weight_D`, in one kernel."""
        return torch.nn.functional.rms_norm(x_TD, (x_TD.shape[-1],), weight_D.to(x_TD.dtype), eps)

    def packed_attention(self, q_BTHd: Tensor, k_BTGd: Tensor, v_BTGd: Tensor, seen: Seen, scale: float) -> Tensor:
        """Attend to what each slot of packed rows sees."""
        if q_BTHd.device.type == "cpu":
            return attention.packed_attention_by_text(q_BTHd, k_BTGd, v_BTGd, seen, scale)
        return attention.packed_attention(q_BTHd, k_BTGd, v_BTGd, seen.bias(q_BTHd.dtype), scale)

    def draft_attention(
        self,
        q_BSHd: Tensor,
        keys: Sequence[Tensor],
        values: Sequence[Tensor],
        seen: Seen,
        scale: float,
        slots_BS: Tensor | None = None,
    ) -> Tensor:
        """Attend to the first step's keys [B, T, G, d] that each slot sees, and to each later step's own [B, S, G, d].

        Queries are of all slots, or of `slots_BS`, ascending in each row.
        """
        if q_BSHd.device.type == "cpu":
            all_BS = torch.arange(q_BSHd.shape[1]).expand(len(q_BSHd), -1)
            slots_BS = all_BS if slots_BS is None else slots_BS
            return attention.draft_attention_by_text(q_BSHd, keys, values, seen, slots_BS, scale)
        dtype = q_BSHd.dtype
        bias_BST = seen.bias(dtype) if slots_BS is None else seen.bias_at(slots_BS, dtype)
        return attention.draft_attention(q_BSHd, keys, values, bias_BST, scale)

    def read_logits(self, full_NF: Tensor, token_ids_V: Tensor, out_NV: Tensor) -> tuple[Tensor, Tensor]:
        """Copy the draft's columns of whole logits; return each row's best column of all, and logsumexp of the copy."""
        return loss.read_logits(full_NF, token_ids_V, out_NV)

    def compare(self, logits_NV: Tensor, teacher: Teacher, labels: Labels, dtype: torch.dtype) -> Compared:
        """Compare rows of the draft's logits with what they are taught; `logits_NV` may be overwritten."""
        return loss.compare(logits_NV, teacher, labels, dtype)


def train_ops(device: torch.device) -> TrainOps:
    """Return the operations for training on a device: on a GPU the fused ones, as far as they work there."""
    if device.type != "cuda" or not USE_FUSED:
        return TrainOps(device)
    parts, refusals = _fused_parts(device)
    for part, why in refusals.items():
        _log.warning("Training goes without fused kernels for %s, and is slower: %s", part, why)
    if not parts:
        return TrainOps(device)
    from slipstream.kernels.training.fused import FusedOps  # Triton is absent on CPU machines

    return FusedOps(device, parts)


@cache
def _fused_parts(device: torch.device) -> tuple[frozenset[str], dict[str, str]]:
    """Return the parts whose fused kernels compile and agree with the plain ones here, and why the others do not."""
    try:
        from slipstream.kernels.training.fused import CHECKS  # Triton is absent on CPU machines
    except ImportError as error:
        return frozenset(), {"anything": str(error)}
    if device.index not in (None, torch.cuda.current_device()):
        return frozenset(), {"anything": f"{device} is not the current GPU."}
    refusals = {}
    for part, check in CHECKS.items():
        try:
            check(device)
        except Exception as error:  # noqa: BLE001  # whatever a compiler or driver says, there is another way to train
            refusals[part] = f"{type(error).__name__}: {error}"
    return frozenset(CHECKS) - frozenset(refusals), refusals
