"""Checks that integrations share: the framework is installed and new enough, and `writers` is valid."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re

from fastpersist import ConfigError, UnsupportedError

__all__ = ["release_of", "require", "require_writers"]


def require(extra: str, package: str, minimum: str) -> None:
    """Raise unless a framework is installed in a version that is new enough.

    Args:
        extra: The module of fastpersist.integrations that needs it, and the name of the extra.
        package: The framework's name, for import and for pip.
        minimum: The oldest supported release, such as "5.0".

    Raises:
        ImportError: The framework is not installed.
        UnsupportedError: The framework is too old.

    Thread safety: any thread.
    """
    advice = f'pip install "fastpersist[{extra}]"'
    try:
        missing = importlib.util.find_spec(package) is None
    except ValueError:  # a module in sys.modules without a spec, made by hand
        missing = False
    if missing:
        raise ImportError(f"fastpersist.integrations.{extra} needs {package}: {advice}", name=package)
    try:
        installed = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:  # a source tree on sys.path has no version to compare
        return
    if release_of(installed) < release_of(minimum):
        raise UnsupportedError(
            f"fastpersist.integrations.{extra} needs {package} {minimum} or newer, and {installed} is installed: "
            f"{advice} --upgrade"
        )


def release_of(version: str) -> tuple[int, ...]:
    """Return the numbers of a version, without trailing zeros: (5, 0, 3) of 5.0.3.dev0, (2,) of 2.0rc1."""
    found = re.match(r"\s*v?(?:\d+!)?(\d+(?:\.\d+)*)", version)
    numbers = [int(part) for part in found.group(1).split(".")] if found else []
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)


def require_writers(writers: str | int) -> None:
    """Check the option `writers`.

    Raises:
        ConfigError: It is none of "auto", "all", "node", and no number of ranks.
    """
    if writers not in ("auto", "all", "node") and (not isinstance(writers, int) or isinstance(writers, bool)):
        raise ConfigError(f"writers must be 'auto', 'all', 'node' or a number of ranks, not {writers!r}")
    if isinstance(writers, int) and writers < 1:
        raise ConfigError(f"at least one rank has to write: writers must be 1 or more, not {writers}")
