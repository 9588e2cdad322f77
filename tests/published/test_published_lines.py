"""Every line of the published documents is one of ours after changing its first words, flag by flag."""

from collections import Counter

import pytest

from slipstream.bench.like import read_line
from slipstream.cli.quantize import quantize
from slipstream.cli.serve import serve
from slipstream.flags.line import settle
from slipstream.flags.table import flag_table
from tests.published.documents import ABSENT, FOLDER, launch_lines, published_lines, stray_flags
from tests.published.verbs import own_of

pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason=ABSENT)
LINES = published_lines() if FOLDER.is_dir() else []
ELSEWHERE = {
    "hf": "fetches a checkpoint, which serve does by itself for a hub id",
    "docker": "starts a container, which this program needs none of",
    "cd": "goes to Quark's examples, which are not needed",
    "export": "sets a variable for the lines after it",
}


def test_the_commands_are_found():
    kinds = Counter(line.kind() or line.words[0] for line in LINES)
    assert kinds == {"export": 21, "serve": 3, "bench": 7, "quantize": 1, "hf": 1, "docker": 1, "cd": 1}
    assert {line.words[0] for line in LINES if not line.kind()} == ELSEWHERE.keys()
    flags = tuple(word for line in LINES for word in line.words if word.startswith("--"))
    stray = [text for path in sorted(FOLDER.glob("*.txt")) for text in stray_flags(path)]
    assert [text for text in stray if not text.startswith(flags)] == []  # fragments of the lines, in the prose


def test_every_exported_variable_has_a_fate():
    exported = {word.split("=")[0] for line in LINES if line.words[0] == "export" for word in line.words[1:]}
    assert len(exported) == 21
    assert exported - flag_table("serve").variables.keys() == set()
    assert {name for line in launch_lines(LINES) for name, _ in line.env} == exported


@pytest.mark.parametrize("line", [line for line in LINES if line.kind() == "serve"], ids=lambda line: line.document)
def test_a_launch_line_has_nothing_unknown_and_nothing_refused(line):
    own, table = own_of(serve), flag_table("serve")
    settled = settle(line.arguments(), own, table)
    assert [word for word in settled.words if word.startswith("--") and word not in own] == []


@pytest.mark.parametrize("line", [line for line in LINES if line.kind() == "bench"], ids=lambda line: line.words[-1])
def test_a_benchmark_line_is_a_load(line):
    read = read_line(line.words)
    assert read.load.num_requests == int(line.words[line.words.index("--num-prompts") + 1])


@pytest.mark.parametrize("line", [line for line in LINES if line.kind() == "quantize"], ids=lambda line: line.document)
def test_the_quantization_line_is_ours(line):
    words = settle(line.arguments(), own_of(quantize), flag_table("quark")).words
    assert words == (
        "lightseekorg/kimi-k2.5-eagle3", "--scheme", "ptpc_fp8", "--exclude", "fc", "--exclude", "lm_head",
        "--out", "amd/kimi-k2.5-eagle3-fp8",
    )  # fmt: skip
