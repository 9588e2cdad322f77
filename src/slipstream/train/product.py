"""Products whose sums are wanted in float32."""

import torch
from torch import Tensor


def product_f32(x_ND: Tensor, weight_VD: Tensor) -> Tensor:
    """Return x @ weight.T in float32; half-precision inputs keep the product's own float32 sums. Not differentiable."""
    if x_ND.is_cuda and x_ND.dtype in (torch.bfloat16, torch.float16):
        product: Tensor = torch.mm(x_ND, weight_VD.t(), out_dtype=torch.float32)
        return product
    return x_ND.float() @ weight_VD.float().t()
