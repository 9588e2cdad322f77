"""Kimi-Vendor-Verifier's tool schemas on a tiny Kimi: its own suite, and the same tokens with and without a draft.

    python -m tests.peers.kimi --source CHECKOUT

The checkout is of MoonshotAI/Kimi-Vendor-Verifier, which brings Kimi's tokenizer along. The tiny Kimi has the published
architecture and names. Its blocks add nothing, so that a token's successor depends on that token alone, and every
token has a score of its own: what closes a string, an array or an object scores highest, so answers end.
"""

import argparse
import contextlib
import json
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import torch
from tests.peers.suites import SUITES
from tests.serve.interop import python_of

from slipstream.checkpoint.tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))  # for the builders of tiny models
from tiny_moe import BY_HEAD, LIGHTSEEK, as_kimi, deepseek, draft_shapes, save, tensors_of, weights, write  # noqa: E402

CONTEXT = 8192
_CLOSES, _NULL, _SEPARATES, _SPACES = 30.0, 25.0, 20.0, -10.0
_CONSTANT = 8.0  # the part that all embeddings share, and that scores are read from
TEMPLATE = (
    "{%- if tools -%}<|im_system|>tool_declare<|im_middle|>{{ tools_ts_str or tools | tojson }}<|im_end|>{%- endif -%}"
    "{%- for m in messages -%}<|im_user|>{{ m.role }}<|im_middle|>{{ m.content or '' }}<|im_end|>{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|im_assistant|>assistant<|im_middle|>"
    "{%- if thinking is defined and not thinking -%}<think></think>{%- else -%}<think>{%- endif -%}{%- endif -%}"
    "{#- <|tool_calls_section_begin|><|tool_call_begin|> -#}"
)


def build(checkout: Path, folder: Path) -> tuple[Path, Path]:
    """Write the target and a draft for it; returns their folders."""
    target, draft = folder / "kimi", folder / "draft"
    target.mkdir(parents=True)
    for name in ("tiktoken.model", "tokenizer_config.json"):
        shutil.copy(checkout / "beam" / "tokenizer" / name, target / name)
    (target / "chat_template.jinja").write_text(TEMPLATE)
    tokenizer = Tokenizer.load(target)
    size = tokenizer.vocab_size
    plain = save(deepseek(vocab_size=size, max_position_embeddings=CONTEXT), folder / "plain")
    as_kimi(plain, folder / "rewritten")
    tensors = tensors_of(folder / "rewritten")
    for name, value in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            value.zero_()
    tensors["language_model.model.embed_tokens.weight"][:, 0] = _CONSTANT
    tensors["language_model.model.norm.weight"].fill_(1.0)
    head = tensors["language_model.lm_head.weight"]
    width = head.shape[1]
    head[:, 0] = torch.tensor([_score(tokenizer.token_text(i)) for i in range(size)]) / width**0.5
    config = json.loads((folder / "rewritten" / "config.json").read_text())
    config["eos_token_id"] = tokenizer.added_token_ids["<|im_end|>"]
    write(target, config, tensors)
    follower = weights({**draft_shapes(BY_HEAD), "lm_head.weight": (size, width)})
    follower["lm_head.weight"] = head.clone()
    follower["fc.weight"] = torch.cat([torch.eye(width), torch.zeros(width, 2 * width)], dim=1)
    for name in ("midlayer.self_attn.o_proj.weight", "midlayer.mlp.down_proj.weight"):
        follower[name].zero_()
    sizes = {"vocab_size": size, "draft_vocab_size": size, "max_position_embeddings": CONTEXT}
    write(draft, {**LIGHTSEEK, **sizes}, follower)
    return target, draft


def _score(text: str) -> float:
    """Return how much a token is liked wherever a grammar allows it."""
    if not text.strip():
        return _SPACES
    if text in ('"', "}", "]", "<|tool_call_end|>", "<|tool_calls_section_end|>", "<|im_end|>"):
        return _CLOSES
    if text in ("null", "n", "nu", "nul"):
        return _NULL  # ends a list that would go on with another object
    return _SEPARATES if text in (",", ":", "{", "[", *"0123456789") else 0.0


@contextlib.contextmanager
def served(target: Path, draft: Path, log: Path) -> Iterator[str]:
    """Run `slipstream serve`; yields its address."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = int(free.getsockname()[1])
    command = [sys.executable, "-m", "slipstream", "serve", str(target), "--draft", str(draft), "--port", str(port)]
    command += ["--served-model-name", "kimi", "--max-context", str(CONTEXT), "--dtype", "float32"]
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file)
        try:
            _wait(f"http://127.0.0.1:{port}", process, log)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(60)


def _wait(url: str, process: "subprocess.Popen[bytes]", log: Path) -> None:
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        if process.poll() is not None:
            break
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{url}/health").status_code == 200:
                return
        time.sleep(0.2)
    sys.exit(f"the server does not start:\n{log.read_text()[-3000:]}")


def same_tokens(url: str, checkout: Path) -> tuple[int, int]:
    """Force a call of every schema with and without the draft; returns how many were the same, and of how many."""
    cases = sorted((checkout / "testdata" / "walle_validator_cases" / "validator_cases").glob("*/valid.jsonl"))
    schemas = [json.loads(line) for case in cases for line in case.read_text().splitlines() if line.strip()]
    same = total = 0
    with httpx.Client(base_url=url, timeout=120) as client:
        for schema in schemas:
            answers = [_forced(client, _of_object(schema), guess) for guess in (True, False)]
            if any(answer is None for answer in answers):
                continue  # the suite itself moves definitions to where references find them
            total += 1
            same += answers[0] == answers[1]
    return same, total


def _of_object(schema: Any) -> dict[str, Any]:  # any JSON schema
    """Return a schema of arguments."""
    if isinstance(schema, dict) and schema.get("type") == "object":
        return schema
    return {"type": "object", "properties": {"value": schema}, "required": ["value"]}


def _forced(client: httpx.Client, schema: dict[str, Any], speculate: bool) -> list[int] | None:
    tool = {"type": "function", "function": {"name": "submit", "parameters": schema, "strict": True}}
    body = {
        "messages": [{"role": "user", "content": "Call it."}], "tools": [tool], "tool_choice": "required", "seed": 1,
        "max_tokens": 512, "speculate": speculate, "return_token_ids": True, "thinking": {"type": "disabled"},
    }  # fmt: skip
    answer = client.post("/v1/chat/completions", json=body)
    return answer.json()["choices"][0]["token_ids"] if answer.status_code == 200 else None


def main() -> None:
    """Run the suite, then the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, required=True, help="a checkout of Kimi-Vendor-Verifier")
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "peers", help="where logs go")
    parser.add_argument("tests", nargs="*", help="instead of the schemas; pytest's options after --")
    given = parser.parse_args()
    checkout = given.source.resolve()
    given.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        target, draft = build(checkout, Path(folder))
        with served(target, draft, given.out / "kimi-tiny.log") as url:
            command = [str(python_of(SUITES["kimi"].client)), "-P", "-m", "pytest", "-p", "no:cacheprovider", "-q"]
            command += ["--tb=line", "--base-url", f"{url}/v1", "--api-key", "none", "--smoke-model", "kimi"]
            command += given.tests or [
                "--think-mode",
                "opensource",
                "--max-tokens",
                "512",
                "tests/tool_call_json_schema",
            ]
            done = subprocess.run(command, check=False, cwd=checkout)
            if given.tests:
                sys.exit(done.returncode)
            same, total = same_tokens(url, checkout)
    sys.stdout.write(f"with and without a draft, {same} of {total} forced calls have the same tokens\n")
    sys.exit(done.returncode or int(same < total))


if __name__ == "__main__":
    main()
