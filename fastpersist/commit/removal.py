"""Remove directories of checkpoints: committed ones on demand, and leftovers of dead saves and removals.

A directory is deleted while it has a hidden name, after a sync of its parent that makes the loss of its final name
durable, and under a lock that keeps its writer and its readers out. Its MANIFEST.json goes last. `directory_commit` has
the whole protocol and its reasons.

The lock is on MANIFEST.json and is dropped before that file is removed: NFS does not remove an open file, it keeps the
file as `.nfs…` in the same directory, which then cannot be removed either. At that moment only a manifest is left, in a
directory with a pending name. Such directories are never read, no sweep gives one its final name back (so a retired
directory is renamed first), and two processes may remove the same one at once.

On overlayfs without redirect_dir, a directory of a lower layer cannot be renamed (EXDEV). Then a committed directory
keeps its name, and its MANIFEST.json becomes MANIFEST.json.removed: it is no checkpoint any more, and a sweep removes
what is left. The lock, on that file now, is held until the file is gone: otherwise a slow sweeper might delete the
files of a new checkpoint that has got the name meanwhile.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Literal, NamedTuple

from fastpersist.commit.file_commit import LEFTOVER_AGE_S, TOKEN_BYTES, hidden_prefix, is_live
from fastpersist.commit.filesystem import absolute_path, filesystem, ignoring, storage_errors
from fastpersist.commit.locks import Lock, claimed
from fastpersist.errors import CheckpointNotFoundError, ConfigError, StorageError
from fastpersist.formats.manifest import MANIFEST_NAME

__all__ = [
    "committed_path",
    "hidden_path",
    "remove_directory",
    "remove_quietly",
    "remove_replaced",
    "remove_replaced_before",
    "replaced_directories",
    "resolve_final_path",
    "sweep_directories",
]

_log = logging.getLogger("fastpersist")

_ATTEMPT_COUNT = 5
_REMOVED_NAME = f"{MANIFEST_NAME}.removed"
_read_when_replaced: set[str] = set()  # replaced directories that stayed, because they were being read


def resolve_final_path(path: str) -> str:
    """Return a path with the links of its parent followed, so that neither chdir nor a moved link changes it."""
    parent, name = os.path.split(absolute_path(path))
    if not name:
        raise ConfigError(f"{path} is no name for a checkpoint")
    return os.path.join(os.path.realpath(parent), name)


def hidden_path(final_path: str, kind: Literal["pending", "retired"]) -> str:
    """Return a new hidden name beside the final one."""
    return os.path.join(os.path.dirname(final_path), hidden_prefix(final_path, kind) + secrets.token_hex(TOKEN_BYTES))


class _Leftover(NamedTuple):
    path: str
    final_path: str
    kind: str


def _leftovers(parent: str, name: re.Pattern[str] | str) -> list[_Leftover]:
    """List pending and retired directories, those that are being written included; the newest retired one first."""
    token = f"([0-9a-f]{{{2 * TOKEN_BYTES}}})"
    found = []
    try:
        with os.scandir(parent) as entries:
            directories = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
    except OSError:
        return []  # if something is wrong, creating the directory will raise
    kinds: tuple[Literal["pending"], Literal["retired"]] = ("pending", "retired")
    for kind in kinds:
        if isinstance(name, str):
            pattern = re.compile(re.escape(hidden_prefix(os.path.join(parent, name), kind)) + token)
        else:
            pattern = re.compile(rf"\.(?P<name>.+)\.{kind}-{token}", re.DOTALL)
        for entry_name in directories:
            if match := pattern.fullmatch(entry_name):
                final_name = name if isinstance(name, str) else match["name"]
                if isinstance(name, str) or name.fullmatch(final_name):
                    path = os.path.join(parent, entry_name)
                    found.append(_Leftover(path, os.path.join(parent, final_name), kind))
    return sorted(found, key=_published_ns, reverse=True)


def _published_ns(leftover: _Leftover) -> int:
    """Return when a retired directory was published, -1 for one that never was."""
    try:
        status = os.lstat(os.path.join(leftover.path, MANIFEST_NAME))
    except OSError:
        return -1
    return status.st_mtime_ns if leftover.kind == "retired" and status.st_size > 0 else -1


def committed_path(parent: str, name: str) -> str | None:
    """Return the path of the directory that is committed as `name`; None if there is none.

    It has its final name, or, between the two steps of a replacement, it is the newest retired one. Other processes go
    on meanwhile: call again if it is gone before it could be opened.
    """
    final_path = os.path.join(parent, name)
    for _ in range(2):  # twice: a directory that was retired may have got its name back before the listing
        if os.path.lexists(final_path):
            return final_path
        for leftover in _leftovers(parent, name):
            if _published_ns(leftover) >= 0:
                return leftover.path
    return None


def replaced_directories(path: str) -> list[str]:
    """Return the paths of complete directories with a hidden name that had this name, or were to get it."""
    parent, name = os.path.split(path)
    return [leftover.path for leftover in _leftovers(parent, name) if _has_manifest(leftover.path)]


def _has_manifest(path: str) -> bool:
    """Tell whether a directory is finished, and this process is not about to make it visible."""
    try:
        status = os.lstat(os.path.join(path, MANIFEST_NAME))
    except OSError:
        return False
    return status.st_size > 0 and not is_live(status)


def sweep_directories(parent: str, name: re.Pattern[str] | str, *, locks_work: bool = True) -> list[str]:
    """Do step 1: remove leftovers of dead saves and removals, and nothing of live ones.

    If the final name of retired directories is free, the newest of them gets it back; the others are removed.

    Args:
        parent: The directory to sweep.
        name: A final name, or a pattern that matches whole final names (names that are not shortened to a digest).
        locks_work: False where a live writer may have no lock: then only leftovers that are a day old are removed.

    Returns:
        The paths that were removed.

    Thread safety: any thread, any process, several at once.
    """
    removed: list[str] = []
    synced = False

    def sync_once() -> None:
        """Sync the parent: a save that has just replaced a directory may not have synced the exchange yet."""
        nonlocal synced
        if not synced:
            filesystem().sync_directory(parent)
            synced = True

    for leftover in [*_leftovers(parent, name), *_removed_in_place(parent, name)]:
        try:
            if leftover.kind == "retired" and _give_name_back(leftover):
                continue
            if leftover.kind == "removed":
                what = _finish_removal(leftover.path, locks_work=locks_work)
            else:
                what = _remove_leftover(leftover.path, prepare=sync_once, locks_work=locks_work)
            if what is not None:
                removed.append(leftover.path)
                _log.info("removed %s, %s", leftover.path, what)
        except StorageError as error:
            _log.warning("a leftover stays: %s", error)
    return removed


def _removed_in_place(parent: str, name: re.Pattern[str] | str) -> list[_Leftover]:
    """List the directories that were being removed under their final names."""
    try:
        names = [name] if isinstance(name, str) else [found for found in os.listdir(parent) if name.fullmatch(found)]
    except OSError:
        return []  # as in `_leftovers`
    paths = [os.path.join(parent, found) for found in names]
    return [
        _Leftover(path, path, "removed")
        for path in paths
        if os.path.lexists(os.path.join(path, _REMOVED_NAME))
        and not os.path.lexists(os.path.join(path, MANIFEST_NAME))
        and not os.path.islink(path)
    ]


def _finish_removal(path: str, *, locks_work: bool) -> str | None:
    """Remove the rest of a directory that kept its name; return what it was, or None if it is left alone."""
    with claimed(path, _REMOVED_NAME) as lock:
        if lock in (Lock.BUSY, Lock.NO_MANIFEST):
            return None
        if (lock is Lock.UNSUPPORTED or not locks_work) and not _is_old(path):
            return None
        filesystem().sync_directory(path)
        _remove_in_place(path)
    return "left by a removal that died"


def _give_name_back(leftover: _Leftover) -> bool:
    """Give a retired directory its final name; return False if that is taken, or the directory was never published.

    This needs the lock, or another sweeper might be deleting it. Without the lock it is left to the next sweep.
    """
    if _published_ns(leftover) < 0:
        return False
    with claimed(leftover.path) as lock:
        if lock is not Lock.BUSY:
            try:
                filesystem().rename_to_free_name(leftover.path, leftover.final_path)
            except StorageError as error:
                if error.errno == errno.EEXIST:
                    return False
                if error.errno != errno.ENOENT:  # another sweeper has done it
                    raise
            else:
                _log.info(
                    "%s was renamed back: a save died while it was replacing this checkpoint", leftover.final_path
                )
                filesystem().sync_directory(os.path.dirname(leftover.final_path))
    return True


def _remove_leftover(path: str, *, prepare: Callable[[], None] | None = None, locks_work: bool = True) -> str | None:
    """Remove a hidden directory; return what it was, or None if it is being written or read, or is gone already.

    Args:
        path: The directory's path.
        prepare: Called before anything is deleted. None: the directory is our own, so no other process writes it.
        locks_work: Whether locks work on this file system, as in `sweep_directories`.
    """
    with claimed(path) as lock:
        if lock is Lock.BUSY:
            return None
        if lock is Lock.NO_MANIFEST:
            # Nothing was written yet, or only the directory is left of a removal, or a power failure has lost the name
            # of the manifest. In the first case its writer may be alive, and about to make the manifest.
            try:
                filesystem().remove_directory(path)
                return "which was empty: its save died, or is about to make another one"
            except StorageError as error:
                if error.errno == errno.ENOENT:
                    return None
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
            with storage_errors("listing", path):
                if MANIFEST_NAME in os.listdir(path):
                    return None
        if (lock is Lock.UNSUPPORTED or not locks_work) and prepare is not None and not _is_old(path):
            _log.warning("%s may be a leftover; without file locks it is removed when a day old", path)
            return None
        if prepare is not None:
            prepare()
        path = _never_again_visible(path)
        _empty_tree(path)
    _remove_tree(path)
    return "left by a save that died"


def _never_again_visible(path: str) -> str:
    """Give a retired directory a pending name, so that no sweep makes it visible again; return its path now."""
    visible_path, retired, token = path.rpartition(".retired-")
    if not retired:
        return path
    pending_path = f"{visible_path}.pending-{token}"
    filesystem().rename(path, pending_path)
    return pending_path


def _is_old(path: str) -> bool:
    newest_s = 0.0
    for name in (path, os.path.join(path, MANIFEST_NAME)):
        with suppress(OSError):
            newest_s = max(newest_s, os.lstat(name).st_mtime)
    return time.time() - newest_s > LEFTOVER_AGE_S


def remove_replaced(path: str) -> None:
    """Do step 7; errors only go to the log, because the save has succeeded."""
    try:
        if _remove_leftover(path) is None and os.path.lexists(path):
            _log.info("%s was replaced and is being read; a later save removes it", path)
            _read_when_replaced.add(path)
    except StorageError as error:
        _log.warning("a replaced checkpoint is left behind: %s", error)


def remove_replaced_before(parent: str) -> bool:
    """Remove directories that this process has replaced here, if they are not being read any more; tell if any went."""
    removed = False
    for path in [path for path in list(_read_when_replaced) if os.path.dirname(path) == parent]:
        _read_when_replaced.discard(path)
        remove_replaced(path)
        removed |= path not in _read_when_replaced
    return removed


def remove_quietly(path: str, let_go: Callable[[], None] | None = None) -> None:
    """Remove a pending directory while another error is being raised; the next save removes what is left.

    Args:
        path: The directory's path.
        let_go: Closes the directory's manifest; called when nothing else is left in the directory.
    """
    try:
        if let_go is not None:
            try:
                _empty_tree(path)
            finally:
                let_go()
        _remove_tree(path)
    except StorageError as error:
        _log.warning("a pending directory is left behind: %s", error)


def _remove_tree(path: str) -> None:
    """Delete a directory and everything in it, the manifest last; links are not followed, missing files are no error.

    Other ranks of a save may still make files in it, until they hear that the save has failed.
    """
    for attempt in range(_ATTEMPT_COUNT):
        try:
            _remove_tree_once(path)
        except StorageError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST) or attempt == _ATTEMPT_COUNT - 1:
                raise
        else:
            return


def _remove_tree_once(path: str) -> None:
    _empty_tree(path)
    with ignoring(errno.ENOENT):
        filesystem().unlink(os.path.join(path, MANIFEST_NAME))
    with ignoring(errno.ENOENT):
        filesystem().remove_directory(path)


def _empty_tree(path: str, manifest_name: str = MANIFEST_NAME) -> None:
    """Delete everything in a directory but its manifest; links are not followed, missing files are no error."""
    directories = [path]
    for directory in directories:
        with ignoring(errno.ENOENT), storage_errors("listing", directory):
            with suppress(OSError):
                if os.lstat(directory).st_mode & 0o700 != 0o700:
                    os.chmod(directory, 0o700)
            with os.scandir(directory) as entries:
                listed = sorted(entries, key=lambda entry: entry.name)
            for entry in listed:
                if entry.is_dir(follow_symlinks=False):
                    directories.append(entry.path)
                elif directory != path or entry.name != manifest_name:
                    with ignoring(errno.ENOENT):
                        filesystem().unlink(entry.path)
    for directory in reversed(directories[1:]):
        with ignoring(errno.ENOENT):
            filesystem().remove_directory(directory)


def remove_directory(path: str) -> bool:
    """Remove a committed directory: take its name away durably, and only then delete its files.

    Returns:
        False if it is being read: then it stays as it is.

    Where the directory cannot be renamed, its manifest is: see the beginning of this file.

    Raises:
        CheckpointNotFoundError: There is no directory with a MANIFEST.json; nothing was removed.
        StorageError: The rename, or its sync, failed. A later sweep removes what is left.
    """
    path = resolve_final_path(path)
    with claimed(path) as lock:
        if lock is Lock.BUSY:
            return False
        if lock is Lock.NO_MANIFEST or os.path.islink(path):
            raise CheckpointNotFoundError(f"{path} is no directory with a {MANIFEST_NAME}, so it is not removed")
        hidden = hidden_path(path, "pending")
        try:
            filesystem().rename(path, hidden)
        except StorageError as error:
            if error.errno != errno.EXDEV:
                raise
            filesystem().rename(os.path.join(path, MANIFEST_NAME), os.path.join(path, _REMOVED_NAME))
            filesystem().sync_directory(path)
            with _left_behind_is_told():
                _remove_in_place(path)
            return True
        filesystem().sync_directory(os.path.dirname(path))
        with _left_behind_is_told():
            _empty_tree(hidden)
    with _left_behind_is_told():
        _remove_tree(hidden)
    return True


def _remove_in_place(path: str) -> None:
    """Remove a directory whose manifest has durably got its other name, and is locked."""
    _empty_tree(path, _REMOVED_NAME)
    filesystem().unlink(os.path.join(path, _REMOVED_NAME))
    filesystem().remove_directory(path)


@contextmanager
def _left_behind_is_told() -> Iterator[None]:
    try:
        yield
    except StorageError as error:
        _log.warning("a removed checkpoint is left behind: %s", error)
