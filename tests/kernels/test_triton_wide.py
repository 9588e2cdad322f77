import dataclasses
import functools

import pytest
import torch
from triton_samples import numbers, quantized, small_tuning

from interpreted import DEVICE
from slipstream.kernels.triton.gemm.dispatch import Products
from slipstream.kernels.triton.gemm.split_k import Epilogue
from slipstream.kernels.triton.gemm.split_k_reduce import PartialSums, reduce_partials, reduce_to_codes
from slipstream.kernels.triton.gemm.wide_linear import fitted, row_pieces
from slipstream.kernels.triton.norm import Norm, norm_codes, rms_norm
from slipstream.kernels.triton.tuning import LinearConfig, WideConfig, architecture_of, few_rows_name
from slipstream.quant.packed import PackedWeight

OUTPUTS, INPUTS = 200, 288  # neither fills its last tile
NARROW = {f"{format}:{OUTPUTS}:{INPUTS}": LinearConfig(64, 32, 2, 4, 2) for format in ("dense", "fp8", "int8")}
FORMATS = ("dense", "fp8_per_channel", "w8a8_int8")


def wide(**changes) -> dict[str, WideConfig]:
    config = dataclasses.replace(WideConfig(64, False, 32, 4, 2), **changes)
    shapes = [f"{format}:{OUTPUTS}:{INPUTS}" for format in ("dense", "fp8", "int8")]
    return {name: config for shape in shapes for name in (shape, few_rows_name(shape))}


def products(wide_linear: dict[str, WideConfig], fp8_dot: bool = True) -> Products:
    return Products(small_tuning(linear=NARROW, wide_linear=wide_linear, shared_bytes=0, fp8_dot=fp8_dot), DEVICE)


def weight_of(format: str, prepared_by: Products, generator) -> torch.Tensor | PackedWeight:
    if format == "dense":
        return numbers(OUTPUTS, INPUTS, generator=generator, dtype=torch.bfloat16)
    return prepared_by.prepare(quantized(format, OUTPUTS, INPUTS, generator))


@functools.cache
def narrow_results(format: str, fp8_dot: bool) -> tuple[torch.Tensor | PackedWeight, list[tuple]]:
    """Return a weight, and rows and ends with what narrow tiles make of them."""
    generator, narrow = torch.Generator().manual_seed(11), products({}, fp8_dot)
    weight = weight_of(format, narrow, generator)
    x = numbers(160, INPUTS, generator=generator, dtype=torch.bfloat16)
    residual = numbers(160, OUTPUTS, generator=generator, dtype=torch.bfloat16)
    bias = numbers(OUTPUTS, generator=generator, dtype=torch.bfloat16)
    found = []
    for count in (20, 100, 160):
        rows = narrow.rows_for(weight, x[:count])
        for epilogue in (Epilogue(bias, residual[:count]), Epilogue(silu=True)):
            found.append((rows, epilogue, narrow.multiply(rows, weight, epilogue)))
    return weight, found


def assert_bits_of_narrow_tiles(all_rows: Products, format: str, *, fp8_dot: bool = True) -> None:
    weight, found = narrow_results(format, fp8_dot)
    for rows, epilogue, expected in found:
        got = all_rows.multiply(rows, weight, epilogue)
        assert torch.equal(got, expected), (len(expected), epilogue.silu)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("pair", [False, True])
@pytest.mark.parametrize(("tma", "together"), [(False, False), (True, False), (True, True)])
def test_a_program_for_all_rows_gives_the_bits_of_narrow_tiles(format, pair, tma, together):
    assert_bits_of_narrow_tiles(products(wide(pair=pair, tma=tma, together=together)), format)


def test_fp8_that_matrix_units_do_not_read_gives_the_bits_of_narrow_tiles():
    assert_bits_of_narrow_tiles(products(wide(), fp8_dot=False), "fp8_per_channel", fp8_dot=False)


@pytest.mark.parametrize(("together", "fp8_dot"), [(False, True), (True, True), (False, False)])
def test_stretches_of_codes_that_are_added_later_give_the_bits_of_a_product_that_adds_them(
    together, fp8_dot, generator
):
    narrow, left = products({}, fp8_dot), products(wide(deferred=True, together=together), fp8_dot)
    weight = weight_of("fp8_per_channel", narrow, generator)
    x = numbers(160, INPUTS, generator=generator, dtype=torch.bfloat16)
    residual = numbers(160, OUTPUTS, generator=generator, dtype=torch.bfloat16)
    norm = Norm(numbers(OUTPUTS, generator=generator, dtype=torch.bfloat16), 1e-5)
    for count in (20, 160) if fp8_dot and not together else (20,):
        rows = narrow.rows_for(weight, x[:count])
        expected = narrow.multiply(rows, weight, Epilogue(residual_TN=residual[:count]))
        sums = left.deferred_sums(rows, weight)
        hidden, codes, scale = reduce_to_codes(sums, residual[:count], norm, "fp8", dependent=False)
        expected_codes, expected_scale = norm_codes(expected, norm, "fp8", dependent=False)
        assert torch.equal(hidden, expected)
        assert torch.equal(codes.view(torch.uint8), expected_codes.view(torch.uint8))
        assert torch.equal(scale, expected_scale)
        assert torch.equal(
            reduce_partials(sums, residual[:count], norm, dependent=False, warps=8)[1], rms_norm(expected, norm, False)
        )


@pytest.mark.parametrize("warps", [8, 32])
def test_rows_that_many_warps_add_come_to_what_torch_adds_up(warps, generator):
    width = 4096
    parts = numbers(2, 3, width, generator=generator)
    residual = numbers(3, width, generator=generator, dtype=torch.bfloat16)
    norm = Norm(numbers(width, generator=generator, dtype=torch.bfloat16), 1e-5)
    hidden, normed = reduce_partials(PartialSums(parts), residual, norm, dependent=False, warps=warps)
    expected = (parts[0] + parts[1]).bfloat16() + residual
    assert torch.equal(hidden, expected)
    assert torch.equal(normed, rms_norm(expected, norm, dependent=False))


@pytest.mark.parametrize("pair", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_stretches_that_are_added_later_give_the_bits_of_a_product_that_adds_them(pair, dtype, generator):
    narrow, left = products({}), products(wide(pair=pair, deferred=True))
    weight = numbers(OUTPUTS, INPUTS, generator=generator, dtype=dtype)
    x = numbers(160, INPUTS, generator=generator, dtype=dtype)
    residual = numbers(160, OUTPUTS, generator=generator, dtype=dtype)
    norm = Norm(numbers(OUTPUTS, generator=generator, dtype=dtype), 1e-5)
    for count in (20, 160):
        rows = narrow.rows_for(weight, x[:count])
        expected = narrow.multiply(rows, weight, Epilogue(residual_TN=residual[:count]))
        parts = left.deferred_sums(rows, weight)
        hidden, normed = reduce_partials(parts, residual[:count], norm, dependent=False, warps=8)
        assert torch.equal(hidden, expected)
        assert torch.equal(normed, rms_norm(expected, norm, dependent=False))
        assert torch.equal(left.multiply(rows, weight, Epilogue(residual_TN=residual[:count])), expected)


def test_a_product_in_one_stretch_leaves_nothing_for_later(generator):
    tuning = small_tuning(
        linear={f"dense:{OUTPUTS}:{INPUTS}": LinearConfig(64, 32, 1, 4, 2)}, wide_linear=wide(deferred=True)
    )
    used = Products(tuning, DEVICE)
    weight = weight_of("dense", used, generator)
    x = numbers(40, INPUTS, generator=generator, dtype=torch.bfloat16)
    assert used.deferred_sums(used.rows_for(weight, x), weight) is None


def test_a_row_keeps_its_bits_up_to_the_widest_pass_and_beyond(generator):
    used = products(wide(pair=True))
    weight = weight_of("dense", used, generator)
    x = numbers(270, INPUTS, generator=generator, dtype=torch.bfloat16)
    alone = used.multiply(used.rows_for(weight, x[:1]), weight, Epilogue())
    for count in (17, 64, 190, 256, 270):
        assert torch.equal(used.multiply(used.rows_for(weight, x[:count]), weight, Epilogue())[:1], alone), count


def test_rows_the_copy_engine_cannot_read_are_loaded_otherwise(generator):
    used = products(wide(tma=True))
    weight = weight_of("dense", used, generator)
    x = numbers(40, INPUTS + 1, generator=generator, dtype=torch.bfloat16)[:, 1:]
    expected = used.multiply(used.rows_for(weight, x.contiguous()), weight, Epilogue())
    assert torch.equal(used.multiply(used.rows_for(weight, x), weight, Epilogue()), expected)


def test_a_token_tile_holds_its_rows_and_little_more():
    for num_rows in range(1, 257):
        first, second = row_pieces(num_rows)
        assert num_rows <= first + second, num_rows
        assert first.bit_count() == 1 and second.bit_count() <= 1, num_rows
        assert num_rows <= 32 or first + second < 1.5 * num_rows, num_rows


@pytest.mark.parametrize("kind", ["dense", "fp8", "int8"])
@pytest.mark.parametrize("silu", [False, True])
@pytest.mark.parametrize("num_rows", [96, 160, 192, 256])
def test_tiles_are_cut_until_their_sums_and_stages_fit(kind, silu, num_rows):
    pieces, shared_bytes = row_pieces(num_rows), 224 << 10
    config = fitted(
        WideConfig(128, True, 64 if kind == "dense" else 128, 8, 6, tma=True), pieces, kind, silu, shared_bytes
    )
    sums = config.block_n * (2 if config.pair else 1) * sum(pieces)
    assert sums <= 160 * 32 * config.num_warps or (silu and config.block_n == 64 and config.num_warps == 8)
    step = (config.block_n * (2 if config.pair else 1) + sum(pieces)) * 128
    assert config.num_stages * step <= shared_bytes
    assert config.pair or not silu


@pytest.mark.skipif(architecture_of(DEVICE) != "sm_90", reason="products are streamed on Hopper alone")
@pytest.mark.parametrize("format", ["dense", "fp8_per_channel"])
@pytest.mark.parametrize("pair", [False, True])
@pytest.mark.parametrize("splits", [1, 2])
def test_streamed_products_give_the_bits_of_narrow_tiles(format, pair, splits, generator):
    outputs, inputs = 256, 1024
    kind, step = ("dense", 64) if format == "dense" else ("fp8", 128)
    shape = f"{kind}:{outputs}:{inputs}"
    tiles = WideConfig(
        64, pair, step, 4, 3, tma=True, deferred=splits > 1, together=kind == "fp8", warp_specialised=True, at_once=pair
    )
    linear = {shape: LinearConfig(64, step, splits, 4, 2)}
    narrow, streamed = (
        Products(small_tuning(linear=linear, wide_linear=wide_linear), DEVICE)
        for wide_linear in ({}, {shape: tiles, few_rows_name(shape): tiles})
    )
    weight = numbers(outputs, inputs, generator=generator, dtype=torch.bfloat16)
    if kind == "fp8":
        weight = narrow.prepare(quantized(format, outputs, inputs, generator))
    x = numbers(256, inputs, generator=generator, dtype=torch.bfloat16)
    residual = numbers(256, outputs, generator=generator, dtype=torch.bfloat16)
    for count in (20, 40, 100, 160, 256):
        rows = narrow.rows_for(weight, x[:count])
        if splits > 1:
            sums = streamed.deferred_sums(rows, weight)
            assert sums is not None, "splits are left to the kernel that follows"
            got = reduce_partials(sums, residual[:count], None, dependent=False, warps=8)[0]
            assert torch.equal(got, narrow.multiply(rows, weight, Epilogue(residual_TN=residual[:count]))), count
        else:
            for silu in (False, True):
                got = streamed.multiply(rows, weight, Epilogue(silu=silu))
                assert torch.equal(got, narrow.multiply(rows, weight, Epilogue(silu=silu))), (count, silu)
