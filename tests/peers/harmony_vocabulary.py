"""gpt-oss's vocabulary as a file, which openai-harmony would fetch from elsewhere: rebuilt from js-tiktoken's ranks."""

import hashlib
import json
import re
import subprocess
import tarfile
import tempfile
from pathlib import Path

from slipstream.checkpoint.cache_dir import default_cache_dir

_PACKAGE = "js-tiktoken@1.0.21"
_SHA256 = "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d"  # which openai-harmony asks for
_RANKS = re.compile(r'"?bpe_ranks"?\s*:\s*("(?:[^"\\]|\\.)*")')


def vocabulary_folder() -> Path:
    """Return the folder that TIKTOKEN_ENCODINGS_BASE has to name; made with npm on first use."""
    file = default_cache_dir() / "interop" / "o200k" / "o200k_base.tiktoken"
    if not file.exists():
        content = _rebuilt()
        assert hashlib.sha256(content).hexdigest() == _SHA256, "js-tiktoken has another vocabulary than openai-harmony"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
    return file.parent


def _rebuilt() -> bytes:
    """Return one line for each token, base64 and rank; the package has them in runs: "! first-rank token token ..."."""
    with tempfile.TemporaryDirectory() as folder:
        packed = subprocess.run(["npm", "pack", "--silent", _PACKAGE], check=True, cwd=folder, stdout=subprocess.PIPE)
        with tarfile.open(Path(folder) / packed.stdout.decode().strip()) as archive:
            script = archive.extractfile("package/dist/ranks/o200k_base.js")
            assert script is not None, "the package has the ranks of o200k_base"
            found = _RANKS.search(script.read().decode())
    assert found is not None, "the script has ranks"
    tokens: dict[int, str] = {}
    for run in json.loads(found[1]).splitlines():
        _, first, *several = run.split(" ")
        tokens |= {int(first) + place: token for place, token in enumerate(several)}
    return "".join(f"{token} {rank}\n" for rank, token in sorted(tokens.items())).encode()
