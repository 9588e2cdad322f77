"""Products that start on their weights before their rows are there: same bits, with norms and rotations folded in."""

import dataclasses

import pytest
import torch
from layer_samples import make_target, run
from triton_samples import REFERENCE, numbers, quantized, small_tuning, triton_ops

from interpreted import DEVICE
from slipstream.checkpoint.spec import RopeSpec
from slipstream.kernels.triton import norm as norms
from slipstream.kernels.triton.gemm import quantize
from slipstream.kernels.triton.gemm.dispatch import Products
from slipstream.kernels.triton.gemm.small_m_launch import squares_of
from slipstream.kernels.triton.gemm.split_k import Epilogue, FoldedNorm, Rows
from slipstream.kernels.triton.norm import Norm
from slipstream.kernels.triton.tuning import LinearConfig
from slipstream.models.fused import llama

HEADS_OF_64 = {"head_dim": 64, "rope": RopeSpec(10000.0, 64), "hidden_size": 96, "intermediate_size": 160}


def products(**changes) -> Products:
    return Products(small_tuning(**changes), DEVICE)


def dense_shapes(model) -> set[tuple[int, ...]]:
    return {tuple(m.weight.shape) for m in model.modules() if type(m).__name__ == "Linear"}


def multiplied(by: Products, weight, x, **ends) -> torch.Tensor:
    return by.multiply(by.rows_for(weight, x), weight, Epilogue(**ends))


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("format", ["dense", "fp8_per_channel", "w8a8_int8"])
def test_weights_first_gives_the_bits_of_rows_first(format, splits, generator):
    columns = 448 if splits < 4 else 512  # the last stretch is short, or all are whole
    key = {"fp8_per_channel": "fp8", "w8a8_int8": "int8"}.get(format, format)
    config = {f"{key}:136:{columns}": LinearConfig(64, 64, splits, 4, 3)}
    first, last = (products(linear=config, weights_first=on) for on in (True, False))
    if format == "dense":
        weight = numbers(136, columns, generator=generator, dtype=torch.bfloat16)
    else:
        weight = first.prepare(quantized(format, 136, columns, generator))
    x = numbers(20, columns, generator=generator, dtype=torch.bfloat16)
    residual = numbers(20, 136, generator=generator, dtype=torch.bfloat16)
    whole = multiplied(last, weight, x, residual_TN=residual)
    silu = multiplied(last, weight, x, silu=True)
    for count in (1, 16):
        assert torch.equal(multiplied(first, weight, x[:count], residual_TN=residual[:count]), whole[:count]), count
        assert torch.equal(multiplied(first, weight, x[:count], silu=True), silu[:count]), count


@pytest.mark.parametrize(
    ("format", "splits", "program_n"),
    [("dense", 1, 56), ("dense", 2, 24), ("dense", 4, 16), ("fp8_per_channel", 2, 32), ("fp8_per_channel", 4, 16)],
)
def test_programs_with_few_rows_of_their_own_and_stretches_side_by_side_change_no_bit(
    format, splits, program_n, generator
):
    key = f"{'dense' if format == 'dense' else 'fp8'}:136:512"
    tiles = LinearConfig(64, 64, splits, 4, 3)
    few = dataclasses.replace(tiles, program_n=program_n, sliced_k=splits > 1)
    folds = {"weights_first": True, "fold_rows": 16, "fold_codes": 4, "fold_norm_codes": 4}
    first, beside = (products(linear={key: tiles}, linear_few=some, **folds) for some in ({}, {key: few}))
    if format == "dense":
        weight = numbers(136, 512, generator=generator, dtype=torch.bfloat16)
    else:
        weight = first.prepare(quantized(format, 136, 512, generator))
    x, residual = (numbers(4, width, generator=generator, dtype=torch.bfloat16) for width in (512, 136))
    after = numbers(72, 136, generator=generator, dtype=torch.bfloat16)
    norm = numbers(136, generator=generator, dtype=torch.bfloat16)
    for count in (1, 4):
        found = []
        for by in (first, beside):
            squared = by.squared(weight, count)
            squares = squares_of(residual[:count], squared) if squared else None
            out = multiplied(by, weight, x[:count], residual_TN=residual[:count], squares_TB=squares)
            normed = None
            if squares is not None:
                normed = by.multiply(Rows(out, None, out.dtype, FoldedNorm(norm, 1e-5, squares)), after, Epilogue())
            found.append((out, multiplied(by, weight, x[:count], silu=True), normed))
        (out, silu, normed), (same, same_silu, same_normed) = found
        assert torch.equal(out, same) and torch.equal(silu, same_silu), count
        assert same_normed is None or torch.equal(normed, same_normed), count
        assert (same_normed is None) == (program_n in (24, 56))


def test_fp8_sums_are_made_whole_at_the_same_columns_in_wide_steps(generator):
    x = numbers(200, 768, generator=generator, dtype=torch.bfloat16)
    stored = quantized("fp8_per_channel", 64, 768, generator)
    by_256, by_128 = (
        products(linear={"fp8:64:768": LinearConfig(64, block_k, 1, 4, 3)}, weights_first=True, fp8_dot=True)
        for block_k in (256, 128)
    )
    weight = by_256.prepare(stored)
    expected = multiplied(by_128, weight, x)
    for count in (1, 40, 200):
        assert torch.equal(multiplied(by_256, weight, x[:count]), expected[:count]), count


@pytest.mark.parametrize("width", [64, 576])
def test_a_folded_norm_is_the_norm_to_the_bit(width, generator):
    by = products(weights_first=True, fold_rows=16)
    inner = numbers(3, 64, generator=generator, dtype=torch.bfloat16)
    up = numbers(width, 64, generator=generator, dtype=torch.bfloat16)
    residual = numbers(3, width, generator=generator, dtype=torch.bfloat16)
    squares = squares_of(residual)
    hidden = multiplied(by, up, inner, residual_TN=residual, squares_TB=squares)
    blocks = torch.nn.functional.pad(hidden.double() ** 2, (0, -width % 64)).view(3, -1, 64).sum(-1)
    torch.testing.assert_close(squares.double(), blocks, rtol=1e-5, atol=1e-5)
    norm = Norm(numbers(width, generator=generator, dtype=torch.bfloat16), 1e-5)
    weight = numbers(72, width, generator=generator, dtype=torch.bfloat16)
    folded = Rows(hidden, None, hidden.dtype, FoldedNorm(norm.weight_D, norm.eps, squares))
    expected = multiplied(by, weight, norms.rms_norm(hidden, norm, False))
    assert torch.equal(by.multiply(folded, weight, Epilogue()), expected)


def unfolded(by: Products, x, norm, weight, **ends) -> torch.Tensor:
    codes = norms.norm_codes(x, norm, "fp8", False)
    return by.multiply(Rows(*codes, x.dtype), weight, Epilogue(**ends))


@pytest.mark.parametrize("block_k", [64, 256])
def test_codes_made_of_maxima_are_those_of_the_kernel_that_quantizes(block_k, generator):
    config = {"fp8:72:512": LinearConfig(64, block_k, 2, 4, 3), "fp8:1024:64": LinearConfig(64, 64, 1, 4, 3)}
    by = products(linear=config, weights_first=True, fold_codes=16, fp8_dot=True)
    up, down = (by.prepare(quantized("fp8_per_channel", *shape, generator)) for shape in ((1024, 64), (72, 512)))
    x = numbers(16, 64, generator=generator, dtype=torch.bfloat16)
    x[3] = 0.0
    for count in (1, 5, 16):
        maxima = torch.full((count, by.num_maxima(up, count)), float("nan"), device=DEVICE)
        inner = multiplied(by, up, x[:count], silu=True, maxima_TB=maxima)
        assert torch.equal(maxima.amax(1), inner.float().abs().amax(1))
        assert by.makes_codes(down, count)
        rows = Rows(inner, None, inner.dtype, maxima_TB=maxima)
        assert torch.equal(by.multiply(rows, down, Epilogue()), multiplied(by, down, inner)), count


@pytest.mark.parametrize("block_k", [64, 256])
@pytest.mark.parametrize("width", [64, 576])
def test_codes_made_after_a_folded_norm_are_those_of_the_norms_kernel(width, block_k, generator):
    config = {f"fp8:72:{width}": LinearConfig(64, block_k, 1, 4, 3)}
    by = products(linear=config, weights_first=True, fold_norm_codes=8, fp8_dot=True)
    up = numbers(width, 64, generator=generator, dtype=torch.bfloat16)
    inner = numbers(8, 64, generator=generator, dtype=torch.bfloat16)
    residual = numbers(8, width, generator=generator, dtype=torch.bfloat16)
    norm = Norm(numbers(width, generator=generator, dtype=torch.bfloat16), 1e-5)
    weight = by.prepare(quantized("fp8_per_channel", 72, width, generator))
    for count in (1, 3, 8):
        squares = squares_of(residual[:count])
        hidden = multiplied(by, up, inner[:count], residual_TN=residual[:count], squares_TB=squares)
        assert by.folds_norm(weight, count)
        folded = Rows(hidden, None, hidden.dtype, FoldedNorm(norm.weight_D, norm.eps, squares))
        assert torch.equal(by.multiply(folded, weight, Epilogue()), unfolded(by, hidden, norm, weight)), count


@pytest.mark.parametrize("changes", [{}, {"qkv_bias": True}, {"qk_norm": True, "sliding_window": 9}])
def test_blocks_with_folded_norms_and_rotations_are_the_references(changes, generator):
    model = make_target(generator, **{**HEADS_OF_64, "num_layers": 2, **changes}).to(DEVICE)
    ops = triton_ops(weights_first=True, fold_rows=16)
    torch.testing.assert_close(run(model, ops, [6, 1]), run(model, REFERENCE, [6, 1]), rtol=2e-4, atol=2e-4)


def test_folding_changes_no_bits_of_a_model(generator):
    model = make_target(generator, **HEADS_OF_64, num_layers=2).to(torch.bfloat16).to(DEVICE)
    model.rotary.fill(DEVICE)
    folded = triton_ops(weights_first=True, fold_rows=4)
    plain = triton_ops(weights_first=False, fold_rows=0)
    alone = run(model, plain, [9, 1, 1, 1])
    for ops, passes, others in ((folded, [9, 3], 0), (folded, [9, 1, 2], 3)):
        assert torch.equal(run(model, ops, passes, others=others), alone), (passes, others)


def test_stretches_and_splits_that_programs_share_change_no_bits_of_a_model(generator):
    model = make_target(generator, **HEADS_OF_64, num_layers=2).to(torch.bfloat16).to(DEVICE)
    model.rotary.fill(DEVICE)
    linear = {f"dense:{n}:{k}": LinearConfig(64, 32, 2, 4, 3) for n, k in dense_shapes(model)}
    attention = dataclasses.replace(small_tuning().attention, share=3, compact=True)
    folds = {"weights_first": True, "fold_rows": 4, "attention": attention}
    plain = triton_ops(weights_first=False, fold_rows=0, linear=linear)
    assert torch.equal(run(model, triton_ops(**folds, linear=linear), [3, 1, 2]), run(model, plain, [3, 3]))


def test_folding_changes_no_bits_of_a_model_in_fp8(generator, monkeypatch):
    model = make_target(generator, **HEADS_OF_64, num_layers=2).to(torch.bfloat16).to(DEVICE)
    model.rotary.fill(DEVICE)
    plain = triton_ops(weights_first=False, fold_rows=0)
    for linear in (m for layer in model.layers for m in layer.modules() if type(m).__name__ == "Linear"):
        stored = quantized("fp8_per_channel", sum(linear.parts.values()), linear.in_features, generator)
        linear.pack(plain.prepare(stored))
    alone = run(model, plain, [2, 1])
    calls = []
    for module, name in ((norms, "norm_codes"), (quantize, "quantize_rows")):
        whole = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *a, f=whole, n=name: (calls.append(n), f(*a))[1])
    folds = {"weights_first": True, "fold_rows": 4, "fold_codes": 4, "fold_norm_codes": 3}
    assert torch.equal(run(model, triton_ops(**folds), [3]), alone)
    assert calls == ["norm_codes"]  # before the first block
    calls.clear()
    assert torch.equal(run(model, triton_ops(**folds), [2, 1], others=2), alone)
    assert calls == ["norm_codes"] * 5  # four rows, then three
    calls.clear()
    assert torch.equal(run(model, triton_ops(**folds), [3], others=2), alone)
    assert calls.count("norm_codes") == 4 and calls.count("quantize_rows") == 4


def test_a_pass_of_few_rows_folds_and_one_of_many_does_not(generator, monkeypatch):
    model = make_target(generator, **HEADS_OF_64, num_layers=2).to(torch.bfloat16).to(DEVICE)
    ops = triton_ops(weights_first=True, fold_rows=4)
    calls = []
    for module, name in ((norms, "rms_norm"), (llama, "rope_and_write")):
        whole = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *a, f=whole, n=name: (calls.append(n), f(*a))[1])
    run(model, ops, [4])
    assert calls == ["rms_norm"]  # before the first block
    calls.clear()
    run(model, ops, [5])
    assert calls.count("rms_norm") == 4 and calls.count("rope_and_write") == 2
