"""A step in several stores, in parts or as copies: which parts the ranks see, and whether they are the whole step.

Each copy is the whole step. If the ranks see copies of two saves, the later save counts. Each rank reads the copy that
it sees; a rank that sees none gets the bytes from a rank that does.

`exchange` reads the parts; `checkpointer.step_loader` chooses the step.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from typing import Any, NamedTuple

from fastpersist import _native
from fastpersist.commit.filesystem import storage_errors
from fastpersist.commit.locks import hold_for_reading
from fastpersist.commit.removal import replaced_directories
from fastpersist.commit.step_listing import check_files, read_manifest
from fastpersist.distributed.node_local.exchange import PartsExchange
from fastpersist.distributed.shared_reader import SharedReader
from fastpersist.errors import (
    ChecksumError,
    CoordinationError,
    CorruptionError,
    FastPersistError,
    FormatError,
    UnsupportedError,
)
from fastpersist.formats.byte_ranges import Extent
from fastpersist.formats.manifest import DCP_METADATA_NAME, CheckpointManifest, rank_file_name, writer_of
from fastpersist.formats.split_manifest import COPY_NAME, Part, PartsRecord, Store
from fastpersist.loading.checkpoint_file import CheckpointSource
from fastpersist.loading.part_files import FoundPart, file_in_parts, read_record
from fastpersist.transfer.reader import Read

__all__ = ["StepParts", "refuse_alone"]


_log = logging.getLogger("fastpersist")


class _Seen(NamedTuple):
    """A rank's report on the step that it sees; token "" if it sees none.

    Attributes:
        own_ranks: For a copy: the ranks that have saved files of their own, one bit for each rank, as ranks are many.
        number: For a copy: its commit number.
        counts: For a copy: it is known to be committed in all stores.
    """

    token: str
    store: int
    stores: tuple[Store, ...]
    size_bytes: int
    files: tuple[str, ...]
    rank_count: int
    is_copy: bool = False
    own_ranks: int = 0
    number: int = 0
    counts: bool = False


_RANK_COUNT_MAX = 1 << 20
_NOTHING = _Seen("", -1, (), 0, (), 0)


class _Found(NamedTuple):
    """A directory with parts of the step, or a copy; manifest and record are None if there is none.

    Attributes:
        open_copy: Opens a file of a copy; None for parts.
        counts: The copy is known to be committed in all stores.
    """

    path: str
    manifest: CheckpointManifest | None
    record: PartsRecord | None
    open_copy: Callable[[str], CheckpointSource] | None = None
    counts: bool = False

    def seen(self) -> _Seen:
        """Return what this rank tells the others of it.

        Raises:
            FormatError: More than one file lies in parts.
        """
        if self.manifest is None or self.record is None:
            return _NOTHING
        if len(self.record.files) > 1:
            raise FormatError(f"{len(self.record.files)} files of it lie in parts, not one", path=self.path)
        count = self.manifest.host.get("rank_count", 1)
        is_copy = self.open_copy is not None
        own_ranks = {rank for name in self.record.own_files if (rank := writer_of(name)) is not None}
        return _Seen(
            self.record.token,
            self.record.store,
            self.record.stores,
            sum(file.size_bytes for file in (self.manifest.files if is_copy else self.record.files)),
            tuple(entry.name for entry in self.manifest.files),
            count if isinstance(count, int) else 1,
            is_copy,
            sum(1 << rank for rank in own_ranks if rank < _RANK_COUNT_MAX),
            self.manifest.commit_number or 0,
            self.counts,
        )


def _hidden(path: str, stack: ExitStack) -> Iterator[_Found]:
    """Yield whole directories that a save has replaced here and that still exist; hold them until the stack ends."""
    for hidden in replaced_directories(path):
        with suppress(FastPersistError):
            stack.enter_context(hold_for_reading(hidden))
            manifest = read_manifest(hidden)
            check_files(hidden, manifest)
            record = read_record(hidden, manifest)
            copy = read_record(hidden, manifest, COPY_NAME)
            if record is not None:
                yield _Found(hidden, manifest, record)
            elif copy is not None:
                yield _Found(hidden, manifest, copy, _opening_in(hidden), counts=True)


def _opening_in(directory: str) -> Callable[[str], CheckpointSource]:
    return lambda name: CheckpointSource(os.path.join(directory, name))


def _of_save(token: str, by_rank: Sequence[Sequence[_Seen]]) -> list[_Seen]:
    """Return what each rank sees of one save."""
    return [next((seen for seen in several if seen.token == token), _NOTHING) for several in by_rank]


def _problem(seen: Sequence[_Seen]) -> str | None:
    """Return why what the ranks see is not one whole step; None if it is."""
    there = [one for one in seen if one.token]
    if len({one.token for one in there}) > 1:
        return "the ranks see parts of two saves of this step: a save of it died while it was being made visible"
    first = there[0]
    found = {one.store for one in there}
    missing = [number for number in range(len(first.stores)) if number not in found]
    if not missing:
        return None
    record = PartsRecord(first.token, first.stores, first.store, ())
    return (
        f"no rank sees the parts of {record.describe(missing)}: the step was never committed, or that host takes no "
        "part in this load. Bring them back, or make one file with `fastpersist merge`"
    )


def refuse_alone(path: str, record: PartsRecord) -> None:
    """Refuse to load a step in parts by one process.

    Raises:
        UnsupportedError: Always.
    """
    others = [number for number in range(len(record.stores)) if number != record.store]
    raise UnsupportedError(
        f"{path} holds only a part of the checkpoint: the parts of {record.describe(others)} are elsewhere, for the "
        "ranks that saved it share no file system. Load it with all of them (Checkpointer(process_group=)), or make "
        "one file of it: fastpersist merge DIR DIR… state.pt"
    )


class StepParts:
    """A step of which some ranks see parts; all ranks of a load make one, at the same time.

    Args:
        reader: The rounds of the load.
        path: The step's directory, below this rank's root.
        manifest: The manifest of this directory; None if this rank sees no such step.
        record: The record of the parts in it, or of the copy; None if this rank sees none.
        open_copy: Opens a file of the copy; None for parts.
        counts: The copy is known to be committed in all stores.

    Attributes:
        exists: Whether some rank sees parts of the step.
        reader: The rounds of the load.

    Raises:
        FormatError: Parts are missing, or are of two saves.
        CoordinationError: Some ranks see a step that is whole.
        PeerError: Another rank has failed.
    """

    def __init__(
        self,
        reader: SharedReader,
        path: str,
        manifest: CheckpointManifest | None,
        record: PartsRecord | None,
        open_copy: Callable[[str], CheckpointSource] | None = None,
        *,
        counts: bool = False,
    ) -> None:
        self.reader = reader
        self._found = _Found(path, manifest, record, open_copy, counts)
        heard = reader.say("step", self._found.seen())
        self._seen = [told if stage == "step" else _NOTHING for stage, told in heard]
        self.exists = any(seen.token for seen in self._seen)
        if not self.exists:
            return
        if whole := [rank for rank, (stage, _) in enumerate(heard) if stage != "step"]:
            raise CoordinationError(
                f"rank {whole[0]} sees all of the step in one directory, and other ranks see a part of it: {path}"
            )
        self._is_copied = any(seen.is_copy for seen in self._seen)
        if self._is_copied:
            self._choose_copy(path)
            return
        if _problem(self._seen) is not None:
            self._look_for_what_was_replaced(path)
        if problem := _problem(self._seen):
            raise FormatError(problem, path=path)

    def _choose_copy(self, path: str) -> None:
        """Choose the save whose copies are read, the same on all ranks, and say where this rank reads."""
        hidden: list[_Found] = []
        by_rank = [[seen] for seen in self._seen]
        if len({seen.token for seen in self._seen if seen.token}) > 1 or not any(seen.counts for seen in self._seen):
            hidden, by_rank = self._with_hidden(path)
        counted = [seen for several in by_rank for seen in several if seen.is_copy and seen.counts]
        if not counted:
            raise FormatError(
                "its save died before all nodes had it, and the nodes that had it first are not here: it was never "
                "committed",
                path=path,
            )
        best = max(counted, key=lambda seen: (seen.number, seen.token))
        own = self._seen[self.reader.rank]
        self._seen = _of_save(best.token, by_rank)
        ours = [one for one in (self._found, *hidden) if one.seen().token == best.token]
        if ours:
            self._found = ours[0]
            _log.info("%s: rank %d reads the copy of its own node", path, self.reader.rank)
            return
        self._found = _Found(path, None, None)
        why = "is of another save of this step" if own.token else "is not there"
        holder = next(rank for rank, seen in enumerate(self._seen) if seen.token)
        _log.warning(
            "%s: the copy of the node of rank %d %s; the step comes from a copy of rank %d, saved on %s",
            path,
            self.reader.rank,
            why,
            holder,
            self._seen[holder].stores[self._seen[holder].store].host,
        )

    def _look_for_what_was_replaced(self, path: str) -> None:
        """Look for the step that was replaced, in hidden directories: the save that replaced it may have died."""
        hidden, by_rank = self._with_hidden(path)
        for token in dict.fromkeys(seen.token for several in by_rank for seen in several):
            chosen = _of_save(token, by_rank)
            if token and _problem(chosen) is None:
                self._seen = chosen
                own = chosen[self.reader.rank]
                self._found = next(
                    (one for one in (self._found, *hidden) if one.seen() == own), _Found(path, None, None)
                )
                return

    def _with_hidden(self, path: str) -> tuple[list[_Found], list[list[_Seen]]]:
        """Return this rank's hidden directories of the step, and by rank what it sees, the hidden ones last."""
        hidden = list(_hidden(path, self.reader.stack))
        heard = self.reader.say("replaced", [one.seen() for one in hidden])
        return hidden, [[one, *(told or ())] for one, (_, told) in zip(self._seen, heard, strict=True)]

    @property
    def are_shards(self) -> bool:
        """Whether it is a DCP checkpoint."""
        return any(DCP_METADATA_NAME in seen.files for seen in self._seen)

    @property
    def path(self) -> str:
        """The directory in which this rank sees parts, or would."""
        return self._found.path

    @property
    def manifest(self) -> CheckpointManifest | None:
        """Of that directory; None if this rank sees no part."""
        return self._found.manifest

    def own_turn(self) -> tuple[int, int]:
        """Return the place of this rank among those that see the same store, and how many they are."""
        own = self._seen[self.reader.rank].store
        alike = [rank for rank, seen in enumerate(self._seen) if seen.store == own]
        return alike.index(self.reader.rank), len(alike)

    def host_of(self, rank: int) -> str:
        """Return the host on which a rank has written."""
        stores = next(seen.stores for seen in self._seen if seen.token)
        return next((store.host for store in stores if rank in store.ranks), "an unknown host")

    @property
    def rank_count(self) -> int:
        """How many ranks have saved it."""
        return max(seen.rank_count for seen in self._seen)

    def load(self, name: str, load: Callable[[CheckpointSource, Read], Any]) -> Any:
        """Load the file that lies in parts, or of which there are copies.

        Args:
            name: The name that the file would have.
            load: Called with the open file, and with the function that reads it.

        Raises:
            CorruptionError: It is damaged; the message says which parts, and which ranks wrote them.
            Exception: What `load` raises.
        """
        if self._is_copied:
            return self._load_copy(name, load)
        own = []
        path, manifest, record, *_ = self._found
        if manifest is not None and record is not None:
            own = [part for file in record.files for part in file_in_parts(path, record, manifest, file)]
        size_bytes = max(seen.size_bytes for seen in self._seen)
        exchange = PartsExchange(self.reader, os.path.join(path, name), own, size_bytes)
        try:
            return load(exchange.source(), exchange)
        except CorruptionError as error:
            raise exchange.with_authors(error) from error

    def _load_copy(self, name: str, load: Callable[[CheckpointSource, Read], Any]) -> Any:
        path, manifest, record, open_copy, _ = self._found
        if open_copy is not None and all(seen.token for seen in self._seen):
            return load(open_copy(name), self.reader)
        own = []
        entry = None
        if manifest is not None and record is not None:
            entry = next(one for one in manifest.files if one.name == name)
            part = Part(0, (Extent(0, entry.size_bytes),))
            own = [FoundPart(os.path.join(path, name), entry, part, record.stores[record.store].host)]
        size_bytes = max(self.reader.wait_for_all("size", 0 if entry is None else entry.size_bytes))
        whole_path = None if entry is None else os.path.join(path, name)
        exchange = PartsExchange(self.reader, os.path.join(path, name), own, size_bytes, whole_path=whole_path)
        return load(exchange.source(), exchange)

    def own_names(self) -> set[str]:
        """Return the names of the ranks' own files, in all stores, also those that no rank sees."""
        names = {name for seen in self._seen for name in seen.files if name.startswith("rank-")}
        own_ranks = max(seen.own_ranks for seen in self._seen)
        return names.union(rank_file_name(rank) for rank in range(own_ranks.bit_length()) if own_ranks >> rank & 1)

    def _tell_of_lost(self, names: Sequence[str]) -> None:
        """Say which of these own files were saved, and are in no copy that a rank sees."""
        seen = {name for one in self._seen for name in one.files}
        if lost := sorted(self.own_names().intersection(names) - seen):
            hosts = {self.host_of(rank) for name in lost if (rank := writer_of(name)) is not None}
            _log.warning(
                "%s: no rank sees the copy with %s, saved on %s; it is left out",
                self._found.path,
                ", ".join(lost[:8]) + (f" and {len(lost) - 8} more" if len(lost) > 8 else ""),
                ", ".join(sorted(hosts)),
            )

    def own_file(self, name: str) -> CheckpointSource | None:
        """Open a rank's own file, whichever rank sees it; None if no rank does. All ranks call this, each for its own.

        Raises:
            PeerError: Another rank could not read what it sees.
            StorageError, ChecksumError: This rank could not read its file.
        """
        self._tell_of_lost([name])
        count = self.reader.count
        sought = [rank for rank in range(count) if rank_file_name(rank) not in self._seen[rank].files]
        holders = {
            rank: holder
            for rank in sought
            for holder in range(count)
            if rank_file_name(rank) in self._seen[holder].files
        }
        path = os.path.join(self._found.path, name)
        if holders:  # some ranks now run on another node than when they saved
            sent = {rank: self._read(rank_file_name(rank)) for rank in holders if holders[rank] == self.reader.rank}
            told = self.reader.wait_for_all("own", sent)
            if self.reader.rank in holders:
                return _in_memory(path, told[holders[self.reader.rank]][self.reader.rank])
        return CheckpointSource(path) if name in self._seen[self.reader.rank].files else None

    def all_own_files(self, names: Sequence[str], wanted: bool) -> Iterator[CheckpointSource | None]:
        """Open the own files of all ranks that have saved; all ranks call this, and each says whether it wants them.

        Args:
            names: The names of the files, the same on all ranks.
            wanted: Whether this rank reads them.

        Returns:
            One for each name, opened as they are taken; None where no rank sees the file. Nothing if this rank wants
            none.

        Raises:
            PeerError, StorageError, ChecksumError: As in `own_file`.
        """
        if not any(self.reader.wait_for_all("wanted", wanted)):
            return iter(())
        if wanted:
            self._tell_of_lost(names)
        holders = {
            name: next((rank for rank, seen in enumerate(self._seen) if name in seen.files), -1) for name in names
        }
        own = {name: self._read(name) for name in names if holders[name] == self.reader.rank}
        told = self.reader.wait_for_all("own", own)
        return (
            None if holders[name] < 0 else _in_memory(os.path.join(self._found.path, name), told[holders[name]][name])
            for name in (names if wanted else ())
        )

    def _read(self, name: str) -> bytes:
        path = os.path.join(self._found.path, name)
        with storage_errors("reading", path), open(path, "rb") as file:
            data = file.read()
        entries = () if self._found.manifest is None else self._found.manifest.files
        crc = next((entry.crc32 for entry in entries if entry.name == name), None)
        if crc is not None and _native.crc32(data) != crc:
            raise ChecksumError("it is damaged: its CRC is not that of the manifest", path=path, offset_bytes=0)
        return data


def _in_memory(path: str, data: bytes) -> CheckpointSource:
    fd = os.memfd_create("fastpersist", os.MFD_CLOEXEC)
    with open(fd, "wb", closefd=False) as file:
        file.write(data)
    return CheckpointSource(path, fd)
