"""Finds out which ranks see the same file system, and so where each rank writes: detection of node-local storage.

A *store* is a file system with the ranks that find one another's files on it, each below its own root. The *first rank*
of a store is its lowest. It makes the pending directory there and publishes it (`publishing`). The coordinator, rank 0,
is the first rank of store 0. Stores are detected, not configured: the name of the coordinator's pending directory
cannot be guessed, so a rank that finds it below its own root shares its file system. In the session of a save, between
the plans and *go* (`file_agreement`):

    coordinator → followers   look    this name; a follower that does not find it makes a pending directory of its own
    followers → coordinator   seen    whether it was found; the name of the follower's own directory, and its host; or
                                      which directory above its root does not exist
    coordinator → followers   find    if some did not find it: the names of all those directories. The first one, by
                                      rank, that a follower finds is that of its store's first rank. All other followers
                                      remove theirs
    followers → coordinator   found   which rank that is

If a producer writes the files, there are no plans before this. Then the followers first report that they have begun,
and get *ready* at the end, with the stores as in *go*.

A file system that is not mounted looks like one that is not shared. So unless the user has said what each node keeps
(`node_local`), several stores are an error: a follower that does not find the name makes nothing, and *seen* tells
where its root lies. With `node_local`, directories above the root may be made on a shared file system only: where some
ranks do not see what the coordinator has made, these directories must have existed on all of these ranks and on the
coordinator's. Else the save fails, and the coordinator removes those that it has made.

The coordinator remembers the answer. With one store it does not ask again: saves proceed as usual, and fail if a rank
does not find the coordinator's files. With several stores it only has the known first ranks *look*, so that they make
their directories. After a save that failed it asks again; with copies (`copies`) it asks once, before anything is
captured.
"""

from __future__ import annotations

import errno
import logging
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeAlias

from fastpersist.commit.directory_commit import PendingDirectory
from fastpersist.commit.filesystem import absolute_path, filesystem, is_there, make_directories, mount_of
from fastpersist.commit.locks import ROOT_LOCK_NAME
from fastpersist.distributed.file_agreement import ask, hear_all
from fastpersist.distributed.messages import decoded, encoded, named, preferring_failure_of_others
from fastpersist.distributed.sessions import Session
from fastpersist.errors import CoordinationError, FastPersistError, StorageError
from fastpersist.events.log import EVENTS_NAME
from fastpersist.formats.split_manifest import COPY_NAME, PARTS_NAME

__all__ = ["NodeLocal", "Say", "StoreMap", "StoreSeeker", "Stores", "find_stores", "find_stores_for_producer"]

_log = logging.getLogger("fastpersist")

_TOLD_COUNT = 16  # of hosts, in a message

NodeLocal: TypeAlias = Literal["parts", "copies"] | None
"""What to do if the ranks see several file systems: see `Checkpointer`."""

Say: TypeAlias = Callable[[dict[str, Any]], list[dict[str, Any]]]
"""Sends a message to all followers, and returns their answers by rank; that of this rank is empty."""


class Stores:
    """What is known of the file systems of a group of ranks, from one save to the next.

    Args:
        own_root: Makes the root of this rank and takes its lock; called on the first rank of each store but rank 0's,
            on the thread that writes.
        node_local: What to do if there are several: refuse (None), or keep a part or a copy of each step on each.

    Attributes:
        first_ranks: For each rank, the first rank of its store; None while that is not known. On the coordinator; with
            copies on all ranks.
        hosts: For each rank, the name of its host.
        made: The directories that this rank has made for its root: those above it, then the root.
    """

    def __init__(self, own_root: Callable[[], None], node_local: NodeLocal = None) -> None:
        self.own_root = own_root
        self.node_local = node_local
        self.first_ranks: list[int] | None = None
        self.hosts: list[str] = []
        self.made: list[str] = []
        self._refused = False

    def are_one(self) -> bool:
        """Tell whether all ranks are known to see one file system."""
        return self.first_ranks is not None and not any(self.first_ranks)

    def forget(self) -> None:
        """Ask again at the next save: a save has failed, and its directory is removed.

        With copies they are found once, because all ranks have to know them before they capture anything.
        """
        if self.node_local != "copies":
            self.first_ranks = None
        if self._refused:
            self._refused = False
            self._unmake_root()

    def require_parents(self, absent: Mapping[int, str]) -> None:
        """Refuse several stores if a directory above the root was missing somewhere; on the coordinator.

        Args:
            absent: For each rank that does not see rank 0's files, the highest such directory.

        Raises:
            StorageError: Such a directory was missing.
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

    def refuse_several(self, places: Mapping[int, str], own_place: str) -> None:
        """Refuse several stores, if there are; on the coordinator.

        Args:
            places: For each rank that does not see rank 0's files, what it sees at its root.
            own_place: What this rank sees at its root.

        Raises:
            StorageError: There are several stores.
        """
        if not places:
            return
        self._refused = bool(self.made)
        told: dict[tuple[str, str], list[int]] = {(self.hosts[0], own_place): [0]}
        for rank, place in sorted(places.items()):
            told.setdefault((self.hosts[rank], place), []).append(rank)
        lines = [f"{named(ranks)} on {host}: {place}" for (host, place), ranks in told.items()]
        more = [f"and {len(lines) - _TOLD_COUNT} more"] if len(lines) > _TOLD_COUNT else []
        raise StorageError(
            errno.ENOENT,
            "the ranks do not see one another's files, and with node_local=None all of them need one file system. What "
            f"they see: {'; '.join([*lines[:_TOLD_COUNT], *more])}. If a shared file system is not mounted there, "
            'mount it. If each node is to save to its own disk, choose node_local="parts", where each keeps a '
            'part of every step, or "copies", where each keeps all of it',
        )

    def _unmake_root(self) -> None:
        """Remove what this rank has made: the next attempt would take it for a mounted file system."""
        root = self.made[-1]
        with suppress(FastPersistError, OSError):
            found = os.listdir(root)
            if {ROOT_LOCK_NAME, EVENTS_NAME}.issuperset(found):  # else other files are there by now
                for name in found:
                    filesystem().unlink(os.path.join(root, name))
                for directory in reversed(self.made):
                    filesystem().remove_directory(directory)


@dataclass(frozen=True, slots=True)
class StoreMap:
    """The stores of a save, where there are several.

    Attributes:
        first_ranks: For each rank, the first rank of its store.
        hosts: For each rank, the name of its host.
        name: The name of rank 0's pending directory.
        names: The names of the pending directories of all other stores, by the store's first rank.
    """

    first_ranks: list[int]
    hosts: list[str]
    name: str
    names: dict[int, str]

    def go(self) -> dict[str, Any]:
        """Return what *go* tells the followers: where each of them writes."""
        names = {"0": self.name, **{str(rank): name for rank, name in self.names.items()}}
        return {"first_ranks": self.first_ranks, "names": names}

    def is_first(self, rank: int) -> bool:
        """Tell whether a rank belongs to store 0."""
        return self.first_ranks[rank] == 0

    def ranks_of(self, first_rank: int) -> list[int]:
        """Return the ranks of a store."""
        return [rank for rank, first in enumerate(self.first_ranks) if first == first_rank]


# --- look, seen, find, found: the coordinator's end, then the followers'


def find_stores(say: Say, known: Stores, directory: str, *, overwrite: bool) -> StoreMap | None:
    """Find out which ranks see one another's files; on the coordinator, while followers are in `StoreSeeker.reply`.

    Args:
        say: Asks all followers.
        known: What earlier saves have found; this updates it.
        directory: Rank 0's pending directory.
        overwrite: Other stores, too, may replace a checkpoint of that name.

    Returns:
        The stores; None where all ranks see one file system.

    Raises:
        StorageError: Some ranks see other file systems, and a directory above the root was missing.
        PeerError, CoordinationError: As the session does.
    """
    name = os.path.basename(directory)
    look = {"look": name, "first_ranks": known.first_ranks, "overwrite": overwrite}
    seen = say({**look, "makes": known.node_local is not None})
    first_ranks = known.first_ranks
    names = {rank: str(one["name"]) for rank, one in enumerate(seen) if one.get("name")}
    absent = {rank: str(one["absent"]) for rank, one in enumerate(seen) if one.get("absent")}
    known.hosts = [socket.gethostname(), *(str(one.get("host", "?")) for one in seen[1:])]
    if known.node_local is None:
        places = {rank: str(one["place"]) for rank, one in enumerate(seen) if one.get("sees") is False}
        known.refuse_several(places, place_of(os.path.dirname(directory)))
    if names or absent:
        known.require_parents(absent)
    known.made = []  # from now on these directories stay
    if first_ranks is None:
        first_ranks = [0] * len(seen)
        if names:
            found = say({"find": {str(rank): names[rank] for rank in names}})
            first_ranks = [0, *(int(one["first"]) for one in found[1:])]
            if any(first_ranks[first] != first for first in first_ranks):
                raise CoordinationError(
                    f"the ranks disagree on which of them see the same files: by rank, the firsts are {first_ranks}"
                )
            names = {rank: names[rank] for rank in names if first_ranks[rank] == rank}
        known.first_ranks = first_ranks
        if names:
            _tell_of_several([0, *names], known.node_local)
    if not names:
        return None
    return StoreMap(first_ranks, known.hosts, name, names)


def _tell_of_several(firsts: Sequence[int], node_local: NodeLocal) -> None:
    if node_local == "copies":
        _log.info("%d file systems, with the ranks %s first: each gets a copy of every step", len(firsts), list(firsts))
        return
    _log.warning(
        "the ranks share no file system: there are %d, with the ranks %s first. Each gets its part of every "
        "checkpoint; load with process_group=, or make one file with `fastpersist merge`",
        len(firsts),
        list(firsts),
    )


def find_stores_for_producer(session: Session, label: str, find: Callable[[Say], dict[str, Any]]) -> None:
    """Find the stores before a producer writes; on the coordinator, while followers are in `directory_for`.

    Args:
        session: The session with the followers.
        label: The name of what is saved; the same on all ranks.
        find: Finds the stores; takes a function that asks all followers, and returns what *go* says of the stores.

    Raises:
        CoordinationError: A follower saves its state in another way.
        Exception: What `find` raises.
    """
    for rank, said in enumerate(hear_all(session, {})):
        if rank and not said.get("guest"):
            raise CoordinationError(
                f"the ranks do not save the same in the same way: {label} is sharded on rank 0, and "
                f"{said.get('name')} is not on rank {rank}"
            )
    session.answer(encoded({"ready": True, **find(partial(ask, session))}))


class StoreSeeker:
    """A follower's search for its store in one save, and where to write in it. The thread that writes uses it.

    Args:
        path: The final name of the directory, below this rank's own root.
        rank: The number of this rank.
        stores: The stores of this rank's Checkpointer; None if all ranks need the same file system.

    Attributes:
        is_split: Whether there are several stores.
        copied_fd: A descriptor of the file that is copied to this rank's store, on its first rank; else None.
    """

    def __init__(self, path: str, rank: int, stores: Stores | None) -> None:
        self._path = absolute_path(path)
        self._rank = rank
        self._stores = stores
        self._pending: PendingDirectory | None = None
        self._overwrite = False
        self.is_split = False
        self.copied_fd: int | None = None

    def reply(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Answer a message of `find_stores`, or create the file that is to be copied.

        Raises:
            ConfigError, StorageError: This rank cannot make a pending directory, or sees other files than before.
        """
        if "make" in message:
            if self._pending is not None:
                made = str(message["make"])
                self.copied_fd = self._pending.create_file(made)
                filesystem().allocate(self.copied_fd, int(message["size_bytes"]), os.path.join(self._path, made))
            return {}
        if "find" in message:
            return {"first": self._find({int(rank): str(name) for rank, name in message["find"].items()})}
        sees = self._sees(str(message["look"]))
        first_ranks = message["first_ranks"]
        first = None if first_ranks is None else int(first_ranks[self._rank])
        if first is not None and sees != (first == 0):
            raise self._changed(0)
        if not sees and not message.get("makes", True):
            return {"sees": False, "host": socket.gethostname(), "place": place_of(os.path.dirname(self._path))}
        absent = None
        if not sees and first in (None, self._rank):
            self._overwrite = bool(message["overwrite"])
            absent = _absent_above(os.path.dirname(self._path))
            if absent is None:
                self._make(own_root_first=first is not None)
        name = None if self._pending is None else os.path.basename(self._pending.path)
        return {"sees": sees, "name": name, "host": socket.gethostname(), "absent": absent}

    def directory_for(self, session: Session, label: str) -> str | None:
        """Find the stores before a producer writes, while rank 0 is in `find_stores_for_producer`; see `directory`."""
        if self._stores is None:
            return None
        session.tell(encoded({"guest": True, "name": f"{label}, sharded"}))
        with preferring_failure_of_others(session):
            while not (said := decoded(session.hear(), 0)).get("ready"):
                session.tell(encoded(self.reply(said)))
            return self.directory(said)

    def directory(self, go: Mapping[str, Any]) -> str | None:
        """Return where this rank writes its parts and its own files; None where all see one file system.

        Raises:
            StorageError: This rank does not see the files of its store any more.
        """
        split = go.get("split")
        if split is None:
            self.give_back()
            return None
        self.is_split = True
        first = int(split["first_ranks"][self._rank])
        name = os.path.basename(str(split["names"][str(first)]))
        if not self._sees(name):
            raise self._changed(first)
        return os.path.join(os.path.dirname(self._path), name)

    def is_first(self) -> bool:
        """Tell whether this rank publishes for its store."""
        return self._pending is not None

    def close_copied(self) -> None:
        """Close the file that was copied; it is written and synced."""
        if self._pending is not None and self.copied_fd is not None:
            self._pending.close_file(self.copied_fd)
            self.copied_fd = None

    def give_back(self) -> None:
        """Remove the directory that this rank has made; nothing is saved in it."""
        if self._pending is not None:
            self._pending.abort()

    def _find(self, names: Mapping[int, str]) -> int:
        if self._pending is None:
            return 0
        first = next((rank for rank in sorted(names) if rank < self._rank and self._sees(names[rank])), self._rank)
        if first == self._rank:
            self._own_root()
        else:
            self._pending.abort()
            self._pending = None
        return first

    def _make(self, *, own_root_first: bool) -> None:
        make_directories(os.path.dirname(self._path))
        if own_root_first:
            self._own_root()
        self._pending = PendingDirectory.create(self._path, overwrite=self._may_replace())

    def _own_root(self) -> None:
        if self._stores is not None:
            self._stores.own_root()

    def _may_replace(self) -> bool:
        """Tell whether an existing directory may be replaced: as asked for, or if it holds parts or a copy.

        Such ones are left over: rank 0's store has no such step, or is to replace it, too.
        """
        return self._overwrite or any(is_there(os.path.join(self._path, name)) for name in (PARTS_NAME, COPY_NAME))

    def _sees(self, name: str) -> bool:
        # Looked up by name: a listing may come from a cache that is older than the directory.
        return is_there(os.path.join(os.path.dirname(self._path), name))

    def _changed(self, first: int) -> StorageError:
        return StorageError(
            errno.ENOENT,
            f"cannot save {self._path}: rank {self._rank} does not see the same files of rank {first} as it did at the "
            "last save; was a file system mounted or unmounted? The next save finds the stores again; with "
            'node_local="copies" a new Checkpointer does, or rebind()',
            self._path,
        )


def place_of(root: str) -> str:
    """Say where a root lies, for messages: "/data/run on nfs4 (server:/data, mounted at /data)"."""
    mount = mount_of(root)
    lies = "" if mount is None else f" on {mount.type_name} ({mount.source}, mounted at {mount.point})"
    absent = _absent_above(root)
    return f"{root}{lies}" + (f", and there is no {absent}" if absent else "")


def _absent_above(root: str) -> str | None:
    """Return the highest missing directory above a root; None if all exist."""
    absent = None
    above = os.path.dirname(os.path.realpath(root))
    while not is_there(above):
        absent, above = above, os.path.dirname(above)
    return absent
