"""What Lightning has asked for and what is not done yet: saves, second names and removals that wait for each other.

Lightning removes an old checkpoint, or links to a new one, as soon as a save has returned; here both wait until the
save is durable, and are done on the thread that has finished it. A checkpoint that was saved already gets a second name
instead of a second file; `Likeness` tells. What is saved, and when training waits, is for `plugin`.
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
    """Return what identifies a name in a directory, whatever the name itself refers to."""
    absolute = os.path.abspath(path)
    return os.path.join(os.path.realpath(os.path.dirname(absolute)), os.path.basename(absolute))


def local_path(path: object) -> str | None:
    """Return the path on this machine, None if it is elsewhere or no path at all."""
    if not isinstance(path, str | os.PathLike):
        return None
    text = os.fspath(path)
    if not isinstance(text, str):
        return None
    protocol, separator, rest = text.partition("://")
    if not separator:
        return text
    return rest if protocol in _LOCAL_PROTOCOLS else None


@dataclass(eq=False)
class _Deferred:
    """Something that is done to a name once what it needs is done."""

    key: str
    needs: list[PendingSave | _Deferred]
    act: Callable[[], None]
    source: str | None = None
    """The file that the name is to be another name of; None for a removal."""
    is_running: bool = False
    has_failed: bool = False
    done: threading.Event = field(default_factory=threading.Event)


class FileOrder:
    """Saves that are under way, and what comes after them. Thread-safe.

    Args:
        durable: Sync what is linked.
    """

    def __init__(self, *, durable: bool) -> None:
        self._durable = durable
        self._lock = threading.RLock()  # re-entrant, like all locks here: a signal handler may save
        self._saves: list[tuple[str, PendingSave]] = []  # under way
        self._deferred: list[_Deferred] = []
        self._newest: PendingSave | _Deferred | None = None  # what made the name that was accepted last
        self._failed: list[PendingSave | OSError] = []

    # --- what Lightning asks for

    def make_room(self, key: str) -> None:
        """Prepare for a save: what is still to be done to or with this name is done, or needed no more.

        A symbolic link becomes a name of its own: Lightning's saves replace the link, not the file that it leads to.
        """
        self._settle(key)
        if os.path.islink(key):
            _unlink_symbolic(key)

    def add(self, key: str, pending: PendingSave) -> None:
        """A save to this name was accepted."""
        with self._lock:
            self._saves.append((key, pending))
            self._newest = pending
        pending.when_finished(lambda: self._finish(pending))

    def link(self, source: str, key: str, *, symbolic: bool = False) -> None:
        """Give a file another name once it is durable.

        Args:
            source: Key of a file that was saved.
            key: The other name; whatever has it is replaced.
            symbolic: By a symbolic link; otherwise by a hard link, or a copy where there are no hard links.
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
                needs.append(self._newest)  # it was to be the source, most likely; there is nothing new to link to
            self._newest = _Deferred(key, needs, act, source)
            self._deferred.append(self._newest)
        self._do_what_is_due()

    def remove(self, key: str) -> None:
        """Remove a file, once everything that was accepted before is durable; it stays if that fails."""
        with self._lock:
            needs: list[PendingSave | _Deferred] = [pending for _, pending in self._saves]
            needs += [one for one in self._deferred if one.source is not None]
            if self._newest is not None and self._newest not in needs:
                needs.append(self._newest)
            self._deferred.append(_Deferred(key, needs, lambda: _remove(key)))
        self._do_what_is_due()

    # --- what there will be

    def expects(self, key: str) -> bool | None:
        """Tell whether there will be a file of this name; None if nothing is to be done to it: ask the disk."""
        with self._lock:
            deferred = [one for one in self._deferred if one.key == key]
            if deferred:
                return deferred[-1].source is not None
            return True if self._saves_of(key) else None

    def under_way(self) -> list[PendingSave]:
        """Return the saves that are not over."""
        with self._lock:
            return [pending for _, pending in self._saves]

    def wait_for(self, key: str) -> None:
        """Return when all that was accepted for a name is done."""
        with self._lock:
            deferred = [one for one in self._deferred if one.key == key]
        for pending in self._saves_of(key):
            pending.join()
        for one in deferred:
            _wait(one)

    def join(self) -> None:
        """Return when everything is done."""
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
        """Return what has failed and what nobody has been told of yet, one at a time."""
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
            for one in needless:  # a removal: the file will be replaced instead
                self._deferred.remove(one)
                one.done.set()
            waited_for = [one for one in self._deferred if key in (one.key, one.source)]
        for one in waited_for:
            _wait(one)

    def _saves_of(self, key: str) -> list[PendingSave]:
        with self._lock:
            return [pending for known, pending in self._saves if known == key]

    def _finish(self, pending: PendingSave) -> None:
        """A save is over; on the thread that has written it, before anybody who waits for it goes on."""
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
                # Links first: they replace names that may refer to what is removed.
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
            _log.warning("%s %s: the save that came before has failed", deferred.key, what)
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
            need.join()  # which also tells the writer to hurry
    deferred.done.wait()


# ------------------------------------------------------------------------------------------- whether one file will do


class Likeness:
    """What is in a checkpoint, as far as it takes to tell whether another one, of the same step, is the same.

    Tensors are the same if they are the same memory, not changed since. They are kept, or their memory could be
    another one's later.
    """

    def __init__(self, content: object, tensors: list[torch.Tensor]) -> None:
        self._content = content
        self._tensors = tensors

    @classmethod
    def of(cls, checkpoint: object) -> Likeness | None:
        """Return it, or None if something is in there that cannot be compared."""
        tensors: list[torch.Tensor] = []
        try:
            return cls(_content(checkpoint, tensors), tensors)
        except (TypeError, RuntimeError):
            return None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Likeness) and self._content == other._content

    __hash__ = None  # type: ignore[assignment]


def _content(value: Any, tensors: list[torch.Tensor]) -> object:
    """Return something that compares by ==, with the order of dicts.

    Raises:
        TypeError: There is no saying what this is, or it would take too long.
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
    with contextlib.suppress(FileNotFoundError):  # asked for twice, or somebody else has done it
        if os.path.isdir(key) and not os.path.islink(key):
            hidden = _hidden_name(key)
            os.rename(key, hidden)  # first, and for good: nobody may ever see a part of a checkpoint
            shutil.rmtree(hidden)
        else:
            os.remove(key)


def _hidden_name(key: str) -> str:
    """Return a name beside this one, of the kind that saves have: the next save to `key` removes a leftover."""
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
    if os.path.islink(key):  # it leads nowhere, or there are no hard links here
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
    if os.path.lexists(hidden):  # left by somebody who died in here
        os.remove(hidden)
    os.symlink(os.path.relpath(source, directory), hidden)
    _put_in_place(hidden, key)


def _put_in_place(hidden: str, key: str) -> None:
    if os.path.isdir(key) and not os.path.islink(key):  # a sharded checkpoint, by another strategy
        shutil.rmtree(key)
    os.replace(hidden, key)
    if os.path.lexists(hidden):  # both were names of one file already: then a rename does nothing
        os.remove(hidden)


def sync_path(path: str) -> None:
    """Make a file, or the names in a directory, durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
