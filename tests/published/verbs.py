"""What a verb of ours takes by itself."""

from collections.abc import Callable

import typer

from slipstream.cli.foreign_line import own_flags
from slipstream.flags.line import OwnFlag


def own_of(verb: Callable[..., None]) -> dict[str, OwnFlag]:
    """Return a verb's own flags."""
    app = typer.Typer()
    app.command()(verb)
    return own_flags(typer.main.get_command(app))
