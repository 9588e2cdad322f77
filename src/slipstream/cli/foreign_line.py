"""Commands that also take another program's command line: its flags are settled before our options are read."""

import copy
import logging
import os
from typing import TYPE_CHECKING, Any

import typer
import typer.core

if TYPE_CHECKING:
    from slipstream.flags.line import OwnFlag

_NOTICES = "slipstream.notices"
_log = logging.getLogger(__name__)


class LaunchLine(typer.core.TyperCommand):
    """`slipstream serve`, started with our flags or with vLLM's or SGLang's."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # typer's context, which has no public type here
        """Turn other servers' flags into ours, then read those."""
        from slipstream.flags.line import handed_on, names_another_engine, settle, settle_environment
        from slipstream.flags.table import flag_table

        table = flag_table("serve")
        if names_another_engine(args):
            ctx.meta[_NOTICES] = ()
            return super().parse_args(ctx, handed_on(args, own_flags(self), table))
        settled = settle(args, own_flags(self), table)
        ctx.meta[_NOTICES] = (*settled.notices, *settle_environment(sorted(os.environ), table.variables))
        return super().parse_args(ctx, list(settled.words))

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Show options by our names, and other servers' in their text: in a row they fit no screen of 80 columns.

        Types go for the same reason, but for those that are a choice of words.
        """
        shown = copy.copy(self)
        shown.params = [copy.copy(param) for param in self.params]
        for param in shown.params:
            if isinstance(param, typer.core.TyperOption):
                if others := [*param.opts[1:], *param.secondary_opts[1:]]:
                    param.help = f"{param.help} The same: {', '.join(others)}."
                param.opts, param.secondary_opts = param.opts[:1], []
                if "|" not in (param.display_type_rich(ctx) or ""):
                    param.metavar = ""
        super(LaunchLine, shown).format_help(ctx, formatter)

    def invoke(self, ctx: Any) -> Any:
        """Say what was left aside, in the form the server's own log will have, then run."""
        from slipstream.serve.logs import set_up_logs

        if ctx.meta[_NOTICES]:
            set_up_logs(ctx.params["log_level"], ctx.params["log_json"])
        for notice in ctx.meta[_NOTICES]:
            _log.info("%s", notice)
        return super().invoke(ctx)


class QuarkLine(typer.core.TyperCommand):
    """`slipstream quantize`, with our flags or with those of Quark's quantize_quark.py."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Turn Quark's flags into ours, then read those."""
        from slipstream.flags.line import settle
        from slipstream.flags.table import flag_table

        settled = settle(args, own_flags(self), flag_table("quark"))
        for notice in settled.notices:
            typer.echo(notice, err=True)
        return super().parse_args(ctx, list(settled.words))


def own_flags(command: typer.core.TyperCommand) -> "dict[str, OwnFlag]":
    """Return the flags that a command has itself, by each of their names."""
    from slipstream.flags.line import OwnFlag

    return {
        name: OwnFlag(takes_value=not option.is_flag, repeatable=option.multiple)
        for option in command.params
        if isinstance(option, typer.core.TyperOption)
        for name in (*option.opts, *option.secondary_opts)
    }
