"""FastPersist behind torch.save and torch.load: programs that call them need no change.

`install` replaces the two functions by wrappers, `uninstall` restores them, `installed` does both around a block, and
`fastpersist run` around a whole program. A wrapper handles calls with an ordinary path and the usual options. It passes
all others on to the function that it replaced: file objects, other pickle modules and protocols, mmap, TorchScript,
legacy files, skip_data, open temporary files. It writes the same contents under the same name, and raises torch's
errors where torch has one.

One limit: `from torch import save` before `install` keeps torch's function. `routed` is for the other integrations.
"""

from __future__ import annotations

import errno
import fcntl
import functools
import logging
import os
import pickle
import stat
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from fastpersist import FastPersistError, NoSpaceError, PendingSave, StorageError
from fastpersist import load as fast_load
from fastpersist import save as fast_save
from fastpersist import save_async as fast_save_async

from ._shared.replacement import Function, Replacement

__all__ = ["Route", "TorchNoSpaceError", "TorchStorageError", "install", "installed", "routed", "uninstall"]

_log = logging.getLogger("fastpersist")

_USUAL_PROTOCOL = 2
_ALIGNMENT_BYTES = 4096
"""Alignment of storages in our files; torch's is 64, or the user's setting."""

_ZIP_MAGIC = b"PK\x03\x04"
_FORCING_VARIABLES = ("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD")

# Errors of a path that cannot be opened for writing: torch.save reports them in its own words.
_BAD_PATH = (
    errno.EACCES,
    errno.EISDIR,
    errno.ELOOP,
    errno.ENAMETOOLONG,
    errno.ENOENT,
    errno.ENOTDIR,
    errno.EPERM,
    errno.EROFS,
)


class TorchStorageError(StorageError, RuntimeError):
    """Storage error of an installed torch.save; also a RuntimeError, as torch raises."""


class TorchNoSpaceError(NoSpaceError, TorchStorageError):
    """The file system is full, in an installed torch.save; also a RuntimeError, as torch raises."""


Route: TypeAlias = Callable[[object, str], bool]
"""Function of an object and its path; it saves the object and returns True, or returns False."""


@dataclass(frozen=True, eq=False)
class _Installation:
    """Options of one install(), or of one `with installed()`."""

    is_async: bool
    is_durable: bool


@dataclass(frozen=True, eq=False)
class _SaveBehind:
    """An asynchronous save that is under way, or has failed."""

    real_path: str
    pending: PendingSave


class _Routes(threading.local):
    """The routes of each thread, the innermost last."""

    def __init__(self) -> None:
        self.stack: list[Route] = []


_lock = threading.RLock()  # re-entrant, like all locks here: a signal handler may save
_installations: tuple[_Installation, ...] = ()  # the last one's options apply
_base: _Installation | None = None  # the installation of install()
_behind: list[_SaveBehind] = []  # in order; failed saves stay until a call has raised their error
_routes = _Routes()


def _forget_saves() -> None:
    """In a forked child: the saves under way are the parent's."""
    global _lock
    _lock = threading.RLock()
    _behind.clear()


os.register_at_fork(after_in_child=_forget_saves)


# ------------------------------------------------------------------------------------------- for users


def install(*, async_: bool = False, durable: bool = True) -> None:
    """Replace torch.save and torch.load by FastPersist in the whole process, until `uninstall`.

    `fastpersist.save` and `load` handle calls with a path and the usual options. Files have the same contents under the
    same name; storages start at multiples of 4096, and each file is complete and durable when it appears. All other
    calls pass through untouched. A path that can be written but not replaced is written in place, as by torch
    (`in_place=` of `fastpersist.save`). Readers that have an older file of that name open or mapped keep it. A second
    call replaces the options.

    Args:
        async_: Let torch.save return when everything is copied, and write in the background. torch.load of the path,
            another save to it, `uninstall` and a normal end of the program wait for the write; other readers find the
            older file until then. An error is logged at once. The next torch.save (which then saves nothing), a
            torch.load of that path, or `uninstall` raises it, whichever comes first.
        durable: Survive power loss once saved. False: only the page cache has the bytes, as with stock torch.save.

    Thread safety: any thread; the replacement affects all threads.
    """
    global _base
    installation = _Installation(async_, durable)
    with _lock:
        before, _base = _base, installation
        _begin(installation)
    if before is not None:
        _end(before)


def uninstall() -> None:
    """Undo `install`: wait for asynchronous saves, and restore torch's functions. Idempotent.

    Raises:
        StorageError: An asynchronous save failed, and no call has raised its error yet. It is a RuntimeError too.
    """
    global _base
    with _lock:
        before, _base = _base, None
    if before is not None:
        _end(before)
        _tell(_finish())


@contextmanager
def installed(*, async_: bool = False, durable: bool = True) -> Iterator[None]:
    """Replace torch.save and torch.load by FastPersist in the whole process, during a block; see `install`.

    Blocks nest, with each other and with `install`; the options of the latest apply. The end of the block waits for
    asynchronous saves.

    Raises:
        StorageError: At the end of the block: an asynchronous save failed, and no call has raised its error yet. It is
            a RuntimeError too. If the block itself raises, this error is only logged.
    """
    installation = _Installation(async_, durable)
    _begin(installation)
    try:
        yield
    except BaseException:
        _end(installation)
        _take_errors(_finish())
        raise
    _end(installation)
    _tell(_finish())


@contextmanager
def routed(route: Route) -> Iterator[None]:
    """Offer this thread's torch.save calls, if they have a path and the usual options, to a function first.

    Args:
        route: Called with object and path; returns whether it has saved the object.
    """
    _routes.stack.append(route)
    _hold()
    try:
        yield
    finally:
        _release()
        _routes.stack.remove(route)


def _begin(installation: _Installation) -> None:
    global _installations
    with _lock:
        _installations = (*_installations, installation)
    _hold()


def _end(installation: _Installation) -> None:
    global _installations
    with _lock:
        _installations = tuple(other for other in _installations if other is not installation)
    _release()


# ------------------------------------------------------------------------------------------- torch.save


def _wrap_save(before: Function) -> Function:
    def save(
        obj: object,
        f: Any,
        pickle_module: Any = pickle,
        pickle_protocol: int = _USUAL_PROTOCOL,
        _use_new_zipfile_serialization: bool = True,
        _disable_byteorder_record: bool = False,
    ) -> None:
        installations, routes = _installations, _routes.stack
        path = _path_of(f) if installations or routes else None
        if path is not None:
            is_usual = (
                pickle_module is pickle
                and pickle_protocol == _USUAL_PROTOCOL
                and _use_new_zipfile_serialization
                and not _disable_byteorder_record
                and _names_a_file(path)
                and _has_usual_save_settings()
            )
            if is_usual and any(route(obj, path) for route in reversed(routes)):
                return
            _finish(path)
            if is_usual and installations and _save(obj, path, installations[-1]):
                return
        before(obj, f, pickle_module, pickle_protocol, _use_new_zipfile_serialization, _disable_byteorder_record)

    return save


def _names_a_file(path: str) -> bool:
    """Return whether torch can name its archive after the path, and splits off the same directory as we do."""
    name = os.path.basename(path)
    stem, dot, _ = name.rpartition(".")
    return bool(stem if dot else name) and "\\" not in path


def _has_usual_save_settings() -> bool:
    """Return whether torch.save would write all of its usual records."""
    from torch.utils.serialization import config

    alignment_bytes = getattr(config.save, "storage_alignment", 64)  # torch 2.7 may not have it
    return (
        alignment_bytes > 0
        and _ALIGNMENT_BYTES % alignment_bytes == 0
        and not torch.serialization._serialization_tls.skip_data
        and torch._guards.detect_fake_mode(None) is None
    )


def _save(obj: object, path: str, installation: _Installation) -> bool:
    """Save; return False where stock torch.save must write, or must raise its own error."""
    _tell(save for save in list(_behind) if save.pending.done())
    if _is_open_for_writing(path):
        return False
    durable, checksum = installation.is_durable, torch.serialization.get_crc32_options()
    try:
        if installation.is_async:
            pending = fast_save_async(obj, path, durable=durable, checksum=checksum, format="torch", in_place=True)
            _note(path, pending)
        else:
            fast_save(obj, path, durable=durable, checksum=checksum, format="torch", in_place=True)
    except TorchStorageError:  # from a nested torch.save, called while the object was pickled
        raise
    except StorageError as error:
        if error.errno in _BAD_PATH:
            _log.debug("stock torch.save reports this error: %s", error)
            return False
        raise _as_torch_error(error) from error
    return True


def _is_open_for_writing(path: str) -> bool:
    """Return whether this program has the file open for writing, such as a temporary file.

    Its descriptor would still refer to the old file after we replace it; torch writes into the old file.
    """
    try:
        wanted = os.stat(path)
        fds = [int(name) for name in os.listdir("/proc/self/fd")]
    except OSError:
        return False
    for fd in fds:
        try:
            if os.path.samestat(os.fstat(fd), wanted) and fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDONLY:
                return True
        except OSError:
            continue  # another thread has closed it
    return False


def _as_torch_error(error: StorageError, note: str = "") -> TorchStorageError:
    """Convert an error to its class that is also a RuntimeError."""
    kind = TorchNoSpaceError if isinstance(error, NoSpaceError) else TorchStorageError
    return kind(error.errno, f"{error}{note}", error.filename, error.offset_bytes)


# ------------------------------------------------------------------------------------------- torch.load


def _wrap_load(before: Function) -> Function:
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
            _tell(_finish(path))
            if (
                (map_location is None or isinstance(map_location, str | dict | torch.device))
                and pickle_module is None
                and not pickle_load_args
                and _has_usual_load_settings(mmap)
                and _is_torch_zip(path)
            ):
                try:
                    safe = weights_only is None or bool(weights_only)
                    return fast_load(path, map_location=map_location, weights_only=safe)
                except TorchStorageError:  # from a nested torch.save or load, called while the object was unpickled
                    raise
                except FastPersistError as error:  # torch may read the file, or raises its own error
                    _log.debug("stock torch.load reads %s: %s", path, error)
        return before(f, map_location, pickle_module, weights_only=weights_only, mmap=mmap, **pickle_load_args)

    return load


def _has_usual_load_settings(mmap: bool | None) -> bool:
    """Return whether torch.load would read (not map) the file, and no global setting changes how."""
    from torch.utils.serialization import config

    return (
        not (config.load.mmap if mmap is None else mmap)
        and torch.serialization.get_default_load_endianness() is None
        and not any(name in os.environ for name in _FORCING_VARIABLES)
    )


def _is_torch_zip(path: str) -> bool:
    """Return whether torch would read the file as its zip format, by its suffix and its first bytes."""
    if path.endswith(".safetensors"):
        return False
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            return False
        with open(path, "rb") as file:
            return file.read(len(_ZIP_MAGIC)) == _ZIP_MAGIC
    except (OSError, ValueError):
        return False


# ------------------------------------------------------------------------------------------- asynchronous saves


def _path_of(f: object) -> str | None:
    """Return the path that torch would open; None for a file object, and for paths that torch must judge.

    For torch "~" is the name of a directory; our own functions would expand it.
    """
    path = os.fspath(f) if isinstance(f, str | os.PathLike) else None
    is_ours = isinstance(path, str) and "\0" not in path and os.path.expanduser(path) == path
    return path if is_ours else None


def _note(path: str, pending: PendingSave) -> None:
    """Remember a save until it is published, or a call has raised its error."""
    save = _SaveBehind(os.path.realpath(path), pending)
    with _lock:
        _behind.append(save)

    def over() -> None:
        if pending.stats.error is None:
            _forget(save)

    pending.when_finished(over)


def _forget(save: _SaveBehind) -> None:
    with _lock:
        if save in _behind:
            _behind.remove(save)


def _finish(path: str | None = None) -> list[_SaveBehind]:
    """Wait for the asynchronous saves to a path, or all of them; return them, earlier failed ones included."""
    if not _behind:
        return []
    real_path = None if path is None else os.path.realpath(path)
    with _lock:
        found = [save for save in _behind if real_path in (None, save.real_path)]
    for save in found:
        save.pending.join()
    return found


def _take_errors(saves: Iterable[_SaveBehind]) -> list[BaseException]:
    """Return the errors of finished saves that no call has raised yet, and forget these saves."""
    errors = []
    for save in saves:
        error = save.pending.undelivered_error()
        _forget(save)
        if error is not None:
            errors.append(error)
    return errors


def _tell(saves: Iterable[_SaveBehind]) -> None:
    """Raise the first error of finished saves that no call has raised yet. The log has all of them."""
    errors = _take_errors(saves)
    if not errors:
        return
    first, more = errors[0], len(errors) - 1
    if isinstance(first, StorageError):
        raise _as_torch_error(first, f" ({more} more failed, see the log)" if more else "") from first
    raise first


# ------------------------------------------------------------------------------------------- in torch's place


def _not_compiled(wrap: Callable[[Function], Function]) -> Callable[[Function], Function]:
    """Exclude a wrapper from torch.compile, which excludes torch's own save and load too."""

    def wrap_both(before: Function) -> Function:
        wrapper = functools.wraps(before)(wrap(before))
        disabled: Function | None = None

        def call(*args: Any, **options: Any) -> Any:
            nonlocal disabled
            if disabled is None:
                if "torch._dynamo" not in sys.modules:  # nothing is compiled, and the import would take a second
                    return wrapper(*args, **options)
                disabled = torch.compiler.disable(wrapper)
            return disabled(*args, **options)

        return call

    return wrap_both


_replacements = (
    Replacement(lambda: [(torch, "save"), (torch.serialization, "save")], _not_compiled(_wrap_save)),
    Replacement(lambda: [(torch, "load"), (torch.serialization, "load")], _not_compiled(_wrap_load)),
)


def _hold() -> None:
    for replacement in _replacements:
        replacement.hold()


def _release() -> None:
    for replacement in _replacements:
        replacement.release()
