"""Rows → a table on disk, row by row, larger than memory: `RowWriter`.

1. Create the pending file, hidden beside the final name; or with resume=True adopt one that a dead writer has left, or
   write the first page of a new one. A writer that fails with resume=True cuts what it leaves to the noted rows, so
   no reserved space stays.
2. Append rows: they are collected in buffers, and a full buffer is written while the caller makes the next rows.
3. With resume=True, each time that another `PROGRESS_BYTES` are on disk: sync, then note that in the first page, sync.
4. Write the rest; sync it if a sidecar is there; write the header over the first page.
5. Remove the sidecar of a table that is replaced, and sync the directory.
6. Publish the table: sync, rename, sync the directory.                                       <- the commit point
7. Save the sidecar.

So after a crash before 6 there is the old table, perhaps without checksums; after 6 the new one, perhaps without, too;
never one with the sidecar of another. An error of the disk before 5 leaves the old table its checksums; rows that
cannot be made durable are such an error, which the sync of step 4 is for.

The sidecar of a packed table has more than checksums: without it, ids would find the wrong rows. It comes before 6, in
place of 5, and nothing may be there that is replaced. If 6 fails, it is removed. After a crash in between, it stays
without a table: the next writer replaces it, and readers refuse it beside another table.

`progress` has the note of step 3, `sidecar` what lies beside a table, and `commit` the pending file.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import math
import os
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any

import torch

from fastpersist import _native
from fastpersist.arguments import local_path, require_bools
from fastpersist.commit.file_commit import (
    PendingFile,
    errors_in_log,
    find_leftovers,
    is_being_written,
    resolve_target,
)
from fastpersist.commit.filesystem import absolute_path, filesystem, has_name, tell_free
from fastpersist.errors import (
    ChecksumError,
    ConfigError,
    FastPersistError,
    NoSpaceError,
    StorageError,
    UnsupportedError,
)
from fastpersist.formats import npy, safetensors
from fastpersist.formats.layout import align_up
from fastpersist.rows import progress
from fastpersist.rows.opening import row_layout
from fastpersist.rows.progress import Progress
from fastpersist.rows.sidecar import (
    CHUNK_BYTES,
    PACKED_KEY,
    Sidecar,
    chunk_crcs,
    has_positions,
    save_sidecar,
    sidecar_path,
)
from fastpersist.transfer.page_writer import PageWriter, page_tensor
from fastpersist.transfer.reader import Extents, read_exactly, read_extents
from fastpersist.transfer.tensor_memory import byte_view, host_tensor
from fastpersist.transfer.tensor_requests import PendingIO
from fastpersist.uncopied import Uncopied

__all__ = ["PROGRESS_BYTES", "RowWriter", "write_rows"]

_log = logging.getLogger("fastpersist")

PROGRESS_BYTES = 1 << 30
"""How many bytes of rows are made durable at a time, with resume=True."""

_HEADER_BYTES = progress.PAGE_BYTES
_BUFFER_BYTES = 8 << 20  # whole chunks, so that a buffer has CRCs of its own
_BUFFER_COUNT = 4
_RESERVED_BYTES_MIN, _RESERVED_BYTES_MAX = 64 << 20, 1 << 30
_LEFT = "beside the rows that are left for the next writer with resume=True"
_ROW_COUNT_MAX = (1 << 62) - 1


class _Stream:
    """Bytes of rows → the file behind its header, in buffers of whole pages, with the CRC of each chunk.

    Args:
        file: Writes the pages to the file.
        reserve: Extends the file to a length, in space that is reserved.
        row_bytes: The length of a row.
        crcs: The CRC-32s of the chunks that are there already; they fill whole buffers.
    """

    def __init__(self, file: PageWriter, reserve: Callable[[int], None], row_bytes: int, crcs: list[int]) -> None:
        self.crcs = crcs
        self.written_bytes = len(crcs) * CHUNK_BYTES
        self.crc32 = _combined(crcs, self.written_bytes)
        self.rows_bytes, self.rows_crc32 = 0, 0  # of the whole rows among the written bytes
        self.is_torn = False  # an interrupt came in the middle of a write
        self.is_cut = False  # a write found no room; rows behind it do not count
        self._file = file
        self._reserve = reserve
        self._row_bytes = row_bytes
        self._reserved_bytes = 0
        self._buffers = deque(page_tensor(_BUFFER_BYTES) for _ in range(_BUFFER_COUNT))
        self._in_flight: deque[tuple[PendingIO, int, int]] = deque()  # with the whole rows before, and their CRC
        self._fill_bytes = 0

    @property
    def position(self) -> int:
        """How many bytes there are, written or not."""
        return self.written_bytes + self._fill_bytes

    def append(self, data: torch.Tensor) -> None:
        """Take bytes; the caller may change them afterwards."""
        done_bytes, size_bytes = 0, data.numel()
        while done_bytes < size_bytes:
            take_bytes = min(size_bytes - done_bytes, _BUFFER_BYTES - self._fill_bytes)
            place = self._buffers[0].data_ptr() + self._fill_bytes
            # Not copy_(): torch's threads wait for each other, which during training takes several times as long.
            ctypes.memmove(place, data.data_ptr() + done_bytes, take_bytes)
            self._fill_bytes += take_bytes
            done_bytes += take_bytes
            if self._fill_bytes == _BUFFER_BYTES:
                self._write()

    def flush(self) -> None:
        """Write the rest, padded to a page, and wait for everything. Nothing can be appended afterwards."""
        if self._fill_bytes:
            self._buffers[0][self._fill_bytes : align_up(self._fill_bytes, _HEADER_BYTES)] = 0
            self._write()
        self.wait()

    def wait(self, keep_count: int = 0) -> None:
        """Wait until at most so many writes are in flight."""
        while len(self._in_flight) > keep_count:
            write, *rows_before = self._in_flight[0]
            try:
                write.wait()
            except NoSpaceError:
                self.rows_bytes, self.rows_crc32 = rows_before
                self.is_cut = True
                raise
            self._in_flight.popleft()

    def settle(self) -> None:
        """Write what there is room for, and wait for it; `rows_bytes` are there then."""
        for step in (self.flush, self.wait):
            if not self.is_cut:
                with suppress(NoSpaceError):
                    step()

    def _write(self) -> None:
        padded_bytes = align_up(self._fill_bytes, _HEADER_BYTES)
        offset_bytes = _HEADER_BYTES + self.written_bytes
        self._extend(offset_bytes + padded_bytes)
        self.is_torn = True
        write = self._file.write_async(self._buffers[0][:padded_bytes], offset_bytes)
        self._in_flight.append((write, self.rows_bytes, self.rows_crc32))
        for start_bytes in range(0, self._fill_bytes, CHUNK_BYTES):
            self._take_crc(self._buffers[0][start_bytes : min(start_bytes + CHUNK_BYTES, self._fill_bytes)])
        self._fill_bytes = 0
        self._buffers.rotate(-1)
        self.is_torn = False
        self.wait(_BUFFER_COUNT - 1)

    def _take_crc(self, chunk: torch.Tensor) -> None:
        end_bytes = self.written_bytes + chunk.numel()
        crc = 0
        rest = memoryview((ctypes.c_char * chunk.numel()).from_address(chunk.data_ptr()))
        rows_bytes = end_bytes // self._row_bytes * self._row_bytes
        if rows_bytes > self.written_bytes:  # the last row that ends in this chunk
            whole_bytes = rows_bytes - self.written_bytes
            crc = _native.crc32(rest[:whole_bytes])
            rest = rest[whole_bytes:]
            self.rows_bytes, self.rows_crc32 = rows_bytes, _native.combine_crc32(self.crc32, crc, whole_bytes)
        crc = _native.crc32(rest, crc)
        self.crcs.append(crc)
        self.crc32 = _native.combine_crc32(self.crc32, crc, chunk.numel())
        self.written_bytes = end_bytes

    def _extend(self, end_bytes: int) -> None:
        """Extend the file ahead, in steps: the file system waits for the writes in flight each time."""
        if end_bytes <= self._reserved_bytes:
            return
        step_bytes = min(max(self._reserved_bytes, _RESERVED_BYTES_MIN), _RESERVED_BYTES_MAX)
        wanted_bytes = max(end_bytes, self._reserved_bytes + step_bytes)
        try:
            self._reserve(wanted_bytes)
        except StorageError as error:
            if not isinstance(error, NoSpaceError) and error.errno != errno.EFBIG:
                raise
            wanted_bytes = end_bytes  # the disk is nearly full, or files may not be longer; the table may still fit
            self._reserve(wanted_bytes)
        self._reserved_bytes = wanted_bytes


def _combined(crcs: Sequence[int], size_bytes: int) -> int:
    """Return the CRC-32 of bytes from those of their chunks."""
    combined = 0
    for number, crc in enumerate(crcs):
        combined = _native.combine_crc32(combined, crc, min(CHUNK_BYTES, size_bytes - number * CHUNK_BYTES))
    return combined


class RowWriter(Uncopied):
    """Writes a table of rows that need not fit into memory. A context manager; one thread uses it.

    The table is there when the `with` block ends: whole and durable, with CRCs in a sidecar beside it. Until then, and
    after an error, there is what was there before; an error or a kill in the last step may take the checksums of the
    table that was to be replaced. Memory: 32 MiB.

    With resume=True an error, Ctrl-C or a kill leaves the rows that are durable, and the next `RowWriter` of the same
    table, also with resume=True, goes on behind them. `row_count` says in the `with` block how many rows it has. It
    reads them all once, to be sure that they are whole. Every GiB is made durable as soon as it is there, so a kill
    loses little more than a GiB. The exception is the publication of the complete table (sync and rename): after an
    error, Ctrl-C or a kill in it, writing may begin anew.

    Args:
        path: The table's path: .npy, or .safetensors for dtypes that numpy lacks. The rows begin on a page of the file.
        row_shape: Dimensions of a row; () for a table of one dimension.
        dtype: The dtype of the elements.
        resume: Go on with an unfinished table, and leave one if this writer fails.
        overwrite: Replace a table that is there.
        tensor: The name of the tensor in a safetensors file.
        engine: "auto", or an engine's name, as in `save`.

    Raises:
        ConfigError: Arguments that make no sense; the table exists already, or another writer is writing it; what is
            unfinished is of other rows.

    Thread safety: one thread at a time.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        row_shape: Sequence[int],
        dtype: torch.dtype,
        *,
        resume: bool = False,
        overwrite: bool = False,
        tensor: str = "rows",
        engine: str = "auto",
    ) -> None:
        require_bools(resume=resume, overwrite=overwrite)
        self.path = absolute_path(local_path(path))
        self.row_shape, self._row_bytes = row_layout(row_shape, dtype)
        self.dtype = dtype
        self._resume = resume
        self._overwrite = overwrite
        self._tensor = tensor
        self._engine = engine
        self._suffix = os.path.splitext(self.path)[1].lower()
        self._positions: torch.Tensor | None = None
        self._pending: PendingFile | None = None
        self._file: PageWriter | None = None
        self._stream: _Stream | None = None
        self._records: list[Progress | None] = [None, None]
        self._failed = False  # an append has failed, perhaps in the middle of a row
        if self._suffix not in (".npy", ".safetensors"):
            raise ConfigError(f"{self.path}: a table is written as .npy or .safetensors; give it one of these suffixes")
        self._header(_ROW_COUNT_MAX // self._row_bytes)
        self._spec = f"{self._suffix} {dtype} {self.row_shape}" + (
            f" {tensor!r}" if self._suffix == ".safetensors" else ""
        )
        progress.encode_page([Progress(self._spec, 1 << 62, 0), None])

    @property
    def row_count(self) -> int:
        """How many rows there are so far. After a resume: those that need not be appended again."""
        return 0 if self._stream is None else self._stream.position // self._row_bytes

    def append(self, rows: Any) -> None:
        """Write rows behind those before. They may be changed when this returns.

        After an error of the disk, or an interrupt, nothing can be appended, and nothing is published.

        Args:
            rows: A tensor on the CPU, or an array of numpy, of shape [n, *row_shape] and the table's dtype.

        Raises:
            ConfigError: Rows of another shape, dtype, layout or device, or the `with` block is not entered; or an
                earlier call has failed.
            NoSpaceError: The file system is full.
            StorageError: The kernel reports an error, perhaps of rows before.
        """
        stream = self._entered()
        self._refuse_failed()
        parts = self._checked(rows).split(PROGRESS_BYTES)
        try:
            for part in parts:
                stream.append(part)
                newest = progress.newest_of(self._records)
                if self._resume and stream.written_bytes - (newest.done_bytes if newest else 0) >= PROGRESS_BYTES:
                    stream.wait()
                    self._note_progress()
        except BaseException:
            self._failed = True
            raise

    def _refuse_failed(self) -> None:
        if self._failed:
            raise ConfigError(
                f"{self.path}: rows could not be appended before, so the table is not whole; leave the `with` block by "
                "the error, and write again (with resume=True, behind the rows that are there)"
            )

    def keep_positions(self, position_of_row: torch.Tensor) -> None:
        """Say where in this table the row of each id lies: readers then take ids, and not positions.

        A packed table cannot replace another one, since table and sidecar would have to be replaced in one step. A
        writer that resumes must be given the positions again.

        Args:
            position_of_row: int32 or int64 on the CPU, [row count], each position once.

        Raises:
            ConfigError: It is no such tensor. If a position is missing, leaving the `with` block raises it.
        """
        if (
            not isinstance(position_of_row, torch.Tensor)
            or position_of_row.dtype not in (torch.int32, torch.int64)
            or position_of_row.dim() != 1
            or not position_of_row.is_cpu
        ):
            raise ConfigError(f"positions of {self.path} are int32 or int64 in a tensor of one dimension on the CPU")
        self._positions = position_of_row
        self._refuse_existing()

    def _checked(self, rows: Any) -> torch.Tensor:
        """Return the bytes of rows, as they are to be in the file."""
        tensor = _dense(rows)
        if tensor.dtype != self.dtype or tensor.dim() == 0 or tuple(tensor.shape[1:]) != self.row_shape:
            raise ConfigError(
                f"rows of {self.path} are {self.dtype} of shape [n, {', '.join(map(str, self.row_shape))}], "
                f"not {tensor.dtype} of shape {list(tensor.shape)}"
            )
        if not tensor.is_cpu:
            raise ConfigError(f"rows of {self.path} are on {tensor.device}; pass rows.cpu()")
        return byte_view(tensor.detach().contiguous())

    # --- the life of a writer

    def __enter__(self) -> RowWriter:
        if self._pending is not None:
            raise ConfigError(f"{self.path}: this RowWriter was used already; make another")
        self._process_id = os.getpid()
        self._target = resolve_target(self.path)
        if self._target.why_not_replaceable is not None:
            raise ConfigError(f"{self.path} cannot be replaced by a table: {self._target.why_not_replaceable}")
        self._refuse_existing()
        record = self._adopt() if self._resume else None
        self._pending = self._pending or PendingFile.create(self._target)
        try:
            self._refuse_other_writers(self._pending.path)
            self._open(record)
        except BaseException:
            self._end(keep=record is not None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            try:
                self._finish()
            except BaseException as failure:
                self._give_up(failure)
                raise
            self._end(keep=False)
            return
        self._give_up(error)

    def _give_up(self, error: BaseException) -> None:
        """Remove the unfinished file, or leave it for the next writer; and say in the error what is free then."""
        if self._resume:
            self._note_last_progress()
        is_left = self._resume and self._opened_pending().fd >= 0  # a failed publication removes it
        self._end(keep=self._resume)
        tell_free(error, state=_LEFT) if is_left else tell_free(error)

    def _entered(self) -> _Stream:
        if self._stream is None:
            raise ConfigError(f"{self.path}: a RowWriter writes inside of its `with` block only")
        if os.getpid() != self._process_id:
            raise ConfigError(f"{self.path}: this RowWriter belongs to the process that forked this one")
        return self._stream

    def _open(self, record: Progress | None) -> None:
        """Open the pending file for writes, behind the rows that a dead writer has left."""
        pending = self._opened_pending()
        record = record or Progress(self._spec, 0, 0)
        crcs = self._proven_crcs(pending, record)
        start_bytes = record.done_bytes // _BUFFER_BYTES * _BUFFER_BYTES
        head = torch.empty(record.done_bytes - start_bytes, dtype=torch.uint8, device="cpu")
        if head.numel():
            extents = Extents()
            extents.add_storage(_HEADER_BYTES + start_bytes, head.untyped_storage(), with_crc=False)
            read_extents(pending.fd, pending.path, extents, engine=self._engine)
        self._file = PageWriter(pending.fd, pending.path, engine=self._engine)
        if self._resume and not record.done_bytes:
            self._write_page(progress.encode_page(self._records))  # a note then finds its place on a full disk, too
        stream = _Stream(self._file, pending.allocate, self._row_bytes, crcs[: start_bytes // CHUNK_BYTES])
        stream.rows_bytes, stream.rows_crc32 = record.done_bytes, record.crc32
        stream.append(head)
        self._stream = stream

    def _proven_crcs(self, pending: PendingFile, record: Progress) -> list[int]:
        """Read the rows that a dead writer has left; return the CRCs of their chunks.

        Raises:
            ChecksumError: The rows are not what that writer wrote.
        """
        end_bytes = _HEADER_BYTES + record.done_bytes
        crcs = list(chunk_crcs(pending.fd, pending.path, _HEADER_BYTES, end_bytes, engine=self._engine))
        if _combined(crcs, record.done_bytes) != record.crc32:
            raise ChecksumError(
                f"the rows of this unfinished table are damaged; remove it, and write {self.path} anew",
                path=pending.path,
            )
        return crcs

    def _opened_pending(self) -> PendingFile:
        if self._pending is None:
            raise ConfigError(f"{self.path}: the `with` block is not entered")
        return self._pending

    def _refuse_existing(self) -> None:
        if not has_name(self.path):
            return
        if not self._overwrite:
            raise ConfigError(f"{self.path} exists already; remove it, or write with overwrite=True")
        if self._positions is not None or has_positions(self.path):
            raise ConfigError(
                f"{self.path} exists, and a packed table cannot be replaced, nor replace one, in one step; remove the "
                "old table first"
            )

    def _refuse_other_writers(self, own_path: str) -> None:
        """Refuse two writers of a table: its sidecar could become that of the other. Our own file is locked already."""
        for path in find_leftovers(self._target):
            if path != own_path and is_being_written(path):
                raise ConfigError(
                    f"{self.path} is being written already ({path}); wait for that, or choose another name"
                )

    def _adopt(self) -> Progress | None:
        """Take over the unfinished file with the most rows; return its record. Others of dead writers are removed."""
        best: Progress | None = None
        records: list[Progress | None] = [None, None]
        for path in find_leftovers(self._target):
            pending: PendingFile | None = None
            try:
                pending = PendingFile.adopt(self._target, path)
                if pending is None:
                    continue
                found = _records_of(pending)
                record = progress.newest_of(found)
                if record is not None and record.spec != self._spec:
                    raise ConfigError(
                        f"{path} is an unfinished table of {record.spec}, not of {self._spec}; remove it, or write "
                        "with resume=False, which does that"
                    )
            except BaseException:  # what was taken over is left for the next writer, in this process too
                if pending is not None:
                    pending.leave()
                self._end(keep=True)
                raise
            if record is None or (best is not None and best.done_bytes >= record.done_bytes):
                pending.abort()
            else:
                self._end(keep=False)
                self._pending, best, records = pending, record, found
        self._records = records
        return best

    # --- what is written beside rows

    def _note_progress(self) -> None:
        """Do step 3 for all bytes that are written; nothing is in flight."""
        stream, pending = self._entered(), self._opened_pending()
        filesystem().sync(pending.fd, pending.path)
        done = [-1 if record is None else record.done_bytes for record in self._records]
        self._records[done.index(min(done))] = Progress(self._spec, stream.rows_bytes, stream.rows_crc32)
        self._write_page(progress.encode_page(self._records))
        filesystem().sync(pending.fd, pending.path)
        if min(done) == max(done) == -1:
            filesystem().sync_directory(self._target.directory)

    def _note_last_progress(self) -> None:
        """Make durable what there is, while an error is on its way; the page of records may hold the header by now."""
        stream = self._stream
        if stream is None or self._file is None or stream.is_torn or os.getpid() != self._process_id:
            return
        try:
            stream.settle()
            self._note_progress()
        except FastPersistError as error:
            _log.warning("%s: the last rows before the error will be missing: %s", self.path, error)

    def _write_page(self, page: bytes) -> None:
        if self._file is not None:
            aligned = page_tensor(_HEADER_BYTES)
            aligned.copy_(torch.frombuffer(bytearray(page), dtype=torch.uint8))
            self._file.write_async(aligned, 0).wait()

    def _header(self, row_count: int) -> bytes:
        """Return the header of the finished file."""
        dtype, shape = str(self.dtype).removeprefix("torch."), (row_count, *self.row_shape)
        if self._suffix == ".npy":
            return npy.encode_header(dtype, shape)
        if dtype not in safetensors.DTYPE_NAMES:
            raise ConfigError(f"safetensors has no dtype {dtype}; write complex128 and the like as .npy")
        metadata = {} if self._positions is None else {PACKED_KEY: "true"}
        tensors = [(self._tensor, safetensors.DTYPE_NAMES[dtype], shape)]
        plan = safetensors.place_tensors(tensors, metadata, checksum=True)
        header = safetensors.encode_header(plan, [0 if self._stream is None else self._stream.crc32])
        if len(header) != _HEADER_BYTES:
            raise ConfigError(f"the name of the tensor is too long for a header of {_HEADER_BYTES} bytes")
        return header

    def _finish(self) -> None:
        """Do steps 4 to 7."""
        stream, pending = self._entered(), self._opened_pending()
        self._refuse_failed()
        try:
            stream.flush()
        except BaseException:
            self._failed = True
            raise
        row_count = self.row_count
        if self._positions is not None:
            _require_permutation(self._positions, row_count, self.path)
        header = self._header(row_count)
        self._refuse_existing()  # it may have appeared meanwhile
        path = self._target.path
        has_old_sidecar = self._positions is None and has_name(sidecar_path(path))
        if has_old_sidecar:
            filesystem().sync(pending.fd, pending.path)  # the sync of step 6 then finds only the header
        self._write_page(header)
        size_bytes = _HEADER_BYTES + stream.position
        facts = Sidecar(sidecar_path(path), size_bytes, _HEADER_BYTES, row_count, _native.crc32(header), stream.crcs)
        try:
            if self._positions is not None:
                save_sidecar(path, facts, self._positions, engine=self._engine)
            elif has_old_sidecar:
                filesystem().unlink(facts.path)
                filesystem().sync_directory(self._target.directory)
            self._close_file()
            pending.publish(size_bytes, durable=True)
        except BaseException:
            if self._positions is not None:
                self._remove_lone_sidecar(facts.path)
            raise
        if self._positions is None:
            try:
                save_sidecar(path, facts, None, engine=self._engine)
            except StorageError as error:
                message = f"{self.path} is published and durable, but without checksums: {error}"
                raise type(error)(error.errno, message, self.path) from error

    def _remove_lone_sidecar(self, path: str) -> None:
        """Remove the sidecar of a packed table that was not published; beside one that was, it stays."""
        with errors_in_log():
            if not has_name(self._target.path) and has_name(path):
                filesystem().unlink(path)

    def _close_file(self) -> None:
        file, self._file = self._file, None
        if file is not None and os.getpid() == self._process_id:
            file.close()

    def _end(self, *, keep: bool) -> None:
        """Give everything back; a pending file that is not published goes, or stays for the next writer."""
        stream, self._stream = self._stream, None
        self._close_file()
        if self._pending is not None:
            if keep and stream is not None:
                self._free_reserved(self._pending)
            self._pending.leave() if keep else self._pending.abort()

    def _free_reserved(self, pending: PendingFile) -> None:
        """Cut an unfinished file to the rows that its records count: others are not gone on with."""
        if pending.fd < 0 or os.getpid() != self._process_id:
            return
        newest = progress.newest_of(self._records)
        with errors_in_log():
            filesystem().truncate(pending.fd, _HEADER_BYTES + (newest.done_bytes if newest else 0), pending.path)


def _require_permutation(positions: torch.Tensor, row_count: int, path: str) -> None:
    if positions.shape != (row_count,):
        raise ConfigError(f"{path} has {row_count} rows, and positions of {list(positions.shape)}")
    found = torch.zeros(row_count, dtype=torch.bool, device="cpu")
    if row_count and 0 <= int(positions.min()) and int(positions.max()) < row_count:
        found[positions.long()] = True
    if not bool(found.all()):
        raise ConfigError(f"positions of {path} must be 0 to {row_count - 1}, each once")


def _records_of(pending: PendingFile) -> list[Progress | None]:
    """Read the records of an unfinished file, those whose rows are there."""
    size_bytes = filesystem().status(pending.fd, pending.path).st_size
    page = read_exactly(pending.fd, 0, min(_HEADER_BYTES, size_bytes), pending.path)
    there_bytes = size_bytes - _HEADER_BYTES
    return [record if record and record.done_bytes <= there_bytes else None for record in progress.records_of(page)]


def _dense(rows: Any) -> torch.Tensor:
    """Return rows as a tensor, whose elements lie in memory as its shape says."""
    if not isinstance(rows, torch.Tensor):
        return _tensor_of_array(rows)
    if rows.is_nested or rows.layout != torch.strided:
        kind = "a nested one" if rows.is_nested else f"one of {rows.layout}"
        raise ConfigError(f"rows are in a dense tensor, not in {kind}; make them dense first")
    return rows


def _tensor_of_array(array: Any) -> torch.Tensor:
    """View an array of numpy as a tensor, which the caller keeps; of a read-only one torch would warn."""
    interface = getattr(array, "__array_interface__", None)
    if not isinstance(interface, dict):
        raise ConfigError(f"rows are a tensor or an array of numpy, not {type(array).__name__}")
    try:
        dtype, item_bytes = npy.dtype_of(interface["typestr"])
    except (ValueError, UnsupportedError) as error:
        raise ConfigError(f"these rows cannot be written: {error}") from None
    if not dtype:
        raise ConfigError(f"the elements have {item_bytes} bytes and no type that numpy knows; pass a tensor")
    if interface.get("strides") is not None:  # they do not lie in order
        return torch.from_numpy(array.copy())
    place, shape = interface.get("data"), interface["shape"]
    if not isinstance(place, tuple):
        raise ConfigError(f"the bytes of a {type(array).__name__} have no address; pass numpy.asarray of it")
    address = place[0]
    size_bytes = math.prod(shape) * item_bytes
    if not size_bytes:
        return torch.empty(shape, dtype=getattr(torch, dtype), device="cpu")
    return host_tensor(address, size_bytes).view(getattr(torch, dtype)).view(shape)


def write_rows(
    path: str | os.PathLike[str],
    rows: Any,
    *,
    overwrite: bool = False,
    tensor: str = "rows",
    engine: str = "auto",
) -> None:
    """Write a table of rows that are in memory; see `RowWriter`.

    Args:
        path: The path of the table, .npy or .safetensors.
        rows: A tensor on the CPU, or an array of numpy, of at least one dimension.
        overwrite: Replace a table that is there.
        tensor: The name of the tensor in a safetensors file.
        engine: "auto", or an engine's name, as in `save`.

    Raises:
        ConfigError: Arguments that make no sense, or the table exists.
        StorageError: The kernel reports an error; nothing was published, unless the message says so.

    Thread safety: any thread.
    """
    held = _dense(rows)
    if held.dim() == 0:
        raise ConfigError("a scalar has no rows")
    with RowWriter(path, held.shape[1:], held.dtype, overwrite=overwrite, tensor=tensor, engine=engine) as writer:
        writer.append(held)
