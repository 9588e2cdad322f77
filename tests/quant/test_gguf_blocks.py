import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.errors import CheckpointError
from slipstream.quant.gguf_blocks import BLOCK_FORMATS, dequantize


@pytest.mark.parametrize("format", BLOCK_FORMATS)
def test_sizes_are_those_of_the_gguf_package(format):
    stored = BLOCK_FORMATS[format]
    assert (stored.columns, stored.nbytes) == gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[format.upper()]]


@settings(max_examples=60, deadline=None)
@given(format=st.sampled_from(sorted(BLOCK_FORMATS)), seed=st.integers(0, 2**32 - 1))
def test_any_bytes_dequantize_to_the_numbers_the_gguf_package_reads(format, seed):
    rows = np.random.default_rng(seed).integers(0, 256, (8, 3 * BLOCK_FORMATS[format].nbytes), dtype=np.uint8)
    with np.errstate(invalid="ignore"):  # some scales are infinite or no numbers
        expected = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[format.upper()])
    got = dequantize(format, torch.from_numpy(rows)).numpy()
    assert np.array_equal(got, expected, equal_nan=True)


def test_rows_that_are_no_whole_blocks_are_refused():
    with pytest.raises(CheckpointError, match=r"blocks of 210 bytes; these are torch\.uint8 rows of 211"):
        dequantize("q6_k", torch.zeros(2, 211, dtype=torch.uint8))
