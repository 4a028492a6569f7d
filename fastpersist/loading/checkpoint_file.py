"""An open checkpoint file: its format and the places of its records, validated before use.

The file is opened twice: for small reads, and for transfers, which set and clear O_DIRECT. Both descriptors have the
same inode, so replacing the file meanwhile does no harm. This module moves no data and makes no tensors.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import io
import os
import stat
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import BinaryIO

from fastpersist.cached import cached_property
from fastpersist.commit.filesystem import absolute_path, open_regular, storage_errors
from fastpersist.commit.locks import HeldDirectory
from fastpersist.errors import CheckpointNotFoundError, FastPersistError, FormatError, StorageError, UnsupportedError
from fastpersist.formats import safetensors as safetensors_format
from fastpersist.formats import torch_zip
from fastpersist.formats.foreign import LOOK_BYTES, is_older_torch_file, looks_like
from fastpersist.formats.layout import LOCAL_HEADER_BYTES
from fastpersist.formats.manifest import DCP_METADATA_NAME, MANIFEST_NAME, STATE_NAME, step_of
from fastpersist.formats.pickle_scan import (
    PickleScan,
    StorageReference,
    builds_without_bytes,
    iter_tensors,
    scan_pickle,
    storage_references,
)
from fastpersist.formats.split_manifest import PARTS_NAME
from fastpersist.transfer.garbage import no_garbage_collection
from fastpersist.transfer.reader import read_exactly

__all__ = ["CheckpointSource", "open_file"]

_SNIFF_BYTES = 9
_PICKLE_LIMIT_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class PickleSummary:
    """What loading needs to know of a pickle.

    Attributes:
        references: The storages that unpickling asks for, in order; one entry for each time it asks.
        globals: What unpickling would import, as "module.name".
        has_negative_int: A number in the pickle is negative, perhaps a stride.
        needs_no_bytes: Unpickling surely looks at no byte of a storage.
        is_as_torch_writes: It has protocol 2, opcodes that torch's unpickler knows, and a memo with no more entries
            than the pickle has bytes.
        sha256: The SHA-256 of the pickle.
    """

    references: list[StorageReference]
    globals: tuple[str, ...]
    has_negative_int: bool
    needs_no_bytes: bool
    is_as_torch_writes: bool
    sha256: bytes


class CheckpointSource:
    """A checkpoint file, open for reading. A context manager; one thread at a time uses it.

    Args:
        path: A file of torch.save, of safetensors, or of ours.
        fd: A descriptor of this file that is open already; this object closes it.

    Attributes:
        kind: "torch_zip", "safetensors", or "other" (legacy pickles, anything unknown); the first bytes tell.
        size_bytes: Length of the file.
        fd: The descriptor for transfers.
        whole_path: A name of this very file, to open it once more.
        local_headers: Fixed parts of local headers that were read already, by their offsets.

    Raises:
        CheckpointNotFoundError: There is no such file.
        StorageError: The file cannot be read, or is no regular file.
    """

    def __init__(self, path: str, fd: int | None = None) -> None:
        self.path = path
        self.fd = _open(path, path) if fd is None else fd
        self.local_headers: dict[int, bytes] = {}
        try:
            with storage_errors("looking at", path):
                self.size_bytes = os.fstat(self.fd).st_size
            # Through /proc the same inode is opened again, whatever has the name by now.
            self.whole_path = f"/proc/self/fd/{self.fd}" if os.path.exists("/proc/self/fd") else path
            self._small_fd = _open(self.whole_path, path)
        except BaseException:
            os.close(self.fd)
            raise
        try:
            self.kind = self._sniff()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> CheckpointSource:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the descriptors. Raises StorageError if the disk reports an error only now."""
        with storage_errors("closing", self.path):
            try:
                os.close(self.fd)
            finally:
                os.close(self._small_fd)

    def _sniff(self) -> str:
        first = self.read_at(0, min(_SNIFF_BYTES, self.size_bytes))
        if first.startswith(torch_zip.LOCAL_HEADER_MAGIC):
            return "torch_zip"
        if safetensors_format.is_safetensors(first):
            return "safetensors"
        return "other"

    def open_whole(self) -> BinaryIO:
        """Open the file once more, for stock torch.load."""
        return open(self.whole_path, "rb")

    def read_at(self, offset_bytes: int, size_bytes: int) -> bytes:
        """Read a few bytes, which must lie inside the file.

        Raises:
            FormatError: The bytes do not lie inside the file.
            StorageError: An error of the disk.
        """
        if offset_bytes < 0 or offset_bytes + size_bytes > self.size_bytes:
            raise FormatError("a structure points outside the file", path=self.path, offset_bytes=offset_bytes)
        return read_exactly(self._small_fd, offset_bytes, size_bytes, self.path)

    def refuse_incomplete(self) -> None:
        """Refuse a file of kind "other" whose first bytes are missing.

        Raises:
            FormatError: The file is empty, a few bytes long, or begins with zeros.
        """
        if self.size_bytes < _SNIFF_BYTES or not any(self.read_at(0, _SNIFF_BYTES)):
            raise FormatError(self.explain_unknown(), path=self.path)

    def refuse_foreign(self) -> None:
        """Refuse a file of kind "other" that is no checkpoint.

        torch would advise to load it with weights_only=False, which does not help.

        Raises:
            FormatError: No release of torch.save has written such files.
        """
        if not self.is_of_older_torch():
            raise FormatError(self.explain_unknown(), path=self.path)

    def is_of_older_torch(self) -> bool:
        """Tell whether a file of kind "other" begins like one of torch.save before its zip format."""
        return is_older_torch_file(self.read_at(0, min(LOOK_BYTES, self.size_bytes)))

    def explain_unknown(self) -> str:
        """Describe a file of kind "other" for a message."""
        if self.size_bytes == 0:
            return "the file is empty"
        if self.size_bytes < _SNIFF_BYTES:
            return f"{self.size_bytes} bytes are too few for any checkpoint: it was cut off, or its save never finished"
        if not any(self.read_at(0, _SNIFF_BYTES)):
            return "the file begins with zeros: its save never finished"
        return f"it is {self.looks_like()}: neither a torch zip nor a safetensors file"

    def looks_like(self) -> str:
        """Describe what the file looks like, with an article."""
        if self.kind != "other":
            return {"torch_zip": "a zip archive", "safetensors": "a safetensors file"}[self.kind]
        first = self.read_at(0, min(LOOK_BYTES, self.size_bytes))
        if is_older_torch_file(first):
            return "a file of an older torch.save"
        return looks_like(first) or "of an unknown kind"

    # --- torch zip

    @cached_property
    def directory(self) -> torch_zip.Directory:
        """The proven central directory. Raises FormatError or UnsupportedError."""
        with no_garbage_collection():
            return torch_zip.read_directory(self.read_at, self.size_bytes, path=self.path)

    @cached_property
    def pickle(self) -> bytes:
        """The bytes of data.pkl. Raises FormatError when there is none."""
        entry = self.directory.entries.get("data.pkl")
        if entry is None:
            raise FormatError("the archive has no data.pkl: no file of torch.save", path=self.path)
        if entry.size_bytes > _PICKLE_LIMIT_BYTES:
            raise UnsupportedError(
                f"{self.path}: its data.pkl has {entry.size_bytes} bytes; we scan at most {_PICKLE_LIMIT_BYTES}"
            )
        return self.read_at(entry.data_offset_bytes, entry.size_bytes)

    def scan(self) -> PickleScan:
        """Scan data.pkl without running it. The result is not cached: its tree is many times as large as the pickle.

        Raises:
            FormatError: It is no well-formed pickle.
            UnsupportedError: Only running its code can tell what it holds.
        """
        try:
            with no_garbage_collection():
                return scan_pickle(self.pickle)
        except FormatError as error:
            raise FormatError(
                f"data.pkl is damaged: {error.message}", path=self.path, offset_bytes=error.offset_bytes
            ) from None

    @cached_property
    def summary(self) -> PickleSummary:
        """A summary of data.pkl. Raises FormatError or UnsupportedError."""
        return self.summarize(self.scan())

    def summarize(self, scan: PickleScan) -> PickleSummary:
        """Keep and return the `summary`, made from a scan that the caller has: a scan takes longer than a summary.

        Raises:
            FormatError, UnsupportedError: The storages that the pickle names are malformed.
        """
        try:
            self.summary = PickleSummary(
                storage_references(scan),
                scan.globals,
                scan.has_negative_int,
                builds_without_bytes(scan),
                self.pickle.startswith(b"\x80\x02")
                and not scan.has_other_opcodes
                and scan.memo_index_max <= len(self.pickle),
                hashlib.sha256(self.pickle).digest(),
            )
        except FormatError as error:
            raise FormatError(f"data.pkl: {error.message}", path=self.path, offset_bytes=error.offset_bytes) from None
        return self.summary

    def forget_pickle(self) -> None:
        """Forget data.pkl, to free memory; the next use reads it again."""
        self.__dict__.pop("pickle", None)

    def prove_header(self, entry: torch_zip.DirectoryEntry) -> None:
        """Prove that the local header of a record does not lead out of the file, as torch does.

        Raises:
            FormatError: The header leads out of the file, or is none.
            StorageError: An error of the disk.
        """
        place = entry.header_offset_bytes
        header = self.local_headers.get(place) or self.read_at(place, LOCAL_HEADER_BYTES)
        data_offset_bytes = torch_zip.header_leads_to(header, entry)
        if data_offset_bytes is None or data_offset_bytes + entry.size_bytes > self.size_bytes:
            raise FormatError(f"the header of record {entry.name} is damaged", path=self.path, offset_bytes=place)

    def is_byte_swapped(self) -> bool:
        """Tell whether a machine of the other byte order wrote the storages."""
        entry = self.directory.entries.get("byteorder")
        if entry is None:
            return sys.byteorder != "little"
        return self.read_at(entry.data_offset_bytes, min(entry.size_bytes, 16)) != sys.byteorder.encode()

    def tensor_names(self, keys: Iterable[str]) -> dict[str, list[str]]:
        """Return the names of the tensors that lie in the given storages, by storage key."""
        names: dict[str, list[str]] = {key: [] for key in keys}
        for name, tensor in iter_tensors(self.scan().root):
            if tensor.storage is not None and tensor.storage.key in names:
                names[tensor.storage.key].append(name)
        return names

    def prove_tensors(self, cause: Exception | None = None) -> None:
        """Prove that every tensor of the pickle lies inside its storage, if the scan understands the pickle.

        torch checks this while it unpickles, but not on the meta device, and its error does not name the tensor. With
        ten thousand tensors this takes 0.1 s, so call it only with a reason.

        Raises:
            FormatError: A tensor does not, or has impossible sizes or strides; raised from `cause`.
        """
        try:
            for name, tensor in iter_tensors(self.scan().root):
                storage = tensor.storage
                if storage is not None and tensor.end_bytes > storage.size_bytes:
                    raise FormatError(
                        f"tensor {name!r} reaches beyond the {storage.size_bytes} bytes of its storage {storage.key}"
                    )
        except FormatError as error:
            raise FormatError(error.message, path=self.path) from cause
        except UnsupportedError:
            return

    # --- safetensors

    @cached_property
    def header(self) -> safetensors_format.Header:
        """The proven safetensors header. Raises FormatError."""
        return safetensors_format.read_header(self.read_at, self.size_bytes, path=self.path)


def _open(name: str, path: str) -> int:
    """Open the regular file `name`; errors call it `path`.

    Raises:
        CheckpointNotFoundError: There is no such file.
        StorageError: It cannot be opened, or is no regular file. This never waits for the writer of a FIFO.
    """
    try:
        with storage_errors("opening", path):
            fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # or a FIFO waits for its writer
    except StorageError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR):
            parts = ""
            if os.path.exists(os.path.join(os.path.dirname(path), PARTS_NAME)):
                parts = ", but some part of one: load it with all ranks' Checkpointer.load(), or `fastpersist merge` it"
            raise CheckpointNotFoundError(errno.ENOENT, f"there is no checkpoint at {path}{parts}", path) from None
        if error.errno == errno.ENXIO:
            raise _no_file(path, "a socket, or a device that is not there") from None
        raise
    try:
        with storage_errors("looking at", path):
            mode = os.fstat(fd).st_mode
            if stat.S_ISREG(mode):
                # With O_NONBLOCK io_uring returns EAGAIN instead of waiting for the disk.
                fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_NONBLOCK)
                return fd
        if stat.S_ISDIR(mode):
            raise StorageError(errno.EISDIR, f"cannot read {path}: {_directory_kind(path)}", path)
        kinds = {stat.S_IFIFO: "a FIFO", stat.S_IFCHR: "a character device", stat.S_IFBLK: "a block device"}
        raise _no_file(path, kinds.get(stat.S_IFMT(mode), "a special file"))
    except BaseException:
        os.close(fd)
        raise


def _no_file(path: str, kind: str) -> StorageError:
    return StorageError(errno.EINVAL, f"cannot read {path}: it is {kind}, not a regular file", path)


def _directory_kind(path: str) -> str:
    """Describe a directory for a message, and name the call that loads it."""
    root, name = os.path.split(absolute_path(path))
    names = set(os.listdir(path))
    step = step_of(name)
    if MANIFEST_NAME in names and step is not None:
        return f"it is the directory of a step; use Checkpointer({root!r}).load({step})"
    if STATE_NAME in names:
        return f"it is a checkpoint directory; load {os.path.join(path, STATE_NAME)}"
    if DCP_METADATA_NAME in names:
        return "it is a sharded checkpoint; use torch.distributed.checkpoint.load with fastpersist's FastPersistReader"
    if any(step_of(entry) is not None for entry in names):
        return f"it is a directory of checkpoints; use Checkpointer({path!r}).load()"
    return "it is a directory, not a checkpoint file"


class SkippingFile(io.RawIOBase):
    """A file object that skips given extents: a read of one leaves the buffer as it is.

    Stock torch.load reads each storage into memory of its own before it asks where the storage belongs. Our storages
    are filled by then, so these reads need to move nothing. `skipped_offset_bytes`, the offset of the last skipped
    extent, proves that torch looks for a storage where we found it. torch also reads the fixed part of every local
    header. This refuses a header that leads out of the file, as torch does, and else returns one that leads to the data
    where the directory has it.

    Args:
        source: The file.
        entries: The records of its storages.
        headers_follow: Do not look at their headers: they are being read, and whoever reads them proves them.
    """

    def __init__(
        self, source: CheckpointSource, entries: Iterable[torch_zip.DirectoryEntry], *, headers_follow: bool = False
    ) -> None:
        super().__init__()
        entries = list(entries)
        self._extents = {entry.data_offset_bytes: entry.size_bytes for entry in entries}
        self._entries = {entry.header_offset_bytes: entry for entry in entries}
        self.path = source.path
        self._source = source
        self._headers_follow = headers_follow
        self._position = 0
        self.skipped_offset_bytes = -1
        self.failure: FastPersistError | None = None

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._source.size_bytes}[whence]
        self._position = start + offset
        return self._position

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        """Read. torch loses exceptions raised here, but refuses a short read: so keep the error in `failure`."""
        try:
            return self._readinto(buffer)
        except FastPersistError as error:
            self.failure = error
            return 0

    def _readinto(self, buffer: memoryview) -> int:
        size_bytes = min(len(buffer), max(0, self._source.size_bytes - self._position))
        entry = self._entries.get(self._position)
        if size_bytes == LOCAL_HEADER_BYTES and entry is not None:
            if not self._headers_follow:
                self._source.prove_header(entry)
            buffer[:] = torch_zip.leading_header(entry)
        elif size_bytes and self._extents.get(self._position) == size_bytes:
            self.skipped_offset_bytes = self._position
        else:
            buffer[:size_bytes] = self._source.read_at(self._position, size_bytes)
        self._position += size_bytes
        return size_bytes


def open_file(held: HeldDirectory, name: str) -> CheckpointSource:
    """Open a file of a held checkpoint directory; errors name the file by the directory's own path.

    Raises:
        CheckpointNotFoundError: There is no such file.
        FormatError: It is no regular file.
        StorageError: It cannot be read.
    """
    path = os.path.join(held.path, name)
    try:
        fd = open_regular(os.path.join(held.place, name))
    except StorageError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR):
            raise CheckpointNotFoundError(errno.ENOENT, f"there is no checkpoint at {path}", path) from None
        raise
    return CheckpointSource(path, fd)
