"""The names of torch that the package uses, and which of them a torch has.

    python tests/support/torch_names.py > tests/data/torch-2.7-names.txt      with the oldest torch supported

tests/test_house.py holds what the package uses against that list, so a name that the oldest torch lacks is noticed
without it. Names in strings, as of getattr, are not looked at.
"""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = (ROOT / "fastpersist", ROOT / "integrations")


def names_of(source: str) -> set[str]:
    """Return the names of torch, dotted from torch on, that a module imports or reads as attributes."""
    tree = ast.parse(source)
    found: set[str] = set()
    bound: dict[str, str] = {}  # what a name of the module stands for
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for one in node.names:
                if one.name.split(".")[0] == "torch":
                    found.add(one.name)
                    bound[one.asname or "torch"] = one.name if one.asname else "torch"
        elif isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").split(".")[0] == "torch":
            for one in node.names:
                found.add(f"{node.module}.{one.name}")
                bound[one.asname or one.name] = f"{node.module}.{one.name}"
    for node in ast.walk(tree):
        parts: list[str] = []
        inner: ast.expr | ast.AST = node
        while isinstance(inner, ast.Attribute):
            parts.append(inner.attr)
            inner = inner.value
        if parts and isinstance(inner, ast.Name) and inner.id in bound:
            found.add(".".join([bound[inner.id], *reversed(parts)]))
    return found


def used_names(packages: Iterable[Path] = PACKAGES) -> set[str]:
    """Return the names of torch that the modules of some folders use."""
    paths = (path for package in packages for path in package.rglob("*.py"))
    return {name for path in paths for name in names_of(path.read_text())}


def has(name: str) -> bool:
    """Tell whether the torch here has a name."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        try:
            value: object = importlib.import_module(".".join(parts[:count]))
        except ImportError:
            continue
        try:
            for part in parts[count:]:
                value = getattr(value, part)
        except AttributeError:
            return False
        return True
    return False


if __name__ == "__main__":
    sys.stdout.writelines(f"{name}\n" for name in sorted(used_names()) if has(name))
