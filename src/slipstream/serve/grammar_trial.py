"""A process that tries grammars before the server compiles them: what one crashes, hangs or fills is thrown away.

The server runs this file with nothing but llguidance in it. It builds the tokenizer once and then forks for every
grammar, so a trial costs a few milliseconds and leaves nothing behind. A trial lives under limits of its own (below)
and so cannot outlive them; the process ends when the server's end of the control socket closes.
"""

import contextlib
import functools
import json
import os
import random
import resource
import select
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn

from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import GbnfToLarkError, gbnf_to_lark

# What a trial may take. A grammar that passes is compiled by the server with four times the stack, at least.
MAX_CPU_S = 2.0
MAX_WALL_S = 8.0
MAX_MEMORY = 512 << 20
MAX_STACK = 2 << 20
MAX_MASK_S = 0.2

# llguidance's own limits, for the trial and for the server: they also bound every later mask. Its defaults refuse an
# object of 500 optional properties; a lexer state takes about a kilobyte, for each request.
MAX_ITEMS_IN_ROW = 5_000
MAX_STEP_ITEMS = 100_000
MAX_LEXER_STATES = 30_000

# Unbounded white space between tokens is valid JSON, and small models fill an answer with it.
WHITE_SPACE = r"[\x20\x0A]{0,8}"
_WALK_TOKENS = 24
_WALK_S = 0.5  # a walk ends where it has taken this long; its masks were quick enough
_CANDIDATES = 64
_STRUCTURE = b'{}[],:"'
_BEGINNINGS = ((b"{", b'"'), (b"[", b'{"'), (b"{", b'"'), ())  # of the walks: into objects, into arrays, anywhere
LENGTH_BYTES = 8
_MAX_REASON = 500  # characters; a message may repeat the whole grammar


@dataclass(frozen=True)
class GrammarSource:
    """What an answer must follow, as a client wrote it.

    Args:
        kind: `gbnf` is the dialect of llama.cpp and xgrammar (`root ::= ...`), `lark` llguidance's own.
        white_space: what may stand between the tokens of JSON, as a regular expression; None for none at all.
        body: another grammar, which this one (of kind `lark`) refers to as `@body`.
    """

    kind: Literal["json_schema", "regex", "lark", "gbnf"]
    text: str
    white_space: str | None = WHITE_SPACE
    body: "GrammarSource | None" = None


def compile_grammar(tokenizer: LLTokenizer, source: GrammarSource) -> LLMatcher:
    """Return a grammar's matcher; ValueError says why there is none."""
    grammar = _llguidance(source)
    limits = LLParserLimits(
        max_items_in_row=MAX_ITEMS_IN_ROW,
        step_max_items=MAX_STEP_ITEMS,
        max_lexer_states=MAX_LEXER_STATES,
        verbose_errors=False,
    )
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
    if matcher.is_error():
        raise ValueError(reason(matcher))
    return matcher


def _source(asked: dict[str, Any]) -> GrammarSource:  # JSON of the server's own
    body = asked.pop("body", None)
    return GrammarSource(**asked, body=None if body is None else _source(body))


def _llguidance(source: GrammarSource) -> str:
    """Return a grammar in the form llguidance takes."""
    if source.kind == "regex":
        return str(LLMatcher.grammar_from_regex(source.text))
    if source.body is not None:
        inner = _llguidance(source.body)
        body = {"lark_grammar": inner} if source.body.kind in ("lark", "gbnf") else json.loads(inner)["grammars"][0]
        return json.dumps({"grammars": [{"lark_grammar": source.text}, {**body, "name": "body"}]})
    if source.kind == "lark":
        return source.text
    if source.kind == "gbnf":
        try:
            return str(gbnf_to_lark(source.text))
        except GbnfToLarkError as error:
            raise ValueError(str(error)) from error
    flexible = (
        {"whitespace_flexible": False} if source.white_space is None else {"whitespace_pattern": source.white_space}
    )
    return str(LLMatcher.grammar_from_json_schema(source.text, overrides=flexible))


def reason(matcher: LLMatcher) -> str:
    """Return why a matcher is in an error state, without what llguidance leaves out of its message."""
    text: str = matcher.get_error()
    return text.removesuffix("\n<non-verbose/>")[:_MAX_REASON]


def serve_trials(control: socket.socket, tokenizer: LLTokenizer) -> None:
    """Say that the tokenizer is read, then fork a supervisor for every socket that comes, until `control` closes."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for supervisors
    control.sendall(b"r")
    while True:
        message, sockets, _, _ = socket.recv_fds(control, 1, 1)
        if not message:
            return
        if os.fork() == 0:
            control.close()
            _in_child(functools.partial(_supervise, sockets[0], tokenizer))
        os.close(sockets[0])


def _supervise(descriptor: int, tokenizer: LLTokenizer) -> None:
    """Run one trial and answer how it ended; stop it if the server no longer asks."""
    connection = socket.socket(fileno=descriptor)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    length = int.from_bytes(_receive(connection, LENGTH_BYTES), "big")
    asked = json.loads(_receive(connection, length))
    outcome, write_end = os.pipe()
    trial = os.fork()
    if trial == 0:
        os.close(outcome)
        connection.close()
        source = _source(asked["grammar"])
        _in_child(lambda: os.write(write_end, json.dumps(_try(tokenizer, source, asked["cpu_s"])).encode()))
    os.close(write_end)
    ready, _, _ = select.select([outcome, descriptor], [], [])
    if descriptor in ready:
        os.kill(trial, signal.SIGKILL)
        return
    text = os.read(outcome, 1 << 16)  # a trial writes once, less than a pipe takes at a time, or not at all
    _, status = os.waitpid(trial, 0)
    reply = text or json.dumps({"signal": -os.waitstatus_to_exitcode(status)}).encode()
    connection.sendall(reply)


def _try(tokenizer: LLTokenizer, source: GrammarSource, cpu_s: float) -> dict[str, object]:
    """Compile a grammar under limits, then take some first steps of answers along it."""
    before = _pages()[1]
    _limit_this_process(cpu_s)
    try:
        started = time.process_time()
        matcher = compile_grammar(tokenizer, source)
        compile_s = time.process_time() - started
        slowest_s = _walk(matcher, tokenizer)
    except ValueError as error:
        return {"error": str(error)[:_MAX_REASON]}
    except MemoryError:
        return {"signal": int(signal.SIGABRT)}
    if slowest_s > MAX_MASK_S:
        return {"mask_s": slowest_s}
    return {"compile_s": compile_s, "bytes": max(_pages()[1] - before, 0)}


def _walk(matcher: LLMatcher, tokenizer: LLTokenizer) -> float:
    """Follow the grammar along random tokens, as answers do; return the slowest step's seconds."""
    choice = random.Random(0)
    slowest_s = 0.0
    deadline = time.process_time() + _WALK_S
    for beginning in _BEGINNINGS:
        state = matcher.deep_copy()
        for preferred in (*beginning, *[_STRUCTURE] * _WALK_TOKENS):
            started = time.process_time()
            mask = state.compute_bitmask()
            masked = time.process_time()
            if state.is_stopped():
                break
            token = _pick(mask, tokenizer, preferred, choice)
            chosen = time.process_time()
            state.consume_token(token)
            slowest_s = max(slowest_s, masked - started, time.process_time() - chosen)
            if state.is_error() or time.process_time() > deadline:
                break
        if state.is_error():
            raise ValueError(reason(state))
    return slowest_s


def _pick(mask: bytes, tokenizer: LLTokenizer, preferred: bytes, choice: random.Random) -> int:
    """Prefer tokens with some bytes that open, close or separate: random letters would never leave a string."""
    start = choice.randrange(len(mask))
    bits = int.from_bytes(mask[start:] + mask[:start], "little")
    some: list[int] = []
    while bits and len(some) < _CANDIDATES:
        lowest = (bits & -bits).bit_length() - 1
        some.append((lowest + 8 * start) % (8 * len(mask)))
        bits &= bits - 1
    best = [i for i in some if any(byte in preferred for byte in tokenizer.decode_bytes([i]))]
    return choice.choice(best or some)


def _limit_this_process(cpu_s: float) -> None:
    if cpu_s >= MAX_CPU_S:
        os.nice(5)  # a quarter of a core where the engine takes all of them
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)  # what a library says while it dies is not for the server's log
    with contextlib.suppress(OSError):  # Linux: if memory runs out all the same, it is this process that goes
        Path("/proc/self/oom_score_adj").write_text("1000")
    _, hard = resource.getrlimit(resource.RLIMIT_STACK)
    _set_limit(resource.RLIMIT_STACK, stack_bytes(), hard)
    _set_limit(resource.RLIMIT_CORE, 0, 0)
    if in_use := _pages()[0]:  # macOS does not tell, and does not keep to this limit either
        _set_limit(resource.RLIMIT_AS, in_use + MAX_MEMORY, in_use + MAX_MEMORY)
    # Nothing handles these signals, so they end the process wherever it is, native code included.
    signal.setitimer(signal.ITIMER_PROF, cpu_s)
    signal.setitimer(signal.ITIMER_REAL, MAX_WALL_S)


def stack_bytes() -> int:
    """Return a trial's stack: a quarter of what a thread of the server gets, which is where answers are followed."""
    soft, _ = resource.getrlimit(resource.RLIMIT_STACK)
    thread = MAX_STACK if soft == resource.RLIM_INFINITY else soft  # glibc's default where there is no limit
    return min(MAX_STACK, thread // 4)


def _set_limit(kind: int, soft: int, hard: int) -> None:
    with contextlib.suppress(ValueError, OSError):  # not every system takes every limit
        resource.setrlimit(kind, (soft, hard))


def _pages() -> tuple[int, int]:
    """Return this process's address space and resident memory in bytes; zeros where /proc is not to be had."""
    try:
        size, resident, *_ = Path("/proc/self/statm").read_text().split()
    except OSError:
        return 0, 0
    return int(size) * resource.getpagesize(), int(resident) * resource.getpagesize()


def _receive(connection: socket.socket, length: int) -> bytes:
    parts: list[bytes] = []
    while length > 0:
        part = connection.recv(min(length, 1 << 16))
        if not part:
            os._exit(0)  # the server gave up
        parts.append(part)
        length -= len(part)
    return b"".join(parts)


def _in_child(work: Callable[[], object]) -> NoReturn:
    """Do the work of a forked process and end it there, whatever happens: its caller's loop belongs to the parent."""
    try:
        work()
    finally:
        os._exit(0)


def main() -> None:
    """Read the tokenizer from standard input, and try grammars; the argument is the control socket's descriptor."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the server, which then closes the control socket
    setup = json.load(sys.stdin)
    tokenizer = LLTokenizer(setup["tokenizer"], n_vocab=setup["vocab_size"], eos_token=setup["eos_token_ids"] or None)
    serve_trials(socket.socket(fileno=int(sys.argv[1])), tokenizer)


if __name__ == "__main__":
    main()
