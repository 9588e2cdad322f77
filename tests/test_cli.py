"""The command line: help that teaches, sentences for mistakes, and the embedded model at work."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from slipstream.checkpoint.embedded import embedded_draft
from slipstream.cli.main import app
from training import write_target_folder

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md")), *sorted(ROOT.glob("recipes/*/README.md"))]
runner = CliRunner()


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the real program, as a user would."""
    code = "from slipstream.cli.main import main; main()"
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=300, check=False
    )


NARROW = {"COLUMNS": "80"}


def assert_nothing_is_cut(output: str) -> None:
    assert "…" not in output
    assert max(map(len, output.splitlines())) <= 80


VERBS = ["chat", "demo", "doctor", "generate", "inspect", "train", "quantize", "serve", "bench", "eval", "report"]


@pytest.mark.parametrize("verb", ["", *VERBS])
def test_every_verb_explains_itself(verb):
    result = runner.invoke(app, [verb, "--help"] if verb else ["--help"])
    assert result.exit_code == 0
    assert "Usage" in result.output


def test_help_names_every_option_whole_in_80_columns():
    def commands(command, *names):
        below = getattr(command, "commands", {})
        return [one for name, sub in below.items() for one in commands(sub, *names, name)] or [(names, command)]

    for names, command in commands(typer.main.get_command(app)):
        shown = CliRunner().invoke(app, [*names, "--help"], env={"COLUMNS": "80"}, terminal_width=80).output
        for option in (param for param in command.params if isinstance(param, typer.core.TyperOption)):
            assert option.opts[0] in shown, f"{' '.join(names)} {option.opts[0]}"


def test_help_does_not_load_torch():
    code = "import sys; from slipstream.cli.main import app; print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["inspect", "/no/such/folder"], "no such folder"),
        (["generate", "--model", "/no/such/folder", "hello"], "no such folder"),
        (["generate", "--width", "0", "hello"], "width"),
        (["generate", "--temperature", "-1", "hello"], "temperature"),
    ],
)
@pytest.mark.embedded
def test_a_users_mistake_is_a_sentence_and_no_traceback(arguments, words):
    result = command(*arguments)
    assert result.returncode == 1
    assert "error:" in result.stderr
    assert words in result.stderr
    assert "Traceback" not in result.stderr


def test_doctor_says_which_kernels_a_gpu_that_is_not_here_would_run():
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "slipstream", "doctor", "--kernels", "--arch"]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | {"COLUMNS": "120"}
    said = subprocess.run([*command, "sm_90"], env=environment, capture_output=True, text=True, check=True).stdout
    assert "hopper_gemv" in said and "persistent_ws" in said and "split_kv" in said
    refused = subprocess.run([*command, "sm_70"], env=environment, capture_output=True, text=True, check=False)
    assert refused.returncode != 0 and "no architecture 'sm_70'" in refused.stderr


def test_doctor_says_what_runs_here():
    result = runner.invoke(app, ["doctor"])
    assert result.exit_code == 0
    assert "torch" in result.output


@pytest.mark.embedded
@pytest.mark.parametrize("name", ["embedded", "auto"])
def test_inspect_shows_the_embedded_model_as_it_runs(name):
    result = runner.invoke(app, ["inspect", name])
    assert result.exit_code == 0
    assert "LlamaForCausalLM" in result.output
    assert "134.5 M" in result.output
    assert "96.6 MB" in result.output


@pytest.mark.embedded
def test_generate_answers_and_repeats_itself_for_a_seed():
    arguments = ["generate", "--max-tokens", "8", "--temperature", "0.8", "--seed", "5", "Name a colour."]
    first, second = runner.invoke(app, arguments), runner.invoke(app, [*arguments, "-m", "auto", "--draft", "ngram"])
    assert first.exit_code == 0
    assert first.stdout.strip()
    assert first.stdout == second.stdout
    assert "tokens/s" in first.stderr and "tokens a pass" in first.stderr and "seed 5" in first.stderr


def test_generate_answers_a_file_of_prompts_in_order(tmp_path):
    target = str(write_target_folder(tmp_path / "target"))
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("Name a colour.\nCount to five.\n")
    together = runner.invoke(app, ["generate", "-m", target, "--file", str(prompts), "-n", "6"])
    lines = prompts.read_text().splitlines()
    alone = [runner.invoke(app, ["generate", "-m", target, "-n", "6", line]).stdout for line in lines]
    assert together.exit_code == 0, together.output
    assert together.stdout == "".join(alone)
    assert "all 2: 12 tokens" in together.stderr


@pytest.mark.embedded
def test_chat_streams_answers_and_statistics():
    result = runner.invoke(app, ["chat", "--max-tokens", "6", "--draft", "ngram"], input="Hello\n/reset\n/quit\n")
    assert result.exit_code == 0
    assert "tokens/s" in result.output


@pytest.mark.embedded
def test_demo_proves_the_texts_equal():
    result = runner.invoke(app, ["demo", "--prompts", "1", "--max-tokens", "8", "--beside", "none"], env=NARROW)
    assert result.exit_code == 0, result.output
    assert_nothing_is_cut(result.output)
    assert "try next" in result.output and "slipstream chat" in result.output
    assert "identical, token for token" in result.output
    assert "speed-up" in result.output


@pytest.mark.embedded
def test_drafts_are_compared_on_the_same_prompts_and_change_no_answer(tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"question": "What is 2 + 3?"}\n{"question": "Name three colours."}\n')
    shipped = embedded_draft()
    assert shipped is not None
    quantized = tmp_path / "fp8"
    result = runner.invoke(app, ["quantize", str(shipped), "--scheme", "ptpc_fp8", "--out", str(quantized)])
    assert result.exit_code == 0, result.output
    result = runner.invoke(
        app,
        ["eval", "drafts", str(prompts), "-d", str(shipped), "-d", str(quantized), "-d", "ngram", "-n", "16"],
        env=NARROW,
    )
    assert result.exit_code == 0, result.output
    assert result.output.count("2 of 2") == 3
    assert "tokens/s" in result.output and "speed-up" in result.output
    assert_nothing_is_cut(result.output)


@pytest.mark.embedded
def test_one_call_compares_several_depths_with_drafts_as_they_are_served(tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"question": "What is 2 + 3?"}\n')
    arguments = ["eval", "drafts", str(prompts), "-d", "auto", "-d", "ngram", "--depths", "1,3", "--as-served"]
    result = runner.invoke(app, [*arguments, "-n", "12"], env=NARROW)
    assert result.exit_code == 0, result.output
    assert result.output.count("1 of 1") == 4
    assert result.output.count("chain of 1") == result.output.count("chain of 3") == 4  # in both tables
    assert_nothing_is_cut(result.output)
    wrong = runner.invoke(app, ["eval", "drafts", str(prompts), "-d", "ngram", "--depths", "3;6"])
    assert wrong.exit_code == 2
    assert "3,6" in wrong.output


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_commands_of_a_page_have_the_options_it_shows(page):
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    lines = [line.split("  #")[0].split() for line in text.splitlines() if line.startswith("slipstream ")]
    assert lines or page.name not in ("README.md", "train.md", "quantize.md", "serve.md", "bench.md")
    for _, *line in lines:
        words = line[: line.index("--")] if "--" in line else line  # another program's options follow
        command = typer.main.get_command(app)
        while words and words[0] in getattr(command, "commands", {}):
            command = command.commands[words.pop(0)]
        known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
        shown = {word for word in words if word.startswith("-")}
        assert shown <= known, (command.name, shown - known)


@pytest.mark.embedded
def test_beside_llama_cpp_the_race_is_greedy():
    result = runner.invoke(app, ["demo", "--beside", "llama.cpp", "--temperature", "0.8"])
    assert result.exit_code == 2
    assert "greedy" in result.output
