"""Triton kernels with tiles so small that short inputs meet every seam, and random inputs on the device at hand."""

import dataclasses
import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import torch
from cpu_samples import causal, filled_cache

from interpreted import DEVICE
from slipstream.kernels import AttentionBatch, KvLayer
from slipstream.kernels.reference.ops import ReferenceOps
from slipstream.kernels.triton.ops import TritonOps
from slipstream.kernels.triton.tuning import AttentionConfig, Tuning, architecture_of, read_tuning
from slipstream.quant.formats import fp8, int4, int8, mxfp4
from slipstream.quant.packed import PackedWeight
from slipstream.quant.scheme import scheme_named

FORMATS = (
    "fp8_per_channel", "w8a8_int8", "w4a8", "int4_per_channel", "int4_group", "int4_fp8", "mxfp4", "mxfp4_act",
)  # fmt: skip
REFERENCE = ReferenceOps(DEVICE)


@functools.cache
def compiled_by(script: str, *arguments: str) -> list[dict]:
    """Return what a script beside this file prints of kernels it compiles, where no interpreter was chosen."""
    here = Path(__file__)
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    source = str(here.resolve().parents[2] / "src")
    environment["PYTHONPATH"] = os.pathsep.join([source, environment.get("PYTHONPATH", "")])
    command = [sys.executable, str(here.with_name(script)), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def small_tuning(**changes) -> Tuning:
    """Keys in splits of 32, products in up to 8 splits, and one program for a request of 9 queries or more."""
    shipped = read_tuning(architecture_of(DEVICE))
    attention = AttentionConfig(split=32, block=16, rows_wide=32, serial_from=9, num_warps=4, num_stages=2)
    return dataclasses.replace(shipped, **{"attention": attention, "programs": 8, "bytes_per_step": 64, **changes})


def triton_ops(**changes) -> TritonOps:
    return TritonOps(DEVICE, small_tuning(**changes))


def numbers(*shape, generator, dtype=torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=generator).to(dtype).to(DEVICE)


def quantized(format: str, rows: int, columns: int, generator) -> PackedWeight:
    weight = torch.randn(rows, columns, generator=generator)
    if format == "int4_fp8":
        return scheme_named(format).encode(weight, "best", float(weight.abs().max())).to(DEVICE)
    if format.startswith("mxfp4"):
        codes, scale = mxfp4.encode(weight, "best")
    elif format == "w8a8_int8":
        codes, scale = int8.encode(weight, "best")
    elif format == "fp8_per_channel":
        codes, scale = fp8.encode_per_channel(weight, "best")
    elif format == "int4_group":
        codes, scale = int4.encode_grouped(weight, 32, torch.bfloat16, "best")
    else:
        codes, scale = int4.encode_per_channel(weight, "best")
    return PackedWeight(format, rows, columns, codes, {"scale": scale}).to(DEVICE)


def batch_to_device(batch: AttentionBatch) -> AttentionBatch:
    tensors = {f.name: getattr(batch, f.name) for f in dataclasses.fields(batch)}
    return AttentionBatch(**{n: v.to(DEVICE) if isinstance(v, torch.Tensor) else v for n, v in tensors.items()})


def layer_to_device(layer: KvLayer, dtype: torch.dtype = torch.float32) -> KvLayer:
    return KvLayer(layer.keys_SGd.to(DEVICE, dtype), layer.values_SGd.to(DEVICE, dtype))


def attention_sample(counts, before, page_size, shape, generator, dtype=torch.float32):
    """Return queries, a filled cache and the batch that describes them, on the device at hand."""
    heads, groups, width = shape
    batch = causal(counts, before, page_size, generator)
    keys, values = ([torch.randn(n, groups, width, generator=generator) for n in batch.kv_lens_R] for _ in range(2))
    layer = layer_to_device(filled_cache(batch, keys, values), dtype)
    return numbers(sum(counts), heads, width, generator=generator, dtype=dtype), layer, batch_to_device(batch)
