"""Server kinds by name; a recipe that names another is refused when it is read."""

from slipstream.bench.launch.command import ServerKind
from slipstream.bench.launch.sglang import SglangServer
from slipstream.bench.launch.slipstream import SlipstreamServer
from slipstream.bench.launch.vllm import VllmServer
from slipstream.bench.recipe import ServerName

SERVERS: dict[ServerName, ServerKind] = {
    "slipstream": SlipstreamServer(),
    "vllm": VllmServer(),
    "sglang": SglangServer(),
}
