"""torch.save and torch.load themselves, at our speed: programs that call them need no change.

`install` puts wrappers in their place, `uninstall` takes them away, `installed` does both around a block, and
`fastpersist run` around a whole program. A wrapper does what we speed up, an ordinary path with the usual options, and
passes everything else on to what was there before: file objects, other pickle modules and protocols, mmap, TorchScript,
legacy files, skip_data. It writes the same bytes to the same name, and raises torch's errors where torch has one.

The one limit: `from torch import save`, done before, keeps torch's own. `routed` is for the other integrations.
"""

from __future__ import annotations

import errno
import functools
import logging
import os
import pickle
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import torch

from fastpersist import FastPersistError, NoSpaceError, PendingSave, StorageError
from fastpersist import load as fast_load
from fastpersist import save as fast_save
from fastpersist import save_async as fast_save_async

from .replacing import Function, Replacement

__all__ = ["TorchNoSpaceError", "TorchStorageError", "install", "installed", "routed", "uninstall"]

_log = logging.getLogger("fastpersist")

_USUAL_PROTOCOL = 2
_USUAL_ALIGNMENT_BYTES = 64
_FORCING_VARIABLES = ("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD")


class TorchStorageError(StorageError, RuntimeError):
    """An error of the disk in an installed torch.save: a RuntimeError too, as those of torch are."""


class TorchNoSpaceError(NoSpaceError, TorchStorageError):
    """The file system had no room in an installed torch.save: a RuntimeError too, as those of torch are."""


@dataclass(frozen=True, eq=False)
class _Installation:
    """What one install() or one `with installed()` asked for."""

    is_async: bool
    is_durable: bool


Route = Callable[[object, str], bool]
"""Takes an object that is saved to a path, or says that it does not."""

_lock = threading.RLock()  # re-entrant, like all locks here: a signal handler may save
_installations: list[_Installation] = []  # the innermost last: what it says counts
_base: _Installation | None = None  # that of install()
_pending: dict[str, list[PendingSave]] = {}  # by real path, in order
_failed: list[PendingSave] = []
_routes = threading.local()


def _forget_pending() -> None:
    """In a forked child: the saves under way are the parent's."""
    global _lock
    _lock = threading.RLock()
    _pending.clear()
    _failed.clear()


os.register_at_fork(after_in_child=_forget_pending)


# ------------------------------------------------------------------------------------------- for users


def install(*, async_: bool = False, durable: bool = True) -> None:
    """Make torch.save and torch.load ours, in the whole process, until `uninstall`.

    Calls with a path and the usual options are done by `fastpersist.save` and `load`: the same bytes under the same
    name, but with storages at multiples of 4096, never half a file, and durable. All others pass through untouched.
    Again with other options: those count from now on.

    Args:
        async_: Let torch.save return when everything is copied, and write it behind. torch.load of the path, another
            save to it, `uninstall` and a normal end of the program wait for it. An error is raised by the next
            torch.save, by a torch.load of that path, or by `uninstall`.
        durable: Survive power loss once saved; without it, as with torch's own, only the page cache has the bytes.

    Thread safety: any thread; it works for all of them.
    """
    global _base
    with _lock:
        before, _base = _base, _Installation(async_, durable)
        if before is not None:
            _installations[_installations.index(before)] = _base
            return
        _installations.insert(0, _base)
    _hold()


def uninstall() -> None:
    """Undo `install`: wait for what is being written, and give torch its own functions back. May be called again.

    Raises:
        StorageError: Something that was saved asynchronously could not be written.
    """
    global _base
    with _lock:
        before, _base = _base, None
        if before is None:
            return
        _installations.remove(before)
    _release()
    if before.is_async:
        _finish_all()


@contextmanager
def installed(*, async_: bool = False, durable: bool = True) -> Iterator[None]:
    """Make torch.save and torch.load ours for the length of a block; see `install`.

    Blocks nest, with each other and inside `install`: the options of the one that began last count. At the end, what
    was saved asynchronously is waited for.

    Raises:
        StorageError: At the end of the block: something that was saved asynchronously could not be written.
    """
    installation = _Installation(async_, durable)
    with _lock:
        _installations.append(installation)
    _hold()
    finished = False
    try:
        yield
        finished = True
    finally:
        with _lock:
            _installations.remove(installation)
        _release()
        if async_:
            with nullcontext() if finished else suppress(FastPersistError):  # it is in the log; the block's own counts
                _finish_all()


@contextmanager
def routed(route: Route) -> Iterator[None]:
    """Offer what this thread saves with torch.save, to a path and with the usual options, to a function first.

    Args:
        route: Called with object and path; returns whether it has taken them.
    """
    routes = _routes.__dict__.setdefault("stack", [])
    routes.append(route)
    _hold()
    try:
        yield
    finally:
        _release()
        routes.remove(route)


# ------------------------------------------------------------------------------------------- torch.save


def _wrap_save(before: Function) -> Function:
    @functools.wraps(before)
    def save(
        obj: object,
        f: Any,
        pickle_module: Any = pickle,
        pickle_protocol: int = _USUAL_PROTOCOL,
        _use_new_zipfile_serialization: bool = True,
        _disable_byteorder_record: bool = False,
    ) -> None:
        installation = _installations[-1] if _installations else None
        path = _path_of(f)
        if path is not None and (installation is not None or _routes.__dict__.get("stack")):
            if (
                pickle_module is pickle
                and pickle_protocol == _USUAL_PROTOCOL
                and _use_new_zipfile_serialization
                and not _disable_byteorder_record
                and _has_usual_save_settings()
            ):
                if any(route(obj, path) for route in reversed(_routes.__dict__.get("stack", ()))):
                    return
                if installation is not None:
                    _save(obj, path, installation)
                    return
            _wait_for(path)
        before(obj, f, pickle_module, pickle_protocol, _use_new_zipfile_serialization, _disable_byteorder_record)

    return save


def _has_usual_save_settings() -> bool:
    """Tell whether torch.save would write its usual bytes, all of them."""
    from torch.utils.serialization import config

    return (
        getattr(config.save, "storage_alignment", _USUAL_ALIGNMENT_BYTES) == _USUAL_ALIGNMENT_BYTES
        and not torch.serialization._serialization_tls.skip_data
        and torch._guards.detect_fake_mode(None) is None
    )


def _save(obj: object, path: str, installation: _Installation) -> None:
    _raise_failed()
    checksum = torch.serialization.get_crc32_options()
    durable = installation.is_durable
    try:
        if not installation.is_async:
            _wait_for(path)
            fast_save(obj, path, durable=durable, checksum=checksum, format="torch")
            return
        pending = fast_save_async(obj, path, durable=durable, checksum=checksum, format="torch")
    except StorageError as error:
        raise _as_torch_error(error, path) from error
    with _lock:
        _pending.setdefault(os.path.realpath(path), []).append(pending)
    pending.when_finished(lambda: _forget(path, pending))


def _as_torch_error(error: StorageError, path: str) -> StorageError:
    """Return the same error, which is a RuntimeError too; in torch's words where it has any."""
    if isinstance(error, TorchStorageError):
        return error
    parent = os.path.dirname(path)
    message = str(error)
    if error.errno == errno.ENOENT and parent and not os.path.exists(parent):
        message = f"Parent directory {parent} does not exist."
    kind = TorchNoSpaceError if isinstance(error, NoSpaceError) else TorchStorageError
    return kind(error.errno, message, error.filename, getattr(error, "offset_bytes", None))


# ------------------------------------------------------------------------------------------- torch.load


def _wrap_load(before: Function) -> Function:
    @functools.wraps(before)
    def load(
        f: Any,
        map_location: Any = None,
        pickle_module: Any = None,
        *,
        weights_only: bool | None = None,
        mmap: bool | None = None,
        **pickle_load_args: Any,
    ) -> Any:
        path = _path_of(f) if _installations else None
        if path is not None:
            _wait_for(path, deliver=True)
            if (
                pickle_module is None
                and pickle_load_args in ({}, {"encoding": "utf-8"})
                and not path.endswith(".safetensors")  # by its suffix, torch loads it as one
                and not mmap
                and _has_usual_load_settings(mmap)
            ):
                try:
                    return fast_load(path, map_location=map_location, weights_only=weights_only in (None, True))
                except FastPersistError as error:  # torch shall say it in its own words, or read it
                    _log.debug("stock torch.load reads %s: %s", path, error)
        return before(f, map_location, pickle_module, weights_only=weights_only, mmap=mmap, **pickle_load_args)

    return load


def _has_usual_load_settings(mmap: bool | None) -> bool:
    """Tell whether nothing beside the arguments changes what torch.load does."""
    from torch.utils.serialization import config

    return (
        not (mmap is None and getattr(config.load, "mmap", False))
        and torch.serialization.get_default_load_endianness() is None
        and not any(name in os.environ for name in _FORCING_VARIABLES)
    )


# ------------------------------------------------------------------------------------------- behind the program


def _path_of(f: object) -> str | None:
    """Return the path that torch would open, None for a file object and what torch refuses."""
    if isinstance(f, str | os.PathLike):
        path = os.fspath(f)
        return path if isinstance(path, str) else None
    return None


def _forget(path: str, pending: PendingSave) -> None:
    """A save is over, on the thread that has written it."""
    with _lock:
        real = os.path.realpath(path)
        for key in [real, *_pending]:
            if pending in _pending.get(key, ()):
                _pending[key].remove(pending)
                if not _pending[key]:
                    del _pending[key]
                break
        if pending.stats.error is not None:
            _failed.append(pending)


def _wait_for(path: str, *, deliver: bool = False) -> None:
    """Wait for what is being saved to a path; with `deliver` raise its error."""
    if not _pending and not _failed:
        return
    real = os.path.realpath(path)
    with _lock:
        waited_for = list(_pending.get(real, ()))
        failed = [pending for pending in _failed if os.path.realpath(pending.stats.path) == real]
    for pending in waited_for:
        pending.join()
    if deliver:
        for pending in [*failed, *waited_for]:
            _deliver(pending)


def _finish_all() -> None:
    """Wait for everything that is being saved, and raise the first error."""
    with _lock:
        waited_for = [pending for saves in _pending.values() for pending in saves]
    for pending in waited_for:
        pending.join()
    _raise_failed()


def _raise_failed() -> None:
    """Raise the error of a save that failed behind the program, if there is one that nobody has seen."""
    while _failed:
        with _lock:
            pending = _failed.pop(0) if _failed else None
        if pending is not None:
            _deliver(pending)


def _deliver(pending: PendingSave) -> None:
    error = pending.undelivered_error()
    with _lock:
        if pending in _failed:
            _failed.remove(pending)
    if isinstance(error, StorageError):
        raise _as_torch_error(error, pending.stats.path) from error
    if error is not None:
        raise error


# ------------------------------------------------------------------------------------------- in torch's place

_replacements = (
    Replacement(lambda: [(torch, "save"), (torch.serialization, "save")], _wrap_save),
    Replacement(lambda: [(torch, "load"), (torch.serialization, "load")], _wrap_load),
)


def _hold() -> None:
    for replacement in _replacements:
        replacement.hold()


def _release() -> None:
    for replacement in _replacements:
        replacement.release()
