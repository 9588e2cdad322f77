"""The server's settings, checked when built and never written to again."""

import ipaddress
import re
from dataclasses import dataclass, field
from pathlib import Path

from slipstream.errors import ConfigError
from slipstream.serve.fixed_sampling import FixedSampling

_ROOT = re.compile(r"(?:/[A-Za-z0-9._~-]+)+")
_HOST = re.compile(r"\*|[A-Za-z0-9._-]+|[0-9A-Fa-f:.]+")


@dataclass(frozen=True)
class LearnConfig:
    """Where traffic is kept, how much of it, and what trains on it.

    Args:
        trainer: the command that trains, run at the lowest priority; none where a trainer runs elsewhere.
    """

    folder: Path
    max_tokens: int = 2_000_000
    trainer: tuple[str, ...] = ()


@dataclass(frozen=True)
class ServeConfig:
    """How the server meets its clients.

    Args:
        model_name: what /v1/models calls the model, and the only name requests may give beside `aliases`.
        aliases: further names of the model.
        api_keys: clients must send one of these as a bearer token; empty lets everybody in.
        admin_key: guards /admin; without one, /admin answers only on a loopback address and without API keys.
        open_metrics: /metrics needs no key; without API keys nothing does.
        allowed_hosts: names clients may call the server by, beside the loopback ones; `*` is any name. Without any, a
            server on loopback without API keys goes by loopback names alone, and others by every name.
        root_path: the prefix a proxy in front serves this server under, such as /llm.
        cors_origins: web pages of these origins may call the server from a browser; none by default.
        max_connections: clients connected at once; the limit on open files may allow fewer.
        max_waiting: answers that may wait beside those that run; one more is refused with 429.
        generation_config: where requests' sampling defaults come from: "auto" (the model's own), "none", or a path.
        fixed_sampling: the only sampling settings that are taken; None takes any.
        max_output_tokens: the most tokens an answer may ask for; None leaves it to the context.
        request_timeout_s: how long one request may take, from its arrival to its last byte.
        read_timeout_s: how long a client may take to send a request's head, or 16 KiB (or the rest) of its body.
        write_timeout_s: how long a client may leave bytes unread before it counts as gone.
        keep_alive_timeout_s: how long a connection may stay open between two requests.
        drain_timeout_s: how long answers under way may go on after SIGTERM.
        tool_call_parser: how the model writes its tool calls; None reads it from the chat template.
        reasoning_parser: how the model marks its reasoning; None reads it from the chat template.
        allow_special_in_content: let control tokens that a client's text spells be control tokens.
        log_prompts: write prompts and answers to the log, for debugging only.
        learn: keep answers and have the draft learn from them.
    """

    model_name: str
    aliases: tuple[str, ...] = ()
    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    admin_key: str | None = field(default=None, repr=False)
    open_metrics: bool = False
    allowed_hosts: tuple[str, ...] = ()
    root_path: str = ""
    cors_origins: tuple[str, ...] = ()
    max_connections: int = 2048
    max_waiting: int = 256
    max_body_bytes: int = 4 << 20
    generation_config: str = "auto"
    fixed_sampling: FixedSampling | None = None
    max_output_tokens: int | None = None
    request_timeout_s: float = 600.0
    read_timeout_s: float = 20.0
    write_timeout_s: float = 60.0
    keep_alive_timeout_s: float = 75.0
    drain_timeout_s: float = 30.0
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    allow_special_in_content: bool = False
    log_prompts: bool = False
    learn: LearnConfig | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port is {self.port}; it lies between 0 and 65535.")
        for name in _ABOVE_ZERO:
            value = getattr(self, name)
            if not value > 0:
                raise ConfigError(f"{name} is {value}; it must be above 0.")
        if self.max_output_tokens is not None and self.max_output_tokens < 1:
            raise ConfigError(f"max_output_tokens is {self.max_output_tokens}; it must be at least 1.")
        for key in (*self.api_keys, *([] if self.admin_key is None else [self.admin_key])):
            if not key or not key.isascii() or any(c.isspace() for c in key):
                raise ConfigError("An API key is empty or has spaces or non-ASCII characters; headers cannot carry it.")
        if self.root_path and not _ROOT.fullmatch(self.root_path):
            raise ConfigError(
                f"root_path is {self.root_path!r}; it is a path such as /llm, without a slash at its end."
            )
        for host in self.allowed_hosts:
            if not _HOST.fullmatch(host):
                raise ConfigError(
                    f"allowed_hosts has {host!r}; it takes names such as api.example.org, without scheme or port, or *"
                )

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach the server."""
        return is_loopback(self.host)


def is_loopback(host: str) -> bool:
    """Tell whether a name or an address is this machine's own, whoever answers questions about names."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


_ABOVE_ZERO = (
    "max_connections",
    "max_waiting",
    "max_body_bytes",
    "request_timeout_s",
    "read_timeout_s",
    "write_timeout_s",
    "keep_alive_timeout_s",
    "drain_timeout_s",
)
