"""Plans one file that several ranks write: the same bytes that rank 0 alone would have written.

Every rank pickles its own object, and so finds its replicas of the storages that all ranks hold. The large ones are
*cut* (`partition`): each writer writes its blocks of them into the same preallocated file; a block is no smaller than a
page on any of the machines. Rank 0, the coordinator, writes the rest of its own object alone: `coordinator_file`.
`follower_file` has the followers' part, and `file_agreement` the messages.

Ranks that share no file system (`node_local`) write the same ranges, each to a part of its own: a file that holds the
ranges without gaps. The coordinator's part is all the rest. Which ranks do so is found out between *plan* and *go*.

With copies (`node_local.copies`), the writers of each store divide the cut sources among them, and write whole files.

The coordinator's `file_commit` or `coordinator_save` handles names, durability and visibility; `follower_save` has the
rest of a follower's part.
"""

from __future__ import annotations

import errno
import hashlib
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from fastpersist import _native
from fastpersist.cached import cached_property
from fastpersist.distributed.node_local.copies import rest_of
from fastpersist.distributed.node_local.detection import Stores
from fastpersist.distributed.partition import interior_of, shard_of
from fastpersist.distributed.replica_check import sums_of
from fastpersist.distributed.sessions import Session
from fastpersist.errors import ConfigError, StorageError, UnsupportedError
from fastpersist.formats.byte_ranges import ByteRange, Extent, ExtentMap, merged
from fastpersist.saving.containers import Container
from fastpersist.saving.sources import Holders, Source, SourceTable
from fastpersist.transfer.engine_selection import is_cufile, require_engine

__all__ = ["SaveGroup", "Share", "refusing_second"]


@dataclass(frozen=True, slots=True)
class SaveGroup:
    """How several ranks make one save.

    Attributes:
        session: The ranks' session for this save.
        label: The name of what is saved: the last part of its path. All ranks must save the same.
        writers: The ranks that write what is cut, in order. With copies: for each rank, the writers of its store.
        check_replicas: Compare all bytes of what is cut, instead of samples.
        stores: What is known of the ranks' file systems; None if all ranks need the same one.
    """

    session: Session
    label: str
    writers: Sequence[int] | Mapping[int, Sequence[int]]
    check_replicas: bool
    stores: Stores | None = None

    def writers_beside(self, rank: int) -> Sequence[int]:
        """Return the writers among which, with a rank, the cut sources are divided."""
        return self.writers[rank] if isinstance(self.writers, Mapping) else self.writers

    @property
    def copies(self) -> bool:
        """Whether each of several stores gets a copy."""
        stores = self.stores
        return stores is not None and stores.node_local == "copies" and not stores.are_one()


class Share:
    """What one rank writes of a file, planned from its own object. The thread that saves makes it.

    To `capture` a share is a file: its sources are what this rank writes, in the order in which it does.

    Args:
        container: The file as this rank would write it.
        cut: The indices of the sources that are cut, as `replicas_of` returns them.
        group: The ranks that save.
        name: The name of the file, if a save has several: all ranks save them in the same order.

    Attributes:
        ranges: The byte ranges of the container's sources that this rank writes.
        sources: These ranges, as sources of their own.
    """

    def __init__(self, container: Container, cut: Sequence[int], group: SaveGroup, name: str = "") -> None:
        self.container = container
        self.ranges: list[ByteRange] = []
        self.sources = SourceTable([], [], [])
        self._cut = list(cut)
        self._session = group.session
        self._name = f"{group.label}/{name}" if name else group.label
        self._group = group
        self._block_bytes = group.session.block_bytes
        self._interiors = [
            interior_of(container.offsets[source], container.sources[source].size_bytes, self._block_bytes)
            for source in cut
        ]
        self._get_sums = sums_of(container, self._cut, self._interiors, whole=group.check_replicas)
        self._mode = "all bytes" if group.check_replicas else "samples"

    @cached_property
    def _sums(self) -> list[int]:
        """The sums of what is cut, as it was when the save began; for the background: it may wait for a device."""
        return self._get_sums()

    @property
    def holders(self) -> Holders:
        """The plain tensors by which the object holds the storages of `sources`, each with the index of its source."""
        ours: dict[int, list[int]] = {}
        for index, part in enumerate(self.ranges):
            ours.setdefault(part.source, []).append(index)
        found = Holders([], [])
        for tensor, source in zip(*self.container.holders, strict=True):
            for index in ours.get(source, ()):
                found.add(tensor, index)
        return found

    @property
    def wrappers(self) -> Sequence[torch.Tensor]:
        """Tensors of a subclass in the object."""
        return self.container.wrappers

    def names_of(self, source: int) -> list[str]:
        """Return the names of the tensors that one of `sources` belongs to."""
        return self.container.names_of(self.ranges[source].source)

    def bytes_by_rank(self) -> list[int]:
        """Return how many of the bytes that are shared out each rank writes."""
        return [sum(part.size_bytes for part in self._shard_of(rank)) for rank in range(self._session.count)]

    def _shard_of(self, rank: int) -> list[ByteRange]:
        """Return the cut bytes that a rank writes, by the container's sources."""
        writers = self._group.writers_beside(rank)
        if rank not in writers:
            return []
        shard = shard_of(self._interiors, writers.index(rank), len(writers), self._block_bytes)
        return [ByteRange(self._cut[part.source], part.from_bytes, part.size_bytes) for part in shard]

    def extents_of(self, rank: int, offsets: Mapping[int, int]) -> list[Extent]:
        """Return where the cut bytes that a rank writes lie in the file, ascending, those that touch as one.

        Args:
            rank: The rank that writes.
            offsets: The offsets of the cut sources in the file, by index.
        """
        return merged(Extent(offsets[part.source] + part.from_bytes, part.size_bytes) for part in self._shard_of(rank))

    def _rest(self, offsets: Sequence[int] | Mapping[int, int], size_bytes: int) -> ExtentMap:
        """Return what the coordinator alone writes of the file.

        Args:
            offsets: The offsets of the cut sources in the file, by index.
            size_bytes: Length of the file.
        """
        cut = zip(self._cut, self._interiors, strict=True)
        return rest_of(
            size_bytes,
            (one._replace(offset_bytes=offsets[source] + one.offset_bytes) for source, one in cut if one.size_bytes),
        )

    def _engine_for(self, fd: int, path: str, engine: str) -> str:
        """Return the engine for a file that several ranks write: not a direct one on a disk with larger blocks.

        A direct write of a part of a block reads the rest of it and writes that back, so it would undo what another
        rank has written there meanwhile. The page cache knows which bytes of a block were written.

        Raises:
            UnsupportedError: A direct engine is named.
        """
        disk_block_bytes = _native.block_bytes(fd)
        if disk_block_bytes <= self._block_bytes or engine.endswith("-buffered"):
            return engine
        if engine != "auto":
            raise UnsupportedError(
                f"cannot save {path} with {engine}: the disk takes direct writes in blocks of {disk_block_bytes} "
                f"bytes, and the ranks share the file in blocks of {self._block_bytes}; use engine='auto', or writers=1"
            )
        return "threads-buffered"

    def _for_gpudirect(self, engine: str) -> list[torch.UntypedStorage]:
        """Return what the engine "cufile" writes from memory of a device, where that is named; see `Writer`."""
        if self.container.has_checksums or not is_cufile(require_engine(engine)):
            return []
        return self.sources.storages

    def _add_range(self, part: ByteRange) -> int:
        whole = self.container.sources[part.source]
        self.ranges.append(part)
        self.sources.append(Source(whole.storage, whole.offset_bytes + part.from_bytes, part.size_bytes))
        return len(self.ranges) - 1

    def _names_of_cut(self, position: int) -> list[str]:
        return self.container.names_of(self._cut[position])

    def _description(self) -> dict[str, Any]:
        return {"mode": self._mode, "sums": self._sums}

    def _plan(self) -> dict[str, Any]:
        writers = zlib.crc32(repr(self._group.writers).encode())
        return {"name": self._name, "digest": self._digest(), "writers": writers}

    def _digest(self) -> str:
        """Return a digest that is equal on all ranks if their replicas are, as far as they were sampled."""
        interiors = [tuple(interior) for interior in self._interiors]
        described = repr((self._mode, self.container.has_checksums, interiors, self._sums))
        return hashlib.sha256(described.encode()).hexdigest()[:32]


@contextmanager
def refusing_second(name: str, final_path: str) -> Iterator[None]:
    """Explain the error of a rank that creates a file which exists already.

    Raises:
        ConfigError: It exists.
    """
    try:
        yield
    except StorageError as error:
        if error.errno != errno.EEXIST:
            raise
        raise ConfigError(
            f"{name} is in {final_path.removesuffix('/' + name)} already: another rank has saved a file of this name, "
            "or another program has put one there. Files with own=True have other names on each rank"
        ) from error
