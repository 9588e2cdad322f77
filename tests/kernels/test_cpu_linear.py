import pytest
import torch
from cpu_samples import FORMATS, integer_product, packed_weight

from slipstream.errors import KernelError
from slipstream.kernels.cpu.library import ISAS, load_library
from slipstream.kernels.cpu.ops import CpuOps
from slipstream.kernels.reference.ops import ReferenceOps
from slipstream.quant.gguf_blocks import BLOCK_BYTES, dequantize

REFERENCE = ReferenceOps(torch.device("cpu"))
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def reference_product(x, weight):
    return integer_product(x, weight) if "scale" in weight.scales else REFERENCE.packed_linear(x, weight)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("shape", [(16, 32), (33, 64), (100, 96), (7, 160)])
def test_packed_products_match_the_reference(cpu_ops, generator, format, shape):
    weight = packed_weight(format, *shape, generator)
    prepared = cpu_ops.prepare(weight)
    bias = torch.randn(shape[0], generator=generator)
    for rows in (1, 3, 9, 40):
        x = torch.randn(rows, shape[1], generator=generator)
        expected = reference_product(x, weight) + bias
        assert torch.allclose(cpu_ops.packed_linear(x, prepared, bias), expected, rtol=1e-5, atol=1e-4)


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
    x = torch.randn(64, 192, generator=generator)
    weight = packed_weight(kind, 72, 192, generator) if isinstance(kind, str) else None
    dense = torch.randn(72, 192, generator=generator).to(torch.float32 if weight else kind)

    def product(ops, rows):
        return ops.packed_linear(rows, ops.prepare(weight)) if weight else ops.linear(rows, dense)

    whole = product(CpuOps(1, isas[-1]), x)
    for isa in isas:
        for threads in (1, 2):
            ops = CpuOps(threads, isa)
            for rows in range(1, 65, 1 if isa == isas[-1] else 9):
                assert torch.equal(product(ops, x[:rows]), whole[:rows]), (isa, threads, rows)
            assert torch.equal(product(ops, x[17:18]), whole[17:18])


def test_rows_and_products_of_stored_blocks_match_their_dequantized_values(cpu_ops, generator):
    for format in BLOCK_BYTES:
        weight = packed_weight(format, 40, 64, generator)
        table = dequantize(format, weight.codes)
        ids = torch.tensor([[0, 39], [17, 3]])
        assert torch.allclose(cpu_ops.packed_rows(cpu_ops.prepare(weight), ids), table[ids], rtol=1e-6, atol=0)
        assert torch.equal(REFERENCE.packed_rows(weight, ids), table[ids])
        x = torch.randn(3, 64, generator=generator)
        product = cpu_ops.packed_linear(x, cpu_ops.prepare(weight))
        assert (product - x @ table.T).norm() < 0.02 * (x @ table.T).norm()


def test_rows_of_zeros_and_strided_rows_are_multiplied(fast_ops, generator):
    for format in FORMATS:
        weight = fast_ops.prepare(packed_weight(format, 32, 64, generator))
        assert torch.equal(fast_ops.packed_linear(torch.zeros(2, 64), weight), torch.zeros(2, 32))
        wide = torch.randn(6, 128, generator=generator)
        assert torch.equal(
            fast_ops.packed_linear(wide[::2, :64], weight), fast_ops.packed_linear(wide[::2, :64].clone(), weight)
        )
        across = torch.randn(64, 3, generator=generator).T
        assert torch.equal(fast_ops.packed_linear(across, weight), fast_ops.packed_linear(across.contiguous(), weight))


def test_no_rows_give_no_rows(fast_ops, generator):
    weight = fast_ops.prepare(packed_weight("q4_1", 32, 64, generator))
    assert fast_ops.packed_linear(torch.zeros(0, 64), weight).shape == (0, 32)
    assert fast_ops.linear(torch.zeros(0, 64), torch.zeros(8, 64)).shape == (0, 8)


def test_repacking_keeps_the_size(fast_ops, generator):
    for format in FORMATS:
        weight = packed_weight(format, 96, 128, generator)
        assert fast_ops.prepare(weight).nbytes <= weight.nbytes * 1.02


def test_gradients_and_odd_weights_are_refused(fast_ops):
    weight = torch.nn.Parameter(torch.randn(8, 16))
    with torch.enable_grad(), pytest.raises(KernelError, match="no gradients"):
        fast_ops.linear(torch.randn(2, 16), weight)
    with pytest.raises(KernelError, match="contiguous"):
        fast_ops.linear(torch.randn(2, 8), weight.T)
    with pytest.raises(KernelError, match="columns"):
        fast_ops.linear(torch.randn(2, 15), weight)
