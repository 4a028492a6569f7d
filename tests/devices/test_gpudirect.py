"""GPUDirect Storage from Python: libcufile is found where packages put it, nothing starts CUDA unasked, and no way is
called peer to peer unless the library's statistics say so. The engine itself is tests/csrc/cufile_engine_test.cc's.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from support.cuda_double import cuda_double
from support.cufile_double import (
    DISABLED,
    GROWN,
    SAYS_NVFS,
    SAYS_P2P,
    SAYS_POSIX,
    CuFileDouble,
    cufile_double,
)
from support.states import differences, make_state

import fastpersist as fp
from fastpersist import _native
from fastpersist.errors import StorageError, UnsupportedError
from fastpersist.transfer import gpudirect

UNHEARD_OF = "libcufile-of-nobody.so.0"  # in no process, and nowhere the loader looks


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


def has_started_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this process be one that has used CUDA."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)


def test_without_a_driver_nothing_else_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_native, "cuda_driver_why_not", lambda: "no driver")
    monkeypatch.setattr(gpudirect, "find_library", lambda: pytest.fail("looked for a library"))
    assert gpudirect.why_not() == "no driver"
    has_started_cuda(monkeypatch)
    assert gpudirect.why_not() == "no driver"


def test_driver_that_does_not_start_is_the_reason_before_any_sandbox(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As root, the driver makes its node in /dev while it finds that there is no device.
    cuda_double()
    has_started_cuda(monkeypatch)
    monkeypatch.setattr(gpudirect, "_DRIVER", str(tmp_path))
    monkeypatch.setattr(gpudirect, "_MODULES", str(tmp_path / "modules"))
    monkeypatch.setattr(_native, "cuda_why_not", lambda: "no GPU")
    assert gpudirect.why_not() == "no GPU"


def test_process_that_has_not_used_cuda_stays_so(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda_double()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(_native, "cufile_why_not", lambda: pytest.fail("started CUDA"))
    assert "has not used CUDA" in gpudirect.why_not()


def test_sandbox_that_lists_no_modules_is_refused_before_libcufile_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda_double()
    has_started_cuda(monkeypatch)
    modules = tmp_path / "modules"
    monkeypatch.setattr(gpudirect, "_DRIVER", str(tmp_path))
    monkeypatch.setattr(gpudirect, "_MODULES", str(modules))
    monkeypatch.setattr(_native, "cufile_why_not", lambda: "opened")
    assert str(modules) in gpudirect.why_not()
    with pytest.raises(UnsupportedError, match="modules"):
        gpudirect.traffic()
    modules.touch()
    assert gpudirect.why_not() == "opened"


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


def test_engine_can_be_used_where_the_library_opens(double: CuFileDouble, monkeypatch: pytest.MonkeyPatch) -> None:
    has_started_cuda(monkeypatch)
    assert gpudirect.why_not() == ""


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
