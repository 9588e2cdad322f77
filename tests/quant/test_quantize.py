"""The file-to-file pass: what it writes can be read back as it was meant, whatever the blocks and shards."""

import json

import pytest
import torch
from folders import draft_tensors, write_folder
from safetensors.torch import load_file

from slipstream.checkpoint.reader import CheckpointReader
from slipstream.quant.load import packed_weight, read_scheme
from slipstream.quant.scheme import SCHEMES, dequantize, scheme_named

CASES = [*((name, None, "quark") for name in SCHEMES), ("int4", 32, "quark")]
CASES += [(name, None, "compressed-tensors") for name in ("ptpc_fp8", "fp8", "w8a8_int8", "int4")]
CASES += [("int4", 32, "compressed-tensors")]


def read_back(folder):
    """Return every layer our loader finds quantized, as packed weights, by module."""
    checkpoint = CheckpointReader(folder)
    scheme = read_scheme(checkpoint.config, checkpoint.names(), folder)
    shapes = {name.removesuffix(".weight"): tuple(t.shape) for name, t in draft_tensors().items()}
    return {module: packed_weight(checkpoint, scheme, module, *shapes[module]) for module in scheme.modules}


def all_tensors(folder):
    return {k: v for file in sorted(folder.glob("*.safetensors")) for k, v in load_file(file).items()}


@pytest.mark.parametrize(("name", "group_size", "dialect"), CASES)
def test_what_is_written_reads_back_as_the_scheme_encodes_it(draft, tmp_path, run, name, group_size, dialect):
    run(draft, tmp_path / "out", name, group_size, dialect=dialect)
    scheme, source = scheme_named(name, group_size), draft_tensors()
    found = read_back(tmp_path / "out")
    assert sorted(found) == sorted(n.removesuffix(".weight") for n in source if n.endswith("_proj.weight"))
    for module, packed in found.items():
        weight = source[f"{module}.weight"]
        rounded_scale = group_size or (dialect == "compressed-tensors" and name == "int4")
        scale_dtype = torch.bfloat16 if rounded_scale else torch.float32
        expected = scheme.encode(weight, "best", weight.abs().max().item(), scale_dtype)
        assert packed.format == expected.format
        assert torch.equal(dequantize(packed), dequantize(expected)), module


@pytest.mark.parametrize(("name", "group_size", "dialect"), CASES)
def test_blocks_and_shards_do_not_change_a_bit(draft, tmp_path, run, name, group_size, dialect):
    run(draft, tmp_path / "whole", name, group_size, dialect=dialect)
    sharded = write_folder(tmp_path / "sharded", draft_tensors(), shards=3)
    result = run(sharded, tmp_path / "cut", name, group_size, dialect=dialect, block_elements=1, max_shard_bytes=20_000)
    assert len(list((tmp_path / "cut").glob("model-*.safetensors"))) > 1
    whole, cut = all_tensors(tmp_path / "whole"), all_tensors(tmp_path / "cut")
    assert whole.keys() == cut.keys()
    for tensor_name, tensor in whole.items():
        same = torch.equal(tensor.reshape(-1).view(torch.uint8), cut[tensor_name].reshape(-1).view(torch.uint8))
        assert same and tensor.shape == cut[tensor_name].shape, tensor_name
    CheckpointReader(tmp_path / "cut")  # which checks the index against the files
    assert sum(count.tensors for count in result.after) == len(cut)


def test_everything_else_is_carried_over_and_the_record_says_what_was_done(draft, tmp_path, run):
    (draft / "slipstream.json").write_text(json.dumps({"train": {"steps": 3}}))
    (draft / "pytorch_model.bin").write_bytes(b"stale")
    result = run(draft, tmp_path / "out", "int4")
    out = tmp_path / "out"
    assert sorted(p.name for p in out.iterdir()) == [
        "README.md", "config.json", "model.safetensors", "slipstream.json", "tokenizer.json",
    ]  # fmt: skip
    source, written = draft_tensors(), all_tensors(out)
    for name in ("fc.weight", "lm_head.weight", "embed_tokens.weight", "norm.weight", "d2t"):
        assert torch.equal(source[name], written[name])
    record = json.loads((out / "slipstream.json").read_text())
    assert record["train"] == {"steps": 3}
    assert record["quantize"]["scheme"] == "int4" and record["quantize"]["rounding"] == "best"
    layer = record["quantize"]["layers"]["midlayer.mlp.down_proj"]
    assert 0 < layer["relative_mse_best"] < layer["relative_mse_quark"]
    assert {count.dtype: count.tensors for count in result.after} == {"BF16": 5, "I32": 14, "F32": 7, "I64": 1}
    config = json.loads((out / "config.json").read_text())
    assert config["hidden_size"] == 64 and config["quantization_config"]["export"]["pack_method"] == "order"


def test_a_draft_shipped_as_pickled_weights_is_quantized_too(tmp_path, run):
    folder = write_folder(tmp_path / "draft", draft_tensors())
    (folder / "model.safetensors").unlink()
    torch.save(draft_tensors(), folder / "pytorch_model.bin")
    run(folder, tmp_path / "out")
    run(write_folder(tmp_path / "other", draft_tensors()), tmp_path / "expected")
    ours, expected = all_tensors(tmp_path / "out"), all_tensors(tmp_path / "expected")
    assert ours.keys() == expected.keys()
    assert all(torch.equal(ours[k].float(), expected[k].float()) for k in ours)


def test_the_report_measures_every_row_and_progress_adds_up(draft, tmp_path, run):
    from slipstream.quant.plan import QuantizeOptions, plan_quantize
    from slipstream.quant.quantize import quantize

    plan = plan_quantize(draft, QuantizeOptions(scheme_named("mxfp4"), full_report=True, block_elements=512))
    seen: list[int] = []
    result = quantize(plan, tmp_path / "out", advance=seen.append)
    assert sum(seen) == plan.source_bytes == sum(t.nbytes for t in draft_tensors().values())
    assert all(layer.errors.rows == layer.rows for layer in result.layers)


def test_float32_and_float16_weights_give_what_their_own_rounding_gives(tmp_path, run):
    for dtype in (torch.float32, torch.float16):
        source = write_folder(tmp_path / f"draft-{dtype}", draft_tensors(dtype=dtype))
        run(source, tmp_path / f"out-{dtype}", "int4", 32)
        written = load_file(tmp_path / f"out-{dtype}" / "model.safetensors")
        assert written["midlayer.mlp.up_proj.weight_scale"].dtype == dtype
