"""Every flag of other servers' launchers has a fate here (opt in: pytest -m interop)."""

import json
from pathlib import Path

import pytest
import typer
from tests.peers.suites import SUITES
from tests.serve.interop import run_client

from slipstream.bench.like import known_flags
from slipstream.cli.foreign_line import LaunchLine, own_flags
from slipstream.cli.serve import serve
from slipstream.flags.line import OwnFlag
from slipstream.flags.table import flag_table

HERE = Path(__file__).resolve().parent
APP = typer.Typer()
APP.command(cls=LaunchLine)(serve)
ENDED_BY_FLAGS = ("V", "V?", "V*")


def flags_of(project, program):
    said = run_client(SUITES[project].client, ["-P", str(HERE / "print_flags.py"), program], PYTHONPATH=str(HERE))
    return json.loads(next(line for line in reversed(said.splitlines()) if line.startswith('{"flags"')))["flags"]


def without_fate(theirs, own, table):
    """Return the flags that neither we nor the table know, and those the table reads another number of words after."""
    unknown, misread = [], []
    for name, arity in theirs.items():
        long = table.short.get(name, name)
        positive = f"--{long.removeprefix('--no-')}"
        flag = table.flags.get(long) or table.flags.get(positive)
        if name == "--config" or long in own or (positive in own and not own[positive].takes_value):
            continue
        if flag is None or (flag.name != long and not flag.negatable):
            unknown.append(name)
        elif arity != "any" and bool(arity) != (flag.arity in ENDED_BY_FLAGS) and flag.arity != "V?":
            misread.append(name)
    return unknown, misread


@pytest.mark.interop
@pytest.mark.parametrize(("project", "least"), [("vllm", 350), ("sglang", 500)])
def test_every_flag_of_a_launcher_works_or_is_not_needed_or_is_refused(project, least):
    theirs = flags_of(project, project)
    assert len(theirs) >= least
    own = own_flags(typer.main.get_command(APP))
    assert without_fate(theirs, own, flag_table("serve")) == ([], [])


@pytest.mark.interop
@pytest.mark.parametrize(("project", "least"), [("vllm", 90), ("sglang", 80)])
def test_every_flag_of_a_benchmark_client_works_or_is_not_needed_or_is_refused(project, least):
    theirs = flags_of(project, f"{project}_bench")
    assert len(theirs) >= least
    own = {name: OwnFlag(takes_value) for name, takes_value in known_flags(project).items()}
    assert without_fate(theirs, own, flag_table(f"{project}_bench")) == ([], [])
