"""Stands for vLLM in a Ray cluster: runs a task on every node, then answers /health with the addresses it ran on."""

import argparse
import http.server
import json
import os

import ray
from ray.util import get_node_ip_address
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

parser = argparse.ArgumentParser()
parser.add_argument("model")
parser.add_argument("--host")
parser.add_argument("--port", type=int)
given, _ = parser.parse_known_args()

ray.init(address=os.environ["RAY_ADDRESS"])


@ray.remote(num_cpus=1)
def where() -> str:
    return get_node_ip_address()


on_each = [NodeAffinitySchedulingStrategy(node["NodeID"], soft=False) for node in ray.nodes()]
ADDRESSES = sorted(ray.get([where.options(scheduling_strategy=node).remote() for node in on_each], timeout=120))


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(ADDRESSES).encode())


http.server.HTTPServer((given.host, given.port), Handler).serve_forever()
