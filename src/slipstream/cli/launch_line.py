"""The command that also takes vLLM's and SGLang's launch lines: they are settled before our options are read."""

import logging
import os
from typing import TYPE_CHECKING, Any

import typer
import typer.core

if TYPE_CHECKING:
    from slipstream.serve.launch_line import OwnFlag

_NOTICES = "slipstream.launch_notices"
_log = logging.getLogger(__name__)


class LaunchLine(typer.core.TyperCommand):
    """`slipstream serve`, started with our flags or with another server's."""

    def own_flags(self) -> "dict[str, OwnFlag]":
        """Return the flags that this command has itself, by each of their names."""
        from slipstream.serve.launch_line import OwnFlag

        return {
            name: OwnFlag(takes_value=not option.is_flag, repeatable=option.multiple)
            for option in self.params
            if isinstance(option, typer.core.TyperOption)
            for name in (*option.opts, *option.secondary_opts)
        }

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # typer's context, which has no public type here
        """Turn other servers' flags into ours, then read those."""
        from slipstream.serve.launch_line import settle, settle_environment

        settled = settle(args, self.own_flags())
        ctx.meta[_NOTICES] = (*settled.notices, *settle_environment(sorted(os.environ)))
        return super().parse_args(ctx, list(settled.words))

    def invoke(self, ctx: Any) -> Any:
        """Say what was left aside, in the form the server's own log will have, then run."""
        from slipstream.serve.logs import set_up_logs

        if ctx.meta[_NOTICES]:
            set_up_logs(ctx.params["log_level"], ctx.params["log_json"])
        for notice in ctx.meta[_NOTICES]:
            _log.info("%s", notice)
        return super().invoke(ctx)
