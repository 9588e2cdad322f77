"""What `pip install slipstream` gives: verbs without extras, recipes and pages, a cache one can see and clear."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from slipstream.cli.cache import contents
from slipstream.cli.extras import MODULES_OF
from slipstream.cli.main import app

ROOT = Path(__file__).resolve().parents[1]
runner = CliRunner()


def without_extras(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the real program where no module of an extra can be imported (pydantic comes with typer)."""
    modules = sorted({module for modules in MODULES_OF.values() for module in modules} - {"pydantic"})
    code = f"import sys; sys.modules.update(dict.fromkeys({modules})); from slipstream.cli.main import main; main()"
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=300, check=False
    )


def test_each_extra_brings_the_modules_the_verbs_ask_for():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    brought = {
        extra: {line.partition(">")[0] for line in extras[extra] if not line.startswith("slipstream[")}
        for extra in MODULES_OF
    }
    assert brought == {extra: set(modules) for extra, modules in MODULES_OF.items()}


@pytest.mark.embedded
def test_a_library_user_generates_without_any_extra():
    done = without_extras("generate", "--max-tokens", "4", "Name a colour.")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


@pytest.mark.parametrize(
    ("arguments", "extra"),
    [(["serve"], "serve"), (["report", "out"], "report"), (["train", "embedded", "--out", "draft"], "train")],
)
def test_a_verb_whose_extra_is_missing_says_the_one_command(arguments, extra):
    done = without_extras(*arguments)
    assert done.returncode == 1
    assert f"pip install 'slipstream[{extra}]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_package_runs_as_a_module():
    done = subprocess.run([sys.executable, "-m", "slipstream", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("slipstream ")


def test_a_shell_is_told_how_to_complete_verbs():
    environment = {"_SLIPSTREAM_COMPLETE": "complete_bash", "COMP_WORDS": "slipstream gen", "COMP_CWORD": "1"}
    code = "import sys; sys.argv[0] = 'slipstream'; from slipstream.cli.main import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment | {"PYTHONPATH": ":".join(sys.path)}, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    assert done.stdout.split() == ["generate"]


def test_recipes_are_listed_and_copied_with_what_they_name(tmp_path):
    listed = runner.invoke(app, ["recipes"])
    assert listed.exit_code == 0
    assert "bench/embedded " in listed.output
    assert "train/embedded " in listed.output
    copied = runner.invoke(app, ["recipes", "copy", "bench/embedded", str(tmp_path)])
    assert copied.exit_code == 0
    planned = runner.invoke(app, ["bench", "plan", str(tmp_path / "recipes/bench/embedded.yaml")])
    assert planned.exit_code == 0, planned.output
    assert str(tmp_path / "recipes/bench/prompts/mixed.jsonl") in planned.output
    assert runner.invoke(app, ["recipes", "copy", "train/embedded", str(tmp_path)]).exit_code == 0
    assert (tmp_path / "recipes/train/README.md").is_file()
    assert (tmp_path / "docs/train.md").is_file()


def test_a_recipe_in_the_way_is_not_replaced_unasked(tmp_path):
    arguments = ["recipes", "copy", "bench/embedded", str(tmp_path)]
    assert runner.invoke(app, arguments).exit_code == 0
    again = runner.invoke(app, arguments)
    assert "already there" in str(again.exception)
    assert runner.invoke(app, [*arguments, "--overwrite"]).exit_code == 0


def test_the_cache_is_listed_with_sizes_and_cleared_by_name(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = tmp_path / "slipstream" / "smollm2-135m-instruct-1"
    folder.mkdir(parents=True)
    (folder / "model.gguf").write_bytes(bytes(3_000_000))
    (folder / "model.safetensors").write_bytes(bytes(5_000_000))
    assert {entry.name: entry.nbytes for entry in contents()} == {"embedded": 3_000_000, "embedded-folder": 5_000_000}
    listed = runner.invoke(app, ["cache"])
    assert "8 MB" in listed.output
    assert runner.invoke(app, ["cache", "clear", "embedded-folder"]).exit_code == 0
    assert [path.name for path in folder.iterdir()] == ["model.gguf"]
    assert "nothing named" in str(runner.invoke(app, ["cache", "clear", "embedded-folder"]).exception)
    assert runner.invoke(app, ["cache", "clear"]).exit_code == 0
    assert contents() == []
