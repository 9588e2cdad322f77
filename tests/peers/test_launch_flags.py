"""Every flag of other servers' launchers has a fate here (opt in: pytest -m interop)."""

import json
from pathlib import Path

import pytest
import typer
from tests.peers.suites import SUITES
from tests.serve.interop import run_client

from slipstream.cli.foreign_line import LaunchLine, own_flags
from slipstream.cli.serve import serve
from slipstream.flags.table import flag_table

HERE = Path(__file__).resolve().parent
APP = typer.Typer()
APP.command(cls=LaunchLine)(serve)
ENDED_BY_FLAGS = ("V", "V?", "V*")


@pytest.mark.interop
@pytest.mark.parametrize(("project", "least"), [("vllm", 350), ("sglang", 500)])
def test_every_flag_works_or_is_not_needed_or_is_refused(project, least):
    said = run_client(SUITES[project].client, ["-P", str(HERE / "print_flags.py"), project], PYTHONPATH=str(HERE))
    theirs = json.loads(next(line for line in reversed(said.splitlines()) if line.startswith('{"flags"')))["flags"]
    assert len(theirs) >= least
    own, table = own_flags(typer.main.get_command(APP)), flag_table("serve")
    unknown, misread = [], []
    for name, arity in theirs.items():
        long = table.short.get(name, name)
        flag = table.flags.get(long) or table.flags.get(f"--{long.removeprefix('--no-')}")
        opposite = own.get(f"--{long.removeprefix('--no-')}")
        if name == "--config" or long in own or (opposite and not opposite.takes_value):
            continue
        if flag is None or (name.startswith("--no-") and not flag.negatable):
            unknown.append(name)
        elif arity != "any" and bool(arity) != (flag.arity in ENDED_BY_FLAGS) and flag.arity != "V?":
            misread.append(name)
    assert (unknown, misread) == ([], [])
