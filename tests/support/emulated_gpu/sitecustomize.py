"""Gives torch its `kernels` whenever a Python whose path has this directory imports it: see `run`."""

from __future__ import annotations

import importlib.machinery
import sys
from importlib.abc import MetaPathFinder
from typing import Any


class _Finder(MetaPathFinder):
    """Finds torch as others do, and completes it once it is imported."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != "torch":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            sys.meta_path.remove(self)
            from support.emulated_gpu import kernels

            kernels.install()

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, _Finder())
