"""The public functions for single files: save, save_async, load, load_into, verify and inspect.

Each checks its arguments and calls the packages that do the work: `saving`, `loading`, and with several ranks
`distributed`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from functools import partial
from typing import IO, TYPE_CHECKING, Any, TypeAlias

import torch
import torch.distributed as dist

from fastpersist.arguments import local_path, require_bools
from fastpersist.distributed.group_save import Writers, save_together, save_together_async, together_with
from fastpersist.distributed.peers import rank_in
from fastpersist.distributed.shared_reader import reader_for
from fastpersist.errors import ConfigError, UnsupportedError
from fastpersist.events.delivery import emit
from fastpersist.formats.manifest import DCP_METADATA_NAME, writer_of
from fastpersist.loading import directory_inspection, file_inspection
from fastpersist.loading.checkpoint_file import CheckpointSource
from fastpersist.loading.conversion import converted, require_floating
from fastpersist.loading.file_inspection import Manifest, VerifyReport
from fastpersist.loading.fill_target import Wanted, fill_from_directory, fill_target
from fastpersist.loading.renaming import Rename, renamed
from fastpersist.loading.restore import load_chosen, restore_whole
from fastpersist.loading.safetensors_directory import holds_safetensors
from fastpersist.loading.selection import chosen_part, require_keys
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
    """Save an object to one file that stock tools read.

    When this returns, the file is complete, durable and visible under its name. Until then the name refers to the old
    file, if there is one: no reader sees half a file, whatever fails. Programs that have the old file open or mapped
    keep it. If torch.load would refuse the file with weights_only=True, its default, a RuntimeWarning lists why.

    Args:
        obj: Any object that torch.save takes: tensors of any dtype, layout and device inside any picklable object. For
            a safetensors file: a dict of str to dense, contiguous tensors that share no memory.
        path: The file; symbolic links are followed. If a rename cannot replace it (a FIFO, a device, a file with
            several hard links), torch.save writes it, and the log says so; if that fails, the old file is lost. A file
            object is passed to torch.save; its owner flushes and syncs it.
        durable: Return only when the file survives a loss of power. Without it, a part may be in memory only.
        checksum: Compute and record CRC-32s. Without it they are zero, like those of torch.save without CRCs.
        progress: Show bytes, rate and remaining time on standard error; not with several ranks.
        engine: "auto", or an engine's name (see `fastpersist.engines`), which then never falls back.
        format: "torch": the zip format of torch.save. "safetensors". "auto": safetensors for a path that ends in
            `.safetensors`, torch for all others.
        metadata: Text by name for the header of a safetensors file; for that format only.
        replace_links: Also replace a file that has several hard links; its other names keep the old file.
        make_parents: Make missing parent directories, durably.
        in_place: If the file may be written but not replaced (its directory takes no new file, or is sticky like /tmp
            and the file is another user's), let torch.save overwrite it. If that fails, neither the old checkpoint nor
            the new one is left. Without this option such a place is an error. Not for safetensors or several ranks.
        process_group: Write one file with all ranks of this group; all of them call this. Rank 0's object is saved, and
            the file is the one that rank 0 would write alone. Storages of 1 MiB and more must be the same on all ranks:
            samples of them are compared, and the writers share them out. All writers see the same file system. Only the
            first call for a group uses torch's collectives. Without a group, writers and check_replicas have no effect.
        writers: The ranks of the process group that write: "all", "node" (one rank of each node), a number, or "auto":
            on one node up to 8 ranks (or as many as rank 0's tuning file says), on several nodes one rank of each.
        check_replicas: Compare all bytes of these storages between the ranks, instead of samples.

    Returns:
        What was written, by which engine, in what time.

    Raises:
        ConfigError: An argument makes no sense, or the format cannot hold the object.
        UnsupportedError: The named engine cannot be used here; the message says why not.
        NoSpaceError: The file system is full. If it can reserve space, this is found before a byte is written.
        StorageError: Another error of the disk, with errno, operation, path and offset.
        RuntimeError, TypeError, …: torch.save or the object's own pickling failed; no file was touched.
        CoordinationError: With a process_group: the ranks differ; the message names tensors and ranks.
        PeerError: With a process_group: another rank has failed or is gone; nothing was published.

    Thread safety: any thread, and any number of threads at once; of two saves to one path, the one that finishes last
    stays. It waits for earlier asynchronous saves to its path. With a process_group: one save at a time, in the same
    order on all ranks.
    """
    name = _destination(obj, path)
    options = FileOptions(durable, checksum, engine, format, metadata, replace_links, make_parents, in_place)
    if name is None:
        if process_group is not None:
            raise UnsupportedError("ranks of a process group write to a path, not to a file object")
        return save_to_stream(obj, path, options)

    def save_to_path() -> SaveReport:
        with together_with(process_group, name, writers, check_replicas=check_replicas) as together:
            if together is not None:
                return save_together(obj, name, together, options)
        return save_file(obj, name, options, progress=progress)

    return _telling_of_save(name, process_group, save_to_path)


def _telling_of_save(path: str, group: ProcessGroup | None, save: Callable[[], SaveReport]) -> SaveReport:
    rank = 0 if group is None else rank_in(group)
    emit("save_begun", path, {}, rank=rank)
    try:
        report = save()
    except BaseException as error:
        emit("failed", path, {"error": f"{type(error).__name__}: {error}"}, rank=rank)
        raise
    seconds = {"stall_s": report.total_s, "plan_s": report.plan_s, "write_s": report.write_s, "sync_s": report.sync_s}
    emit("committed", path, {"bytes": report.size_bytes, "engine": report.engine, **seconds}, rank=rank)
    return report


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
    """Save an object to one file in the background, while training goes on.

    The file is the one that `save` writes. This returns as soon as everything that may change before the optimizer's
    next step is copied. The tensors of the optimizer are written from where they are; its next step waits until the
    rest of them is copied. The name refers to the old file until the new one is complete and durable. Saves to one
    path are written in order.

    Until the optimizer's step, or until `wait_captured()` returns, nothing else may change the optimizer's tensors. A
    change that torch counts fails the save with TornStateError. Resizing a storage meanwhile may end the process.

    Args:
        obj: Any object that torch.save takes. It is pickled before this returns.
        path: The file. If a rename cannot replace it, the save is over when this returns; see `save`.
        optimizer: The optimizer whose parameters and state are in `obj`: a torch optimizer, a wrapper with an
            `.optimizer` attribute, or a list of these. Without it, everything is copied before this returns.
        constant: What never changes (frozen weights): modules, tensors, lists and dicts of them. Never copied.
        gate: "optimizer": the optimizer's steps wait by themselves. "manual": call `wait_captured()` before anything
            changes.
        durable: Count the save as done only when the file survives a loss of power.
        checksum: Compute and record CRC-32s.
        engine: "auto", or an engine's name, which then never falls back.
        format: "auto", "torch" or "safetensors", as in `save`.
        metadata: Text by name, for safetensors only, as in `save`.
        replace_links: Also replace a file that has several hard links, as in `save`.
        make_parents: Make missing parent directories, durably.
        in_place: Overwrite a file that may be written but not replaced, before this returns, as in `save`.
        process_group: Write one file with all ranks, as in `save`. The writers share out the tensors of the optimizer
            and of `constant`. Each rank's optimizer waits for its own part only.
        writers: The ranks that write, as in `save`.
        check_replicas: Compare all bytes of the shared tensors between the ranks, as in `save`.

    Returns:
        The save: done(), result(), exception(), captured(), wait_captured().

    Raises:
        ConfigError, UnsupportedError, RuntimeError, TypeError, …: As in `save`; no file was touched.
        StorageError: The file cannot be created. result() raises later errors.
        CoordinationError, PeerError: With a process_group: as in `save`; or result() raises them.

    Thread safety: any thread; no other thread may change the object while this runs. With a process_group: in the same
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
    mmap: bool = False,
    keys: Collection[str] | None = None,
    rename: Rename | None = None,
    dtype: torch.dtype | None = None,
) -> Any:
    """Load the object that a file holds: the same object that torch.load or safetensors would return.

    The bytes are read first, straight to where they belong; then stock torch.load builds the object around them. The
    first bytes of the file tell the format, not the name. If only stock torch.load can read a file (legacy formats,
    TorchScript, a callable map_location, …), it does, and the log says why.

    Args:
        path: A file written by fastpersist, torch.save or safetensors. A file object is passed to torch.load.
        map_location: The same as in torch.load: None, a device or its name, a dict of locations, or a callable.
        weights_only: Build nothing but tensors and plain containers. Pass False only for files that you trust.
        verify: Check every CRC while reading, before anything is unpickled.
        progress: Show bytes, rate and remaining time on standard error.
        engine: "auto", or an engine's name, which then never falls back.
        process_group: Load the same file on all ranks of this group; all of them call this, and each gets the whole
            object on its own devices. They share the reading if that is faster, so that each byte is read from the disk
            once. The call returns on all ranks or raises on all. A rank waits for another at most for the group's
            timeout. The calling thread takes part in the group's collectives.
        mmap: Read nothing now: the tensors are views of the file, whose pages the kernel reads when they are used. Use
            it for a part of a large file. Changes in memory never reach the file. While the tensors live, no program
            may write into the file or truncate it (access to a missing page ends the process); replacing it, as `save`
            does, is safe. On the CPU only, and without `verify`, `engine` and `process_group`.
        keys: Load only what has these names: names as `inspect` lists them, or patterns of `fnmatch` for them, in which
            `*`, `?` and `[…]` stand for dots too: ["model.*", "optimizer.state.*.exp_avg", "step"]. A number in
            brackets, as in `optimizer.state[0]`, may also be written with a dot, and in patterns must be: brackets are
            a set of characters there. The result is the dict that was saved, without the entries that no key matches,
            in nested dicts too; a dict that loses all entries is left out. An entry that matches (a dict, a list, an
            object) is returned as a whole. Lists are never cut: name the list, not its elements. Only chosen entries
            are read; if a tensor views a part of a storage, the whole storage; also tensors that cannot be built
            without their bytes (sparse ones, subclasses), which are then dropped. `verify` reads the whole file, and so
            does a load that only stock torch.load can do.
        rename: New names, for the checkpoints of others: a dict of prefixes, {"module.": ""}, of which the longest that
            fits is replaced; or a function that takes a name and returns the new one, or None to leave the entry out.
            Names are those that `inspect` lists; `keys` refers to the old names. The result is then one flat dict, also
            if the file has nested dicts; lists and other values stay unchanged.
        dtype: Convert all floating-point tensors in dicts, lists and tuples to this dtype, once they are loaded, one
            after the other. All others stay: integers, bools, complex and quantized tensors. An optimizer's counts of
            steps are floating-point tensors too.

    Returns:
        The object. For a safetensors file: a dict of tensors by name, in the order of the file.

    Raises:
        CheckpointNotFoundError: There is no such file.
        FormatError: The file is no whole checkpoint: it is truncated, damaged, unfinished, or something else, which the
            message names. With weights_only=False also a pickle whose name ends in `.safetensors`: that name promises
            that loading runs no code.
        ChecksumError: With verify: the bytes of the tensors that the message names have changed.
        ConfigError: An argument makes no sense; or mmap, and only stock torch.load can load the file, or not all of it
            belongs on the CPU; or keys or rename, and the file holds no dict; or a key matches nothing; or two entries
            are renamed to one name.
        UnsupportedError: The named engine cannot be used; or verify, and the file has no checksums.
        StorageError: An error of the disk; or the path is a directory (the message says what loads it), a FIFO or a
            device.
        pickle.UnpicklingError: With weights_only: torch refuses an object that is not known to be safe.
        PeerError: With a process_group: another rank failed, or is gone. The rank that failed raises its own error.
        CoordinationError: With a process_group: the ranks were given different files.

    Thread safety: any thread, any number at once; with a process_group one at a time, in the same order on all ranks.
    """
    started_s = time.monotonic()
    require_bools(weights_only=weights_only, verify=verify, mmap=mmap)
    require_keys(keys)
    if dtype is not None:
        require_floating(dtype)
    name = _path_of(path, "read")
    if mmap and (name is None or verify or process_group is not None or engine != "auto"):
        raise ConfigError(
            "mmap=True takes a path, and none of verify, engine and process_group: the kernel reads the file, when its "
            "tensors are used"
        )
    if name is None:
        if verify or process_group is not None:
            raise UnsupportedError(
                "a file object goes to torch.load, which cannot verify it or share it among ranks; pass its path"
            )
        loaded = stock_load(path, map_location=map_location, weights_only=weights_only)
        loaded = chosen_part("the file object", loaded, keys)
    else:
        load_source = load_checkpoint if keys is None else partial(load_chosen, keys=keys)
        with reader_for(process_group, name) as read, CheckpointSource(name) as source:
            with showing_progress(source.path, source.size_bytes, progress):
                loaded = load_source(
                    source,
                    map_location=map_location,
                    weights_only=weights_only,
                    verify=verify,
                    engine=engine,
                    read=read,
                    mapped=mmap,
                )
    if rename is not None:
        loaded = renamed(name or "the file object", loaded, rename)
    if dtype is not None:
        loaded = converted(loaded, dtype)
    if name is not None:
        _tell_of_load(name, source.size_bytes, started_s, process_group)
    return loaded


def _tell_of_load(path: str, size_bytes: int, started_s: float, group: ProcessGroup | None) -> None:
    figures = {"bytes": size_bytes, "total_s": time.monotonic() - started_s}
    emit("loaded", path, figures, rank=0 if group is None else dist.get_rank(group))


@untraced
def load_into(
    path: str | os.PathLike[str],
    target: object,
    *,
    strict: bool = True,
    keys: Collection[str] | None = None,
    rename: Rename | None = None,
    verify: bool = False,
    progress: bool = False,
    engine: str = "auto",
    process_group: ProcessGroup | None = None,
) -> IncompatibleKeys:
    """Fill existing tensors from a file in place, without a second copy of the state.

    Everything is checked first: names, shapes, dtypes and the structure of all files. If anything is wrong, no target
    has changed. Values are converted if dtypes differ, as load_state_dict does.

    Args:
        path: A file written by fastpersist, torch.save or safetensors. Or a directory of a model in safetensors files,
            as HuggingFace writes them: with an index, or without.
        target: What to fill: a Module, as its load_state_dict would fill it from the state_dict in the file, if that
            has the module's names and shapes (of others that hooks translate, as of an old weight_norm, use `load` and
            load_state_dict); a tensor; an optimizer, or a wrapper with an `.optimizer` attribute; any object with
            load_state_dict; or dicts, lists and tuples of these, nested like the object in the file. Plain values
            (numbers, text, None, …) in a dict or a list are set to those of the file. If the target holds such values
            or an optimizer, its dicts also get the plain values that they lack.
        strict: Require the same tensor names on both sides. Without it, names that only one side has are ignored;
            shapes must still agree, and optimizers must fit. A tensor with several names in the target (tied weights)
            needs only one of them in safetensors, which hold no tensor twice.
        keys: Take only what has these names in the file, or matches these patterns, as in `load`. All else in the
            target stays as it is, and counts as missing only in what is returned. For targets of tensors and Modules.
        rename: New names for what is in the file, as in `load`: rename={"module.": ""} for a state that a wrapper of
            the module has saved, {"state_dict.model.": ""} for a state inside of another. For targets of tensors and
            Modules. All messages have the new names.
        verify: Check the CRCs of the whole file before the target changes. The file is then read twice.
        progress: Show bytes, rate and remaining time on standard error; of what this rank reads.
        engine: "auto", or an engine's name, which then never falls back.
        process_group: Read the same file (no directory) with all ranks of this group; all of them call this, each with
            a target of its own. As in `load`, it returns on all ranks or raises on all. What one rank finds wrong
            before the filling begins leaves the targets of all ranks unchanged.

    Returns:
        The names that were ignored, as from Module.load_state_dict: `missing_keys` and `unexpected_keys`.

    Raises:
        CheckpointNotFoundError: There is no such file, or one that an index names is missing.
        ConfigError: Names, shapes or the class of an optimizer do not agree, or a part of the target cannot be filled;
            the message lists all of it by names in the target. Nothing was changed, unless a load_state_dict refused
            its part: then the message says what is *partly overwritten*.
        FormatError, ChecksumError, UnsupportedError, pickle.UnpicklingError: As in `load`; nothing was changed.
        StorageError: An error of the disk. If the message says *partly overwritten*, the contents of the tensors it
            names are unknown: load again, or from another checkpoint.
        PeerError: With a process_group: another rank failed, or is gone. *Partly overwritten* as above; without these
            words the target is unchanged, or completely filled if that rank failed at the very end.
        CoordinationError: With a process_group: the ranks were given different files.

    Thread safety: any thread; no other thread may use the target's tensors meanwhile. With a process_group one at a
    time, in the same order on all ranks.
    """
    started_s = time.monotonic()
    name = local_path(path)
    require_keys(keys)
    wanted = Wanted(target, strict, keys, rename)
    has_only_tensors = _is_tensors_only(target)
    if not (has_only_tensors or (keys is None and rename is None)):
        raise UnsupportedError(
            "keys= and rename= go with targets of tensors and Modules: fill optimizers and plain values by another call"
        )
    if holds_safetensors(name):
        if process_group is not None:
            raise UnsupportedError(
                f"{name} is a directory, and ranks load one file together: let each rank load it without process_group"
            )
        if not has_only_tensors:
            raise misfit(name, [_TENSORS_ONLY])
        passed_over, size_bytes = fill_from_directory(name, wanted, verify=verify, engine=engine, progress=progress)
    else:
        with ExitStack() as stack:
            read = stack.enter_context(reader_for(process_group, name))
            source = stack.enter_context(CheckpointSource(name))
            size_bytes = source.size_bytes
            stack.enter_context(showing_progress(name, size_bytes * (1 + verify), progress))
            if has_only_tensors:
                passed_over = fill_target(source, wanted, verify=verify, engine=engine, read=read)
            elif source.kind == "safetensors":
                raise misfit(source.path, [_TENSORS_ONLY])
            else:
                for one in engine_ladder(engine, source.fd, for_reading=True):
                    refuse_null_engine(one)
                passed_over = restore_whole(source, target, strict=strict, verify=verify, engine=engine, read=read)
    _tell_of_load(name, size_bytes, started_s, process_group)
    return passed_over


_TENSORS_ONLY = "it holds tensors only; the target holds more than tensors and Modules"


def _is_tensors_only(target: object) -> bool:
    if isinstance(target, Mapping):
        return all(map(_is_tensors_only, target.values()))
    if isinstance(target, (list, tuple)):
        return all(map(_is_tensors_only, target))
    return isinstance(target, (torch.Tensor, torch.nn.Module))


def verify(path: PathLike, *, progress: bool = False, engine: str = "auto") -> VerifyReport:
    """Read a whole checkpoint and tell whether it is what its writer wrote, and which tensors are damaged where.

    This compares the recorded CRCs. It changes nothing and runs no code of the file.

    Args:
        path: A file, a checkpoint directory with all its files, or a root with all its steps.
        progress: Show bytes, rate and remaining time on standard error.
        engine: "auto", or an engine's name, which then never falls back.

    Returns:
        The report; it is true if nothing is wrong. Damage is in the report, not an exception.

    Raises:
        CheckpointNotFoundError: There is no such file or directory.
        ConfigError: An argument makes no sense.
        UnsupportedError: The named engine cannot be used here; or the file cannot be checked: it is one of an older
            torch.save, of TorchScript or of NumPy, or another program has compressed it.
        StorageError: An error of the disk, or a directory that holds no checkpoints. If a file of a directory cannot be
            read, the others are read all the same; if one of them is damaged, all that is wrong is in the report.

    Thread safety: any thread.
    """
    name = local_path(path)
    if os.path.isdir(name):
        with showing_progress(name, directory_inspection.directory_bytes(name) if progress else 0, progress):
            return directory_inspection.verify_directory(name, engine=engine, explain=_with_damaged_shards)
    with CheckpointSource(name) as source:
        with showing_progress(source.path, source.size_bytes, progress):
            listed = directory_inspection.verify_listed(name, engine=engine)
            if listed is None:
                file_inspection.refuse_without_checksums(source)
            return file_inspection.verify_source(source, engine=engine) if listed is None else listed


def _with_damaged_shards(report: VerifyReport) -> VerifyReport:
    if all(writer_of(damage.file) is None for damage in report.damages):
        return report
    from fastpersist.dcp.inspection import with_damaged_tensors  # slow to import, like all of DCP

    return with_damaged_tensors(report)


def inspect(path: PathLike) -> Manifest:
    """List what a checkpoint holds, without loading it and without running any of its code.

    Args:
        path: A file, a checkpoint directory, or a root of such directories.

    Returns:
        Of a file: names, dtypes, shapes, offsets and CRCs of its tensors, and the globals that its pickle names. Of a
        directory also its files, step and metrics. Of a root its committed steps. The shape of a sharded tensor is that
        of the whole tensor.

    Raises:
        CheckpointNotFoundError: There is no such file or directory.
        ConfigError: `path` is no path.
        FormatError: The file or the manifest cannot be parsed.
        UnsupportedError: The file is neither a torch zip nor a safetensors file.
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
