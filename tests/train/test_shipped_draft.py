"""The draft in the package: small enough, described in full, and loadable for the target it names."""

import json

import pytest
import torch

from slipstream.checkpoint.embedded import embedded_draft
from slipstream.checkpoint.reader import open_checkpoint
from slipstream.models.load import load_draft, load_target
from slipstream.train.run.output import RunRecord, stages, weights_digest


@pytest.fixture
def folder():
    shipped = embedded_draft()
    assert shipped is not None
    return shipped


def refuse(name):
    raise ValueError(f"{name} is not JSON")


def test_it_is_below_25_mb_in_files_below_16_mb(folder):
    sizes = [path.stat().st_size for path in folder.iterdir()]
    assert sum(sizes) < 25_000_000 and max(sizes) < 16_000_000


def test_its_record_is_whole(folder):
    record = RunRecord(**json.loads((folder / "slipstream.json").read_text(), parse_constant=refuse))
    first, second, *_, last = stages(record.__dict__)
    assert len(stages(record.__dict__)) == 8 and last["precision"]["target"] == "bfloat16"
    assert first["coverage"] == pytest.approx(0.9802, abs=1e-4)
    assert second["started_from"] == second["averaged_with"] in record.records
    assert last["started_from"] == last["averaged_with"] in record.records and last["averaged_share"] == 0.5
    assert last["results"].keys() == {"gsm8k", "instructions", "mt_bench", "articles", "passages"}
    assert weights_digest(folder) in (folder / "README.md").read_text()


def test_its_card_shows_the_recorded_results(folder):
    card = (folder / "README.md").read_text()
    results = json.loads((folder / "slipstream.json").read_text())["results"]
    for result in results.values():
        for chain in ("3", "6"):
            assert f"{result['chains'][chain]['acceptance_length']:.3f}" in card


@pytest.mark.embedded
def test_it_loads_for_the_embedded_target(folder, embedded_folder):
    target = load_target(open_checkpoint(embedded_folder), torch.float32, torch.device("cpu"))
    draft = load_draft(open_checkpoint(folder), target, torch.float32)
    assert draft.spec.captured_layers == (2, 15, 27)
    assert set(target.spec.eos_token_ids) <= set(draft.token_ids_V.tolist())
