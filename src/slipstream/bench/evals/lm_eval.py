"""Runs GSM8K through lm-eval itself, in whatever environment has it, and reads its samples back."""

import json
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from slipstream.bench.evals.gsm8k import EvalError, load_data
from slipstream.records.evals import Gsm8kItem

TASK = "gsm8k_local"


@dataclass(frozen=True)
class LmEvalRun:
    """What lm-eval is told."""

    url: str
    model: str
    data: Path
    num_shots: int
    max_tokens: int
    chat: bool
    limit: int | None = None
    concurrency: int = 8


def run_lm_eval(python: Path, run: LmEvalRun) -> tuple[tuple[Gsm8kItem, ...], str]:
    """Run lm-eval with the interpreter `python` and return the scored items and its version."""
    gsm8k_yaml, version = _find(python)
    with tempfile.TemporaryDirectory(prefix="lm-eval-") as scratch:
        folder = Path(scratch)
        (folder / "task.yaml").write_text(json.dumps(_task(gsm8k_yaml, run.data, folder)), encoding="utf-8")
        done = subprocess.run(command(python, run, folder), capture_output=True, text=True, check=False)
        if done.returncode:
            raise EvalError(f"lm-eval failed: {' | '.join(done.stderr.strip().splitlines()[-3:])}")
        samples = sorted(folder.rglob(f"samples_{TASK}_*.jsonl"))
        if not samples:
            raise EvalError("lm-eval wrote no samples; its output layout is not the one slipstream reads.")
        rows = [json.loads(line) for line in samples[-1].read_text(encoding="utf-8").splitlines()]
    return items_of(rows), version


def command(python: Path, run: LmEvalRun, folder: Path) -> list[str]:
    """Return the lm-eval command line."""
    kind, path = ("local-chat-completions", "chat/completions") if run.chat else ("local-completions", "completions")
    arguments = f"model={run.model},base_url={run.url}/v1/{path},num_concurrent={run.concurrency}"
    arguments += f",max_gen_toks={run.max_tokens},tokenizer_backend=none,tokenized_requests=False,max_retries=1"
    argv = [str(python), "-m", "lm_eval", "--model", kind, "--model_args", arguments]
    argv += ["--tasks", TASK, "--include_path", str(folder), "--num_fewshot", str(run.num_shots)]
    argv += ["--output_path", str(folder / "results"), "--log_samples"]
    argv += ["--apply_chat_template"] if run.chat else []
    return argv + (["--limit", str(run.limit)] if run.limit is not None else [])


def items_of(rows: Sequence[dict[str, object]]) -> tuple[Gsm8kItem, ...]:
    """Join lm-eval's samples, one for each question and filter, into items."""
    by_question: dict[int, dict[str, dict[str, object]]] = {}
    for row in rows:
        by_question.setdefault(int(str(row["doc_id"])), {})[str(row["filter"])] = row
    items = []
    for index, filters in sorted(by_question.items()):
        strict, flexible = filters["strict-match"], filters["flexible-extract"]
        items.append(
            Gsm8kItem(
                index=index,
                answer=_first(strict["resps"]),
                strict_extracted=_first(strict["filtered_resps"]),
                flexible_extracted=_first(flexible["filtered_resps"]),
                strict=bool(strict["exact_match"]),
                flexible=bool(flexible["exact_match"]),
            )
        )
    return tuple(items)


def _find(python: Path) -> tuple[Path, str]:
    code = "import lm_eval, json; print(json.dumps([lm_eval.__file__, lm_eval.__version__]))"
    try:
        done = subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=False)
    except OSError as error:
        raise EvalError(f"{python}: cannot be run ({error.strerror}).") from error
    if done.returncode:
        raise EvalError(f"{python}: has no lm-eval. Install it there, or leave --lm-eval out.")
    file, version = json.loads(done.stdout.splitlines()[-1])
    return Path(file).parent / "tasks" / "gsm8k" / "gsm8k.yaml", str(version)


def _task(gsm8k_yaml: Path, data: Path, folder: Path) -> dict[str, object]:
    """Describe lm-eval's own gsm8k task with our copy of the data, so that nothing is downloaded."""
    loaded = load_data(data)
    files = {}
    for name, questions in (("train", loaded.train), ("test", loaded.test)):
        path = folder / f"{name}.jsonl"
        rows = (json.dumps({"question": q.question, "answer": q.answer}) for q in questions)
        path.write_text("\n".join(rows) + "\n", encoding="utf-8")
        files[name] = str(path)
    override = {"task": TASK, "dataset_path": "json", "dataset_name": None, "dataset_kwargs": {"data_files": files}}
    return {"include": str(gsm8k_yaml), **override}


def _first(value: object) -> str:
    while isinstance(value, list):
        value = value[0] if value else ""
    return str(value)
