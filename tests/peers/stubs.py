"""Stands in for packages that another project imports and its server tests never use (those of a GPU, mostly)."""

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Sequence
from typing import Any


class _AnyName(type):
    """The type of classes in which every name exists."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _AnyName(name, (), {})


class _Stub(types.ModuleType):
    """A module in which every name exists."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = _AnyName(name, (), {})
        setattr(self, name, made)
        return made


class Stubs(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the named packages, and what is in them, after everything that is installed."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = frozenset(names)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        """Return a spec for a name that nothing else has."""
        if name.partition(".")[0] not in self._names:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        """Return the stub."""
        return _Stub(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Leave it empty."""


def install(*names: str) -> None:
    """Let these packages be imported where they are absent."""
    sys.meta_path.append(Stubs(names))
