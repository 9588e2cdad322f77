"""The house rules a linter does not know: sizes, names, docstrings, and what may not appear in library code."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "slipstream"
MODULES = sorted(SOURCE.rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))
PAGES = sorted(path for place in ("*.md", "docs/**/*.md", "recipes/*/*.md") for path in ROOT.glob(place))
MAX_MODULE_LINES = 400
MAX_FUNCTION_LINES = 60
LISTS_OF_FLAGS = {"cli/serve.py": 80}
"""A verb that hands each of its flags on has a line for each; splitting it would only repeat them."""
FORBIDDEN_NAMES = {"utils", "util", "common", "helpers", "helper", "core", "base", "misc"}
ENVIRONMENT_READERS = {"checkpoint/cache_dir.py", "cli/foreign_line.py"}
"""Library code takes settings as arguments; only the user's cache folder is found through the environment, and other
servers' variables are looked for, to say that they are not read."""


def relative(path: Path) -> str:
    return path.relative_to(SOURCE).as_posix()


def functions(tree: ast.Module):
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def body_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Count a function's lines from its first statement after the docstring: signatures and prose are no logic."""
    statements = function.body[1:] if ast.get_docstring(function) and len(function.body) > 1 else function.body
    return (function.end_lineno or 0) - statements[0].lineno + 1


@pytest.mark.parametrize("path", MODULES, ids=relative)
def test_a_module_can_be_read_in_one_sitting(path):
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    assert len(text.splitlines()) <= MAX_MODULE_LINES, "split the module by idea"
    assert ast.get_docstring(tree), "a module opens with one sentence on what it is for"
    assert path.stem not in FORBIDDEN_NAMES, "name the module for what it does"
    limit = LISTS_OF_FLAGS.get(relative(path), MAX_FUNCTION_LINES)
    long = {f.name: body_lines(f) for f in functions(tree) if body_lines(f) > limit}
    assert not long, f"functions over {limit} lines: {long}"


@pytest.mark.parametrize("path", MODULES, ids=relative)
def test_library_code_reads_no_environment_variables(path):
    if relative(path) in ENVIRONMENT_READERS:
        return
    assert not re.search(r"os\.environ|os\.getenv|\bgetenv\(", path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("path", TESTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_no_test_imports_another(path):
    """What tests share has a module of its own: it does not go away, or run twice, with the test it came from."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    imports = (node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom))
    names = {
        name
        for node in imports
        for name in [getattr(node, "module", None) or "", *(alias.name for alias in node.names)]
        if name.rpartition(".")[2].startswith("test_")
    }
    assert not names


def test_every_word_of_the_glossary_is_explained():
    glossary = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    for word in ("target", "draft", "tree", "chain", "node", "page", "slot", "step", "emitted", "accepted"):
        assert f"**{word}**" in glossary, word


def test_the_map_of_kernels_names_every_module_that_has_one():
    folder, text = ROOT / "src/slipstream/kernels/triton", (ROOT / "docs/kernels.md").read_text(encoding="utf-8")
    kernels = [file for file in folder.rglob("*.py") if "_kernel(" in file.read_text(encoding="utf-8")]
    modules = [file.relative_to(folder).with_suffix("").as_posix() for file in kernels]
    assert len(modules) > 20
    assert not [name for name in modules if name not in text]


def anchors(page: Path) -> set[str]:
    """Return what a page's headings are called in links: lower case, words joined by hyphens, marks left out."""
    prose = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ +(.+?) *$", prose, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_a_page_links_only_to_what_exists(page):
    text = page.read_text(encoding="utf-8")
    linked = re.findall(r"\]\((?!http)([^)#\s]*)(?:#([^)\s]+))?\)", text)
    named = re.findall(r"`((?:benchmarks|docs|scripts|tests|recipes|src)/[\w./-]+\.\w+)", text)
    missing = [path for path, _ in linked if not (page.parent / path).exists()]
    missing += [name for name in named if not (ROOT / name).exists()]
    assert not missing
    places = [(page.parent / path if path else page, anchor) for path, anchor in linked if anchor]
    assert not [f"{place.name}#{anchor}" for place, anchor in places if anchor not in anchors(place)]
