"""Redirects a framework's calls of torch.distributed.checkpoint (DCP) to FastPersist.

`redirection` for sharded state: frameworks call dcp.save and dcp.load with a directory, and with DCP's own writer and
reader or none. This module intercepts these calls on one thread. `save_sharded` writes saves below one directory under
the same names into a `DirectorySave`, which the caller publishes. `FastPersistReader` reads loads, ours and stock.
Calls with any other writer or reader pass through.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal, TypeVar

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import optimizer as dcp_optimizer
from torch.distributed.checkpoint import state_dict as dcp_state_dict
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.stateful import Stateful

from fastpersist import (
    CheckpointNotFoundError,
    DirectorySave,
    FastPersistError,
    PeerDirectorySave,
    PeerError,
)

from ..torch_dcp import FastPersistReader, SharedPlans, save_sharded
from .agreement import is_of_the_disk
from .replacement import Function, Replacement

__all__ = ["METADATA_NAME", "reads_shards", "shards_into", "shards_where_they_are", "why_not_whole"]

METADATA_NAME = ".metadata"
"""The file that every DCP directory has."""

_OPTIONS_OF_PLANNERS = {
    "flatten_state_dict": True,
    "flatten_sharded_tensors": True,
    "dedup_save_to_lowest_rank": False,
    "_enable_plan_caching": False,
}

Result = TypeVar("Result")

_redirections = threading.local()


# ------------------------------------------------------------------------------------------- saving


@contextmanager
def shards_into(
    files: DirectorySave | PeerDirectorySave,
    directory: str,
    *,
    optimizer: object = None,
    gate: Literal["optimizer", "manual"] = "optimizer",
    plans: dict[str, Any] | None = None,
) -> Iterator[None]:
    """Redirect this thread's dcp.save calls below a directory into `files`, which are written in the background.

    All ranks enter the block together. dcp.save then returns when everything that may change at once is copied. It
    returns None, because the plan does not exist yet. DCP's state dicts are as in `shards_where_they_are`.

    Args:
        files: The target, not yet published; with several ranks, each rank's result of `directory_save_together`.
        directory: The coordinator's `files.path`.
        optimizer: The optimizer whose tensors are written in place, as in `DirectorySave.save`.
        gate: "optimizer" or "manual", as in `DirectorySave.save`.
        plans: Plans of earlier saves; this save adds its own. Empty at first; only for saves that do not overlap.

    Raises:
        ConfigError: In the block: a state is no dict. `files.publish().result()` raises all other errors.
    """
    saves = _Saves(files, directory, optimizer, gate, {} if plans is None else plans)
    with shards_where_they_are(), _redirected("saves", saves, _saving):
        yield


class _Saves:
    def __init__(
        self,
        files: DirectorySave | PeerDirectorySave,
        directory: str,
        optimizer: object,
        gate: str,
        plans: dict[str, Any],
    ) -> None:
        self._files = files
        self._root = os.path.realpath(directory)
        self._optimizer = optimizer
        self._gate = gate
        self._plans = plans

    def take(self, state_dict: dict[str, Any], directory: str) -> bool:
        """Save a state and return True; return False for a directory elsewhere."""
        name = os.path.relpath(os.path.realpath(directory), self._root)
        if name == os.pardir or name.startswith(os.pardir + os.sep):
            return False
        state = {key: value.state_dict() if isinstance(value, Stateful) else value for key, value in state_dict.items()}
        name = "" if name == os.curdir else name
        plans = self._plans.setdefault(name, SharedPlans())
        save_sharded(self._files, state, name, self._optimizer, gate=self._gate, plans=plans)
        return True


def _wrap_save(before: Function) -> Function:
    def save(
        state_dict: dict[str, Any],
        *,
        checkpoint_id: str | os.PathLike[str] | None = None,
        storage_writer: Any = None,
        planner: Any = None,
        **options: Any,
    ) -> Any:
        redirection: _Saves | None = _innermost("saves")
        if redirection is not None and _is_usual(planner) and not _wants_some_ranks_only(options):
            directory = _directory_of(checkpoint_id, storage_writer, FileSystemWriter)
            if directory is not None and redirection.take(state_dict, directory):
                return None
        return before(
            state_dict, checkpoint_id=checkpoint_id, storage_writer=storage_writer, planner=planner, **options
        )

    return save


def _wants_some_ranks_only(options: dict[str, Any]) -> bool:
    group = options.get("process_group")
    is_everybody = group is None or group is dist.group.WORLD
    return not is_everybody or bool(options.get("no_dist", False)) or not options.get("use_collectives", True)


def _is_usual(planner: Any) -> bool:
    return planner is None or (
        type(planner) is DefaultSavePlanner
        and all(getattr(planner, name, usual) == usual for name, usual in _OPTIONS_OF_PLANNERS.items())
    )


@contextmanager
def shards_where_they_are() -> Iterator[None]:
    """Let DCP's get_model_state_dict and get_optimizer_state_dict leave shards on their device, on this thread.

    Frameworks set cpu_offload for stock writers, and training waits for that copy. Our writer reads device memory.
    """
    with _redirected("stays", True, _staying):
        yield


def _wrap_getting(before: Function) -> Function:
    def get_state_dict(*arguments: Any, options: Any = None, **others: Any) -> Any:
        if _innermost("stays") and options is not None and options.cpu_offload and not options.full_state_dict:
            options = replace(options, cpu_offload=False)
        return before(*arguments, options=options, **others)

    return get_state_dict


# ------------------------------------------------------------------------------------------- loading


@contextmanager
def reads_shards(*, engine: str = "auto") -> Iterator[None]:
    """Let `FastPersistReader` serve this thread's dcp.load calls. All ranks enter the block together.

    Args:
        engine: "auto", or an engine's name, which then never falls back.

    Raises:
        FastPersistError, …: In the block, from dcp.load: a rank could not read its part. That rank raises its own
            error; the others raise a PeerError, or a RuntimeError for a mistake in the program.
    """
    with _redirected("loads", engine, _loading):
        yield


def _reader_for(checkpoint_id: Any, storage_reader: Any) -> FastPersistReader | None:
    engine: str | None = _innermost("loads")
    directory = None if engine is None else _directory_of(checkpoint_id, storage_reader, FileSystemReader)
    return None if directory is None else FastPersistReader(directory, engine=engine or "auto")


def _wrap_load(before: Function) -> Function:
    def load(
        state_dict: dict[str, Any],
        *,
        checkpoint_id: str | os.PathLike[str] | None = None,
        storage_reader: Any = None,
        **options: Any,
    ) -> None:
        reader = _reader_for(checkpoint_id, storage_reader)
        if reader is None:
            before(state_dict, checkpoint_id=checkpoint_id, storage_reader=storage_reader, **options)
        else:
            _told(lambda: before(state_dict, storage_reader=reader, **options), reader.checkpoint_id)

    return load


def _wrap_load_optimizer(before: Function) -> Function:
    def load_sharded_optimizer_state_dict(
        model_state_dict: Any, optimizer_key: str, storage_reader: Any, planner: Any = None
    ) -> Any:
        reader = _reader_for(None, storage_reader)
        if reader is None:
            return before(model_state_dict, optimizer_key, storage_reader, planner)
        return _told(lambda: before(model_state_dict, optimizer_key, reader, planner), reader.checkpoint_id)

    return load_sharded_optimizer_state_dict


# ------------------------------------------------------------------------------------------- both


_saving = Replacement(lambda: [(dcp, "save")], _wrap_save)
_staying = Replacement(
    lambda: [(dcp_state_dict, name) for name in ("get_model_state_dict", "get_optimizer_state_dict", "get_state_dict")],
    _wrap_getting,
)


class _Both:
    """Several replacements that are held together."""

    def __init__(self, *replacements: Replacement) -> None:
        self._replacements = replacements

    def hold(self) -> None:
        for replacement in self._replacements:
            replacement.hold()

    def release(self) -> None:
        for replacement in self._replacements:
            replacement.release()


_loading = _Both(
    Replacement(lambda: [(dcp, "load")], _wrap_load),
    Replacement(
        lambda: [(module, "load_sharded_optimizer_state_dict") for module in (dcp, dcp_optimizer)], _wrap_load_optimizer
    ),
)


@contextmanager
def _redirected(kind: str, redirection: object, replacement: Replacement | _Both) -> Iterator[None]:
    stack = _redirections.__dict__.setdefault(kind, [])
    stack.append(redirection)
    replacement.hold()
    try:
        yield
    finally:
        replacement.release()
        stack.remove(redirection)


def _innermost(kind: str) -> Any:
    stack = _redirections.__dict__.get(kind)
    return stack[-1] if stack else None


def _directory_of(checkpoint_id: Any, storage: Any, usual: type) -> str | None:
    """Return the directory of a call; None where the call asks for other files than DCP's usual ones."""
    if storage is not None:
        # Stream transforms (compression …) and other formats are left to the stock writer.
        extensions = getattr(getattr(storage, "transforms", None), "extensions", None)
        form = getattr(storage, "serialization_format", None)
        if type(storage) is not usual or extensions or getattr(form, "name", "TORCH_SAVE") != "TORCH_SAVE":
            return None
    found = getattr(storage, "path", None) if checkpoint_id is None else checkpoint_id
    if not isinstance(found, str | os.PathLike) or not FastPersistReader.validate_checkpoint_id(found):
        return None
    return os.fspath(found)


def _told(load: Callable[[], Result], directory: object) -> Result:
    """Load by a function of DCP, and raise the failure of the lowest failed rank as an exception of ours.

    DCP's CheckpointException is no Exception; it holds the failures of all ranks, and all ranks raise it.
    """
    try:
        return load()
    except CheckpointException as error:
        if not error.failures:
            raise
        rank, (failure, _) = min(error.failures.items())
        if rank == (dist.get_rank() if dist.is_initialized() else 0):
            raise failure from error
        text = f"rank {rank} failed while loading {directory}: {type(failure).__name__}: {failure}"
        if is_of_the_disk(failure):
            raise PeerError(text, rank=rank, subject=str(directory)) from error
        raise RuntimeError(text) from error


# ------------------------------------------------------------------------------------------- checking


def why_not_whole(directory: str | os.PathLike[str]) -> str | None:
    """Return what is missing in a DCP directory, ours or stock; None if it is complete.

    This reads the metadata and compares the lengths of the parts with them, but does not read contents.
    """
    try:
        metadata = FastPersistReader(directory).read_metadata()
    except (CheckpointNotFoundError, FastPersistError) as error:
        return str(error)
    lengths: dict[str, int] = {}
    for info in metadata.storage_data.values():
        end = int(info.offset) + int(info.length)
        lengths[info.relative_path] = max(end, lengths.get(info.relative_path, 0))
    for name, length_bytes in sorted(lengths.items()):
        path = os.path.join(directory, name)
        if not os.path.isfile(path):
            return f"{path} is missing"
        if os.path.getsize(path) < length_bytes:
            return f"{path} is cut off: it has {os.path.getsize(path)} bytes of {length_bytes}"
    return None
