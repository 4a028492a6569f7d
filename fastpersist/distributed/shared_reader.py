"""Loads one file on all ranks of a process group: divides the reading, and makes a failure on one rank fail all.

A `SharedReader` takes the place of `read_extents` in a load. Every rank loads by itself, with its own objects. Each
read of a load is a *round*: first a collective, on the caller's thread, in which each rank says what it is about to
read. A rank that has failed reports that in the next round instead; a rank that is done says so in each round until all
are done. So all ranks take part in the same number of rounds, whatever each of them does (reads more often, reads in
another way, leaves the file to stock torch.load). No rank waits for one that has given up. Leaving the reader is the
last agreement: it returns on all ranks, or raises on all.

There are three ways to read. All ranks choose the same way, from the reports of all:

- *ahead*: the ranks of a node share a page cache. Each reads everything through it, window by window, and has its share
  of the next window read ahead. Every byte is read once per node, and no rank waits for another.
- *alone*: each rank reads everything by itself: if it is the only one on its node, if the page cache already has most
  of the file, or if an engine was named.
- *divide*: only CRCs are wanted, so each rank reads its share and sends the CRCs.

`fastpersist bench ranks DIR --load-ways` measures them in turn. With 1 GiB in 64 tensors, 2 cores, gloo, ext4 on a
virtual disk (seconds until the last rank has the object, smallest of 5):

                     ahead   alone
    2 ranks, cold     0.50    0.71
    4 ranks, cold     0.62    1.45
    2 ranks, warm     0.14    0.15
    4 ranks, warm     0.27    0.30

Reading ahead costs CPU time. While other programs kept both cores busy, *alone* was faster with 2 ranks (medians, cold:
0.73 s against 1.07 s), on a disk that serves the same bytes to several readers nearly as fast as to one.

Ranks do not send bytes to each other. Two ranks in network namespaces, joined at 1 GB/s, took 2.18 s to read half
of the file each and to broadcast it by gloo, and 1.01 s to read all of it (medians of 9, in turn, 2026-11-23); 2.61 s
and 2.00 s where the disk gave both together 1 GiB/s (medians of 6).

Files, formats and objects are left to the load (`unpickle`, `fill_tensors`, `restore`).
"""

from __future__ import annotations

import array
import contextlib
import hashlib
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch.distributed as dist

from fastpersist import _native
from fastpersist.commit.filesystem import storage_errors
from fastpersist.config import BLOCK_BYTES
from fastpersist.distributed.messages import error_as_json, error_from_json
from fastpersist.distributed.partition import CUT_BYTES_MIN, combined_crcs
from fastpersist.distributed.peers import loopback_place, rank_in
from fastpersist.errors import (
    AgreementTimeoutError,
    CoordinationError,
    FastPersistError,
    InternalError,
    PeerError,
)
from fastpersist.formats.byte_ranges import ByteRange, Extent, merged
from fastpersist.transfer.engine_selection import require_engine
from fastpersist.transfer.reader import Extents, Read, ReadResult, read_extents

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["WANT", "SharedReader", "flat", "reader_for"]

_log = logging.getLogger("fastpersist")

_WINDOW_BYTES = 256 << 20
"""How far the ranks read ahead: enough to keep the disk busy, without the whole file in the page cache."""

_GAP_BYTES = 256 << 10
_END_BYTES = 64 << 10
_SAMPLE_BYTES = 512
_SAMPLE_COUNT = 64

WANT = "want"
"""The stage in which ranks tell what they want to read of a file in parts."""

UNKNOWN_RANK = -1
"""PeerError.rank where the process group does not say which rank it lost."""


@dataclass(frozen=True, slots=True)
class _Said:
    """What a rank tells in a round.

    Attributes:
        stage: "read", "compare", "shared", "done", or "failed"; or a caller's own stage, with `told`.
        path: The file that the rank reads.
        place: The rank's kernel, and the file's device and inode: ranks with the same place share cached pages.
        size_bytes: Length of the file.
        layout: A digest of the places of all extents.
        only_crcs: The rank wants CRCs only.
        any_engine: The caller has named no engine.
        sample: In stage "compare", a digest of samples of the file.
        crcs: In stage "shared", the CRC of each part that this rank has read.
        told: The message of a caller's own stage (`exchange`).
        error_text: In stage "failed", class and message of the error.
        error: In stage "failed", what the error can be rebuilt from, if it is one of ours.
    """

    stage: str
    path: str = ""
    place: tuple[str, int, int] = ("", 0, 0)
    size_bytes: int = 0
    layout: bytes = b""
    only_crcs: bool = False
    any_engine: bool = False
    sample: bytes = b""
    crcs: tuple[int, ...] = ()
    told: Any = None
    error_text: str = ""
    error: str = ""


class _Way(NamedTuple):
    """How to read; for "ahead", which share of each window is this rank's, and how many shares there are."""

    name: str
    turn: int = 0
    turn_count: int = 1


@contextmanager
def reader_for(process_group: ProcessGroup | None, subject: str) -> Iterator[Read]:
    """Give a load what it reads with: a SharedReader, or `read_extents` without a process group."""
    if process_group is None:
        yield read_extents
        return
    with SharedReader(process_group, subject) as read:
        yield read


class SharedReader:
    """Reads extents as `read_extents` does, together with the other ranks. A context manager around a whole load.

    All ranks of the group enter it, and load the same file. All leave it in the same way: if one rank fails, it raises
    its own error, and all others raise PeerError, from that rank's error if it is one of ours. Targets may then be
    partly filled on all ranks. The process group's timeout limits how long ranks wait for each other. When a rank dies,
    `rank` of the PeerError is -1 if the group does not say which.

    Args:
        process_group: A group with any backend; the caller's thread takes part in its collectives.
        subject: What is loaded, for messages: a path, or "step 100".
        way: For tests: "ahead" or "alone" instead of the fastest.

    Attributes:
        group: The process group of the ranks.
        rank: The rank of this process.
        count: How many ranks there are.
        first_failure: After a failure that all ranks know of: the lowest rank that failed, and its error if it is one
            of ours, else None. It is the same on all ranks, so all decide alike what to do next.
        serve: Called with what each rank wants; broadcasts what only this rank can read (`exchange`).
        stack: Closed when all ranks are done.

    Raises:
        ConfigError: This process is not in the group.
    """

    def __init__(self, process_group: ProcessGroup, subject: str = "a file", *, way: str = "auto") -> None:
        self.group = process_group
        self.rank = rank_in(process_group)
        self.count = dist.get_world_size(process_group)
        self._subject = subject
        self._way = way
        self._compared = False  # whether the ranks have found that they read the same file
        self._over = self.count == 1  # there are no more rounds
        self.first_failure: tuple[int, FastPersistError | None] | None = None
        self.serve: Callable[[list[Any]], None] | None = None
        self.stack = contextlib.ExitStack()

    def __enter__(self) -> SharedReader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        with self.stack:
            if error is None and not self._over:
                try:
                    self.wait_for_all("done")
                except BaseException as caught:
                    self._fail(caught)
                    raise
            elif error is not None:
                self._fail(error)
            self._over = True

    def _fail(self, error: BaseException) -> None:
        """Tell the other ranks, unless the rounds have ended; this rank raises its own error in any case."""
        if not self._over:
            with contextlib.suppress(Exception):
                self._say(_Said("failed", error_text=f"{type(error).__name__}: {error}", error=error_as_json(error)))
            self._over = True

    def wait_for_all(self, stage: str, told: Any = None) -> list[Any]:
        """Repeat a stage in each round until all ranks are at it, since others may still read; return what each tells.

        Raises:
            PeerError: Another rank has failed, or is gone.
        """
        while True:
            heard = self._say(_Said(stage, told=told))
            if all(said.stage == stage for said in heard):
                return [said.told for said in heard]
            if self.serve is not None:
                self.serve([said.told if said.stage == WANT else None for said in heard])

    def say(self, stage: str, told: Any) -> list[tuple[str, Any]]:
        """Tell something in a round of its own; return the stage of each rank, and what it tells.

        Raises:
            PeerError: Another rank has failed, or is gone.
        """
        return [(said.stage, said.told) for said in self._say(_Said(stage, told=told))]

    def __call__(self, fd: int, path: str, extents: Extents, *, engine: str = "auto") -> ReadResult:
        """Read extents together with the other ranks; without extents, only take part in a round.

        Args: as in `read_extents`.

        Raises:
            PeerError: Another rank has failed, or is gone.
            CoordinationError: The ranks read different files.
            ConfigError, UnsupportedError, StorageError: As in `read_extents`.
        """
        if self.count == 1:
            return read_extents(fd, path, extents, engine=engine)
        way = self._agreed_way(fd, path, extents, engine)
        _log.debug("rank %d of %d reads %s: %s", self.rank, self.count, path, way.name)
        if way.name == "divide":
            return self._divide(fd, path, extents, engine)
        if way.name == "ahead":
            return _read_ahead(fd, path, extents, way)
        return read_extents(fd, path, extents, engine=engine)

    # --- agreeing

    def _say(self, own: _Said) -> list[_Said]:
        """Take part in a round: tell all ranks something, and return what each tells.

        Raises:
            PeerError: Another rank has failed, and this one has not; or a rank is gone.
        """
        if self._over:
            raise CoordinationError(f"loading {self._subject} together has ended already")
        heard: list[Any] = [None] * self.count
        with self.collective():
            dist.all_gather_object(heard, own, group=self.group)
        failed = [rank for rank, said in enumerate(heard) if said.stage == "failed"]
        if failed:
            self._over = True
            first = failed[0]
            error = error_from_json(heard[first].error)
            self.first_failure = (first, error)
            if own.stage != "failed":
                raise PeerError(
                    f"rank {first} failed while loading {self._subject}: {heard[first].error_text}",
                    rank=first,
                    subject=self._subject,
                ) from error
        return heard

    @contextmanager
    def collective(self) -> Iterator[None]:
        """Run a collective. None can follow one that failed or was interrupted: the ranks are out of step.

        Raises:
            PeerError: The collective failed.
        """
        self._over = True
        try:
            yield
        except Exception as error:
            rank = 1 - self.rank if self.count == 2 else UNKNOWN_RANK
            who = f"rank {rank} is" if self.count == 2 else "another rank is"
            kind = AgreementTimeoutError if "timed out" in str(error).lower() else PeerError
            raise kind(
                f"{who} gone or silent while loading {self._subject}: {type(error).__name__}: {error}",
                rank=rank,
                subject=self._subject,
            ) from error
        self._over = False

    def _agreed_way(self, fd: int, path: str, extents: Extents, engine: str) -> _Way:
        places = extents.places()
        with storage_errors("looking at", path):
            status = os.fstat(fd)
        own = _Said(
            "read",
            path,
            place=(loopback_place()[0], status.st_dev, status.st_ino),
            size_bytes=status.st_size,
            layout=hashlib.blake2b(flat(sorted(places)), digest_size=16).digest(),
            only_crcs=len(extents) > 0 and extents.keeps_nothing(),
            any_engine=require_engine(engine) == "auto",
        )
        heard = self._say(own)
        readers = [said for said in heard if said.stage == "read"]
        same_wishes = len(readers) == self.count and len({said.layout for said in readers}) == 1
        one_place = len({said.place for said in readers}) == 1
        divided = self._way == "auto" and same_wishes and all(said.only_crcs for said in readers)
        if len(readers) == self.count and not self._compared and (divided or not one_place):
            self._compare(fd, path, readers)
        if divided:
            return _Way("divide")
        sharers = [rank for rank, said in enumerate(heard) if said.stage == "read" and said.place == own.place]
        is_warm = 2 * _native.cached_bytes(fd) > status.st_size
        if self._way == "ahead" or (self._way == "auto" and own.any_engine and len(sharers) > 1 and not is_warm):
            return _Way("ahead", sharers.index(self.rank), len(sharers))
        return _Way("alone")

    def _compare(self, fd: int, path: str, readers: Sequence[_Said]) -> None:
        """Refuse to load different files: parts of two files would make a mixture.

        Raises:
            CoordinationError: The ranks read different files.
        """
        size_bytes = readers[self.rank].size_bytes
        heard = self._say(_Said("compare", path, size_bytes=size_bytes, sample=_sample(fd, path, size_bytes)))
        if len({said.sample for said in heard}) > 1:
            self._over = True  # all ranks notice this, and raise
            different = next(rank for rank, said in enumerate(heard) if said.sample != heard[0].sample)
            raise CoordinationError(
                f"the ranks load different files: {heard[0].path} of {heard[0].size_bytes} bytes on rank 0, "
                f"{heard[different].path} of {heard[different].size_bytes} bytes and other content on rank {different}"
            )
        self._compared = True

    def _divide(self, fd: int, path: str, extents: Extents, engine: str) -> ReadResult:
        """Read this rank's share for its CRCs, and learn those of the others."""
        places = extents.places()
        shares = cut_places(places, self.count)
        result = read_extents(fd, path, extents.parts(shares[self.rank]), engine=engine)
        read: list[tuple[ByteRange, int]] = []
        for share, said in zip(shares, self._say(_Said("shared", path, crcs=tuple(result.crcs))), strict=True):
            if len(share) != len(said.crcs):
                raise InternalError(f"the ranks divide {path} differently")
            read += zip(share, said.crcs, strict=True)
        return ReadResult(combined_crcs([size_bytes for _, size_bytes in places], read), result.engine)


# --------------------------------------------------------------------------------------------- reading ahead


def _read_ahead(fd: int, path: str, extents: Extents, way: _Way) -> ReadResult:
    """Read everything through the page cache, and have the kernel read this rank's share of the next window into it."""
    places = extents.places()
    sizes = [size_bytes for _, size_bytes in places]
    windows = cut_places(places, max(1, -(-sum(sizes) // _WINDOW_BYTES)))
    read: list[tuple[ByteRange, int]] = []
    used = ""

    def ahead(window: list[ByteRange]) -> None:
        found = [(places[part.source][0] + part.from_bytes, part.size_bytes) for part in window]
        wanted = []
        for share in cut_places(found, way.turn_count)[way.turn]:
            start_bytes = found[share.source][0] + share.from_bytes
            wanted.append(Extent(start_bytes, share.size_bytes + _GAP_BYTES))  # what lies close is read at once
        for one in merged(wanted):
            with contextlib.suppress(OSError):  # it is advice
                os.posix_fadvise(fd, one.offset_bytes, one.size_bytes - _GAP_BYTES, os.POSIX_FADV_WILLNEED)

    ahead(windows[0])
    for number, window in enumerate(windows):
        if number + 1 < len(windows):
            ahead(windows[number + 1])
        result = read_extents(fd, path, extents.parts(window), engine="threads-buffered")
        read += zip(window, result.crcs, strict=True)
        used = result.engine or used
    return ReadResult(combined_crcs(sizes, read), used)


# --------------------------------------------------------------------------------------------- parts


def cut_places(places: Sequence[tuple[int, int]], count: int) -> list[list[ByteRange]]:
    """Divide extents into shares of about as many bytes, in file order; only large ones are cut, between blocks.

    Args:
        places: For each extent, its offset in the file and its length; the index is the source in the result.
        count: How many shares; some may be empty.
    """
    shares: list[list[ByteRange]] = [[] for _ in range(count)]
    total_bytes = sum(size_bytes for _, size_bytes in places)
    number = 0
    done_bytes = 0
    for source in sorted(range(len(places)), key=places.__getitem__):
        offset_bytes, size_bytes = places[source]
        from_bytes = 0
        while from_bytes < size_bytes:
            is_last = number == count - 1
            room_bytes = total_bytes * (number + 1) // count - done_bytes
            taken_bytes = size_bytes - from_bytes
            if taken_bytes > room_bytes and not is_last and size_bytes >= CUT_BYTES_MIN:
                start_bytes = offset_bytes + from_bytes
                taken_bytes = max(0, (start_bytes + room_bytes) // BLOCK_BYTES * BLOCK_BYTES - start_bytes)
            if taken_bytes:
                shares[number].append(ByteRange(source, from_bytes, taken_bytes))
                from_bytes += taken_bytes
                done_bytes += taken_bytes
            if not is_last and (not taken_bytes or taken_bytes >= room_bytes):
                number += 1
    return shares


# --------------------------------------------------------------------------------------------- what a rank can say


def flat(places: Sequence[tuple[int, int]]) -> bytes:
    """Return offsets and lengths as bytes, eight for each number."""
    return array.array("Q", [number for place in places for number in place]).tobytes()


def _sample(fd: int, path: str, size_bytes: int) -> bytes:
    """Digest both ends of a file, where its structure and CRCs lie, and samples in between."""
    steps = [size_bytes * number // _SAMPLE_COUNT for number in range(1, _SAMPLE_COUNT)]
    wanted = [(0, _END_BYTES), (max(0, size_bytes - _END_BYTES), _END_BYTES)]
    wanted += [(offset_bytes, _SAMPLE_BYTES) for offset_bytes in steps]
    digest = hashlib.blake2b(str(size_bytes).encode(), digest_size=16)
    with storage_errors("reading", path):
        again = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)  # this one without O_DIRECT
        try:
            for offset_bytes, length_bytes in wanted:
                digest.update(os.pread(again, length_bytes, offset_bytes))
        finally:
            os.close(again)
    return digest.digest()
