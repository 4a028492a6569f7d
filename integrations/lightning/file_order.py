"""Orders Lightning's file operations: saves, links and removals that wait for each other.

Lightning removes an old checkpoint, or links to a new one, as soon as a save has returned. `FileOrder` defers both
until the save is durable, and runs them on the thread that has finished it. A checkpoint that equals the last one
(`Likeness`) gets a second name instead of a second file. `plugin` decides what to save and when training waits.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import secrets
import shutil
import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from fastpersist import PendingSave

__all__ = ["FileOrder", "Likeness", "key_of", "local_path", "sync_path"]

_log = logging.getLogger("fastpersist")

_NO_LINK = (errno.EPERM, errno.EXDEV, errno.EMLINK, errno.EOPNOTSUPP, errno.ENOSYS)
_NAME_LIMIT_BYTES = 255
_COMPARED_COUNT = 20_000
_LOCAL_PROTOCOLS = ("file", "local")


def key_of(path: str) -> str:
    """Return a path that identifies a name in a directory; the name itself is not resolved."""
    absolute = os.path.abspath(path)
    return os.path.join(os.path.realpath(os.path.dirname(absolute)), os.path.basename(absolute))


def local_path(path: object, *, expands: bool = True) -> str | None:
    """Return the local path; None for a remote one, or for no path.

    Args:
        path: The path as it was given to Lightning.
        expands: Expand a leading `~`, as Lightning does for files, and does not for the directories of shards.
    """
    if not isinstance(path, str | os.PathLike):
        return None
    text = os.fspath(path)
    if not isinstance(text, str):
        return None
    protocol, separator, rest = text.partition("://")
    if separator and protocol not in _LOCAL_PROTOCOLS:
        return None
    found = rest if separator else text
    return os.path.expanduser(found) if expands else found


@dataclass(eq=False)
class _Deferred:
    """A link or removal that waits for other operations."""

    key: str
    needs: list[PendingSave | _Deferred]
    act: Callable[[], None]
    source: str | None = None
    """The file to link to; None for a removal."""
    is_running: bool = False
    has_failed: bool = False
    done: threading.Event = field(default_factory=threading.Event)


class FileOrder:
    """Saves under way, and the links and removals that wait for them. Thread-safe.

    Args:
        durable: Sync links and copies.
    """

    def __init__(self, *, durable: bool) -> None:
        self._durable = durable
        self._lock = threading.RLock()  # re-entrant, like all locks here: a signal handler may save
        self._saves: list[tuple[str, PendingSave]] = []  # under way
        self._deferred: list[_Deferred] = []
        self._newest: PendingSave | _Deferred | None = None  # the save or link that was accepted last
        self._failed: list[PendingSave | OSError] = []

    # --- Lightning's requests

    def make_room(self, key: str) -> None:
        """Prepare a name for a save: finish or cancel deferred operations on it.

        A symbolic link becomes a file: Lightning's saves replace the link, not its target.
        """
        self._settle(key)
        if os.path.islink(key):
            _unlink_symbolic(key)

    def add(self, key: str, pending: PendingSave) -> None:
        """Record a save to this name."""
        with self._lock:
            self._saves.append((key, pending))
            self._newest = pending
        pending.when_finished(lambda: self._finish(pending))

    def link(self, source: str, key: str, *, symbolic: bool = False) -> None:
        """Give a file another name once it is durable.

        Args:
            source: Key of a file that was saved.
            key: The other name; an existing file is replaced.
            symbolic: Make a symbolic link; else a hard link, or a copy where there are no hard links.
        """
        self._settle(key)
        for pending in self._saves_of(key):
            pending.join()

        def act() -> None:
            if symbolic:
                _link_symbolically(source, key)
            else:
                _link(source, key, durable=self._durable)

        with self._lock:
            needs: list[PendingSave | _Deferred] = [*self._saves_of(source)]
            if not needs and self._newest is not None and _has_failed(self._newest):
                needs.append(self._newest)  # most likely the source's own save: there is no new file to link to
            self._newest = _Deferred(key, needs, act, source)
            self._deferred.append(self._newest)
        self._do_what_is_due()

    def remove(self, key: str) -> None:
        """Remove a file once all earlier operations are done and durable; keep it if one of them fails."""
        with self._lock:
            needs: list[PendingSave | _Deferred] = [pending for _, pending in self._saves]
            needs += [one for one in self._deferred if one.source is not None]
            if self._newest is not None and self._newest not in needs:
                needs.append(self._newest)
            self._deferred.append(_Deferred(key, needs, lambda: _remove(key)))
        self._do_what_is_due()

    # --- pending state

    def expects(self, key: str) -> bool | None:
        """Return whether this name will exist after all pending operations; None if none concerns it."""
        with self._lock:
            deferred = [one for one in self._deferred if one.key == key]
            if deferred:
                return deferred[-1].source is not None
            return True if self._saves_of(key) else None

    def under_way(self) -> list[PendingSave]:
        """Return the saves under way."""
        with self._lock:
            return [pending for _, pending in self._saves]

    def wait_for(self, key: str) -> None:
        """Wait until all operations on a name are done."""
        with self._lock:
            deferred = [one for one in self._deferred if one.key == key]
        for pending in self._saves_of(key):
            pending.join()
        for one in deferred:
            _wait(one)

    def join(self) -> None:
        """Wait until all operations are done."""
        while True:
            with self._lock:
                saves, deferred = self.under_way(), list(self._deferred)
            if not saves and not deferred:
                return
            for pending in saves:
                pending.join()
            for one in deferred:
                _wait(one)

    def next_error(self) -> BaseException | None:
        """Return the next error that was not raised yet; None if there is none."""
        while True:
            with self._lock:
                if not self._failed:
                    return None
                failed = self._failed.pop(0)
            error = failed.undelivered_error() if isinstance(failed, PendingSave) else failed
            if error is not None:
                return error

    # --- inside

    def _settle(self, key: str) -> None:
        with self._lock:
            needless = [one for one in self._deferred if one.key == key and one.source is None and not one.is_running]
            for one in needless:  # removals: the save replaces the file anyway
                self._deferred.remove(one)
                one.done.set()
            waited_for = [one for one in self._deferred if key in (one.key, one.source)]
        for one in waited_for:
            _wait(one)

    def _saves_of(self, key: str) -> list[PendingSave]:
        with self._lock:
            return [pending for known, pending in self._saves if known == key]

    def _finish(self, pending: PendingSave) -> None:
        """Handle the end of a save, on its writing thread, before its waiters go on."""
        with self._lock:
            self._saves = [(key, one) for key, one in self._saves if one is not pending]
            if pending.stats.error is not None:
                self._failed.append(pending)
        self._do_what_is_due()

    def _do_what_is_due(self) -> None:
        while True:
            with self._lock:
                due = [
                    one
                    for one in self._deferred
                    if not one.is_running and all(self._is_over(need) for need in one.needs)
                ]
                if not due:
                    return
                # Links first: they replace names that may refer to a file that a removal deletes.
                chosen = next((one for one in due if one.source is not None), due[0])
                chosen.is_running = True
            try:
                self._do(chosen)
            finally:
                with self._lock:
                    self._deferred.remove(chosen)
                    chosen.needs.clear()
                chosen.done.set()

    def _is_over(self, need: PendingSave | _Deferred) -> bool:
        if isinstance(need, _Deferred):
            return need.done.is_set()
        return all(pending is not need for _, pending in self._saves)

    def _do(self, deferred: _Deferred) -> None:
        if any(_has_failed(need) for need in deferred.needs):
            deferred.has_failed = True
            what = "is not removed" if deferred.source is None else f"does not become another name of {deferred.source}"
            _log.warning("%s %s: an earlier save has failed", deferred.key, what)
            return
        try:
            deferred.act()
        except OSError as error:
            deferred.has_failed = True
            _log.error("after a save: %s: %s", deferred.key, error)
            with self._lock:
                self._failed.append(error)


def _has_failed(need: PendingSave | _Deferred) -> bool:
    return need.has_failed if isinstance(need, _Deferred) else need.stats.error is not None


def _wait(deferred: _Deferred) -> None:
    for need in list(deferred.needs):
        if isinstance(need, _Deferred):
            _wait(need)
        else:
            need.join()  # also tells the writer to hurry
    deferred.done.wait()


# ------------------------------------------------------------------------------------------- whether one file will do


class Likeness:
    """Fingerprint of a checkpoint's content, to recognize an equal checkpoint of the same step.

    Tensors are equal if they are the same memory with the same version. The fingerprint keeps them alive, so that no
    new tensor can reuse their memory.
    """

    def __init__(self, content: object, tensors: list[torch.Tensor]) -> None:
        self._content = content
        self._tensors = tensors

    @classmethod
    def of(cls, checkpoint: object) -> Likeness | None:
        """Return the fingerprint of a checkpoint; None if it holds an object that cannot be compared."""
        tensors: list[torch.Tensor] = []
        try:
            return cls(_content(checkpoint, tensors), tensors)
        except (TypeError, RuntimeError):
            return None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Likeness) and self._content == other._content

    __hash__ = None  # type: ignore[assignment]


def _content(value: Any, tensors: list[torch.Tensor]) -> object:
    """Return a value that compares by ==, and keeps the order of dicts.

    Raises:
        TypeError: An object of unknown type, or a collection too long to compare.
        RuntimeError: A tensor without memory or without a counter of changes.
    """
    if type(value) in (torch.Tensor, torch.nn.Parameter):
        tensors.append(value)
        place = value.data_ptr(), value.untyped_storage().nbytes(), str(value.device), value.layout
        return place, value.dtype, value.shape, value.stride(), value.storage_offset(), value._version
    if isinstance(value, Collection) and not isinstance(value, str | bytes) and len(value) > _COMPARED_COUNT:
        raise TypeError(f"a {type(value).__name__} of {len(value)} is not compared")
    if isinstance(value, Mapping):
        return type(value), [(_content(key, tensors), _content(item, tensors)) for key, item in value.items()]
    if isinstance(value, list | tuple):
        return type(value), [_content(item, tensors) for item in value]
    if isinstance(value, set | frozenset):
        return type(value), sorted(repr(_content(item, tensors)) for item in value)
    if value is None or isinstance(
        value, bool | int | float | complex | str | bytes | os.PathLike | type | torch.dtype | torch.device
    ):
        return type(value), repr(value)
    raise TypeError(f"{type(value).__name__} is not compared")


# ------------------------------------------------------------------------------------------- on the disk


def _remove(key: str) -> None:
    with contextlib.suppress(FileNotFoundError):  # removed already
        if os.path.isdir(key) and not os.path.islink(key):
            hidden = _hidden_name(key)
            os.rename(key, hidden)  # first: no reader may ever see a part of a checkpoint
            shutil.rmtree(hidden)
        else:
            os.remove(key)


def _hidden_name(key: str) -> str:
    """Return a hidden name beside this one, as saves use it, so that the next save to `key` removes a leftover."""
    directory, name = os.path.split(key)
    token = secrets.token_hex(8)
    hidden_name = f".{name}.pending-{token}"
    if len(os.fsencode(hidden_name)) > _NAME_LIMIT_BYTES:
        hidden_name = f".link.pending-{token}"
    return os.path.join(directory, hidden_name)


def _unlink_symbolic(key: str) -> None:
    hidden = _hidden_name(key)
    with contextlib.suppress(OSError):
        os.link(os.path.realpath(key), hidden)
        os.replace(hidden, key)
    if os.path.islink(key):  # its target does not exist, or the file system has no hard links
        os.remove(key)


def _link(source: str, key: str, *, durable: bool) -> None:
    """Make `key` another name of a file, or a copy of it, in one step."""
    hidden = _hidden_name(key)
    try:
        try:
            os.link(source, hidden)
        except OSError as error:
            if error.errno not in _NO_LINK:
                raise
            shutil.copyfile(source, hidden)
            shutil.copymode(source, hidden)
            if durable:
                sync_path(hidden)
        _put_in_place(hidden, key)
    except OSError:
        if os.path.lexists(hidden):
            os.remove(hidden)
        raise
    if durable:
        sync_path(os.path.dirname(key))


def _link_symbolically(source: str, key: str) -> None:
    """Make `key` a symbolic link to a file, relative as Lightning makes it, in one step."""
    directory, name = os.path.split(key)
    hidden = os.path.join(directory, f".{name}.link"[-_NAME_LIMIT_BYTES:])
    if os.path.lexists(hidden):  # left by a process that died here
        os.remove(hidden)
    os.symlink(os.path.relpath(source, directory), hidden)
    _put_in_place(hidden, key)


def _put_in_place(hidden: str, key: str) -> None:
    if os.path.isdir(key) and not os.path.islink(key):  # a sharded checkpoint of another strategy
        shutil.rmtree(key)
    os.replace(hidden, key)
    if os.path.lexists(hidden):  # both names were hard links of one file: then rename does nothing
        os.remove(hidden)


def sync_path(path: str) -> None:
    """Make a file, or the names in a directory, durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
