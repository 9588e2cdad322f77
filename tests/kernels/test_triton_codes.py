"""FP8 codes that products make themselves are those of the division they stand in for."""

import torch
import triton
import triton.language as tl

from interpreted import DEVICE
from slipstream.kernels.triton.gemm.prologue import encode_with
from slipstream.kernels.triton.gemm.quantize import encode, row_scale


@triton.jit
def both_kernel(x_ptr, amax_ptr, divided_ptr, multiplied_ptr, WIDTH: tl.constexpr):
    row, column = tl.program_id(0), tl.arange(0, WIDTH)
    scale = row_scale(tl.load(amax_ptr + row), "fp8")
    x = tl.load(x_ptr + row * WIDTH + column)
    divided = encode(x.to(tl.float32), tl.broadcast_to(scale, [WIDTH]), "fp8")
    tl.store(divided_ptr + row * WIDTH + column, divided)
    tl.store(multiplied_ptr + row * WIDTH + column, encode_with(x, scale, tl.div_rn(1.0, scale)))


def test_every_number_a_row_can_hold_has_the_code_of_its_quotient(generator):
    numbers = torch.arange(1, 0x7F80, dtype=torch.int16).view(torch.bfloat16)  # every positive one, in order
    few = 2.0 ** torch.arange(-20, 12, 4) * torch.tensor([7, 21, 35, 49, 63, 105, 119])[:, None]  # scales of few bits
    largest = torch.cat([few.flatten(), torch.randn(60, generator=generator).abs() * 30, torch.tensor([1e-30, 3e38])])
    largest = largest.bfloat16()
    at = torch.searchsorted(numbers, largest) + 1
    rows = torch.stack([numbers[max(end - 4096, 0) :][:4096] for end in at.tolist()])  # 32 octaves below the largest
    rows[:, ::2] *= -1
    divided, multiplied = torch.zeros(2, *rows.shape).to(torch.float8_e4m3fn).to(DEVICE)
    both_kernel[(len(rows),)](rows.to(DEVICE), largest.float().to(DEVICE), divided, multiplied, WIDTH=4096)
    assert len(torch.unique(divided[0].view(torch.uint8))) > 200
    assert torch.equal(divided.view(torch.uint8), multiplied.view(torch.uint8))
