"""Runs other projects' clients against a server of ours, over the embedded model: `python -m tests.peers.clients`.

They are installed into a folder of their own on first use (`--work`); without node, its clients are left out.
"""

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
PYTHON_CLIENTS = ("openai", "anthropic", "litellm", "langchain", "llama_index", "instructor", "pydantic_ai", "llm")
NODE_CLIENTS = ("openai_node", "ai_sdk")


def main() -> None:
    """Run the clients that were named, or all, and print what became of each use."""
    parser = argparse.ArgumentParser(prog="python -m tests.peers.clients", description=__doc__)
    parser.add_argument("--work", type=Path, required=True, help="folder for the clients' environments")
    parser.add_argument("--port", type=int, default=18300)
    parser.add_argument("--record", type=Path, help="write the outcome there, as JSON")
    parser.add_argument("clients", nargs="*", choices=[*PYTHON_CLIENTS, *NODE_CLIENTS, []])
    asked = parser.parse_args()
    clients = asked.clients or [*PYTHON_CLIENTS, *NODE_CLIENTS]
    if shutil.which("node") is None:
        clients = [name for name in clients if name not in NODE_CLIENTS]
        print(f"left out, for there is no node: {', '.join(NODE_CLIENTS)}")  # noqa: T201
    python, node = _python(asked.work), _node(asked.work)
    found: dict[str, list[dict[str, object]]] = {}
    with _server(asked.port) as url:
        for name in clients:
            found[name] = _run(python, node, name, url)
            failed = [use for use in found[name] if not use["ok"]]
            print(f"{name}: {len(found[name]) - len(failed)} of {len(found[name])} uses work")  # noqa: T201
            for use in failed:
                print(f"  {use['use']}: {str(use['why'])[-600:]}")  # noqa: T201
    if asked.record is not None:
        asked.record.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if any(not use["ok"] for uses in found.values() for use in uses):
        raise SystemExit(1)


def _python(work: Path) -> Path:
    """Return the Python that has the clients; a folder that is half made is made anew."""
    folder = work / "python"
    wanted = (HERE / "requirements.txt").read_text(encoding="utf-8")
    ready = folder / "ready"
    if not ready.exists() or ready.read_text(encoding="utf-8") != wanted:
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        install = [folder / "bin" / "python", "-m", "pip", "install", "--quiet", "-r", HERE / "requirements.txt"]
        subprocess.run(install, check=True)
        ready.write_text(wanted, encoding="utf-8")
    return folder / "bin" / "python"


def _node(work: Path) -> Path:
    """Return the folder that has node's clients, and the programs beside them, for node looks for packages there."""
    folder = work / "node"
    folder.mkdir(parents=True, exist_ok=True)
    if shutil.which("node") is None:
        return folder
    for file in (*HERE.glob("*.mjs"), HERE / "package.json"):
        shutil.copy(file, folder)
    if not (folder / "node_modules" / "openai").exists():
        subprocess.run(["npm", "install", "--silent", "--no-audit", "--no-fund"], check=True, cwd=folder)
    return folder


@contextlib.contextmanager
def _server(port: int) -> Iterator[str]:
    """Serve the embedded model with n-gram drafts by the real command."""
    command = [sys.executable, "-m", "slipstream", "serve", "--draft", "ngram", "--port", str(port)]
    process = subprocess.Popen([*command, "--log-level", "warning"], cwd=ROOT)
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(1200):
            if process.poll() is not None:
                raise SystemExit("the server did not start")
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=5):
                break
            time.sleep(0.1)
        yield url
    finally:
        process.terminate()
        process.wait(60)


def _run(python: Path, node: Path, name: str, url: str) -> list[dict[str, object]]:
    """Run a client's program; what it prints besides is its own business."""
    program = [python, HERE / f"use_{name}.py"] if name in PYTHON_CLIENTS else ["node", node / f"use_{name}.mjs"]
    # It would fetch a list of prices from the internet when it is imported.
    env = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    done = subprocess.run([*program, url], capture_output=True, text=True, check=False, timeout=1200, env=env)
    uses = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"use"')]
    if done.returncode != 0:
        uses.append({"use": "the program itself", "ok": False, "why": done.stderr[-1500:]})
    return uses


if __name__ == "__main__":
    main()
