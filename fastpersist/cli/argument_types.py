"""Types of options for argparse: each reads a text, and says in its error what was expected."""

from __future__ import annotations

import argparse
import os

from fastpersist.arguments import byte_count
from fastpersist.errors import ConfigError

__all__ = ["size", "size_name"]

_UNITS = {"GiB": 1 << 30, "GB": 10**9, "MiB": 1 << 20, "MB": 10**6, "KiB": 1 << 10, "kB": 10**3}


def size(text: str) -> int:
    """Read a number of bytes: "8MiB", "2GB", "512".

    Raises:
        ArgumentTypeError: It is none.
    """
    try:
        return byte_count(text, "the size")
    except ConfigError as error:
        raise argparse.ArgumentTypeError(f"{error}{_hint(text)}") from None


def size_name(size_bytes: int) -> str:
    """Format a size as `size` reads it, in the largest unit without a fraction: "8MiB", "2GB", "512"."""
    for unit, unit_bytes in _UNITS.items():
        if size_bytes and size_bytes % unit_bytes == 0:
            return f"{size_bytes // unit_bytes}{unit}"
    return str(size_bytes)


def _hint(text: str) -> str:
    """Explain a path in the place of a number: an option that takes several values takes the words behind it."""
    return " (DIR goes before the options)" if os.path.exists(text) else ""
