"""Damage done to small checkpoints, from a seed: what a file may hold when somebody broke it or means harm."""

import json
import math
import random
import struct
from pathlib import Path

import torch

from slipstream.checkpoint.reader import open_checkpoint
from slipstream.checkpoint.summary import summarise
from slipstream.checkpoint.tokenizer import Tokenizer
from slipstream.errors import SlipstreamError
from slipstream.models.load import load_target
from slipstream.quant.plan import QuantizeOptions, plan_quantize
from slipstream.quant.scheme import scheme_named

NUMBERS = (
    0, -1, 1, 2, 3, 7, 255, 1 << 16, 1 << 24, (1 << 24) + 1, 1 << 31, 1 << 60, 10**9, 10**12, 10**300, -(1 << 63),
    0.5, -0.0, 1e-320, 1e38, 1e308, math.inf, -math.inf, math.nan,
)  # fmt: skip
OTHERS = (None, True, False, "", "x", "2", "re:(a+)+$", "\x1b[2J", [], [1], [[]], {}, {"a": 1}, "é" * 2000)


def mutate_json(value, rng: random.Random):
    """Return a copy of a JSON value with one entry, at any depth, changed, dropped, doubled or renamed."""
    copy = json.loads(json.dumps(value))
    places = []

    def walk(node):
        keys = list(node) if isinstance(node, dict) else range(min(len(node), 40))
        for key in keys:
            places.append((node, key))
            if isinstance(node[key], dict | list):
                walk(node[key])

    walk(copy)
    node, key = rng.choice(places)
    kind = rng.randrange(5)
    if kind == 0:
        del node[key]
    elif kind == 1 and isinstance(node, dict):
        node[rng.choice(("x", "", key + key))] = node.pop(key)
    elif kind == 2:
        other, other_key = rng.choice(places)
        node[key] = json.loads(json.dumps(other[other_key]))
    else:
        node[key] = rng.choice(NUMBERS if rng.random() < 0.6 else OTHERS)
    return copy


def mutate_bytes(content: bytes, rng: random.Random) -> bytes:
    """Return bytes of which some are changed, cut out or put in, mostly near the front, where headers are."""
    data = bytearray(content)
    for _ in range(rng.randrange(1, 4)):
        at = min(int(len(data) * rng.random() ** 3), len(data) - 1)
        kind = rng.randrange(5)
        if kind == 0:
            data[at] = rng.randrange(256)
        elif kind == 1:
            data[at : at + 8] = struct.pack("<Q", rng.choice((0, 1, 1 << 20, 1 << 32, 1 << 60, (1 << 64) - 1)))
        elif kind == 2:
            del data[at : at + rng.randrange(1, 64)]
        elif kind == 3:
            data[at:at] = rng.randbytes(rng.randrange(1, 32))
        else:
            data[at : at + 4] = struct.pack("<I", rng.choice((0, 1, 8, 9, 12, 255, 1 << 31)))
        if not data:
            return b""
    return bytes(data)


def mutate_header(content: bytes, rng: random.Random) -> bytes:
    """Return a safetensors file with one entry of its header changed and the length made right again."""
    length = int.from_bytes(content[:8], "little")
    header = json.dumps(mutate_json(json.loads(content[8 : 8 + length]), rng)).encode()
    return len(header).to_bytes(8, "little") + header + content[8 + length :]


def use(path: Path) -> str:
    """Do with a checkpoint what the verbs do; return the refusal, or "" if it is fine after all.

    Whatever else is raised than a SlipstreamError is the caller's to report.
    """
    try:
        source = open_checkpoint(path)
        summarise(source)
        if path.suffix != ".gguf":
            plan_quantize(path, QuantizeOptions(scheme_named("ptpc_fp8", None)))
    except SlipstreamError as error:
        refusal = str(error)
    else:
        refusal = ""
    try:
        load_target(open_checkpoint(path), torch.float32, torch.device("cpu"), max_position=64)
    except SlipstreamError as error:
        refusal = refusal or str(error)
    return refusal


def use_tokenizer(path: Path) -> str:
    """Load a tokenizer, encode, decode and render; return the refusal, if any."""
    try:
        tokenizer = Tokenizer.load(path)
        ids = tokenizer.encode("Hello, world! 123 é  \n x")
        tokenizer.decode(ids)
        detokenizer = tokenizer.detokenizer()
        detokenizer.push(ids)
        detokenizer.finish()
        if tokenizer.has_chat_template:
            tokenizer.render_chat([{"role": "user", "content": "hi"}])
    except SlipstreamError as error:
        return str(error)
    return ""
