"""Every published line is started, on tiny checkpoints of the right architectures, formats and names.

On demand: make published. What a machine without GPUs cannot have is counted down, and the report says it.
"""

import sys

import pytest

from slipstream.bench.plan import build_plan
from slipstream.bench.plan_text import plan_rows
from slipstream.bench.recipe_file import load_recipe
from slipstream.cli.serve import serve
from slipstream.flags.line import settle
from slipstream.flags.table import flag_table
from tests.published.documents import ABSENT, FOLDER, launch_lines, published_lines
from tests.published.servers import ROOT, answer, on_this_machine, slipstream, started
from tests.published.verbs import own_of

pytestmark = [pytest.mark.published, pytest.mark.skipif(not FOLDER.is_dir(), reason=ABSENT)]
LINES = published_lines() if FOLDER.is_dir() else []


def completion(url):
    body = {"prompt": "the then they", "max_tokens": 24, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    return answer(url, "/v1/completions", body)["choices"][0]["token_ids"]


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
