"""Compares prompts of our server with those that Kimi's own tokenizer code makes, token by token."""

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
from tests.peers.kimi_chats import chat, spells
from tests.serve.interop import Client, python_of

COUNT = 200
# Kimi's code is from before transformers 5 moved what it imports, which the newer ones still find.
TOKENIZER = Client("peers-kimi-tokenizer", ("tiktoken", "transformers"))

Json = dict[str, Any]


def theirs(chats: Sequence[Json], tokenizer_folder: Path, template: Path, work: Path) -> list[dict[str, list[int]]]:
    """Return each prompt's tokens by Kimi's code: `plain`, and with control tokens that texts spell `kept` texts."""
    asked = work / "kimi-chats.jsonl"
    asked.write_text("\n".join(json.dumps(one) for one in chats), encoding="utf-8")
    script = Path(__file__).resolve().parent / "count_kimi.py"
    command = [str(python_of(TOKENIZER)), "-P", str(script), str(tokenizer_folder), str(template), str(asked)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    found = [json.loads(line[1:]) for line in done.stdout.splitlines() if line.startswith("#{")]
    assert len(found) == len(chats), done.stderr[-3000:]
    return found


def ours(address: str, request: Json) -> tuple[list[int], int]:
    """Return the tokens of a prompt as our server tells them, and how many it says they are."""
    body = {**request, "thinking": {"type": "enabled" if request["thinking"] else "disabled"}}
    body |= {"max_tokens": 1, "return_token_ids": True}
    answer = httpx.post(f"{address}/v1/chat/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    told = answer.json()
    return told["prompt_token_ids"], told["usage"]["prompt_tokens"]


def same_prompts(address: str, expected: Sequence[dict[str, list[int]]], chats: Sequence[Json], kind: str) -> bool:
    """Tell whether all prompts are the same tokens, and counted so."""
    counts: Counter[str] = Counter()
    for number, (request, tokens) in enumerate(zip(chats, expected, strict=True)):
        found, count = ours(address, request)
        same = found == tokens[kind] and count == len(tokens[kind])
        counts["same" if same else "different"] += 1
        counts["with tools"] += "tools" in request
        counts["that spell control tokens"] += spells(request)
        counts["tokens"] += count
        if not same:
            sys.stdout.write(f"chat {number} has {len(tokens[kind])} tokens, and {count} on our server\n")
    sys.stdout.write(f"prompts, control tokens in texts {kind}: {dict(counts)}\n")
    return counts["same"] == len(chats)


def the_chats(schemas: Sequence[Json]) -> list[Json]:
    """Return the chats that are compared."""
    return [chat(seed, schemas) for seed in range(COUNT)]
