import logging

import pytest
import torch
from triton_samples import FORMATS, REFERENCE, numbers, quantized, triton_ops

from interpreted import DEVICE
from slipstream.errors import KernelError
from slipstream.kernels.reference.ops import ReferenceOps
from slipstream.kernels.triton.gemm.dispatch import Products
from slipstream.kernels.triton.gemm.split_k import Epilogue
from slipstream.kernels.triton.tuning import LinearConfig
from slipstream.quant.packed import PackedWeight

OPS = triton_ops()
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("rows", "outputs", "inputs"), [(1, 96, 256), (5, 72, 80), (20, 7, 320), (70, 130, 64)])
def test_a_dense_product_is_torchs(dtype, rows, outputs, inputs, generator):
    x = numbers(rows, inputs, generator=generator, dtype=dtype)
    weight = numbers(outputs, inputs, generator=generator, dtype=dtype)
    bias = numbers(outputs, generator=generator, dtype=dtype)
    expected = torch.nn.functional.linear(x.double(), weight.double(), bias.double())
    got = OPS.linear(x, weight, bias)
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype] * inputs**0.5)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_quantized_product_is_the_references(format, dtype, generator):
    weight = quantized(format, 72, 192, generator)
    x = numbers(5, 192, generator=generator, dtype=dtype)
    got = OPS.packed_linear(x, OPS.prepare(weight))
    expected = REFERENCE.packed_linear(x, weight)
    # A GPU keeps some 14 bits of an FP8 sum inside a tile, and divides rows by its own inverse of the scale.
    tolerance = max(TOLERANCE[dtype], 4e-3) if DEVICE.type == "cuda" else TOLERANCE[dtype]
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance * 14)


@pytest.mark.parametrize("format", ["w8a8_int8", "w4a8"])
def test_integer_products_are_exact(format, generator):
    weight = quantized(format, 40, 256, generator)
    x = numbers(3, 256, generator=generator)
    expected = ReferenceOps(torch.device("cpu")).packed_linear(x.cpu(), weight.to(torch.device("cpu")))
    assert torch.equal(OPS.packed_linear(x, OPS.prepare(weight)).cpu(), expected)


@pytest.mark.parametrize("format", ["dense", *FORMATS])
def test_a_row_keeps_its_bits_however_many_rows_share_the_product(format, generator):
    x = numbers(200, 256, generator=generator, dtype=torch.bfloat16)
    if format == "dense":
        weight = numbers(96, 256, generator=generator, dtype=torch.bfloat16)
        product = lambda rows: OPS.linear(rows, weight)  # noqa: E731
    else:
        prepared = OPS.prepare(quantized(format, 96, 256, generator))
        product = lambda rows: OPS.packed_linear(rows, prepared)  # noqa: E731
    alone = product(x[:1])
    for count in (4, 17, 40, 70, 200):
        assert torch.equal(product(x[:count])[:1], alone), count


@pytest.mark.parametrize("splits", [1, 2, 8])
def test_wide_tiles_sum_in_the_order_of_narrow_ones(splits, generator):
    config = {"block_n": 64, "block_k": 32, "split_k": splits, "num_warps": 4, "num_stages": 2}
    wide = {"dense": LinearConfig(128, 64, 1, 8, 2)}
    many = {"dense:520:512": LinearConfig(128, 16, 1, 4, 2)}
    ops = triton_ops(linear={"dense:520:512": LinearConfig(**config)}, wide=wide, linear_many=many)
    x = numbers(300, 512, generator=generator, dtype=torch.bfloat16)
    weight = numbers(520, 512, generator=generator, dtype=torch.bfloat16)
    narrow = ops.linear(x[:16], weight)
    for count in (40, 100, 160, 300):  # those of a few dozen, then of 128 tokens, of 256, and one program for all
        assert torch.equal(ops.linear(x[:count], weight)[:16], narrow), count


@pytest.mark.parametrize("format", ["dense", "fp8_per_channel", "w4a8"])
def test_an_epilogue_gives_silu_times_up_and_adds_the_residual(format, generator):
    products = Products(OPS._tuning, DEVICE)
    x = numbers(6, 256, generator=generator, dtype=torch.bfloat16)
    if format == "dense":
        weight = numbers(72, 256, generator=generator, dtype=torch.bfloat16) / 16
        plain = torch.nn.functional.linear(x, weight)
    else:
        stored = quantized(format, 72, 256, generator)
        weight, plain = products.prepare(stored), REFERENCE.packed_linear(x, stored)
    rows = products.rows_for(weight, x)
    residual = numbers(6, 72, generator=generator, dtype=torch.bfloat16)
    silu = products.multiply(rows, weight, Epilogue(silu=True))
    torch.testing.assert_close(silu, REFERENCE.silu_mul(plain), rtol=3e-2, atol=3e-2)
    added = products.multiply(rows, weight, Epilogue(residual_TN=residual))
    torch.testing.assert_close(added, plain + residual, rtol=1.6e-2, atol=1.6e-2)


def test_a_static_input_scale_is_used_for_all_rows(generator):
    weight = quantized("fp8_per_channel", 32, 64, generator)
    scales = {**weight.scales, "input_scale": torch.tensor(0.01, device=DEVICE)}
    weight = PackedWeight("fp8_per_tensor", 32, 64, weight.codes, scales)
    x = numbers(3, 64, generator=generator)
    got = OPS.packed_linear(x, OPS.prepare(weight))
    # A GPU keeps some 14 bits of an FP8 sum; each row's own scale would move the numbers by some 0.2.
    rtol, atol = (4e-3, 4e-3 * 8) if DEVICE.type == "cuda" else (1e-6, 1e-5)
    torch.testing.assert_close(got, REFERENCE.packed_linear(x, weight), rtol=rtol, atol=atol)


def test_a_format_without_a_kernel_is_multiplied_by_torch_and_said_once(generator, caplog):
    codes = torch.randint(0, 255, (8, 34), dtype=torch.uint8, generator=generator)
    codes[:, :2] = torch.tensor([0, 60], dtype=torch.uint8)  # float16 scales of 1
    weight = OPS.prepare(PackedWeight("q8_0", 8, 32, codes.to(DEVICE)))
    x = numbers(2, 32, generator=generator)
    with caplog.at_level(logging.WARNING):
        first, _ = OPS.packed_linear(x, weight), OPS.packed_linear(x, weight)
    assert torch.equal(first, REFERENCE.packed_linear(x, weight))
    assert sum("q8_0" in record.message for record in caplog.records) == 1


def test_rows_of_another_width_and_gradients_are_refused(generator):
    weight = numbers(8, 32, generator=generator)
    with pytest.raises(KernelError, match="32 columns"):
        OPS.linear(numbers(2, 16, generator=generator), weight)
    with torch.enable_grad(), pytest.raises(KernelError, match="gradients"):
        OPS.linear(numbers(2, 32, generator=generator), weight.requires_grad_())
