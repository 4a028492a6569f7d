"""Checks arguments of public functions before anything is done; an error says what was probably meant."""

from __future__ import annotations

import operator
import os
import re
from contextlib import suppress
from decimal import Decimal
from typing import SupportsIndex

from fastpersist.errors import ConfigError

__all__ = ["byte_count", "local_path", "require_bools"]

_BYTES_MAX = (1 << 63) - 1
_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?(?:([KMGT])(i?)B?|B)?", re.IGNORECASE)
# Of one letter it would be a drive. pathlib leaves one slash of two.
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/")


def local_path(path: object, what: str = "path") -> str:
    """Return the path of a local file or directory, with `~` and `~user` in front expanded.

    Args:
        path: A str or os.PathLike.
        what: The argument's name, for messages.

    Raises:
        ConfigError: It is a URL, bytes, empty, or no path at all.

    Thread safety: any thread.
    """
    name = os.fspath(path) if isinstance(path, os.PathLike) else path
    if isinstance(name, bytes):
        raise ConfigError(f"{what} must be a str or pathlib.Path, not bytes: pass os.fsdecode({name!r})")
    if not isinstance(name, str):
        raise ConfigError(f"{what} must be a str or pathlib.Path, not a value of type {type(path).__name__}")
    if not name or "\0" in name:
        raise ConfigError(f"{what} is {name!r}, which names no file")
    if url := _URL.match(name):
        raise ConfigError(
            f"{what} is the URL {name!r}, and only what is mounted can be saved to and loaded from: mount it, or copy "
            f"the files (a directory that is really called {url[1]}: is ./{url[1]}:)"
        )
    return os.path.expanduser(name)


def require_bools(**options: object) -> None:
    """Refuse what is neither True nor False: a text such as "no" would count as True.

    Raises:
        ConfigError: One is no bool (Python's or numpy's) and no int; the message names it.

    Thread safety: any thread.
    """
    for name, value in options.items():
        if not isinstance(value, int) and str(getattr(value, "dtype", "")) != "bool":
            raise ConfigError(f"{name} is True or False, not {value!r}")


def byte_count(value: object, what: str, *, auto_allowed: bool = False) -> int:
    """Return a number of bytes that was given as a number, or as a text such as "4GiB", "1.5 GB" or "800M".

    Args:
        value: K, M, G and T count by 1000, with an "i" by 1024, as everywhere but in old manuals.
        what: The argument's name, for messages.
        auto_allowed: Whether the argument may also be "auto", for messages: the caller has looked for that.

    Raises:
        ConfigError: It is no number of bytes, a negative one, or one that the kernel could not take.

    Thread safety: any thread.
    """
    count: int | Decimal = -1
    if isinstance(value, SupportsIndex) and not isinstance(value, bool):
        with suppress(TypeError):  # of an array or a tensor that is no single whole number
            count = operator.index(value)
    elif isinstance(value, str) and (found := _SIZE.fullmatch(value.strip())):
        number, unit, binary = found.groups()
        power = " KMGT".index(unit.upper()) if unit else 0
        count = Decimal(number) * (1024 if binary else 1000) ** power
    if not 0 <= count <= _BYTES_MAX:
        raise ConfigError(
            f"{what} is {value!r}; it must be a number of bytes from 0 to 2**63 - 1, or a text such as "
            + ('"4GiB" or "800MB", or "auto"' if auto_allowed else '"4GiB" or "800MB"')
        )
    return int(count)
