"""Loads a file that lies in parts, on all ranks: each rank reads the parts that it sees, for all ranks that want them.

A `PartsExchange` takes the place of `read_extents` in a load, inside the rounds of a `SharedReader`:

    parts      which parts each rank sees. One rank of those that see a part becomes its *holder*
    extents    what lies in each part, told by its holder. From here on all ranks know whether the file is whole
    structure  the file's structure (all but large storages), from the holder of rank 0's part. Every rank keeps it in
               memory, as a file of the whole length with holes, which is opened, proven and unpickled as any other
    want       what each rank wants to read; ranks may want different bytes. The union is cut into pieces. The holder of
               a piece reads it, and sends it to the one rank that wants it, or broadcasts it if several do. Ranks
               that want nothing, or have finished their load, take part in the broadcasts
    exchanged  all pieces could be read

So every byte is read from one disk once, whichever ranks want it, and goes straight to its place if that is host
memory. The holders take turns, and each reads its next piece while others send theirs. All ranks process the pieces in
the same order, so no two wait for each other, and synchronise now and then.
"""

from __future__ import annotations

import array
import bisect
import os
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import zip_longest
from typing import Any, BinaryIO, NamedTuple

import torch
import torch.distributed as dist

from fastpersist import _native
from fastpersist.commit.filesystem import open_regular
from fastpersist.distributed.partition import CUT_BYTES_MIN
from fastpersist.distributed.shared_reader import WANT, SharedReader, flat
from fastpersist.errors import CorruptionError, FormatError, InternalError
from fastpersist.formats import torch_zip
from fastpersist.formats.byte_ranges import ByteRange, Extent, ExtentMap, merged, overlaps, without
from fastpersist.formats.split_manifest import Part, part_name
from fastpersist.loading.checkpoint_file import CheckpointSource
from fastpersist.loading.part_files import FoundPart, OpenPart, require_whole
from fastpersist.transfer.progress import counted
from fastpersist.transfer.reader import Extents, Push, ReadResult, read_extents

__all__ = ["PartedSource", "PartsExchange", "Piece", "cut_pieces", "writing_to"]

_PIECE_BYTES = 32 << 20
_TURNS = 32
"""All ranks synchronise after so many pieces of each holder; otherwise some would exceed a collective's timeout."""
_GAP_BYTES = 256 << 10
_STRUCTURE_BYTES = 64 << 10
"""Smaller storages belong to the structure."""


class Piece(NamedTuple):
    """Bytes of the file that one rank reads for those that want them.

    Attributes:
        holder: The rank that reads the piece.
        part: The rank whose part the piece lies in.
        offset_bytes: The offset of the piece in the file.
        size_bytes: The length of the piece.
    """

    holder: int
    part: int
    offset_bytes: int
    size_bytes: int


def cut_pieces(
    wants: Sequence[Sequence[Extent]],
    parts: Sequence[Part],
    holders: Sequence[int],
    piece_bytes: int = _PIECE_BYTES,
) -> list[Piece]:
    """Cut what all ranks want into pieces, in which the holders take turns: the same on all ranks.

    Args:
        wants: For each rank, the extents of the file that it wants, in any order.
        parts: All parts of the file.
        holders: For each part, the rank that reads it.
        piece_bytes: The largest size of a piece; a multiple of the block size.
    """
    edges: set[int] = set()
    reached: list[Extent] = []
    for extent in {extent for want in wants for extent in want}:
        reached.append(extent._replace(size_bytes=extent.size_bytes + _GAP_BYTES))  # small gaps are read, too
        if extent.size_bytes >= CUT_BYTES_MIN:  # it gets pieces of its own, which go straight to its place
            edges.update((extent.offset_bytes, extent.end_bytes))
    union = [one._replace(size_bytes=one.size_bytes - _GAP_BYTES) for one in merged(reached)]
    cuts = sorted(edges)
    queues: dict[int, list[Piece]] = {}
    for part, holder in zip(parts, holders, strict=True):
        queue = queues.setdefault(holder, [])
        for extent in part.extents:
            for shared in overlaps(extent, union):
                low, high = shared.offset_bytes, shared.end_bytes
                inner = cuts[bisect.bisect_right(cuts, low) : bisect.bisect_left(cuts, high)]
                for start, end in zip([low, *inner], [*inner, high], strict=True):
                    queue += [
                        Piece(holder, part.rank, at, min(piece_bytes, end - at))
                        for at in range(start, end, piece_bytes)
                    ]
    turns = zip_longest(*(queues[holder] for holder in sorted(queues)))
    return [piece for turn in turns for piece in turn if piece is not None]


def takers_of(pieces: Sequence[Piece], wants: Sequence[Sequence[Extent]]) -> list[list[int]]:
    """Return for each piece the ranks that want some of it, but its holder.

    Args:
        pieces: The pieces, which do not overlap.
        wants: For each rank, the extents of the file that it wants.
    """
    order = sorted(range(len(pieces)), key=lambda index: pieces[index].offset_bytes)
    starts = [pieces[index].offset_bytes for index in order]
    takers: list[list[int]] = [[] for _ in pieces]
    for rank, want in enumerate(wants):
        for extent in want:
            at = max(0, bisect.bisect_right(starts, extent.offset_bytes) - 1)
            for index in order[at : bisect.bisect_left(starts, extent.end_bytes)]:
                piece, known = pieces[index], takers[index]
                reaches = piece.offset_bytes + piece.size_bytes > extent.offset_bytes
                if reaches and piece.holder != rank and known[-1:] != [rank]:
                    known.append(rank)
    return takers


def structure_of(part: OpenPart, size_bytes: int, path: str) -> list[Extent]:
    """Return where a torch zip has its structure: all but its storages of 64 KiB and more.

    Args:
        part: The part of rank 0, which holds the whole structure.
        size_bytes: Length of the file.
        path: The path of the file, for messages.

    Raises:
        FormatError: It is no torch zip, or is damaged, or rank 0's part lacks some of the structure.
    """
    directory = torch_zip.read_directory(part.read_small, size_bytes, path=path)
    large = [
        Extent(entry.data_offset_bytes, entry.size_bytes)
        for entry in directory.entries.values()
        if entry.name.startswith("data/") and entry.size_bytes >= _STRUCTURE_BYTES
    ]
    structure = without(Extent(0, size_bytes), merged(large))
    for extent in structure:
        if sum(one.size_bytes for one in part.map.within(*extent)) != extent.size_bytes:
            raise FormatError(
                "a storage of less than 64 KiB is cut, or lies in the part of a rank that is not the first",
                path=path,
                offset_bytes=extent.offset_bytes,
            )
    return structure


class PartedSource(CheckpointSource):
    """A file in parts, opened: its structure is in memory, an exchange reads the rest.

    Args:
        path: The name that the file would have.
        fd: A descriptor of the file in memory; this object closes it.
        exchange: Reads the rest.
    """

    def __init__(self, path: str, fd: int, exchange: PartsExchange) -> None:
        self._exchange = exchange
        super().__init__(path, fd)

    def open_whole(self) -> BinaryIO:
        """Read the whole file into memory, and open it there: stock torch.load is to read it."""
        self._exchange.complete(self.fd)
        return super().open_whole()


class PartsExchange:
    """Reads a file in parts together with the other ranks, as a `reader.Read`, until all of them are done.

    Args:
        reader: The rounds of this load.
        path: The name that the file would have, for messages.
        own: The parts that this rank sees.
        size_bytes: Length of the file.
        with_structure: The file is a torch zip, whose structure all ranks get. Without it, only extents are read.
        whole_path: The path of the whole file, where this rank has one: it reads from there, for itself and for others.

    All ranks make one at the same time.

    Raises:
        FormatError: The parts do not make up the file, or the structure of the file is damaged.
        PeerError: Another rank has failed.
    """

    def __init__(
        self,
        reader: SharedReader,
        path: str,
        own: Sequence[FoundPart],
        size_bytes: int,
        *,
        with_structure: bool = True,
        whole_path: str | None = None,
    ) -> None:
        self._reader = reader
        self.path = path
        self._size_bytes = size_bytes
        self._stack = reader.stack
        self._open: dict[int, OpenPart] = {}
        self._engine = "auto"
        self._sizes: dict[int, int] = {}  # of what was read, by offset
        self._carrier = torch.device("cpu")
        if "cpu:" not in dist.get_backend_config(reader.group):
            accelerator = torch.accelerator.current_accelerator()
            self._carrier = accelerator if accelerator is not None else self._carrier
        self._agree({found.part.rank: found for found in own})
        self._structure = ExtentMap([])
        self.fd = self._share_structure() if with_structure else -1
        if whole_path is not None:
            os.close(self.fd)
            self.fd = open_regular(whole_path)
            self._structure = ExtentMap([Extent(0, size_bytes)])
        reader.serve = self._serve

    def _agree(self, own: dict[int, FoundPart]) -> None:
        """Choose the holder of each part, and learn what lies in it."""
        seen = [set(told or ()) for _, told in self._reader.say("parts", sorted(own))]
        load = [0] * len(seen)
        chosen: dict[int, int] = {}
        for rank in sorted(set().union(*seen)):
            holder = min((one for one in range(len(seen)) if rank in seen[one]), key=lambda one: (load[one], one))
            load[holder] += 1
            chosen[rank] = holder
        mine = [own[rank] for rank in chosen if chosen[rank] == self._reader.rank]
        described = [(found.part, found.author) for found in mine]
        told = [one for _, said in self._reader.say("extents", described) for one in said or ()]
        self.parts: list[Part] = sorted((part for part, _ in told), key=lambda part: part.rank)
        self._authors = {part.rank: author for part, author in told}
        self._holders = [chosen[part.rank] for part in self.parts]
        require_whole(self._size_bytes, self.parts, self.path)
        for found in mine:
            opened = OpenPart(found.path, found.part.extents)
            self._stack.callback(opened.close)
            self._open[found.part.rank] = opened

    def _share_structure(self) -> int:
        """Return a file in memory, of the whole length, that has the structure and holes."""
        first = self._open.get(self.parts[0].rank)  # rank 0 wrote all that is not cut
        extents = None if first is None else structure_of(first, self._size_bytes, self.path)
        heard = self._reader.say("structure", extents)
        holder = next(rank for rank, (_, told) in enumerate(heard) if told is not None)
        self._structure = ExtentMap(heard[holder][1])
        fd = os.memfd_create("fastpersist", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, self._size_bytes)
            for offset_bytes, size_bytes in self._structure.extents:
                for at in range(offset_bytes, offset_bytes + size_bytes, _PIECE_BYTES):
                    length_bytes = min(_PIECE_BYTES, offset_bytes + size_bytes - at)
                    data = b"" if first is None else first.read_small(at, length_bytes)
                    os.pwrite(fd, data, at)
            self._broadcast_structure(fd, holder)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def _broadcast_structure(self, fd: int, holder: int) -> None:
        """Broadcast the bytes of the structure, many small extents at a time."""
        at = 0
        while at < self._structure.size_bytes:
            size_bytes = min(_PIECE_BYTES, self._structure.size_bytes - at)
            buffer = torch.empty(size_bytes, dtype=torch.uint8)
            memory = _memory(buffer)
            places = self._structure.belonging(at, size_bytes)
            if self._reader.rank == holder:
                done_bytes = 0
                for offset_bytes, length_bytes in places:
                    memory[done_bytes : done_bytes + length_bytes] = os.pread(fd, length_bytes, offset_bytes)
                    done_bytes += length_bytes
            with self._reader.collective():
                self._bring(buffer, holder)
            if self._reader.rank != holder:
                done_bytes = 0
                for offset_bytes, length_bytes in places:
                    os.pwrite(fd, memory[done_bytes : done_bytes + length_bytes], offset_bytes)
                    done_bytes += length_bytes
            at += size_bytes

    # --- reading

    def source(self) -> PartedSource:
        """Open the file; once."""
        return PartedSource(self.path, self.fd, self)

    def with_authors(self, error: CorruptionError) -> CorruptionError:
        """Return an error of the file that also tells in which parts the damage lies, and which ranks wrote them."""
        if error.offset_bytes is None:
            return error
        size_bytes = self._sizes.get(error.offset_bytes, 1)
        found = [part.rank for part in self.parts if ExtentMap(part.extents).within(error.offset_bytes, size_bytes)]
        told = "; ".join(f"{part_name(os.path.basename(self.path), rank)}: {self._authors[rank]}" for rank in found)
        return type(error)(f"{error.message} ({told})", path=error.path, offset_bytes=error.offset_bytes)

    def __call__(self, fd: int, path: str, extents: Extents, *, engine: str = "auto") -> ReadResult:
        """Read extents together with the other ranks.

        Args: as in `read_extents`.

        Raises:
            PeerError: Another rank has failed, or is gone.
            ConfigError, UnsupportedError, StorageError: As in `read_extents`.
        """
        places = [Extent(*place) for place in extents.places()]
        self._engine = engine
        self._sizes.update(places)
        here = [index for index in range(len(places)) if self._is_here(places[index])]
        there = sorted(set(range(len(places))).difference(here))
        crcs = [0] * len(places)
        if here:
            local = extents.parts(ByteRange(index, 0, places[index].size_bytes) for index in here)
            for index, crc in zip(here, read_extents(fd, path, local).crcs, strict=True):
                crcs[index] = crc
        wanted = sorted({places[index] for index in there if places[index].size_bytes})
        heard = self._reader.say(WANT, flat(wanted))
        taking = _Taking(extents, there)
        self._exchange([told if stage == WANT else None for stage, told in heard], taking)
        for index, crc in taking.crcs().items():
            crcs[index] = crc
        return ReadResult(crcs, "exchange")

    def _is_here(self, place: Extent) -> bool:
        return self._structure.within(*place) == [place]

    def complete(self, fd: int) -> None:
        """Read all that is missing into the file in memory."""
        for hole in without(Extent(0, self._size_bytes), self._structure.extents):
            for at in range(hole.offset_bytes, hole.end_bytes, 1 << 30):
                extents = Extents()
                extents.add_pushed(at, min(1 << 30, hole.end_bytes - at), writing_to(fd, at), with_crc=False)
                self(fd, self.path, extents)

    def _serve(self, told: list[Any]) -> None:
        if any(one is not None for one in told):
            self._exchange(told, _Taking(Extents(), []))

    def _exchange(self, told: Sequence[bytes | None], taking: _Taking) -> None:
        """Read and send what the ranks want; on all of them. Then hear whether all of it could be read.

        Raises:
            PeerError: Another rank has failed, or is gone.
            ConfigError, UnsupportedError, StorageError: As in `read_extents`, on the rank that could not read.
        """
        wants = [_unflat(one) for one in told]
        pieces = cut_pieces(wants, self.parts, self._holders)
        taking.plan(pieces)
        takers = takers_of(pieces, wants)
        rank = self._reader.rank
        own = [index for index, piece in enumerate(pieces) if piece.holder == rank]
        reading: dict[int, tuple[torch.Tensor, Future[None]]] = {}
        errors: list[BaseException] = []
        with ThreadPoolExecutor(1, thread_name_prefix="fastpersist-parts") as pool:

            def read_ahead(number: int) -> None:
                if number < len(own):
                    index = own[number]
                    buffer = taking.buffer_for(index)
                    reading[index] = (buffer, pool.submit(self._read_piece, pieces[index], buffer))

            read_ahead(0)
            turns: Counter[int] = Counter()
            met = 0
            for index, piece in enumerate(pieces):
                if turns[piece.holder] == met + _TURNS:  # the first one to come so far, since they take turns
                    met += _TURNS
                    self._meet(errors)
                turns[piece.holder] += 1
                if rank != piece.holder and rank not in takers[index] and len(takers[index]) < 2:
                    continue  # others send it to each other
                if piece.holder == rank:
                    read_ahead(bisect.bisect_right(own, index))
                    buffer, read = reading.pop(index)
                    try:
                        read.result()
                    except Exception as error:  # noqa: BLE001 - raised when all ranks have got what they wait for
                        errors.append(error)
                else:
                    buffer = taking.buffer_for(index)
                if takers[index]:
                    with self._reader.collective():
                        self._bring(buffer, piece.holder, takers[index])
                if not errors:
                    try:
                        taking.take(index, buffer)
                    except Exception as error:  # noqa: BLE001 - as above
                        errors.append(error)
        self._meet(errors)

    def _meet(self, errors: Sequence[BaseException]) -> None:
        """Learn whether all ranks could read their pieces so far, or report that this rank could not."""
        if errors:
            raise errors[0]
        self._reader.say("exchanged", None)

    def _read_piece(self, piece: Piece, buffer: torch.Tensor) -> None:
        part = self._open[piece.part]
        extents = Extents()
        place = part.map.place_of(piece.offset_bytes)
        extents.add_memory(place, piece.size_bytes, buffer.data_ptr(), buffer, with_crc=False)
        read_extents(part.fd, part.path, extents, engine=self._engine)

    def _bring(self, memory: torch.Tensor, holder: int, takers: Sequence[int] = ()) -> None:
        """Send what the holder has to the one taker; without takers, or with several, to all ranks."""
        carried = memory if self._carrier.type == "cpu" else memory.to(self._carrier)
        group = self._reader.group
        if len(takers) != 1:
            dist.broadcast(carried, group=group, group_src=holder)
        elif self._reader.rank == holder:
            dist.send(carried, group=group, group_dst=takers[0])
        else:
            dist.recv(carried, group=group, group_src=holder)
        if carried is not memory:
            memory.copy_(carried)


class _Taking:
    """What one rank takes of the pieces that are broadcast.

    Args:
        extents: The extents that the rank reads.
        wanted: The indices of the extents that it takes from pieces.
    """

    def __init__(self, extents: Extents, wanted: Sequence[int]) -> None:
        self._extents = extents
        self._places = extents.places()
        self._wanted = wanted
        self._poll = counted(None)
        self._targets: dict[int, list[tuple[int, int, int, int]]] = {}
        self._runs: dict[int, list[tuple[int, int, int]]] = {}
        self._pieces: Sequence[Piece] = ()
        self._done_bytes = 0
        self._longest_bytes = 0
        self._spare: list[torch.Tensor] = []
        self._lent: dict[int, torch.Tensor] = {}

    def plan(self, pieces: Sequence[Piece]) -> None:
        """Find what the extents take of each piece."""
        self._pieces = pieces
        self._longest_bytes = max((piece.size_bytes for piece in pieces), default=0)
        order = sorted(range(len(pieces)), key=lambda index: pieces[index].offset_bytes)
        starts = [pieces[index].offset_bytes for index in order]
        for extent in self._wanted:
            offset_bytes, size_bytes = self._places[extent]
            at = max(0, bisect.bisect_right(starts, offset_bytes) - 1)
            while at < len(order) and starts[at] < offset_bytes + size_bytes:
                piece = pieces[order[at]]
                low = max(offset_bytes, piece.offset_bytes)
                high = min(offset_bytes + size_bytes, piece.offset_bytes + piece.size_bytes)
                if low < high:
                    target = (extent, low - offset_bytes, low - piece.offset_bytes, high - low)
                    self._targets.setdefault(order[at], []).append(target)
                at += 1

    def buffer_for(self, index: int) -> torch.Tensor:
        """Return memory for a piece: its destination, if that is one place in host memory."""
        size_bytes = self._pieces[index].size_bytes
        targets = self._targets.get(index, [])
        if len(targets) == 1 and targets[0][3] == size_bytes:
            extent, from_bytes, _, _ = targets[0]
            memory = self._extents.host_memory(extent)
            if memory is not None:
                return memory[from_bytes : from_bytes + size_bytes]
        # Reused for the next piece: new memory costs as much time as the disk.
        staging = self._spare.pop() if self._spare else torch.empty(self._longest_bytes, dtype=torch.uint8)
        self._lent[index] = staging
        return staging[:size_bytes]

    def take(self, index: int, buffer: torch.Tensor) -> None:
        """Copy a piece to its destinations."""
        for extent, from_bytes, at, size_bytes in self._targets.get(index, ()):
            data = buffer[at : at + size_bytes]
            if self._extents.wants_crc(extent):
                self._runs.setdefault(extent, []).append((from_bytes, size_bytes, _native.crc32(_memory(data))))
            memory = self._extents.host_memory(extent)
            if memory is None or memory.data_ptr() + from_bytes != data.data_ptr():
                self._extents.bring(extent, from_bytes, data)
            self._done_bytes += size_bytes
        if index in self._lent:
            self._spare.append(self._lent.pop(index))
        if self._poll is not None:
            self._poll(self._done_bytes)

    def crcs(self) -> dict[int, int]:
        """Return the CRC of each extent for which one was asked."""
        found = {}
        for extent, runs in self._runs.items():
            crc = _native.combine_runs(runs, self._places[extent][1])
            if crc is None:
                raise InternalError("an extent was not covered by the pieces of an exchange")
            found[extent] = crc
        return found


def _memory(data: torch.Tensor) -> memoryview:
    array_of_it: Any = data.numpy()
    return memoryview(array_of_it)


def _unflat(data: bytes | None) -> list[Extent]:
    numbers = array.array("Q", data or b"")
    return [Extent(*pair) for pair in zip(numbers[::2], numbers[1::2], strict=True)]


def writing_to(fd: int, from_bytes: int) -> Push:
    """Return a function that writes the bytes of an extent to a file in memory, from an offset on."""

    def push(offset_bytes: int, data: torch.Tensor) -> None:
        memory = _memory(data)
        done_bytes = 0
        while done_bytes < len(memory):
            done_bytes += os.pwrite(fd, memory[done_bytes:], from_bytes + offset_bytes + done_bytes)

    return push
