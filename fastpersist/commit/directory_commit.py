"""Make a finished directory visible, all of it or none of it.

`<parent>/.<name>.pending-<token>` is being written. `<parent>/<name>` is committed and never changes again: another
directory may replace it, or it is removed as a whole, and either takes its name away first, in one step.

1. Remove leftovers: pending directories of this name whose writer is dead.
2. Make the pending directory and an empty MANIFEST.json in it, and lock that (F_SETLK). If a sweeper has removed it
   between the two, begin again with a new token.
3. The caller writes every file, and syncs it.
4. Sync the files that others put there, write and sync MANIFEST.json, then sync every directory, the deepest first.
5. Rename the pending directory to its final name, unless something has that name. To replace a checkpoint, exchange
   the two names (RENAME_EXCHANGE): the old one is pending now, and has no writer.                 <- the commit point
6. Sync the parent. Only now has the save returned durable.
7. Remove the directory that was replaced.

Where the kernel or the file system refuses to exchange names, 5 is two steps: the old directory becomes
`.<name>.retired-<token>`, then the pending one is renamed. In between nothing has the final name, and the retired one
counts as committed: `committed_path` finds it, and a sweep gives it its name back (then 5 begins again).

After a power failure before 5 there is the old checkpoint, perhaps under its retired name, and perhaps a dead pending
directory, whole or not, which the next save of this name removes. After one between 5 and 6 there is the old or the new
one, each of them whole, because 4 came first. After 6 there is the new one, and perhaps the old one as a leftover.
Nothing is deleted before the sync of the parent that makes its new name durable, whether by 7, by `remove_directory` or
by a sweep: otherwise a power failure might keep the deletions and lose the rename. An error before 5 removes the
pending directory.

A pending directory may lie elsewhere in the file system, for parents whose readers look at hidden names too. Then 6
syncs both parents.

A pending directory is live while its writer holds the record lock on its MANIFEST.json. `file_commit` has the reasons
for that kind of lock, and the list of locked files that this process must not open. A process that removes a directory
deletes MANIFEST.json last; until nothing else is left it holds a lock on it that conflicts with a writer's and with
readers'. Where a file system has no locks, leftovers are removed when a day old, and readers are not noticed. `locks`
has the locks, `removal` removes and sweeps.

A committed directory that cannot be renamed (EXDEV: one of a lower layer, on overlayfs without redirect_dir) is not
replaced, because it would have to go first. `removal` says how it is removed.

The final name may not be that of a file, a symbolic link, a mount point, or a directory that has files and no
MANIFEST.json, and so is no checkpoint. With overwrite="foreign" the caller says that such a directory is a checkpoint
of another program; only an exchange replaces it, because a sweep would not undo the first of two steps. Callers decide
what the manifest says.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, TypeAlias

from fastpersist import _native
from fastpersist.commit.file_commit import (
    Lock,
    close_live,
    closing_published,
    errors_in_log,
    live_guard,
    lock_record,
    mark_live,
    saving,
)
from fastpersist.commit.filesystem import filesystem, storage_errors
from fastpersist.commit.locks import RootLock, hold_for_reading
from fastpersist.commit.permissions import Permissions
from fastpersist.commit.removal import (
    committed_path,
    hidden_path,
    remove_directory,
    remove_quietly,
    remove_replaced,
    resolve_final_path,
    sweep_directories,
)
from fastpersist.errors import ConfigError, InternalError, StorageError, UnsupportedError
from fastpersist.formats.manifest import MANIFEST_NAME, check_file_name

__all__ = [
    "Overwrite",
    "PendingDirectory",
    "RootLock",
    "committed_path",
    "files_in",
    "hold_for_reading",
    "remove_directory",
    "sweep_directories",
]

_log = logging.getLogger("fastpersist")

Overwrite: TypeAlias = bool | Literal["foreign"]

_ANY_NAME = re.compile(r".+", re.DOTALL)
_ATTEMPT_COUNT = 100
_READ_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


class PendingDirectory:
    """A directory being written under a hidden name. One owner thread.

    Use `create`, then `create_file` and `close_file`, then `publish` or `abort`.

    Attributes:
        path: The hidden name. Files that others put below it become part of the checkpoint, too.
        final_path: The name that `publish` gives it.
        sync_s: Seconds that `publish` has spent in syncs.
    """

    def __init__(self, path: str, final_path: str, permissions: Permissions | None, fd: int) -> None:
        self.path = path
        self.final_path = final_path
        self.sync_s = 0.0
        self._permissions = permissions
        self._manifest_fd = fd
        self._identity = mark_live(fd, self._manifest_path)
        self._process = os.getpid()
        self._names: set[str] = set()  # of all files made here
        self._durable: set[str] = set()  # of files made by others, who have synced them
        self._open_files: dict[int, str] = {}
        self._directories: set[str] = set()

    @classmethod
    def create(cls, path: str, *, overwrite: Overwrite, pending_in: str | None = None) -> PendingDirectory:
        """Do steps 1 and 2 of the protocol.

        Args:
            path: The final name. Its parent must exist.
            overwrite: Whether to replace a checkpoint that has this name; "foreign": also one without a MANIFEST.json.
                The new directory then gets the permissions of the old one, and never has more; without an old one,
                those that mkdir() gives.
            pending_in: A directory of the same file system, where the pending one is made in place of the parent of
                `path`; everything that dead saves have left there is removed.

        Raises:
            ConfigError: Something that may not be replaced has the name; `pending_in` is on another file system.
            StorageError: The directory could not be made.
        """
        final_path = resolve_final_path(path)
        parent, name = os.path.split(final_path)
        sweep_directories(parent, name)  # first: it may give the name back to a directory that was retired
        if pending_in is not None:
            with storage_errors("looking up", pending_in):
                pending_in = os.path.realpath(pending_in)
                device = os.stat(pending_in).st_dev
            with storage_errors("looking up", parent):
                is_elsewhere = os.stat(parent).st_dev != device
            if is_elsewhere:
                raise ConfigError(
                    f"pending_in {pending_in} is on another file system than {parent}, so its files could not get "
                    "their final names; choose a directory on the same file system"
                )
            sweep_directories(pending_in, _ANY_NAME)
        permissions = _check_name(final_path, overwrite)
        for _ in range(_ATTEMPT_COUNT):
            with live_guard(), saving(final_path):
                pending_path = hidden_path(os.path.join(pending_in or parent, name), "pending")
                pending = cls._make(pending_path, final_path, permissions)
            if pending is not None:
                return pending
        raise InternalError(f"no pending directory for {final_path} could be made in {_ATTEMPT_COUNT} attempts")

    @classmethod
    def _make(cls, path: str, final_path: str, permissions: Permissions | None) -> PendingDirectory | None:
        """Try step 2; return None if a sweeper was faster."""
        manifest_path = os.path.join(path, MANIFEST_NAME)
        try:
            filesystem().make_directory(path, 0o777 if permissions is None else 0o700)
        except StorageError:
            raise
        except BaseException:  # such as Ctrl-C right after the system call
            remove_quietly(path)
            raise
        pending = None
        kept = False
        try:
            if permissions is not None:
                with _opened(path) as directory_fd:
                    permissions.give_inherited(directory_fd, path, final_path)
            fd = filesystem().create(manifest_path)
            pending = cls(path, final_path, permissions, fd)
            free = lock_record(fd, manifest_path) is not Lock.BUSY
            kept = free and filesystem().status(fd, manifest_path).st_nlink == 1
        except StorageError as error:
            if error.errno != errno.ENOENT:
                raise
        finally:
            if pending is None:
                remove_quietly(path)
            elif not kept:
                pending.abort()
        return pending if kept else None

    def create_file(self, name: str) -> int:
        """Create a file, and the directories above it, for step 3.

        Args:
            name: The path below the directory; its parts are separated by "/".

        Returns:
            A descriptor for reading and writing. Sync the file, and give the descriptor to `close_file`.

        Raises:
            ConfigError: This is no name of a file in a checkpoint.
            StorageError: The file exists already, or could not be created.
        """
        self._check_owner()
        check_file_name(name)
        path = os.path.join(self.path, name)
        with saving(self.final_path):
            parts = name.split("/")
            for depth in range(1, len(parts)):
                self._make_directory("/".join(parts[:depth]))
            fd = filesystem().create(path)
        _native.close_in_forked_child(fd)
        self._open_files[fd] = name
        self._names.add(name)
        return fd

    def _make_directory(self, name: str) -> None:
        if name in self._directories:
            return
        path = os.path.join(self.path, name)
        try:
            filesystem().make_directory(path)
        except StorageError as error:
            if error.errno != errno.EEXIST:
                raise
            with storage_errors("looking up", path):
                if not stat.S_ISDIR(os.lstat(path).st_mode):
                    raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR)) from error
        self._directories.add(name)

    def close_file(self, fd: int) -> None:
        """Close a file that `create_file` opened.

        Raises:
            StorageError: The kernel reports an error; the file is closed all the same, but its bytes may be lost.
        """
        self._check_owner()
        name = self._open_files.pop(fd, None)
        if name is None:
            raise InternalError(f"descriptor {fd} is no file of {self.path}")
        _native.forget_descriptor(fd)
        with saving(self.final_path):
            filesystem().close(fd, os.path.join(self.path, name))

    def note_durable(self, name: str) -> None:
        """Note that other code has synced a file of the directory, so that `publish` does not."""
        self._durable.add(name)

    def publish(
        self, manifest: bytes, *, durable: bool = True, overwrite: Overwrite = False, keep_replaced: bool = False
    ) -> str | None:
        """Do steps 4 to 7, and close.

        Args:
            manifest: The content of MANIFEST.json.
            durable: Sync as steps 4 and 6 say; without it, the directory is complete for readers, but a power failure
                may lose or tear it.
            overwrite: Replace a checkpoint that has the final name by now; as in `create`.
            keep_replaced: Leave step 7 to the caller: others may have to commit first.

        Returns:
            With `keep_replaced`, the path of the directory that was replaced, if there was one.

        Raises:
            ConfigError: Something that may not be replaced has the final name; nothing was published.
            UnsupportedError: Something below the directory is neither a file nor a directory; nothing was published.
            StorageError: Nothing was published, unless the message says that the directory is, and what has failed.
        """
        self._check_owner()
        if self._open_files:
            raise InternalError(f"{self.path}: {', '.join(self._open_files.values())} must be closed before publishing")
        try:
            with saving(self.final_path):
                self._complete(manifest, durable)
                replaced = self._make_visible(overwrite)
        except BaseException:
            self.abort()
            raise
        # After an error the replaced directory stays: it may be all that is left after a power failure.
        with closing_published(self.final_path, self._close, durable=durable):
            for parent in dict.fromkeys((os.path.dirname(self.final_path), os.path.dirname(self.path))):
                if durable:
                    self._sync_directory(parent)
        if replaced is not None and not keep_replaced:
            remove_replaced(replaced)
        return replaced if keep_replaced else None

    def _complete(self, manifest: bytes, durable: bool) -> None:
        """Do step 4."""
        directories, files = _contents(self.path)
        if missing := sorted(self._names.difference(files)):
            message = f"{missing[0]} is gone from {self.path}: it was deleted"
            raise StorageError(errno.ENOENT, message, self.path)
        for name in files:
            if durable and name not in self._names and name not in self._durable and name != MANIFEST_NAME:
                self._sync_file(os.path.join(self.path, name))
        manifest_path = os.path.join(self.path, MANIFEST_NAME)
        status = filesystem().status(self._manifest_fd, manifest_path)
        with storage_errors("looking up", manifest_path):
            ours = os.path.samestat(os.lstat(manifest_path), status)
        if not ours or status.st_size != 0:
            raise StorageError(errno.EEXIST, f"{manifest_path} was written by another program", manifest_path)
        filesystem().write(self._manifest_fd, manifest, manifest_path)
        if durable:
            started_s = time.monotonic()
            filesystem().sync(self._manifest_fd, manifest_path)
            self.sync_s += time.monotonic() - started_s
        if self._permissions is not None:
            with _opened(self.path) as fd:
                self._permissions.give_to(fd, self.path, self.final_path)
        if durable:
            for name in reversed(directories):
                self._sync_directory(os.path.join(self.path, name) if name else self.path)

    def _sync_file(self, path: str) -> None:
        with storage_errors("opening", path):
            fd = os.open(path, _READ_FLAGS)
        try:
            started_s = time.monotonic()
            filesystem().sync(fd, path)
            self.sync_s += time.monotonic() - started_s
        finally:
            filesystem().close(fd, path)

    def _sync_directory(self, path: str) -> None:
        started_s = time.monotonic()
        filesystem().sync_directory(path)
        self.sync_s += time.monotonic() - started_s

    def _make_visible(self, overwrite: Overwrite) -> str | None:
        """Do step 5, while others may take or free the name; return the path of the directory that was replaced."""
        for _ in range(_ATTEMPT_COUNT):
            replaces = _check_name(self.final_path, overwrite) is not None
            try:
                if not replaces:
                    filesystem().rename_to_free_name(self.path, self.final_path)
                    return None
                try:
                    filesystem().exchange(self.path, self.final_path)
                    return self.path
                except UnsupportedError as refused:
                    _check_name(self.final_path, overwrite=True)
                    _log.debug("%s is replaced in two steps: %s", self.final_path, refused)
                    return self._retire_and_rename()
            except StorageError as error:
                if replaces and error.errno == errno.EXDEV:
                    self._make_way(error)
                    continue
                # ENOENT may be about either name, so the pending directory itself may be gone.
                raced = errno.ENOENT if replaces else errno.EEXIST
                if error.errno not in (raced, errno.EEXIST) or not os.path.lexists(self.path):
                    raise
        raise InternalError(f"{self.final_path} was taken and freed by other saves {_ATTEMPT_COUNT} times")

    def _make_way(self, error: StorageError) -> None:
        """Remove a directory that cannot be renamed, if it is empty, as a killed removal may have left it; or raise."""
        try:
            filesystem().remove_directory(self.final_path)
        except StorageError:
            message = (
                f"{error} (a directory in a lower layer of overlayfs, such as the image of a container, cannot be "
                "renamed, so it cannot be replaced while it is whole: remove it first, for example with "
                "Checkpointer.delete, or save elsewhere)"
            )
            raise StorageError(error.errno, message, self.final_path) from error

    def _retire_and_rename(self) -> str:
        retired = hidden_path(self.final_path, "retired")
        filesystem().rename(self.final_path, retired)
        try:
            filesystem().rename_to_free_name(self.path, self.final_path)
        except BaseException as error:
            if not (isinstance(error, StorageError) and error.errno == errno.EEXIST):
                try:
                    filesystem().rename_to_free_name(retired, self.final_path)
                except StorageError as second:
                    _log.warning("%s keeps this name until the next save or load: %s", retired, second)
            raise
        return retired

    def abort(self) -> None:
        """Remove the pending directory and close it; the final name stays as it was. May be called again.

        In a forked child this does nothing: the directory is the parent's, and the descriptors are closed already.
        """
        if self._manifest_fd < 0 or self._process != os.getpid():
            return
        for fd in list(self._open_files):
            with errors_in_log():
                self.close_file(fd)
        try:
            status = os.lstat(self._manifest_path)
        except OSError:
            status = None
        # With another manifest this is the directory that was replaced: an exception came right after the exchange.
        if status is None or (status.st_dev, status.st_ino) == self._identity:
            remove_quietly(self.path, let_go=self._close_in_abort)
        self._close_in_abort()

    def __del__(self) -> None:
        # Ctrl-C, or another exception out of nowhere, came before anybody owned it.
        if hasattr(self, "_directories"):  # the last attribute of a whole one
            self.abort()

    def _close_in_abort(self) -> None:
        with errors_in_log():
            self._close()

    def _close(self) -> None:
        if self._manifest_fd >= 0:
            fd, self._manifest_fd = self._manifest_fd, -1
            close_live(fd, self._identity, self._manifest_path)

    @property
    def _manifest_path(self) -> str:
        return os.path.join(self.path, MANIFEST_NAME)

    def _check_owner(self) -> None:
        if self._process != os.getpid():
            raise ConfigError(f"{self.final_path} is being saved by process {self._process}, not by its forked child")
        if self._manifest_fd < 0:
            raise InternalError(f"{self.final_path} was published or given up already")


@contextmanager
def _opened(directory: str) -> Iterator[int]:
    with storage_errors("opening", directory):
        fd = os.open(directory, _READ_FLAGS | os.O_DIRECTORY)
    try:
        yield fd
    finally:
        os.close(fd)


def _check_name(path: str, overwrite: Overwrite) -> Permissions | None:
    """Return the permissions of the directory that a save to `path` replaces, None when the name is free."""
    with storage_errors("looking up", path):
        try:
            status = os.lstat(path)
        except FileNotFoundError:
            return None
    if not stat.S_ISDIR(status.st_mode):
        kind = "a symbolic link" if stat.S_ISLNK(status.st_mode) else "a file"
        raise ConfigError(f"{path} is {kind}, not a directory: remove it, or save elsewhere")
    if not overwrite:
        raise ConfigError(f"{path} exists already: pass overwrite=True to replace it")
    if _native.is_mount_point(os.fsencode(path)):
        raise ConfigError(f"something is mounted on {path}, so it cannot be replaced: save below it, or elsewhere")
    with storage_errors("listing", path):
        names = os.listdir(path)
    if names and MANIFEST_NAME not in names and overwrite != "foreign":
        raise ConfigError(
            f"{path} holds files and no {MANIFEST_NAME}, so it is no checkpoint: remove it, or save elsewhere"
        )
    return Permissions.of(status)


def _contents(path: str) -> tuple[list[str], list[str]]:
    """Return the names of all directories below `path`, each before what is in it, "" first, and of all files, sorted.

    Raises:
        UnsupportedError: Something is neither; a link, for one, would lead out of the checkpoint.
    """
    directories = [""]
    files = []
    for directory in directories:
        with storage_errors("listing", os.path.join(path, directory)):
            with os.scandir(os.path.join(path, directory)) as entries:
                for entry in entries:
                    name = f"{directory}/{entry.name}" if directory else entry.name
                    if entry.is_dir(follow_symlinks=False):
                        directories.append(name)
                    elif entry.is_file(follow_symlinks=False):
                        files.append(name)
                    else:
                        kind = "a symbolic link" if entry.is_symlink() else "a special file"
                        raise UnsupportedError(f"{entry.path} is {kind}; a checkpoint has files and directories only")
    return directories, sorted(files)


def files_in(path: str) -> Iterator[str]:
    """Name all files below a directory but its MANIFEST.json, parts separated by "/", sorted.

    Raises:
        UnsupportedError: Something is neither a file nor a directory.
        StorageError: A directory cannot be listed.
    """
    return (name for name in _contents(path)[1] if name != MANIFEST_NAME)
