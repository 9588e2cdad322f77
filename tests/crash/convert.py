"""The first use of the embedded model, with a tiny GGUF in its place: fetched from a file, converted for others."""

import hashlib
import sys
from pathlib import Path

from slipstream.checkpoint import embedded
from slipstream.checkpoint.embedded_folder import embedded_folder
from slipstream.cli import main as command


def main() -> None:
    """Take the model from sys.argv[1] into the cache sys.argv[2], as the verbs do, and show errors as they do."""
    source, cache = Path(sys.argv[1]), Path(sys.argv[2])
    embedded.GGUF_SHA256 = hashlib.sha256(source.read_bytes()).hexdigest()
    command.app = lambda: sys.stdout.write(f"{embedded_folder(source=source, cache_dir=cache)}\n")
    command.main()
