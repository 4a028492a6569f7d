"""Fixtures of tests that feed the native side themselves; a file takes one as `fault = native_fixtures.fault`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fastpersist import _native


@pytest.fixture
def fault() -> Iterator[Callable[..., None]]:
    """Set the plan of the engines named "fault:…"; it ends with the test."""

    def set_plan(**plan: Any) -> None:
        _native.set_fault_plan(_native.FaultPlan(**plan))

    yield set_plan
    _native.clear_fault_plan()


@pytest.fixture
def open_file(tmp_path: Path, leak_check: None) -> Iterator[Callable[..., int]]:
    """Open a file in tmp_path, with this content; closed at the end, and then nothing else may be open."""
    fds = []

    def opened(name: str = "file.bin", content: bytes = b"") -> int:
        fds.append(os.open(tmp_path / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC))
        os.pwrite(fds[-1], content, 0)
        return fds[-1]

    yield opened
    for fd in fds:
        os.close(fd)
