"""GPUDirect Storage from Python: libcufile is found where packages put it, nothing starts CUDA unasked, and no way is
called peer to peer unless the library's statistics say so. The engine itself is tests/csrc/cufile_engine_test.cc's.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import logging
import mmap
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from support.cuda_double import cuda_double
from support.cufile_double import (
    AS_DOCUMENTED,
    DISABLED,
    GROWN,
    IO_DISABLED,
    SAYS_NVFS,
    SAYS_P2P,
    SAYS_POSIX,
    CuFileDouble,
    cufile_double,
)
from support.states import differences, make_state

import fastpersist as fp
from fastpersist import _native
from fastpersist.errors import ConfigError, StorageError, UnsupportedError
from fastpersist.transfer import gpudirect

UNHEARD_OF = "libcufile-of-nobody.so.0"  # in no process, and nowhere the loader looks
BUFFER_BYTES = 64 << 10
TRIAL_BYTES = 16 * BUFFER_BYTES


# --- finding the library


@pytest.fixture
def nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """No library of that name is there but what the test puts somewhere."""
    monkeypatch.setattr(gpudirect, "SONAME", UNHEARD_OF)
    monkeypatch.setitem(sys.modules, "cuda.pathfinder", None)
    monkeypatch.setattr(sys, "path", [])


def put_library(site: Path, package: str) -> Path:
    library = site / "nvidia" / package / "lib" / UNHEARD_OF
    library.parent.mkdir(parents=True)
    library.touch()
    return library


def test_library_that_is_nowhere_is_left_to_the_loader(nowhere: None) -> None:
    assert gpudirect.find_library() == ""


def test_library_of_the_process_goes_before_all_others(
    nowhere: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpudirect, "SONAME", "libc.so.6")
    put_library(tmp_path, "cu13")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert gpudirect.find_library() == ""


@pytest.mark.parametrize(
    ("packages", "cuda", "found"),
    [
        (["cu13"], "13.0", "cu13"),
        (["cufile"], "12.6", "cufile"),
        (["cufile", "cu13"], "13.0", "cu13"),
        (["cufile", "cu13"], "12.6", "cufile"),
        (["cu13", "cu14"], "14.1", "cu14"),
        (["cufile"], None, "cufile"),  # a torch without CUDA
    ],
)
def test_library_is_found_among_packages_and_fits_torch(
    packages: list[str],
    cuda: str | None,
    found: str,
    nowhere: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    libraries = {package: put_library(tmp_path, package) for package in packages}
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(sys, "path", ["/nowhere", str(tmp_path)])
    assert gpudirect.find_library() == str(libraries[found].resolve())


def test_pathfinder_is_asked_before_packages_are_searched(
    nowhere: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pathfinder: Any = ModuleType("cuda.pathfinder")
    pathfinder.load_nvidia_dynamic_lib = lambda name: SimpleNamespace(abs_path=f"/found/{name}")
    monkeypatch.setitem(sys.modules, "cuda.pathfinder", pathfinder)
    library = put_library(tmp_path, "cu13")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert gpudirect.find_library() == "/found/cufile"

    def refuse(name: str) -> object:
        raise RuntimeError(f"no {name}")

    pathfinder.load_nvidia_dynamic_lib = refuse
    assert gpudirect.find_library() == str(library.resolve())


def test_search_starts_no_torch(nowhere: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch")
    assert gpudirect.find_library() == ""
    assert "torch" not in sys.modules


# --- whether it can be used


def test_without_a_driver_nothing_else_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_native, "cuda_driver_why_not", lambda: "no driver")
    monkeypatch.setattr(gpudirect, "find_library", lambda: pytest.fail("looked for a library"))
    assert gpudirect.why_not() == "no driver"
    assert gpudirect.why_not(start=True) == "no driver"


def test_driver_that_does_not_start_is_the_reason_before_any_sandbox(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As root, the driver makes its node in /dev while it finds that there is no device.
    cuda_double()
    monkeypatch.setattr(gpudirect, "_DRIVER", str(tmp_path))
    monkeypatch.setattr(gpudirect, "_MODULES", str(tmp_path / "modules"))
    monkeypatch.setattr(_native, "cuda_why_not", lambda: "no GPU")
    assert gpudirect.why_not(start=True) == "no GPU"


def test_process_that_has_not_used_cuda_stays_so(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda_double()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(_native, "cufile_why_not", lambda: pytest.fail("started CUDA"))
    assert "has not used CUDA" in gpudirect.why_not()


def test_sandbox_that_lists_no_modules_is_refused_before_libcufile_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda_double()
    modules = tmp_path / "modules"
    monkeypatch.setattr(gpudirect, "_DRIVER", str(tmp_path))
    monkeypatch.setattr(gpudirect, "_MODULES", str(modules))
    monkeypatch.setattr(_native, "cufile_why_not", lambda: "opened")
    assert str(modules) in gpudirect.why_not(start=True)
    with pytest.raises(UnsupportedError, match="modules"):
        gpudirect.traffic()
    modules.touch()
    assert gpudirect.why_not(start=True) == "opened"


def test_native_side_is_told_place_and_device(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[bytes, int]] = []
    monkeypatch.setattr(_native, "cufile_configure", lambda path, device: told.append((path, device)))
    monkeypatch.setattr(gpudirect, "find_library", lambda: "/somewhere/libcufile.so.0")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    gpudirect.prepare()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    gpudirect.prepare()
    assert told == [(b"/somewhere/libcufile.so.0", 0), (b"/somewhere/libcufile.so.0", 3)]


# --- with the doubles


@pytest.fixture
def double(tmp_path: Path) -> Iterator[CuFileDouble]:
    """The double of libcufile; what a test leaves registered, or does that cuFile forbids, fails it."""
    double = cufile_double()
    double.clear()
    cuda = cuda_double()
    cuda.clear()
    # A ring on a device is kept as long as the process lives: other files may have left theirs.
    allocation_count, buffer_count = cuda.allocation_count, double.buffer_count
    yield double
    assert double.violations == []
    assert cuda.violations == []
    double.clear()
    cuda.clear()
    # What cuFile has of files is given back when the next engine is made: their descriptors are closed by then.
    with tempfile.TemporaryFile(dir=tmp_path) as file:
        _native.run_requests(file.fileno(), b"", ["cufile"], [])
    assert (double.file_count, double.buffer_count) == (0, buffer_count)
    assert cuda.allocation_count == allocation_count


def test_engine_can_be_used_where_the_library_opens(double: CuFileDouble) -> None:
    assert gpudirect.why_not(start=True) == ""


def test_save_and_load_of_host_memory_go_through_cufile(double: CuFileDouble, tmp_path: Path) -> None:
    path = tmp_path / "state.pt"
    assert fp.save(make_state(1), path, engine="cufile").engine == "cufile"
    written_count = double.host_transfer_count
    assert written_count > 0
    assert differences(fp.load(path, engine="cufile"), make_state(1)) == []
    assert double.host_transfer_count > written_count
    assert gpudirect.traffic() == (0, 0, 0)  # no memory of a device


def test_record_lock_of_a_file_outlasts_its_transfers(double: CuFileDouble, tmp_path: Path) -> None:
    with open(tmp_path / "locked", "w+b") as file, mmap.mmap(-1, mmap.PAGESIZE) as memory:
        fcntl.lockf(file, fcntl.LOCK_EX)
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        _native.run_requests(file.fileno(), b"locked", ["cufile"], [(True, 0, address, mmap.PAGESIZE)])
        script = "import fcntl, sys; fcntl.lockf(open(sys.argv[1], 'r+b'), fcntl.LOCK_EX | fcntl.LOCK_NB)"
        other = subprocess.run([sys.executable, "-c", script, file.name], capture_output=True, check=False)
        assert b"BlockingIOError" in other.stderr


@pytest.mark.parametrize(
    ("error", "number", "words"),
    [(errno.EIO, errno.EIO, os.strerror(errno.EIO)), (5044, errno.EIO, "CU_FILE_IO_ERROR (5044)")],
)
def test_failed_save_is_an_error_with_cufiles_own_name(
    error: int, number: int, words: str, double: CuFileDouble, tmp_path: Path
) -> None:
    double.fail("cuFileWrite", 0, error)
    with pytest.raises(StorageError) as caught:
        fp.save(make_state(1), tmp_path / "state.pt", engine="cufile")
    assert caught.value.errno == number
    assert words in str(caught.value)
    assert os.listdir(tmp_path) == []


def test_file_that_cufile_refuses_is_unsupported(double: CuFileDouble, tmp_path: Path) -> None:
    double.fail("cuFileHandleRegister", 0, 5008)
    with pytest.raises(UnsupportedError, match="CU_FILE_IO_NOT_SUPPORTED"):
        fp.save(make_state(1), tmp_path / "state.pt", engine="cufile")


@pytest.mark.parametrize(
    ("says", "words"),
    [
        (SAYS_POSIX, "compatibility mode: through host memory"),
        (SAYS_NVFS, "peer to peer, by nvidia-fs"),
        (SAYS_P2P, "peer to peer"),
    ],
)
def test_way_is_what_the_statistics_say(says: int, words: str, double: CuFileDouble, tmp_path: Path) -> None:
    double.set_way(says)
    assert gpudirect.way(tmp_path) == words
    assert sum(gpudirect.traffic()) == 1
    assert double.unregistered_transfer_count == 0
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("oddity", [DISABLED, GROWN])
def test_way_that_nobody_tells_is_unknown(oddity: int, double: CuFileDouble, tmp_path: Path) -> None:
    double.set_way(SAYS_P2P)
    double.set_oddity(oddity)
    with pytest.raises(UnsupportedError):
        gpudirect.traffic()
    assert "unknown" in gpudirect.way(tmp_path)


# --- the trial


class Clock:
    """Time that passes only when the test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 0.0
        monkeypatch.setattr(gpudirect.time, "perf_counter", lambda: self.now_s)

    def ring(self, seconds: float) -> Callable[[int, str], None]:
        """Return a transfer by the ring that takes so long."""

        def move(fd: int, path: str) -> None:
            assert os.fstat(fd).st_size == TRIAL_BYTES
            assert os.path.samestat(os.fstat(fd), os.stat(path))
            self.now_s += seconds

        return move

    def trial(self, directory: Path, write_s: float = 1.0, read_s: float = 1.0) -> gpudirect.Trial:
        """Hold a trial against a ring that takes so long; cuFile takes no time at all."""
        return gpudirect.trial(directory, 0, TRIAL_BYTES, self.ring(write_s), self.ring(read_s))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    monkeypatch.setattr(gpudirect, "_BUFFER_BYTES", BUFFER_BYTES)
    return Clock(monkeypatch)


@pytest.mark.parametrize("says", [SAYS_P2P, SAYS_NVFS])
def test_trial_is_won_by_real_traffic_that_is_faster(
    says: int, double: CuFileDouble, clock: Clock, tmp_path: Path
) -> None:
    double.set_way(says)
    found = clock.trial(tmp_path)
    assert found.why_lost == ""
    assert min(found.write_gain, found.read_gain) > 1
    # Written and read in each of three rounds, by calls and in batches.
    assert gpudirect.traffic().direct_count == 3 * 2 * 2 * TRIAL_BYTES // BUFFER_BYTES
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("says", "write_s", "read_s", "why"),
    [
        (SAYS_POSIX, 1.0, 1.0, "compatibility mode"),
        (SAYS_P2P, 0.0, 1.0, "no faster than the ring at writing"),
        (SAYS_P2P, 1.0, 0.0, "no faster than the ring at reading"),
    ],
)
def test_trial_is_lost_by(
    says: int,
    write_s: float,
    read_s: float,
    why: str,
    double: CuFileDouble,
    clock: Clock,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    double.set_way(says)
    with caplog.at_level(logging.INFO, "fastpersist"):
        found = clock.trial(tmp_path, write_s, read_s)
    assert why in found.why_lost
    assert found.why_lost in caplog.text
    assert os.listdir(tmp_path) == []


def test_trial_without_statistics_is_lost(double: CuFileDouble, clock: Clock, tmp_path: Path) -> None:
    double.set_way(SAYS_P2P)
    double.set_oddity(DISABLED)
    assert "cuFileGetStatsL3" in clock.trial(tmp_path).why_lost


@pytest.mark.parametrize(
    ("lost_write", "whose"), [(True, "the file holds other bytes"), (False, "the device's memory holds other bytes")]
)
def test_trial_whose_bytes_do_not_arrive_is_lost(
    lost_write: bool, whose: str, double: CuFileDouble, clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    double.set_way(SAYS_P2P)
    real = _native.run_requests

    def lose(fd: int, path: bytes, engines: list[str], requests: list[Any], **named: Any) -> None:
        """Take every part from where the first one is."""
        for write, offset_bytes, address, size_bytes in requests:
            if write and lost_write:
                address = requests[0][2]
            elif not write and not lost_write:
                offset_bytes = 0
            real(fd, path, engines, [(write, offset_bytes, address, size_bytes)], **named)

    monkeypatch.setattr(_native, "run_requests", lose)
    assert whose in clock.trial(tmp_path).why_lost


def test_trial_whose_transfers_are_not_counted_is_lost(
    double: CuFileDouble, clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_native, "cufile_traffic", lambda: (0, 0, 0))
    assert "do not have every transfer" in clock.trial(tmp_path).why_lost


@pytest.mark.parametrize(
    ("call", "nth", "error"),
    [
        ("cuFileWrite", 3, IO_DISABLED),
        ("cuFileRead", 2, IO_DISABLED),
        ("cuFileBufRegister", 1, 5016),
        ("cuFileHandleRegister", 3, 5008),  # of the second round: each way has a file of its own
    ],
)
def test_trial_that_fails_is_lost_and_leaves_nothing(
    call: str, nth: int, error: int, double: CuFileDouble, clock: Clock, tmp_path: Path
) -> None:
    double.set_way(SAYS_P2P)
    double.fail(call, nth, error)
    assert f"({error})" in clock.trial(tmp_path).why_lost
    assert os.listdir(tmp_path) == []


def test_trial_in_no_directory_is_lost(double: CuFileDouble, clock: Clock, tmp_path: Path) -> None:
    assert str(tmp_path / "missing") in clock.trial(tmp_path / "missing").why_lost


def by_api(clock: Clock, monkeypatch: pytest.MonkeyPatch, seconds: dict[str, tuple[float, float]]) -> None:
    """Let requests of cuFile take so long, writing and reading, by api."""
    real = _native.run_requests

    def slow(fd: int, path: bytes, engines: list[str], requests: list[Any], **named: Any) -> None:
        real(fd, path, engines, requests, **named)
        write_s, read_s = seconds["batch" if named["cufile_batch"] else "calls"]
        clock.now_s += write_s if requests[0][0] else read_s

    monkeypatch.setattr(_native, "run_requests", slow)


@pytest.mark.parametrize(
    ("calls", "batch", "api", "gains", "why_lost", "why_not_batch"),
    [
        ((0.5, 0.5), (0.25, 0.25), "batch", (4, 4), "", ""),
        ((0.5, 0.5), (0.5, 0.25), "calls", (2, 2), "", "no faster than calls at writing"),
        ((0.5, 0.5), (0.25, 0.5), "calls", (2, 2), "", "no faster than calls at reading"),
        ((0.5, 0.5), (1.5, 0.25), "calls", (2, 2), "", "no faster than the ring at writing"),
        ((1.5, 0.5), (0.5, 0.8), "batch", (2, 1.25), "", ""),
        ((1.0, 0.5), (1.0, 0.5), "calls", (1, 2), "the ring at writing", "no faster than the ring at writing"),
    ],
)
def test_batches_are_taken_where_they_beat_calls_and_the_ring(
    calls: tuple[float, float],
    batch: tuple[float, float],
    api: str,
    gains: tuple[float, float],
    why_lost: str,
    why_not_batch: str,
    double: CuFileDouble,
    clock: Clock,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    double.set_way(SAYS_P2P)
    by_api(clock, monkeypatch, {"calls": calls, "batch": batch})
    found = clock.trial(tmp_path)
    assert found.cufile_api == api
    assert (found.write_gain, found.read_gain) == pytest.approx(gains)
    assert bool(found.why_lost) == bool(why_lost)
    assert why_lost in found.why_lost
    assert bool(found.why_not_batch) == bool(why_not_batch)
    assert why_not_batch in found.why_not_batch


@pytest.mark.parametrize(
    ("call", "nth", "error", "why"),
    [
        ("batch write", 3, IO_DISABLED, "(5034)"),
        ("batch read", 2, IO_DISABLED, "(5034)"),
        ("cuFileBatchIOSubmit", 2, 5035, "cuFileBatchIOSubmit: CU_FILE_BATCH_SUBMIT_FAILED (5035)"),
    ],
)
def test_batches_that_fail_cost_calls_nothing(
    call: str,
    nth: int,
    error: int,
    why: str,
    double: CuFileDouble,
    clock: Clock,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    double.set_way(SAYS_P2P)
    double.fail(call, nth, error)
    by_api(clock, monkeypatch, {"calls": (0.5, 0.5), "batch": (0.25, 0.25)})
    found = clock.trial(tmp_path)
    assert (found.why_lost, found.cufile_api) == ("", "calls")
    assert why in found.why_not_batch
    assert os.listdir(tmp_path) == []


def test_batches_are_not_even_tried_where_calls_are_no_gpudirect(
    double: CuFileDouble, clock: Clock, tmp_path: Path
) -> None:
    double.set_way(SAYS_POSIX)
    assert "compatibility mode" in clock.trial(tmp_path).why_lost
    assert double.call_count("cuFileBatchIOSubmit") == 0


@pytest.mark.parametrize("size_bytes", [0, -1, (64 << 20) + 1])
def test_trial_of_a_size_that_makes_no_sense_is_refused(size_bytes: int, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=str(size_bytes)):
        gpudirect.trial(tmp_path, 0, size_bytes, lambda fd, path: None, lambda fd, path: None)


# --- one transfer


@pytest.mark.parametrize(
    ("says", "oddity", "why"),
    [
        (SAYS_P2P, AS_DOCUMENTED, ""),
        (SAYS_NVFS, AS_DOCUMENTED, ""),
        (SAYS_POSIX, AS_DOCUMENTED, "compatibility mode"),
        (SAYS_P2P, DISABLED, "cuFileGetStatsL3"),
    ],
)
def test_transfer_is_direct_if_the_statistics_say_so(
    says: int, oddity: int, why: str, double: CuFileDouble, tmp_path: Path
) -> None:
    double.set_way(says)
    double.set_oddity(oddity)
    assert why in gpudirect.why_not_direct(lambda: gpudirect.way(tmp_path))
    assert bool(why) == bool(gpudirect.why_not_direct(lambda: gpudirect.way(tmp_path)))


def test_transfer_that_fails_or_is_none_is_not_direct(double: CuFileDouble, tmp_path: Path) -> None:
    assert "do not have the transfer" in gpudirect.why_not_direct(lambda: None)
    assert "missing" in gpudirect.why_not_direct(lambda: gpudirect.way(tmp_path / "missing"))
