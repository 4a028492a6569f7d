"""support.leaks finds each kind of leak, and none where there is none."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
from support import leaks
from support.leaks import LeakError, no_leaks


@pytest.fixture(autouse=True)
def little_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaks, "PATIENCE_S", 0.1)


def test_clean_code_passes(tmp_path: Path) -> None:
    with no_leaks(tmp_path):
        thread = threading.Thread(target=(tmp_path / "finished.pt").write_bytes, args=(b"x",))
        thread.start()
        thread.join()


def test_open_descriptor_is_found(tmp_path: Path) -> None:
    file = tmp_path / "open.pt"
    descriptor = -1
    with pytest.raises(LeakError, match=r"descriptor \d+ -> .*open\.pt"), no_leaks(tmp_path):
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT)
    os.close(descriptor)


def test_running_thread_is_found(tmp_path: Path) -> None:
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    with pytest.raises(LeakError, match=r"thread \d+"), no_leaks(tmp_path):
        thread.start()
    stop.set()
    thread.join()


@pytest.mark.parametrize("name", [".model.pt.pending-1f", ".step-00000001.retired-2e"])
def test_unfinished_file_is_found(tmp_path: Path, name: str) -> None:
    with pytest.raises(LeakError, match="unfinished file"), no_leaks(tmp_path):
        (tmp_path / name).touch()


def test_exception_of_the_block_is_not_hidden(tmp_path: Path) -> None:
    with pytest.raises(KeyError), no_leaks(tmp_path):
        (tmp_path / ".model.pt.pending-1f").touch()
        raise KeyError("first")
