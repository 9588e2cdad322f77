"""The kernels training runs on: torch's fused ones, with weights kept in float32 and cast where they are used."""

import torch
from torch import Tensor

from slipstream.kernels.reference.ops import ReferenceOps


class TrainOps(ReferenceOps):
    """The reference operations in the activations' precision, differentiable, with fewer launches.

    Activations set the precision (see `slipstream.train.precision`). A float32 master weight is cast at each use,
    so its gradients add up in float32, whatever the number of unrolled steps.
    """

    name = "train"

    def linear(self, x_TD: Tensor, weight_ND: Tensor, bias_N: Tensor | None = None) -> Tensor:
        """Multiply by a dense weight stored [out, in], in the precision of `x_TD`."""
        bias = None if bias_N is None else bias_N.to(x_TD.dtype)
        return torch.nn.functional.linear(x_TD, weight_ND.to(x_TD.dtype), bias)

    def rms_norm(self, x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        """Scale each row to unit root mean square, then by `weight_D`, in one kernel."""
        return torch.nn.functional.rms_norm(x_TD, (x_TD.shape[-1],), weight_D.to(x_TD.dtype), eps)


def product_f32(x_ND: Tensor, weight_VD: Tensor) -> Tensor:
    """Return x @ weight.T in float32; half-precision inputs keep the product's own float32 sums. Not differentiable."""
    if x_ND.is_cuda and x_ND.dtype in (torch.bfloat16, torch.float16):
        product: Tensor = torch.mm(x_ND, weight_VD.t(), out_dtype=torch.float32)
        return product
    return x_ND.float() @ weight_VD.float().t()
