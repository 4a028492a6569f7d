"""Imports a module of ours once more, in a process of its own in which a package is missing, or another version.

    expect_import_error("fastpersist.integrations.lightning", without("lightning"), "pip install")

A fork, because it has imported torch already; what is imported there stays there.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
import traceback
from collections.abc import Callable

import pytest
from support.forking import Report, run_in_child


def without(*packages: str) -> Callable[[], None]:
    """Make packages missing."""
    return lambda: sys.modules.update(dict.fromkeys(packages))


def in_version(package: str, version: str) -> Callable[[], None]:
    """Make a package say that it is another version."""

    def change() -> None:
        stock = importlib.metadata.version
        importlib.metadata.version = lambda name: version if name == package else stock(name)

    return change


def expect_import_error(module: str, change: Callable[[], None], *messages: str) -> None:
    """Fail unless the import of an integration, after a change, ends with an error whose last line has all of this."""
    __tracebackhide__ = True

    def work(_report: Report) -> None:
        for name in [name for name in sys.modules if name.startswith("fastpersist.integrations.")]:
            del sys.modules[name]
        change()
        with pytest.raises(Exception) as caught:  # noqa: PT011 - which one it is, is in the messages
            importlib.import_module(module)
        last_line = "".join(traceback.format_exception_only(caught.value)).splitlines()[-1]
        for message in messages:
            assert message in last_line

    run_in_child(work)
