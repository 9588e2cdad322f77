"""Launches for tests: a program that listens and answers stands for the engine, a local shell for the remote one."""

import sys
from pathlib import Path

from slipstream.launch.command import Launch
from slipstream.launch.nodes import Nodes
from slipstream.launch.settings import Topology

STAND_IN = Path(__file__).with_name("stand_in.py")
HERE = "env NODE={node}"
"""Runs a node's shell on this machine."""


def launch(**changes: object) -> Launch:
    """Return a launch of vLLM with these changes."""
    plain = {
        "server": "vllm", "program": (), "model": "org/target", "revision": None, "port": 8000, "host": None,
        "topology": Topology(), "context": None, "draft": None, "speculation": None, "flags": {}, "env": {},
        "image": "", "start_timeout_s": 30.0,
    }  # fmt: skip
    return Launch(**(plain | changes))


def stand_in(port: int, **changes: object) -> Launch:
    """Return a launch whose engine is a few lines of Python, on two nodes that both are this machine."""
    nodes = Nodes(("a=127.0.0.1", "b=127.0.0.2"), HERE)
    program = (sys.executable, str(STAND_IN))
    return launch(**({"program": program, "port": port, "topology": Topology(tp=2), "nodes": nodes} | changes))
