"""What people see of a draft: its model card, from the record and nothing else, and the curves of its training."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.checkpoint.spec import DraftSpec
from slipstream.train.data.corpus import disk_error

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Record = dict[str, Any]  # a slipstream.json, which may be another version's


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
        parts.append(f"The weights are the plain average of the trained ones and those of {other}.")
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
