"""The `slipstream` command. A verb imports what it needs only when it is chosen, so that help is quick."""

import errno
import logging
import os
import sys

import typer
from rich.console import Console
from rich.logging import RichHandler
from rich.text import Text

from slipstream import __version__
from slipstream.cli import extras
from slipstream.cli.bench import app as bench
from slipstream.cli.cache import app as cache
from slipstream.cli.chat import chat
from slipstream.cli.demo import demo
from slipstream.cli.doctor import doctor
from slipstream.cli.eval import app as evaluate
from slipstream.cli.export import export
from slipstream.cli.foreign_line import LaunchLine, QuarkLine
from slipstream.cli.generate import generate
from slipstream.cli.inspect import inspect
from slipstream.cli.learn import learn
from slipstream.cli.printable import printable
from slipstream.cli.quantize import quantize
from slipstream.cli.recipes import app as recipes
from slipstream.cli.report import report
from slipstream.cli.serve import serve
from slipstream.cli.train import train
from slipstream.cli.tune import tune
from slipstream.errors import SlipstreamError

_log = logging.getLogger(__name__)
app = typer.Typer(no_args_is_help=True, rich_markup_mode="rich")
app.command()(chat)
app.command()(demo)
app.command()(doctor)
app.command()(tune)
app.command()(generate)
app.command()(inspect)
app.command()(extras.needs("train")(train))  # it draws its curves last
app.command()(extras.needs("train")(learn))
app.command(cls=QuarkLine)(quantize)
app.command()(export)
app.command(cls=LaunchLine)(serve)
app.add_typer(bench, name="bench")
app.add_typer(evaluate, name="eval")
app.command()(report)
app.add_typer(recipes, name="recipes")
app.add_typer(cache, name="cache")


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"slipstream {__version__}")
        raise typer.Exit


@app.callback()
def slipstream(
    verbose: bool = typer.Option(False, "--verbose", "-v", help="Log what is chosen and why."),
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Show the version."),
) -> None:
    """EAGLE-3 speculative decoding, end to end: the same text, sooner.

    Start with [bold]slipstream demo[/bold]: it answers a few prompts with and without a draft, side by side.
    """
    logging.basicConfig(
        level=logging.INFO if verbose else logging.WARNING,
        format="%(message)s",
        handlers=[RichHandler(console=Console(stderr=True), show_path=False, show_time=False)],
    )


def main() -> None:
    """Run the command line; a mistake of the user's ends in a sentence, not a traceback."""
    try:
        app()
    except SlipstreamError as error:
        _say(str(error))
        sys.exit(1)
    except ModuleNotFoundError as error:
        sentence = extras.explained(error)
        if sentence is None:
            raise
        _say(sentence)
        sys.exit(1)
    except OSError as error:
        _log.info("where it happened:", exc_info=error)
        if isinstance(error, BrokenPipeError):  # whoever read our output has gone, as in `slipstream doctor | head -1`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(1)
        _say(f"{error.filename or 'A file or connection'}: {error.strerror or error}. {_remedy(error)}")
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


def _say(sentence: str) -> None:
    Console(stderr=True).print(Text.assemble(("error:", "bold red"), " ", printable(sentence)), soft_wrap=True)


def _remedy(error: OSError) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return "Free some space, then run the same command again."
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return "You may not read or write it: name another place, or change its permissions."
    return "Name another place, or run `slipstream -v ...` to see where it happened."
