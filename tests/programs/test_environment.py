"""Saving and loading where the machine says no: full disks, denied system calls, exhausted limits, no privileges.

Whatever it is, the error names it, the old file still loads, nothing is left behind, and when the cause is gone the
next save works.
"""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from support.forking import SMALL_RING, Report, in_child, run_in_child
from support.leaks import no_leaks
from support.sandbox import (
    FILESYSTEMS,
    IO_GETEVENTS,
    IO_SETUP,
    IO_SUBMIT,
    IO_URING_ENTER,
    IO_URING_SETUP,
    become_ordinary_user,
    deny_system_calls,
    needs_root,
    open_directory,
    small_filesystem,
)
from support.states import load_step, make_state, pending_files

import fastpersist as fp
from fastpersist import _native
from fastpersist.errors import NoSpaceError, StorageError, UnsupportedError
from fastpersist.transfer import engine_selection

LARGE_BYTES = 8 << 20  # more than a small file system has left
ENGINES = ("uring", "libaio", "threads", "threads-buffered")


@pytest.fixture
def announce_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """What this process has already said about its engines does not count."""
    monkeypatch.setattr(engine_selection, "_announced", set())


def engine_messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.getMessage().startswith("engine ")]


def failure_of(transfer: Callable[[], object]) -> StorageError | None:
    """Run a transfer; return what the machine had against it, None when it worked."""
    try:
        transfer()
    except StorageError as error:
        return error
    return None


# --- disks that are full


@pytest.fixture(params=FILESYSTEMS)
def small_disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    with small_filesystem(request.param, tmp_path, size_mib=6) as root:
        yield root


@needs_root
@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_full_disk_is_a_clear_error_and_changes_nothing(small_disk: Path, suffix: str, leak_check: None) -> None:
    path = small_disk / f"model{suffix}"
    too_large = make_state(99, LARGE_BYTES)
    for step, engine in enumerate(["auto", *ENGINES]):
        fp.save(make_state(step), path, engine=engine)
        with pytest.raises(NoSpaceError, match=os.strerror(errno.ENOSPC)) as caught:
            fp.save(too_large, path, engine=engine)
        assert caught.value.errno == errno.ENOSPC
        assert path.name in str(caught.value)
        assert load_step(path) == step
        assert pending_files(small_disk) == []


@needs_root
@pytest.mark.parametrize("kind", ["tmpfs", "ext4"])
def test_full_disk_is_found_before_a_byte_is_written(kind: str, tmp_path: Path) -> None:
    with small_filesystem(kind, tmp_path, size_mib=6) as root:
        _native.set_write_recording(True)
        try:
            with pytest.raises(NoSpaceError, match="reserving"):
                fp.save(make_state(1, LARGE_BYTES), root / "model.pt", engine="fault:threads-buffered")
        finally:
            _native.set_write_recording(False)
            written = _native.take_recorded_writes()
        assert written == []


@needs_root
def test_full_disk_during_the_write_says_where(tmp_path: Path) -> None:
    with small_filesystem("ext4-without-fallocate", tmp_path, size_mib=6) as root:
        with pytest.raises(NoSpaceError, match=r"write to .*model\.pt at offset") as caught:
            fp.save(make_state(1, LARGE_BYTES), root / "model.pt")
        assert caught.value.offset_bytes is not None
        assert list(root.glob("*.pt")) == []
        assert pending_files(root) == []


@needs_root
def test_file_system_without_fallocate_takes_files(tmp_path: Path) -> None:
    with small_filesystem("ext4-without-fallocate", tmp_path, size_mib=6) as root:
        for step, engine in enumerate(["auto", *ENGINES]):
            fp.save(make_state(step), root / "model.pt", engine=engine)
            assert load_step(root / "model.pt") == step


@needs_root
def test_disk_without_room_for_a_name_is_a_clear_error(tmp_path: Path) -> None:
    with small_filesystem("tmpfs", tmp_path, size_mib=1) as root:
        count = 0
        with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
            for count in range(100_000):
                (root / str(count)).touch()
        with pytest.raises(NoSpaceError) as caught:
            fp.save(make_state(1), root / "model.pt")
        assert caught.value.errno == errno.ENOSPC
        for number in range(count):
            (root / str(number)).unlink()
        fp.save(make_state(1), root / "model.pt")


def test_file_size_limit_is_a_clear_error(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"

    def work(report: Report) -> None:
        fp.save(make_state(1), path)
        with no_leaks(tmp_path):
            unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, unlimited[1]))
            with pytest.raises(StorageError) as caught:
                fp.save(make_state(2, LARGE_BYTES), path)
            assert caught.value.errno == errno.EFBIG
            resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
            assert load_step(path) == 1
            fp.save(make_state(3), path)

    run_in_child(work)
    assert load_step(path) == 3


def test_a_table_is_reserved_no_further_than_the_file_size_limit(tmp_path: Path) -> None:
    def work(report: Report) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20 << 20, resource.RLIM_INFINITY))
        fp.write_rows(tmp_path / "rows.npy", make_state(1, 4 << 20)["weights"])

    run_in_child(work)
    with fp.RowStore(tmp_path / "rows.npy") as rows:
        assert len(rows) == len(make_state(1, 4 << 20)["weights"])


# --- system calls that are denied


@pytest.mark.parametrize(("denied", "name"), [(IO_URING_SETUP, "io_uring_setup"), (IO_URING_ENTER, "io_uring_enter")])
@in_child({})
def test_denied_io_uring_falls_back_to_libaio_and_says_why_once(
    denied: int, name: str, tmp_path: Path, announce_anew: None, caplog: pytest.LogCaptureFixture
) -> None:
    deny_system_calls(denied)
    caplog.set_level("INFO", logger="fastpersist")
    for step in range(3):
        report = fp.save(make_state(step), tmp_path / "model.pt")
        if report.engine == "threads-buffered":
            pytest.skip("no direct I/O on this file system, so the ladder is not walked")
        assert report.engine == "libaio"
        assert load_step(tmp_path / "model.pt") == step
    (message,) = [message for message in engine_messages(caplog) if "libaio" in message.split(" for ")[0]]
    assert "not uring: io_uring is not permitted here" in message
    assert "seccomp" in message or "io_uring_disabled" in message
    assert f"({name}: " in message


@in_child({})
def test_named_engine_never_falls_back(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    fp.save(make_state(1), path)
    deny_system_calls(IO_URING_SETUP)
    with no_leaks(tmp_path):
        for engine in ("uring", "uring-buffered"):
            with pytest.raises(UnsupportedError, match="io_uring is not permitted here"):
                fp.save(make_state(2), path, engine=engine)
            with pytest.raises(UnsupportedError, match="io_uring is not permitted here"):
                fp.load(path, engine=engine)
    assert load_step(path) == 1
    probes = {probe.name: probe for probe in fp.engines(tmp_path)}
    assert not probes["uring"].usable
    assert "not permitted" in probes["uring"].why_not
    assert probes["threads-buffered"].usable


@in_child({})
def test_denied_io_uring_enter_leaves_another_engine_to_every_kind_of_file(tmp_path: Path) -> None:
    deny_system_calls(IO_URING_ENTER)
    value = torch.arange(30_000.0).reshape(-1, 3)
    with fp.TensorFile(tmp_path / "values.bin", "w") as file:
        file.write(value)
        read = torch.empty_like(value)
        file.read(read)
    assert torch.equal(read, value)
    fp.write_rows(tmp_path / "rows.npy", value)
    with fp.RowStore(tmp_path / "rows.npy") as rows:
        ids = torch.arange(0, len(value), 3)
        assert torch.equal(rows.gather(ids), value[ids])


@pytest.mark.parametrize(
    ("denied", "name"), [(IO_SETUP, "io_setup"), (IO_SUBMIT, "io_submit"), (IO_GETEVENTS, "io_getevents")]
)
@in_child({})
def test_denied_io_uring_and_aio_leave_threads(
    denied: int, name: str, tmp_path: Path, announce_anew: None, caplog: pytest.LogCaptureFixture
) -> None:
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(60)  # ends the child if an engine waits for ever
    deny_system_calls(IO_URING_SETUP, denied)
    caplog.set_level("INFO", logger="fastpersist")
    for step in range(2):
        report = fp.save(make_state(step), tmp_path / "model.pt")
        assert report.engine in ("threads", "threads-buffered")
        assert load_step(tmp_path / "model.pt") == step
    with pytest.raises(UnsupportedError, match=rf"Linux AIO is not permitted here.*\({name}: "):
        fp.save(make_state(3), tmp_path / "model.pt", engine="libaio")
    if report.engine == "threads":
        (message,) = [message for message in engine_messages(caplog) if message.startswith("engine threads for")]
        assert "not uring: " in message
        assert "not libaio: " in message


# --- limits


@needs_root
def test_exhausted_aio_limit_is_explained_and_auto_goes_on(tmp_path: Path) -> None:
    limit = Path("/proc/sys/fs/aio-max-nr")
    before = limit.read_text()

    def work(report: Report) -> None:
        deny_system_calls(IO_URING_SETUP)
        try:
            limit.write_text("1")
            with pytest.raises(UnsupportedError, match=r"fs\.aio-max-nr is 1 .*raise it"):
                fp.save(make_state(1), tmp_path / "model.pt", engine="libaio")
            engine = fp.save(make_state(2), tmp_path / "model.pt").engine
        finally:
            limit.write_text(before)
        assert engine in ("threads", "threads-buffered")

    try:
        run_in_child(work)
    finally:
        limit.write_text(before)
    assert load_step(tmp_path / "model.pt") == 2
    assert pending_files(tmp_path) == []


@pytest.mark.parametrize("engine", ["auto", *ENGINES])
def test_ordinary_user_needs_no_locked_memory(tmp_path: Path, engine: str) -> None:
    with open_directory(tmp_path) as directory:
        path = directory / "model.pt"
        fp.save(make_state(0), path, engine="threads-buffered")  # also imports all that an ordinary user may not read
        fp.load(path)
        path.unlink()

        def work(report: Report) -> None:
            resource.setrlimit(resource.RLIMIT_MEMLOCK, (64 << 10, 64 << 10))
            become_ordinary_user()
            error = failure_of(lambda: fp.save(make_state(1), path, engine=engine))
            if error is not None:
                # Kernels before 5.12 count a ring of io_uring as locked memory; then the message must say so.
                assert engine == "uring"
                assert "RLIMIT_MEMLOCK" in str(error)
                fp.save(make_state(1), path)
            assert load_step(path) == 1

        run_in_child(work)


def test_no_memory_for_the_ring_is_explained_and_a_smaller_ring_helps(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    fp.save(make_state(1), path)
    second = make_state(2)

    def work(report: Report) -> None:
        with no_leaks(tmp_path):
            used_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            before = resource.getrlimit(resource.RLIMIT_AS)
            resource.setrlimit(resource.RLIMIT_AS, (used_bytes + (32 << 20), before[1]))
            for transfer in (lambda: fp.save(second, path), lambda: fp.load(path)):
                with pytest.raises(StorageError) as caught:
                    transfer()
                assert caught.value.errno == errno.ENOMEM
                assert "67108864 bytes for the ring" in str(caught.value)
            assert pending_files(tmp_path) == []
            os.environ.update(SMALL_RING)
            fp.save(second, path, engine="threads")
            resource.setrlimit(resource.RLIMIT_AS, before)
            assert load_step(path) == 2

    run_in_child(work)


@pytest.mark.parametrize("spare_count", range(5))
def test_exhausted_descriptors_are_a_clear_error_and_none_is_lost(tmp_path: Path, spare_count: int) -> None:
    path = tmp_path / "model.pt"
    fp.save(make_state(1), path)

    def work(report: Report) -> None:
        state = make_state(2)
        before = resource.getrlimit(resource.RLIMIT_NOFILE)
        with no_leaks(tmp_path):
            held = []
            while not held or held[-1] < 199:
                held.append(os.open("/dev/null", os.O_RDONLY))  # the numbers below 200 have no gap now
            resource.setrlimit(resource.RLIMIT_NOFILE, (200 + spare_count, before[1]))
            save_error = failure_of(lambda: fp.save(state, path))
            load_error = failure_of(lambda: fp.load(path))
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
            for fd in held:
                os.close(fd)
            for error, needed_count in ((save_error, 1), (load_error, 2)):
                assert (error is None) == (spare_count >= needed_count), error
                if error is not None:
                    assert error.errno == errno.EMFILE
                    assert path.name in str(error)
            assert load_step(path) == (2 if save_error is None else 1)
        fp.save(make_state(3), path)
        assert load_step(path) == 3

    run_in_child(work)


# --- no privileges


def test_read_only_directory_is_a_clear_error(tmp_path: Path) -> None:
    with open_directory(tmp_path) as directory:
        closed = directory / "closed"
        closed.mkdir()
        fp.save(make_state(1), closed / "model.pt")
        (closed / "model.pt").chmod(0o444)
        closed.chmod(0o555)

        def work(report: Report) -> None:
            become_ordinary_user()
            with no_leaks(directory):
                for name in ("model.pt", "new.pt"):
                    with pytest.raises(StorageError) as caught:
                        fp.save(make_state(2), closed / name)
                    assert caught.value.errno == errno.EACCES
                    assert str(closed) in str(caught.value)
                with pytest.raises(StorageError) as caught:
                    fp.engines(closed)
                assert caught.value.errno == errno.EACCES
                assert str(closed) in str(caught.value)
            assert load_step(closed / "model.pt") == 1

        try:
            run_in_child(work)
        finally:
            closed.chmod(0o755)


def test_file_that_may_not_be_read_is_a_clear_error(tmp_path: Path) -> None:
    with open_directory(tmp_path) as directory:
        path = directory / "model.pt"
        fp.save(make_state(1), path)
        path.chmod(0)

        def work(report: Report) -> None:
            become_ordinary_user()
            with no_leaks(directory), pytest.raises(StorageError, match=r"opening .*model\.pt") as caught:
                fp.load(path)
            assert caught.value.errno == errno.EACCES

        run_in_child(work)


@needs_root
def test_read_only_file_system_is_a_clear_error(tmp_path: Path) -> None:
    with small_filesystem("tmpfs", tmp_path, size_mib=4) as root:
        fp.save(make_state(1), root / "model.pt")
        subprocess.run(["mount", "-o", "remount,ro", str(root)], check=True)
        with no_leaks(root):
            for name in ("model.pt", "new.pt"):
                with pytest.raises(StorageError) as caught:
                    fp.save(make_state(2), root / name)
                assert caught.value.errno == errno.EROFS
        assert load_step(root / "model.pt") == 1
