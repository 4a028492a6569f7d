"""Rows of a table on disk, gathered by their ids: `fastpersist.RowStore`, and the tickets of requests made ahead.

The native side (csrc/rows/store.h) plans, reads and caches. Here are what callers give and get, the memory of results,
and the order in which requests that were made ahead are started. `opening` finds the rows in the files, `ahead` makes
requests ahead of a loop.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import itertools
import math
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.context import get_spawning_popen
from types import TracebackType
from typing import Any, NamedTuple, TypeVar

import torch

from fastpersist import _native
from fastpersist.arguments import byte_count
from fastpersist.commit.filesystem import storage_errors
from fastpersist.errors import ConfigError, FastPersistError, InternalError, StorageError
from fastpersist.rows.ahead import ahead
from fastpersist.rows.device_rows import (
    CachedRows,
    DeviceRows,
    SentRows,
    Split,
    cached_rows,
    checked_device,
    kept_on_device,
    send_rows,
)
from fastpersist.rows.ids import check_out, checked_ids, count_change, is_traced
from fastpersist.rows.opening import RowSource, Source, as_absolute, facts_of, open_rows
from fastpersist.transfer.arena import available_bytes_per_rank
from fastpersist.transfer.engine_selection import announce_engine, engine_ladder, refuse_null_engine, require_engine
from fastpersist.transfer.tensor_memory import address_of
from fastpersist.transfer.tensor_requests import checked_number
from fastpersist.transfer.torch_boundary import untraced
from fastpersist.uncopied import Uncopied

__all__ = ["RowStats", "RowStore", "RowTicket"]

Batch = TypeVar("Batch")

_QUEUE_DEPTH = 256
_GAP_BYTES = 8 << 10  # NVMe disks read about so many bytes in the time that another read costs
_AHEAD_BYTES_MAX = 256 << 20  # a default, like the next one
_AHEAD_ROWS = 1024  # enough to keep a disk busy; until later requests are started, the cache plans for them
_UNDER_WAY_COUNT_MIN = 2  # one is taken, one is read
_ROW_BYTES_MAX = 1 << 30
_KEPT_AT_ONCE_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class RowStats:
    """What a row store has done since it was opened.

    Attributes:
        row_count: Rows asked for, duplicates included.
        device_row_count: How many of the rows asked for were on a device already.
        hit_count: How many of the rows asked for were in the cache.
        shared_count: How many of the rows asked for came by a read that another request had under way.
        read_count: Requests to the kernel.
        read_bytes: Bytes that these requests read, in whole blocks.
        cached_row_count: Rows in the cache now.
        cache_row_limit: Rows that the cache has room for.
        row_bytes: The length of a row.
        engine: The engine that reads.
    """

    row_count: int
    device_row_count: int
    hit_count: int
    shared_count: int
    read_count: int
    read_bytes: int
    cached_row_count: int
    cache_row_limit: int
    row_bytes: int
    engine: str

    @property
    def hit_rate(self) -> float:
        """The share of the rows asked for that the cache or a device had; 0 before the first request."""
        return (self.device_row_count + self.hit_count) / self.row_count if self.row_count else 0.0


class RowTicket(Uncopied):
    """Rows that were asked for ahead, by `RowStore.prefetch`: on their way, or waiting for their turn.

    Dropping the ticket gives the rows up, as `cancel` does.

    Thread safety: any thread.
    """

    def __init__(
        self,
        store: RowStore,
        ids: torch.Tensor,
        shape: torch.Size,
        batch: int,
        device: torch.device | None,
        split: Split | None,
    ) -> None:
        self._store = store
        self._ids = ids  # of the rows that are not on the device
        self._shape = shape
        self._batch = batch
        self._device = device
        self._split = split
        self._cached: CachedRows | None = None
        self._sent: SentRows | None = None
        self._rows: torch.Tensor | None = None
        self._request: _native.RowRequest | None = None
        self._native: _native.RowStore | None = None  # which works on the request; a forked child has another
        self._error: Exception | None = None

    def done(self) -> bool:
        """Tell whether `result` would return or raise without waiting."""
        return self._store._is_done(self)

    def cancel(self) -> None:
        """Give the rows up: reads that have not begun are dropped, and the memory is free at once."""
        self._store._give_up(self)

    def result(self, timeout: float | None = None) -> torch.Tensor:
        """Return the rows, as `RowStore.gather` does, waiting at most `timeout` seconds; again, the same ones.

        Raises:
            TimeoutError: The rows are not there yet.
            ConfigError: The request was cancelled, or the store closed.
            StorageError: As `RowStore.gather`.
            RuntimeError: There was no memory for the rows.
        """
        return self._store._take(self, timeout)

    def __del__(self) -> None:
        if hasattr(self, "_error"):  # the last attribute of a whole ticket
            self._store._drop(self)


class RowStore:
    """A table of rows on disk, read by ids.

    The cache keeps the rows that requests made ahead will use, then those that are used most. Files are read by direct
    I/O, past the page cache, unless most of a table is in the page cache when it is opened.

    A table must not change while it is open: the next request detects a change in place, and fails. Write a new version
    to a new file, and rename it over the old one; the store goes on with the old file. In a forked child that has not
    used the store before, requests fail instead.

    Args:
        source: A .npy file, a safetensors file, a raw file (with `shape` and `dtype`), or a list of pieces joined by
            rows, each a path or (path, tensor name), on any disks.
        tensor: The name of the tensor in a safetensors file; may be left out if the file has only one.
        shape: For a raw file: the dimensions; the first may be -1, for as many rows as there are.
        dtype: For a raw file: the dtype. Elements of other files are read as this dtype, of the same width.
        offset_bytes: For a raw file: where its rows begin.
        cache_bytes: Memory for rows and what belongs to them, as a number or a text such as "4GiB". "auto": a quarter
            of what is available, shared out among the ranks of the machine; at most the table. Where requests go to a
            CUDA device, what the rows fill of it is pinned.
        ahead_bytes: Memory for the results of requests made ahead that were not taken yet, on the host or on the device
            that they are for; two may always be under way. "auto" is room for 1,024 rows, at most 256 MiB: these keep a
            disk busy, and the cache knows what is started later.
        engine: "auto" or a name that `engines()` lists, which never falls back; as in `save`.
        queue_depth: Reads in flight at once, 1 … 4096.

    Attributes:
        row_count: Rows of the table; also `len()`.
        row_shape: Dimensions of a row.
        row_bytes: The length of a row.
        dtype: The dtype of the elements.

    Raises:
        ConfigError: Arguments that make no sense, or do not fit the file.
        CheckpointNotFoundError: There is no such file.
        FormatError: A file is damaged, or shorter than it says.
        UnsupportedError: A format without rows of numbers; or the named engine cannot work here.
        StorageError: A file cannot be opened, or there is no memory for the cache.

    Thread safety: any thread. A child process, such as a worker of a DataLoader, may use it too, without a cache: a
    forked one opens the same files anew at its first use, others when they start. It is pickled as its arguments.

    Source: the ideas of BaM (arXiv:2203.04910) and GIDS (arXiv:2306.16384) on ordinary files.
    """

    def __init__(
        self,
        source: Source,
        *,
        tensor: str | None = None,
        shape: Sequence[int] | None = None,
        dtype: torch.dtype | None = None,
        offset_bytes: int = 0,
        cache_bytes: int | str = "auto",
        ahead_bytes: int | str = "auto",
        engine: str = "auto",
        queue_depth: int | None = None,
    ) -> None:
        # Re-entrant, as the next one is: signal handlers, and the garbage collector that ends a loop of `ahead`, call
        # in here anywhere.
        self._lock = threading.RLock()
        self._native: _native.RowStore | None = None
        self._fds: list[int] = []
        self._closed = True
        given: Any = source
        if hasattr(given, "__next__"):  # it could be read once only
            source = list(given)
        refuse_null_engine(require_engine(engine))
        self._engine = engine
        self._queue_depth = checked_number("queue_depth", queue_depth, 1, 4096) or _QUEUE_DEPTH
        self._rows: RowSource = open_rows(source, tensor=tensor, shape=shape, dtype=dtype, offset_bytes=offset_bytes)
        self._arguments: dict[str, Any] = {
            "source": as_absolute(source),
            "tensor": tensor,
            "shape": shape,
            "dtype": dtype,
            "offset_bytes": offset_bytes,
            "cache_bytes": cache_bytes,
            "ahead_bytes": ahead_bytes,
            "engine": engine,
            "queue_depth": queue_depth,
        }
        self.row_count = self._rows.row_count
        self.row_shape = self._rows.row_shape
        self.row_bytes = self._rows.row_bytes
        self.dtype = self._rows.dtype
        self._path = self._rows.pieces[0].path
        if self.row_bytes > _ROW_BYTES_MAX:
            raise ConfigError(f"{self._path} has rows of {self.row_bytes} bytes; at most {_ROW_BYTES_MAX} can be read")
        positions = self._rows.position_of_row
        self._positions = None if positions is None else positions.to(torch.int64).contiguous()
        if cache_bytes == "auto":
            cache_bytes = available_bytes_per_rank() // 4
        if ahead_bytes == "auto":
            ahead_bytes = min(_AHEAD_ROWS * self.row_bytes, _AHEAD_BYTES_MAX)
        self._ahead_bytes = byte_count(ahead_bytes, "ahead_bytes", auto_allowed=True)
        self._cache_bytes = byte_count(cache_bytes, "cache_bytes", auto_allowed=True)
        self._batches = itertools.count(1)  # of the tickets
        self._is_starting = False
        self._waiting: deque[weakref.ref[RowTicket]] = deque()  # tickets that were not started, oldest first
        self._under_way: dict[int, _UnderWay] = {}  # by batch: tickets that were started and not taken, oldest first
        self._on_device: dict[torch.device, DeviceRows] = {}
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._device_row_count = 0
        self._count_lock = threading.RLock()  # guards that number
        row = torch.empty(self.row_shape, dtype=self.dtype, device="cpu")
        self._plain = _native.PlainRows(torch.Tensor, torch.UntypedStorage, row)
        self._open(self._cache_bytes)
        self._closed = False
        _open_stores.add(self)

    def _open(self, cache_bytes: int) -> _native.RowStore:
        """Open the files and the native side, and return it."""
        fds: list[int] = []
        try:
            for piece in self._rows.pieces:
                with storage_errors("opening", piece.path):
                    fds.append(os.open(piece.path, os.O_RDONLY | os.O_CLOEXEC))
            self._refuse_other_files(fds)
            ladder = _ladder(self._engine, fds)
            native = _native.RowStore(
                pieces=[
                    (fd, os.fsencode(piece.path), piece.offset_bytes, piece.row_count)
                    for fd, piece in zip(fds, self._rows.pieces, strict=True)
                ],
                row_bytes=self.row_bytes,
                positions=(0, 0) if self._positions is None else (self._positions.data_ptr(), self.row_count),
                owner=self._positions,
                engines=ladder,
                queue_depth=self._queue_depth,
                thread_count=0,
                cache_bytes=cache_bytes,
                gap_bytes=_GAP_BYTES,
                copy_thread_count=torch.get_num_threads(),
            )
        except BaseException:
            for fd in fds:
                os.close(fd)
            raise
        self._native, self._fds = native, fds
        for fd in fds:
            _native.close_in_forked_child(fd)
        announce_engine(self._path, self._engine, native.engine, native.demotions)
        return native

    def _refuse_other_files(self, fds: Sequence[int]) -> None:
        """Refuse files other than those whose headers were read: the places of their rows are not known."""
        for fd, piece in zip(fds, self._rows.pieces, strict=True):
            if facts_of(fd, piece.path) != piece.facts:
                raise StorageError(
                    None,
                    f"{piece.path} was replaced or changed since its header was read, and this process (a forked one, "
                    "perhaps) has only opened it now; open the table again",
                    piece.path,
                )

    # --- rows

    @untraced
    def gather(
        self, ids: Any, *, out: torch.Tensor | None = None, device: torch.device | str | None = None
    ) -> torch.Tensor:
        """Return the rows with these ids, in their order; an id may come more than once.

        Args:
            ids: Whole numbers of any dtype and shape, as a tensor, an array, a list, or one number.
            out: A contiguous tensor of the result's shape and dtype on the CPU, to be filled and returned.
            device: Where the result is to be; by default on the CPU. A copy to a CUDA device comes into the caller's
                current stream.

        Returns:
            A tensor of shape `ids.shape + row_shape`, as of `torch.nn.Embedding`.

        Raises:
            RowIndexError: An id is no row. Nothing was read.
            ConfigError: Ids that are no whole numbers; an `out` that does not fit; the store is closed; the call is
                traced by torch.jit.
            StorageError: A row could not be read (with path, row, offset and errno), or a file has changed since it
                was opened. Other requests go on, and so may this store.
        """
        native = self._opened()
        if device is None and type(ids) is torch.Tensor and ids.dtype is torch.int64 and not is_traced():
            rows = self._new_rows(ids.shape, None) if out is None else out
            is_brought = True  # an error may come after a part
            try:
                is_brought = native.bring_plain(self._plain, ids, rows)  # the usual case, without most checks below
            finally:
                if is_brought and out is not None:
                    count_change(out)
            if is_brought:
                return rows
        flat, shape = self._checked(native, ids)
        wanted = checked_device(device)
        if out is not None:
            check_out(out, (*shape, *self.row_shape), self.dtype)
            if flat.data_ptr() < out.data_ptr() + out.nbytes and out.data_ptr() < flat.data_ptr() + flat.nbytes:
                flat = flat.clone()  # rows must not overwrite ids
            count_change(out)
            self._bring(native, flat, out, 0)
            return out if wanted is None else out.to(wanted)
        flat, split = self._split(flat, wanted)
        asked = self._ask(native, flat, wanted, 0)
        asked.request.wait()
        asked.request.raise_failure()
        return self._shaped(asked.rows, shape, wanted, asked.cached, split)

    @untraced
    def gather_unique(self, ids: Any, *, device: torch.device | str | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return each row once, and the index of each id's row: `unique[inverse]` is `gather(ids)`.

        Args:
            ids: The ids, as in `gather`.
            device: Where both results are to be.

        Returns:
            Rows in the order of their ids, [count, *row_shape]; and int64 indices into them, in the shape of `ids`.

        Raises:
            RowIndexError: As `gather`; so are ConfigError and StorageError.
        """
        flat, shape = self._checked(self._opened(), ids)
        unique, inverse = torch.unique(flat, return_inverse=True)
        inverse = inverse.view(shape)
        return self.gather(unique, device=device), inverse if device is None else inverse.to(device)

    @untraced
    def prefetch(self, ids: Any, *, device: torch.device | str | None = None) -> RowTicket:
        """Ask for rows that will be wanted later; they are read while the caller goes on.

        The cache keeps rows that requests made ahead will use. Requests are started in the order in which they were
        made, as `ahead_bytes` allows.

        Args:
            ids: The ids, as in `gather`.
            device: Where the rows are to be when they are taken.

        Raises:
            RowIndexError: An id is no row.
            ConfigError: Ids that are no whole numbers; the store is closed.
        """
        native = self._opened()
        flat, shape = self._checked(native, ids)
        wanted = checked_device(device)
        flat, split = self._split(flat, wanted)
        if split is None:
            flat = flat.clone()  # the caller may change them
        with self._lock:
            ticket = RowTicket(self, flat, shape, next(self._batches), wanted, split)
            native.register(flat.data_ptr(), flat.numel(), ticket._batch)
            self._waiting.append(weakref.ref(ticket))
        self._start_waiting()
        return ticket

    def ahead(
        self,
        loader: Iterable[Batch],
        *,
        ids: Callable[[Batch], Any],
        window: int = 8,
        device: torch.device | str | None = None,
    ) -> Iterator[tuple[Batch, torch.Tensor]]:
        """Iterate over batches with the rows of each, which are read while earlier ones are worked on.

        Batches are drawn from the loader `window` ahead of the one that is returned: the store then knows which rows
        are used again soon, and reads as far ahead as `ahead_bytes` allows.

        Args:
            loader: Batches, such as a DataLoader's whose workers sample.
            ids: Returns the ids of the rows that a batch needs.
            window: How many batches to know ahead, 1 or more. More than 32 count as 32.
            device: Where the rows are to be.

        Raises:
            ConfigError: A window that is no whole number above 0.
            Others: As the loader, `prefetch` and `RowTicket.result`, behind the batches before the one that fails.
        """
        return ahead(loader, lambda batch: self.prefetch(ids(batch), device=device), window)

    def keep(self, ids: Any, *, device: torch.device | str | None = None) -> None:
        """Read rows into the cache, or the memory of a device, where they stay until the store is closed.

        Requests with this `device` then copy such rows from its own memory; the others come by the cache and the disk.
        That takes the rows' bytes on the device, and 4 bytes on the CPU for each row of the table.

        Args:
            ids: The ids, as in `gather`.
            device: A CUDA device, whose rows of an earlier call are given up. None: the cache, which keeps those, too.

        Raises:
            ConfigError: The cache has no room for all of them, or requests for a device are reading its other rows; it
                keeps as many as it can.
            RowIndexError: As `gather`; so is StorageError.
            torch.OutOfMemoryError: The device has no room. It keeps none.
        """
        native = self._opened()
        flat, _ = self._checked(native, ids)
        wanted = checked_device(device)
        at_once = max(1, _KEPT_AT_ONCE_BYTES // self.row_bytes)
        if wanted is not None and wanted.type != "cpu":
            self._keep_on_device(native, flat.unique(), wanted, at_once)
            return
        native.keep(flat.data_ptr(), flat.numel())
        for some in flat.split(at_once):
            self._bring(native, some, self._new_rows(some.shape, None), _native.KEEP_BATCH)
        if left_count := native.keep(flat.data_ptr(), flat.numel()):
            slot_count, kept_count = native.stats()["slot_count"], native.count_kept()
            remedy = (
                "raise cache_bytes"
                if kept_count == slot_count
                else f"of these, {slot_count - kept_count} are not kept, but read by requests for a device now: call "
                "keep() again when these are done"
            )
            raise ConfigError(
                f"{left_count} of {flat.numel()} rows of {self._path} have no room in the cache, which holds "
                f"{slot_count}; {remedy}"
            )

    def _keep_on_device(self, native: _native.RowStore, ids: torch.Tensor, device: torch.device, at_once: int) -> None:
        if device.type != "cuda":
            raise ConfigError(f"rows are kept in the cache or on a CUDA device, not on {device}")
        self._on_device.pop(device, None)
        if not ids.numel():
            return
        rows = torch.empty((ids.numel(), *self.row_shape), dtype=self.dtype, device=device)

        def read(some: torch.Tensor) -> torch.Tensor:
            found = self._new_rows(some.shape, device)
            self._bring(native, some, found, 0)
            return found

        self._on_device[device] = kept_on_device(ids, self.row_count, rows, read, at_once)

    def stats(self) -> RowStats:
        """Return what the store has done so far."""
        native = self._opened()
        found = native.stats()
        return RowStats(
            row_count=found["row_count"] + self._device_row_count,
            device_row_count=self._device_row_count,
            hit_count=found["hit_count"],
            shared_count=found["shared_count"],
            read_count=found["read_count"],
            read_bytes=found["read_bytes"],
            cached_row_count=found["cached_count"],
            cache_row_limit=found["slot_count"],
            row_bytes=self.row_bytes,
            engine=native.engine,
        )

    # --- the store itself

    def close(self) -> None:
        """Give memory and files back; requests under way fail. Does nothing when called again."""
        with self._lock:
            self._closed = True
            self._on_device = {}
            native, self._native = self._native, None
            fds, self._fds = self._fds, []
        try:
            if native is not None:
                native.close()
        finally:  # a signal's handler may raise an error there
            for fd in fds:
                _native.forget_descriptor(fd)
                os.close(fd)

    def __enter__(self) -> RowStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if not getattr(self, "_closed", True):
            self.close()

    def __len__(self) -> int:
        return self.row_count

    def __repr__(self) -> str:
        shape = (self.row_count, *self.row_shape)
        return f"<RowStore {self._path!r} {shape} {self.dtype}{' closed' if self._closed else ''}>"

    def __reduce__(self) -> tuple[object, ...]:
        cache = {"cache_bytes": 0} if get_spawning_popen() else {}  # none in a process that is started with it
        return functools.partial(RowStore, **(self._arguments | cache)), ()

    def _opened(self) -> _native.RowStore:
        """Return the native side; in a forked child, open the files anew first."""
        native = self._native  # without the lock, which is held while a request made ahead copies cached rows
        if native is not None and not self._closed:
            return native
        with self._lock:
            return self._opened_alone()

    def _opened_alone(self) -> _native.RowStore:
        """Do the same while the lock is held."""
        if self._closed:
            raise ConfigError(f"{self._path} is closed")
        return self._open(0) if self._native is None else self._native

    def _forget_parent(self) -> None:
        self._lock = threading.RLock()  # the parent's may be held, and no thread here would release it
        self._count_lock = threading.RLock()
        self._is_starting = False
        self._native = None
        self._fds = []  # closed already
        self._under_way = {}
        self._waiting = deque()  # the parent takes those

    # --- requests

    def _checked(self, native: _native.RowStore, ids: Any) -> tuple[torch.Tensor, torch.Size]:
        return checked_ids(ids, native.first_bad_id, self.row_count, self._path)

    def _new_rows(self, shape: Sequence[int], device: torch.device | None) -> torch.Tensor:
        """Return memory for the rows of ids of this shape; pinned for a CUDA device, which then copies beside us."""
        if torch.is_inference_mode_enabled():  # another caller may take them
            with torch.inference_mode(False):
                return self._new_rows(shape, device)
        count = math.prod(shape)
        pinned = count > 0 and device is not None and device.type == "cuda"
        rows = torch.empty((*shape, *self.row_shape), dtype=self.dtype, device="cpu", pin_memory=pinned)
        if count > 0 and not address_of(rows):
            raise ConfigError("tensors have no memory here; leave the FakeTensorMode or torch.func.functionalize first")
        return rows

    def _split(self, ids: torch.Tensor, device: torch.device | None) -> tuple[torch.Tensor, Split | None]:
        """Return the ids of the rows that are not on the device, and how their rows join those that are."""
        kept = None if device is None else self._on_device.get(device)
        if kept is None:
            return ids, None
        split = kept.split(ids)
        with self._count_lock:
            self._device_row_count += ids.numel() - split.other_ids.numel()
        return split.other_ids, split

    def _shaped(
        self,
        rows: torch.Tensor,
        shape: torch.Size,
        device: torch.device | None,
        cached: CachedRows | None,
        split: Split | None,
    ) -> torch.Tensor:
        if cached is not None:
            rows = cached.joined(rows)
        if split is not None:
            rows = split.joined(rows)
        wanted = (*shape, *self.row_shape)
        rows = rows if rows.shape == wanted else rows.view(wanted)
        return rows if device is None else rows.to(device, non_blocking=True)

    def _bring(self, native: _native.RowStore, ids: torch.Tensor, rows: torch.Tensor, batch: int) -> None:
        """Read rows and wait for them."""
        native.bring(ids.data_ptr(), ids.numel(), rows.data_ptr(), batch, rows)

    def _ask(self, native: _native.RowStore, ids: torch.Tensor, device: torch.device | None, batch: int) -> _Asked:
        """Begin to bring rows that are not kept on the device."""
        cached = None
        if device is not None and device.type == "cuda":
            with contextlib.suppress(torch.OutOfMemoryError):  # then the host gathers all
                cached = cached_rows(native, ids, batch, self.row_shape, self.dtype, self._stream_of(device))
        if cached is not None:
            ids = cached.other_ids
        rows = self._new_rows(ids.shape, device)
        return _Asked(cached, rows, native.start(ids.data_ptr(), ids.numel(), rows.data_ptr(), batch, rows))

    def _stream_of(self, device: torch.device) -> torch.cuda.Stream:
        """Return our stream of a device."""
        return self._streams.get(device) or self._streams.setdefault(device, torch.cuda.Stream(device))

    def _start_waiting(self) -> None:
        """Start requests that were made ahead, as far as there is memory for their rows."""
        with self._lock:
            if self._is_starting:  # in a call that this thread has interrupted, and that goes on later
                return
            self._is_starting = True
            try:
                while self._waiting and not self._closed and self._start_first():
                    self._waiting.popleft()
            finally:
                self._is_starting = False

    def _start_first(self) -> bool:
        """Start the first request that waits, unless it is over; return False if there is no memory for its rows."""
        ticket = self._waiting[0]()
        if ticket is None or ticket._request is not None or ticket._error is not None:
            return True
        # A list first: whoever drops a ticket, in any thread, takes it out of the dict meanwhile.
        under_way_bytes = sum(one.size_bytes for one in list(self._under_way.values()))
        ahead_bytes = under_way_bytes + self._bytes_of(ticket)
        if len(self._under_way) >= _UNDER_WAY_COUNT_MIN and ahead_bytes > self._ahead_bytes:
            return False
        self._start_ticket(ticket)
        return True

    def _is_done(self, ticket: RowTicket) -> bool:
        if ticket._request is None:
            self._start_waiting()  # requests before it may have been dropped meanwhile
        with self._lock:
            if ticket._error is None and self._is_lost(ticket):
                self._start_ticket(ticket)
            return ticket._error is not None or (ticket._request is not None and ticket._request.done())

    def _is_lost(self, ticket: RowTicket) -> bool:
        """Tell whether nothing processes requests: the store is closed, or this is a forked child."""
        if ticket._request is not None:
            return ticket._native is not self._native and not ticket._request.done()
        return self._closed or all(waiting() is not ticket for waiting in self._waiting)

    def _bytes_of(self, ticket: RowTicket) -> int:
        return ticket._ids.numel() * self.row_bytes

    def _start_ticket(self, ticket: RowTicket) -> None:
        """Start a request that was made ahead; the lock is held."""
        try:
            ticket._native = self._opened_alone()
            asked = self._ask(ticket._native, ticket._ids, ticket._device, ticket._batch)
            ticket._cached, ticket._rows, ticket._request = asked
            self._under_way[ticket._batch] = _UnderWay(self._bytes_of(ticket), weakref.ref(ticket))
            if ticket._error is not None:  # dropped meanwhile, by another thread
                self._drop(ticket)
        except (FastPersistError, RuntimeError) as error:  # without memory, torch raises a RuntimeError
            ticket._error = error

    def _take(self, ticket: RowTicket, timeout: float | None) -> torch.Tensor:
        with self._lock:
            if ticket._error is None and (ticket._request is None or self._is_lost(ticket)):
                self._start_ticket(ticket)
            request, rows, cached = ticket._request, ticket._rows, ticket._cached
            if ticket._error is not None or request is None or rows is None:
                raise ticket._error or InternalError("a request for rows was neither started nor failed")
        if not request.wait(timeout):
            raise TimeoutError(f"the rows of {self._path} are not there after {timeout} s")
        self._under_way.pop(ticket._batch, None)
        self._start_waiting()
        request.raise_failure()
        with self._lock:  # rows that are on the device in part are completed once, for all who take them
            if ticket._sent is None and cached is not None:
                stream = torch.cuda.current_stream(ticket._device)
                ticket._sent = send_rows(lambda: self._result(ticket, rows, cached), stream)
            sent = ticket._sent
        taken = self._result(ticket, rows, cached) if sent is None else sent.taken()
        self._send_next()
        return taken

    def _result(self, ticket: RowTicket, rows: torch.Tensor, cached: CachedRows | None) -> torch.Tensor:
        return self._shaped(rows, ticket._shape, ticket._device, cached, ticket._split)

    def _send_next(self) -> None:
        """Send the rows of the oldest ticket that was not taken yet to its device, if they are there, in our stream.

        So the copy runs in parallel with the caller's work on the rows that were taken.
        """
        with self._lock:
            under_way = list(self._under_way.values())
            ticket = under_way[0].ticket() if under_way else None
            if ticket is None or ticket._sent is not None or ticket._request is None or not ticket._request.done():
                return
            rows, device, cached = ticket._rows, ticket._device, ticket._cached
            if rows is None or device is None or device.type != "cuda":
                return
            try:
                ticket._request.raise_failure()
            except FastPersistError:  # the error is raised when it is taken
                return
            with contextlib.suppress(RuntimeError):  # no memory there; the error is raised when the rows are taken
                ticket._sent = send_rows(lambda: self._result(ticket, rows, cached), self._stream_of(device))

    def _give_up(self, ticket: RowTicket) -> None:
        with self._lock:
            if ticket._error is None:
                ticket._error = ConfigError(f"this request for rows of {self._path} was cancelled")
            if ticket._request is not None and ticket._native is self._native:
                ticket._request.cancel(str(ticket._error))  # another thread may wait for it
            self._drop(ticket)
        self._start_waiting()

    def _drop(self, ticket: RowTicket) -> None:
        """Free what a ticket has. Needs no lock: the garbage collector may call this anywhere, with any lock held."""
        if ticket._error is None:  # first, so that a thread that starts it now sees this, or is seen below
            ticket._error = ConfigError(f"this request for rows of {self._path} was dropped")
        self._under_way.pop(ticket._batch, None)
        native = self._native
        if ticket._request is None and native is not None:
            with contextlib.suppress(FastPersistError):  # it is being closed
                native.unregister(ticket._ids.data_ptr(), ticket._ids.numel(), ticket._batch)
        ticket._rows = ticket._request = ticket._cached = ticket._sent = None  # which cancels it


class _Asked(NamedTuple):
    cached: CachedRows | None  # on the device
    rows: torch.Tensor  # memory for the others
    request: _native.RowRequest


class _UnderWay(NamedTuple):
    size_bytes: int
    ticket: weakref.ref[RowTicket]


def _ladder(engine: str, fds: Sequence[int]) -> list[str]:
    """Return the engines to try for all files of a table together, best first."""
    ladders = [engine_ladder(engine, fd, for_reading=True, uses_cached=False) for fd in fds]
    if len(ladders[0]) == 1:
        return ladders[0]
    is_cached = 2 * sum(map(_native.cached_bytes, fds)) > sum(os.fstat(fd).st_size for fd in fds)
    if is_cached or any(ladder[0].endswith("-buffered") for ladder in ladders):
        return ["uring-buffered", "threads-buffered"]
    return ladders[0]


# ------------------------------------------------------------------------------------------------------- the process

_open_stores: weakref.WeakSet[RowStore] = weakref.WeakSet()


def _close_all() -> None:
    """Wait for all reads: their memory is freed when the interpreter ends."""
    for store in list(_open_stores):
        store.close()


def _after_fork_in_child() -> None:
    for store in list(_open_stores):
        store._forget_parent()


atexit.register(_close_all)
os.register_at_fork(after_in_child=_after_fork_in_child)
