"""What a user may get wrong ends in a sentence that names it, costs no time first, and leaves nothing behind."""

import asyncio
import errno
import json
import resource
import signal
import socket
import sys

import pytest
from typer.testing import CliRunner

from slipstream.bench.client import Client, ServerError, open_session
from slipstream.bench.evals.gsm8k import EvalError, load_data
from slipstream.checkpoint.tokenizer import Tokenizer
from slipstream.cli.main import app, main
from slipstream.errors import CheckpointError, ConfigError, RequestError
from slipstream.records.store import RecordError, check_writable, read_record, write_text
from slipstream.serve.config import ServeConfig
from slipstream.serve.errors import HttpError
from slipstream.serve.grammar import GrammarCompiler
from slipstream.serve.logs import set_up_logs
from slipstream.serve.server import check_address
from slipstream.serve.structured import ResponseFormat, Structured, constraint_of
from training import write_target_folder

WIDE = {"COLUMNS": "300"}


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return write_target_folder(tmp_path_factory.mktemp("bad") / "target")


def call(*arguments, **options):
    return CliRunner().invoke(app, [str(argument) for argument in arguments], env=WIDE, **options)


@pytest.mark.parametrize("verb", ["generate", "chat", "demo"])
def test_sampling_that_cannot_be_is_refused_before_a_model_is_looked_for(verb, monkeypatch):
    monkeypatch.setattr("slipstream.cli.options.fetch_embedded", lambda console: pytest.fail("a model was fetched"))
    result = call(verb, "--max-tokens", 0, *(["hello"] if verb == "generate" else []))
    assert isinstance(result.exception, RequestError)
    assert "max_tokens is 0" in str(result.exception)


@pytest.mark.parametrize("line", ["generate hello -m", "inspect", "quantize --scheme fp8 --out out", "serve"])
def test_an_empty_name_is_not_the_embedded_model(line):
    result = call(*line.split(), "")
    assert isinstance(result.exception, CheckpointError)
    assert "name is empty" in str(result.exception)


@pytest.mark.parametrize(
    ("content", "words"),
    [(b"\n \n", "holds no prompt"), (b"fine\n\xff\n", "is not text in UTF-8"), (None, "cannot be read")],
)
def test_a_file_of_prompts_that_cannot_be_asked_is_refused(tmp_path, content, words):
    path = tmp_path / "prompts.txt"
    if content is not None:
        path.write_bytes(content)
    result = call("generate", "--file", path)
    assert result.exit_code == 2
    assert str(path) in result.output and words in result.output


def test_a_message_too_long_ends_neither_the_chat_nor_what_was_said(target):
    lines = f"hello\n{'x' * 3000}\n/undo\nhello\n"
    result = call("chat", "--model", target, "--draft", "none", "--max-tokens", 2, input=lines)
    assert result.exit_code == 0, result.output
    assert "tokens; the context holds 1024" in result.output and "/reset" in result.output
    assert "There is no /undo" in result.output
    assert result.output.count("tokens/s") == 2


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--width 0", "width is 0; it must be at least 1"),
        ("--budget -1", "budget is -1; it must be at least 0"),
        ("--depth 64", "depth is 64; it lies between 1 and 63"),
    ],
)
def test_a_tree_that_cannot_be_is_refused_by_the_one_number_that_is_wrong(line, words):
    result = call("generate", "hello", *line.split())
    assert isinstance(result.exception, ConfigError)
    assert words in str(result.exception)


@pytest.mark.parametrize("verb", ["generate hello", "train --out draft", "learn folder"])
@pytest.mark.parametrize(
    ("device", "num_gpus", "words"),
    [
        ("cuda", 0, "torch sees no GPU here"),
        ("cuda:2", 2, "torch sees 2 GPUs here"),
        ("cuda:x", 2, r"it is auto, cpu or cuda\[:N\]"),
        ("mps", 2, r"it is auto, cpu or cuda\[:N\]"),
    ],
)
def test_a_device_that_is_not_here_is_refused_by_every_verb(verb, device, num_gpus, words, monkeypatch, target):
    monkeypatch.setattr("torch.cuda.is_available", lambda: num_gpus > 0)
    monkeypatch.setattr("torch.cuda.device_count", lambda: num_gpus)
    with pytest.raises(ConfigError, match=words):
        call(
            *verb.split(), *(["--model", target] if "hello" in verb else []), "--device", device, catch_exceptions=False
        )


def test_files_that_a_training_recipe_names_are_looked_for_first(tmp_path, target, monkeypatch):
    monkeypatch.setattr("slipstream.train.run.phases.open_checkpoint", lambda _: pytest.fail("the target was loaded"))
    (tmp_path / "here.jsonl").write_text('{"prompt": "hello"}')
    (tmp_path / "mine.yaml").write_text(
        "train: {steps: 1}\nfiles: {prompts: [here.jsonl, gone.jsonl], exclude: [away.jsonl]}"
    )
    result = call("train", target, "--recipe", tmp_path / "mine.yaml", "--data", tmp_path, "--out", tmp_path / "draft")
    assert str(result.exception) == (
        f"{tmp_path}: has no gone.jsonl, away.jsonl, which the recipe names. --data is the folder of its files."
    )


def test_a_file_for_the_cache_that_is_not_there_is_refused(tmp_path):
    result = call("cache", "add", tmp_path / "absent.whl")
    assert result.exit_code == 2
    assert "absent.whl" in result.output and "does not exist" in result.output


@pytest.mark.parametrize(
    "line",
    [
        "eval drafts p.jsonl -d ngram --count 0",
        "eval gsm8k --url http://127.0.0.1:1 --data . --limit 0",
        "eval gsm8k --url http://127.0.0.1:1 --data . --concurrency 0",
        "eval lossless --url u --baseline-url u --prompts p.jsonl --limit -1",
        "bench rank --nodes 0",
        "inspect d --target-layers 0",
        "train --out d --stop-after-s -1",
    ],
)
def test_counts_of_nothing_are_refused_by_name(line):
    result = call(*line.split())
    assert result.exit_code == 2
    assert line.split()[-2] in result.output


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("bench run --help", "out/bench/NAME"),
        ("report --help", "the first folder given"),
        ("eval gsm8k --help", "out/eval/gsm8k.ARM.json"),
        ("eval lossless --help", "0 and 1"),
    ],
)
def test_help_shows_what_an_option_is_when_it_is_left_out(line, words):
    assert words in call(*line.split()).output


def test_a_refusal_of_the_operating_system_is_a_sentence(monkeypatch, capsys):
    def full(path):
        raise OSError(errno.ENOSPC, "No space left on device", path)

    monkeypatch.setattr(sys, "argv", ["slipstream", "inspect", "some/folder"])
    monkeypatch.setattr("slipstream.checkpoint.reader.open_checkpoint", full)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1
    said = capsys.readouterr().err
    assert (
        said.strip() == "error: some/folder: No space left on device. Free some space, then run the same command again."
    )


def test_a_disk_that_fills_leaves_no_half_record_and_the_one_before(tmp_path):
    path = tmp_path / "record.json"
    write_text(path, "before")
    limits, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limits[1]))
    try:
        with pytest.raises(RecordError, match=r"record\.json: cannot be written \(File too large\)\. Free some space"):
            write_text(path, "x" * (1 << 20))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert [entry.name for entry in tmp_path.iterdir()] == ["record.json"]
    assert path.read_text() == "before"


def test_a_record_that_could_not_be_written_is_said_before_the_work(tmp_path):
    (tmp_path / "file").write_text("")
    check_writable(tmp_path / "new" / "folder" / "record.json")
    for path in (tmp_path, tmp_path / "file" / "record.json"):
        with pytest.raises(RecordError, match=str(path)):
            check_writable(path)
        result = call("eval", "gsm8k", "--url", "http://127.0.0.1:1", "--data", tmp_path, "--out", path)
        assert isinstance(result.exception, RecordError)


def test_gsm8k_that_is_no_text_is_refused(tmp_path):
    (tmp_path / "train.jsonl").write_bytes(b"\xff\n")
    with pytest.raises(EvalError, match="train is not JSONL"):
        load_data(tmp_path)


def test_an_address_that_is_none_is_said_to_be_none(tmp_path):
    (tmp_path / "p.jsonl").write_text(json.dumps({"prompt": "hello"}))
    urls = ["--url", "localhost", "--baseline-url", "localhost", "--out", tmp_path / "l.json"]
    result = call("eval", "lossless", "--prompts", tmp_path / "p.jsonl", *urls)
    assert "localhost: is no address of a server" in str(result.exception)
    urls = ["--url", "http://127.0.0.1:1", "--baseline-url", "http://127.0.0.1:1", "--out", tmp_path / "l.json"]
    result = call("eval", "lossless", "--prompts", tmp_path / "p.jsonl", *urls)
    assert str(result.exception) == "http://127.0.0.1:1/v1/models: no answer (Connection refused)."


def test_a_server_that_answers_with_no_text_is_said_to():
    async def ask() -> None:
        async def answer(reader, writer) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n\xff\xfe")
            await writer.drain()
            writer.close()

        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        async with server, open_session() as session:
            await Client.connect(session, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")

    with pytest.raises(ServerError, match="v1/models: not JSON"):
        asyncio.run(ask())


def test_a_record_of_no_kind_is_refused(tmp_path):
    (tmp_path / "record.json").write_text('{"kind": []}')
    with pytest.raises(RecordError, match=r"kind \[\] is not a slipstream record"):
        read_record(tmp_path / "record.json")


def test_nobody_is_told_to_delete_a_file_that_may_not_be_a_record(tmp_path):
    (tmp_path / "README.md").write_text("# Words")
    result = call("report", tmp_path / "README.md")
    assert "not a readable record" in str(result.exception) and "Delete it" not in str(result.exception)


def test_a_port_that_is_taken_is_said_before_a_model_is_loaded():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port} cannot be listened on .*another --port"):
            check_address(ServeConfig("m", port=port))
    check_address(ServeConfig("m", port=port))
    with pytest.raises(ConfigError, match=r"no\.such\.host\.invalid:8000 cannot be listened on"):
        check_address(ServeConfig("m", host="no.such.host.invalid"))


def test_a_tokenizer_that_grammars_cannot_read_is_the_clients_business_and_no_failure(target):
    compiler = GrammarCompiler(Tokenizer.load(target), 99)
    with pytest.raises(HttpError, match="cannot be asked of this model") as error:
        asyncio.run(compiler.compile(constraint_of(Structured(response_format=ResponseFormat(type="json_object")))))
    assert (error.value.status, error.value.param) == (400, "response_format")


def test_a_log_level_that_is_none_is_refused():
    with pytest.raises(ConfigError, match="'loud'; it is debug, info, warning, error"):
        set_up_logs("loud", as_json=False)
