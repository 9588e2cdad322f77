"""Number formats: what any weight keeps when it is encoded and decoded."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.quant.formats import int8, mxfp4
from slipstream.quant.formats.nibbles import from_words, pack_nibbles, to_words, unpack_signed, unpack_unsigned
from slipstream.quant.scheme import SCHEMES, dequantize, scheme_named

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
ALL = [*((name, None) for name in SCHEMES), ("int4", 32), ("int4", 64)]
# The largest relative mean squared error each scheme may have on normally distributed weights.
BOUNDS = {"ptpc_fp8": 8e-4, "fp8": 8e-4, "w8a8_int8": 1e-4, "mxfp4": 0.014, "mxfp4_weight_only": 0.014}


def random_weight(seed: int, rows: int = 16, columns: int = 128, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, columns, generator=generator) * 0.02).to(dtype)


def encode(scheme, weight, rounding):
    return scheme.encode(weight, rounding, weight.float().abs().max().item())


@pytest.mark.parametrize("rounding", ["best", "quark"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("name", "group_size"), ALL)
def test_decoding_comes_close_to_what_was_encoded(name, group_size, dtype, rounding):
    weight = random_weight(3, dtype=dtype)
    decoded = dequantize(encode(scheme_named(name, group_size), weight, rounding))
    error = (decoded - weight).square().sum() / weight.float().square().sum()
    assert error < BOUNDS.get(name, 0.02)


@given(seed=st.integers(0, 10_000), exponent=st.integers(-60, 60), name=st.sampled_from(["int4", "w8a8_int8", "w4a8"]))
@settings(max_examples=40, deadline=None)
def test_searched_scales_do_not_lose_to_quarks_and_grow_with_the_weight(seed, exponent, name):
    weight = (random_weight(seed, 4, 64).float() * 2.0**exponent).to(torch.bfloat16)
    scheme = scheme_named(name)
    packed = scheme.encode(weight, "best")
    assert bool((packed.scales["scale"] > 0).all()) and bool(packed.scales["scale"].isfinite().all())
    if exponent > -12:  # below, Quark's floor of 2^-23 takes part
        ours, quarks = (
            (dequantize(p) - weight).double().square().sum(1) for p in (packed, scheme.encode(weight, "quark"))
        )
        assert bool((ours <= 1.0001 * quarks).all())
    doubled = scheme.encode(weight * 2, "best")
    assert torch.equal(packed.codes, doubled.codes)
    assert torch.equal(packed.scales["scale"] * 2, doubled.scales["scale"])


@pytest.mark.parametrize("rounding", ["best", "quark"])
@pytest.mark.parametrize(("name", "group_size"), ALL)
def test_zeros_stay_zeros_in_every_scheme(name, group_size, rounding):
    weight = random_weight(0)
    weight[3] = 0
    decoded = dequantize(encode(scheme_named(name, group_size), weight, rounding))
    assert not decoded[3].any() and bool(decoded.isfinite().all())
    nothing = torch.zeros(8, 128, dtype=torch.bfloat16)
    assert not dequantize(encode(scheme_named(name, group_size), nothing, rounding)).any()


@pytest.mark.parametrize("amax", [3e-6, 1e-5, 3e-5])
@pytest.mark.parametrize(("name", "group_size"), ALL)
def test_f16_rows_below_its_normal_numbers_are_kept_as_well_as_quark_keeps_them(name, group_size, amax):
    weight = (random_weight(7, dtype=torch.float32) / 0.02 * (amax / 3)).clamp(-amax, amax).half()
    weight[:, ::2] = 0
    scheme = scheme_named(name, group_size)
    decoded = [dequantize(encode(scheme, weight, rounding)) for rounding in ("best", "quark")]
    assert all(bool(one.isfinite().all()) for one in decoded)
    ours, quarks = ((one.double() - weight.double()).square().sum() for one in decoded)
    assert ours <= 1.0001 * quarks


@pytest.mark.parametrize("rounding", ["best", "quark"])
@pytest.mark.parametrize(("name", "group_size"), ALL)
def test_rows_encode_the_same_alone_and_in_company(name, group_size, rounding):
    weight, scheme = random_weight(5, rows=24), scheme_named(name, group_size)
    amax = weight.abs().max().item()
    whole = dequantize(scheme.encode(weight, rounding, amax))
    parts = torch.cat([dequantize(scheme.encode(rows, rounding, amax)) for rows in weight.split(8)])
    assert torch.equal(whole, parts)


@given(st.lists(st.integers(-8, 7), min_size=16, max_size=16))
def test_packed_nibbles_come_back_in_every_order(values):
    codes = torch.tensor([values], dtype=torch.int8)
    packed = pack_nibbles(codes)
    assert torch.equal(pack_nibbles(codes.to(torch.int16)), packed)
    assert torch.equal(pack_nibbles(codes.to(torch.int32)), packed)
    assert torch.equal(unpack_signed(packed), codes)
    assert unpack_unsigned(packed)[0].tolist() == [value & 15 for value in values]
    for reorder in (False, True):
        assert torch.equal(from_words(to_words(packed, reorder), reorder), packed)
    word = int(to_words(packed, True)[0, 0].item()) & 0xFFFFFFFF
    assert [(word >> 4 * i) & 15 for i in range(8)] == [values[column] & 15 for column in (0, 2, 4, 6, 1, 3, 5, 7)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@given(st.lists(st.floats(-6.5, 6.5, width=16), min_size=31, max_size=31), st.integers(-126, 120))
@settings(max_examples=60, deadline=None)
def test_mxfp4_takes_the_nearest_value_and_ties_to_even(dtype, values, exponent):
    block = torch.tensor([[4.0, *values]], dtype=torch.float64)
    weight = (block * 2.0**exponent).to(dtype)
    packed, scale = mxfp4.encode(weight, "quark")
    unit = weight.double() * 2.0 ** -(scale.double().item() - 127)
    distance = (unit.abs()[..., None] - E2M1.double()).abs()
    nearest = distance.amin(-1)
    chosen = unpack_unsigned(packed).long()
    assert torch.equal(distance.gather(-1, (chosen & 7)[..., None])[..., 0], nearest)
    tie = (distance == nearest[..., None]).sum(-1) > 1
    assert not bool(((chosen & 1 == 1) & tie).any())


def test_int8_activations_span_the_codes_and_zero_rows_stay_zero():
    x = torch.tensor([[1.0, -2.0, 0.5], [0.0, 0.0, 0.0]])
    codes, scale = int8.quantize_rows(x)
    assert codes[0].tolist() == [64, -127, 32]  # 63.5 and 31.75, to even and up
    assert scale.tolist() == [pytest.approx(2 / 127), 0.0]
    assert not codes[1].any()


def test_int8_weights_are_the_same_whole_or_a_few_rows_at_a_time():
    weight = torch.randn(700, 512)
    codes, scales = int8.encode(weight, "best")
    for rows in (slice(0, 1), slice(250, 520), slice(511, 700)):
        own_codes, own_scales = int8.encode(weight[rows], "best")
        assert own_codes.equal(codes[rows]) and own_scales.equal(scales[rows])
