import pytest
import torch
import triton
import triton.language as tl
from triton_samples import REFERENCE, numbers, triton_ops

from interpreted import DEVICE
from slipstream.kernels import KvLayer, RowSampling
from slipstream.kernels.triton import norm as norms
from slipstream.kernels.triton.gemm.quantize import quantize_rows
from slipstream.kernels.triton.norm import Norm
from slipstream.kernels.triton.rope import Rope, RopeWrite, rope_and_write
from slipstream.quant.formats import fp8, int8

OPS = triton_ops()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(3, 64), (2, 3, 24), (1, 576)])
def test_norms_are_the_references(dtype, shape, generator):
    x, weight = (numbers(*s, generator=generator, dtype=dtype) for s in (shape, shape[-1:]))
    expected = REFERENCE.rms_norm(x, weight, 1e-5)
    torch.testing.assert_close(OPS.rms_norm(x, weight, 1e-5), expected, rtol=1e-2 if x.itemsize == 2 else 1e-5, atol=0)


def test_silu_times_up_is_the_references(generator):
    x = numbers(3, 200, generator=generator)
    torch.testing.assert_close(OPS.silu_mul(x), REFERENCE.silu_mul(x))


@pytest.mark.parametrize("width", [300, 17000])
@pytest.mark.parametrize("codes", ["fp8", "int8"])
def test_rows_are_quantized_to_the_formats_own_codes(codes, width, generator):
    x = numbers(4, width, generator=generator, dtype=torch.bfloat16)
    x[2] = 0
    got, scale = quantize_rows(x, codes, None, False)
    # On a GPU torch divides by a number as it multiplies by its inverse; on a CPU it divides.
    expected, expected_scale = (fp8 if codes == "fp8" else int8).quantize_rows(x.cpu())
    assert torch.equal(scale.cpu(), expected_scale)
    assert torch.equal(got.cpu().view(torch.int8), expected.view(torch.int8))


@pytest.mark.parametrize("codes", ["fp8", "int8"])
def test_a_norm_leaves_the_codes_that_quantizing_it_would(codes, generator):
    x, weight = (numbers(*s, generator=generator, dtype=torch.bfloat16) for s in ((3, 128), (128,)))
    norm = Norm(weight, 1e-5)
    got, scale = norms.norm_codes(x, norm, codes, False)
    expected, expected_scale = quantize_rows(norms.rms_norm(x, norm, False), codes, None, False)
    assert torch.equal(scale, expected_scale) and torch.equal(got.view(torch.int8), expected.view(torch.int8))


@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize(("heads", "width", "rotary"), [((4, 2), 16, 16), ((3, 1), 24, 16)])
def test_queries_are_rotated_and_keys_and_values_written(heads, width, rotary, qk_norm, generator):
    num_heads, groups = heads
    qkv = numbers(3, (num_heads + 2 * groups) * width, generator=generator)
    cos, sin = (numbers(50, rotary // 2, generator=generator) for _ in range(2))
    slots, positions = torch.tensor([7, 0, 30], device=DEVICE), torch.tensor([3, 49, 0], device=DEVICE)
    norms = [Norm(numbers(width, generator=generator), 1e-5) for _ in range(2)] if qk_norm else None
    layer = KvLayer(*(torch.zeros(32, groups, width, device=DEVICE) for _ in range(2)))
    write = RopeWrite(heads, Rope(slots, positions, cos, sin), layer)
    got = rope_and_write(qkv, write, norms, qkv.dtype, False)
    q, k, v = qkv.view(3, -1, width).split([num_heads, groups, groups], dim=1)
    if norms is not None:
        q, k = (REFERENCE.rms_norm(x, norm.weight_D, norm.eps) for x, norm in zip((q, k), norms, strict=True))
    q, k = (REFERENCE.rotate(x, cos[positions], sin[positions]) for x in (q, k))
    torch.testing.assert_close(got, q, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(layer.keys_SGd[slots], k, rtol=1e-5, atol=1e-6)
    assert torch.equal(layer.values_SGd[slots], v)
    others = torch.ones(32, dtype=torch.bool, device=DEVICE).index_fill(0, slots, False)
    assert not layer.keys_SGd[others].any() and not layer.values_SGd[others].any()


def rows_of(temperatures, generator) -> RowSampling:
    count = len(temperatures)
    seeds = torch.randint(-(2**62), 2**62, (count,), generator=generator)
    positions = torch.randint(0, 2**34, (count,), generator=generator)
    return RowSampling(torch.tensor(temperatures, device=DEVICE), seeds.to(DEVICE), positions.to(DEVICE))


def test_noise_belongs_to_token_ids(generator):
    logits, ids = numbers(3, 100, generator=generator), torch.randperm(150000, generator=generator)[:100].to(DEVICE)
    sampling = rows_of([0.0, 0.7, 1.0], generator)
    assert torch.equal(OPS.perturb(logits, ids, sampling), REFERENCE.perturb(logits, ids, sampling))


@pytest.mark.parametrize("k", [1, 4, 16, 20])
def test_the_best_entries_are_the_references(k, generator):
    logits, ids = numbers(3, 2500, generator=generator), torch.arange(2500, device=DEVICE)
    sampling = rows_of([0.0, 0.7, 1.0], generator)
    scores, entries = OPS.top_k(logits, ids, sampling, k)
    expected_scores, expected_entries = REFERENCE.top_k(logits, ids, sampling, k)
    assert torch.equal(entries, expected_entries)
    torch.testing.assert_close(scores, expected_scores, rtol=1e-5, atol=1e-5)


@triton.jit
def _copy_kernel(x_ptr, y_ptr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(y_ptr + at, tl.load(x_ptr + at))


@pytest.mark.skipif(DEVICE.type != "cpu", reason="a GPU does not watch addresses; the interpreter does")
@pytest.mark.parametrize(("read", "written"), [(3, 4), (4, 3)])
def test_an_interpreted_kernel_that_leaves_its_tensors_is_refused(read, written):
    _copy_kernel[(1,)](torch.zeros(4), torch.zeros(4), SIZE=4)
    with pytest.raises(Exception, match="_copy_kernel touches 1 numbers outside the tensors"):
        _copy_kernel[(1,)](torch.zeros(read), torch.zeros(written), SIZE=4)
