"""GPUDirect Storage for the engine "cufile": finds libcufile, and tells whether it works and by which data path.

pip puts libcufile among Python packages, where the loader does not look; the native side is told the place. Success of
the library proves nothing: if the disk cannot write into the device, it silently goes through host memory
(compatibility mode). So only the library's own statistics after real transfers count as proof of GPUDirect.
`engine_selection` chooses engines, and `writer` and `reader` do the transfers.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import os
import secrets
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from fastpersist import _native
from fastpersist.commit.filesystem import storage_errors
from fastpersist.errors import FastPersistError, UnsupportedError

__all__ = ["Traffic", "find_library", "prepare", "traffic", "way", "why_not"]

SONAME = "libcufile.so.0"

# Where there is a driver, the kernel lists its modules; not so in a sandbox that only passes the driver's calls on.
_MODULES = "/proc/modules"
_DRIVER = "/dev/nvidiactl"

_WAY_BYTES = 1 << 20


class Traffic(NamedTuple):
    """Transfers between device memory and files in this process so far, reads and writes, by the way they took."""

    p2p_count: int
    """The disk wrote to, or read from, the device itself, by the kernel's means (PCI P2PDMA)."""
    nvfs_count: int
    """The same by the nvidia-fs module."""
    posix_count: int
    """Through host memory: no GPUDirect."""


# ----------------------------------------------------------------------------------------------------- the library


def find_library() -> str:
    """Return the path of libcufile; "" when the native side finds it by name, in the process or where the loader looks.

    Neither torch nor CUDA is started. In order: what the process has loaded, what `cuda.pathfinder` says, the
    directories that pip's packages use, below each entry of sys.path.

    Thread safety: any thread.
    """
    try:
        ctypes.CDLL(SONAME, mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
    except OSError:
        # Some builds of the library use symbols of librt without naming it.
        with suppress(OSError):
            ctypes.CDLL("librt.so.1", mode=ctypes.RTLD_GLOBAL)
        return _path_by_pathfinder() or _path_among_packages(tuple(sys.path), _cuda_of_torch())
    return ""


def _path_by_pathfinder() -> str:
    try:
        pathfinder: Any = importlib.import_module("cuda.pathfinder")
        return str(pathfinder.load_nvidia_dynamic_lib("cufile").abs_path or "")
    except (ImportError, AttributeError, OSError, RuntimeError):  # not installed, or it finds none
        return ""


@functools.cache
def _path_among_packages(directories: Sequence[str], cuda: str) -> str:
    def fits(path: Path) -> tuple[bool, str]:
        # For CUDA 12, nvidia/cufile; since CUDA 13, nvidia/cu13.
        package = path.parent.parent.name
        return (package == (f"cu{cuda}" if cuda != "12" else "cufile"), package)

    found = [path for directory in directories for path in Path(directory).glob(f"nvidia/*/lib/{SONAME}")]
    return str(max(found, key=fits).resolve()) if found else ""


def _torch() -> Any:
    return sys.modules.get("torch")


def _cuda_of_torch() -> str:
    version = getattr(getattr(_torch(), "version", None), "cuda", None) or ""
    return str(version).partition(".")[0]


def _cuda_is_started() -> bool:
    torch = _torch()
    return torch is not None and bool(torch.cuda.is_initialized())


def prepare() -> None:
    """Tell the native side where libcufile is: before an engine "cufile" is made. May be called again.

    Raises:
        UnsupportedError: libcufile would never return here.

    Thread safety: any thread.
    """
    if os.path.exists(_DRIVER) and not os.path.exists(_MODULES):
        raise UnsupportedError(f"there is no {_MODULES} in this sandbox, and libcufile would wait for it for ever")
    host_device = int(_torch().cuda.current_device()) if _cuda_is_started() else 0
    _native.cufile_configure(os.fsencode(find_library()), host_device)


def why_not() -> str:
    """Return why the engine "cufile" cannot be used, in one sentence; "" when it can.

    A process that has not used CUDA stays so (its forked children could not use CUDA any more), and that is the reason.

    Thread safety: any thread.
    """
    if reason := _native.cuda_driver_why_not():
        return str(reason)
    if not _cuda_is_started():
        return "this process has not used CUDA yet, and asking would start it; torch.cuda.init() does so"
    if reason := _native.cuda_why_not():
        return str(reason)
    try:
        prepare()
    except UnsupportedError as error:
        return str(error)
    return str(_native.cufile_why_not())


# ----------------------------------------------------------------------------------------------------- the truth


def traffic() -> Traffic:
    """Return how bytes between devices and files have gone in this process, by libcufile's statistics.

    Raises:
        UnsupportedError: They are unknown: the engine cannot be used here, or its library (before CUDA 13.0, or newer
            than what is understood) does not tell.

    Thread safety: any thread.
    """
    prepare()
    return Traffic(*_native.cufile_traffic())


def way(directory: str | os.PathLike[str]) -> str:
    """Say how the engine "cufile" moves bytes here, found by writing a file from memory of CUDA device 0.

    Args:
        directory: An existing directory on the file system in question.

    Returns:
        One clause, such as "peer to peer" or "compatibility mode: through host memory".

    Raises:
        UnsupportedError, DeviceError, StorageError: The engine does not work at all.

    Thread safety: any thread; transfers of other threads at that moment are taken for its own.
    """
    prepare()
    memory = _native.StagingBuffers(0, 1, _WAY_BYTES)
    with probe_file(directory) as (fd, path):
        write = (True, 0, memory.addresses[0], _WAY_BYTES)
        try:
            before = traffic()
        except FastPersistError as error:
            _native.run_requests(fd, os.fsencode(path), ["cufile"], [write])
            return f"which way is unknown: {error}"
        _native.run_requests(fd, os.fsencode(path), ["cufile"], [write])
    p2p_count, nvfs_count, posix_count = (now - then for now, then in zip(traffic(), before, strict=True))
    if posix_count > 0:
        return "compatibility mode: through host memory"
    if p2p_count > 0:
        return "peer to peer"
    return "peer to peer, by nvidia-fs" if nvfs_count > 0 else "which way is unknown: its statistics have no transfer"


@contextmanager
def probe_file(directory: str | os.PathLike[str]) -> Iterator[tuple[int, str]]:
    """Give a new file, open, and its path, which it keeps meanwhile: libcufile looks for that.

    Raises:
        StorageError: The file cannot be made or removed.
    """
    path = os.path.join(os.fspath(directory), f".fastpersist-probe-{secrets.token_hex(8)}")
    with storage_errors("creating", path):
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        yield fd, path
    finally:
        os.close(fd)
        with storage_errors("removing", path):
            os.unlink(path)
