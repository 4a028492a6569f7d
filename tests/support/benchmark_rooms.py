"""Where the benchmarks are, their modules for a test of their arithmetic, and a directory for them to measure.

The modules are found beside the program when it runs, and by nobody else. The fixture is taken by name:
`disk = benchmark_rooms.disk`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    directory = tmp_path / "disk"
    directory.mkdir()
    return directory


@contextmanager
def rooms_of(*names: str) -> Iterator[dict[str, ModuleType]]:
    """Give modules of the benchmarks by name; nothing of them is left afterwards."""
    before = set(sys.modules)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.syspath_prepend(str(BENCHMARKS))
        try:
            yield {name: __import__(name) for name in names}
        finally:
            for name in set(sys.modules) - before:
                if Path(getattr(sys.modules[name], "__file__", None) or "/").parent == BENCHMARKS:
                    del sys.modules[name]
