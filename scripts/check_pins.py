"""Resolve every requirement from the package index alone, as the pip of somebody with nothing else would.

    python scripts/check_pins.py            # 3.11, 3.12 and 3.13, on Linux
    python scripts/check_pins.py 3.12 --pip path/to/python

Nothing is installed. pip runs in an empty environment and isolated from its configuration, so that local wheels and
further indexes do not hide a pin that cannot be had. Ends with 1 if a version of Python cannot be resolved or brings
in what constraints.txt does not pin; without a network it says so and ends with 0.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PYTHONS = ("3.11", "3.12", "3.13")
_UNREACHABLE = re.compile(r"NewConnectionError|NameResolutionError|ConnectTimeoutError|ProxyError|SSLError")
# Where this machine reaches the index only through a proxy or with certificates of its own; nothing that names wheels.
_NETWORK = ("HTTPS_PROXY", "https_proxy", "NO_PROXY", "no_proxy", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE")


def main() -> int:
    """Check each version of Python, and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pythons", nargs="*", default=PYTHONS, help="versions to resolve for")
    parser.add_argument("--pip", default=sys.executable, help="the Python whose pip is asked")
    arguments = parser.parse_args()
    return max(_check(python, arguments.pip) for python in arguments.pythons)


def _check(python: str, pip: str) -> int:
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.json"
        done = _resolve(python, pip, Path(scratch), report)
        if done.returncode and _UNREACHABLE.search(done.stderr):
            print(f"{python}: skipped, the package index cannot be reached from here")
            return 0
        if done.returncode:
            print(f"{python}: cannot be resolved from the package index\n{done.stderr.strip()}")
            return 1
        found = {name(entry): entry["metadata"]["version"] for entry in json.loads(report.read_text())["install"]}
    unpinned = sorted(f"{key}=={version}" for key, version in found.items() if key not in pins())
    if unpinned:
        print(f"{python}: constraints.txt does not pin {', '.join(unpinned)}")
        return 1
    print(f"{python}: {len(found)} packages, all pinned; torch {found['torch']}, triton {found.get('triton', 'none')}")
    return 0


def _resolve(python: str, pip: str, scratch: Path, report: Path) -> subprocess.CompletedProcess[str]:
    wanted = scratch / "requirements.txt"
    wanted.write_text("".join(f"{requirement}\n" for requirement in requirements()))
    command = [pip, "-m", "pip", "--isolated", "--disable-pip-version-check", "install", "--quiet"]
    command += ["--dry-run", "--ignore-installed", "--only-binary=:all:", "--python-version", python]
    command += ["--target", str(scratch / "target"), "--report", str(report), "-r", str(wanted)]
    command += ["-c", str(ROOT / "constraints.txt")]
    environment = {name: os.environ[name] for name in _NETWORK if name in os.environ}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def requirements() -> list[str]:
    """Return what the package and all its extras ask for, the package's own extras written out."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [line for lines in project["optional-dependencies"].values() for line in lines]
    wanted = [*project["dependencies"], *extras]
    return sorted({line for line in wanted if not line.startswith(f"{project['name']}[")})


def pins() -> dict[str, str]:
    """Return the version of every package that constraints.txt pins, by normalised name."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pairs = (line.split("==") for line in lines if line and not line.startswith("#"))
    return {normalised(package): version for package, version in pairs}


def normalised(package: str) -> str:
    """Return a package's name as the index compares names."""
    return re.sub(r"[-_.]+", "-", package).lower()


def name(entry: dict[str, dict[str, str]]) -> str:
    """Return the normalised name of an entry of pip's report."""
    return normalised(entry["metadata"]["name"])


if __name__ == "__main__":
    sys.exit(main())
