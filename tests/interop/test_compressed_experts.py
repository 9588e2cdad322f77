"""What the compressed-tensors library itself packs, slipstream loads as stored and reads to the same numbers."""

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).parents[1] / "models"))

from test_moe_against_transformers import passes

from slipstream.checkpoint.reader import open_checkpoint
from slipstream.models.load import load_target
from slipstream.quant.scheme import dequantize
from tiny_moe import VOCAB, as_kimi, deepseek, save, tensors_of, write

pytestmark = pytest.mark.interop
CPU = torch.device("cpu")


@pytest.mark.parametrize("wrapped", [False, True], ids=["DeepSeek-V3", "Kimi-K2.5"])
def test_experts_packed_by_the_library_load_as_stored_and_mean_the_same(readers, tmp_path, wrapped):
    source = save(deepseek(), tmp_path / "source")
    packed_folder = tmp_path / "work" / "packed"
    assert readers("compress_experts.py", source, packed_folder)["modules"] == 3 * 3 * 12
    truth = {name: value.float() for name, value in load_file(tmp_path / "work" / "truth.safetensors").items()}
    config = json.loads((source / "config.json").read_text())
    decoded = write(tmp_path / "decoded", config, {**tensors_of(source), **truth})
    folder = as_kimi(packed_folder, tmp_path / "kimi") if wrapped else packed_folder
    model = load_target(open_checkpoint(folder), torch.float32, CPU)
    for index, layer in enumerate(model.layers[1:], start=1):
        gate_up, down = layer.mlp.experts.packed
        assert gate_up.format == down.format == "int4_group"
        for expert in range(12):
            name = f"model.layers.{index}.mlp.experts.{expert}"
            joined = torch.cat([truth[f"{name}.{part}_proj.weight"] for part in ("gate", "up")])
            # The library multiplies in BF16 and rounds; we multiply in float32.
            torch.testing.assert_close(dequantize(gate_up.expert(expert)), joined, rtol=2**-8, atol=0)
            torch.testing.assert_close(
                dequantize(down.expert(expert)), truth[f"{name}.down_proj.weight"], rtol=2**-8, atol=0
            )
    tokens_T = torch.randint(0, VOCAB, (24,), generator=torch.Generator().manual_seed(3))
    expected, _ = passes(load_target(open_checkpoint(decoded), torch.float32, CPU), tokens_T, [24], prompt=True)
    got, _ = passes(model, tokens_T, [24], prompt=True)
    assert (got - expected).norm() / expected.norm() < 0.02
