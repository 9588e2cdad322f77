"""The model card of a draft, written from its record and nothing else."""

from typing import Any

from slipstream.checkpoint.spec import DraftSpec


def model_card(record: dict[str, Any], spec: DraftSpec) -> str:
    """Return the card as Markdown."""
    corpus, train, seconds = record["corpus"], record["recipe"]["train"], record["seconds"]
    last = record["history"][-1] if record["history"] else {}
    lines = [
        f"# EAGLE-3 draft for {record['target']}",
        "",
        "Trained by `slipstream train`; `slipstream.json` beside this file holds the whole record.",
        "",
        "## Model",
        "",
        f"{spec.num_layers} block, width {spec.hidden_size}, {spec.num_heads} / {spec.num_kv_heads} heads, "
        f"vocabulary {spec.draft_vocab_size} of {spec.vocab_size} ({record['coverage']:.2%} of answer tokens). "
        f"Captured layers (blocks applied): {', '.join(map(str, spec.captured_layers or ()))}. "
        f"Feature norm {spec.feature_norm}, feedback {spec.feedback}.",
        "",
        "## Data",
        "",
        f"Written by the target itself: {corpus['texts']:,} conversations, {corpus['answer_tokens']:,} answer tokens. "
        f"Prompt files: {', '.join(record['recipe']['files']['prompts']) or 'none'}; the other user turns were sampled "
        f"from the target. The evaluation prompts below were excluded by normalised text.",
        "",
        "## Training",
        "",
        f"{last.get('step', 0):,} steps of {train['rows_per_step']} rows of {train['row_length']} tokens, "
        f"{train['unroll']} unrolled steps weighted {train['decay']}^j, AdamW at {train['lr']:g} with a cosine. "
        f"{record['hardware']}; " + ", ".join(f"{name} {value / 60:.1f} min" for name, value in seconds.items()) + ".",
        "",
        "## Results",
        "",
        "Acceptance length (tokens per target pass, the target's own included), greedy, chain; in brackets without "
        "the answers that loop.",
        "",
        "| prompts | texts | looping | 3 drafted | 6 drafted |",
        "|---|---|---|---|---|",
    ]
    for name, result in record["results"].items():
        cells = [
            f"{chain['acceptance_length']:.2f} ({chain['acceptance_length_without_loops']:.2f})"
            for chain in (result["chains"].get("3"), result["chains"].get("6"))
            if chain
        ]
        lines.append(f"| {name} | {result['texts']} | {result['loop_share']:.1%} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"
