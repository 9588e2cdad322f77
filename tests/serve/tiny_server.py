"""A server over a tiny random model, on a real socket."""

import asyncio
import contextlib
import socket
import threading
import time
from pathlib import Path

import httpx
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, pre_tokenizers

from slipstream.checkpoint.tokenizer import Tokenizer
from slipstream.engine.engine import Engine
from slipstream.serve.app import build_app
from slipstream.serve.config import ServeConfig
from slipstream.serve.server import server_for
from slipstream.speculation.tree import TreeShape
from tiny import engine_of, follower_draft, tiny_target

TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)
EOS = 0
_CHARACTERS = "\x00abcdefghijklmnopqrstuvwxyz0123456789 .,:{}[]\"'-_+\n!?()/=truefalsenull"


def tiny_tokenizer() -> Tokenizer:
    """Return a tokenizer of 61 single bytes; any other character becomes `?`."""
    letters = list(dict.fromkeys(_CHARACTERS.replace("\x00", "")))[:60]
    byte_of = dict(zip(letters, letters, strict=True))
    alphabet = {"Ġ" if c == " " else "Ċ" if c == "\n" else c: c for c in byte_of}
    vocabulary = {"<eos>": EOS, **{name: index for index, name in enumerate(alphabet, start=1)}}
    fast = FastTokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="?"))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens(["<eos>"])
    return Tokenizer(fast, {"eos_token": "<eos>"}, Path("tiny"), TEMPLATE)


def tiny_engine(**config: object) -> Engine:
    """Return an engine with a draft that guesses well."""
    target = tiny_target()
    return engine_of(target, follower_draft(target), TreeShape(depth=3, width=2, budget=6), **config)


class Running:
    """A server in a thread, on a free port of the loopback address."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer | None = None, **settings: object) -> None:
        self.engine = engine
        self.tokenizer = tokenizer or tiny_tokenizer()
        self._socket = socket.create_server(("127.0.0.1", int(settings.pop("port", 0))))
        # Small, so that a client that does not read is noticed after kilobytes instead of megabytes.
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 14)
        self.config = ServeConfig("tiny", port=self._socket.getsockname()[1], **settings)
        self.app = build_app(engine, self.tokenizer, self.config, started=1)
        self.worker = self.app.state.service.worker
        self.server = server_for(self.app, self.config)
        self.url = f"http://127.0.0.1:{self.config.port}"
        self._thread = threading.Thread(target=self.serve_here)

    def serve_here(self) -> None:
        """Serve on this thread until a signal comes."""
        self.server.run(sockets=[self._socket])

    def __enter__(self) -> "Running":
        self.server.capture_signals = contextlib.nullcontext  # signals belong to the main thread
        self._thread.start()
        with httpx.Client() as client:
            for _ in range(500):
                with contextlib.suppress(httpx.TransportError):
                    if client.get(f"{self.url}/health").status_code == 200:
                        return self
                time.sleep(0.01)
        raise AssertionError("the server did not start")

    def __exit__(self, *_: object) -> None:
        self.server.should_exit = True
        self._thread.join()

    def client(self, **options: object) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=60, **options)

    def on_engine(self, function):
        """Run a function on the engine between two steps."""
        loop = self.worker._loop
        return asyncio.run_coroutine_threadsafe(self.worker.call(function), loop).result(60)

    def wait_idle(self) -> None:
        """Return once no answer is under way; then every page must be back."""
        for _ in range(3000):
            if self.on_engine(lambda engine: not engine.has_work):
                break
            time.sleep(0.01)
        self.on_engine(lambda engine: engine.check_invariants())
        assert self.engine.num_running == 0
        assert self.engine.page_usage == 0


if __name__ == "__main__":
    import sys

    import torch

    from slipstream.serve.logs import set_up_logs

    torch.set_num_threads(1)
    set_up_logs("info", as_json=True)
    running = Running(tiny_engine(), port=int(sys.argv[1]), drain_timeout_s=float(sys.argv[2]))
    running.serve_here()
