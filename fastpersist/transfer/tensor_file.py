"""Reads and writes tensors at any place of an open file: `TensorFile`.

This is for programs that keep tensors on a disk themselves: weights that are streamed, rows that are gathered, swap
space. It has no format and no commit protocol, only bytes at offsets; `save` and `Checkpointer` write checkpoints.

Requests go to a native thread of the file (csrc/transfer/random_access.h). It cuts them into requests to the kernel,
keeps a queue of those full, and stages bytes of CUDA devices and bytes that direct I/O does not take as they are.
`tensor_requests` has what callers give and wait for; `tensor_memory` decides whether a tensor's bytes can be reached.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import logging
import mmap
import os
import stat
import threading
import warnings
import weakref
from collections.abc import Iterable, Iterator, Sequence
from types import TracebackType

import torch

from fastpersist import _native
from fastpersist.commit.filesystem import absolute_path, filesystem, reopened, storage_errors
from fastpersist.config import QUEUE_DEPTH_MAX, THREAD_COUNT_MAX, config_for
from fastpersist.errors import ConfigError, FastPersistError
from fastpersist.transfer.cuda import follow_caller, tell_of_pinning
from fastpersist.transfer.engine_selection import (
    announce_engine,
    engine_ladder,
    ladder_beside_buffered_writes,
    refuse_null_engine,
    require_engine,
)
from fastpersist.transfer.tensor_memory import byte_view
from fastpersist.transfer.tensor_requests import (
    SLICE_COUNT,
    Item,
    Part,
    PendingIO,
    Slice,
    checked_number,
    checked_offset,
    failure_of,
    in_slices,
    looked_at,
)

__all__ = ["TensorFile"]

_log = logging.getLogger("fastpersist")

_FLAGS = {
    "r": os.O_RDONLY,
    "r+": os.O_RDWR,
    "w": os.O_RDWR | os.O_CREAT,  # emptied later, when nothing can fail any more
    "x": os.O_RDWR | os.O_CREAT | os.O_EXCL,
}
_QUEUE_DEPTH = 64
_STAGING_BYTES = 64 << 20
_RESERVED_BYTES_MIN = 1 << 16  # reserving space for less costs more than it gains


class TensorFile:
    """An open file that tensors are read from and written to, at any offset, many at once.

    Tensors are contiguous, of any dtype, size, offset and alignment. Whole pages, such as those of `locked_tensor`, go
    straight from and to the disk where offset and size are whole blocks. Other memory is copied once on the way. A CUDA
    device copies its tensors chunk by chunk through the same pinned memory, of at most 64 MiB a file, or three chunks
    if these are larger. Tensors of other devices go through host memory of their size.

    Requests that are under way at the same time have no order: if they overlap, wait in between. Later reads see at
    once what is written; it is durable after `sync()`. Closing waits for all requests, and makes nothing durable. The
    next `sync()` or `close()` raises the error of a write that no call has asked about.

    On a CUDA device a request comes after the work that the calling thread's current stream has at the call; when it is
    done, the bytes are there for every stream. A device copies its requests of one direction in turn, so a stream that
    never ends (a collective whose peer is gone) also holds up the requests behind it, and no others. A thread that
    waits for such a request, or closes, waits until Ctrl-C. Bytes that are not copied within 10 s after that, or after
    another error in the `with` block, fail.

    Args:
        path: The file.
        mode: "r" reads; "r+" reads and writes a file that is there; "w" makes or empties it, reads and writes; "x" does
            the same if nothing is there. A "b" changes nothing, nor does a "+" behind "w" or "x", as in "rb" and "wb+".
        engine: "auto" or a name that `engines()` lists, which never falls back; as in `save`.
        queue_depth: Requests to the kernel at once, 1 … 4096. By default what `fastpersist tune` found, or 64.
        chunk_bytes: The largest request to the kernel, a power of two, 4 KiB … 1 GiB. By default what was tuned, or
            8 MiB.
        threads: Threads of the threads engines, 1 … 1024. By default what was tuned, or the queue depth, at most 16.

    Attributes:
        path: The path as it was given, as a string.
        mode: One of the four modes; "r" for "rb".

    Raises:
        ConfigError: Arguments that make no sense.
        UnsupportedError: The named engine cannot work here.
        StorageError: The file cannot be opened.

    Thread safety: any thread. A forked child may use it too: its first use opens the same file anew.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        mode: str = "r",
        *,
        engine: str = "auto",
        queue_depth: int | None = None,
        chunk_bytes: int | None = None,
        threads: int | None = None,
    ) -> None:
        self._lock = threading.Lock()
        self._native: _native.RandomAccess | None = None
        self._fds: list[int] = []
        self._lock_fds: list[int] = []
        self._end_bytes = 0
        self._closed = True
        self._sync_error: FastPersistError | None = None
        try:
            self.path = os.fsdecode(path)
            self._full_path = absolute_path(self.path)  # whatever directory the process is in later
            os.fsencode(self.path)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{path!r} is no path: {error}") from None
        if "\0" in self.path:
            raise ConfigError(f"{self.path!r} is no path: there is a null character in it")
        self.mode = mode = _checked_mode(mode)
        if not isinstance(engine, str):
            raise ConfigError(f"engine is {engine!r}; it must be a name")
        refuse_null_engine(require_engine(engine))
        self._wished_engine = engine
        given = (
            checked_number("queue_depth", queue_depth, 1, QUEUE_DEPTH_MAX),
            checked_number("chunk_bytes", chunk_bytes, 4096, 1 << 30),
            checked_number("threads", threads, 1, THREAD_COUNT_MAX),
        )
        if chunk_bytes is not None and chunk_bytes & (chunk_bytes - 1):
            raise ConfigError(f"chunk_bytes is {chunk_bytes}; it must be a power of two")
        is_new = mode == "x"
        with storage_errors("opening", self.path):
            try:
                self._refuse_kind(os.stat(self.path).st_mode)  # before opening: a pipe would block there
            except FileNotFoundError:
                is_new = mode in ("w", "x")
            fd = os.open(self.path, _FLAGS[mode] | os.O_CLOEXEC, 0o666)
        self._fds = [fd]
        try:
            self._open_native(given)
            if mode == "w" and self._end_bytes > 0:
                self._truncate(0)
                self._end_bytes = 0
        except BaseException:
            self._close_native()
            self._close_descriptors()
            if is_new:
                with contextlib.suppress(OSError):
                    os.unlink(self.path)
            raise
        self._name_is_durable = mode not in ("w", "x")
        self._closed = False
        _open_files.add(self)

    def _open_native(self, given: tuple[int | None, int | None, int | None]) -> None:
        """Open the native side: one descriptor for direct I/O, one through the page cache for edges of blocks."""
        fd = self._fds[0]
        self._refuse_kind(os.fstat(fd).st_mode)
        tuned = config_for(fd)
        queue_depth, chunk_bytes, threads = given
        self.queue_depth = queue_depth or tuned.queue_depth or _QUEUE_DEPTH
        self.chunk_bytes = chunk_bytes or tuned.chunk_bytes
        self.threads = threads or tuned.threads
        ladder = engine_ladder(self._wished_engine, fd, for_reading=self.mode == "r")
        buffered_fd = direct_lock_fd = edge_lock_fd = -1
        if self.mode != "r":
            buffered_fd = reopened(fd, self.path, os.O_RDWR)
            self._fds.append(buffered_fd)
            if not ladder[0].endswith(("-buffered", "null")):
                ladder = ladder_beside_buffered_writes(ladder, fd, self.path)
                direct_lock_fd, edge_lock_fd = self._open_for_lock(), self._open_for_lock()
        self._native = _native.RandomAccess(
            fd=fd,
            buffered_fd=buffered_fd,
            direct_lock_fd=direct_lock_fd,
            edge_lock_fd=edge_lock_fd,
            path=os.fsencode(self.path),
            engines=ladder,
            edge_engines=["fault:threads-buffered" if ladder[0].startswith("fault:") else "threads-buffered"],
            queue_depth=self.queue_depth,
            thread_count=self.threads,
            chunk_bytes=self.chunk_bytes,
            staging_bytes=_STAGING_BYTES,
        )
        self._end_bytes = os.lseek(fd, 0, os.SEEK_END)
        self._process_id = os.getpid()
        announce_engine(self.path, self._wished_engine, self._native.engine, self._native.demotions)

    def _open_for_lock(self) -> int:
        fd = reopened(self._fds[0], self.path, os.O_RDWR)
        self._lock_fds.append(fd)
        _native.close_in_forked_child(fd)  # or the child would hold the lock as long as it lives
        return fd

    def _close_native(self) -> None:
        if self._native is not None:
            self._native.close()

    def _close_descriptors(self) -> None:
        fds, self._fds = self._fds, []
        lock_fds, self._lock_fds = self._lock_fds, []
        for fd in lock_fds:
            _native.forget_descriptor(fd)
        for fd in fds + lock_fds:
            os.close(fd)

    def _refuse_kind(self, file_mode: int) -> None:
        if stat.S_ISDIR(file_mode):
            with storage_errors("opening", self.path):
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if not stat.S_ISREG(file_mode) and not stat.S_ISBLK(file_mode):
            raise ConfigError(
                f"{self.path} is neither a file nor a block device: it has no offsets to read or write at"
            )

    # --- reading and writing

    def read(self, tensor: torch.Tensor, offset_bytes: int = 0) -> int:
        """Fill a tensor with the bytes at an offset; return how many.

        Args:
            tensor: A contiguous tensor; it gets the bytes of the file as they are.
            offset_bytes: The offset from the start of the file.

        Raises:
            ConfigError: No such tensor or offset, or the file is closed.
            EndOfFileError: The file ends earlier; the bytes before its end were read.
            StorageError: The kernel reports an error.
            DeviceError: The driver of a CUDA device reports an error; other requests go on.
            UnsupportedError: The device's current stream is being captured into a CUDA graph.
        """
        return self.read_async(tensor, offset_bytes).result()

    def write(self, tensor: torch.Tensor, offset_bytes: int = 0) -> int:
        """Write the bytes of a tensor at an offset; return how many. The file grows if it has to.

        Args:
            tensor: A contiguous tensor.
            offset_bytes: The offset from the start of the file; it may lie behind its end.

        Raises:
            ConfigError: No such tensor or offset, or the file is closed, or open for reading only.
            NoSpaceError: The file system is full.
            StorageError: The kernel reports an error.
            DeviceError, UnsupportedError: As `read`.
        """
        return self.write_async(tensor, offset_bytes).result()

    def read_async(self, tensor: torch.Tensor, offset_bytes: int = 0) -> PendingIO:
        """Start what `read` does."""
        return self.read_list_async([(tensor, offset_bytes)])

    def write_async(self, tensor: torch.Tensor, offset_bytes: int = 0) -> PendingIO:
        """Start what `write` does."""
        return self.write_list_async([(tensor, offset_bytes)])

    def read_list(self, items: Iterable[Item]) -> int:
        """Fill many tensors, each from its own offset, as one request: ten thousand rows are one call.

        Args:
            items: Tensors and offsets.

        Returns:
            The bytes of all.

        Raises:
            As `read`. If an item is wrong, those before it may have been read; nothing is under way any more.
        """
        return self.read_list_async(items).result()

    def write_list(self, items: Iterable[Item]) -> int:
        """Write many tensors, each at its own offset, as one request. Nothing is written if an item is wrong."""
        return self.write_list_async(items).result()

    def read_list_async(self, items: Iterable[Item]) -> PendingIO:
        """Start what `read_list` does."""
        tensors: list[torch.Tensor] = []
        copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        given = list(in_slices(items))  # without the lock: an iterator of the caller's may use this very file

        followed: set[int] = set()

        def slices() -> Iterator[Slice]:
            for some in given:
                found = looked_at(some, len(tensors))
                # Whoever compares a tensor's version must see that it changes.
                torch.autograd.graph.increment_version([one for one in found.tensors if not one.is_inference()])
                tensors.extend(found.tensors)
                for tensor, offset_bytes in found.elsewhere:
                    host = torch.empty(tensor.nbytes, dtype=torch.uint8, device="cpu")
                    copies.append((tensor, host))
                    found.in_host_memory.append((host.data_ptr(), host.nbytes, offset_bytes))
                yield found.in_host_memory
                for ordinal, parts in found.on_devices.items():
                    if ordinal not in followed:
                        follow_caller(ordinal, to_host=False)
                        followed.add(ordinal)
                    yield ordinal, parts

        def copy_to_devices() -> None:
            for tensor, host in copies:
                byte_view(tensor).copy_(host)
            if followed:
                tell_of_pinning()

        request = self._submit(False, slices(), (tensors, copies))
        return PendingIO(request, self.path, copy_to_devices if copies or followed else None)

    def write_list_async(self, items: Iterable[Item]) -> PendingIO:
        """Start what `write_list` does."""
        if self.mode == "r":
            raise ConfigError(f'{self.path} is open for reading only; open it with mode="r+" to write')
        # Check all items before the first is written: a list with a mistake in it changes nothing.
        found = [looked_at(some, number * SLICE_COUNT) for number, some in enumerate(in_slices(items))]
        tensors = [tensor for some in found for tensor in some.tensors]
        copies = [(byte_view(tensor).cpu(), at) for some in found for tensor, at in some.elsewhere]
        parts = [part for some in found for part in some.in_host_memory]
        parts += [(host.data_ptr(), host.nbytes, at) for host, at in copies]
        slices: list[Slice] = [parts]
        on_devices = [one for some in found for one in some.on_devices.items()]
        if on_devices:
            slices += on_devices
            parts = parts + [part for _, some in on_devices for part in some]
            for ordinal in {ordinal for ordinal, _ in on_devices}:
                follow_caller(ordinal, to_host=True)
        with self._lock:
            self._reserve(self._opened(), parts)
        request = self._submit(True, slices, (tensors, copies))
        return PendingIO(request, self.path, tell_of_pinning if on_devices else None)

    def _submit(self, is_write: bool, slices: Iterable[Slice], kept: object) -> _native.FileRequest:
        with self._lock:  # close() either sees this request or comes first
            return self._opened().submit(is_write, slices, kept)

    def _reserve(self, native: _native.RandomAccess, parts: Sequence[Part]) -> None:
        """Extend the file before direct writes reach beyond its end: writes that extend a file run one by one."""
        beyond = [(offset, offset + size) for _, size, offset in parts if size and offset + size > self._end_bytes]
        if not beyond:
            return
        start_bytes, end_bytes = min(beyond)[0], max(end for _, end in beyond)
        written_bytes = sum(end - offset for offset, end in beyond)
        # Where writes lie far apart nothing is reserved: holes stay holes.
        if written_bytes >= _RESERVED_BYTES_MIN and end_bytes - start_bytes <= 2 * written_bytes:
            if not native.engine.endswith(("-buffered", "null")):
                self._allocate(start_bytes, end_bytes - start_bytes)
            self._end_bytes = end_bytes
        elif self._lock_fds and self._end_bytes % mmap.PAGESIZE:
            # Otherwise the write would move the end, and the kernel would make the page of the old end dirty.
            self._allocate(end_bytes - 1, 1)
            self._end_bytes = end_bytes

    # --- the file itself

    def sync(self) -> None:
        """Wait for all requests, and make what was written durable: bytes, length, and the name of a new file.

        Raises:
            StorageError: A write failed that no call has asked about; or the kernel reports an error, now or at an
                earlier sync of this object: what it could not write then is lost.
        """
        with self._lock:
            native = self._opened()
        native.wait_for_all()
        _native.forget_done_requests()
        self._raise_first(native.take_failed_writes())
        if self._sync_error is not None:
            raise self._sync_error
        with self._lock:
            self._opened()
            with storage_errors("syncing", self.path):
                fd = os.dup(self._fds[0])  # other threads go on meanwhile, and may close the file
        try:
            native.raise_lost_writes()
            filesystem().sync(fd, self.path)
        except FastPersistError as error:
            self._sync_error = error  # the kernel reports it once, and drops what it could not write
            raise
        finally:
            os.close(fd)
        if not self._name_is_durable:
            filesystem().sync_directory(os.path.dirname(self._full_path))
            self._name_is_durable = True

    def size(self) -> int:
        """Return the length of the file in bytes."""
        with self._lock:
            self._opened()
            with storage_errors("seeking in", self.path):
                return os.lseek(self._fds[0], 0, os.SEEK_END)

    def truncate(self, size_bytes: int) -> None:
        """Wait for all requests, and give the file another length; bytes that are added read as zeros.

        Raises:
            ConfigError: A negative length, or the file is open for reading only.
            StorageError: The kernel reports an error.
        """
        size_bytes = self._checked_size(size_bytes)
        with self._lock:
            native = self._opened()
        native.wait_for_all()
        with self._lock:
            self._opened()
            self._truncate(size_bytes)
            self._end_bytes = size_bytes

    def allocate(self, size_bytes: int) -> None:
        """Reserve the first bytes of a file, and make it as long if it is shorter: a full disk fails here, not later.

        Raises:
            ConfigError: A negative length, or the file is open for reading only.
            NoSpaceError: The file system is full.
            StorageError: The kernel reports an error.
        """
        size_bytes = self._checked_size(size_bytes)
        with self._lock:
            self._opened()
            self._allocate(0, size_bytes)
            if os.lseek(self._fds[0], 0, os.SEEK_END) < size_bytes:  # its file system cannot reserve
                self._truncate(size_bytes)
            self._end_bytes = max(self._end_bytes, size_bytes)

    def _allocate(self, offset_bytes: int, size_bytes: int) -> None:
        with self._lock_fd_for_the_end(offset_bytes + size_bytes) as lock_fd:
            _native.allocate_alone(lock_fd, self._fds[0], offset_bytes, size_bytes, os.fsencode(self.path))

    def _truncate(self, size_bytes: int) -> None:
        with self._lock_fd_for_the_end(size_bytes) as lock_fd:
            _native.truncate_alone(lock_fd, self._fds[0], size_bytes, os.fsencode(self.path))

    @contextlib.contextmanager
    def _lock_fd_for_the_end(self, new_end_bytes: int) -> Iterator[int]:
        """Yield a descriptor for the lock under which the end of the file is moved; -1 where no lock is needed."""
        end_bytes = os.lseek(self._fds[0], 0, os.SEEK_END)
        if not self._lock_fds or (end_bytes | new_end_bytes) % mmap.PAGESIZE == 0:
            yield -1
            return
        lock_fd = self._open_for_lock()
        try:
            yield lock_fd
        finally:
            self._lock_fds.remove(lock_fd)
            _native.forget_descriptor(lock_fd)
            os.close(lock_fd)

    def _checked_size(self, size_bytes: int) -> int:
        if self.mode == "r":
            raise ConfigError(f'{self.path} is open for reading only; open it with mode="r+" to change its length')
        return checked_offset(size_bytes, "a length")

    def fileno(self) -> int:
        """Return the file's descriptor, which this object keeps. Direct I/O may be on for it."""
        with self._lock:
            self._opened()
            return self._fds[0]

    @property
    def engine(self) -> str:
        """The name of the engine in use."""
        with self._lock:
            return self._opened().engine

    @property
    def closed(self) -> bool:
        """Whether it is closed."""
        return self._closed

    def close(self) -> None:
        """Wait for all requests, and close the file. Closing again does nothing.

        Raises:
            StorageError, DeviceError: A write failed that no call has asked about. The file is closed all the same.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
            native, self._native = self._native, None
        _open_files.discard(self)
        failures: list[_native.FileRequest] = []
        try:
            if native is not None and os.getpid() == self._process_id:
                native.wait_for_all()
                failures = native.take_failed_writes()
                native.close()
        finally:
            if native is not None:
                native.close()  # after a Ctrl-C in the wait, too: descriptors may be closed only after this
            self._close_descriptors()
            _native.forget_done_requests()
        self._raise_first(failures)

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close() if error is None else self._close_in_time("; while another error was on its way")

    def __del__(self) -> None:
        if getattr(self, "_closed", True):
            return
        warnings.warn(f"{self!r} was not closed", ResourceWarning, stacklevel=2, source=self)
        self._close_in_time("")

    def _close_in_time(self, when: str) -> None:
        """Close, give up on devices that hang, and log errors."""
        try:
            if self._native is not None and os.getpid() == self._process_id:
                self._native.give_up_on_devices()
            self.close()
        except FastPersistError as error:
            _log.error("%s%s", error, when)

    def __repr__(self) -> str:
        return f"<TensorFile {self.path!r} mode={self.mode!r}{' closed' if self._closed else ''}>"

    def __reduce__(self) -> tuple[object, ...]:
        if self.mode != "r":
            raise TypeError(
                f"{self!r} cannot be pickled: only a file that is open for reading can be opened again elsewhere"
            )
        options = (self._wished_engine, self.queue_depth, self.chunk_bytes, self.threads)
        return (_open_again, (self._full_path, *options))

    def _opened(self) -> _native.RandomAccess:
        """Return the native side; the lock is held. In a forked child, open the file anew first."""
        if self._closed:
            raise ConfigError(f"{self.path} is closed")
        if self._native is None or os.getpid() != self._process_id:
            inherited = self._fds
            self._fds = [reopened(inherited[0], self._full_path, os.O_RDONLY if self.mode == "r" else os.O_RDWR)]
            try:
                self._open_native((self.queue_depth, self.chunk_bytes, self.threads or None))
            except BaseException:
                self._close_descriptors()
                self._fds = inherited  # the next use tries again
                raise
            for each in inherited:
                os.close(each)
        if self._native is None:
            raise ConfigError(f"{self.path} is closed")
        return self._native

    def _raise_first(self, failed: Sequence[_native.FileRequest]) -> None:
        """Raise the first error of writes that no call has asked about; the others go to the log."""
        errors = [error for request in failed if (error := failure_of(request, self.path)) is not None]
        for error in errors[1:]:
            _log.error("%s; one more write that failed", error)
        if errors:
            raise errors[0]

    def _forget_parent(self) -> None:
        self._lock = threading.Lock()  # the parent's may be held, and no thread here would release it
        self._native = None
        self._lock_fds = []  # closed already


def _checked_mode(mode: object) -> str:
    """Return our mode for one as `open` takes it."""
    if isinstance(mode, str):
        name = mode.replace("b", "", 1)  # files are always bytes
        if name in ("w+", "x+"):
            name = name[0]  # which can read anyway
        if name in _FLAGS:
            return name
    raise ConfigError(
        f"mode is {mode!r}; it must be one of {', '.join(map(repr, _FLAGS))}, or the same with a 'b'"
        + ("; to append, open with 'r+' and write at size()" if isinstance(mode, str) and "a" in mode else "")
    )


def _open_again(path: str, engine: str, queue_depth: int, chunk_bytes: int, threads: int) -> TensorFile:
    return TensorFile(path, engine=engine, queue_depth=queue_depth, chunk_bytes=chunk_bytes, threads=threads or None)


# ------------------------------------------------------------------------------------------------------- the process

_open_files: weakref.WeakSet[TensorFile] = weakref.WeakSet()


def _close_all() -> None:
    """Wait for all requests: their memory is freed when the interpreter ends.

    Daemon threads that wait for the same requests go on beside this, and must not be the ones that free it.
    """
    _native.keep_owners()
    for file in list(_open_files):
        try:
            file.close()
        except FastPersistError as error:
            _log.error("%s", error)


def _after_fork_in_child() -> None:
    for file in list(_open_files):
        file._forget_parent()


atexit.register(_close_all)
os.register_at_fork(after_in_child=_after_fork_in_child)
