"""Ranks that share no file system: the parts of a save become visible in all stores, rank 0's last.

What lies in each store is `formats.split_manifest`'s; which stores there are, `detection` has found. When all parts
are durable, and each rank has told its own files:

    coordinator → followers   commit     what the manifests are to say, and how long the small files are that each
                                         store gets
    coordinator → firsts      …          the bytes of these files, in pieces, to the first rank of each other store
    followers → coordinator   published  the first rank of each store has written its manifest and renamed its directory
    coordinator → followers   end        rank 0 has renamed its own. From here on the step is committed
                       or     undo       rank 0 could not: the others take back what they have published, and the
                                         failure of the save follows

So a step that rank 0's store has is whole in all stores. What a save that died between the renames has left in other
stores is no committed step: rank 0's store knows nothing of it, loads go back over it, and the next save of that step
replaces it. Older steps are removed after the end only, and other stores count only steps that rank 0's has. Where a
step was replaced, they keep the old directory until the end, under a hidden name; `split_step` finds it there. The next
save sweeps it: who was killed right there, and right there again, has the steps before it.
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
    PARTS_NAME,
    Part,
    PartsRecord,
    SplitFile,
    Store,
    encode_parts,
    part_name,
)
from fastpersist.saving.directory_files import check_lengths, manifest_now, write_small
from fastpersist.saving.directory_save import Commit

__all__ = ["CoordinatorStores", "FollowerStore", "SplitShares"]

_log = logging.getLogger("fastpersist")

_PIECE_BYTES = 16 << 20  # of one message
_TOLD_STATS = ("bytes", "stall_s", "plan_s", "write_s", "sync_s", "engine")


@dataclass(frozen=True, slots=True)
class SplitShares:
    """What the ranks have written of a file that lies in parts.

    Attributes:
        name: Of the file.
        size_bytes: Its length.
        crc32: Of the whole file.
        extents: By rank, where its bytes belong.
        crcs: By rank, the CRC of its part.
    """

    name: str
    size_bytes: int
    crc32: int | None
    extents: Mapping[int, Sequence[Extent]]
    crcs: Mapping[int, int | None]

    def entry(self, rank: int) -> FileEntry:
        """Return what a manifest says of a rank's part."""
        size_bytes = sum(extent.size_bytes for extent in self.extents[rank])
        return FileEntry(part_name(self.name, rank), size_bytes, self.crcs[rank])


class CoordinatorStores:
    """The stores of one save, as rank 0 knows them. Where there is one, it notes nothing and tells nobody.

    Args:
        known: What is known of the file systems; None: all ranks need the same one.
        session: With the followers.

    Attributes:
        found: Which stores there are, once that is known and if there are several.
    """

    def __init__(self, known: Stores | None, session: Session) -> None:
        self.found: StoreMap | None = None
        self._known = known
        self._session = session
        self._token = secrets.token_hex(16)
        self._files: list[SplitShares] = []
        self._own_entries: dict[int, list[FileEntry]] = {}  # by rank, of other stores
        self._common: dict[str, bytes] = {}  # by name, small files of rank 0 that each store gets

    # --- which there are

    def may_be_several(self) -> bool:
        """Tell whether the ranks are to be asked before a file is written, or more than one store is found."""
        return self._known is not None and not self._known.are_one()

    def find(self, say: Say, directory: str, *, overwrite: bool) -> None:
        """Find out which stores there are, once in a save; see `find_stores`."""
        if self._known is not None and self.found is None and self.may_be_several():
            self.found = find_stores(say, self._known, directory, overwrite=overwrite)

    def find_for_producer(self, label: str, find: Callable[[Say], dict[str, Any]]) -> None:
        """Find out before a producer writes; see `find_stores_for_producer`."""
        if self._known is not None:
            find_stores_for_producer(self._session, label, find)

    def forget(self) -> None:
        """The save has failed, and its directory is removed: the next one finds out anew."""
        if self._known is not None:
            self._known.forget()

    def go(self) -> dict[str, Any]:
        """Return what the followers are told of where they write, for messages with the place of rank 0's directory."""
        return {} if self.found is None else {"split": self.found.go()}

    # --- what lies in them

    def take_shares(self, shares: SplitShares) -> list[FileEntry]:
        """Note what the ranks have written of a file; return the followers' parts that lie in rank 0's store."""
        self._files.append(shares)
        return [shares.entry(rank) for rank in shares.extents if rank and self._is_here(rank)]

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
        if self._is_here(rank):
            return True
        self._own_entries.setdefault(rank, []).append(entry)
        return False

    def record(self, directory: str) -> bytes | None:
        """Return the PARTS.json of rank 0's store, and read what each store gets; None where there is one store.

        Args:
            directory: Rank 0's pending one.
        """
        if self.found is None:
            return None
        for name in self._common:
            path = os.path.join(directory, name)
            with storage_errors("reading", path), open(path, "rb") as file:
                self._common[name] = file.read()
        return self._record_of(self.found, 0)

    def _is_here(self, rank: int) -> bool:
        return self.found is None or self.found.is_first(rank)

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
        return encode_parts(PartsRecord(self._token, stores, firsts.index(first_rank), files))

    def _entries_of(self, ranks: Sequence[int]) -> list[list[object]]:
        found = [file.entry(rank) for file in self._files for rank in ranks if rank in file.extents]
        found += [entry for rank in ranks for entry in self._own_entries.get(rank, ())]
        return [[entry.name, entry.size_bytes, entry.crc32] for entry in found]

    # --- commit, published, end or undo: the coordinator's end, and `FollowerStore.end` the followers'

    def commit(self, commit: Commit) -> None:
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
                    "step": commit.step,
                    "metrics": dict(commit.metrics),
                    "commit_number": commit.number,
                    "durable": commit.durable,
                    "rank_count": len(found.first_ranks),
                    "entries": self._entries_of(found.ranks_of(rank)),
                    "record": self._record_of(found, rank).decode(),
                    "common": {name: len(data) for name, data in self._common.items()},
                }
            ).encode()
        self._session.answer_each(messages)
        for data in self._common.values():  # `.metadata` may be longer than a message
            for start in range(0, len(data), _PIECE_BYTES):
                self._session.answer_some(found.names, data[start : start + _PIECE_BYTES])
        self._session.gather(b"")

    def undo(self, path: str) -> None:
        """Rank 0 could not publish: have the others take back what they have, unless it is visible all the same."""
        if self.found is None:
            return
        with suppress(FastPersistError, OSError):
            visible = Path(path, PARTS_NAME)
            if not visible.exists() or self._token not in visible.read_text(encoding="utf-8", errors="replace"):
                self._session.answer(json.dumps({"undo": True}).encode())

    def end(self, path: str, metrics: Mapping[str, float]) -> bytes:
        """Return how rank 0 says that it has published; to other stores also which steps it has, with which metrics."""
        if self.found is None:
            return b"{}"
        steps = sorted(candidate_steps(os.path.dirname(path)))
        return json.dumps({"metrics": dict(metrics), "steps": steps}).encode()


class FollowerStore(StoreSeeker):
    """A follower's store in one save: published there by its first rank, when rank 0 says so."""

    def __init__(self, path: str, rank: int, stores: Stores | None) -> None:
        super().__init__(path, rank, stores)
        self._replaced: str | None = None
        self._published = False

    def end(self, session: Session, stats: Mapping[str, Any], check: Callable[[], None]) -> bytes:
        """Publish, where there are several stores, and return rank 0's last word: it has published, too.

        Args:
            session: With rank 0.
            stats: For the manifest.
            check: Called before: raises if what this rank has written may be torn.

        Raises:
            ConfigError, StorageError: As `PendingDirectory.publish`.
            CoordinationError: Rank 0 sends something else than it has told.
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
            commit: What rank 0 tells.
            stats: For the manifest.
            hear: Returns what rank 0 tells next.

        Raises:
            ConfigError, StorageError: As `PendingDirectory.publish`.
            CoordinationError: Rank 0 sends something else than it has told.
            PeerError: As the session does.
        """
        pending = self._pending
        if pending is None:
            return
        durable = bool(commit["durable"])
        small = {str(name): _joined(hear, int(size_bytes)) for name, size_bytes in commit["common"].items()}
        small[PARTS_NAME] = str(commit["record"]).encode()
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
            keep_replaced=True,  # it is what is committed, until rank 0 has published
        )
        self._published = True

    def finish(self) -> None:
        """Rank 0 has published: remove what was replaced."""
        if self._replaced is not None:
            remove_replaced(self._replaced)
            self._replaced = None

    def undo(self) -> None:
        """Rank 0 has not published: what this rank has made visible was never committed. May be called again."""
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
        """Remove the pending directory, if it is this rank's. May be called again.

        Args:
            error: Why. If it is published here, and another rank than rank 0 has failed, rank 0 has not published:
                then that is undone. Of its own failure it has told, if it could.
        """
        if self._published and isinstance(error, PeerError) and error.rank > 0:
            self.undo()
        elif self._pending is not None:
            self._pending.abort()


def _joined(hear: Callable[[], bytes], size_bytes: int) -> bytes:
    """Hear the pieces of a file."""
    pieces: list[bytes] = []
    while (left_bytes := size_bytes - sum(map(len, pieces))) > 0:
        pieces.append(hear())
        if not 0 < len(pieces[-1]) <= left_bytes:
            raise CoordinationError("rank 0 sends a file that is not as long as it has said")
    return b"".join(pieces)
