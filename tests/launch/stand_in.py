"""Stands for an engine: takes its command line, starts a child as engines do, and answers /health on its first node."""

import argparse
import http.server
import os
import subprocess
import sys
import time
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("model")
parser.add_argument("--host")
parser.add_argument("--port", type=int)
parser.add_argument("--headless", action="store_true")
parser.add_argument("--pids", type=Path)
given, _ = parser.parse_known_args()

child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
if given.pids:
    node = os.environ["NODE"]
    (given.pids / f"{node}.part").write_text(f"{os.getpid()} {child.pid}")
    (given.pids / f"{node}.part").rename(given.pids / node)
if given.headless:
    time.sleep(600)


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        return


http.server.HTTPServer((given.host, given.port), Handler).serve_forever()
