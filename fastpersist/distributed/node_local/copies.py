"""Saves copies of a step: each node-local store gets whole files, written by its own ranks.

All stores get the same bytes: those that rank 0 alone would have written. The ranks of each store divide the cut
sources among them (`shared_file`), so every store writes these once. Rank 0 sends the *rest*, which only rank 0 has
(the skeleton, small storages, state that is no replica, CRCs), to the first rank of each other store. Which ranks share
a store decides which ranges a rank captures. So the threads that call save() find out the stores when the first save
begins, in the session of that save:

    look, seen, find, found                 as in `detection`, with a directory that is removed at the end
    coordinator → followers   number        asks for the next commit number of the first ranks' roots
    followers → coordinator   …             so that the steps of all stores have one order
    coordinator → followers   stores        who is the first rank of each rank's store; the hosts

In each session, for the file that all ranks write (`file_agreement`):

    coordinator → followers   make          after *look* and *seen*: name and length of the file, which the first rank
                                            of each other store creates
    coordinator → firsts      …             after *done*: the rest of the file, in pieces

Publication is that of parts (`publishing`): all is durable everywhere before the first directory gets its name, and
rank 0's gets its name last. A copy in another store counts if its commit number is no greater than the one in the file
`.committed` of that root, which is written after *end*; or if the ranks also see rank 0's copy. Else its save may have
died before all were visible, and files of single ranks would be missing.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from fastpersist.commit.directory_commit import PendingDirectory
from fastpersist.commit.filesystem import filesystem, open_regular
from fastpersist.distributed.file_agreement import ask
from fastpersist.distributed.messages import decoded, encoded, preferring_failure_of_others
from fastpersist.distributed.node_local.detection import Stores, StoreSeeker, find_stores
from fastpersist.distributed.sessions import Session
from fastpersist.errors import CoordinationError
from fastpersist.formats.byte_ranges import Extent, ExtentMap, merged, without
from fastpersist.transfer.reader import read_exactly

__all__ = ["COMMITTED_NAME", "agree_on_stores", "receive_rest", "rest_of", "send_rest"]

COMMITTED_NAME = ".committed"
"""In a root, the greatest commit number that is known to be committed in all stores."""

_PIECE_BYTES = 16 << 20  # the most bytes of a file in one message


def agree_on_stores(session: Session, stores: Stores, path: str, next_number: Callable[[], int]) -> int:
    """Find out which ranks see the same files, before the first save; all ranks call this.

    Args:
        session: The session of the first save.
        stores: Updated on all ranks with what is found.
        path: The path of a step below this rank's root, which exists on rank 0.
        next_number: Returns the next commit number of this rank's root.

    Returns:
        On rank 0, the greatest of the commit numbers; 0 on the others.

    Raises:
        StorageError: A directory above the root was missing; or an error of a disk.
        PeerError, CoordinationError: As the session does.
    """
    if session.rank:
        _follow(session, stores, path, next_number)
        return 0
    say = partial(ask, session)
    try:
        probe = PendingDirectory.create(path, overwrite=True)
        try:
            find_stores(say, stores, probe.path, overwrite=True)
            numbers = [int(one.get("number", 0)) for one in say({"number": True})]
            session.answer(encoded({"stores": stores.first_ranks, "hosts": stores.hosts}))
        finally:
            probe.abort()
    except BaseException:
        stores.first_ranks = None  # the next save asks again
        stores.forget()
        raise
    return max(numbers)


def _follow(session: Session, stores: Stores, path: str, next_number: Callable[[], int]) -> None:
    seeker = StoreSeeker(path, session.rank, stores)
    try:
        with preferring_failure_of_others(session):
            while "stores" not in (said := decoded(session.hear(), 0)):
                if said.get("number"):
                    session.tell(encoded({"number": next_number() if seeker.is_first() else 0}))
                else:
                    session.tell(encoded(seeker.reply(said)))
    finally:
        seeker.give_back()
    stores.first_ranks = [int(first) for first in said["stores"]]
    stores.hosts = [str(host) for host in said["hosts"]]


def rest_of(size_bytes: int, cut: Iterable[Extent]) -> ExtentMap:
    """Return what only rank 0 has of a file.

    Args:
        size_bytes: Length of the file.
        cut: The extents of the file that are cut.
    """
    return ExtentMap(without(Extent(0, size_bytes), merged(one for one in cut if one.size_bytes)))


def send_rest(session: Session, firsts: Sequence[int], path: str, rest: ExtentMap) -> None:
    """Send the rest of a file that is written; on rank 0.

    Args:
        session: The session with the followers.
        firsts: The first ranks of the other stores.
        path: The path of the pending file.
        rest: The extents that are sent.
    """
    fd = open_regular(path)  # the writer's descriptor may be one for direct reads
    try:
        for at in range(0, rest.size_bytes, _PIECE_BYTES):
            places = rest.belonging(at, min(_PIECE_BYTES, rest.size_bytes - at))
            session.answer_some(firsts, b"".join(read_exactly(fd, *place, path) for place in places))
    finally:
        os.close(fd)


def receive_rest(session: Session, fd: int, path: str, rest: ExtentMap) -> None:
    """Write what rank 0 sends of a file; on the first rank of another store.

    Args:
        session: The session with rank 0.
        fd: A descriptor of the file, which has its full length.
        path: The path of the file, for messages.
        rest: The extents that are received.

    Raises:
        CoordinationError: Rank 0 sends something else.
        StorageError: It cannot be written.
        PeerError: As the session does.
    """
    for at in range(0, rest.size_bytes, _PIECE_BYTES):
        size_bytes = min(_PIECE_BYTES, rest.size_bytes - at)
        data = memoryview(session.hear())
        if len(data) != size_bytes:
            raise CoordinationError("rank 0 sends a piece of a file with the wrong length")
        for place in rest.belonging(at, size_bytes):
            os.lseek(fd, place.offset_bytes, os.SEEK_SET)
            filesystem().write(fd, data[: place.size_bytes], path)
            data = data[place.size_bytes :]
