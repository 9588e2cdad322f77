"""Codes of keys and values in FP8, as `slipstream.kernels.reference.kv_fp8` defines them."""
# Triton gives kernel arguments their types when it compiles, so Python has none to check.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# ruff: noqa: ANN001, ANN201

import triton
import triton.language as tl


@triton.jit
def scale_codes(most):
    """Return the scales of heads by their largest magnitudes, float32: the least with which no code is above 448."""
    bits = most.to(tl.int32, bitcast=True)
    codes = (bits >> 23) - 8 + ((bits & 0x7FFFFF) > 0x600000).to(tl.int32)
    return tl.minimum(tl.maximum(codes, 1), 246)


@triton.jit
def encode(x, codes, CODES: tl.constexpr):
    """Return numbers over their scale, in the type codes have."""
    inverse = ((254 - codes) << 23).to(tl.float32, bitcast=True)
    return tl.minimum(tl.maximum(x.to(tl.float32) * inverse, -448.0), 448.0).to(CODES)
