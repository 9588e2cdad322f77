"""The server's settings, checked when built and never written to again."""

from dataclasses import dataclass, field

from slipstream.errors import ConfigError

LOOPBACK = ("127.0.0.1", "::1", "localhost")


@dataclass(frozen=True)
class ServeConfig:
    """How the server meets its clients.

    Args:
        model_name: what /v1/models calls the model, and the only name requests may give beside `aliases`.
        aliases: further names of the model.
        api_keys: clients must send one of these as a bearer token; empty lets everybody in.
        admin_key: guards /admin; without one, /admin answers only on a loopback address and without API keys.
        cors_origins: web pages of these origins may call the server from a browser; none by default.
        max_waiting: answers that may wait beside those that run; one more is refused with 429.
        max_output_tokens: the most tokens an answer may ask for; None leaves it to the context.
        request_timeout_s: how long one request may take, from its arrival to its last byte.
        write_timeout_s: how long a client may leave bytes unread before it counts as gone.
        drain_timeout_s: how long answers under way may go on after SIGTERM.
        log_prompts: write prompts and answers to the log, for debugging only.
    """

    model_name: str
    aliases: tuple[str, ...] = ()
    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    admin_key: str | None = field(default=None, repr=False)
    cors_origins: tuple[str, ...] = ()
    max_waiting: int = 256
    max_body_bytes: int = 4 << 20
    max_output_tokens: int | None = None
    request_timeout_s: float = 600.0
    write_timeout_s: float = 60.0
    drain_timeout_s: float = 30.0
    log_prompts: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port is {self.port}; it lies between 0 and 65535.")
        for name in ("max_waiting", "max_body_bytes", "request_timeout_s", "write_timeout_s", "drain_timeout_s"):
            value = getattr(self, name)
            if not value > 0:
                raise ConfigError(f"{name} is {value}; it must be above 0.")
        if self.max_output_tokens is not None and self.max_output_tokens < 1:
            raise ConfigError(f"max_output_tokens is {self.max_output_tokens}; it must be at least 1.")
        for key in (*self.api_keys, *([] if self.admin_key is None else [self.admin_key])):
            if not key or not key.isascii() or any(c.isspace() for c in key):
                raise ConfigError("An API key is empty or has spaces or non-ASCII characters; headers cannot carry it.")

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach the server."""
        return self.host in LOOPBACK
