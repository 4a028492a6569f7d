"""The end of a save of several ranks: the messages after everything is written, each with both of its ends.

    followers → coordinator   own      of a directory: name, length and CRC of each file that is this rank's own
    coordinator → followers   commit … only if there are several stores: `node_local.publishing`
    coordinator → followers   end      it is published

Once the coordinator knows that everything is written (it *settles*), losing a follower does not make the save fail. The
published checkpoint is whole. A follower that receives no *end* cannot tell whether it was published.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from fastpersist.distributed.messages import decoded, encoded
from fastpersist.distributed.node_local.publishing import CoordinatorStores, FollowerStore
from fastpersist.distributed.sessions import Session
from fastpersist.errors import CoordinationError
from fastpersist.formats.manifest import FileEntry, check_file_name
from fastpersist.saving.directory_save import Publication

__all__ = ["gather_own_files", "hear_published", "publish_for_all", "tell_own_files"]

# --- own


def tell_own_files(session: Session, files: Sequence[FileEntry]) -> None:
    """Send that no more files follow, and list this rank's own; on a follower."""
    session.tell(encoded({"own": [(file.name, file.size_bytes, file.crc32) for file in files]}))


def gather_own_files(session: Session) -> Iterator[tuple[int, FileEntry]]:
    """Wait until no follower has more files; return the followers' own files, and whose they are; on the coordinator.

    Raises:
        CoordinationError: A follower tells something else.
        PeerError: Another rank has failed.
    """
    for rank, message in enumerate(session.gather(b"")):
        if rank == 0:
            continue
        try:
            for name, size_bytes, crc32 in decoded(message, rank)["own"]:
                check_file_name(name)
                yield rank, FileEntry(name, int(size_bytes), None if crc32 is None else int(crc32))
        except (KeyError, TypeError, ValueError) as error:
            raise CoordinationError(f"rank {rank} tells of its files what makes no sense: {error}") from error


# --- end


def publish_for_all(session: Session, stores: CoordinatorStores, publication: Publication, final_path: str) -> None:
    """Publish a directory: other stores first, then this one, and tell the followers; on the coordinator.

    Args:
        session: The session with the followers.
        stores: The stores of the save.
        publication: Publishes the coordinator's own store.
        final_path: The final path of the directory.

    Raises:
        PeerError: A rank has failed; nothing is published.
        StorageError, …: As `publication.publish`; other stores undo what they have published.
    """
    stores.commit(publication)
    session.settle()
    try:
        publication.publish()
    except BaseException:
        stores.undo(final_path)
        raise
    session.answer(stores.end(final_path, publication))
    session.finish()


def hear_published(
    session: Session, store: FollowerStore, stats: Mapping[str, Any], check: Callable[[], None]
) -> bytes:
    """Return the coordinator's last word, when it has published; on a follower.

    Args:
        session: The session with the coordinator.
        store: This rank's store, which its first rank publishes before.
        stats: The figures of the save, for that store's manifest.
        check: Raises if what this rank has written may be torn.

    Raises:
        PeerError: The coordinator has not published, or is gone.
        StorageError, …: As `FollowerStore.end`.
    """
    said = store.end(session, stats, check)
    session.finish()
    store.finish()
    return said
