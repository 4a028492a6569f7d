"""A `DirectorySave` of several ranks: one directory, to which all of them write.

The first rank has an ordinary DirectorySave. The others have its counterpart here, with the same methods: what they
save is their replicas of the same files, of which each writes its part. What is one rank's alone, that rank writes, at
the same time as the others write theirs: `rank_files`.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from fastpersist.arguments import local_path
from fastpersist.commit.directory_commit import Overwrite
from fastpersist.distributed.directory_save import DirectorySave
from fastpersist.distributed.file_producer import Guest
from fastpersist.distributed.follower_save import PeerSave
from fastpersist.distributed.group_save import Writers, together_with
from fastpersist.distributed.shared_file import Together
from fastpersist.errors import ConfigError, SkippedError
from fastpersist.formats.manifest import check_file_name
from fastpersist.saving.ownership import Owners
from fastpersist.saving.pending_save import PendingSave, SaveStats
from fastpersist.saving.work_queue import Lane
from fastpersist.transfer.arena import Arena
from fastpersist.transfer.engine_selection import require_engine
from fastpersist.transfer.torch_boundary import untraced

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["PeerDirectorySave", "directory_save_together"]

_arena = Arena()


def directory_save_together(
    path: str | os.PathLike[str],
    process_group: ProcessGroup,
    *,
    writers: Writers = "auto",
    check_replicas: bool = False,
    overwrite: Overwrite = False,
    engine: str = "auto",
    make_parents: bool = False,
    pending_in: str | os.PathLike[str] | None = None,
) -> DirectorySave | PeerDirectorySave:
    """Make a DirectorySave with all ranks of a group, which save the same files in the same order.

    Of each file, rank 0's object is saved. What an optimizer owns, or constant= names, is the same on all ranks, and
    its storages of 1 MiB and more are written by all writers, each a part. A file with `own=True` is one rank's alone:
    each rank writes its own ones, while the others write theirs, however many and with whatever names nobody else has.
    All ranks call publish(), and the directory is visible when rank 0 has published it for all.

    Args:
        path: Its final name; rank 0's counts.
        process_group: With whom; torch's group itself is used by the first call for it only.
        writers: The ranks that write, as in `fastpersist.save`.
        check_replicas: Compare all bytes of the replicas, as in `fastpersist.save`.
        overwrite: As in `DirectorySave`; rank 0's counts, as of the options that follow.
        engine: "auto", or an engine's name, which then never falls back; each rank's own.
        make_parents: As in `DirectorySave`.
        pending_in: As in `DirectorySave`.

    Returns:
        On rank 0, and with a group of one rank, a DirectorySave. On the other ranks its counterpart; there `path` is a
        directory that is thrown away, and `add_bytes` adds nothing.

    Raises:
        ConfigError, StorageError: As by `DirectorySave`; the other ranks learn of it when they publish.

    Thread safety: in the same order on all ranks.
    """
    final_path = os.path.abspath(local_path(path))
    with together_with(process_group, final_path, writers, check_replicas=check_replicas) as together:
        require_engine(engine)
        if together is not None and together.session.rank:
            return PeerDirectorySave(final_path, together, engine=engine)
        return DirectorySave(
            path,
            overwrite=overwrite,
            engine=engine,
            make_parents=make_parents,
            pending_in=pending_in,
            _together=together,
        )


class PeerDirectorySave:
    """The part of a rank that is not the first; `directory_save_together` makes it. One thread uses it."""

    def __init__(self, path: str, together: Together, *, engine: str) -> None:
        self._final_path = path
        self._scratch_path = tempfile.mkdtemp(prefix="fastpersist-")
        self._names: set[str] = set()
        self._closed = False
        self._process = os.getpid()
        self._peer = PeerSave(
            path,
            together,
            engine=engine,
            durable=True,
            arena=_arena,
            lane=Lane("fastpersist-save"),
            stats=SaveStats(path=path),
            confirms=True,
        )

    @property
    def path(self) -> str:
        """A directory that is thrown away: what others put there, rank 0 has too."""
        return self._scratch_path

    @untraced
    def save(
        self,
        obj: object,
        name: str,
        optimizer: object = None,
        *,
        constant: object = (),
        gate: str = "optimizer",
        format: str = "auto",
        metadata: Mapping[str, str] | None = None,
        owners: Owners | None = None,
        own: bool = False,
    ) -> None:
        """Write this rank's part of a file, or with `own` a file that no other rank has; see `DirectorySave.save`.

        Raises:
            ConfigError: The name is no relative file name or is taken, or the format cannot hold the object.
        """
        self._check_new(name)
        owners = owners or Owners(optimizer, constant, gate)
        if own:
            self._peer.add_own(obj, name, owners, file_format=format, metadata=metadata)
        else:
            self._peer.save(obj, name, owners, owners.look, file_format=format, metadata=metadata)
        self._names.add(name)

    def save_guest(self, guest: Guest) -> None:
        """Have somebody else write this rank's part of files; see `DirectorySave.save_guest`."""
        self._refuse_closed()
        self._peer.save_guest(guest)

    def add_bytes(self, name: str, data: bytes) -> None:
        """Add nothing: rank 0's bytes are those that count.

        Raises:
            ConfigError: The name is no relative file name or is taken.
        """
        self._check_new(name)
        self._names.add(name)

    def publish(
        self,
        *,
        durable: bool = True,
        step: int | None = None,
        metrics: Mapping[str, float] | None = None,
        after: Callable[[], None] | None = None,
        apart: bool = False,
    ) -> PendingSave:
        """Return the save, done when rank 0 has published; the arguments are for rank 0, and do not count here.

        Raises:
            ConfigError: It was published or aborted before.
        """
        self._close()
        return self._peer.publish()

    def abort(self) -> None:
        """Give up, on all ranks. May be called again, and does nothing after publish()."""
        if not self._closed:
            self._close()
            self._peer.abort(SkippedError(f"{self._final_path} was given up before it was published"))

    def __enter__(self) -> PeerDirectorySave:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is not None and not self._closed:
            self._close()
            self._peer.abort(error)
        self.abort()

    def __del__(self) -> None:
        # A forked child has no part in it, and the scratch directory is its parent's.
        if not getattr(self, "_closed", True) and self._process == os.getpid():
            self.abort()

    def _close(self) -> None:
        self._refuse_closed()
        self._closed = True
        shutil.rmtree(self._scratch_path, ignore_errors=True)

    def _check_new(self, name: str) -> None:
        self._refuse_closed()
        check_file_name(name)
        if name in self._names:
            raise ConfigError(f"{name} is in {self._final_path} already")

    def _refuse_closed(self) -> None:
        if self._closed:
            raise ConfigError(f"{self._final_path} was published or aborted already")
