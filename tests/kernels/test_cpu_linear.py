import pytest
import torch
from cpu_samples import FORMATS, columns_for, integer_product, packed_weight, random_blocks

from slipstream.errors import KernelError
from slipstream.kernels.cpu.library import ISAS, load_library
from slipstream.kernels.cpu.ops import CpuOps
from slipstream.kernels.reference.ops import ReferenceOps
from slipstream.quant.gguf_blocks import BLOCK_FORMATS, dequantize
from slipstream.quant.packed import PackedWeight

REFERENCE = ReferenceOps(torch.device("cpu"))
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def reference_product(x, weight):
    return integer_product(x, weight) if "scale" in weight.scales else REFERENCE.packed_linear(x, weight)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("shape", [(16, 32), (33, 64), (100, 96), (7, 288)])
def test_packed_products_match_the_reference(cpu_ops, generator, format, shape):
    columns = columns_for(format, shape[1])
    weight = packed_weight(format, shape[0], columns, generator)
    prepared = cpu_ops.prepare(weight)
    bias = torch.randn(shape[0], generator=generator)
    for rows in (1, 3, 9, 40):
        x = torch.randn(rows, columns, generator=generator)
        expected = reference_product(x, weight) + bias
        assert torch.allclose(cpu_ops.packed_linear(x, prepared, bias), expected, rtol=1e-5, atol=1e-4)


def test_blocks_with_the_largest_codes_and_scales_are_summed_exactly(cpu_ops):
    """All bits set, or all but the signs: sums then come nearest to what 16 bits, 32 bits and a float can hold."""
    for format, stored in BLOCK_FORMATS.items():
        for byte in (0xFF, 0x7F, 0x80, 0x00):
            blocks = torch.full((16, 2, stored.nbytes), byte, dtype=torch.uint8)
            one = torch.tensor([1.0, 1.0]).half().view(torch.uint8)
            where = slice(208, 210) if format == "q6_k" else slice(0, 4 if format[3] in "1k" else 2)
            blocks[..., where] = one[: where.stop - where.start]
            weight = PackedWeight(format, 16, 2 * stored.columns, blocks.flatten(1))
            for x in (torch.full((1, weight.in_features), 127.0), torch.full((1, weight.in_features), -127.0)):
                expected = x.double() @ dequantize(format, weight.codes).double().T
                assert torch.equal(REFERENCE.packed_linear(x, weight).double(), expected)
                assert torch.equal(cpu_ops.packed_linear(x, cpu_ops.prepare(weight)).double(), expected)


@pytest.mark.parametrize("format", [name for name, stored in BLOCK_FORMATS.items() if stored.columns == 256])
def test_k_formats_of_part_of_a_block_are_refused(fast_ops, generator, format):
    weight = PackedWeight(format, 16, 288, random_blocks(format, 16, 512, generator))
    with pytest.raises(KernelError, match="288 columns, not a multiple of 256"):
        fast_ops.prepare(weight)


@pytest.mark.parametrize("columns", [2, 30, 50, 70])
@pytest.mark.parametrize("format", ["w8a8_int8", "w4a8"])
def test_integer_formats_take_any_number_of_columns_and_give_the_reference_bits(cpu_ops, generator, format, columns):
    weight = packed_weight(format, 19, columns, generator)
    x = torch.randn(5, columns, generator=generator)
    assert torch.equal(cpu_ops.packed_linear(x, cpu_ops.prepare(weight)), integer_product(x, weight))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(16, 32), (35, 50), (1, 7), (64, 257)])
def test_dense_products_match_the_reference(cpu_ops, generator, dtype, shape):
    weight = torch.randn(shape, generator=generator).to(dtype)
    bias = torch.randn(shape[0], generator=generator)
    for rows in (1, 2, 5, 33):
        x = torch.randn(rows, shape[1], generator=generator)
        expected = REFERENCE.linear(x, weight.float(), bias)
        assert torch.allclose(cpu_ops.linear(x, weight, bias), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("kind", [*FORMATS, *DTYPES])
def test_a_rows_bits_do_not_depend_on_rows_threads_or_instruction_set(generator, kind):
    try:
        isas = ISAS[: load_library().slip_best_isa() + 1]
    except KernelError:
        pytest.skip("CPU kernels not built")
    columns = columns_for(kind, 192) if isinstance(kind, str) else 192
    x = torch.randn(64, columns, generator=generator)
    weight = packed_weight(kind, 72, columns, generator) if isinstance(kind, str) else None
    dense = torch.randn(72, columns, generator=generator).to(torch.float32 if weight else kind)

    def product(ops, rows):
        return ops.packed_linear(rows, ops.prepare(weight)) if weight else ops.linear(rows, dense)

    whole = product(CpuOps(1, isas[-1]), x)
    for isa in isas:
        for threads in (1, 2):
            ops = CpuOps(threads, isa)
            for rows in range(1, 65, 1 if isa == isas[-1] else 9):
                assert torch.equal(product(ops, x[:rows]), whole[:rows]), (isa, threads, rows)
            assert torch.equal(product(ops, x[17:18]), whole[17:18])


@pytest.mark.parametrize("format", FORMATS)
def test_odd_numbers_give_the_same_bits_on_every_instruction_set(generator, format):
    """What is no number or infinite, and rows so small that their scale is denormal."""
    columns = columns_for(format, 64)
    x = torch.randn(8, columns, generator=generator)
    for row, (at, odd) in enumerate(
        [(5, torch.nan), (0, torch.nan), (5, torch.inf), (40, -torch.inf), (17, torch.nan)]
    ):
        x[row, at] = odd
    x[5:] = torch.tensor([190.0, 1.0, 3e4])[:, None] * 2.0**-149
    weight = packed_weight(format, 32, columns, generator)
    first, *others = (ops.packed_linear(x, ops.prepare(weight)) for ops in _by_instruction_set())
    for other in others:
        torch.testing.assert_close(other, first, rtol=0, atol=0, equal_nan=True)


def test_bits_do_not_depend_on_what_the_caller_does_with_denormal_numbers(generator):
    x = torch.randn(4, 512, generator=generator) * 1e-20
    weight = torch.randn(512, 512, generator=generator) * 1e-19
    expected = CpuOps(1).linear(x, weight)
    ops = [CpuOps(threads) for threads in (1, 2)]
    torch.set_flush_denormal(True)
    try:
        ops += [CpuOps(threads) for threads in (1, 2)]
        products = [one.linear(x, weight) for one in ops]
        flushed = 1e-38 * torch.full((1,), 1e-2)
    finally:
        torch.set_flush_denormal(False)
    assert expected.all() and expected.abs().min() < 1e-38 and not flushed
    assert all(torch.equal(product, expected) for product in products)


def _by_instruction_set():
    try:
        return [CpuOps(1, isa) for isa in ISAS[: load_library().slip_best_isa() + 1]]
    except KernelError:
        pytest.skip("CPU kernels not built")


def test_rows_and_products_of_stored_blocks_match_their_dequantized_values(cpu_ops, generator):
    for format in BLOCK_FORMATS:
        columns = columns_for(format, 64)
        weight = packed_weight(format, 40, columns, generator)
        table = dequantize(format, weight.codes)
        ids = torch.tensor([[0, 39], [17, 3]])
        assert torch.allclose(cpu_ops.packed_rows(cpu_ops.prepare(weight), ids), table[ids], rtol=0, atol=0)
        assert torch.equal(REFERENCE.packed_rows(weight, ids), table[ids])
        x = torch.randn(3, columns, generator=generator)
        product = cpu_ops.packed_linear(x, cpu_ops.prepare(weight))
        assert (product - x @ table.T).norm() < 0.02 * (x @ table.T).norm()


def test_rows_of_zeros_and_strided_rows_are_multiplied(fast_ops, generator):
    for format in FORMATS:
        columns = columns_for(format, 64)
        weight = fast_ops.prepare(packed_weight(format, 32, columns, generator))
        assert torch.equal(fast_ops.packed_linear(torch.zeros(2, columns), weight), torch.zeros(2, 32))
        strided = torch.randn(6, 2 * columns, generator=generator)[::2, :columns]
        assert torch.equal(fast_ops.packed_linear(strided, weight), fast_ops.packed_linear(strided.clone(), weight))
        across = torch.randn(columns, 3, generator=generator).T
        assert torch.equal(fast_ops.packed_linear(across, weight), fast_ops.packed_linear(across.contiguous(), weight))


def test_no_rows_give_no_rows(fast_ops, generator):
    for format in FORMATS:
        columns = columns_for(format, 64)
        weight = fast_ops.prepare(packed_weight(format, 32, columns, generator))
        assert fast_ops.packed_linear(torch.zeros(0, columns), weight).shape == (0, 32)
    assert fast_ops.linear(torch.zeros(0, 64), torch.zeros(8, 64)).shape == (0, 8)


def test_repacking_keeps_the_size(fast_ops, generator):
    for format in FORMATS:
        weight = packed_weight(format, 96, columns_for(format, 128), generator)
        most = 1.03 if format in ("q4_k", "q5_k") else 1.02  # their scales of 6 bits become bytes
        assert fast_ops.prepare(weight).nbytes <= weight.nbytes * most


def test_gradients_and_odd_weights_are_refused(fast_ops):
    weight = torch.nn.Parameter(torch.randn(8, 16))
    with torch.enable_grad(), pytest.raises(KernelError, match="no gradients"):
        fast_ops.linear(torch.randn(2, 16), weight)
    with pytest.raises(KernelError, match="contiguous"):
        fast_ops.linear(torch.randn(2, 8), weight.T)
    with pytest.raises(KernelError, match="columns"):
        fast_ops.linear(torch.randn(2, 15), weight)
