"""The coordinator's part of a file that several ranks write: its blocks of the cut sources, and everything else.

The file holds the coordinator's object. The coordinator writes in two passes:

1. *early*: its own blocks of cut sources, and all blocks that do not depend on the CRC of a cut source;
2. *late*, when all ranks have sent the CRCs of their ranges: the blocks with descriptors of cut sources, and
   the closing bytes (serialization id and central directory, or the header), without which the file cannot be read.

`follower_file` is the other ranks' half, `file_agreement` has the messages between them.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from fastpersist import _native
from fastpersist.cached import cached_property
from fastpersist.config import BLOCK_BYTES
from fastpersist.distributed.file_agreement import agree_on_plans, ask, gather_done, tell_go
from fastpersist.distributed.messages import checking
from fastpersist.distributed.node_local.copies import send_rest
from fastpersist.distributed.node_local.detection import Say
from fastpersist.distributed.node_local.publishing import SplitShares
from fastpersist.distributed.partition import combined_crcs
from fastpersist.distributed.replica_check import bytes_of
from fastpersist.distributed.shared_file import SaveGroup, Share
from fastpersist.errors import CoordinationError, InternalError
from fastpersist.formats.byte_ranges import ByteRange, Extent, ExtentMap, merged, overlaps, without
from fastpersist.formats.layout import align_up
from fastpersist.saving.containers import Checksum, Container, Literal, Part, Stored
from fastpersist.saving.write_file import PieceStream, WrittenFile
from fastpersist.transfer.engine_selection import refuse_null_engine
from fastpersist.transfer.progress import Poll
from fastpersist.transfer.writer import Run, Writer

__all__ = ["CoordinatorFile"]

_CRC_BYTES = 4


class CoordinatorFile(Share):
    """The coordinator's part of a file.

    Attributes:
        split_shares: After `write`, what each rank has written; None if the file does not lie in parts.
    """

    def __init__(self, container: Container, cut: Sequence[int], group: SaveGroup, name: str = "") -> None:
        super().__init__(container, cut, group, name)
        self.split_shares: SplitShares | None = None
        self._stores: dict[str, Any] = {}  # what *go* says of them
        self._has_agreed = False
        self._own_extents = ExtentMap([Extent(0, container.size_bytes)])
        self._copied: dict[int, list[tuple[ByteRange, int]]] = {}
        self._crcs_of_others: dict[int, int] = {}  # of their parts
        self._late = self._late_blocks()
        self._own: dict[int, list[int]] = {}  # by source, indices of `ranges`
        self._late_ranges: list[ByteRange] = []
        shard: dict[int, list[ByteRange]] = {}
        for part in self._shard_of(0):
            shard.setdefault(part.source, []).append(part)
        interiors = dict(zip(self._cut, self._interiors, strict=True))
        for source, offset_bytes in enumerate(container.offsets):
            self._plan_source(source, offset_bytes, interiors.get(source, Extent(0, 0)), shard.get(source, []))
        self._get_late_bytes = bytes_of(
            [(container.sources[part.source], part.from_bytes, part.size_bytes) for part in self._late_ranges]
        )

    @cached_property
    def _late_bytes(self) -> dict[int, list[tuple[ByteRange, bytes]]]:
        """By source what is written late of it, copied when the save began; on the writing thread, as the sums."""
        found: dict[int, list[tuple[ByteRange, bytes]]] = {source: [] for source in range(len(self.container.sources))}
        for part, data in zip(self._late_ranges, self._get_late_bytes(), strict=True):
            found[part.source].append((part, data))
        return found

    def _late_blocks(self) -> list[Extent]:
        """Return the blocks that depend on the CRC of a cut source."""
        cut = set(self._cut)
        places = [Extent(*self.container.closing_extent)]
        for part in self.container.parts():
            if isinstance(part, Checksum):
                place = Extent(part.offset_bytes, _CRC_BYTES)
                # A descriptor across the border of two blocks is not written in two pieces.
                if part.source in cut or place.offset_bytes // BLOCK_BYTES != (place.end_bytes - 1) // BLOCK_BYTES:
                    places.append(place)
        return merged(
            Extent.between(place.offset_bytes // BLOCK_BYTES * BLOCK_BYTES, align_up(place.end_bytes, BLOCK_BYTES))
            for place in places
            if place.size_bytes
        )

    def _plan_source(self, source: int, offset_bytes: int, interior: Extent, shard: list[ByteRange]) -> None:
        """Sort the bytes of a source: those that this rank writes early, and those that it writes late."""
        extent = Extent(offset_bytes, self.container.sources[source].size_bytes)
        others = [interior._replace(offset_bytes=offset_bytes + interior.offset_bytes)] if interior.size_bytes else []
        late = overlaps(extent, self._late)
        if any(overlaps(one, others) for one in late):
            raise InternalError("a block of a cut source depends on its own CRC")
        early = without(extent, sorted([*late, *others]))
        parts = [ByteRange(source, one.offset_bytes - offset_bytes, one.size_bytes) for one in early] + shard
        self._own[source] = [self._add_range(part) for part in sorted(parts, key=lambda part: part.from_bytes)]
        self._late_ranges += [ByteRange(source, one.offset_bytes - offset_bytes, one.size_bytes) for one in late]

    def agree(self, find: Callable[[Say], dict[str, Any]]) -> bool:
        """Receive the plans of the followers, and find out where they write; call it before `write`.

        Args:
            find: Takes a function that asks the followers; returns what *go* says of several stores, if there are.

        Returns:
            Whether this rank's file is a part, of `size_bytes`; False with copies.

        Raises:
            CoordinationError: The ranks do not hold the same replicas; the message says which differ on which ranks.
            PeerError: Another rank has failed.
        """
        self._agree()
        self._stores = find(lambda message: ask(self._session, message))
        if self._stores and self._group.copies:
            self._stores["size_bytes"] = self.container.size_bytes
            ask(self._session, {"make": self._name.partition("/")[2], "size_bytes": self.container.size_bytes})
            return False
        if self._stores:
            others = [extent for rank in range(1, self._session.count) for extent in self._extents_of_other(rank)]
            self._own_extents = ExtentMap(without(Extent(0, self.container.size_bytes), merged(others)))
        return bool(self._stores)

    @property
    def size_bytes(self) -> int:
        """Length of the file that this rank writes to: of the whole one, or of its part."""
        return self._own_extents.size_bytes

    def write(
        self,
        fd: int,
        path: str,
        *,
        engine: str,
        pending_path: str,
        poll: Poll | None = None,
        snapshot: _native.Snapshot | None = None,
    ) -> WrittenFile:
        """Write this rank's part, while the followers write theirs in `FollowerFile.write`.

        Returns when everything is written, and what the followers have written is durable.

        Args:
            fd: A descriptor of the preallocated file; the caller closes it.
            path: The final name, for messages.
            engine: Engine name or "auto".
            pending_path: The path at which the followers find the file.
            poll: Called while data is written; see `progress.Poll`.
            snapshot: Holds `sources`; without it, they are read from where they are.

        Raises:
            CoordinationError: The ranks do not hold the same replicas; the message says which differ on which ranks.
            PeerError: Another rank has failed.
            ConfigError, UnsupportedError, StorageError: As in `write_container`.
        """
        if not self._has_agreed:
            self._agree()
        tell_go(self._session, pending_path, [self.container.offsets[source] for source in self._cut], self._stores)
        in_parts = bool(self._stores) and not self._group.copies
        if not in_parts:
            engine = self._engine_for(fd, path, engine)
        with Writer(
            fd,
            path,
            engine=engine,
            poll=checking(poll, self._session),
            sparing=snapshot is not None,
            shared=not in_parts,
            sources=self._for_gpudirect(engine),
        ) as writer:
            stream = PieceStream(writer, snapshot)
            self._write_early(stream)
            stream.flush()
            crcs = writer.crcs(len(self.ranges)) if self.container.has_checksums else [0] * len(self.ranges)
            writer.rest()
            others = self._gather_done()
            written = [*zip(self.ranges, crcs, strict=True), *others]
            if self.container.has_checksums:
                self._refuse_other_copies(written)
            source_crcs = self._source_crcs(written)
            self._write_late(stream, source_crcs)
            stream.flush()
            used_engine = writer.finish()
            runs = writer.runs()
        refuse_null_engine(used_engine)
        if self._stores and not in_parts:
            self._send_rest(pending_path)
        if runs is None:
            return WrittenFile(used_engine, None)
        if in_parts:
            crc = _native.combine_runs(runs, self.size_bytes)
            self.split_shares = self._shares(crc, written, source_crcs)
            return WrittenFile(used_engine, crc)
        runs += [(self.container.offsets[part.source] + part.from_bytes, part.size_bytes, crc) for part, crc in others]
        return WrittenFile(used_engine, _native.combine_runs(runs, self.container.size_bytes))

    def _agree(self) -> None:
        agree_on_plans(self._session, self._plan(), self._description, self._names_of_cut)
        self._has_agreed = True

    def _extents_of_other(self, rank: int) -> list[Extent]:
        return self.extents_of(rank, dict(enumerate(self.container.offsets)))

    def _write_early(self, stream: PieceStream) -> None:
        container = self.container
        for part in container.parts():
            if isinstance(part, Stored):
                for index in self._own[part.source]:
                    stream.seek(self._own_extents.place_of(part.offset_bytes + self.ranges[index].from_bytes))
                    stream.add_source(self.sources[index], index, index if container.has_checksums else None)
                continue
            for one in without(_extent_of(part), self._late):
                stream.seek(self._own_extents.place_of(one.offset_bytes))
                if isinstance(part, Literal):
                    stream.add_bytes(
                        part.data[one.offset_bytes - part.offset_bytes : one.end_bytes - part.offset_bytes]
                    )
                else:
                    stream.add_crc(self._early_slot(part.source) if container.has_checksums else None)

    def _early_slot(self, source: int) -> int:
        own = self._own[source]
        if len(own) != 1 or self._late_bytes[source]:
            raise InternalError(f"the CRC of source {source} is due before all of it is written")
        return own[0]

    def _gather_done(self) -> list[tuple[ByteRange, int]]:
        """Wait until all have written; return the ranges of the followers with their CRCs."""
        found: list[tuple[ByteRange, int]] = []
        copied: dict[int, list[tuple[ByteRange, int]]] = {}  # by first rank of another store that gets a copy
        offsets = self.container.offsets
        shards = [self._shard_of(rank) for rank in range(self._session.count)]
        for rank, crcs in enumerate(gather_done(self._session, [len(shard) for shard in shards])):
            if rank == 0 or not shards[rank]:
                continue
            own = list(zip(shards[rank], crcs, strict=True))
            if self._store_of(rank):
                copied.setdefault(self._store_of(rank), []).extend(own)
                continue
            found += own
            self._crcs_of_others[rank] = _joined_crc(
                (offsets[part.source] + part.from_bytes, part.size_bytes, crc) for part, crc in own
            )
        self._copied = copied
        return found

    def _store_of(self, rank: int) -> int:
        """Return the first rank of the store that gets a copy, of which this rank writes a part; 0 for rank 0's."""
        first_ranks = self._group.stores.first_ranks if self._group.copies and self._group.stores else None
        return 0 if first_ranks is None else first_ranks[rank]

    def _refuse_other_copies(self, written: Sequence[tuple[ByteRange, int]]) -> None:
        """Compare the CRCs of the cut sources in all stores: the samples of *plan* may have missed a difference.

        Raises:
            CoordinationError: A CRC differs.
        """
        if not self._copied:
            return
        own = self._crcs_of_cut(written)
        for first, others in self._copied.items():
            crcs = self._crcs_of_cut(others)
            for position, source in enumerate(self._cut):
                if crcs.get(source) != own.get(source):
                    names = ", ".join(self._names_of_cut(position)) or f"storage {source}"
                    raise CoordinationError(
                        f"the copies would differ: {names} is not the same on rank 0 and on the ranks of the store of "
                        f"rank {first}"
                    )

    def _crcs_of_cut(self, written: Iterable[tuple[ByteRange, int]]) -> dict[int, int]:
        """Return the CRC of the interior of each cut source, from ranges that make it up, and perhaps others."""
        interiors = dict(zip(self._cut, self._interiors, strict=True))
        runs: dict[int, list[Run]] = {}
        for part, crc in written:
            interior = interiors.get(part.source)
            if interior is not None and interior.offset_bytes <= part.from_bytes < interior.end_bytes:
                runs.setdefault(part.source, []).append((part.from_bytes, part.size_bytes, crc))
        return {source: _joined_crc(found) for source, found in runs.items()}

    def _send_rest(self, pending_path: str) -> None:
        firsts = sorted({self._store_of(rank) for rank in range(self._session.count)} - {0})
        send_rest(self._session, firsts, pending_path, self._rest(self.container.offsets, self.container.size_bytes))

    def _shares(
        self, own_crc: int | None, written: Sequence[tuple[ByteRange, int]], source_crcs: Sequence[int]
    ) -> SplitShares:
        """Say what each rank has written, when all have."""
        offsets = self.container.offsets
        runs = [(offset_bytes, len(data), _native.crc32(data)) for offset_bytes, data in self._late_pieces(source_crcs)]
        runs += [(offsets[part.source] + part.from_bytes, part.size_bytes, crc) for part, crc in written]
        return SplitShares(
            self._name.partition("/")[2],
            self.container.size_bytes,
            _native.combine_runs(runs, self.container.size_bytes),
            {0: self._own_extents.extents, **{rank: self._extents_of_other(rank) for rank in self._crcs_of_others}},
            {0: own_crc, **self._crcs_of_others},
        )

    def _source_crcs(self, written: Sequence[tuple[ByteRange, int]]) -> list[int]:
        """Combine the CRC of each source from those of its ranges, of all ranks."""
        sources = self.container.sources
        if not self.container.has_checksums:
            return [0] * len(sources)
        late = [(part, _native.crc32(data)) for found in self._late_bytes.values() for part, data in found]
        return combined_crcs([source.size_bytes for source in sources], [*written, *late])

    def _write_late(self, stream: PieceStream, crcs: Sequence[int]) -> None:
        """Put the late blocks together, and write them."""
        blocks = [bytearray(min(one.end_bytes, self.container.size_bytes) - one.offset_bytes) for one in self._late]
        starts = [one.offset_bytes for one in self._late]
        for offset_bytes, data in self._late_pieces(crcs):
            for one in overlaps(Extent(offset_bytes, len(data)), self._late):
                index = _last_at_most(starts, one.offset_bytes)
                at = one.offset_bytes - starts[index]
                blocks[index][at : at + one.size_bytes] = data[
                    one.offset_bytes - offset_bytes : one.end_bytes - offset_bytes
                ]
        for start, block in zip(starts, blocks, strict=True):
            stream.seek(self._own_extents.place_of(start))
            stream.add_bytes(bytes(block))

    def _late_pieces(self, crcs: Sequence[int]) -> Iterator[tuple[int, bytes]]:
        for part in self.container.parts():
            if isinstance(part, Literal):
                yield part.offset_bytes, part.data
            elif isinstance(part, Checksum):
                yield part.offset_bytes, crcs[part.source].to_bytes(_CRC_BYTES, "little")
            else:
                for late, data in self._late_bytes[part.source]:
                    yield part.offset_bytes + late.from_bytes, data
        yield self.container.closing_extent[0], self.container.closing(crcs)


def _extent_of(part: Part) -> Extent:
    return Extent(part.offset_bytes, len(part.data) if isinstance(part, Literal) else _CRC_BYTES)


def _joined_crc(runs: Iterable[Run]) -> int:
    """Return the CRC of these ranges of a file as if they were adjacent."""
    crc = 0
    for _, size_bytes, run_crc in sorted(runs):
        crc = _native.combine_crc32(crc, run_crc, size_bytes)
    return crc


def _last_at_most(starts: Sequence[int], value: int) -> int:
    return bisect.bisect_right(starts, value) - 1
