"""Server kinds by name; a recipe that names another is refused when it is read."""

from slipstream.launch.command import ServerKind
from slipstream.launch.settings import ServerName
from slipstream.launch.sglang import SglangServer
from slipstream.launch.slipstream import SlipstreamServer
from slipstream.launch.vllm import VllmServer

SERVERS: dict[ServerName, ServerKind] = {
    "slipstream": SlipstreamServer(),
    "vllm": VllmServer(),
    "sglang": SglangServer(),
}
