"""What a run leaves: the draft folder (weights, config.json, the whole record), its model card and its curves."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from slipstream.checkpoint.config import DraftDialect, DraftOrigin, draft_config
from slipstream.checkpoint.draft_config import draft_spec
from slipstream.checkpoint.names import draft_name
from slipstream.checkpoint.reader import open_checkpoint
from slipstream.checkpoint.spec import DraftSpec
from slipstream.checkpoint.writer import CheckpointWriter
from slipstream.errors import ConfigError, TrainingError
from slipstream.models.accounting import places
from slipstream.models.eagle3 import Eagle3Draft
from slipstream.train.data.corpus import disk_error
from slipstream.train.draft.walk import Measured

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_CHUNK_BYTES = 1 << 22
Record = dict[str, Any]  # a slipstream.json, which may be another version's


@dataclass(frozen=True)
class Lineage:
    """Digests of the drafts behind a draft; `records` holds what is known of each, by digest."""

    started_from: str | None = None
    averaged_with: str | None = None
    averaged_share: float = 0.5
    records: dict[str, Record] = field(default_factory=dict)

    @staticmethod
    def read(started_from: Path | None, averaged_with: Path | None, averaged_share: float = 0.5) -> "Lineage":
        """Take down what the folders say of themselves."""
        records: dict[str, Record] = {}
        digests = [None if folder is None else _take(folder, records) for folder in (started_from, averaged_with)]
        return Lineage(digests[0], digests[1], averaged_share, records)


def _take(folder: Path, records: dict[str, Record]) -> str:
    """Add a folder's record, and those it carries, under the digest of its weights."""
    check_trainable(folder)  # said now, and not after the data
    digest = weights_digest(folder)
    path = folder / "slipstream.json"
    if path.is_file():
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise TrainingError(f"{path}: cannot be read ({error}).") from error
        records.update(content.pop("records", {}))
        records[digest] = content
    return digest


def check_trainable(folder: Path) -> None:
    """Raise unless a folder holds a draft that training goes on from."""
    if draft_spec(open_checkpoint(folder).config, folder, None).mask_token_id is not None:
        raise TrainingError(
            f"{folder}: is a P-EAGLE draft, which drafts in one pass from masks; slipstream serves it, and trains "
            "drafts that go from token to token. Start from one of those, or from nothing."
        )


def weights_digest(folder: Path) -> str:
    """Return the SHA-256 of a folder's weight files (or of the one file that it is), in the order of their names."""
    digest = hashlib.sha256()
    files = [folder] if folder.is_file() else [*folder.glob("*.safetensors")] or [*folder.glob("pytorch_model*.bin")]
    for path in sorted(files):
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                digest.update(chunk)
    return digest.hexdigest()


SHARD_BYTES = 15_000_000


@dataclass(frozen=True)
class RunRecord:
    """What slipstream.json says of how a draft came about; plain values only, hence Any.

    Args:
        seconds: by phase.
        started_from, averaged_with: digests of other drafts' weights; `records` has what those drafts' own say.
        averaged_share: the trained weights' share of that average.
        stored_features: digest of the manifest of the features trained from; None with the target in the loop.
        before: results of the draft it was started from, on the same texts.
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
    averaged_share: float = 0.5
    records: dict[str, dict[str, Any]] = field(default_factory=dict)
    stored_features: str | None = None
    precision: dict[str, str] = field(default_factory=dict)
    before: dict[str, dict[str, Any]] = field(default_factory=dict)


def write_draft(
    folder: Path, draft: Eagle3Draft, dialect: DraftDialect, record: RunRecord, architecture: str | None = None
) -> None:
    """Write the folder, whole or not at all; an earlier one is replaced. The `architecture` is the target's."""
    with CheckpointWriter(folder, SHARD_BYTES, overwrite=True) as writer:
        add_draft(writer, draft, dialect, record.target, architecture)
        content = json.loads(json.dumps(record.__dict__))
        writer.write_json("slipstream.json", content)
        writer.write_text("README.md", model_card(record.__dict__, draft.spec))


def add_draft(
    writer: CheckpointWriter, draft: Eagle3Draft, dialect: DraftDialect, target: str, architecture: str | None = None
) -> None:
    """Write what readers of a dialect need: weights in bfloat16, the vocabulary, config.json."""
    spec = draft.spec
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
    writer.write_json("config.json", draft_config(spec, dialect, DraftOrigin(target, architecture)))


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
        "by_length": {
            name: {str(chain): round(walk.acceptance_length, 4) for chain, walk in walks.items()}
            for name, walks in measured.by_length.items()
        },
    }


@torch.no_grad()
def average_with(draft: Eagle3Draft, other: Eagle3Draft, share: float) -> None:
    """Make the draft its own weights by `share` and another one's by the rest, in place; shape and vocabulary agree.

    Worth trying when one was trained on from the other: weights that were never close average to nothing useful. The
    draft's weights are first rounded to bfloat16, as a folder would hold them, so that the result does not depend on
    whether it was written and read back in between.
    """
    mine, others = _weights(draft), _weights(other)
    alike = _wiring(draft) == _wiring(other) and draft.token_ids_V.equal(other.token_ids_V)
    if not alike or {name: p.shape for name, p in mine.items()} != {name: p.shape for name, p in others.items()}:
        raise ConfigError(
            "The two drafts differ in shape or vocabulary, so their weights do not correspond. Average a draft with "
            "the one it was trained on from (--init-from), or with another trained on from that."
        )
    mix(draft, other, share)


@torch.no_grad()
def mix(draft: Eagle3Draft, other: Eagle3Draft, share: float) -> None:
    """Make the draft, rounded, its own weights by `share` and by the rest those of another one of the same shape, in
    place; rows of tokens that only one of them knows stay.
    """
    round_weights(draft)
    row_of = {token: row for row, token in enumerate(other.token_ids_V.tolist())}
    pairs = [(row, row_of[token]) for row, token in enumerate(draft.token_ids_V.tolist()) if token in row_of]
    rows, other_rows = torch.tensor(pairs, device=draft.token_ids_V.device).T
    others = _weights(other)
    for name, parameter in _weights(draft).items():
        theirs = others[name].float()
        if name.startswith("lm_head."):
            parameter[rows] = (share * parameter[rows].float() + (1 - share) * theirs[other_rows]).to(parameter)
        else:
            parameter.copy_(share * parameter.float() + (1 - share) * theirs)


def _weights(draft: Eagle3Draft) -> dict[str, torch.nn.Parameter]:
    """Return the draft's own weights; the embedding is the target's."""
    return {name: p for name, p in draft.named_parameters() if not name.startswith("embed_tokens.")}


def _wiring(draft: Eagle3Draft) -> tuple[object, ...]:
    """Return what weights of equal shapes may still disagree on."""
    spec = draft.spec
    return spec.captured_layers, spec.num_heads, spec.feature_norm, spec.feedback, spec.residual, spec.rope


def stages(record: Record) -> list[Record]:
    """Return the records of a draft's training, first stage first, its own last."""
    earlier = record.get("records", {}).get(record.get("started_from"))
    return [*(stages({**earlier, "records": record["records"]}) if earlier else []), record]


def model_card(record: Record, spec: DraftSpec) -> str:
    """Return the card as Markdown."""
    run = stages(record)
    parts = [
        f"# EAGLE-3 draft for {record['target']}",
        "Trained by `slipstream train`; `slipstream.json` beside this file holds the whole record.",
        "## Model",
        f"{spec.num_layers} block, width {spec.hidden_size}, {spec.num_heads} / {spec.num_kv_heads} heads, "
        f"vocabulary {spec.draft_vocab_size} of {spec.vocab_size} ({_coverage(run)} of answer tokens). "
        f"Captured layers (blocks applied): {', '.join(map(str, spec.captured_layers or ()))}. "
        f"Feature norm {spec.feature_norm}, feedback {spec.feedback}.",
        "## Data",
        "Written by the target itself. The evaluation prompts below were excluded by normalised text.",
        _listed([_data(stage) for stage in run]),
        "## Training",
        _listed([_training(stage) for stage in run]),
    ]
    if record.get("averaged_with"):
        earlier = record["averaged_with"] == record.get("started_from")
        other = "the draft it started from" if earlier else f"another draft (weights {record['averaged_with'][:16]})"
        parts.append(
            f"The weights are an average: {record.get('averaged_share', 0.5):.0%} the trained ones, the rest {other}."
        )
    parts += [
        "## Results",
        f"Acceptance length (tokens per target pass, the target's own included), greedy, chain, measured by "
        f"{record['measured_by']}; in brackets without the answers that loop.",
        _results(record["results"]),
    ]
    return "\n\n".join(parts) + "\n"


def _coverage(run: list[Record]) -> str:
    """Name the share for the data that the vocabulary was chosen on."""
    return f"{run[0]['coverage']:.2%}"


def _listed(lines: list[str]) -> str:
    return lines[0] if len(lines) == 1 else "\n".join(f"{i}. {line}" for i, line in enumerate(lines, 1))


def _data(stage: Record) -> str:
    corpus, files, mix = stage["corpus"], stage["recipe"]["files"], stage["recipe"]["data"]
    tasks = f", after tasks of {', '.join(files['examples'])} ({mix['tasks']:.0%})" if mix.get("tasks") else ""
    documents = (
        f", tasks on documents of {', '.join(files['documents'])} ({mix['documents']:.0%})"
        if mix.get("documents")
        else ""
    )
    passages = f", tasks on passages of its answers ({mix['passages']:.0%})" if mix.get("passages") else ""
    return (
        f"{corpus['texts']:,} conversations, {corpus['answer_tokens']:,} answer tokens; user turns sampled from the "
        f"target freely ({mix['magpie']:.0%}) or after examples of maths questions ({mix['maths']:.0%}){tasks}"
        f"{passages}{documents}, the rest prompts of {', '.join(files['prompts']) or 'no files'}."
    )


def _training(stage: Record) -> str:
    train, last = stage["recipe"]["train"], stage["history"][-1] if stage["history"] else {}
    step, total = last.get("step", 0), last.get("total_steps", 0)
    taken = f"{step:,} steps" if step >= total else f"{step:,} steps of {total:,} planned (the cosine not finished)"
    times = ", ".join(f"{name} {value / 60:.1f} min" for name, value in stage["seconds"].items())
    optimizer = "Muon (AdamW for head and norms)" if train.get("optimizer") == "muon" else "AdamW"
    precision = f"the target in {stage['precision']['target']}, " if stage.get("precision") else ""
    labels = f"labels {train['hard_share']:.0%} the best token alone, " if train.get("hard_share") else ""
    return (
        f"{taken} of {train['rows_per_step']} rows of {train['row_length']} tokens, {train['unroll']} unrolled steps "
        f"weighted {train['decay']}^j, {precision}{labels}{optimizer} at {train['lr']:g} with a cosine. "
        f"{stage['hardware']}; {times}."
    )


def _results(results: dict[str, dict[str, Any]]) -> str:
    if not results:
        return "None: the recipe names no evaluation set."
    chains = sorted({int(chain) for result in results.values() for chain in result["chains"]})
    rows = [
        " | ".join(["prompts", "texts", "looping", *(f"{chain} drafted" for chain in chains)]),
        " | ".join(["---"] * (3 + len(chains))),
    ]
    for name, result in results.items():
        found = [result["chains"].get(str(chain)) for chain in chains]
        cells = [
            f"{chain['acceptance_length']:.3f} ({chain['acceptance_length_without_loops']:.3f})" if chain else ""
            for chain in found
        ]
        rows.append(" | ".join([name, str(result["texts"]), f"{result['loop_share']:.1%}", *cells]))
    table = "\n".join(f"| {row} |" for row in rows)
    lengths = [
        f"{name}, by the prompt's length in tokens: "
        + "; ".join(
            f"{length} {' / '.join(f'{value:.3f}' for value in chains.values())}" for length, chains in of.items()
        )
        for name, result in results.items()
        if len(of := result.get("by_length", {})) > 1
    ]
    return "\n\n".join([table, *lengths])


def draw_curves(history: Sequence[dict[str, Any]], path: Path) -> None:  # records, hence Any
    """Write a PNG of a run's history."""
    from matplotlib.figure import Figure  # an extra, which nothing else of training needs

    figure = Figure(figsize=(10, 3.2), layout="constrained")
    loss, accuracy, acceptance = figure.subplots(1, 3)
    steps = [entry["step"] for entry in history]
    loss.plot(steps, [entry["loss"] for entry in history], color="black")
    loss.set_title("loss (sum over positions)")
    for position in range(len(history[0]["accuracy"]) if history else 0):
        accuracy.plot(steps, [entry["accuracy"][position] for entry in history], label=f"position {position + 1}")
    accuracy.set_title("agreement with the target")
    measured = [entry for entry in history if entry["acceptance"]]
    for name in measured[0]["acceptance"] if measured else ():
        values = [entry["acceptance"][name] for entry in measured]
        acceptance.plot([entry["step"] for entry in measured], values, marker="o", label=name)
    acceptance.set_title("acceptance length")
    for axes in (loss, accuracy, acceptance):
        _finish(axes)
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        figure.savefig(temporary, format="png", dpi=110)
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise disk_error(path, error) from error


def _finish(axes: "Axes") -> None:
    axes.set_xlabel("step")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, fontsize=8)
