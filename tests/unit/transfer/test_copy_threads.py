"""fp.save while copy threads copy, and where the system lets none start.

What the threads themselves do is tests/csrc/copy_threads_test.cc's.

The disk is the null engine, which completes every write at once: so it waits for copies, on a machine of any speed.
"""

from __future__ import annotations

import os
import resource
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from support.forking import SMALL_RING, Report, in_child, run_in_child
from support.held_pages import HeldPages
from support.leaks import no_leaks
from support.sandbox import become_ordinary_user, open_directory
from support.states import load_step, make_state, pending_files

import fastpersist as fp
from fastpersist import _native
from fastpersist.transfer.writer import Writer

COPY_THREAD = "fastpersist-cpy"
CHUNK_BYTES = int(SMALL_RING["FASTPERSIST_CHUNK_BYTES"])
LARGE_BYTES = 40 * CHUNK_BYTES  # a writer looks after eight chunks whether its disk waits
PATIENCE_S = 30.0  # for what takes 50 ms at most: so often a writer looks for signals

needs_two_cpus = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one CPU gets no copy threads")


def saved_bytes(obj: object, path: Path) -> bytearray:
    """Return what fp.save writes to the null engine, which completes every write at once."""
    _native.set_write_recording(True)
    try:
        with pytest.raises(fp.ConfigError, match="the null engine moves nothing"):  # said when all is written
            fp.save(obj, path, engine="fault:null")
        writes = _native.take_recorded_writes()
    finally:
        _native.set_write_recording(False)
    found = bytearray(max(offset_bytes + len(data) for offset_bytes, data in writes))
    for offset_bytes, data in writes:
        found[offset_bytes : offset_bytes + len(data)] = data
    return found


def may_start_threads() -> bool:
    try:
        threading.Thread(target=bool).start()
    except RuntimeError:
        return False
    return True


@needs_two_cpus
@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
@pytest.mark.parametrize("refused", [False, True], ids=["started", "refused"])
def test_save_is_the_same_with_copy_threads_and_where_none_can_be_started(
    refused: bool, suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    thread_counts = []

    class CountingWriter(Writer):
        def close(self) -> None:
            thread_counts.append(len(os.listdir("/proc/self/task")))
            super().close()

    monkeypatch.setattr("fastpersist.saving.write_file.Writer", CountingWriter)

    def work(report: Report) -> None:
        state = make_state(1, LARGE_BYTES)
        path = directory / f"state{suffix}"
        fp.save(state, path)
        thread_counts.clear()
        if refused:
            become_ordinary_user()
            resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))
            if may_start_threads():
                pytest.skip("this process may start threads all the same")
        before = len(os.listdir("/proc/self/task"))
        found = saved_bytes(state, path)
        assert len(thread_counts) == 1
        assert (thread_counts[0] >= before + 2) == (not refused)
        file_bytes = path.read_bytes()
        assert found[: len(file_bytes)] == file_bytes
        assert load_step(path, LARGE_BYTES) == 1

    with open_directory(tmp_path) as directory:
        run_in_child(work, SMALL_RING)


@needs_two_cpus
@in_child(SMALL_RING)
def test_interrupt_while_a_copy_thread_copies(tmp_path: Path) -> None:
    path = tmp_path / "state.pt"
    fp.save(make_state(1), path)
    raised = threading.Event()
    touchers: list[str] = []
    is_in_time: list[bool] = []

    def interrupt(number: int, frame: Any) -> None:
        raised.set()
        raise KeyboardInterrupt

    def watch() -> None:
        touchers.append(held.toucher())
        if touchers == [COPY_THREAD]:
            os.kill(os.getpid(), signal.SIGINT)
            is_in_time.append(raised.wait(PATIENCE_S))
        is_let_go.set()
        held.let_go()

    is_let_go = threading.Event()
    signal.signal(signal.SIGINT, interrupt)
    with no_leaks(tmp_path), HeldPages(4 * CHUNK_BYTES, 2 * CHUNK_BYTES, os.sysconf("SC_PAGE_SIZE")) as held:
        watcher = threading.Thread(target=watch)
        watcher.start()
        with pytest.raises(KeyboardInterrupt):
            fp.save({"large": torch.ones(LARGE_BYTES), "held": held.tensor}, path, engine="fault:null")
        assert is_let_go.is_set()  # the save has waited for the copy: whoever has its memory now is safe
        watcher.join()
        assert touchers == [COPY_THREAD]
        assert is_in_time == [True]  # the signal did not have to wait for the copy
        assert not pending_files(tmp_path)
        assert _native.ring_free_count() == _native.ring_buffer_count()
    assert load_step(path) == 1
    fp.save(make_state(2), path)
    assert load_step(path) == 2
