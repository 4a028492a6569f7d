"""Ranks that share no file system: who sees whose files is found out, and each file system gets its part of a save.

A *store* is a file system as the ranks see it: those that find one another's files below their own root. Its *first
rank* is the lowest of them, which makes the pending directory there and publishes it; rank 0 is that of store 0. What
lies in each store is formats/parts.py's. Nothing is configured. The name of rank 0's pending directory is a token
that nobody can guess: whoever finds it below its own root shares its file system. In the session of a save, between
the plans and rank 0's *go* (`shared_file`):

    first → others   look    the name; ranks that do not find it make a pending directory of their own
    others → first   seen    whether they do; the name of their own directory, and their host; or which directory above
                             their root is not there
    first → others   find    if some do not: the names of all those directories; the first that a rank finds, by rank,
                             is that of its store's first rank. The others remove theirs
    others → first   found   which rank that is

Where guests write (`file_producer`), there are no plans here: the others first say that they come, and hear *ready* at
the end, with what *go* says of stores.

A file system that is not mounted looks like one that is not shared. So directories above the root are made on a shared
file system only: where some ranks do not see what rank 0 has made, they must have been there on all of these ranks and
on rank 0, or the save fails, and rank 0 removes the directories that it has made above its root.

Rank 0 keeps the answer. If there is one store, it does not ask again: saves go their usual way, and a rank that does
not find what it should fails the save. If there are several, the first ranks are known and are asked to *look* only,
so that they make their directories. A save that failed makes rank 0 ask anew.

When all parts are durable, they become visible, rank 0's last:

    first → others   commit  what the manifests are to say, and how long the small files are that each store gets
    first → firsts   …       the bytes of these files, in pieces, to the first rank of each other store
    others → first   published; the first rank of each store has written its manifest and renamed its directory
    first → others   end     rank 0 has renamed its own. From here on the step is committed

So a step that rank 0's store has is whole in all stores. What a save that died between the renames has left in other
stores is no committed step: rank 0's store knows nothing of it, loads go back over it, and the next save of that step
replaces it. Older steps are removed after the end only, and other stores count only steps that rank 0's has. Where a
step was replaced, they keep the old directory until the end, under a hidden name; `split_step` finds it there. The next
save sweeps it: who was killed right there, and right there again, has the steps before it.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import platform
import secrets
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from fastpersist import _native
from fastpersist.commit.directory_commit import PendingDirectory
from fastpersist.commit.filesystem import filesystem, is_there, make_directories, storage_errors
from fastpersist.commit.locks import ROOT_LOCK_NAME
from fastpersist.commit.removal import remove_directory, remove_replaced
from fastpersist.distributed.coordination import Session
from fastpersist.distributed.peers import own_version
from fastpersist.errors import CoordinationError, FastPersistError, PeerError, StorageError
from fastpersist.formats.byte_ranges import Extent
from fastpersist.formats.manifest import CheckpointManifest, FileEntry, encode_manifest, writer_of
from fastpersist.formats.split_manifest import (
    PARTS_NAME,
    Part,
    PartsRecord,
    SplitFile,
    Store,
    encode_parts,
    part_name,
)

__all__ = ["PeerStore", "Split", "SplitShares", "Stores", "check_lengths", "find_stores", "manifest_now"]

_log = logging.getLogger("fastpersist")

_PIECE_BYTES = 16 << 20  # of one message
_TOLD_STATS = ("bytes", "stall_s", "plan_s", "write_s", "sync_s", "engine")


class Stores:
    """What is known of the file systems of a group of ranks, from one save to the next.

    Args:
        own_root: Makes the root of this rank and takes its lock; called on the first rank of a store that is not
            rank 0, on the thread that writes.

    Attributes:
        first_ranks: By rank, the first rank of its store; None while that is not known. On rank 0.
        hosts: By rank, the name of its host.
        made: The directories that this rank has made for its root: those above it, then the root.
    """

    def __init__(self, own_root: Callable[[], None]) -> None:
        self.own_root = own_root
        self.first_ranks: list[int] | None = None
        self.hosts: list[str] = []
        self.made: list[str] = []
        self._refused = False

    def are_one(self) -> bool:
        """Tell whether all ranks are known to see one file system."""
        return self.first_ranks is not None and not any(self.first_ranks)

    def forget(self) -> None:
        """Find out anew at the next save; a save has failed, and its directory is removed."""
        self.first_ranks = None
        if self._refused:
            self._refused = False
            self._unmake_root()

    def require_parents(self, absent: Mapping[int, str]) -> None:
        """Refuse file systems that are not shared where a directory above the root was not there: on rank 0.

        Args:
            absent: By rank, the highest such directory, of ranks that do not see rank 0's files.

        Raises:
            StorageError: There is one.
        """
        told = [f"rank {rank} on {self.hosts[rank]} has no {path}" for rank, path in sorted(absent.items())]
        if len(self.made) > 1:
            told.insert(0, f"rank 0 on {self.hosts[0]} had no {self.made[0]}")
            self._refused = True
        if told:
            raise StorageError(
                errno.ENOENT,
                f"the ranks do not see one another's files, and the directories above the root are not there on all of "
                f"them: {'; '.join(told)}. Is a file system not mounted there? If each host is to keep its own part of "
                "every step, make the directories above the root on all of them",
                absent[min(absent)] if absent else self.made[0],
            )

    def _unmake_root(self) -> None:
        """Remove what was made, or the next attempt would find it there and take this disk for the right one."""
        root = self.made[-1]
        with suppress(FastPersistError, OSError):
            if os.listdir(root) == [ROOT_LOCK_NAME]:  # else somebody has put something there
                filesystem().unlink(os.path.join(root, ROOT_LOCK_NAME))
                for directory in reversed(self.made):
                    filesystem().remove_directory(directory)


# ------------------------------------------------------------------------------------------- the first rank


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


@dataclass(slots=True)
class Split:
    """A save into several stores, as rank 0 knows it.

    Attributes:
        token: Of the save.
        first_ranks: By rank, the first rank of its store.
        hosts: By rank.
        name: Of rank 0's pending directory.
        names: By first rank, that of each other store's.
        files: Those that were written.
        own_entries: By rank, files of its own.
        common: By name, small files of rank 0 that each store gets.
    """

    token: str
    first_ranks: list[int]
    hosts: list[str]
    name: str
    names: dict[int, str]
    files: list[SplitShares] = field(default_factory=list)
    own_entries: dict[int, list[FileEntry]] = field(default_factory=dict)
    common: dict[str, bytes] = field(default_factory=dict)

    def takes(self, entry: FileEntry) -> bool:
        """Note a file that somebody has written; tell whether it lies in the first store."""
        rank = writer_of(entry.name)
        if rank is None:
            self.common[entry.name] = b""
            return True
        if not self.is_first(rank):
            self.own_entries.setdefault(rank, []).append(entry)
        return self.is_first(rank)

    def read_common(self, path: str) -> None:
        """Read what each store gets, from rank 0's pending directory."""
        for name in self.common:
            with storage_errors("reading", os.path.join(path, name)), open(os.path.join(path, name), "rb") as file:
                self.common[name] = file.read()

    def go(self) -> dict[str, Any]:
        """Return what the others are told of where they write."""
        names = {"0": self.name, **{str(rank): name for rank, name in self.names.items()}}
        return {"first_ranks": self.first_ranks, "names": names}

    def is_first(self, rank: int) -> bool:
        """Tell whether a rank is of the first store."""
        return self.first_ranks[rank] == 0

    def entries_of(self, first_rank: int) -> list[FileEntry]:
        """Return what the manifest of a store says of its ranks' files."""
        ranks = self._ranks_of(first_rank)
        found = [file.entry(rank) for file in self.files for rank in ranks if rank in file.extents]
        return found + [entry for rank in ranks for entry in self.own_entries.get(rank, ())]

    def record_of(self, first_rank: int) -> bytes:
        """Return the PARTS.json of a store."""
        firsts = sorted(set(self.first_ranks))
        stores = tuple(Store(tuple(self._ranks_of(first)), self.hosts[first]) for first in firsts)
        ranks = self._ranks_of(first_rank)
        files = tuple(
            SplitFile(
                file.name,
                file.size_bytes,
                file.crc32,
                tuple(Part(rank, tuple(file.extents[rank])) for rank in ranks if rank in file.extents),
            )
            for file in self.files
        )
        return encode_parts(PartsRecord(self.token, stores, firsts.index(first_rank), files))

    def commits(
        self, step: int | None, metrics: Mapping[str, float], commit_number: int | None, *, durable: bool
    ) -> list[bytes]:
        """Return what each rank is told when all parts are durable: something for the first rank of each store."""
        found = [b"{}"] * len(self.first_ranks)
        for rank in self.names:
            found[rank] = json.dumps(
                {
                    "step": step,
                    "metrics": dict(metrics),
                    "commit_number": commit_number,
                    "durable": durable,
                    "rank_count": len(self.first_ranks),
                    "entries": [[entry.name, entry.size_bytes, entry.crc32] for entry in self.entries_of(rank)],
                    "record": self.record_of(rank).decode(),
                    "common": {name: len(data) for name, data in self.common.items()},
                }
            ).encode()
        return found

    def send_common(self, session: Session) -> None:
        """Send what each store gets to their first ranks, behind `commits`; `.metadata` may be longer than a message.

        Raises:
            CoordinationError: As by the session.
        """
        for data in self.common.values():
            for start in range(0, len(data), _PIECE_BYTES):
                session.answer_some(self.names, data[start : start + _PIECE_BYTES])

    def let_others_undo(self, session: Session, path: str) -> None:
        """Rank 0 could not publish: tell the other stores, which have, unless it is visible all the same."""
        with suppress(FastPersistError, OSError):
            visible = Path(path, PARTS_NAME)
            if not visible.exists() or self.token not in visible.read_text(encoding="utf-8", errors="replace"):
                session.answer(json.dumps({"undo": True}).encode())

    def _ranks_of(self, first_rank: int) -> list[int]:
        return [rank for rank, first in enumerate(self.first_ranks) if first == first_rank]


def find_stores(
    say: Callable[[dict[str, Any]], list[dict[str, Any]]], known: Stores, directory: str, *, overwrite: bool
) -> Split | None:
    """Find out which ranks see one another's files; on rank 0, while the others are in `PeerStore.reply`.

    Args:
        say: Sends a message to all other ranks, and returns their answers by rank; what stands for this one is empty.
        known: What is known, and will be.
        directory: Rank 0's pending directory.
        overwrite: Other stores, too, may replace a checkpoint of that name.

    Returns:
        How the save is split; None where all ranks see one file system.

    Raises:
        StorageError: Some ranks see other file systems, and a directory above the root was not there.
        PeerError, CoordinationError: As the session does.
    """
    name = os.path.basename(directory)
    seen = say({"look": name, "first_ranks": known.first_ranks, "overwrite": overwrite})
    first_ranks = known.first_ranks
    names = {rank: str(one["name"]) for rank, one in enumerate(seen) if one.get("name")}
    absent = {rank: str(one["absent"]) for rank, one in enumerate(seen) if one.get("absent")}
    known.hosts = [socket.gethostname(), *(str(one.get("host", "?")) for one in seen[1:])]
    if names or absent:
        known.require_parents(absent)
    known.made = []  # what is there by now, is there for good
    if first_ranks is None:
        first_ranks = [0] * len(seen)
        if names:
            found = say({"find": {str(rank): names[rank] for rank in names}})
            first_ranks = [0, *(int(one["first"]) for one in found[1:])]
            if any(first_ranks[first] != first for first in first_ranks):
                raise CoordinationError(
                    f"the ranks do not agree on who sees whose files: by rank, the first of each is {first_ranks}"
                )
            names = {rank: names[rank] for rank in names if first_ranks[rank] == rank}
        known.first_ranks = first_ranks
        if names:
            _log.warning(
                "the ranks share no file system: there are %d, with the ranks %s first. Each gets its part of every "
                "checkpoint; load with process_group=, or make one file with `fastpersist merge`",
                1 + len(names),
                [0, *names],
            )
    if not names:
        return None
    return Split(secrets.token_hex(16), first_ranks, known.hosts, name, names)


# ------------------------------------------------------------------------------------------- the others


class PeerStore:
    """The store of a rank that is not rank 0, in one save. The thread that writes uses it.

    Args:
        path: The final name of the directory, below this rank's own root.
        rank: This rank.
        stores: Of its Checkpointer.
    """

    def __init__(self, path: str, rank: int, stores: Stores) -> None:
        self._path = os.path.abspath(path)
        self._rank = rank
        self._stores = stores
        self._pending: PendingDirectory | None = None
        self._overwrite = False
        self._replaced: str | None = None
        self._published = False
        self.is_split = False

    def reply(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Answer to `find_stores`.

        Raises:
            ConfigError, StorageError: No pending directory can be made here; or this rank sees other files than before.
        """
        if "find" in message:
            return {"first": self._find({int(rank): str(name) for rank, name in message["find"].items()})}
        sees = self._sees(str(message["look"]))
        first_ranks = message["first_ranks"]
        first = None if first_ranks is None else int(first_ranks[self._rank])
        if first is not None and sees != (first == 0):
            raise self._changed(0)
        absent = None
        if not sees and first in (None, self._rank):
            self._overwrite = bool(message["overwrite"])
            absent = _absent_above(os.path.dirname(self._path))
            if absent is None:
                self._make(own_root_first=first is not None)
        name = None if self._pending is None else os.path.basename(self._pending.path)
        return {"sees": sees, "name": name, "host": socket.gethostname(), "absent": absent}

    def directory(self, go: Mapping[str, Any]) -> str | None:
        """Return where this rank writes its parts and its own files; None where all see one file system.

        Raises:
            StorageError: It does not see the files of its store any more.
        """
        split = go.get("split")
        if split is None:
            self.abort()
            return None
        self.is_split = True
        first = int(split["first_ranks"][self._rank])
        name = os.path.basename(str(split["names"][str(first)]))
        if not self._sees(name):
            raise self._changed(first)
        return os.path.join(os.path.dirname(self._path), name)

    def publish(self, commit: Mapping[str, Any], stats: Mapping[str, Any], hear: Callable[[], bytes]) -> None:
        """Make this store's directory visible, on its first rank.

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

    def is_first(self) -> bool:
        """Tell whether this rank publishes for its store."""
        return self._pending is not None

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

    def _find(self, names: Mapping[int, str]) -> int:
        if self._pending is None:
            return 0
        first = next((rank for rank in sorted(names) if rank < self._rank and self._sees(names[rank])), self._rank)
        if first == self._rank:
            self._stores.own_root()
        else:
            self._pending.abort()
            self._pending = None
        return first

    def _make(self, *, own_root_first: bool) -> None:
        make_directories(os.path.dirname(self._path))
        if own_root_first:
            self._stores.own_root()
        self._pending = PendingDirectory.create(self._path, overwrite=self._may_replace())

    def _may_replace(self) -> bool:
        """Parts are nobody's without rank 0's: of a save that died, or of a step that is damaged there."""
        return self._overwrite or is_there(os.path.join(self._path, PARTS_NAME))

    def _sees(self, name: str) -> bool:
        # Asked for by its name: a listing may come from a cache that is older than the directory.
        return is_there(os.path.join(os.path.dirname(self._path), name))

    def _changed(self, first: int) -> StorageError:
        return StorageError(
            errno.ENOENT,
            f"cannot save {self._path}: rank {self._rank} does not see the same files of rank {first} as it did at the "
            "last save; has something been mounted? The next save finds out anew who sees whose files",
            self._path,
        )


def _joined(hear: Callable[[], bytes], size_bytes: int) -> bytes:
    """Hear the pieces of a file."""
    pieces: list[bytes] = []
    while (left_bytes := size_bytes - sum(map(len, pieces))) > 0:
        pieces.append(hear())
        if not 0 < len(pieces[-1]) <= left_bytes:
            raise CoordinationError("rank 0 sends a file that is not as long as it has said")
    return b"".join(pieces)


def _absent_above(root: str) -> str | None:
    """Return the highest directory above a root that is not there; None if all are."""
    absent = None
    above = os.path.dirname(os.path.realpath(root))
    while not is_there(above):
        absent, above = above, os.path.dirname(above)
    return absent


# ------------------------------------------------------------------------------------------- both


def write_small(pending: PendingDirectory, name: str, data: bytes, *, durable: bool) -> FileEntry:
    """Write a small file of a pending directory, and sync it."""
    path = os.path.join(pending.final_path, name)
    fd = pending.create_file(name)
    try:
        filesystem().write(fd, data, path)
        if durable:
            filesystem().sync(fd, path)
    finally:
        pending.close_file(fd)
    return FileEntry(name, len(data), _native.crc32(data))


def check_lengths(path: str, final_path: str, entries: Iterable[FileEntry]) -> None:
    """Check files that others have written, before they are published.

    Raises:
        StorageError: One is missing, or has another length.
    """
    for entry in entries:
        try:
            size_bytes = os.stat(os.path.join(path, entry.name)).st_size
        except OSError as error:
            told = f"cannot save {final_path}: {entry.name} cannot be read: {error.strerror}"
            raise StorageError(error.errno, told, final_path) from error
        if size_bytes != entry.size_bytes:
            told = f"{entry.name} has {size_bytes} bytes, and its writer wrote {entry.size_bytes}"
            raise StorageError(None, f"cannot save {final_path}: {told}", final_path)


def manifest_now(
    files: Iterable[FileEntry],
    *,
    step: int | None,
    metrics: Mapping[str, float],
    rank_count: int | None,
    stats: Mapping[str, float | int | str],
    commit_number: int | None = None,
) -> CheckpointManifest:
    """Return a manifest of files that this process has written just now.

    Args:
        files: What it lists.
        step: Of the training.
        metrics: Of the training.
        rank_count: How many ranks have saved, if several.
        stats: What it cost.
        commit_number: Its place among the steps of a root.
    """
    ranks = {} if rank_count is None else {"rank_count": rank_count}
    return CheckpointManifest(
        files=tuple(files),
        step=step,
        time_s=time.time(),
        metrics=dict(metrics),
        versions={"fastpersist": own_version(), "torch": torch.__version__, "python": platform.python_version()},
        host={"name": socket.gethostname(), "pid": os.getpid(), "kernel": platform.release(), **ranks},
        stats=dict(stats),
        commit_number=commit_number,
    )
