"""A checkpoint made to hurt ends in a sentence, within seconds and bounded memory, and opens nothing but its files."""

import gc
import json
import os
import resource
import shutil
import signal
import socket
import stat
import struct
import time
from pathlib import Path

import pytest
import torch
from mutations import use, use_tokenizer
from safetensors.torch import save_file
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import models
from typer.testing import CliRunner

from slipstream.checkpoint.chat_template import ChatTemplate
from slipstream.checkpoint.reader import open_checkpoint
from slipstream.checkpoint.tokenizer import Tokenizer
from slipstream.cli.main import app
from slipstream.engine.loading import LoadOptions, load
from slipstream.errors import CheckpointError, RequestError, SlipstreamError
from slipstream.models.load import load_target
from training import write_target_folder

WIDE = {"COLUMNS": "400"}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return write_target_folder(tmp_path_factory.mktemp("hostile") / "target")


@pytest.fixture
def folder(whole, tmp_path):
    return Path(shutil.copytree(whole, tmp_path / "model"))


@pytest.fixture(autouse=True)
def bounded():
    """Give each test 2 GiB more than the process has, and twenty seconds of this process's own time."""
    limits = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (2 << 30), limits[1]))
    started = time.process_time()
    yield
    resource.setrlimit(resource.RLIMIT_AS, limits)
    assert time.process_time() - started < 20


def change_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def write_header(folder, header, data=b"", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    content = struct.pack("<Q", len(text) if length is None else length) + text + data
    (folder / "model.safetensors").write_bytes(content)


@pytest.mark.parametrize("name", ["model-00001-of-99999999.safetensors", "model-1-of-" + "9" * 200 + ".safetensors"])
def test_a_name_that_promises_a_hundred_million_shards_costs_nothing(folder, name):
    (folder / "model.safetensors").rename(folder / name)
    with pytest.raises(CheckpointError, match=r"is one of 9+ shards, and .* and more is missing"):
        open_checkpoint(folder)


def test_an_index_that_names_nine_thousand_absent_files_is_a_short_message(folder):
    weight_map = {f"t{i}": f"model-{i}.safetensors" for i in range(9_000)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(CheckpointError, match="and 8996 more, absent from the folder") as refused:
        open_checkpoint(folder)
    assert len(str(refused.value)) < 1000


@pytest.mark.parametrize(
    "name", ["../outside.safetensors", "/outside.safetensors", "sub/../../outside.safetensors", ""]
)
def test_an_index_names_files_of_its_own_folder_only(folder, name):
    shutil.copyfile(folder / "model.safetensors", folder.parent / "outside.safetensors")
    name = name.replace("/outside", f"{folder.parent}/outside") if name.startswith("/") else name
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"lm_head.weight": name}}))
    with pytest.raises(CheckpointError, match="which is no name of a file in its folder"):
        open_checkpoint(folder)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"])
def test_a_link_out_of_the_folder_is_not_followed(folder, name):
    (folder / name).rename(folder.parent / "elsewhere") if (folder / name).exists() else (
        folder.parent / "elsewhere"
    ).write_text("{{ messages }}")
    (folder / name).symlink_to(folder.parent / "elsewhere")
    refusal = use(folder) or use_tokenizer(folder)
    assert f"{folder / name}: leads to {folder.parent / 'elsewhere'}, outside the checkpoint's folder" in refusal


def test_a_hub_cache_keeps_its_files_as_links_and_is_read(folder):
    repository = folder.parent / "models--a--b"
    snapshot = repository / "snapshots" / "0123"
    (repository / "blobs").mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for i, file in enumerate(sorted(folder.iterdir())):
        file.rename(repository / "blobs" / f"{i:064x}")
        (snapshot / file.name).symlink_to(f"../../blobs/{i:064x}")
    assert use(snapshot) == "" and use_tokenizer(snapshot) == ""


@pytest.mark.parametrize("kind", ["pipe", "socket", "device", "folder"])
@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json"])
def test_what_is_no_file_is_not_waited_for(folder, name, kind, monkeypatch):
    (folder / name).unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(folder / name)
    elif kind == "socket":
        monkeypatch.chdir(folder)  # the path of a socket has a hundred letters at most
        socket.socket(socket.AF_UNIX).bind(name)
    elif kind == "device":
        try:
            os.mknod(folder / name, stat.S_IFCHR | 0o600, os.makedev(1, 5))  # /dev/zero, which never ends
        except PermissionError:
            pytest.skip("only root makes devices")
    else:
        (folder / name).mkdir()
    refusal = use(folder) or use_tokenizer(folder)
    assert f"{folder / name}: is a {kind}, where a file is needed" in refusal


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"])
def test_a_file_of_five_gigabytes_is_not_read(folder, name):
    with (folder / name).open("wb") as file:
        file.truncate(5 << 30)
    assert "bytes, and no checkpoint's has more than" in (use(folder) or use_tokenizer(folder))


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"a":' * 100_000, "[" + "[]," * 4_000_000 + "0]", '{"a":' + "9" * 9999]
)
def test_json_made_to_exhaust_the_stack_or_the_memory_is_refused(folder, text):
    (folder / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match="not valid JSON"):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_hidden_layers": 10**9},
        {"num_hidden_layers": 999},
        {"vocab_size": 10**12},
        {"vocab_size": 1 << 24},
        {"hidden_size": 10**9},
        {"hidden_size": 1 << 24, "num_attention_heads": 1},
        {"intermediate_size": 1 << 24},
        {"head_dim": 1 << 24},
        {"num_key_value_heads": 10**300},
        {"max_position_embeddings": -1},
        {"rms_norm_eps": float("nan")},
        {"rope_theta": float("inf")},
        {"rope_theta": 1e-320},
        {"rope_parameters": None, "rope_theta": 1.0},
        {"partial_rotary_factor": 1e9},
        {"eos_token_id": [10**300] * 2_000},
        {"architectures": ["x" * 1_000_000]},
        {"hidden_act": "y" * 1_000_000},
    ],
)
def test_a_number_no_model_has_is_refused_before_memory_is_asked_for(folder, changes):
    change_config(folder, **changes)
    refusal = use(folder)
    assert refusal and len(refusal) < 3000


def test_a_context_of_sixteen_million_positions_asks_for_no_table_of_them(folder):
    change_config(folder, max_position_embeddings=1 << 24)
    loaded = load(LoadOptions(folder, "none", device="cpu", kernels="reference"))
    assert loaded.engine is not None
    loaded.close()


NAN_HEADER = b'{"a": {"dtype": "F32", "shape": [Infinity], "data_offsets": [0, 4]}}'


@pytest.mark.parametrize(
    ("header", "length", "words"),
    [
        (NAN_HEADER, None, "describes tensor 'a' wrongly"),
        ({"a": {"dtype": "F32", "shape": [1.0], "data_offsets": [0, 4]}}, None, "describes tensor 'a' wrongly"),
        ({"a": {"dtype": "F32", "shape": [-1, -1], "data_offsets": [0, 4]}}, None, "describes tensor 'a' wrongly"),
        ({"a": {"dtype": "F32", "shape": [1 << 40, 1 << 40], "data_offsets": [0, 4]}}, None, "which do not agree"),
        ({"a": {"dtype": "F32", "shape": [0, 1 << 48, 4], "data_offsets": [0, 0]}}, None, "which do not agree"),
        ({"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}}, None, "describes tensor 'a' wrongly"),
        ({"a": {"dtype": "F32", "shape": [1], "data_offsets": [1 << 40, (1 << 40) + 4]}}, None, "truncated"),
        ({"a": {"dtype": "F99", "shape": [1], "data_offsets": [0, 4]}}, None, "which safetensors does not know"),
        (
            {name: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]} for name in "ab"},
            None,
            "safetensors cannot open it",
        ),
        ({"a": []}, None, "describes tensor 'a' wrongly"),
        (b"[" * 200_000, None, "nested too deep"),
        (b"{}", 1 << 60, "truncated or not a safetensors file"),
        (b"[]", None, "it is no JSON object"),
        ({"a" * 1_000_000: {"dtype": "F32", "shape": "4", "data_offsets": [0, 4]}}, None, "wrongly"),
    ],
)
def test_a_safetensors_header_that_lies_is_refused(folder, header, length, words):
    write_header(folder, header, b"\0\0\0\0", length)
    with pytest.raises(CheckpointError, match=words) as refused:
        open_checkpoint(folder)
    assert len(str(refused.value)) < 1000


def test_a_pickle_that_claims_more_values_than_it_stores_is_refused(folder):
    (folder / "model.safetensors").unlink()
    torch.save({"a": torch.zeros(1).expand(1 << 40)}, folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="claims more values than are stored"):
        open_checkpoint(folder)


def test_a_pickle_of_tuples_in_tuples_is_refused_before_it_is_hashed(folder):
    (folder / "model.safetensors").unlink()
    key = ("x",)
    for _ in range(60):
        key = (key, key)
    nested = b"\x80\x02}" + b"X\x01\x00\x00\x00x\x85q\x00"
    for i in range(60):
        nested += b"h" + bytes([i]) + b"\x86q" + bytes([i + 1])
    (folder / "pytorch_model.bin").write_bytes(nested + b"K\x01s.")
    with pytest.raises(CheckpointError, match="is no plain table of tensors"):
        open_checkpoint(folder)


TEMPLATES = {
    "loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% for k in range(99999) %}{% endfor %}"
    "{% endfor %}{% endfor %}",
    "a product": "{{ 'a' * 10**10 }}",
    "a product of a variable": "{{ 'a' * (messages|length * 10**10) }}",
    "doubling": "{% set ns = namespace(s='a') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
    "padding": "{{ 'a'|center(10**11) }}",
    "a format": "{{ '%100000000000d' % 1 }}",
    "lists of lists": "{% set ns = namespace(s=['a']) %}{% for i in range(60) %}{% set ns.s = [ns.s, ns.s] %}"
    "{% endfor %}{{ ns.s|tojson }}",
    "macros": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(200) }}",
    "depth": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
}


@pytest.mark.parametrize("name", ["loops", "a product of a variable", "depth"])
def test_a_template_that_never_ends_is_the_end_of_one_request(name):
    template = ChatTemplate(TEMPLATES[name], "model")
    with pytest.raises(RequestError, match=r"model: the chat template cannot be rendered within its limits \(it "):
        template.render({"messages": [{"role": "user", "content": "hi"}]})
    # Another template, or another request to this one, is none the worse.
    assert ChatTemplate("{{ messages[0].content }}", "model").render({"messages": [{"content": "hi"}]}) == "hi"


def test_a_template_whose_process_was_killed_between_two_requests_is_rendered_all_the_same():
    others = children_that_render()
    template = ChatTemplate("{{ x }}", "model")
    assert template.render({"x": 1}) == "1"
    [child] = children_that_render() - others
    os.kill(child, signal.SIGKILL)
    while Path(f"/proc/{child}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z":
        os.sched_yield()
    assert template.render({"x": 2}) == "2"
    del template
    gc.collect()
    assert children_that_render() <= others


def children_that_render():
    """Return the processes of this one that render templates."""
    own = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return {int(pid) for pid in own if b"template_program" in Path(f"/proc/{pid}/cmdline").read_bytes()}


@pytest.mark.crash
@pytest.mark.parametrize("name", TEMPLATES)
def test_every_template_that_never_ends_is_ended(name):
    with pytest.raises(RequestError, match="cannot be rendered within its limits"):
        ChatTemplate(TEMPLATES[name], "model").render({"messages": [{"role": "user", "content": "hi"}]})


@pytest.mark.parametrize("source", ["{{" * 30_000, "{{ " + "(" * 50_000, "x" * (1 << 18)])
def test_a_template_that_is_nested_too_deep_or_too_long_is_refused_when_read(source):
    with pytest.raises(CheckpointError, match=r"nested too deep|characters; at most"):
        ChatTemplate(source, "model")


def tokenizer_json(**parts):
    """Return a tokenizer of characters with parts of its own."""
    vocab = {chr(97 + i): i for i in range(26)} | {"<unk>": 26}
    plain = json.loads(FastTokenizer(models.BPE(vocab, [], unk_token="<unk>")).to_str())
    return json.dumps({**plain, **parts})


def doubling(count):
    replace = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
    return {"type": "Sequence", "normalizers": [replace] * count}


def split(pattern):
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


BOMBS = {
    "replacements": {"normalizer": doubling(40)},
    "a long replacement": {"normalizer": {"type": "Replace", "pattern": {"String": "a"}, "content": "b" * 1_000_000}},
    "nested repeats": {"pre_tokenizer": split(r"(a+)+(a+)+(a+)+$")},
    "many repeats": {"pre_tokenizer": split("a*" * 12 + "[^a]")},
    "a charsmap": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
    "a decoder": {"decoder": {"type": "Replace", "pattern": {"String": "a"}, "content": "b" * 100_000}},
    "a long token": {"added_tokens": [{"id": 27, "content": "z" * 100_000, "special": True}]},
    "a far id": {"added_tokens": [{"id": 1 << 40, "content": "z", "special": True}]},
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_tokenizer_that_unfolds_or_backtracks_without_end_is_refused(folder, name):
    (folder / "tokenizer.json").write_text(tokenizer_json(**BOMBS[name]))
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: "):
        Tokenizer.load(folder)


def test_a_character_that_a_tokenizer_has_no_token_for_is_the_requests_failure(folder):
    settings = json.loads(tokenizer_json())
    settings["model"]["unk_token"] = "absent"
    (folder / "tokenizer.json").write_text(json.dumps(settings))
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.encode("ab") == [0, 1]
    with pytest.raises(RequestError, match="its tokenizer cannot encode this text"):
        tokenizer.encode("a7")


@pytest.mark.parametrize(
    "pattern",
    [
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s+(?!\S)|\s+",
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t)?|\p{N}{1,3}|\s+(?!\S)|\s+",
    ],
)
def test_the_usual_patterns_are_read(folder, pattern):
    (folder / "tokenizer.json").write_text(tokenizer_json(pre_tokenizer=split(pattern)))
    assert Tokenizer.load(folder).encode("ab", add_special=False) == [0, 1]


def test_an_expression_of_a_quantization_config_that_backtracks_without_end_is_refused(folder):
    weights = {"type": "int", "num_bits": 4, "strategy": "channel"}
    group = {"targets": ["re:(.*)*(.*)*(.*)*(.*)*(.*)*x$"], "weights": weights}
    change_config(
        folder,
        num_hidden_layers=1,
        quantization_config={"quant_method": "compressed-tensors", "config_groups": {"group_0": group}},
    )
    name = "model.layers.0.self_attn.q_proj" + ".aaaa" * 20
    save_file(
        {f"{name}.weight_packed": torch.zeros(1), f"{name}.weight_scale": torch.zeros(1)}, folder / "m.safetensors"
    )
    (folder / "m.safetensors").replace(folder / "model.safetensors")
    with pytest.raises(CheckpointError, match="holds an expression that cannot be matched"):
        load_target(open_checkpoint(folder), torch.float32, torch.device("cpu"))


@pytest.mark.parametrize("name", ["br[/b]ack", "[bold]x[", "[red]\x1b[31m"])
def test_a_folder_is_shown_by_its_name_whatever_that_is(whole, tmp_path, name, monkeypatch, capsys):
    odd = Path(shutil.copytree(whole, tmp_path / name))
    result = CliRunner().invoke(app, ["inspect", str(odd)], env=WIDE)
    assert result.exit_code == 0, result.exception
    assert name.replace("\x1b", "\\x1b") in result.output
    quantized = CliRunner().invoke(app, ["quantize", str(odd), "--scheme", "fp8", "--out", f"{odd}-fp8"], env=WIDE)
    assert quantized.exit_code == 0, quantized.output
    (odd / "config.json").unlink()
    monkeypatch.setattr("sys.argv", ["slipstream", "inspect", str(odd)])
    from slipstream.cli.main import main

    with pytest.raises(SystemExit):
        main()
    assert name.replace("\x1b", "\\x1b") in capsys.readouterr().err


def test_verbs_refuse_a_checkpoint_that_leads_elsewhere(folder):
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../../../etc/passwd"}}))
    for line in (["inspect", folder], ["quantize", folder, "--scheme", "fp8", "--out", folder.parent / "q"],
                 ["generate", "--model", folder, "--draft", "none", "hi"]):  # fmt: skip
        result = CliRunner().invoke(app, [str(word) for word in line], env=WIDE)
        assert isinstance(result.exception, SlipstreamError), result.output
        assert "which is no name of a file in its folder" in str(result.exception)


def test_quantize_copies_nothing_from_outside_the_folder(folder):
    (folder.parent / "secret").write_text("secret")
    (folder / "notes.txt").symlink_to(folder.parent / "secret")
    (folder / "more.txt").write_text("more")
    line = ["quantize", str(folder), "--scheme", "fp8", "--out", str(folder.parent / "q")]
    assert CliRunner().invoke(app, line, env=WIDE).exit_code == 0
    assert (folder.parent / "q" / "more.txt").read_text() == "more"
    assert not (folder.parent / "q" / "notes.txt").exists()
