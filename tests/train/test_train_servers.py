"""`slipstream train URL`: texts, and states, from running servers make the draft that the target here would make."""

import fcntl
import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import save_file
from typer.testing import CliRunner

from slipstream.checkpoint.reader import open_checkpoint
from slipstream.checkpoint.tokenizer import Tokenizer
from slipstream.cli.main import app
from slipstream.errors import ConfigError, DataError
from slipstream.kernels.training.ops import train_ops
from slipstream.kernels.training.seen import Seen
from slipstream.models.load import load_ends, load_target
from slipstream.train.data.corpus import read_corpus
from slipstream.train.data.generate import GenerationRequest
from slipstream.train.data.servers import RemoteGenerator, Server, Servers
from slipstream.train.draft.packing import PackedContext
from training import EOS, RECIPE, ListSource, engine_over, greedy, tiny_target, write_target_folder

sys.path.append(str(Path(__file__).parents[1] / "serve"))
from tiny_server import Running

SMALL = {
    **RECIPE,
    "files": {**RECIPE["files"], "evaluate": [{"name": "held-out", "file": "test.jsonl", "max_new": 8}]},
    "data": {
        **RECIPE["data"],
        "answer_tokens": 160,
        "max_answer": 24,
        "magpie": 0.0,
        "maths": 0.0,
        "second_turn": 0.0,
        "greedy": 0.7,
    },
    "train": {**RECIPE["train"], "rows_per_step": 1, "steps": 4, "eval_every": 0},
}


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    folder = tmp_path_factory.mktemp("servers")
    write_target_folder(folder / "target")
    for name, numbers in (("train", range(40)), ("test", range(50, 58))):
        lines = [json.dumps({"question": f"How many is {i} and {i + 1}?"}) for i in numbers]
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
    (folder / "recipe.yaml").write_text(yaml.safe_dump(SMALL))
    return folder


def target_of(places):
    return load_target(open_checkpoint(places / "target"), torch.float32, torch.device("cpu"), 512)


def run_train(places, *arguments):
    fixed = ["--recipe", places / "recipe.yaml", "--data", places, "--device", "cpu"]
    result = CliRunner().invoke(app, ["train", *map(str, [*arguments, *fixed])])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def ours(places, **settings):
    """Start our own server over the tiny target."""
    return Running(engine_over(target_of(places), 16, 360), Tokenizer.load(places / "target"), **settings)


class Vllm(BaseHTTPRequestHandler):
    """Answers greedily as vLLM does, states included: in a file that is locked until it is written."""

    target, folder, layers, failures, names = None, Path(), (), 0, None

    def do_GET(self):
        self._reply({"data": [{"id": "tiny", "owned_by": "vllm", "root": "elsewhere", "max_model_len": 512}]})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if type(self).failures > 0:
            type(self).failures -= 1
            self._reply({"error": "busy"}, 503)
            return
        tokens = greedy(self.target, body["prompt"], body["max_tokens"])
        answer = {"choices": [{"token_ids": tokens, "finish_reason": "stop" if tokens[-1] == EOS else "length"}]}
        if self.layers:
            path = self.names or self._states(body["prompt"])
            answer["kv_transfer_params"] = {"hidden_states_path": path}
        self._reply(answer)

    def _states(self, ids):
        path = self.folder / f"{threading.get_ident()}-{id(self)}.safetensors"
        lock = path.with_name(path.name + ".lock").open("w")
        fcntl.flock(lock, fcntl.LOCK_EX)
        row = torch.tensor([ids])
        ctx = PackedContext(train_ops(row.device), torch.arange(len(ids))[None], Seen(torch.zeros_like(row)))
        states = torch.stack(self.target(row, ctx, self.layers).captured, 2)[0].contiguous()
        content = {"hidden_states": states, "token_ids": row[0]}
        threading.Timer(0.01, lambda: (save_file(content, path), lock.close())).start()
        return str(path)

    def _reply(self, value, status=200):
        content = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_):
        pass


@pytest.fixture
def vllm(places, tmp_path):
    """Start a server that answers as vLLM does; `layers` are what it captures."""
    running = []

    def start(layers=(), failures=0, target=None, names=None):
        settings = {"folder": tmp_path, "layers": layers, "failures": failures, "names": names}
        settings["target"] = target or target_of(places)
        server = ThreadingHTTPServer(("127.0.0.1", 0), type("Started", (Vllm,), settings))
        threading.Thread(target=server.serve_forever, daemon=True).start()
        running.append(server)
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    for server in running:
        server.shutdown()
        server.server_close()


def test_two_of_our_servers_write_the_corpus_and_the_draft_that_the_target_here_writes(places):
    run_train(places, places / "target", "--out", places / "here")
    with ours(places) as one, ours(places) as other:
        run_train(places, one.url, other.url, "--target", places / "target", "--out", places / "served")
    here, served = (read_corpus(places / f"{name}-work" / "corpus") for name in ("here", "served"))
    assert here.ids.tolist() == served.ids.tolist() and here.spans.tolist() == served.spans.tolist()
    drafts = [(places / name / "model.safetensors").read_bytes() for name in ("here", "served")]
    assert drafts[0] == drafts[1]


def test_states_from_a_server_give_the_measured_draft_of_the_target_here(places, vllm, tmp_path):
    url = vllm(layers=(2, 3, 5, 6))
    common = ["--target", places / "target", "--set", "data.greedy=1.0", "--set", "draft.captured_layers=[2, 3, 5]"]
    said = run_train(places, url, *common, "--server-states", "--out", places / "states")
    assert "tokens x 512 bytes (3 captured layers and the last state" in said  # before the states are written
    run_train(places, url, *common, "--out", places / "texts-only")
    records = [json.loads((places / name / "slipstream.json").read_text()) for name in ("states", "texts-only")]
    assert records[0]["corpus"]["shards"] == records[1]["corpus"]["shards"]
    assert [entry["loss"] for entry in records[0]["history"]] == pytest.approx(
        [entry["loss"] for entry in records[1]["history"]], rel=1e-4
    )
    assert records[0]["results"] == records[1]["results"]
    assert not list(tmp_path.iterdir())  # what the server wrote was read and deleted


def test_servers_of_another_model_or_other_layers_are_refused_before_anything_is_written(places, vllm, tmp_path):
    target = ["--target", places / "target"]
    with pytest.raises(ConfigError, match="serves another model"):
        run_train(places, vllm(target=tiny_target(seed=7, vocab_size=99)), *target, "--out", tmp_path / "a")
    with pytest.raises(ConfigError, match=r"\[3, 32\] a token where \[4, 32\] are needed. Start vLLM with"):
        run_train(places, vllm(layers=(2, 3, 6)), *target, "--server-states", "--out", tmp_path / "b")
    with pytest.raises(ConfigError, match="not the last of the model"):
        run_train(places, vllm(layers=(2, 3, 5, 1)), *target, "--server-states", "--out", tmp_path / "c")
    with pytest.raises(ConfigError, match="gives no states"):
        run_train(places, vllm(), *target, "--server-states", "--out", tmp_path / "d")
    assert not list(tmp_path.glob("*-work"))


def test_a_server_cannot_have_other_files_than_states_deleted(vllm, tmp_path):
    (tmp_path / "poetry.lock").write_text("mine")
    server = Server.connect(vllm(layers=(1,), names=str(tmp_path / "poetry")))
    server.write(GenerationRequest(0, [5, 6], 2), [EOS])
    with pytest.raises(ConfigError, match="gives no states"):
        server.states_file([5, 6])
    assert (tmp_path / "poetry.lock").read_text() == "mine"


def test_a_server_that_fails_is_asked_again_and_one_that_is_gone_is_named(places, vllm, monkeypatch):
    monkeypatch.setattr("slipstream.train.data.servers._PAUSE_S", 0.01)
    servers = Servers([vllm(failures=3), vllm()])
    source = ListSource([GenerationRequest(key, [5, 6, 7 + key], 8) for key in range(12)])
    RemoteGenerator(servers, (EOS,), 4, 99).run(source)
    assert {key: result.tokens for key, result in source.results.items()} == {
        key: greedy(target_of(places), [5, 6, 7 + key], 8) for key in range(12)
    }
    gone = vllm(failures=1000)
    with pytest.raises(DataError, match=r"HTTP 503.*No server answered"):
        RemoteGenerator(Servers([gone]), (EOS,), 4, 99).run(ListSource([GenerationRequest(0, [5], 8)]))
    with pytest.raises(DataError, match="no answer"):
        Server.connect("http://127.0.0.1:9")
    with pytest.raises(ConfigError, match="is no address"):
        Server.connect("example:8000")


def test_a_target_without_its_blocks_has_the_weights_of_the_whole_one(places):
    source, device = open_checkpoint(places / "target"), torch.device("cpu")
    ends = load_ends(source, torch.float32, device, 64)
    whole = dict(load_target(source, torch.float32, device, 64).named_parameters())
    named = dict(ends.named_parameters())
    assert len(ends.layers) == 0 and set(named) == {"embed_tokens.weight", "norm.weight"}  # the head is tied
    assert all(torch.equal(value, whole[name]) for name, value in named.items())
    assert ends.lm_head.weight is ends.embed_tokens.weight
