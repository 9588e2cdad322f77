"""The verb: it shows both errors, the types before and after, and leaves mistakes to the command line's one handler."""

import pytest
import typer
from typer.testing import CliRunner

from slipstream.cli.foreign_line import QuarkLine
from slipstream.cli.quantize import quantize
from slipstream.errors import CheckpointError, ConfigError

APP = typer.Typer()
APP.command(cls=QuarkLine)(quantize)


def invoke(*arguments: object):
    return CliRunner().invoke(APP, [str(argument) for argument in arguments], env={"COLUMNS": "140"})


def test_it_writes_the_folder_and_shows_both_errors_and_the_types(draft, tmp_path):
    result = invoke(draft, "--scheme", "int4", "--out", tmp_path / "out", "--exclude", "*.mlp.*", "--report")
    assert result.exit_code == 0, result.output
    assert (tmp_path / "out" / "config.json").exists()
    errors, left_alone = result.output.split("layers were quantized")
    assert "midlayer.self_attn.q_proj" in errors and "mlp" not in errors
    for words in ("--exclude *.mlp.*", "down_proj, gate_proj, up_proj", "engines read it unquantized", "fc, lm_head"):
        assert words in left_alone
    assert "quark" in result.output and "best" in result.output and "##" in result.output
    assert "measured over 192 of 192 rows" in result.output
    assert "I32" in result.output and "BF16" in result.output


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (["--scheme", "int5"], ConfigError, "no scheme 'int5'"),
        (["--scheme", "fp8", "--exact", "awq"], ConfigError, "--exact takes 'quark'"),
        (["--scheme", "fp8", "--exclude", "nobody"], ConfigError, "matches no linear layer"),
    ],
)
def test_mistakes_are_sentences(draft, tmp_path, arguments, error, message):
    result = invoke(draft, "--out", tmp_path / "out", *arguments)
    assert isinstance(result.exception, error) and message in str(result.exception)
    assert not (tmp_path / "out").exists()


def test_a_missing_source_is_named(tmp_path):
    result = invoke(tmp_path / "nowhere", "--scheme", "fp8", "--out", tmp_path / "out")
    assert isinstance(result.exception, CheckpointError) and "nowhere" in str(result.exception)


def test_exact_quark_writes_other_bits_than_the_default(draft, tmp_path):
    invoke(draft, "--scheme", "ptpc_fp8", "--out", tmp_path / "best")
    invoke(draft, "--scheme", "ptpc_fp8", "--out", tmp_path / "exact", "--exact", "quark")
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("best", "exact")]
    assert len(files[0]) == len(files[1]) and files[0] != files[1]


def test_the_line_published_with_the_fp8_draft_writes_what_our_own_flags_write(draft, tmp_path):
    words = "--quant_scheme ptpc_fp8 --exclude_layers fc lm_head --file2file_quantization"
    theirs = invoke("--model_dir", draft, *words.split(), "--output_dir", tmp_path / "theirs")
    ours = invoke(draft, "--scheme", "ptpc_fp8", "--exclude", "fc", "--exclude", "lm_head", "--out", tmp_path / "ours")
    assert (theirs.exit_code, ours.exit_code) == (0, 0), theirs.output
    assert "not needed here: --file2file-quantization" in theirs.output
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "theirs" / name).read_bytes() == (tmp_path / "ours" / name).read_bytes()


def test_the_int4_cards_exclude_list_runs_and_says_what_is_never_quantized(draft, tmp_path):
    words = "--quant_scheme int4_wo_per_channel --exclude_layers embed_tokens lm_head fc *norm --output_dir"
    result = invoke("--model_dir", draft, *words.split(), tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert "--exclude embed_tokens: embeddings and norms are never quantized" in result.output


def test_what_quark_does_beyond_rounding_is_refused(draft, tmp_path):
    line = ["--model_dir", draft, "--quant_scheme", "int4_wo_128", "--output_dir", tmp_path / "out"]
    result = invoke(*line, "--quant_algo", "awq", "--kv_cache_dtype", "fp8")
    assert isinstance(result.exception, ConfigError)
    assert "--quant-algo cannot be honoured" in str(result.exception)
    assert "--kv-cache-dtype cannot" in str(result.exception)
