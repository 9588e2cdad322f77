"""GGUF files of every family give the logits of the folder they were made of, from their stored blocks."""

import pytest
import torch
from gguf import GGMLQuantizationType as Quant

from slipstream.checkpoint.reader import open_checkpoint
from slipstream.errors import CheckpointError
from slipstream.kernels import select
from slipstream.models.load import load_target
from slipstream.models.moe import Experts
from tiny_families import some_tokens
from tiny_gguf import FOLDERS, write_gguf
from tiny_moe import passes

CPU = torch.device("cpu")
LENGTH = 24


def logits(path, ops=None):
    target = load_target(open_checkpoint(path), torch.float32, CPU, ops=ops)
    return target, passes(target, some_tokens(LENGTH), [LENGTH], True, ops or "reference")[0]


@pytest.mark.parametrize("kind", FOLDERS)
def test_a_gguf_gives_the_folders_logits(kind, tmp_path):
    folder = FOLDERS[kind](tmp_path / "folder")
    expected, expected_TV = logits(folder)
    found, found_TV = logits(write_gguf(tmp_path / "model.gguf", kind, folder))
    assert found.spec.moe == expected.spec.moe
    assert found.spec.mla == expected.spec.mla
    assert [block.window for block in found.spec.blocks] == [block.window for block in expected.spec.blocks]
    torch.testing.assert_close(found_TV, expected_TV, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("kind", "experts"),
    [("qwen3moe", Quant.Q8_0), ("gpt-oss", Quant.MXFP4), ("glm4moe", Quant.Q4_0), ("deepseek2", Quant.Q8_0)],
)
def test_experts_are_computed_from_their_stored_blocks(kind, experts, tmp_path):
    path = write_gguf(tmp_path / "model.gguf", kind, FOLDERS[kind](tmp_path / "folder"), experts)
    _, expected_TV = logits(path)  # blocks expanded
    kept, found_TV = logits(path, select(CPU, "reference"))
    _, fast_TV = logits(path, select(CPU))
    torch.testing.assert_close(fast_TV, found_TV, atol=1e-4, rtol=1e-4)
    formats = {part.packed[0].format for part in kept.modules() if isinstance(part, Experts)}
    assert formats == {experts.name.lower()}
    error_T = (found_TV - expected_TV).norm(dim=1) / expected_TV.norm(dim=1)
    # MXFP4's weights are only decoded; the others round inputs to codes as well, by which a token may change an expert.
    assert error_T.max() < 1e-4 if kind == "gpt-oss" else error_T.median() < 0.05


def test_a_gguf_whose_experts_are_chosen_by_softmax_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("gguf.GGUFWriter.add_expert_gating_func", lambda writer, value: None)
    path = write_gguf(tmp_path / "model.gguf", "deepseek2", FOLDERS["deepseek2"](tmp_path / "folder"))
    with pytest.raises(CheckpointError, match="gating function 0"):
        open_checkpoint(path)
