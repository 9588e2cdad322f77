"""A small draft folder, and a way to quantize it."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from folders import draft_tensors, write_folder

from slipstream.quant.plan import QuantizeOptions, plan_quantize
from slipstream.quant.quantize import quantize
from slipstream.quant.scheme import scheme_named


@pytest.fixture
def draft(tmp_path):
    return write_folder(tmp_path / "draft", draft_tensors())


@pytest.fixture
def run():
    def quantize_folder(source, out, scheme="ptpc_fp8", group_size=None, overwrite=False, **options):
        plan = plan_quantize(source, QuantizeOptions(scheme_named(scheme, group_size), **options))
        return quantize(plan, out, overwrite=overwrite)

    return quantize_folder
