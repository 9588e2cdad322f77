"""A draft written for llama.cpp is the same draft when it is read back, and what llama.cpp lacks is refused."""

import dataclasses
import json

import gguf
import pytest
import torch
from draft_files import BASE, DRAFT_VOCAB, HEADS, VOCAB, tensors
from safetensors.torch import save_file

from slipstream.checkpoint.config import model_config
from slipstream.checkpoint.draft_gguf import write_gguf_draft
from slipstream.checkpoint.draft_rewrite import rewrite_draft
from slipstream.checkpoint.embedded import embedded_draft
from slipstream.checkpoint.gguf_families import DRAFT, gguf_draft_name
from slipstream.checkpoint.names import canonical_draft_name, canonical_names
from slipstream.checkpoint.reader import open_checkpoint
from slipstream.checkpoint.writer import CheckpointWriter
from slipstream.errors import CheckpointError
from slipstream.models.load import load_draft
from tiny import tiny_target

TARGET = tiny_target()
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
DRAFTS = {
    "as SafeAILab's": ({}, tensors("midlayer")),
    "layers named": ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}}, tensors("midlayer", 1)),
    "a norm before fc, a normed residual": (
        {"norm_before_fc": True, "norm_before_residual": True},
        tensors("layers.0", 2, extra={"input_norm.weight": 3 * TARGET.spec.hidden_size}),
    ),
    "the whole vocabulary, Llama 3's rope": (
        {"draft_vocab_size": VOCAB, "rope_theta": 5e5, "rope_scaling": LLAMA3},
        tensors("midlayer", 3, vocab=VOCAB),
    ),
    "bfloat16": (
        {"dtype": "bfloat16"},
        {n: t.bfloat16() if t.dim() > 1 else t for n, t in tensors("midlayer").items()},
    ),
}


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("target") / "folder"
    with CheckpointWriter(folder) as writer:
        for name, value in TARGET.state_dict().items():
            writer.add(name, value)
        writer.write_json("config.json", model_config(TARGET.spec))
    return folder


def write(folder, config, values):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**BASE, **config}))
    save_file({name: value.contiguous() for name, value in values.items()}, folder / "model.safetensors")
    return open_checkpoint(folder)


@pytest.mark.parametrize("name", DRAFTS)
def test_a_draft_comes_back_from_a_gguf_as_it_was(name, tmp_path, target_folder):
    source = write(tmp_path / "draft", *DRAFTS[name])
    write_gguf_draft(source, target_folder, tmp_path / "draft.gguf")
    drafts = [load_draft(found, TARGET, torch.float32) for found in (source, open_checkpoint(tmp_path / "draft.gguf"))]
    expected, found = (dataclasses.replace(draft.spec, architecture="", dtype="") for draft in drafts)
    assert found == dataclasses.replace(expected, captured_layers=expected.captured_layers or (2, 2, 1))
    assert torch.equal(drafts[0].token_ids_V, drafts[1].token_ids_V)
    for (one, value), (other, read) in zip(*(draft.state_dict().items() for draft in drafts), strict=True):
        assert one == other and torch.equal(value, read), one


def test_names_are_those_llama_cpp_has():
    theirs = {
        name.format(bid=0)
        for key, name in gguf.TENSOR_NAMES.items()
        if key in gguf.MODEL_TENSORS[gguf.MODEL_ARCH.LLAMA]
    } | {"fc", "enc.output_norm", "blk.0.attn_norm_2"}
    for name in canonical_names(tensors("midlayer"), canonical_draft_name):
        if name not in ("d2t", "t2d"):
            assert gguf_draft_name(name).rpartition(".")[0] in theirs


def test_tokens_are_stored_whole_and_rows_as_llama_cpp_rotates_them(tmp_path, target_folder):
    source = write(tmp_path / "draft", *DRAFTS["as SafeAILab's"])
    write_gguf_draft(source, target_folder, tmp_path / "draft.gguf")
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "draft.gguf").tensors}
    offsets = source.tensor("d2t")
    assert stored["d2t"].data.tolist() == (offsets + torch.arange(DRAFT_VOCAB)).tolist()
    theirs = source.tensor("midlayer.self_attn.q_proj.weight").view(HEADS, 2, -1, 2 * TARGET.spec.hidden_size)
    rows = torch.tensor(stored["blk.0.attn_q.weight"].data).view(HEADS, -1, 2, theirs.shape[-1])
    assert torch.equal(rows[:, :, 1], theirs[:, 1])


def test_a_gguf_draft_can_be_written_again_for_another_engine(tmp_path, target_folder):
    write_gguf_draft(write(tmp_path / "draft", *DRAFTS["layers named"]), target_folder, tmp_path / "draft.gguf")
    rewrite_draft(tmp_path / "draft.gguf", "vllm", tmp_path / "vllm")
    assert open_checkpoint(tmp_path / "vllm").config["eagle_aux_hidden_state_layer_ids"] == [2, 3, 4]


def test_what_llama_cpp_does_not_compute_is_refused(tmp_path, target_folder):
    with pytest.raises(CheckpointError, match=r"EAGLE-3\.1's fc_norm.* and a feedback after the final norm"):
        write_gguf_draft(open_checkpoint(embedded_draft()), "embedded", tmp_path / "draft.gguf")
    source = write(tmp_path / "draft", {"sliding_window": 5}, tensors("midlayer"))
    with pytest.raises(CheckpointError, match="a sliding window"):
        write_gguf_draft(source, target_folder, tmp_path / "draft.gguf")
    assert not list(tmp_path.glob("*draft.gguf*"))


def test_a_draft_without_its_layers_is_refused(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "draft.gguf", DRAFT)
    for key in ("block_count", "context_length", "embedding_length", "feed_forward_length", "head_count"):
        getattr(writer, f"add_{key}")(8)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(VOCAB)
    writer.add_uint32(f"{DRAFT}.target_hidden_size", 8)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match=r"'eagle3\.target_layers' is None"):
        open_checkpoint(tmp_path / "draft.gguf")
