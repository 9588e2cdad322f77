"""Parses launch lines with the launchers of vLLM or SGLang themselves; runs where those are installed.

Started as `python parse_lines.py vllm|sglang LINES`, where LINES is a list of lines (each a list of words) as JSON;
prints as JSON what each was read as, or why it was refused.
"""

import argparse
import contextlib
import io
import json
import sys

from print_flags import PARSERS  # beside this file


def main() -> None:
    """Parse every line."""
    parser = PARSERS[sys.argv[1]]()
    print(json.dumps([_read(parser, words) for words in json.loads(sys.argv[2])], default=str))  # noqa: T201


def _read(parser: argparse.ArgumentParser, words: list[str]) -> dict[str, object]:
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return vars(parser.parse_args(words))
    except SystemExit:
        return {"refused": said.getvalue().strip().splitlines()[-1]}


if __name__ == "__main__":
    main()
