"""torch.save and torch.load themselves, at our speed: programs that call them need no change.

`install` puts wrappers in their place, `uninstall` takes them away, `installed` does both around a block, and
`fastpersist run` around a whole program. A wrapper does what we speed up, an ordinary path with the usual options, and
passes everything else on to what was there before: file objects, other pickle modules and protocols, mmap, TorchScript,
legacy files, skip_data, temporary files that are open. It writes the same contents to the same name, and raises torch's
errors where torch has one.

The one limit: `from torch import save`, done before, keeps torch's own. `routed` is for the other integrations.
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
"""Of storages in our files; torch's own is 64, or what the user has asked for."""

_ZIP_MAGIC = b"PK\x03\x04"
_FORCING_VARIABLES = ("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD")

# No file can be opened for writing there, by nobody.
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
    """An error of the disk in an installed torch.save: a RuntimeError too, as those of torch are."""


class TorchNoSpaceError(NoSpaceError, TorchStorageError):
    """The file system had no room in an installed torch.save: a RuntimeError too, as those of torch are."""


Route: TypeAlias = Callable[[object, str], bool]
"""Takes an object that is saved to a path, or says that it does not."""


@dataclass(frozen=True, eq=False)
class _Installation:
    """What one install(), or one `with installed()`, asked for."""

    is_async: bool
    is_durable: bool


@dataclass(frozen=True, eq=False)
class _SaveBehind:
    """A save that is being written behind the program, or has failed there."""

    real_path: str
    pending: PendingSave


class _Routes(threading.local):
    """Those of each thread, the innermost last."""

    def __init__(self) -> None:
        self.stack: list[Route] = []


_lock = threading.RLock()  # re-entrant, like all locks here: a signal handler may save
_installations: tuple[_Installation, ...] = ()  # the latest last: what it says counts
_base: _Installation | None = None  # that of install()
_behind: list[_SaveBehind] = []  # in order; those that failed stay until somebody is told
_routes = _Routes()


def _forget_saves() -> None:
    """In a forked child: the saves under way are the parent's."""
    global _lock
    _lock = threading.RLock()
    _behind.clear()


os.register_at_fork(after_in_child=_forget_saves)


# ------------------------------------------------------------------------------------------- for users


def install(*, async_: bool = False, durable: bool = True) -> None:
    """Make torch.save and torch.load ours, in the whole process, until `uninstall`.

    Calls with a path and the usual options are done by `fastpersist.save` and `load`: the same contents under the same
    name, but with storages at multiples of 4096, never half a file, and durable. All others pass through untouched.
    What can be written but not replaced torch writes in place, as it always does (`in_place=` of `fastpersist.save`).
    Who has an older file of that name open for reading, or mapped, keeps that. Again with other options: those count
    from now on.

    Args:
        async_: Let torch.save return when everything is copied, and write it behind. torch.load of the path, another
            save to it, `uninstall` and a normal end of the program wait for it; what reads the file in another way
            finds the older one until it is done. An error is in the log at once, and is raised by the next torch.save
            (which then does nothing else), by a torch.load of that path, or by `uninstall`, whichever comes first.
        durable: Survive power loss once saved; without it, as with torch's own, only the page cache has the bytes.

    Thread safety: any thread; it works for all of them.
    """
    global _base
    installation = _Installation(async_, durable)
    with _lock:
        before, _base = _base, installation
        _begin(installation)
    if before is not None:
        _end(before)


def uninstall() -> None:
    """Undo `install`: wait for what is being written, and give torch its own functions back. May be called again.

    Raises:
        StorageError: Something that was saved asynchronously could not be written, and nobody was told. It is a
            RuntimeError too.
    """
    global _base
    with _lock:
        before, _base = _base, None
    if before is not None:
        _end(before)
        _tell(_finish())


@contextmanager
def installed(*, async_: bool = False, durable: bool = True) -> Iterator[None]:
    """Make torch.save and torch.load ours, in the whole process, for the length of a block; see `install`.

    Blocks nest, with each other and with `install`: the options of the one that began last count. At the end, what is
    being written is waited for.

    Raises:
        StorageError: At the end of the block: something that was saved asynchronously could not be written, and nobody
            was told. It is a RuntimeError too. If the block raises, that counts, and this is in the log only.
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
    """Offer what this thread saves with torch.save, to a path and with the usual options, to a function first.

    Args:
        route: Called with object and path; returns whether it has taken them.
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
    """Tell whether torch can name an archive after it, and takes the same part of it for the directory."""
    name = os.path.basename(path)
    stem, dot, _ = name.rpartition(".")
    return bool(stem if dot else name) and "\\" not in path


def _has_usual_save_settings() -> bool:
    """Tell whether torch.save would write its usual records, all of them."""
    from torch.utils.serialization import config

    alignment_bytes = getattr(config.save, "storage_alignment", 64)  # torch 2.7 may not have it
    return (
        alignment_bytes > 0
        and _ALIGNMENT_BYTES % alignment_bytes == 0
        and not torch.serialization._serialization_tls.skip_data
        and torch._guards.detect_fake_mode(None) is None
    )


def _save(obj: object, path: str, installation: _Installation) -> bool:
    """Save; False where that is torch's to do, or to say why it cannot be done."""
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
    except TorchStorageError:  # of a torch.save that pickling the object has called
        raise
    except StorageError as error:
        if error.errno in _BAD_PATH:
            _log.debug("torch.save itself shall say why: %s", error)
            return False
        raise _as_torch_error(error) from error
    return True


def _is_open_for_writing(path: str) -> bool:
    """Tell whether this program has the file open for writing, as a temporary one.

    It would go on with the old file where we put a new one; torch writes into the old one.
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
            continue  # closed meanwhile
    return False


def _as_torch_error(error: StorageError, note: str = "") -> TorchStorageError:
    """Return the same error, which is a RuntimeError too."""
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
                except TorchStorageError:  # of a torch.save or load that unpickling the object has called
                    raise
                except FastPersistError as error:  # torch shall say it in its own words, or read it
                    _log.debug("stock torch.load reads %s: %s", path, error)
        return before(f, map_location, pickle_module, weights_only=weights_only, mmap=mmap, **pickle_load_args)

    return load


def _has_usual_load_settings(mmap: bool | None) -> bool:
    """Tell whether torch.load would read the file, and nothing beside its arguments changes how."""
    from torch.utils.serialization import config

    return (
        not (config.load.mmap if mmap is None else mmap)
        and torch.serialization.get_default_load_endianness() is None
        and not any(name in os.environ for name in _FORCING_VARIABLES)
    )


def _is_torch_zip(path: str) -> bool:
    """Tell whether torch would read the file as its zip: by its suffix, then its first bytes."""
    if path.endswith(".safetensors"):
        return False
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            return False
        with open(path, "rb") as file:
            return file.read(len(_ZIP_MAGIC)) == _ZIP_MAGIC
    except (OSError, ValueError):
        return False


# ------------------------------------------------------------------------------------------- behind the program


def _path_of(f: object) -> str | None:
    """Return the path that torch would open, None for a file object, and for what is torch's to judge."""
    path = os.fspath(f) if isinstance(f, str | os.PathLike) else None
    return path if isinstance(path, str) and "\0" not in path else None


def _note(path: str, pending: PendingSave) -> None:
    """Remember a save until it is there, or somebody was told that it is not."""
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
    """Wait for what is being saved, to a path or at all; return it, and what has failed before."""
    if not _behind:
        return []
    real_path = None if path is None else os.path.realpath(path)
    with _lock:
        found = [save for save in _behind if real_path in (None, save.real_path)]
    for save in found:
        save.pending.join()
    return found


def _take_errors(saves: Iterable[_SaveBehind]) -> list[BaseException]:
    """Return the errors that nobody has seen, of saves that are over; from now on somebody has."""
    errors = []
    for save in saves:
        error = save.pending.undelivered_error()
        _forget(save)
        if error is not None:
            errors.append(error)
    return errors


def _tell(saves: Iterable[_SaveBehind]) -> None:
    """Raise the first error that nobody has seen, of saves that are over. All are in the log."""
    errors = _take_errors(saves)
    if not errors:
        return
    first, more = errors[0], len(errors) - 1
    if isinstance(first, StorageError):
        raise _as_torch_error(first, f" ({more} more failed, see the log)" if more else "") from first
    raise first


# ------------------------------------------------------------------------------------------- in torch's place


def _not_compiled(wrap: Callable[[Function], Function]) -> Callable[[Function], Function]:
    """Keep torch.compile out of a wrapper, as it keeps out of torch's own functions."""

    def wrap_both(before: Function) -> Function:
        wrapper = functools.wraps(before)(wrap(before))
        disabled: Function | None = None

        def call(*args: Any, **options: Any) -> Any:
            nonlocal disabled
            if disabled is None:
                if "torch._dynamo" not in sys.modules:  # nobody compiles, and importing it would take a second
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
