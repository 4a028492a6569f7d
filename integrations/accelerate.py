"""Accelerate's save_state and load_state, with writing in the background.

    from fastpersist.integrations.accelerate import load_state, save_state

    save_state(accelerator, "checkpoint")      # in place of accelerator.save_state("checkpoint")
    load_state(accelerator, "checkpoint")      # in place of accelerator.load_state("checkpoint")

Accelerate decides what a checkpoint holds: we call its save_state with a hidden directory, and redirect the files into
a `DirectorySave` (`redirection`). The files are Accelerate's, plus a MANIFEST.json, so stock load_state reads them, and
this one reads stock checkpoints. FastPersist adds: training goes on during the write, a directory becomes visible only
when it is complete, and old checkpoints are removed only after that. With FSDP, each process writes its shards, and
reads the shards that it needs (`sharded_redirection`).
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import uuid
import warnings
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch

from fastpersist import (
    CheckpointNotFoundError,
    ConfigError,
    DirectorySave,
    FastPersistError,
    PeerDirectorySave,
    PendingSave,
    StorageError,
    directory_save_together,
    installed,
    require_replaceable,
    verify,
)

from ._shared.agreement import PeerFailure, on_all_ranks
from ._shared.redirection import Redirection, saves_into
from ._shared.requirements import require
from ._shared.save_figures import SaveFigures
from .torch_save import routed

require("accelerate", "accelerate", "1.1")

from accelerate import Accelerator  # type: ignore[import-untyped] # noqa: E402 - the line above explains its absence
from accelerate.utils import broadcast_object_list  # type: ignore[import-untyped] # noqa: E402

__all__ = ["load_state", "save_state", "wait"]

_log = logging.getLogger("fastpersist")

_MANIFEST_NAME = "MANIFEST.json"
_CHECKPOINT = re.compile(r"checkpoint_(\d+)")
_REMOVED = re.compile(r"\.checkpoint_\d+\.removed-[0-9a-f]+")
_RANDOM_STATE = re.compile(r"random_states_\d+\.pkl")
# Files of Accelerate's own save_state, in all versions.
_FILE_OF_ACCELERATE = re.compile(
    r"(model|pytorch_model|optimizer|scheduler|sampler|dl_state_dict)(_\d+)?\.(bin|safetensors)"
    r"|pytorch_model_fsdp(_\d+)?(_rank\d+)?\.bin|(pytorch_model_fsdp|optimizer)_\d+"
    rf"|{_RANDOM_STATE.pattern}|custom_checkpoint_\d+\.pkl|scaler\.pt"
)
_WRITTEN_BY_ALL = re.compile(r"scaler\.pt|dl_state_dict(_\d+)?\.bin")  # by stock Accelerate, on every process
_STRATEGIES = ("NO", "MULTI_", "FSDP")  # all others save by themselves

_Files: TypeAlias = DirectorySave | PeerDirectorySave


@dataclass(frozen=True)
class _Latest:
    """The last save of an accelerator, and its costs until they are logged."""

    save: PendingSave
    on_error: str
    figures: SaveFigures


_latest: weakref.WeakKeyDictionary[Any, _Latest] = weakref.WeakKeyDictionary()
_plans: weakref.WeakKeyDictionary[Any, dict[str, Any]] = weakref.WeakKeyDictionary()  # of shards, for the next save
os.register_at_fork(after_in_child=_latest.clear)  # the saves under way are the parent's


# ------------------------------------------------------------------------------------------- for users


def save_state(
    accelerator: Accelerator,
    output_dir: str | os.PathLike[str] | None = None,
    *,
    safe_serialization: bool = True,
    on_error: Literal["raise", "warn"] = "raise",
    engine: str = "auto",
    **save_model_func_kwargs: Any,
) -> PendingSave | None:
    """Save the state that accelerator.save_state saves, while training goes on.

    Returns when everything that may change before the next step is copied. Parameters and optimizer states are written
    in place; the optimizers' next step waits until the part not yet written is copied. The directory becomes visible
    when all of it is durable. One save is under way at a time: this waits for the last one.

    An existing directory is replaced as a whole, if it holds nothing but a checkpoint. With automatic checkpoint
    naming, Accelerate chooses the names (checkpoints/checkpoint_N), and checkpoints beyond `total_limit` are removed
    when the new one is durable. Registered save hooks run, and write into the hidden directory.

    All processes call it. They need one file system. With FSDP and SHARDED_STATE_DICT each process writes its shards
    under Accelerate's names; with FULL_STATE_DICT the main process writes the gathered state. With FSDP1, which moves
    parameters between two steps, everything is copied before this returns.

    Args:
        accelerator: The Accelerator, with everything prepared.
        output_dir: The target; missing parents are made. Not used with automatic checkpoint naming.
        safe_serialization: Save models as safetensors, else as torch files.
        on_error: What to do about a background save that failed. "raise": the next save_state, load_state or `wait`
            raises the error. "warn": that call issues a RuntimeWarning instead. The error is logged at once.
        engine: "auto", or an engine's name, which then never falls back.
        **save_model_func_kwargs: Options that are passed on to accelerator.save_state.

    Returns:
        The save: done(), result(), captured(). Without FSDP, None on all processes but the main one; their part is
        done. None also if the save could not begin for a storage error, with on_error="warn".

    Raises:
        ConfigError: The strategy saves by itself (DeepSpeed, Megatron, XLA), or the model is sharded without FSDP
            (tensor parallel); stock saving works there. Or the directory holds foreign files, or some process does not
            see it. Or `accelerator` is no Accelerator.
        ValueError: Automatic checkpoint naming, and the name is taken.
        StorageError: The directory cannot be made; or the last save failed, which is raised once.
        FastPersistError: Another process failed; nothing is published then.

    Thread safety: only the training thread.
    """
    if on_error not in ("raise", "warn"):
        raise ConfigError(f"on_error must be 'raise' or 'warn', not {on_error!r}")
    _refuse_strategy(accelerator)
    _settle(accelerator)
    configuration = accelerator.project_configuration
    iteration = configuration.iteration
    try:
        pending = _save(accelerator, output_dir, safe_serialization, on_error, engine, save_model_func_kwargs)
        configuration.iteration = iteration + 1
        return pending
    except BaseException as error:
        configuration.iteration = iteration  # the same on all processes, wherever each one failed
        if on_error == "raise" or not isinstance(error, StorageError):
            raise
        _log.error("a checkpoint was not saved: %s", error)
        warnings.warn(_warning_of(error), RuntimeWarning, stacklevel=2)
        return None


def load_state(accelerator: Accelerator, input_dir: str | os.PathLike[str] | None = None, **load_kwargs: Any) -> Path:
    """Load the state that accelerator.load_state loads, after the save under way is done.

    Args:
        accelerator: The Accelerator, with everything prepared.
        input_dir: The checkpoint. None with automatic checkpoint naming: the newest whole one. It is read and checked
            completely before anything is loaded; damaged ones are skipped with a warning.
        **load_kwargs: Options that are passed on to accelerator.load_state.

    Returns:
        The loaded directory. Accelerate does not continue its numbering from there: with automatic checkpoint naming,
        set accelerator.project_configuration.iteration to a free number.

    Raises:
        ConfigError: The strategy saves by itself, as in `save_state`; or there is no name to load from.
        CheckpointNotFoundError: Automatic checkpoint naming, and no checkpoint is whole.
        StorageError: The last save failed, which is raised once.
        FastPersistError: Another process failed.
        ValueError, RuntimeError, …: Errors of accelerator.load_state.

    Thread safety: only the training thread; all processes call it.
    """
    _refuse_strategy(accelerator)
    _settle(accelerator)
    if input_dir is None:
        if not accelerator.project_configuration.automatic_checkpoint_naming:
            raise ConfigError("load_state needs an input_dir, or automatic_checkpoint_naming")
        with _agreed():
            newest = _newest_whole(accelerator) if accelerator.is_main_process else None
        input_dir = str(broadcast_object_list([newest])[0])
    found = os.path.expanduser(input_dir)
    with _reading_shards(accelerator):
        accelerator.load_state(found, **load_kwargs)
    return Path(found)


def wait(accelerator: Accelerator) -> None:
    """Wait for the save under way. Without FSDP, only the main process has one.

    Raises:
        StorageError, TornStateError: The save failed; raised once. With on_error="warn": a RuntimeWarning instead.

    Thread safety: as `save_state`.
    """
    _deliver(accelerator, depth=3)


# ------------------------------------------------------------------------------------------- saving


def _save(
    accelerator: Accelerator,
    output_dir: str | os.PathLike[str] | None,
    safe_serialization: bool,
    on_error: str,
    engine: str,
    save_model_func_kwargs: dict[str, Any],
) -> PendingSave | None:
    """Implement `save_state`. After each step all processes agree: if one has failed, all raise."""
    target = ""
    options: dict[str, Any] = {}
    files: _Files | None = None
    with ExitStack() as stack:  # removes the hidden directory unless it is published
        with _agreed():
            _refuse_tensor_parallel(accelerator)
            if accelerator.is_main_process:
                target, options = _choose(accelerator, output_dir)
                if not _is_sharding(accelerator):
                    files = stack.enter_context(DirectorySave(target, engine=engine, **options))
        if _is_sharding(accelerator):
            target = broadcast_object_list([target])[0]
            with _agreed():
                files = _begin_together(target, engine, options)
                stack.enter_context(files)
        main_path = files.path if isinstance(files, DirectorySave) else None
        pending_path = broadcast_object_list([main_path])[0]
        with _agreed():
            _refuse_unshared(accelerator, pending_path)
        with _agreed(), _without_automatic_naming(accelerator), _saving(accelerator, files, pending_path):
            accelerator.save_state(pending_path, safe_serialization, **save_model_func_kwargs)
        if files is None:
            return None
        limit = accelerator.project_configuration.total_limit
        removes = accelerator.project_configuration.automatic_checkpoint_naming and limit is not None
        pending = files.publish(after=(lambda: _remove_oldest(target, limit)) if removes else None)
    figures = SaveFigures("checkpoint/")
    figures.add(pending)
    _latest[accelerator] = _Latest(pending, on_error, figures)
    return pending


def _choose(accelerator: Accelerator, output_dir: str | os.PathLike[str] | None) -> tuple[str, dict[str, Any]]:
    """Choose the name as Accelerate does; return it with the options of its DirectorySave."""
    if accelerator.project_configuration.automatic_checkpoint_naming:
        folder = _automatic_folder(accelerator)
        target = os.path.join(folder, f"checkpoint_{accelerator.save_iteration}")
        if os.path.lexists(target):
            raise ValueError(
                f"{target} exists already: set accelerator.project_configuration.iteration to the number that the next "
                "checkpoint is to have"
            )
        return target, {"make_parents": True, "pending_in": _hiding_place(folder)}
    if output_dir is None or output_dir == "":  # which would be the working directory
        raise ConfigError("save_state needs an output_dir, or automatic_checkpoint_naming in the ProjectConfiguration")
    target = os.path.abspath(os.path.expanduser(output_dir))  # load_state expands it, too
    if os.path.isdir(target):
        _refuse_to_lose(accelerator, target)
    return target, {"make_parents": True, "overwrite": "foreign"}


def _begin_together(target: str, engine: str, options: dict[str, Any]) -> _Files:
    """Make the hidden directory with all processes; only the main process needs options."""
    if not torch.distributed.is_initialized():
        return DirectorySave(target, engine=engine, **options)
    everybody: Any = torch.distributed.group.WORLD
    return directory_save_together(target, everybody, engine=engine, **options)


def _refuse_to_lose(accelerator: Accelerator, target: str) -> None:
    """Raise if a directory that the save would replace has files that belong to no checkpoint."""
    found = os.listdir(target)
    is_accelerates = _MANIFEST_NAME not in found and any(map(_RANDOM_STATE.fullmatch, found))
    if is_accelerates and accelerator._save_model_state_pre_hook:
        return  # hooks may have written any file
    require_replaceable(target, _FILE_OF_ACCELERATE.fullmatch)


def _refuse_unshared(accelerator: Accelerator, pending_path: str) -> None:
    if not accelerator.is_main_process and not os.path.isdir(pending_path):
        raise ConfigError(
            f"process {accelerator.process_index} does not see {os.path.dirname(pending_path)} of the main process: "
            "all need one file system, and save_on_each_node is not supported; stock accelerator.save_state works there"
        )


@contextmanager
def _saving(accelerator: Accelerator, files: _Files | None, pending_path: str) -> Iterator[None]:
    """Redirect Accelerate's saves in the block into `files`.

    On other processes, files are written durably to their own paths, except files that the main process also writes.
    """
    optimizers = None if _moves_parameters(accelerator) else list(accelerator._optimizers)
    with ExitStack() as stack:
        if isinstance(files, DirectorySave):
            of_main_process = (lambda _name: False) if _is_sharding(accelerator) else None
            redirection = stack.enter_context(saves_into(files, optimizer=optimizers, shared=of_main_process))
            stack.enter_context(_hooks_writing_at_once(accelerator, redirection))
        else:
            stack.enter_context(installed())
            stack.enter_context(routed(lambda _obj, path: _is_of_main_process(pending_path, path)))
        if files is not None and _is_sharding(accelerator):
            from ._shared.sharded_redirection import shards_into  # slow to import; only FSDP needs it

            plans = _plans.setdefault(accelerator, {})
            stack.enter_context(shards_into(files, pending_path, optimizer=optimizers, plans=plans))
        yield


def _reading_shards(accelerator: Accelerator) -> AbstractContextManager[None]:
    """Read shards with `FastPersistReader`, in the block."""
    if not _is_sharding(accelerator):
        return nullcontext()
    from ._shared.sharded_redirection import reads_shards

    return reads_shards()


def _is_sharding(accelerator: Accelerator) -> bool:
    return str(accelerator.distributed_type.value) == "FSDP"


def _moves_parameters(accelerator: Accelerator) -> bool:
    """Return whether parameters are gathered and freed between two optimizer steps, as FSDP1 does."""
    return _is_sharding(accelerator) and not getattr(accelerator, "is_fsdp2", False)


def _is_of_main_process(pending_path: str, path: str) -> bool:
    """Return whether a file is one that stock Accelerate writes under one name on every process."""
    folder, name = os.path.split(path)
    return _WRITTEN_BY_ALL.fullmatch(name) is not None and os.path.realpath(folder) == os.path.realpath(pending_path)


@contextmanager
def _hooks_writing_at_once(accelerator: Accelerator, redirection: Redirection) -> Iterator[None]:
    """Write files of users' hooks before the saving call returns, because the hooks may then use these files."""

    def set_at_once(at_once: bool) -> None:
        redirection.at_once = at_once

    first = accelerator.register_save_state_pre_hook(lambda *_: set_at_once(True))
    accelerator._save_model_state_pre_hook.move_to_end(first.id, last=False)
    last = accelerator.register_save_state_pre_hook(lambda *_: set_at_once(False))
    try:
        yield
    finally:
        first.remove()
        last.remove()


@contextmanager
def _without_automatic_naming(accelerator: Accelerator) -> Iterator[None]:
    configuration = accelerator.project_configuration
    before = configuration.automatic_checkpoint_naming
    configuration.automatic_checkpoint_naming = False
    try:
        yield
    finally:
        configuration.automatic_checkpoint_naming = before


def _settle(accelerator: Accelerator) -> None:
    """Finish the last save on all processes, and raise its error, or warn of it."""
    with _agreed():
        _deliver(accelerator, depth=4)


def _deliver(accelerator: Accelerator, depth: int) -> None:
    """Wait for the last save; raise its error once, or warn the caller at that stack depth."""
    latest = _latest.get(accelerator)
    if latest is None:
        return
    latest.save.join()
    if accelerator.trackers:
        latest.figures.log_by(lambda found: accelerator.log(dict(found)))
    error = latest.save.undelivered_error()
    if error is None:
        return
    if latest.on_error == "raise":
        raise error
    warnings.warn(_warning_of(error), RuntimeWarning, stacklevel=depth)


def _warning_of(error: BaseException) -> str:
    return f"a checkpoint was not saved, training goes on: {error}"


# ------------------------------------------------------------------------------------------- several processes


@contextmanager
def _agreed() -> Iterator[None]:
    """Raise on all processes if the block fails on one of them. Collective."""
    failures: list[Exception] = []
    try:
        yield
    except Exception as error:  # noqa: BLE001 - raised below, when the other processes know
        failures.append(error)

    def tell() -> None:
        if failures:
            raise failures[0]

    on_all_ranks(tell, _error_of)


def _error_of(failure: PeerFailure) -> FastPersistError:
    message = f"process {failure.rank} failed: {failure.text}"
    return StorageError(None, message) if failure.is_of_the_disk else FastPersistError(message)


def _refuse_strategy(accelerator: Accelerator) -> None:
    """Raise for a strategy that saves by itself, without torch.save; and for an object that is no Accelerator."""
    if not isinstance(accelerator, Accelerator):
        raise ConfigError(
            "save_state and load_state take the Accelerator first, then the directory, such as "
            f"save_state(accelerator, output_dir); not a {type(accelerator).__name__}"
        )
    strategy = str(accelerator.distributed_type.value)
    if not strategy.startswith(_STRATEGIES):
        raise ConfigError(
            f"fastpersist does not save the state of {strategy} yet: stock accelerator.save_state and "
            "load_state work there"
        )


def _refuse_tensor_parallel(accelerator: Accelerator) -> None:
    if not torch.distributed.is_available() or _is_sharding(accelerator):
        return
    from torch.distributed.tensor import DTensor

    for model in accelerator._models:
        for name, parameter in model.named_parameters():
            if isinstance(parameter, DTensor):
                raise ConfigError(
                    f"fastpersist does not save sharded models yet (tensor parallel: {name} is a DTensor): stock "
                    "accelerator.save_state and load_state work there"
                )


# ------------------------------------------------------------------------------------------- automatic naming


def _automatic_folder(accelerator: Accelerator) -> str:
    """Return the directory of automatically named checkpoints."""
    if accelerator.project_dir is None:
        raise ConfigError("automatic checkpoint naming needs a project_dir, and this Accelerator has none")
    return os.path.realpath(os.path.join(accelerator.project_dir, "checkpoints"))


def _hiding_place(folder: str) -> str:
    """Return the directory for unfinished and removed checkpoints: the folder's parent, if renames from it work."""
    beside = os.path.dirname(folder)  # stock load_state takes every entry of `folder` for a checkpoint, hidden ones too
    if not os.path.exists(folder):
        return beside
    is_one_disk = os.stat(beside).st_dev == os.stat(folder).st_dev
    return beside if is_one_disk and os.access(beside, os.W_OK | os.X_OK) else folder


def _checkpoints_in(folder: str) -> list[str]:
    """Return the automatically named checkpoints, lowest number first."""
    if not os.path.isdir(folder):
        return []
    found = [(int(match[1]), match[0]) for match in map(_CHECKPOINT.fullmatch, os.listdir(folder)) if match]
    paths = [os.path.join(folder, name) for _, name in sorted(found)]
    return [path for path in paths if os.path.isdir(path) and not os.path.islink(path)]


def _remove_oldest(newest: str, limit: int) -> None:
    """Remove the oldest checkpoints beyond `limit`, on the writing thread, when the newest one is durable."""
    folder = os.path.dirname(newest)
    try:
        hiding_place = _hiding_place(folder)
        others = [path for path in _checkpoints_in(folder) if path != newest]
        for path in others[: max(0, len(others) + 1 - max(limit, 1))]:
            hidden = os.path.join(hiding_place, f".{os.path.basename(path)}.removed-{uuid.uuid4().hex}")
            os.rename(path, hidden)  # first and durably: no reader may ever see a part of a checkpoint
        _sync(folder)
        _sync(hiding_place)
        for name in filter(_REMOVED.fullmatch, os.listdir(hiding_place)):  # leftovers of killed processes too
            shutil.rmtree(os.path.join(hiding_place, name))
    except OSError as error:
        _log.warning("%s is saved, but old checkpoints beyond total_limit could not be removed: %s", newest, error)


def _sync(folder: str) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


# ------------------------------------------------------------------------------------------- the newest whole one


def _newest_whole(accelerator: Accelerator) -> str:
    """Return the automatically named checkpoint with the highest number that is whole."""
    folder = _automatic_folder(accelerator)
    for path in reversed(_checkpoints_in(folder)):
        damage = _damage_of(accelerator, path)
        if not damage:
            return path
        warnings.warn(f"{path} cannot be loaded, going back: {damage}", RuntimeWarning, stacklevel=3)
    raise CheckpointNotFoundError(f"there is no whole checkpoint in {folder}")


def _damage_of(accelerator: Accelerator, path: str) -> str:
    """Read a checkpoint; return what is wrong with it, "" if nothing is."""
    try:
        found = sorted(os.listdir(path))
        if _MANIFEST_NAME in found:
            damages = verify(path).damages
            return damages[0].message if damages else ""
        missing = [name for name in _needed_names(accelerator) if name not in found]
        if missing:
            return f"{missing[0]} is missing"
        for name in found:
            if _FILE_OF_ACCELERATE.fullmatch(name):
                damage = _damage_of_part(os.path.join(path, name))
                if damage:
                    return f"{name}: {damage}"
    except (FastPersistError, OSError) as error:
        return str(error)
    return ""


def _damage_of_part(path: str) -> str:
    """Return what is wrong with a file of stock Accelerate, or with a directory of shards; "" if nothing is."""
    if os.path.isdir(path):
        from ._shared.sharded_redirection import why_not_whole

        return why_not_whole(path) or ""
    damages = verify(path).damages
    return damages[0].message if damages else ""


def _needed_names(accelerator: Accelerator) -> Iterator[str]:
    """Yield the files that Accelerate's load_state requires; not models, which a hook may have saved elsewhere."""
    kind = getattr(getattr(accelerator.state, "fsdp_plugin", None), "state_dict_type", None)
    is_one_file = not _is_sharding(accelerator) or "FULL" in str(kind)
    for index in range(len(accelerator._optimizers)):
        yield ("optimizer" if index == 0 and is_one_file else f"optimizer_{index}") + (".bin" if is_one_file else "")
    yield from (f"scheduler_{index}.bin" if index else "scheduler.bin" for index in range(len(accelerator._schedulers)))
    yield from (f"custom_checkpoint_{index}.pkl" for index in range(len(accelerator._custom_objects)))
    yield "random_states_0.pkl"
