"""The public functions of one file: save, save_async, load, load_into, verify and inspect.

Each checks its arguments and hands over to the packages that do the work: `saving`, `loading`, and `distributed` where
several ranks take part.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import IO, TYPE_CHECKING, Any, TypeAlias

import torch

from fastpersist.arguments import local_path, require_bools
from fastpersist.distributed.group_save import Writers, save_together, save_together_async, together_with
from fastpersist.distributed.shared_reader import reader_for
from fastpersist.errors import ConfigError, UnsupportedError
from fastpersist.formats.manifest import DCP_METADATA_NAME, writer_of
from fastpersist.loading import directory_inspection, file_inspection
from fastpersist.loading.checkpoint_file import CheckpointSource
from fastpersist.loading.file_inspection import Manifest, VerifyReport
from fastpersist.loading.fill_target import fill_target
from fastpersist.loading.restore import restore_whole
from fastpersist.loading.targets import IncompatibleKeys, misfit
from fastpersist.loading.unpickle import MapLocation, load_checkpoint
from fastpersist.saving.file_save import FileOptions, SaveReport, save_file, save_file_async, save_to_stream
from fastpersist.saving.ownership import Owners
from fastpersist.saving.pending_save import PendingSave
from fastpersist.transfer.engine_selection import engine_ladder, refuse_null_engine
from fastpersist.transfer.progress import showing_progress
from fastpersist.transfer.torch_boundary import stock_load, untraced

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["SaveReport", "inspect", "load", "load_into", "save", "save_async", "verify"]

PathLike: TypeAlias = str | os.PathLike[str]


@untraced
def save(
    obj: object,
    path: PathLike | IO[bytes],
    *,
    durable: bool = True,
    checksum: bool = True,
    progress: bool = False,
    engine: str = "auto",
    format: str = "auto",
    metadata: Mapping[str, str] | None = None,
    replace_links: bool = False,
    make_parents: bool = False,
    in_place: bool = False,
    process_group: ProcessGroup | None = None,
    writers: Writers = "auto",
    check_replicas: bool = False,
) -> SaveReport:
    """Save an object to one file, which stock tools read.

    When this returns the file is complete, visible under its name, and durable. Until then the name is what it was:
    nobody sees half a file, whatever fails. Open and memory-mapped readers of a file that is replaced keep theirs.
    One RuntimeWarning lists all that loading with weights_only=True, the default, would refuse.

    Args:
        obj: Whatever torch.save takes: tensors of any dtype, layout and device inside any picklable object. For a
            safetensors file: a dict of str to contiguous, dense tensors that share no memory.
        path: Where to; symbolic links are followed. What no rename can replace (a FIFO, a device, a file with several
            hard links) is written by torch.save itself, and the log says so. A file object is passed to torch.save;
            flushing and syncing it is its owner's.
        durable: Survive power loss once this has returned. Without it, only the page cache and the drive's memory do.
        checksum: Compute and record CRC-32s; without it they are zero, as torch.save writes them when told so.
        progress: Show bytes, rate and remaining time on standard error; not with several ranks.
        engine: "auto", or an engine's name (`fastpersist.engines` lists them), which then never falls back.
        format: "torch", the zip of torch.save; "safetensors"; or "auto": safetensors for a path that ends in
            `.safetensors`, torch for all others.
        metadata: Text to text, kept in the header; safetensors only.
        replace_links: Replace a file that has several hard links, too; its other names keep the old one.
        make_parents: Make the directories above that are missing, durably.
        in_place: Where the file may be written but not replaced (a directory that takes no new file, or somebody else's
            file in a sticky one such as /tmp), let torch.save overwrite it: if that fails, neither the old checkpoint
            nor the new one is left. Without it, such a place is an error. Not for safetensors, nor for several ranks.
        process_group: Write with all its ranks the file that its rank 0 alone would have written; all of them call
            this. What is saved is rank 0's object. Its storages of 1 MiB and more are replicas on all ranks, and shared
            out among the writers; samples of them are compared first. All writers see the same file system. Of torch,
            only the first call for a group uses the group.
        writers: With a process_group, the ranks that write: "all", "node" (one of each node), a number, or "auto": up
            to 8 of one node (or as many as rank 0's tuning file says), or one of each of several.
        check_replicas: With a process_group, compare all bytes of the replicas.

    Returns:
        What was written, by which engine, in what time.

    Raises:
        ConfigError: Unknown engine, or an object that the format cannot hold.
        UnsupportedError: The named engine cannot be used here; the message says why not.
        NoSpaceError: The file system is full. Found before a byte is written, where it can reserve space.
        StorageError: Any other error of the disk: errno, operation, path, offset.
        RuntimeError, TypeError, …: What torch.save or the object's own pickling raises, before any file is touched.
        CoordinationError: With a process_group: the replicas differ; the message names tensors and ranks.
        PeerError: With a process_group: another rank has failed or is gone; nothing was published.

    Thread safety: any thread, any number at once; of saves to one path, the one that finishes last stays. With a
    process_group: one at a time, and in the same order on all ranks.
    """
    name = _destination(obj, path)
    options = FileOptions(durable, checksum, engine, format, metadata, replace_links, make_parents, in_place)
    if process_group is not None:
        if name is None:
            raise UnsupportedError("ranks of a process group write to a path, not to a file object")
        with together_with(process_group, name, writers, check_replicas=check_replicas) as together:
            if together is not None:
                return save_together(obj, name, together, options)
    if name is None:
        return save_to_stream(obj, path, options)
    return save_file(obj, name, options, progress=progress)


@untraced
def save_async(
    obj: object,
    path: PathLike,
    *,
    optimizer: object = None,
    constant: object = (),
    gate: str = "optimizer",
    durable: bool = True,
    checksum: bool = True,
    engine: str = "auto",
    format: str = "auto",
    metadata: Mapping[str, str] | None = None,
    replace_links: bool = False,
    make_parents: bool = False,
    in_place: bool = False,
    process_group: ProcessGroup | None = None,
    writers: Writers = "auto",
    check_replicas: bool = False,
) -> PendingSave:
    """Save an object to one file while training goes on; the file is what `save` would have written.

    Returns when everything that may change before the optimizer's next step is copied. The tensors of the optimizer are
    written from where they are; its next step waits until what is not written by then is copied. The name stays what it
    was until the new file is complete and durable. Saves to the same path are written in order.

    Until the step, or `wait_captured()`, nothing of the optimizer may change otherwise. A change that torch counts
    fails the save, with a TornStateError; a storage that is resized while it is being read may end the process.

    Args:
        obj: Whatever torch.save takes; pickled before this returns.
        path: Where to. What no rename can replace is saved before this returns, as `save` does it.
        optimizer: Whose parameters and state are in `obj`: an optimizer, something that wraps one as `.optimizer`, or a
            list. Without it everything is copied before this returns.
        constant: What never changes (frozen weights): modules, tensors, lists and dicts of them. Never copied.
        gate: "optimizer": steps wait by themselves. "manual": you call `wait_captured()` before anything changes.
        durable: Survive power loss once done.
        checksum: Compute and record CRC-32s.
        engine: "auto", or an engine's name, which then never falls back.
        format: "auto", "torch" or "safetensors", as in `save`.
        metadata: Text to text, for safetensors only, as in `save`.
        replace_links: Replace a file that has several hard links, too, as in `save`.
        make_parents: Make the directories above that are missing, durably.
        in_place: Overwrite a file that may be written but not replaced, before this returns, as in `save`.
        process_group: Write with all its ranks, as in `save`; shared out is what the optimizer owns or `constant`
            names. The gate is each rank's own.
        writers: The ranks that write, as in `save`.
        check_replicas: Compare all bytes of the replicas, as in `save`.

    Returns:
        The save: done(), result(), captured(), wait_captured().

    Raises:
        ConfigError, UnsupportedError, RuntimeError, TypeError, …: As in `save`, before any file is touched.
        StorageError: The file cannot be created. Later errors are raised by result().

    Thread safety: any thread. Nobody else may change the object while this runs. With a process_group: in the same
    order on all ranks.
    """
    name = _destination(obj, path)
    if name is None:
        raise UnsupportedError("save_async writes to a path, not to a file object; save takes both")
    options = FileOptions(durable, checksum, engine, format, metadata, replace_links, make_parents, in_place)
    with together_with(process_group, name, writers, check_replicas=check_replicas) as together:
        owners = Owners(optimizer, constant, gate)
        if together is not None:
            return save_together_async(obj, name, owners, together, options)
        return save_file_async(obj, name, owners, options)


@untraced
def load(
    path: PathLike | IO[bytes],
    *,
    map_location: MapLocation = None,
    weights_only: bool = True,
    verify: bool = False,
    progress: bool = False,
    engine: str = "auto",
    process_group: ProcessGroup | None = None,
) -> Any:
    """Load what a file holds; the same object that torch.load or safetensors would return.

    The bytes are read first, straight to where they belong, then stock torch.load builds the object around them. The
    format is told from the first bytes, not from the name. Files that need it (legacy formats, TorchScript, a callable
    map_location …) are read by stock torch.load, and the log says why.

    Args:
        path: A file written by fastpersist, torch.save or safetensors. A file object is passed to torch.load.
        map_location: As in torch.load: None, a device or its name, a dict of locations, or a callable.
        weights_only: Only build tensors and plain containers. Set it to False only for files that you trust.
        verify: Check every CRC while reading, before anything is unpickled.
        progress: Show bytes, rate and remaining time on standard error.
        engine: "auto", or an engine's name, which then never falls back.
        process_group: Load with all its ranks, each of which gets the whole object, on its own devices; all of them
            call this with the same file. They share the reading, so that the disk gives each byte once where that is
            faster, and they end alike: it returns on all ranks, or raises on all. Each wait for another rank lasts at
            most the group's timeout. The caller's thread takes part in the group's collectives.

    Raises:
        CheckpointNotFoundError: There is no such file.
        FormatError: It is no whole checkpoint: truncated, damaged, never finished, or something else, which the message
            names. With weights_only=False also a pickle whose name ends in `.safetensors`: such files run no code.
        ChecksumError: With verify: the bytes of the tensors that are named changed since they were written.
        UnsupportedError: The named engine cannot be used; or verify, and the file has no checksums.
        StorageError: An error of the disk; or it is a directory (the message says what loads it), a FIFO or a device.
        pickle.UnpicklingError: With weights_only: torch's own refusal of an unsafe file.
        PeerError: With a process_group: another rank failed, or is gone; on the rank that failed, its own error.
        CoordinationError: With a process_group: the ranks were given different files.

    Thread safety: any thread, any number at once; with a process_group one at a time, in the same order on all ranks.
    """
    require_bools(weights_only=weights_only, verify=verify)
    name = _path_of(path, "read")
    if name is None:
        if verify or process_group is not None:
            raise UnsupportedError(
                "a file object goes to torch.load, which cannot verify it or share it among ranks; pass its path"
            )
        return stock_load(path, map_location=map_location, weights_only=weights_only)
    with reader_for(process_group, name) as read, CheckpointSource(name) as source:
        with showing_progress(source.path, source.size_bytes, progress) as poll:
            return load_checkpoint(
                source,
                map_location=map_location,
                weights_only=weights_only,
                verify=verify,
                engine=engine,
                poll=poll,
                read=read,
            )


@untraced
def load_into(
    path: str | os.PathLike[str],
    target: object,
    *,
    strict: bool = True,
    verify: bool = False,
    engine: str = "auto",
    process_group: ProcessGroup | None = None,
) -> IncompatibleKeys:
    """Fill existing tensors from a file, in place, without a second copy of the state.

    Everything is checked first: names, shapes, dtypes and the structure of the file. If anything is wrong, nothing has
    been changed. Values are converted where dtypes differ, as load_state_dict does.

    Args:
        path: A file written by fastpersist, torch.save or safetensors.
        target: A Module, filled as its load_state_dict would be from the state_dict in the file; a tensor; an
            optimizer, bare or wrapped (`.optimizer`), or any object with load_state_dict; or dicts, lists and tuples,
            nested, of these, with the structure of the object in the file. Plain values (numbers, text, None …) in a
            dict or a list are set to the file's; a dict beside them, or beside an optimizer, gets those that it lacks.
        strict: Demand that both sides have the same names. Without it, what is only on one side is passed over;
            shapes must still agree, and optimizers fit.
        verify: Check the CRCs of the whole file before the first byte of the target changes. The file is read twice.
        engine: "auto", or an engine's name, which then never falls back.
        process_group: All its ranks call this with the same file, each with its own target, and share the reading; as
            in `load`, it returns on all of them or raises on all. What one finds wrong changes no target of any.

    Returns:
        The names that were passed over, as Module.load_state_dict does: `missing_keys` and `unexpected_keys`.

    Raises:
        CheckpointNotFoundError: There is no such file.
        ConfigError: Names, shapes or the class of an optimizer do not agree, or the target has what cannot be filled;
            the message lists it by its name in the target. Nothing was changed, unless a load_state_dict refused its
            entry: then the message says what is *partly overwritten*.
        FormatError, ChecksumError, UnsupportedError: As in load; nothing was changed.
        StorageError: An error of the disk. If the message says *partly overwritten*, the tensors it lists have
            unknown contents: load again, or from another checkpoint.
        PeerError: With a process group: another rank failed, or is gone. *Partly overwritten* as above; without
            these words the target is either as it was or, if that rank failed last, filled.
        CoordinationError: The ranks were given different files.

    Thread safety: any thread; nobody else may use the target's tensors meanwhile.
    """
    name = local_path(path)
    with reader_for(process_group, name) as read, CheckpointSource(name) as source:
        if _is_tensors_only(target):
            return fill_target(source, target, strict=strict, verify=verify, engine=engine, read=read)
        if source.kind == "safetensors":
            raise misfit(source.path, ["it holds tensors only; the target holds more than tensors and Modules"])
        for one in engine_ladder(engine, source.fd, for_reading=True):
            refuse_null_engine(one)
        return restore_whole(source, target, strict=strict, verify=verify, engine=engine, read=read)


def _is_tensors_only(target: object) -> bool:
    if isinstance(target, Mapping):
        return all(map(_is_tensors_only, target.values()))
    if isinstance(target, (list, tuple)):
        return all(map(_is_tensors_only, target))
    return isinstance(target, (torch.Tensor, torch.nn.Module))


def verify(path: PathLike, *, progress: bool = False, engine: str = "auto") -> VerifyReport:
    """Read a whole checkpoint and say whether it is what its writer wrote, and if not, which tensors are damaged where.

    Reads only, keeps nothing, runs no code of the file.

    Args:
        path: A file, a checkpoint directory with all its files, or a root with all its steps.
        progress: Show bytes, rate and remaining time on standard error.
        engine: "auto", or an engine's name, which then never falls back.

    Raises:
        CheckpointNotFoundError: There is no such file or directory.
        StorageError: An error of the disk, or a directory that holds no checkpoints; damage that can be read is in the
            report, not an exception.

    Thread safety: any thread.
    """
    name = local_path(path)
    if os.path.isdir(name):
        with showing_progress(name, directory_inspection.directory_bytes(name) if progress else 0, progress) as poll:
            return directory_inspection.verify_directory(name, engine=engine, poll=poll, explain=_with_damaged_shards)
    with CheckpointSource(name) as source:
        with showing_progress(source.path, source.size_bytes, progress) as poll:
            listed = directory_inspection.verify_listed(name, engine=engine, poll=poll)
            return file_inspection.verify_source(source, engine=engine, poll=poll) if listed is None else listed


def _with_damaged_shards(report: VerifyReport) -> VerifyReport:
    if all(writer_of(damage.file) is None for damage in report.damages):
        return report
    from fastpersist.dcp.inspection import with_damaged_tensors  # slow to import, like all of DCP

    return with_damaged_tensors(report)


def inspect(path: PathLike) -> Manifest:
    """Say what a checkpoint holds without loading it and without running any of its code.

    Lists names, dtypes, shapes, places and CRCs of the tensors, and the globals that the pickle names; for a directory
    also its files, step and metrics; for a root its committed steps. Of sharded tensors the shapes are those of all
    ranks together.

    Args:
        path: A file, a checkpoint directory, or a root.

    Raises:
        CheckpointNotFoundError: There is no such file or directory.
        FormatError: It cannot be parsed.
        UnsupportedError: It is no torch zip and no safetensors file.
        StorageError: An error of the disk, or a directory that holds no checkpoints.

    Thread safety: any thread.
    """
    name = local_path(path)
    if os.path.isdir(name):
        return directory_inspection.inspect_directory(name, add_shards=_with_shards)
    with CheckpointSource(name) as source:
        return file_inspection.inspect_source(source)


def _with_shards(found: Manifest) -> Manifest:
    if all(entry.name != DCP_METADATA_NAME for entry in found.files):
        return found
    from fastpersist.dcp.inspection import with_sharded_tensors  # slow to import, like all of DCP

    return with_sharded_tensors(found)


def _path_of(path: object, method: str) -> str | None:
    """Return the path; None for a file object, which has this method."""
    if not isinstance(path, str | bytes | os.PathLike) and hasattr(path, method):
        return None
    return local_path(path)


def _destination(obj: object, path: object) -> str | None:
    if (
        isinstance(obj, str | os.PathLike)
        and not isinstance(path, str | bytes | os.PathLike)
        and not hasattr(path, "write")
    ):
        raise ConfigError(f"the object to save comes first, then the path: save(obj, {os.fspath(obj)!r})")
    return _path_of(path, "write")
