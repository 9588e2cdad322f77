"""What tests of a server under trouble share: a brake on its engine, bare sockets, and a server in its own process."""

import json
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
from tiny_server import Running

from ports import free_port

TEXT = {"prompt": "once upon", "max_tokens": 60, "ignore_eos": True, "seed": 3, "temperature": 1}


class Brake:
    """Stops the engine before each step until the test lets it go on, so that nothing depends on time."""

    def __init__(self, engine) -> None:
        self.go = threading.Semaphore(0)
        self.num_begun = 0
        self.num_steps = 0
        self._step = engine.step
        engine.step = self._braked

    def _braked(self, patience_s):
        self.num_begun += 1
        self.go.acquire()
        self.num_steps += 1
        return self._step()  # one pass, however patient

    def release(self) -> None:
        self.go.release(1_000_000)


def eventually(condition) -> None:
    for _ in range(2000):
        if condition():
            return
        time.sleep(0.005)
    raise AssertionError("it did not come to be")


def ask(
    server: Running, body: dict | None = None, path: str = "/v1/completions", raw: bytes | None = None
) -> socket.socket:
    """Send a request, or raw bytes, over a bare socket and leave the answer unread."""
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(content)}\r\n\r\n"
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(("127.0.0.1", server.config.port))
    connection.sendall(head.encode() + content if raw is None else raw)
    return connection


def start_process(drain_s: float, max_files: int = 1024) -> tuple[subprocess.Popen, httpx.Client]:
    port = free_port()
    folder = Path(__file__).parent
    root = folder.parents[1]
    environment = {**os.environ, "PYTHONPATH": f"{root / 'src'}:{folder.parent}:{folder}"}
    command = ["sh", "-c", f'ulimit -n {max_files} && exec "$@"', "sh"]
    command += [sys.executable, str(folder / "tiny_server.py"), str(port), str(drain_s)]
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60)

    def answers() -> bool:
        try:
            return httpx.get(f"{client.base_url}/health").status_code == 200
        except httpx.TransportError:
            return False

    eventually(answers)
    return process, client
