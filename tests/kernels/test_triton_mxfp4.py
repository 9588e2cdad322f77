"""Rows rounded to MXFP4 by the kernels: the codes, scales and numbers of the format's own module, bit for bit."""

from interpreted import DEVICE  # first: it decides whether kernels are interpreted

import pytest  # isort: skip
import torch
import triton
import triton.language as tl

from slipstream.kernels.triton.gemm.quantize import mxfp4_codes, quantize_rows, round_rows
from slipstream.quant.formats import fp8, mxfp4
from slipstream.quant.formats.nibbles import unpack_unsigned


@triton.jit
def _codes_kernel(x_ptr, codes_ptr, stored_ptr, GROUPS: tl.constexpr):
    group = tl.arange(0, GROUPS)
    at = group[:, None] * 32 + tl.arange(0, 32)[None, :]
    codes, stored = mxfp4_codes(tl.load(x_ptr + at))
    tl.store(codes_ptr + at, codes)
    tl.store(stored_ptr + group, stored)


def codes_and_scales(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    codes = torch.empty(x.shape, dtype=torch.int32, device=DEVICE)
    stored = torch.empty(len(x), dtype=torch.int32, device=DEVICE)
    _codes_kernel[(1,)](x.to(DEVICE), codes, stored, GROUPS=len(x))
    return codes.cpu(), stored.cpu()


def seams() -> torch.Tensor:
    """Groups in which every code, every tie between two, and the numbers next to each tie appear, in both signs."""
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    codes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    beside = torch.cat([torch.nextafter(ties, ties * 2), torch.nextafter(ties, ties * 0)])
    values = torch.cat([codes, ties, beside])
    values = torch.cat([values, -values, torch.zeros(-len(values) * 2 % 31)])
    return torch.cat([torch.full((len(values) // 31, 1), 4.0), values.view(-1, 31)], dim=1)


def samples(name: str) -> torch.Tensor:
    torch.manual_seed(0)
    if name == "random":
        return torch.randn(64, 32) * torch.exp2(torch.randint(-30, 30, (64, 1)))
    if name == "ties":
        return torch.cat([seams() * 2.0**exponent for exponent in (-90, -3, 0, 5)])
    if name == "largest":  # magnitudes around 1.75 times a power of two, where the scale changes
        top = torch.tensor([1.75, 7.0])
        tops = torch.cat([top, torch.nextafter(top, top * 0), torch.nextafter(top, top * 2), top * -1])
        return torch.cat([tops[:, None], torch.randn(8, 31)], dim=1)
    assert name == "extreme"
    extremes = torch.tensor([0.0, 2.0**-149, 2.0**-127, 2.0**-126, 2.0**-120, 3.4e38, 2.0**-99, 2.0**-98])
    return extremes[:, None] * torch.linspace(-1, 1, 32)


@pytest.mark.parametrize("name", ["random", "ties", "largest", "extreme"])
def test_codes_and_scales_are_the_formats_own(name):
    x = samples(name)
    codes, stored = codes_and_scales(x)
    expected, scale = mxfp4.encode(x, "quark")
    assert torch.equal(codes.to(torch.uint8), unpack_unsigned(expected))
    assert torch.equal(stored.to(torch.uint8), scale.flatten())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_are_rounded_to_the_numbers_a_reader_sees(dtype):
    torch.manual_seed(0)
    x = (torch.randn(3, 1056) * torch.exp2(torch.randint(-20, 20, (3, 1056)))).to(dtype)
    x[1, 32:96] = 0
    wide = torch.cat([x, x], dim=1)[:, :1056]  # rows that do not follow each other in memory
    assert torch.equal(round_rows(wide.to(DEVICE), False).cpu().float(), mxfp4.requantize_rows(x))


def test_fp8_codes_in_a_wider_type_are_the_same_numbers():
    torch.manual_seed(0)
    x = torch.randn(4, 300).bfloat16()
    codes, scale = quantize_rows(x.to(DEVICE), "fp8", None, False, torch.bfloat16)
    expected, expected_scale = fp8.quantize_rows(x)
    assert torch.equal(codes.cpu().float(), expected.float()) and torch.equal(scale.cpu(), expected_scale)
