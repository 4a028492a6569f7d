"""GPUDirect Storage for the engine "cufile": where libcufile is, whether it can be used, and which way bytes take.

pip puts libcufile among Python packages, where the loader does not look; the native side is told the place. What the
library says of itself is no proof: where the disk cannot write into the device, it goes through host memory without a
word (compatibility mode). So nothing here calls GPUDirect real but the library's own statistics after real transfers.
Choosing engines is `engine_selection`'s, and what a transfer does is `pipeline`'s.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import logging
import os
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from fastpersist import _native
from fastpersist.commit.filesystem import storage_errors
from fastpersist.config import CUFILE_APIS, config_for
from fastpersist.errors import ConfigError, FastPersistError, UnsupportedError

__all__ = ["Traffic", "Trial", "find_library", "prepare", "traffic", "trial", "way", "why_not", "why_not_direct"]

_log = logging.getLogger("fastpersist")

SONAME = "libcufile.so.0"

# Where there is a driver, the kernel lists its modules; not so in a sandbox that only passes the driver's calls on.
_MODULES = "/proc/modules"
_DRIVER = "/dev/nvidiactl"

_BUFFER_COUNT = 8
_BUFFER_BYTES = 8 << 20
_WAY_BYTES = 1 << 20
_ROUND_COUNT = 3  # the first one finds a ring that is not pinned yet


class Traffic(NamedTuple):
    """Transfers between device memory and files in this process so far, reads and writes, by the way they took."""

    p2p_count: int
    """The disk wrote to, or read from, the device itself, by the kernel's means (PCI P2PDMA)."""
    nvfs_count: int
    """The same by the nvidia-fs module."""
    posix_count: int
    """Through host memory: no GPUDirect."""

    @property
    def direct_count(self) -> int:
        """Of those that did not go through host memory."""
        return self.p2p_count + self.nvfs_count


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
        raise UnsupportedError(f"there is no {_MODULES} in this sandbox, and libcufile waits for it without end")
    host_device = int(_torch().cuda.current_device()) if _cuda_is_started() else 0
    _native.cufile_configure(os.fsencode(find_library()), host_device)


def why_not(*, start: bool = False) -> str:
    """Return why the engine "cufile" cannot be used, in one sentence; "" when it can.

    Args:
        start: Start CUDA in this process to find out. Otherwise a process that has not used CUDA stays so (its forked
            children could not use CUDA any more), and that is the reason.

    Thread safety: any thread.
    """
    if reason := _native.cuda_driver_why_not():
        return str(reason)
    if not start and not _cuda_is_started():
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


def way(directory: str | os.PathLike[str], device: int = 0) -> str:
    """Say how the engine "cufile" moves bytes here, found by writing a file from device memory.

    Args:
        directory: An existing directory on the file system in question.
        device: Ordinal of the CUDA device, which is started.

    Returns:
        One clause, such as "peer to peer" or "compatibility mode: through host memory".

    Raises:
        UnsupportedError, DeviceError, StorageError: It does not work at all.

    Thread safety: any thread; transfers of other threads at that moment are taken for its own.
    """
    prepare()
    memory = _native.StagingBuffers(device, 1, _WAY_BYTES)
    with _scratch_file(directory) as (fd, path):
        api = config_for(fd).cufile_api
        try:
            before = traffic()
        except FastPersistError as error:
            _run(fd, path, [(True, 0, memory.addresses[0])], _WAY_BYTES, api)
            return f"which way is unknown: {error}"
        _run(fd, path, [(True, 0, memory.addresses[0])], _WAY_BYTES, api)
    p2p_count, nvfs_count, posix_count = (now - then for now, then in zip(traffic(), before, strict=True))
    if posix_count > 0:
        return "compatibility mode: through host memory"
    if p2p_count > 0:
        return "peer to peer"
    return "peer to peer, by nvidia-fs" if nvfs_count > 0 else "which way is unknown: its statistics have no transfer"


def why_not_direct(move: Callable[[], object]) -> str:
    """Do a small transfer by the engine "cufile"; return why it was none between device and file, "" when it was.

    Thread safety: any thread. Of transfers that other threads do by that engine meanwhile, those through host memory
    count against this one, and others may vouch for it.
    """
    try:
        before = traffic()
        move()
        after = traffic()
    except FastPersistError as error:
        return str(error)
    if after.posix_count > before.posix_count:
        return "compatibility mode: through host memory"
    return "" if after.direct_count > before.direct_count else "its statistics do not have the transfer"


class Trial(NamedTuple):
    """What came of a trial of GPUDirect against the ring."""

    why_lost: str
    """In one clause; "" when it was won: each transfer went peer to peer, every byte was right, and it was faster."""
    write_gain: float = 0.0
    """How many times as fast as the ring it wrote, by the best round of each; 0 if it did not come so far."""
    read_gain: float = 0.0
    """The same for reading."""
    cufile_api: str = CUFILE_APIS[0]
    """By which of `config.CUFILE_APIS` it did so."""
    why_not_batch: str = ""
    """In one clause; "" where that is "batch", or the trial did not come so far."""


def trial(
    directory: str | os.PathLike[str],
    device: int,
    size_bytes: int,
    write_by_ring: Callable[[int, str], object],
    read_by_ring: Callable[[int, str], object],
    apis: Sequence[str] = CUFILE_APIS,
) -> Trial:
    """Find out whether GPUDirect is real in a directory, right, and faster than the ring at writing and at reading.

    Requests go by calls, in batches, and by the ring, in turn, to and from files of the same size, and the best round
    of each counts. Batches are taken only where they beat the calls, too, or where these have lost to the ring. It is
    lost whenever something is missing or cannot be told.

    Args:
        directory: An existing directory on the file system in question.
        device: Ordinal of the CUDA device, which is started.
        size_bytes: Of each file; a multiple of 64 MiB.
        write_by_ring: write_by_ring(fd, path) writes size_bytes of the device's memory to a preallocated file, as saves
            do without GPUDirect.
        read_by_ring: The same the other way round, as loads do.
        apis: Those of `config.CUFILE_APIS` that are tried; "calls" is one of them.

    Raises:
        ConfigError: size_bytes is no multiple of 64 MiB.

    Thread safety: any thread; a trial during which other threads do transfers through host memory is lost.
    """
    if size_bytes <= 0 or size_bytes % (_BUFFER_COUNT * _BUFFER_BYTES) != 0:
        raise ConfigError(f"a trial of {size_bytes} bytes: take a multiple of {_BUFFER_COUNT * _BUFFER_BYTES}")
    try:
        if why := why_not(start=True):
            found = Trial(why)
        else:
            found = _Contest(directory, device, size_bytes, (write_by_ring, read_by_ring), apis).held()
    except (FastPersistError, OSError) as error:
        found = Trial(str(error))
    _log.info("GPUDirect Storage in %s: %s", os.fspath(directory), found.why_lost or "real, and faster than the ring")
    return found


class _Lost(Exception):
    """Why a trial is lost."""


class _Contest:
    """The rounds of a trial; arguments as there."""

    def __init__(
        self,
        directory: str | os.PathLike[str],
        device: int,
        size_bytes: int,
        by_ring: tuple[Callable[[int, str], object], Callable[[int, str], object]],
        apis: Sequence[str],
    ) -> None:
        self._directory = directory
        self._size_bytes = size_bytes
        self._count = size_bytes // _BUFFER_BYTES
        self._by_ring = by_ring
        self._memory = _native.StagingBuffers(device, _BUFFER_COUNT, _BUFFER_BYTES)
        self._patterns = [secrets.token_bytes(4096) * (_BUFFER_BYTES // 4096) for _ in range(_BUFFER_COUNT)]
        self._seconds: dict[str, list[tuple[float, float]]] = {api: [] for api in apis}
        self._ring_seconds: list[tuple[float, float]] = []
        self._why_lost: dict[str, str] = {}  # by api

    def held(self) -> Trial:
        """Hold all rounds, or as many as it takes to lose."""
        for _ in range(_ROUND_COUNT):
            for api, seconds in self._seconds.items():
                if api in self._why_lost:
                    continue
                try:
                    seconds.append(self._round_by(api))
                except (_Lost, FastPersistError, OSError) as error:
                    # Where calls are no GPUDirect, batches are none either, and may wait in libcufile without end.
                    if api == "calls":
                        return Trial(str(error))
                    self._why_lost[api] = str(error)
            self._ring_seconds.append(self._round_of_ring())
        return self._judged()

    def _judged(self) -> Trial:
        ring = _best(self._ring_seconds)
        best = {api: _best(seconds) for api, seconds in self._seconds.items() if api not in self._why_lost}
        for api, seconds in best.items():
            if why := _why_no_faster(seconds, ring, "the ring"):
                self._why_lost[api] = why
        api = "calls"
        if "batch" in best and "batch" not in self._why_lost and "calls" not in self._why_lost:
            if why := _why_no_faster(best["batch"], best["calls"], "calls"):
                self._why_lost["batch"] = why
        if "batch" in best and "batch" not in self._why_lost:
            api = "batch"
        (write_s, read_s), (ring_write_s, ring_read_s) = best[api], ring
        gains = (_gain(ring_write_s, write_s), _gain(ring_read_s, read_s))
        return Trial(self._why_lost.get(api, ""), *gains, api, self._why_lost.get("batch", ""))

    def _round_by(self, api: str) -> tuple[float, float]:
        """Write and read a file; return the seconds.

        Raises:
            _Lost: Not every request went peer to peer, or a byte is wrong.
        """
        before = traffic()
        seconds = self._round_of_cufile(api)
        after = traffic()
        if after.posix_count > before.posix_count:
            raise _Lost("compatibility mode: through host memory")
        if after.direct_count < before.direct_count + 2 * self._count:
            raise _Lost("its statistics do not have every transfer")
        return seconds

    def _round_of_cufile(self, api: str) -> tuple[float, float]:
        """Write and read a file; return the seconds.

        Raises:
            _Lost: A byte is wrong.
        """
        for index, pattern in enumerate(self._patterns):
            self._memory.fill(index, pattern)
        with _scratch_file(self._directory) as (fd, path):
            write_s = _timed_write(fd, path, self._size_bytes, lambda fd, path: self._move(fd, path, api, write=True))
            read_s = _timed(lambda: self._move(fd, path, api, write=False))
            with open(path, "rb") as written:  # the descriptor is set to direct I/O
                for index in range(self._count):
                    if written.read(_BUFFER_BYTES) != self._patterns[index % _BUFFER_COUNT]:
                        raise _Lost("the file holds other bytes than the device's memory")
            if any(
                self._memory.read(self._place_read(index), _BUFFER_BYTES) != pattern
                for index, pattern in enumerate(self._patterns)
            ):
                raise _Lost("the device's memory holds other bytes than the file")
        return write_s, read_s

    def _round_of_ring(self) -> tuple[float, float]:
        write, read = self._by_ring
        with _scratch_file(self._directory) as (fd, path):
            write_s = _timed_write(fd, path, self._size_bytes, write)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)  # where it goes through the page cache
            return write_s, _timed(lambda: read(fd, path))

    def _move(self, fd: int, path: str, api: str, *, write: bool) -> None:
        addresses = self._memory.addresses
        requests = [
            (write, index * _BUFFER_BYTES, addresses[index % _BUFFER_COUNT if write else self._place_read(index)])
            for index in range(self._count)
        ]
        _run(fd, path, requests, _BUFFER_BYTES, api)

    def _place_read(self, index: int) -> int:
        """Return the buffer that part of a file is read to: one that holds other bytes until then."""
        return (index + 1) % _BUFFER_COUNT


def _best(rounds: Sequence[tuple[float, float]]) -> tuple[float, float]:
    write_s, read_s = (min(seconds) for seconds in zip(*rounds, strict=True))
    return write_s, read_s


def _why_no_faster(seconds: tuple[float, float], other: tuple[float, float], whose: str) -> str:
    for what, own_s, other_s in zip(("writing", "reading"), seconds, other, strict=True):
        if own_s >= other_s:
            return f"no faster than {whose} at {what} ({own_s:.3f} s to {other_s:.3f} s)"
    return ""


def _gain(ring_s: float, direct_s: float) -> float:
    return ring_s / direct_s if direct_s > 0 else float("inf")


def _timed_write(fd: int, path: str, size_bytes: int, write: Callable[[int, str], object]) -> float:
    def write_durably() -> None:
        write(fd, path)
        os.fdatasync(fd)

    _native.allocate(fd, size_bytes, os.fsencode(path))
    return _timed(write_durably)


def _timed(work: Callable[[], object]) -> float:
    start_s = time.perf_counter()
    work()
    return time.perf_counter() - start_s


def _run(fd: int, path: str, requests: Sequence[tuple[bool, int, int]], size_bytes: int, api: str) -> None:
    """Do requests of one size by the engine; each is whether to write, the offset in the file, and the address."""
    sized = [(*request, size_bytes) for request in requests]
    in_batch = api == "batch"
    _native.run_requests(fd, os.fsencode(path), ["cufile"], sized, queue_depth=_BUFFER_COUNT, cufile_batch=in_batch)


@contextmanager
def _scratch_file(directory: str | os.PathLike[str]) -> Iterator[tuple[int, str]]:
    # Not unlinked while it is open, as other probes' files are: libcufile looks for its path.
    path = os.path.join(os.fspath(directory), f".fastpersist-probe-{secrets.token_hex(8)}")
    with storage_errors("creating", path):
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        yield fd, path
    finally:
        os.close(fd)
        with suppress(OSError):
            os.unlink(path)
