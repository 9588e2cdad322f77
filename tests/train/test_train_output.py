import hashlib
import json

import pytest
import torch

from slipstream.checkpoint.reader import open_checkpoint
from slipstream.models.load import load_draft
from slipstream.train.draft.walk import measure
from slipstream.train.run.output import result_record, weights_digest, write_draft
from training import objective_for, random_texts, run_record, tiny_target


@pytest.mark.parametrize("dialect", ["sglang", "vllm", "speculators"])
def test_a_written_draft_loads_back_as_the_draft_that_was_trained(tmp_path, dialect):
    target = tiny_target()
    objective, corpus, _ = objective_for(target, random_texts(20))
    with torch.no_grad():
        for parameter in objective.draft.parameters():
            parameter.copy_(parameter.bfloat16().float())
    results = {"held-out": result_record(measure(objective, corpus))}
    write_draft(tmp_path / "draft", objective.draft, dialect, run_record(results), target.spec.architecture)
    loaded = load_draft(open_checkpoint(tmp_path / "draft"), target, torch.float32)
    assert loaded.spec.feedback == "post_norm" and loaded.spec.feature_norm == "per_layer"
    assert loaded.token_ids_V.equal(objective.draft.token_ids_V)
    mine = dict(objective.draft.named_parameters())
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, mine[name]), name
    kept = json.loads((tmp_path / "draft" / "slipstream.json").read_text())
    assert kept["results"]["held-out"]["chains"]["3"]["acceptance_length"] >= 1.0
    assert "held-out" in (tmp_path / "draft" / "README.md").read_text()


def test_drafts_in_any_kind_of_file_are_told_apart_by_their_weights(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"a")
    (tmp_path / "training_args.bin").write_bytes(b"x")
    assert weights_digest(tmp_path) == hashlib.sha256(b"a").hexdigest()
    (tmp_path / "model.safetensors").write_bytes(b"b")  # what is read where both are there
    assert weights_digest(tmp_path) == hashlib.sha256(b"b").hexdigest()
    assert weights_digest(tmp_path / "pytorch_model.bin") == hashlib.sha256(b"a").hexdigest()
