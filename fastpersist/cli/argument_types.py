"""Types of options for argparse: each reads a text, and says in its error what was expected."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable

from fastpersist.arguments import byte_count
from fastpersist.errors import ConfigError

__all__ = ["positive", "positive_number", "size", "size_name", "whole_number"]

_UNITS = {"GiB": 1 << 30, "GB": 10**9, "MiB": 1 << 20, "MB": 10**6, "KiB": 1 << 10, "kB": 10**3}


def whole_number(least: int, most: int | None = None) -> Callable[[str], int]:
    """Return the type of whole numbers in a range, both ends included."""

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number{_hint(text)}") from None
        if value < least or (most is not None and value > most):
            raise argparse.ArgumentTypeError(f"must be at least {least}{'' if most is None else f', at most {most}'}")
        return value

    return read


positive = whole_number(1)


def positive_number(text: str) -> float:
    """Read a finite number above 0.

    Raises:
        ArgumentTypeError: The text is no such number.
    """
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no number above 0")
    return value


def size(text: str) -> int:
    """Read a number of bytes: "8MiB", "2GB", "512".

    Raises:
        ArgumentTypeError: The text is no such number.
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
