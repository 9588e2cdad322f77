"""The draft folder: weights in the dialect asked for, config.json, slipstream.json with the whole record, a card."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from slipstream.checkpoint.config import DraftDialect, DraftOrigin, draft_config
from slipstream.checkpoint.names import draft_name
from slipstream.checkpoint.writer import CheckpointWriter
from slipstream.models.accounting import places
from slipstream.models.eagle3 import Eagle3Draft
from slipstream.train.card import model_card
from slipstream.train.walk import Measured

SHARD_BYTES = 15_000_000


@dataclass(frozen=True)
class RunRecord:
    """What slipstream.json says of how a draft came about; plain values only, hence Any.

    Args:
        seconds: by phase.
        started_from, averaged_with: digests of other drafts' weights; `records` has what those drafts' own say.
        stored_features: digest of the manifest of the features trained from; None with the target in the loop.
        precision: what the target ran in and the draft's activations were in, by "target" and "draft".
    """

    target: str
    target_digest: str
    recipe: dict[str, Any]
    corpus: dict[str, Any]
    coverage: float
    history: list[dict[str, Any]]
    results: dict[str, dict[str, Any]]
    versions: dict[str, str]
    hardware: str
    seconds: dict[str, float] = field(default_factory=dict)
    measured_by: str = "the exact walk over greedy texts"
    started_from: str | None = None
    averaged_with: str | None = None
    records: dict[str, dict[str, Any]] = field(default_factory=dict)
    stored_features: str | None = None
    precision: dict[str, str] = field(default_factory=dict)


def write_draft(folder: Path, draft: Eagle3Draft, dialect: DraftDialect, record: RunRecord) -> None:
    """Write the folder, whole or not at all; an earlier one is replaced."""
    origin = DraftOrigin(target=record.target)
    spec = draft.spec
    with CheckpointWriter(folder, SHARD_BYTES, overwrite=True) as writer:
        for name, place in sorted(places(draft).items()):
            if name.startswith("embed_tokens."):
                continue
            rows = getattr(place.module, place.parameter)[place.start : place.start + place.shape[0]]
            writer.add(draft_name(name, dialect), rows.to(torch.bfloat16))
        if spec.draft_vocab_size != spec.vocab_size:
            token_ids = draft.token_ids_V.cpu()
            spoken = torch.zeros(spec.vocab_size, dtype=torch.bool)
            spoken[token_ids] = True
            writer.add("d2t", token_ids - torch.arange(len(token_ids)))
            writer.add("t2d", spoken)
        writer.write_json("config.json", draft_config(spec, dialect, origin))
        content = json.loads(json.dumps(record.__dict__))
        writer.write_json("slipstream.json", content)
        writer.write_text("README.md", model_card(record.__dict__, spec))


@torch.no_grad()
def round_weights(draft: Eagle3Draft) -> None:
    """Round the draft's weights, in place, to what a folder holds of them."""
    for name, parameter in draft.named_parameters():
        if not name.startswith("embed_tokens."):
            parameter.copy_(parameter.bfloat16())


def result_record(measured: Measured) -> dict[str, Any]:
    """Return an evaluation as plain values."""
    return {
        "texts": measured.num_texts,
        "loop_share": round(measured.loop_share, 4),
        "chains": {
            str(chain): {
                "acceptance_length": round(walk.acceptance_length, 4),
                "rates": [round(rate, 4) for rate in walk.rates],
                "acceptance_length_without_loops": round(measured.without_loops[chain].acceptance_length, 4),
            }
            for chain, walk in measured.walks.items()
        },
    }
