"""Products with quantized weights: each scheme's own arithmetic, and the same row whatever its company."""

import pytest
import torch

from slipstream.kernels.reference.quantized import QUANTIZED_LINEARS, integer_product
from slipstream.quant.formats.nibbles import unpack_signed
from slipstream.quant.packed import PackedWeight, join_rows
from slipstream.quant.scheme import SCHEMES, dequantize, scheme_named
from tiny import OPS

GENERATOR = torch.Generator().manual_seed(0)
WEIGHT = torch.randn(48, 128, generator=GENERATOR) * 0.05
X = torch.randn(5, 128, generator=GENERATOR)
CASES = [*((name, None) for name in SCHEMES), ("int4", 32)]
# How far the quantized input may move the output, relative to it.
INPUT_ERRORS = {"ptpc_fp8": 0.04, "fp8": 0.04, "int4_fp8": 0.04, "w8a8_int8": 0.01, "w4a8": 0.01, "mxfp4": 0.2}


def packed(name, group_size=None, weight=WEIGHT):
    return scheme_named(name, group_size).encode(weight, "best", weight.abs().max().item())


def block_fp8() -> PackedWeight:
    weight = torch.randn(48, 200, generator=torch.Generator().manual_seed(2))
    return PackedWeight("fp8_block", 48, 200, weight.to(torch.float8_e4m3fn), {"scale": torch.rand(48, 2) + 0.5})


def test_every_scheme_has_its_arithmetic():
    formats = {packed(name, group_size).format for name, group_size in CASES} | {"fp8_block"}
    assert formats == set(QUANTIZED_LINEARS)


@pytest.mark.parametrize(("name", "group_size"), CASES)
def test_the_product_is_that_of_the_decoded_weight_but_for_the_inputs_rounding(name, group_size):
    weight = packed(name, group_size)
    exact = X @ dequantize(weight).t()
    error = (OPS.packed_linear(X, weight) - exact).norm() / exact.norm()
    assert error < INPUT_ERRORS.get(name, 1e-6)
    if name in INPUT_ERRORS:
        assert error > 1e-4, "the input was not quantized at all"


@pytest.mark.parametrize("name", ["w8a8_int8", "w4a8"])
def test_integer_schemes_sum_integers_and_scale_once(name):
    weight = packed(name)
    codes = weight.codes if name == "w8a8_int8" else unpack_signed(weight.codes)
    amax = X.abs().amax(1)
    scale = amax / 127
    x_codes = (X / scale[:, None]).round().to(torch.int64)
    assert x_codes.abs().max() == 127
    expected = (x_codes @ codes.long().t()).float() * (scale[:, None] * weight.scales["scale"])
    assert torch.equal(OPS.packed_linear(X, weight), expected)


@pytest.mark.parametrize(("name", "group_size"), CASES)
def test_a_token_is_quantized_by_itself(name, group_size):
    weight = packed(name, group_size)
    loud = X.clone()
    loud[1:] *= 1000
    alone = OPS.packed_linear(X[:1], weight)
    torch.testing.assert_close(OPS.packed_linear(loud, weight)[:1], alone, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("name", "group_size"), CASES)
def test_joined_layers_give_each_part_its_own_result(name, group_size):
    parts = [packed(name, group_size, WEIGHT), packed(name, group_size, WEIGHT[:16] * 3)]
    joined = OPS.packed_linear(X, join_rows(parts))
    expected = torch.cat([OPS.packed_linear(X, part) for part in parts], dim=1)
    torch.testing.assert_close(joined, expected, rtol=1e-5, atol=1e-6)


def test_blocks_of_fp8_are_scaled_by_row_and_128_columns():
    weight = block_fp8()
    x = torch.randn(3, 200, generator=torch.Generator().manual_seed(3))
    exact = x @ dequantize(weight).t()
    assert (OPS.packed_linear(x, weight) - exact).norm() / exact.norm() < 0.04


def test_a_static_input_scale_is_used_where_the_checkpoint_has_one():
    dynamic = packed("fp8")
    static = PackedWeight(
        dynamic.format, 48, 128, dynamic.codes, {**dynamic.scales, "input_scale": torch.tensor(0.001)}
    )
    clipped = X.clamp(-0.448, 0.448) @ dequantize(dynamic).t()
    assert (OPS.packed_linear(X, static) - clipped).norm() / clipped.norm() < 0.04


def test_integer_products_are_exact_beyond_float32():
    x = torch.full((1, 20_000), 127, dtype=torch.int8)
    w = torch.full((1, 20_000), 127, dtype=torch.int8)
    w[0, 0] = 126
    assert integer_product(x, w).double().item() == torch.tensor(127 * 127 * 20_000 - 127).float().item()


def test_half_precision_inputs_come_back_in_half_precision():
    for name, group_size in CASES:
        assert OPS.packed_linear(X.bfloat16(), packed(name, group_size)).dtype == torch.bfloat16
