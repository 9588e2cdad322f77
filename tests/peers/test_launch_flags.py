"""Every flag of other servers' launchers has a fate here (opt in: pytest -m interop)."""

import json
import os
from pathlib import Path

import pytest
import typer
from tests.peers.suites import NEWEST_VLLM, SUITES, vllm_source
from tests.serve.interop import run_client

from slipstream.bench.like import known_flags
from slipstream.checkpoint.cache_dir import default_cache_dir
from slipstream.cli.foreign_line import LaunchLine, own_flags
from slipstream.cli.serve import serve
from slipstream.flags.line import OwnFlag, settle
from slipstream.flags.table import flag_table

HERE = Path(__file__).resolve().parent
APP = typer.Typer()
APP.command(cls=LaunchLine)(serve)
ENDED_BY_FLAGS = ("V", "V?", "V*")


def flags_of(project, program):
    folders, settings = [HERE], {}
    if project == "newest vllm":
        folders.append(vllm_source(NEWEST_VLLM, default_cache_dir() / "interop"))
        settings["VLLM_TARGET_DEVICE"] = "cpu"
    client = SUITES[project.removeprefix("newest ")].client
    said = run_client(
        client, ["-P", str(HERE / "print_flags.py"), program], PYTHONPATH=os.pathsep.join(map(str, folders)), **settings
    )
    return json.loads(next(line for line in reversed(said.splitlines()) if line.startswith('{"flags"')))["flags"]


def without_fate(theirs, own, table):
    """Return the flags that neither we nor the table know, and those the table reads another number of words after."""
    unknown, misread = [], []
    for name, arity in theirs.items():
        long = table.short.get(name, name)
        flag = table.flags.get(long)
        if name == "--config" or long in own:
            continue
        if flag is None and name in settle([name], own, table).words:
            unknown.append(name)
        elif (
            flag is not None and arity != "any" and bool(arity) != (flag.arity in ENDED_BY_FLAGS) and flag.arity != "V?"
        ):
            misread.append(name)
    return unknown, misread


@pytest.mark.interop
@pytest.mark.parametrize(("project", "least"), [("vllm", 350), ("newest vllm", 350), ("sglang", 500)])
def test_every_flag_of_a_launcher_works_or_is_not_needed_or_is_refused(project, least):
    theirs = flags_of(project, project.removeprefix("newest "))
    assert len(theirs) >= least
    own = own_flags(typer.main.get_command(APP))
    assert without_fate(theirs, own, flag_table("serve")) == ([], [])


@pytest.mark.interop
@pytest.mark.parametrize(("project", "least"), [("vllm", 90), ("newest vllm", 90), ("sglang", 80)])
def test_every_flag_of_a_benchmark_client_works_or_is_not_needed_or_is_refused(project, least):
    project, source = project.removeprefix("newest "), project
    theirs = flags_of(source, f"{project}_bench")
    assert len(theirs) >= least
    own = {name: OwnFlag(takes_value) for name, takes_value in known_flags(project).items()}
    assert without_fate(theirs, own, flag_table(f"{project}_bench")) == ([], [])
