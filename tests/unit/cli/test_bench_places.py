"""Scratch directories of the commands that measure: they are removed, whatever ends the block."""

from __future__ import annotations

import signal
import tempfile
import threading
from pathlib import Path

import pytest

from fastpersist.cli.bench.places import remove_files, scratch_directory


def test_a_second_ctrl_c_does_not_end_the_removal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if threading.current_thread() is not threading.main_thread():
        pytest.skip("signals are for the main thread")
    cleanup = tempfile.TemporaryDirectory.cleanup

    def interrupted(directory: tempfile.TemporaryDirectory[str]) -> None:
        signal.raise_signal(signal.SIGINT)
        cleanup(directory)

    monkeypatch.setattr(tempfile.TemporaryDirectory, "cleanup", interrupted)
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), scratch_directory(str(tmp_path), "tune") as scratch:
        assert Path(scratch).name.startswith(".fastpersist-tune-")
        Path(scratch, "file").touch()
        signal.raise_signal(signal.SIGINT)
    assert list(tmp_path.iterdir()) == []
    assert signal.getsignal(signal.SIGINT) is before


def test_files_are_removed_if_they_are_there(tmp_path: Path) -> None:
    (tmp_path / "one").touch()
    remove_files([str(tmp_path / "one"), str(tmp_path / "other")])
    assert list(tmp_path.iterdir()) == []
