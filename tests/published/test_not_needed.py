"""Every flag and variable that is said to be not needed is given to a server, whose answers stay what they were.

On demand: make published. One server is started for each reason, with all flags that have it.
"""

import pytest

from slipstream.flags.table import flag_table
from tests.published.documents import ABSENT, FOLDER
from tests.published.servers import answer, slipstream, started

pytestmark = [pytest.mark.published, pytest.mark.skipif(not FOLDER.is_dir(), reason=ABSENT)]
TABLE = flag_table("serve")
FLAGS = [flag for flag in TABLE.flags.values() if flag.fate == "not_needed"]
REASONS = sorted({flag.why for flag in FLAGS})
VARIABLES = [variable for variable in TABLE.variables.values() if not variable.refused]
TARGET, DRAFT = "amd/Kimi-K2.5-W4A8", "lightseekorg/kimi-k2.5-eagle3"
DRAFTING = ["--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path"]
LINE = [TARGET, "--mem-fraction-static", "0.05", *DRAFTING, DRAFT]
VALUES = {"": [], "V": ["1"], "V?": ["1"], "V*": ["1", "2"]}
QUESTION = [{"role": "user", "content": "the then they"}]
REQUESTS = (
    ("/v1/completions", {"prompt": "the then they", "max_tokens": 40, "temperature": 0, "logprobs": 3}),
    ("/v1/completions", {"prompt": "Hello 1234", "max_tokens": 40, "temperature": 1, "seed": 7, "logprobs": 0}),
    ("/v1/chat/completions", {"messages": QUESTION, "max_tokens": 24, "temperature": 0.7, "top_p": 0.9, "seed": 3}),
)


def answers_of(url):
    """Return whole answers to greedy, sampled and chat requests, without their names and times."""
    found = [answer(url, path, {**body, "ignore_eos": True, "return_token_ids": True}) for path, body in REQUESTS]
    return [{key: value for key, value in one.items() if key not in ("id", "created")} for one in found]


@pytest.fixture(scope="module")
def plain(folder):
    """The answers of a server that was given none of them."""
    with started(folder, LINE) as (url, log, _):
        found = answers_of(url)
        assert "not needed here" not in log.read_text()
    assert all(one["usage"]["completion_tokens"] >= 24 for one in found)
    return found


@pytest.mark.parametrize("why", REASONS)
def test_no_answer_depends_on_flags_that_are_not_needed(folder, plain, why):
    flags = [flag for flag in FLAGS if flag.why == why]
    words = [word for flag in flags for word in (flag.name, *VALUES[flag.arity])]
    with started(folder, [*LINE, *words]) as (url, log, _):
        assert answers_of(url) == plain
        said = log.read_text()
    assert [flag.name for flag in flags if flag.name not in said] == []


def test_no_answer_depends_on_switching_off_what_is_not_needed(folder, plain):
    words = [f"--no-{flag.name.removeprefix('--')}" for flag in FLAGS if flag.negatable]
    with started(folder, [*LINE, *words]) as (url, log, _):
        assert answers_of(url) == plain
        said = log.read_text()
    assert [word for word in words if word not in said] == []


def test_no_answer_depends_on_variables_that_are_not_needed(folder, plain):
    with started(folder, LINE, {variable.name: "1" for variable in VARIABLES}) as (url, log, _):
        assert answers_of(url) == plain
        said = log.read_text()
    assert [variable.name for variable in VARIABLES if variable.name not in said] == []


def test_no_quantized_file_depends_on_quarks_flags_that_are_not_needed(folder):
    flags = [flag for flag in flag_table("quark").flags.values() if flag.fate == "not_needed"]
    words = [word for flag in flags for word in (flag.name, *VALUES[flag.arity])]
    for out, more in (("plain-fp8", []), ("with-all-flags", words)):
        done = slipstream(folder, "quantize", DRAFT, "--scheme", "ptpc_fp8", "--out", out, *more)
        assert done.returncode == 0, done.stderr
    files = sorted(path.name for path in (folder / "plain-fp8").iterdir())
    assert "model.safetensors" in files
    assert sorted(path.name for path in (folder / "with-all-flags").iterdir()) == files
    for name in files:
        assert (folder / "plain-fp8" / name).read_bytes() == (folder / "with-all-flags" / name).read_bytes(), name
