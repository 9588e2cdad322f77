"""A schema that crashes, hangs or fills the grammar library is a 400; the server and other clients do not notice."""

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import httpx
import pytest
from tiny_server import tiny_engine, tiny_tokenizer

from ports import free_port
from slipstream.errors import RequestError
from slipstream.serve import trials
from slipstream.serve.errors import HttpError
from slipstream.serve.grammar import GrammarCompiler
from slipstream.serve.grammar_trial import GrammarSource
from slipstream.serve.structured import Constraint

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="other systems do not limit a trial's memory and stack")

SMALL = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
CHAIN = {f"d{i}": {"type": "object", "properties": {"a": {"$ref": f"#/$defs/d{(i + 1) % 3000}"}}} for i in range(3000)}
PATTERNS = [{"pattern": f".*{chr(97 + i)}.{{5}}b.*"} for i in range(25)]
WIDE = {"anyOf": [{"properties": {f"p{i + j}": {"type": "string"} for j in range(10)}} for i in range(300)]}
HOSTILE = {
    "deep references": ({"$ref": "#/$defs/d0", "$defs": CHAIN}, "2 MiB of stack"),
    "patterns that multiply": ({"type": "string", "allOf": PATTERNS}, "takes over"),
    "wide alternatives": (WIDE, "items"),
    "a large text": ({"enum": ["x" * (1 << 20)]}, "1048576"),
    "a file": ({"$ref": "file:///etc/passwd"}, "cannot be followed"),
}


class ServerProcess:
    """The tiny server in a process of its own, which a test may crash."""

    def __init__(self) -> None:
        folder = Path(__file__).parent
        paths = [str(folder.parents[1] / "src"), str(folder.parent), str(folder)]
        port = free_port()
        self.process = subprocess.Popen(
            [sys.executable, str(folder / "tiny_server.py"), str(port), "5"],
            env={**os.environ, "PYTHONPATH": ":".join(paths)},
            stderr=subprocess.PIPE,
            text=True,
        )
        self.url = f"http://127.0.0.1:{port}"
        self.lines: list[str] = []
        self._reader = threading.Thread(target=lambda: self.lines.extend(self.process.stderr), daemon=True)
        self._reader.start()
        eventually(self.is_healthy)

    def is_healthy(self) -> bool:
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(f"{self.url}/health", timeout=60).status_code == 200
        return False

    def ask(self, schema: object) -> httpx.Response:
        wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        body = {"prompt": "x", "max_tokens": 8, "response_format": wanted}
        return httpx.post(f"{self.url}/v1/completions", json=body, timeout=120)

    def trial_process(self) -> int:
        found = re.search(r"tried in process (\d+)", "".join(self.lines))
        return int(found.group(1)) if found else 0


def eventually(condition) -> None:
    for _ in range(3000):
        if condition():
            return
        time.sleep(0.02)
    raise AssertionError("it did not come to be")


def is_running(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


@pytest.fixture(scope="module")
def process():
    server = ServerProcess()
    yield server
    server.process.kill()
    server.process.wait()
    if trial := server.trial_process():  # ends with the server, however that ends
        eventually(lambda: not is_running(trial))


@pytest.mark.parametrize(("schema", "said"), HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_schema_is_a_400_that_says_which_limit_while_health_goes_on(process, schema, said):
    slowest_s = 0.0
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(process.ask, schema)
        while not asked.done():
            started = time.monotonic()
            assert process.is_healthy()
            slowest_s = max(slowest_s, time.monotonic() - started)
            wait([asked], 0.1)
    answer = asked.result()
    assert answer.status_code == 400, answer.text
    assert slowest_s < 2
    error = answer.json()["error"]
    assert error["param"] == "response_format.json_schema.schema"
    assert said in error["message"]
    assert process.process.poll() is None


@pytest.mark.parametrize(
    "schema",
    [
        SMALL,
        {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(500)}},
        {"anyOf": [{"properties": {f"k{i}": {"type": "integer"}}, "required": [f"k{i}"]} for i in range(300)]},
        {"$ref": "#/$defs/d0", "$defs": {**dict(list(CHAIN.items())[:100]), "d100": {"type": "null"}}},
    ],
    ids=["small", "500 optional properties", "300 alternatives", "100 references deep"],
)
def test_a_large_honest_schema_is_followed(process, schema):
    answer = process.ask(schema)
    assert answer.status_code == 200, answer.text


def json_schema(schema: object) -> Constraint:
    return Constraint(GrammarSource("json_schema", json.dumps(schema)), "response_format")


@pytest.fixture
def compiler():
    compiler = GrammarCompiler(tiny_tokenizer(), tiny_engine().vocab_size)
    yield compiler
    compiler.close()


def test_a_killed_trial_process_is_replaced_and_verdicts_outlive_it(compiler):
    refused = json_schema({"$ref": "#/$defs/d0", "$defs": CHAIN})

    async def use() -> None:
        assert await compiler.compile(json_schema(SMALL)) is not None
        with pytest.raises(HttpError, match="too deep"):
            await compiler.compile(refused)
        first = compiler._trials._process
        first.kill()
        first.wait()
        assert await compiler.compile(json_schema(SMALL)) is not None
        with pytest.raises(HttpError, match="too deep"):
            await compiler.compile(refused)
        assert compiler._trials._process is first  # both were known
        assert await compiler.compile(json_schema({**SMALL, "title": "another"})) is not None
        assert compiler._trials._process is not first

    asyncio.run(use())


def test_one_schema_asked_for_by_many_at_once_is_tried_once(compiler):
    tried = []
    attempt = compiler._trials.attempt

    async def counted(source: GrammarSource):
        tried.append(source)
        return await attempt(source)

    async def use() -> None:
        compiler._trials.attempt = counted
        grammars = await asyncio.gather(*(compiler.compile(json_schema(SMALL)) for _ in range(5)))
        assert len(set(map(id, grammars))) == 5  # each with a lexer of its own

    asyncio.run(use())
    assert tried == [json_schema(SMALL).source]


def test_a_schema_that_gets_no_time_on_a_busy_machine_may_be_asked_for_again(compiler, monkeypatch):
    async def starved(*_):
        return trials._verdict({"signal": int(signal.SIGALRM)})

    async def use() -> None:
        with monkeypatch.context() as patched:
            patched.setattr(trials, "_ask", starved)
            with pytest.raises(HttpError, match="too busy") as refused:
                await compiler.compile(json_schema(SMALL))
        assert refused.value.status == 429 and "Retry-After" in refused.value.headers
        assert await compiler.compile(json_schema(SMALL)) is not None

    asyncio.run(use())


def test_an_answer_that_comes_to_a_limit_fails_with_a_reason_and_leaves_others_alone(compiler):
    late = {"type": "array", "prefixItems": [{"type": "string", "minLength": 150}, WIDE], "minItems": 2}
    tokenizer = tiny_tokenizer()

    async def use():
        return await compiler.compile(json_schema(late)), await compiler.compile(json_schema(late))

    grammar, other = asyncio.run(use())
    state, neighbour = grammar.start(), other.start()
    beginning = tokenizer.encode('["' + 150 * "x" + '",')
    for one in (state, neighbour):
        one.advance(beginning)
    expected = state.allowed([])
    with pytest.raises(RequestError, match="response_format cannot be followed any further"):
        state.allowed(tokenizer.encode('{"p'))
    assert state.allowed([]).equal(expected)  # the target may take another path than the draft
    with pytest.raises(RequestError, match="response_format cannot be followed any further"):
        state.advance(tokenizer.encode('{"p'))
    assert neighbour.allowed([]).any()
    assert not neighbour.finished


def test_a_trial_under_way_ends_when_nobody_waits_for_it(compiler):
    async def use() -> int:
        assert await compiler.compile(json_schema(SMALL)) is not None
        pid = compiler._trials._process.pid
        trial = asyncio.ensure_future(
            compiler._trials.attempt(json_schema({"type": "string", "allOf": PATTERNS}).source)
        )
        while not await asyncio.to_thread(children, pid):
            await asyncio.sleep(0.01)
        trial.cancel()
        return pid

    pid = asyncio.run(use())
    eventually(lambda: not children(pid))


def children(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
