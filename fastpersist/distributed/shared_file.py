"""One file written by several ranks: the same bytes that the first rank alone would have written.

Every rank pickles its own object, which tells it which storages are its replicas of the others'. The large ones are
*cut* (`partition`): each writer writes its blocks of them into the same preallocated file; a block is no smaller than
a page on any of the machines. The first rank's object is what is written; it alone writes all the rest, in two passes:

1. *early*: its own blocks of what is cut, and all blocks that depend on the CRC of no cut source;
2. *late*, when all ranks have told the CRCs of what they have written: the blocks with descriptors of cut sources, and
   the closing bytes (serialization id and central directory, or the header), without which nobody can read the file.

What the ranks say to each other about one file, as JSON (CRCs as they are), in a `coordination.Session`:

    others → first   plan   a digest of the cut sources
    first → others   go     the path of the pending file, and where each cut source lies in it; or *describe*: then the
                            others tell a sum of each cut source, so that the error can name those that differ
    others → first   done   the CRC of each range that was written, when it is durable

Ranks that share no file system (`node_local`) write the same ranges, each to a part of its own: a file in which they
lie one right behind the other. The first rank's part is all the rest. Who does so is found out between *plan* and *go*.

Names, durability and visibility are the first rank's `file_commit` or `directory_save`; what the other ranks do around
this is `follower_save`.
"""

from __future__ import annotations

import base64
import bisect
import errno
import hashlib
import itertools
import json
import struct
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from fastpersist import _native
from fastpersist.config import BLOCK_BYTES
from fastpersist.distributed.coordination import Session
from fastpersist.distributed.node_local.detection import Split, SplitShares, Stores
from fastpersist.distributed.partition import interior_of, shard_of
from fastpersist.distributed.replica_check import bytes_of, difference, sums_of
from fastpersist.errors import CoordinationError, InternalError, StorageError, UnsupportedError
from fastpersist.formats.byte_ranges import ByteRange, Extent, ExtentMap, merged, overlaps, without
from fastpersist.formats.layout import align_up
from fastpersist.saving.containers import Checksum, Container, Literal, Part, Source, Stored
from fastpersist.saving.write_file import PieceStream, WrittenFile
from fastpersist.transfer.engine_selection import is_cufile, refuse_null_engine, require_engine
from fastpersist.transfer.pipeline import Poll, Run, Writer

__all__ = [
    "FirstShare",
    "Share",
    "Together",
    "checking",
    "decoded",
    "encoded",
    "preferring_failure_of_others",
    "telling",
    "unpacked_offsets",
]

_CRC_BYTES = 4
_NEWS_S = 1.0


@dataclass(frozen=True, slots=True)
class Together:
    """How several ranks make one save.

    Attributes:
        session: What they say to each other about it.
        label: What is saved: the last part of its path. All ranks must mean the same.
        writers: The ranks that write what is cut, in order.
        check_replicas: Compare all bytes of what is cut, not samples.
        stores: What is known of their file systems; None: they need the same one.
    """

    session: Session
    label: str
    writers: Sequence[int]
    check_replicas: bool
    stores: Stores | None = None


class Share:
    """What one rank writes of a file, planned from its own object. The thread that saves makes it.

    To `capture` a share is a file: its sources are what this rank writes, in the order in which it does.

    Args:
        container: The file as this rank would write it.
        cut: Which of its sources are cut, as `replicas_of` gives them.
        together: With whom.
        name: Of the file, if a save has several: all ranks save them in the same order.

    Attributes:
        ranges: What this rank writes of the container's sources.
        sources: The same as `containers.Source`s.
        tensors: For each of them the tensors by which the object holds its storage.
    """

    def __init__(self, container: Container, cut: Sequence[int], together: Together, name: str = "") -> None:
        self.container = container
        self.ranges: list[ByteRange] = []
        self.sources: list[Source] = []
        self.tensors: list[Sequence[torch.Tensor]] = []
        self._cut = list(cut)
        self._session = together.session
        self._name = f"{together.label}/{name}" if name else together.label
        self._writers = list(together.writers)
        self._block_bytes = together.session.block_bytes
        self._interiors = [
            interior_of(container.offsets[source], container.sources[source].size_bytes, self._block_bytes)
            for source in cut
        ]
        self._get_sums = sums_of(container, self._cut, self._interiors, whole=together.check_replicas)
        self._mode = "all bytes" if together.check_replicas else "samples"

    @cached_property
    def _sums(self) -> list[int]:
        """The sums of what is cut, as it was when the save began; for the background: it may wait for a device."""
        return self._get_sums()

    @property
    def wrappers(self) -> Sequence[torch.Tensor]:
        """Tensors of a subclass in the object."""
        return self.container.wrappers

    def names_of(self, source: int) -> list[str]:
        """Return the names of the tensors that one of `sources` belongs to."""
        return self.container.names_of(self.ranges[source].source)

    @property
    def cut_bytes(self) -> int:
        """How many bytes are shared out among the writers."""
        return sum(interior.size_bytes for interior in self._interiors)

    def bytes_by_rank(self) -> list[int]:
        """Return how many of the bytes that are shared out each rank writes."""
        return [sum(part.size_bytes for part in self._shard_of(rank)) for rank in range(self._session.count)]

    def _shard_of(self, rank: int) -> list[ByteRange]:
        """Return the cut bytes that a rank writes, by the container's sources."""
        if rank not in self._writers:
            return []
        shard = shard_of(self._interiors, self._writers.index(rank), len(self._writers), self._block_bytes)
        return [ByteRange(self._cut[part.source], part.from_bytes, part.size_bytes) for part in shard]

    def extents_of(self, rank: int, offsets: Mapping[int, int]) -> list[Extent]:
        """Return where the cut bytes that a rank writes lie in the file, ascending, those that touch as one.

        Args:
            rank: Which.
            offsets: Of the cut sources in the file, by index.
        """
        return merged(Extent(offsets[part.source] + part.from_bytes, part.size_bytes) for part in self._shard_of(rank))

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
        return [source.storage for source in self.sources]

    def _add_range(self, part: ByteRange) -> int:
        whole = self.container.sources[part.source]
        self.ranges.append(part)
        self.sources.append(Source(whole.storage, whole.offset_bytes + part.from_bytes, part.size_bytes))
        self.tensors.append(self.container.tensors[part.source])
        return len(self.ranges) - 1

    def _names_of_cut(self, position: int) -> list[str]:
        return self.container.names_of(self._cut[position])

    def _description(self) -> bytes:
        return encoded({"mode": self._mode, "sums": self._sums})

    def _plan_message(self) -> bytes:
        return encoded({"name": self._name, "digest": self._digest()})

    def _digest(self) -> str:
        """Return what is the same on all ranks if their replicas are, as far as they were looked at."""
        interiors = [tuple(interior) for interior in self._interiors]
        described = repr((self._mode, self.container.has_checksums, interiors, self._sums))
        return hashlib.sha256(described.encode()).hexdigest()[:32]


def encoded(message: dict[str, Any]) -> bytes:
    """Return what is sent."""
    return json.dumps(message, separators=(",", ":")).encode()


def decoded(message: bytes, rank: int) -> dict[str, Any]:
    """Return what another rank says.

    Raises:
        CoordinationError: It is no message of a save.
    """
    try:
        found = json.loads(message)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise CoordinationError(f"rank {rank} says something that is no message of a save; do all run this version?")
    return found


# ------------------------------------------------------------------------------------------- the first rank


@dataclass(frozen=True, slots=True)
class _LateBytes:
    """Bytes of a source that lie in a block that is written late; copied when the save begins."""

    from_bytes: int
    data: bytes


class FirstShare(Share):
    """The first rank's part of a file.

    Attributes:
        split_shares: After `write`, what each rank has written; None if the file does not lie in parts.
    """

    def __init__(self, container: Container, cut: Sequence[int], together: Together, name: str = "") -> None:
        super().__init__(container, cut, together, name)
        self.split_shares: SplitShares | None = None
        self._split: Split | None = None
        self._met = False
        self._own_extents = ExtentMap([Extent(0, container.size_bytes)])
        self._crcs_of_others: dict[int, int] = {}  # of their parts
        self._late = self._late_blocks()
        self._own: dict[int, list[int]] = {}  # by source, indices of `ranges`
        self._late_ranges: list[ByteRange] = []
        shard: dict[int, list[ByteRange]] = {}
        for part in self._shard_of(0):
            shard.setdefault(part.source, []).append(part)
        interiors = dict(zip(self._cut, self._interiors, strict=True))
        for source, offset_bytes in enumerate(container.offsets):
            self._plan(source, offset_bytes, interiors.get(source, Extent(0, 0)), shard.get(source, []))
        self._get_late_bytes = bytes_of(
            [(container.sources[part.source], part.from_bytes, part.size_bytes) for part in self._late_ranges]
        )

    @cached_property
    def _late_bytes(self) -> dict[int, list[_LateBytes]]:
        """By source what is written late of it; on the writing thread, as the sums."""
        found: dict[int, list[_LateBytes]] = {source: [] for source in range(len(self.container.sources))}
        for part, data in zip(self._late_ranges, self._get_late_bytes(), strict=True):
            found[part.source].append(_LateBytes(part.from_bytes, data))
        return found

    def _late_blocks(self) -> list[Extent]:
        """Return the blocks that depend on the CRC of a cut source."""
        cut = set(self._cut)
        places = [Extent(*self.container.closing_extent)]
        for part in self.container.parts():
            if isinstance(part, Checksum):
                place = Extent(part.offset_bytes, _CRC_BYTES)
                # One that lies across the border of two blocks is not written in two pieces.
                if part.source in cut or place.offset_bytes // BLOCK_BYTES != (place.end_bytes - 1) // BLOCK_BYTES:
                    places.append(place)
        return merged(
            Extent.between(place.offset_bytes // BLOCK_BYTES * BLOCK_BYTES, align_up(place.end_bytes, BLOCK_BYTES))
            for place in places
            if place.size_bytes
        )

    def _plan(self, source: int, offset_bytes: int, interior: Extent, shard: list[ByteRange]) -> None:
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

    def meet(self, find: Callable[[Callable[[dict[str, Any]], list[dict[str, Any]]]], Split | None]) -> Split | None:
        """Hear the plans of the others, who are in `OtherShare.write`, and find out where they write; before `write`.

        Args:
            find: Given what sends a message to the others and returns their answers by rank; returns how the save is
                split among several stores. Then this rank's file is a part, of `size_bytes`.

        Raises:
            CoordinationError: The ranks do not hold the same replicas; the message says which differ on which ranks.
            PeerError: Another rank has failed.
        """
        self._agree()
        self._met = True
        self._split = find(self._say)
        if self._split is not None:
            others = [extent for rank in range(1, self._session.count) for extent in self._extents_of_other(rank)]
            self._own_extents = ExtentMap(without(Extent(0, self.container.size_bytes), merged(others)))
        return self._split

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
        """Write this rank's part, and have the others write theirs, who are in `OtherShare.write`.

        Returns when everything is written, and what the others have written is durable.

        Args:
            fd: Of the preallocated file; stays the caller's.
            path: For messages: the final name.
            engine: Engine name or "auto".
            pending_path: Where they find the file.
            poll: See `pipeline.Poll`.
            snapshot: Holds `sources`; without it they are read from where they are.

        Raises:
            CoordinationError: The ranks do not hold the same replicas; the message says which differ on which ranks.
            PeerError: Another rank has failed.
            ConfigError, UnsupportedError, StorageError: As in `write_container`.
        """
        if not self._met:
            self._agree()
        self._answer_go(pending_path)
        if self._split is None:
            engine = self._engine_for(fd, path, engine)
        with Writer(
            fd,
            path,
            engine=engine,
            poll=checking(poll, self._session),
            sparing=snapshot is not None,
            sources=self._for_gpudirect(engine),
        ) as writer:
            stream = PieceStream(writer, snapshot)
            self._write_early(stream)
            stream.flush()
            crcs = writer.crcs(len(self.ranges)) if self.container.has_checksums else [0] * len(self.ranges)
            writer.rest()
            others = self._hear_done()
            written = [*zip(self.ranges, crcs, strict=True), *others]
            source_crcs = self._source_crcs(written)
            self._write_late(stream, source_crcs)
            stream.flush()
            used_engine = writer.finish()
            runs = writer.runs()
        refuse_null_engine(used_engine)
        if runs is None:
            return WrittenFile(used_engine, None)
        if self._split is not None:
            crc = _native.combine_runs(runs, self.size_bytes)
            self.split_shares = self._shares(crc, written, source_crcs)
            return WrittenFile(used_engine, crc)
        runs += [(self.container.offsets[part.source] + part.from_bytes, part.size_bytes, crc) for part, crc in others]
        return WrittenFile(used_engine, _native.combine_runs(runs, self.container.size_bytes))

    def _agree(self) -> None:
        told = [decoded(plan, rank) for rank, plan in enumerate(self._session.gather(self._plan_message()))]
        for rank, plan in enumerate(told):
            if plan.get("name") != self._name:
                raise CoordinationError(
                    f"the ranks do not save the same in the same order: rank 0 is at {self._name}, rank {rank} at "
                    f"{plan.get('name')}. All ranks save equally often, with the same steps or names"
                )
        plans = [plan.get("digest") for plan in told]
        if any(plan != plans[0] for plan in plans):
            self._session.answer(encoded({"describe": True}))
            described = [decoded(one, rank) for rank, one in enumerate(self._session.gather(self._description()))]
            raise difference([(one.get("mode"), one.get("sums", [])) for one in described], self._names_of_cut)

    def _answer_go(self, pending_path: str) -> None:
        offsets = [self.container.offsets[source] for source in self._cut]
        go: dict[str, Any] = {"path": pending_path, "offsets": _packed(offsets)}
        if self._split is not None:
            go["split"] = self._split.go()
        self._session.answer(encoded(go))

    def _say(self, message: dict[str, Any]) -> list[dict[str, Any]]:
        self._session.answer(encoded(message))
        return [decoded(answer, rank) for rank, answer in enumerate(self._session.gather(b"{}"))]

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

    def _hear_done(self) -> list[tuple[ByteRange, int]]:
        """Wait until all have written; return the ranges of the others with their CRCs."""
        found: list[tuple[ByteRange, int]] = []
        for rank, crc_bytes in enumerate(self._session.gather(b"")):
            if rank == 0:
                continue
            shard = self._shard_of(rank)
            crcs = [crc for (crc,) in struct.iter_unpack("<I", crc_bytes)] if len(crc_bytes) % _CRC_BYTES == 0 else []
            if len(crcs) != len(shard):
                raise CoordinationError(f"rank {rank} has not written what it should: {len(shard)} ranges")
            found += zip(shard, crcs, strict=True)
            if shard:
                offsets = self.container.offsets
                self._crcs_of_others[rank] = _joined_crc(
                    (offsets[one.source] + one.from_bytes, one.size_bytes, crc)
                    for one, crc in zip(shard, crcs, strict=True)
                )
        return found

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
        """Combine the CRC of each source from those of its ranges, whoever has written them."""
        sources = self.container.sources
        if not self.container.has_checksums:
            return [0] * len(sources)
        runs: list[list[Run]] = [[] for _ in sources]
        for part, crc in written:
            runs[part.source].append((part.from_bytes, part.size_bytes, crc))
        crcs = []
        for source, found in enumerate(runs):
            found += [(one.from_bytes, len(one.data), _native.crc32(one.data)) for one in self._late_bytes[source]]
            combined = _native.combine_runs(found, sources[source].size_bytes)
            if combined is None:
                raise InternalError(f"source {source} is not covered by what the ranks have written")
            crcs.append(combined)
        return crcs

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
                for one in self._late_bytes[part.source]:
                    yield part.offset_bytes + one.from_bytes, one.data
        yield self.container.closing_extent[0], self.container.closing(crcs)


def _extent_of(part: Part) -> Extent:
    return Extent(part.offset_bytes, len(part.data) if isinstance(part, Literal) else _CRC_BYTES)


def _joined_crc(runs: Iterable[Run]) -> int:
    """Return the CRC of these bytes of a file, one right behind the other, whatever lies between them."""
    crc = 0
    for _, size_bytes, run_crc in sorted(runs):
        crc = _native.combine_crc32(crc, run_crc, size_bytes)
    return crc


def _last_at_most(starts: Sequence[int], value: int) -> int:
    return bisect.bisect_right(starts, value) - 1


def _packed(offsets: Sequence[int]) -> str:
    """Encode offsets; the distances between them repeat, so this is a small part of 8 bytes each."""
    distances = [after - before for before, after in itertools.pairwise([0, *offsets])]
    return base64.b64encode(zlib.compress(struct.pack(f"<{len(distances)}Q", *distances))).decode()


def unpacked_offsets(text: str) -> list[int]:
    """Decode the offsets that the first rank tells."""
    data = zlib.decompress(base64.b64decode(text))
    return list(itertools.accumulate(struct.unpack(f"<{len(data) // 8}Q", data)))


def checking(poll: Poll | None, session: Session) -> Poll:
    """Stop a transfer when another rank has failed."""

    def check(done_bytes: int) -> None:
        session.check()
        if poll is not None:
            poll(done_bytes)

    return check


@contextmanager
def telling(together: Together | None) -> Iterator[None]:
    """Tell the other ranks of an error in the block at once: they need not wait until this rank gives up."""
    try:
        yield
    except BaseException as error:
        if together is not None:
            together.session.fail(error)
        raise


@contextmanager
def preferring_failure_of_others(session: Session | None) -> Iterator[None]:
    """Look for a failure of another rank behind an error in the block: who gives up removes what others need.

    Args:
        session: With whom; None for nobody.

    Raises:
        PeerError: Another rank has failed; instead of StorageError or UnsupportedError.
    """
    try:
        yield
    except (StorageError, UnsupportedError) as error:
        if session is not None:
            session.check()
            if isinstance(error, UnsupportedError) or error.errno in (errno.ENOENT, errno.ESTALE):
                end_s = time.monotonic() + _NEWS_S  # over a network, the news may come later than the removal
                while time.monotonic() < end_s:
                    time.sleep(0.02)
                    session.check()
        raise
