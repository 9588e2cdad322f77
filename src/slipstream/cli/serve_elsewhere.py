"""`slipstream serve` with another engine, or on several machines: options become a launch, which is kept or printed."""

import asyncio
import logging
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer

from slipstream.checkpoint.cache_dir import default_cache_dir
from slipstream.checkpoint.embedded import embedded_draft
from slipstream.checkpoint.hub import is_embedded
from slipstream.cli.exported import draft_for, tokens_of_block
from slipstream.errors import ConfigError
from slipstream.launch.command import Launch
from slipstream.launch.keep import keep_running
from slipstream.launch.manifest import manifest
from slipstream.launch.nodes import SSH, Nodes
from slipstream.launch.options import engine_flags, option
from slipstream.launch.settings import Draft, FlagValue, ServerName, Speculation, Topology

_CHOSEN_HERE = frozenset(
    {
        "engine_name", "pp", "nodes", "rsh", "ray", "node_port", "interface", "engine_program", "engine_args",
        "engine_env", "export_dir", "start_timeout", "image", "print_form",
    }
)  # fmt: skip
"""Options of the launcher; one of them given means that the engine runs in processes of its own."""
_OF_THE_LAUNCH = frozenset(
    {"model", "model_path", "host", "port", "tp", "ep", "draft_tp", "max_context", "enable_expert_parallel"}
    | {"draft", "depth", "width", "budget"}
)
"""Options that a launch has a place for; every engine spells them itself."""
_USUAL_DEPTH = 3
_log = logging.getLogger(__name__)


def is_elsewhere(context: typer.Context) -> bool:
    """Say whether the command line asks for another engine or other machines; what is so anyway does not."""
    usual = {"engine_name": "slipstream", "pp": 1}
    return any(value != usual.get(name) for name, value in _given(context).items() if name in _CHOSEN_HERE)


def serve_elsewhere(context: typer.Context) -> None:
    """Start what the command line asks for and keep it until it is stopped, or print how it is started."""
    options, given = context.params, _given(context)
    launch = _launch(options, given)
    logging.getLogger("slipstream").setLevel(logging.INFO)
    if options["print_form"] is not None:
        count = 1 if launch.nodes is None else len(launch.nodes.hosts)
        typer.echo(manifest(launch, options["print_form"], launch.topology.devices() // count), nl=False)
        return
    log = Path("out/serve") / f"{launch.server}-{launch.port}.log"
    where = "" if launch.nodes is None else f" on {', '.join(node.name for node in launch.nodes.all())}"
    typer.echo(f"starting {launch.server}{where}; logs are in {log.parent}", err=True)

    def say(url: str) -> None:
        typer.echo(f"{launch.server} serves {launch.model} at {url} (its own API; end it with Ctrl-C)")

    asyncio.run(keep_running(launch, log, say))


def _launch(options: Mapping[str, Any], given: Mapping[str, object]) -> Launch:  # Any: an option is what typer made it
    engine: ServerName = options["engine_name"]
    nodes = _nodes(options)
    ep = options["tp"] if options["enable_expert_parallel"] else options["ep"] or 1
    try:
        topology = Topology(options["tp"], ep, options["pp"])
    except ValueError as error:
        raise ConfigError(f"{error}.") from error
    draft, speculation = (None, None) if engine == "slipstream" else _speculation(engine, options)
    return Launch(
        server=engine,
        program=tuple(_words("--engine-program", options["engine_program"] or "")),
        model=_model(options, engine),
        revision=None,
        port=options["port"],
        host=_host(options, given, nodes),
        topology=topology,
        context=options["max_context"],
        draft=draft,
        speculation=speculation,
        flags={**_flags(engine, options, given), **_engine_args(options["engine_args"])},
        env=_env(options["engine_env"] or ()),
        image=options["image"],
        start_timeout_s=options["start_timeout"],
        nodes=nodes,
    )


def _nodes(options: Mapping[str, Any]) -> Nodes | None:
    named: str | None = options["nodes"]
    if named is None:
        for name in ("rsh", "ray", "interface"):
            if options[name]:
                raise ConfigError(f"{option(name)} is about several machines; name them with --nodes.")
        return None
    hosts = tuple(named.split(","))
    if named.isdigit():
        if options["print_form"] not in ("slurm", "kubernetes"):
            raise ConfigError(f"--nodes is {named}; name them, as in --nodes a,b. A number is for --print slurm.")
        hosts = tuple(f"node{index}" for index in range(int(named)))
    return Nodes(
        hosts,
        options["rsh"] or SSH,
        "ray" if options["ray"] else "own",
        options["node_port"],
        options["interface"],
    )


def _host(options: Mapping[str, Any], given: Mapping[str, object], nodes: Nodes | None) -> str | None:
    """Return where the engine listens: as asked, else this machine's loopback or the first node's address."""
    if "host" in given:
        return str(options["host"])
    form = options["print_form"]
    if form == "kubernetes" or (form == "slurm" and nodes is None):
        return "0.0.0.0"  # who asks is on another machine
    return str(options["host"]) if nodes is None else None


def _model(options: Mapping[str, Any], engine: ServerName) -> str:
    name = options["model"] or options["model_path"] or "embedded"
    if engine != "slipstream" and is_embedded(name):
        from slipstream.checkpoint.embedded_folder import embedded_folder

        return str(embedded_folder())
    return _found(name)


def _found(name: str) -> str:
    """Return where a file or folder of this machine lies; a name of a hub stays as it is."""
    return str(Path(name).resolve()) if Path(name).exists() else name


def _speculation(engine: ServerName, options: Mapping[str, Any]) -> tuple[Draft | None, Speculation | None]:
    """Return the draft as the engine reads it, and how it drafts."""
    if any(options[name] is not None for name in options if name.startswith("speculative_")):
        if options["draft"] is not None:
            raise ConfigError("Speculation is described twice: use --draft, or the engine's own flags for it.")
        return None, None  # said in the engine's words, and handed on
    name = options["draft"] or "auto"
    if name == "auto":
        shipped = embedded_draft() if is_embedded(options["model"] or options["model_path"] or "embedded") else None
        name = "none" if shipped is None else str(shipped)
    depth, width, budget = options["depth"] or _USUAL_DEPTH, options["width"] or 1, options["budget"]
    if name == "none":
        return None, None
    positions = None if not budget else budget + 1  # other engines count the root
    if name == "ngram":
        return None, Speculation("ngram", depth, width, positions, options["draft_tp"])
    assert engine != "slipstream", "it reads every dialect"
    block = tokens_of_block(name)
    if block is not None:  # published in the one form that every engine reads
        path = str(Path(name).resolve()) if Path(name).exists() else name
        return Draft(path, "", path=path), Speculation(
            "dflash", options["depth"] or block - 1, width, positions, options["draft_tp"]
        )
    path = draft_for(engine, name, options["export_dir"] or default_cache_dir() / "drafts")
    return Draft(path, "", path=path), Speculation("eagle3", depth, width, positions, options["draft_tp"])


def _flags(engine: ServerName, options: Mapping[str, Any], given: Mapping[str, object]) -> dict[str, FlagValue]:
    """Return the options that a launch has no place for, as flags of the engine."""
    rest = {name: value for name, value in given.items() if name not in _CHOSEN_HERE | _OF_THE_LAUNCH}
    if engine != "slipstream":
        return engine_flags(engine, rest)
    own = {name: options[name] for name in ("draft", "depth", "width", "budget", "draft_tp") if name in given}
    draft = own.pop("draft", "auto")
    # Names of files are those of this folder, and the other machines begin in another.
    flags: dict[str, FlagValue] = {"draft": draft if draft in ("auto", "none", "ngram") else _found(draft)}
    for name, given_value in {**own, **rest}.items():
        value = str(given_value.resolve()) if isinstance(given_value, Path) else given_value
        flag = (f"no-{name}" if value is False else name).replace("_", "-")
        flags[flag] = tuple(map(str, value)) if isinstance(value, list) else True if value is False else value
    return flags


def _engine_args(text: str) -> dict[str, FlagValue]:
    """Return flags given as text; one without a value is a switch."""
    flags: dict[str, FlagValue] = {}
    name = ""
    for word in _words("--engine-args", text):
        if word.startswith("--"):
            name, equals, value = word.removeprefix("--").partition("=")
            if name in flags:
                raise ConfigError(f"--engine-args {text!r}: --{name} is given twice, and the engine would see one.")
            flags[name] = value if equals else True
        elif not name:
            raise ConfigError(f"--engine-args {text!r}: {word!r} belongs to no flag.")
        else:
            before = flags[name]
            flags[name] = word if before is True else (*(before if isinstance(before, tuple) else (str(before),)), word)
    return flags


def _words(option: str, text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"{option} {text!r}: {error}.") from error


def _env(settings: list[str] | tuple[str, ...]) -> dict[str, str]:
    pairs = [setting.partition("=") for setting in settings]
    for name, equals, _ in pairs:
        if not name or not equals:
            raise ConfigError(f"--engine-env {name}: write it as NAME=VALUE.")
    return {name: value for name, _, value in pairs}


def _given(context: typer.Context) -> dict[str, object]:
    """Return the options of the command line that somebody gave, by name."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    given = (name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE")
    return {name: context.params[name] for name in given}
