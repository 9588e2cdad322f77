"""Prints the flags of another server's launcher as JSON, with how many words follow each; run by its Python."""

import argparse
import contextlib
import json
import sys
from typing import Any


def of_vllm() -> Any:
    """Return the parser of `vllm serve`."""
    from vllm.entrypoints.cli.serve import cmd_init
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    return cmd_init()[0].subparser_init(FlexibleArgumentParser().add_subparsers())


def of_sglang() -> Any:
    """Return SGLang's parser."""
    import sglang_plugin

    sglang_plugin.let_sglang_be_imported()
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    return parser


def of_vllm_bench() -> Any:
    """Return the parser of vLLM's benchmark client."""
    from vllm.benchmarks.serve import add_cli_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    add_cli_args(parser)
    return parser


def of_sglang_bench() -> Any:
    """Return the parser of SGLang's benchmark client, taken from it as it is about to be used."""
    import sglang_plugin

    sglang_plugin.let_sglang_be_imported()
    from sglang.benchmark.serving import cli_main

    found: list[Any] = []

    def catch(parser: Any, *_: Any, **__: Any) -> None:
        found.append(parser)
        raise SystemExit

    argparse.ArgumentParser.parse_args = catch  # type: ignore[method-assign]
    with contextlib.suppress(SystemExit):
        cli_main()
    return found[0]


def arity(action: Any) -> str:
    """Return what follows a flag, in the words of our table."""
    if "Deprecated" in type(action).__name__ or "LoRA" in type(action).__name__:
        return "any"
    return {0: "", "?": "V?", "+": "V*", "*": "V*"}.get(action.nargs, "V")


PARSERS = {"vllm": of_vllm, "sglang": of_sglang, "vllm_bench": of_vllm_bench, "sglang_bench": of_sglang_bench}

if __name__ == "__main__":
    flags = {
        name: arity(action)
        for action in PARSERS[sys.argv[1]]()._actions
        for name in action.option_strings
        if name not in ("-h", "--help")
    }
    sys.stdout.write("\n" + json.dumps({"flags": flags}) + "\n")
