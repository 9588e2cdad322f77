"""Every published line is started, on tiny checkpoints of the right architectures, formats and names.

On demand: make published. What a machine without GPUs cannot have is counted down, and the report says it.
"""

import json
import os
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import pytest

from slipstream.bench.plan import build_plan
from slipstream.bench.plan_text import plan_rows
from slipstream.bench.recipe_file import load_recipe
from slipstream.cli.serve import serve
from slipstream.flags.line import settle
from slipstream.flags.table import flag_table
from tests.ports import free_port
from tests.published.checkpoints import write_published
from tests.published.documents import ABSENT, FOLDER, launch_lines, published_lines
from tests.published.verbs import own_of

pytestmark = [pytest.mark.published, pytest.mark.skipif(not FOLDER.is_dir(), reason=ABSENT)]
ROOT = Path(__file__).parents[2]
LINES = published_lines() if FOLDER.is_dir() else []
START_S = 120
PLACES = {
    "/path/to/kimi-k2.5-eagle3": "lightseekorg/kimi-k2.5-eagle3",
    "<path-to-kimi-k2.5>": "amd/Kimi-K2.5-W4A8",
    "<path-to-this-model>": "ginsongsong/eagle3-kimik2.5-w4a8",
}
COUNTED_DOWN = {
    **dict.fromkeys(("--tp", "--tensor-parallel-size"), "2"),
    **dict.fromkeys(("--mem-fraction-static", "--gpu-memory-utilization"), "0.05"),
    "--host": "127.0.0.1",
}
"""GPUs, the share of memory (of a machine that others use, too) and the address."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A working folder with every checkpoint that the lines name; published lines make the FP8 and the INT4 draft."""
    folder = tmp_path_factory.mktemp("published")
    write_published(folder)
    (line,) = [line for line in LINES if line.kind() == "quantize"]
    done = slipstream(folder, "quantize", *line.arguments())
    assert done.returncode == 0, done.stderr
    card = "--quant_scheme int4_wo_per_channel --exclude_layers embed_tokens lm_head fc *norm --output_dir"
    done = slipstream(
        folder,
        "quantize",
        "--model_dir",
        "lightseekorg/kimi-k2.5-eagle3",
        *card.split(),
        PLACES["<path-to-this-model>"],
    )
    assert done.returncode == 0, done.stderr
    return folder


def slipstream(folder, *words, env=()):
    return subprocess.run(
        [sys.executable, "-m", "slipstream", *words],
        cwd=folder, env=environment(env), capture_output=True, text=True, check=False, timeout=600,
    )  # fmt: skip


def environment(more):
    return {**os.environ, "PYTHONPATH": str(ROOT / "src"), "HF_HUB_OFFLINE": "1", **dict(more)}


def on_this_machine(words):
    """Return a line for this machine, and what was changed."""
    port, changed, line = str(free_port()), [], []
    words = [PLACES.get(word, word) for word in words]
    for i, word in enumerate(words):
        before = words[i - 1] if i else ""
        if before in COUNTED_DOWN and word != COUNTED_DOWN[before]:
            changed.append(f"{before} {word} -> {COUNTED_DOWN[before]}")
            line.append(COUNTED_DOWN[before])
        else:
            line.append(port if before == "--port" else word)
    if "--port" not in line:
        line += ["--port", port]
    return line, port, changed


@contextmanager
def started(folder, words, env=()):
    """Start a launch line and give its address and what it said; end it afterwards."""
    line, port, changed = on_this_machine(words)
    log = folder / f"{port}.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "slipstream", "serve", *line],
            cwd=folder, env=environment(env), stdout=output, stderr=output,
        )  # fmt: skip
    try:
        deadline = time.monotonic() + START_S
        while not answers(port):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.2)
        yield f"http://127.0.0.1:{port}", log, changed
    finally:
        process.terminate()
        process.wait(60)


def answers(port):
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2) as response:
            return response.status == 200
    except OSError:
        return False


def completion(url):
    body = {"prompt": "the then they", "max_tokens": 24, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        return json.load(response)["choices"][0]["token_ids"]


def bench_words(line, requests, streams):
    """Return a benchmark line with fewer requests, for a machine without GPUs."""
    words = list(line.words)
    for i, flag in enumerate(words):
        fewer = {"--num-prompts": requests, "--max-concurrency": streams}.get(flag)
        fewer = 16 if flag.startswith("--random-output") else fewer
        fewer = 512 if flag.startswith("--random-input") else fewer
        if fewer is not None:
            words[i + 1] = str(fewer)
    return words


@pytest.mark.parametrize("line", launch_lines(LINES), ids=lambda line: f"{line.document}-{len(line.env)}")
def test_a_published_launch_line_starts_and_answers_and_takes_its_published_load(folder, line):
    with started(folder, line.arguments(), line.env) as (url, log, changed):
        tokens = completion(url)
        assert len(tokens) == 24
        said = log.read_text()
        assert "not needed here" in said or line.document.startswith("003")
        loads = [other for other in LINES if other.kind() == "bench" and other.document == line.document]
        for load in loads:
            done = slipstream(folder, "bench", "like", "--url", url, "--", *bench_words(load, 2, 2))
            assert done.returncode == 0, done.stdout + done.stderr
    changed.append(f"{len(loads)} loads of 2 requests, 512 tokens in and 16 out each")
    sys.stdout.write(f"\n{line.document}:{line.number}: {'; '.join(changed)}\n")


def inferencex_rows():
    """The lines of the InferenceX pull requests that the second blog describes, as the shipped recipes render them.

    Of lines that are the same here (topologies whose numbers are counted down) the first is returned, with how many
    there are.
    """
    rows = {}
    for recipe in ("kimi-k2.5-mxfp4-vllm.yaml", "minimax-m2.5-vllm.yaml"):
        for row in plan_rows(build_plan(load_recipe(ROOT / "recipes" / "bench" / recipe))):
            line, port, _ = on_this_machine(row["argv"][2:])
            same = (*(word for word in line if word != port), *row["env"].items())
            rows.setdefault(same, {**row, "published": set()})["published"].add((row["workload"], row["topology"]))
    return list(rows.values())


INFERENCEX = inferencex_rows()


@pytest.mark.parametrize(
    "row", INFERENCEX, ids=lambda row: f"{row['argv'][2]}-{row['arm']}-{row['workload']}-{row['topology']}"
)
def test_an_inferencex_line_starts_and_answers(folder, row):
    with started(folder, row["argv"][2:], row["env"].items()) as (url, _, changed):
        assert len(completion(url)) == 24
    published = ", ".join(" ".join(one) for one in sorted(row["published"]))
    sys.stdout.write(f"\n{row['arm']}, {published}: {'; '.join(changed)}\n")


LAUNCHES = [
    *(pytest.param(line.arguments(), line.env, id=f"{line.document}-{len(line.env)}") for line in launch_lines(LINES)),
    *(  # one InferenceX line of each arm
        pytest.param(row["argv"][2:], tuple(row["env"].items()), id=f"{row['argv'][2]}-{row['arm']}-{row['topology']}")
        for row in INFERENCEX
        if ("1k1k", row["topology"]) in row["published"]
    ),
]


@pytest.mark.parametrize(("words", "env"), LAUNCHES)
def test_what_is_not_needed_here_changes_no_token(folder, words, env):
    with started(folder, words, env) as (url, _, _):
        published = completion(url)
    line, _, _ = on_this_machine(words)
    own = settle(line, own_of(serve), flag_table("serve")).words  # all flags that are not needed are gone
    with started(folder, own) as (url, log, _):
        assert completion(url) == published
        assert "not needed here" not in log.read_text()
    sys.stdout.write(f"\n{len(line) - len(own)} words and {len(env)} variables fewer, the same tokens\n")
