"""Publishes a save in all node-local stores, rank 0's store last.

`formats.split_manifest` defines what lies in a store; `detection` has found the stores. When all parts are durable, and
each rank has told its own files:

    coordinator → followers   commit     the content of the manifests, and the lengths of the small files that each
                                         store gets
    coordinator → firsts      …          the bytes of these files, in pieces, to the first rank of each other store
    followers → coordinator   published  the first rank of each store has written its manifest and renamed its directory
    coordinator → followers   end        rank 0 has renamed its own: the step is committed
                       or     undo       rank 0 could not: the other stores take back what they have published, and the
                                         failure of the save follows

So a step that rank 0's store has is whole in all stores. A save that died between the renames leaves no committed step
in the other stores: rank 0's store does not have it, loads skip it, and the next save of that step replaces it. Older
steps are removed after the end only, and other stores count only steps that rank 0's has. Where a step was replaced,
they keep the old directory under a hidden name until the end; `split_step` finds it there. The next save sweeps it. If
that save is killed between the renames, too, the steps before it remain.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastpersist.commit.filesystem import filesystem, storage_errors
from fastpersist.commit.removal import remove_directory, remove_replaced
from fastpersist.commit.step_listing import candidate_steps
from fastpersist.distributed.messages import decoded
from fastpersist.distributed.node_local.detection import (
    Say,
    StoreMap,
    Stores,
    StoreSeeker,
    find_stores,
    find_stores_for_producer,
)
from fastpersist.distributed.sessions import Session
from fastpersist.errors import CoordinationError, FastPersistError, PeerError
from fastpersist.formats.byte_ranges import Extent
from fastpersist.formats.manifest import FileEntry, encode_manifest, writer_of
from fastpersist.formats.split_manifest import (
    COPY_NAME,
    PARTS_NAME,
    Part,
    PartsRecord,
    SplitFile,
    Store,
    encode_parts,
    part_name,
)
from fastpersist.saving.directory_files import check_lengths, manifest_now, write_small
from fastpersist.saving.directory_save import Publication

__all__ = ["CoordinatorStores", "FollowerStore", "SplitShares"]

_log = logging.getLogger("fastpersist")

_PIECE_BYTES = 16 << 20  # the most bytes of a file in one message
_TOLD_STATS = ("bytes", "stall_s", "plan_s", "write_s", "sync_s", "engine")


@dataclass(frozen=True, slots=True)
class SplitShares:
    """What the ranks have written of a file that lies in parts.

    Attributes:
        name: The name of the file.
        size_bytes: The length of the file.
        crc32: The CRC-32 of the whole file; None without checksums.
        extents: For each rank, where the bytes of its part belong in the file.
        crcs: For each rank, the CRC-32 of its part; None without checksums.
    """

    name: str
    size_bytes: int
    crc32: int | None
    extents: Mapping[int, Sequence[Extent]]
    crcs: Mapping[int, int | None]

    def entry(self, rank: int) -> FileEntry:
        """Return the manifest's entry of a rank's part."""
        size_bytes = sum(extent.size_bytes for extent in self.extents[rank])
        return FileEntry(part_name(self.name, rank), size_bytes, self.crcs[rank])


class CoordinatorStores:
    """The stores of one save, on the coordinator. Where there is one store, it does nothing and sends nothing.

    Args:
        known: What earlier saves have found; None if all ranks need the same file system.
        session: The session with the followers.

    Attributes:
        found: The stores, once they are known and if there are several.
    """

    def __init__(self, known: Stores | None, session: Session) -> None:
        self.found: StoreMap | None = None
        self._known = known
        self._session = session
        self._token = secrets.token_hex(16)
        self._files: list[SplitShares] = []
        self._whole: list[FileEntry] = []  # of which other stores have copies
        self._own_names: set[str] = set()  # of the own files of all ranks
        self._own_entries: dict[int, list[FileEntry]] = {}  # by rank, of other stores
        self._common: dict[str, bytes] = {}  # by name, small files of rank 0 that each store gets

    # --- the stores

    def may_be_several(self) -> bool:
        """Tell whether there are several stores, as far as it is known: if not known, the ranks have to be asked."""
        return self._known is not None and not self._known.are_one()

    def find(self, say: Say, directory: str, *, overwrite: bool) -> None:
        """Find the stores, once in a save; see `find_stores`."""
        if self._known is not None and self.found is None and self.may_be_several():
            self.found = find_stores(say, self._known, directory, overwrite=overwrite)

    def find_for_producer(self, label: str, find: Callable[[Say], dict[str, Any]]) -> None:
        """Find the stores before a producer writes; see `find_stores_for_producer`."""
        if self._known is not None:
            find_stores_for_producer(self._session, label, find)

    def forget(self) -> None:
        """Forget the stores: the save has failed, and its directory is removed."""
        if self._known is not None:
            self._known.forget()

    def go(self) -> dict[str, Any]:
        """Return what tells the followers where they write, for messages with the path of rank 0's directory."""
        return {} if self.found is None else {"split": self.found.go()}

    @property
    def copies(self) -> bool:
        """Whether each store gets a copy."""
        return self._known is not None and self._known.node_local == "copies"

    # --- what lies in them

    def take_shares(self, shares: SplitShares) -> list[FileEntry]:
        """Note the parts of a file; return those of followers that lie in rank 0's store."""
        self._files.append(shares)
        return [shares.entry(rank) for rank in shares.extents if rank and self._is_here(rank)]

    def take_whole(self, entry: FileEntry) -> None:
        """Note a whole file, of which the other stores, if there are, have copies."""
        self._whole.append(entry)

    def note_own(self, rank: int, name: str) -> None:
        """Note that a rank has a file of its own."""
        self._own_names.add(name)

    def takes(self, entry: FileEntry) -> bool:
        """Note a file that a producer has written; tell whether it lies in rank 0's store."""
        rank = writer_of(entry.name)
        if rank is not None:
            return self.takes_own(rank, entry)
        if self.found is not None:
            self._common[entry.name] = b""
        return True

    def takes_own(self, rank: int, entry: FileEntry) -> bool:
        """Note a file of a rank's own; tell whether it lies in rank 0's store."""
        self.note_own(rank, entry.name)
        if self._is_here(rank):
            return True
        self._own_entries.setdefault(rank, []).append(entry)
        return False

    def record(self, directory: str) -> bytes | None:
        """Read the files that each store gets, and return the record of rank 0's; None where there is one with no copy.

        Args:
            directory: Rank 0's pending directory.
        """
        if self.found is None:
            return self._record_of(self._one_store(), 0) if self.copies else None
        for name in self._common:
            path = os.path.join(directory, name)
            with storage_errors("reading", path), open(path, "rb") as file:
                self._common[name] = file.read()
        return self._record_of(self.found, 0)

    def _is_here(self, rank: int) -> bool:
        return self.found is None or self.found.is_first(rank)

    def _one_store(self) -> StoreMap:
        hosts = [] if self._known is None else self._known.hosts
        return StoreMap([0] * self._session.count, hosts, "", {})

    def _record_of(self, found: StoreMap, first_rank: int) -> bytes:
        firsts = sorted(set(found.first_ranks))
        stores = tuple(Store(tuple(found.ranks_of(first)), found.hosts[first]) for first in firsts)
        ranks = found.ranks_of(first_rank)
        files = tuple(
            SplitFile(
                file.name,
                file.size_bytes,
                file.crc32,
                tuple(Part(rank, tuple(file.extents[rank])) for rank in ranks if rank in file.extents),
            )
            for file in self._files
        )
        own_names = tuple(sorted(self._own_names)) if self.copies else ()
        return encode_parts(PartsRecord(self._token, stores, firsts.index(first_rank), files, own_names))

    def _entries_of(self, ranks: Sequence[int]) -> list[list[object]]:
        found = [file.entry(rank) for file in self._files for rank in ranks if rank in file.extents]
        found += [entry for rank in ranks for entry in self._own_entries.get(rank, ())]
        found += self._whole
        return [[entry.name, entry.size_bytes, entry.crc32] for entry in found]

    # --- commit, published, end or undo: the coordinator's end, and `FollowerStore.end` the followers'

    def commit(self, publication: Publication) -> None:
        """Have the other stores publish; return when they have.

        Raises:
            PeerError, CoordinationError: As by the session.
        """
        found = self.found
        if found is None:
            return
        messages = [b"{}"] * len(found.first_ranks)
        for rank in found.names:
            messages[rank] = json.dumps(
                {
                    "step": publication.step,
                    "metrics": dict(publication.metrics),
                    "commit_number": publication.number,
                    "durable": publication.durable,
                    "rank_count": len(found.first_ranks),
                    "entries": self._entries_of(found.ranks_of(rank)),
                    "record": self._record_of(found, rank).decode(),
                    "record_name": COPY_NAME if self.copies else PARTS_NAME,
                    "common": {name: len(data) for name, data in self._common.items()},
                }
            ).encode()
        self._session.answer_each(messages)
        for data in self._common.values():  # `.metadata` may be longer than a message
            for start in range(0, len(data), _PIECE_BYTES):
                self._session.answer_some(found.names, data[start : start + _PIECE_BYTES])
        self._session.gather(b"")

    def undo(self, path: str) -> None:
        """Let the other stores undo their publication, unless rank 0's directory is visible after all."""
        if self.found is None:
            return
        with suppress(FastPersistError, OSError):
            visible = Path(path, COPY_NAME if self.copies else PARTS_NAME)
            if not visible.exists() or self._token not in visible.read_text(encoding="utf-8", errors="replace"):
                self._session.answer(json.dumps({"undo": True}).encode())

    def end(self, path: str, publication: Publication) -> bytes:
        """Return rank 0's last message: for other stores the metrics, and of parts the steps that rank 0 has."""
        if self.found is None:
            return b"{}"
        said: dict[str, object] = {"metrics": dict(publication.metrics)}
        if self.copies:
            said["number"] = publication.number
        else:
            said["steps"] = sorted(candidate_steps(os.path.dirname(path)))
        return json.dumps(said).encode()


class FollowerStore(StoreSeeker):
    """A follower's store in one save: its first rank publishes it when rank 0 says so."""

    def __init__(self, path: str, rank: int, stores: Stores | None) -> None:
        super().__init__(path, rank, stores)
        self._replaced: str | None = None
        self._published = False

    def end(self, session: Session, stats: Mapping[str, Any], check: Callable[[], None]) -> bytes:
        """Publish this store where there are several, and return rank 0's last message: it has published, too.

        Args:
            session: The session with rank 0.
            stats: The figures of the save, for the manifest.
            check: Called before this store is published: raises if what this rank has written may be torn.

        Raises:
            ConfigError, StorageError: As `PendingDirectory.publish`.
            CoordinationError: A file that rank 0 sends has another length than it has told.
            PeerError: A rank has failed; after *undo*, rank 0.
        """
        said = session.hear()
        if not self.is_split:
            return said
        check()
        self.publish(decoded(said, 0), stats, session.hear)
        session.tell(b"")
        said = session.hear()
        if decoded(said, 0).get("undo"):
            self.undo()
            said = session.hear()  # raises why
        return said

    def publish(self, commit: Mapping[str, Any], stats: Mapping[str, Any], hear: Callable[[], bytes]) -> None:
        """Make this store's directory visible; on its first rank.

        Args:
            commit: The message *commit* from rank 0.
            stats: The figures of the save, for the manifest.
            hear: Returns rank 0's next message.

        Raises:
            ConfigError, StorageError: As `PendingDirectory.publish`.
            CoordinationError: A file that rank 0 sends has another length than it has told.
            PeerError: As the session does.
        """
        pending = self._pending
        if pending is None:
            return
        durable = bool(commit["durable"])
        small = {str(name): _joined(hear, int(size_bytes)) for name, size_bytes in commit["common"].items()}
        small[str(commit["record_name"])] = str(commit["record"]).encode()
        entries = [FileEntry(str(name), int(size), crc) for name, size, crc in commit["entries"]]
        check_lengths(pending.path, self._path, entries)
        entries += [write_small(pending, name, data, durable=durable) for name, data in small.items()]
        manifest = manifest_now(
            entries,
            step=commit["step"],
            metrics=commit["metrics"],
            rank_count=int(commit["rank_count"]),
            stats={name: value for name, value in stats.items() if name in _TOLD_STATS},
            commit_number=commit["commit_number"],
        )
        self._replaced = pending.publish(
            encode_manifest(manifest),
            durable=durable,
            overwrite=self._may_replace(),
            keep_replaced=True,  # until rank 0 has published, the replaced step is the committed one
        )
        self._published = True

    def finish(self) -> None:
        """Remove the replaced directory: rank 0 has published."""
        if self._replaced is not None:
            remove_replaced(self._replaced)
            self._replaced = None

    def undo(self) -> None:
        """Undo this rank's publication: rank 0 has not published, so it was never committed. May be called again."""
        if not self._published:
            return
        self._published = False
        try:
            if self._replaced is not None:
                filesystem().exchange(self._replaced, self._path)
                filesystem().sync_directory(os.path.dirname(self._path))
                remove_replaced(self._replaced)
            else:
                remove_directory(self._path)
        except FastPersistError as error:
            _log.warning("%s was never committed, and stays: %s", self._path, error)

    def abort(self, error: BaseException | None = None) -> None:
        """Remove this rank's pending directory, or undo its publication. May be called again.

        Args:
            error: Why the save has failed. Where a rank other than rank 0 has failed, rank 0 has not published, so a
                published store is undone. Rank 0 reports its own failure by *undo*.
        """
        if self._published and isinstance(error, PeerError) and error.rank > 0:
            self.undo()
        elif self._pending is not None:
            self._pending.abort()


def _joined(hear: Callable[[], bytes], size_bytes: int) -> bytes:
    """Receive the pieces of a file, and join them."""
    pieces: list[bytes] = []
    while (left_bytes := size_bytes - sum(map(len, pieces))) > 0:
        pieces.append(hear())
        if not 0 < len(pieces[-1]) <= left_bytes:
            raise CoordinationError("rank 0 sends a file that is not as long as it has said")
    return b"".join(pieces)
