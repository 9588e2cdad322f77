"""Which of its arguments' memory a compiled kernel touches before it waits for the kernel before."""

import re

WAIT = "griddepcontrol.wait"
_RESULTS = re.compile(r"^\s*(%[\w.]+)(?::\d+)? = (.*)$")
_NAMES = re.compile(r"%[A-Za-z_][\w.]*|%\d+")
_CARRIED = re.compile(r"(%[\w.]+) = (%[\w.]+)")
_TOUCHES = re.compile(r"\b(?:tt\.load|tt\.store|tt\.atomic_\w+|ttg\.async_copy_global_to_local)\b[^%]*(%[\w.]+)")


def touched_before_wait(ttgir: str) -> set[str] | None:
    """Return the pointer arguments read or written above the wait in Triton's GPU code; None if it never waits.

    What stands above the wait runs before it: loops are entered from above, and the compiler's early loads of a loop
    stand in front of it.
    """
    body = ttgir[ttgir.index("tt.func public") :]
    lines = body.splitlines()
    arguments = set(re.findall(r"(%\w+): !tt\.ptr", lines[0]))
    sources: dict[str, set[str]] = {}
    open_results: list[str] = []
    touched: list[str] = []
    for line in lines[1:]:
        if WAIT in line:
            return {name.removeprefix("%") for at in touched for name in _origins(at, sources) & arguments}
        found = _RESULTS.match(line)
        if found:
            sources.setdefault(found[1], set()).update(_NAMES.findall(found[2]))
            if line.rstrip().endswith("{"):
                open_results.append(found[1])
        for inner, outer in _CARRIED.findall(line[line.find("iter_args") :] if "iter_args" in line else ""):
            sources.setdefault(inner, set()).add(outer)
        if "scf.yield" in line and open_results:
            sources[open_results[-1]].update(_NAMES.findall(line))
        touched += _TOUCHES.findall(line)
    return None


def _origins(name: str, sources: dict[str, set[str]]) -> set[str]:
    seen, waiting = set(), [name]
    while waiting:
        one = waiting.pop()
        if one not in seen:
            seen.add(one)
            waiting += sources.get(one, ())
    return seen
