"""constraints.txt pins all that the requirements bring in; `make pins` checks that it can be had from the index."""

import importlib.util
from importlib.metadata import Distribution, PackageNotFoundError
from pathlib import Path

from packaging.requirements import Requirement

SCRIPT = Path(__file__).parents[1] / "scripts/check_pins.py"


def test_everything_the_requirements_bring_in_here_is_pinned():
    specification = importlib.util.spec_from_file_location("check_pins", SCRIPT)
    check_pins = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(check_pins)
    waiting = [wanted for wanted in map(Requirement, check_pins.requirements()) if _applies(wanted, "")]
    found: set[str] = set()
    while waiting:
        wanted = waiting.pop()
        name = check_pins.normalised(wanted.name)
        if name in found:
            continue
        try:
            needs = Distribution.from_name(wanted.name).requires or []
        except PackageNotFoundError:
            continue  # another platform's, or an extra that is not installed here
        found.add(name)
        extras = ["", *wanted.extras]
        waiting += [need for need in map(Requirement, needs) if any(_applies(need, extra) for extra in extras)]
    assert {"torch", "numpy", "filelock"} <= found
    assert found <= check_pins.pins().keys()


def _applies(requirement: Requirement, extra: str) -> bool:
    return requirement.marker is None or requirement.marker.evaluate({"extra": extra})
