"""Make one ordinary file of a checkpoint that lies in pieces: parts in several stores, or shards of a DCP checkpoint.

Parts are byte ranges of the file that one rank alone would have written. They are copied to their places and checked
against their CRCs, and the whole file against its recorded CRC. Shards are loaded into one state, which is then saved:
that needs as much memory as the state. The file gets its final name when it is complete and durable.
"""

from __future__ import annotations

import errno
import functools
import os
import pickle
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from fastpersist import _native
from fastpersist.api import load
from fastpersist.commit.directory_commit import hold_for_reading
from fastpersist.commit.file_commit import PendingFile, refuse_existing, resolve_target
from fastpersist.commit.filesystem import absolute_path, filesystem, has_name, storage_errors
from fastpersist.commit.step_listing import candidate_steps, check_files, read_manifest
from fastpersist.config import BLOCK_BYTES
from fastpersist.errors import (
    CheckpointNotFoundError,
    ChecksumError,
    ConfigError,
    FormatError,
    StorageError,
    UnsupportedError,
)
from fastpersist.formats.layout import align_up
from fastpersist.formats.manifest import DCP_METADATA_NAME, MANIFEST_NAME, NO_FILES, step_name
from fastpersist.formats.split_manifest import PARTS_NAME, PartsRecord, SplitFile
from fastpersist.loading.part_files import (
    FoundPart,
    OpenPart,
    file_in_parts,
    missing_stores,
    read_record,
    require_whole,
)
from fastpersist.saving.containers import is_safetensors
from fastpersist.saving.file_save import FileOptions, SaveReport, save_file
from fastpersist.saving.write_file import WrittenFile, publish_file
from fastpersist.transfer.engine_selection import refuse_null_engine, require_engine
from fastpersist.transfer.progress import progress_bar
from fastpersist.transfer.reader import Extents, read_extents
from fastpersist.transfer.writer import Pieces, Run, Writer

__all__ = ["merge"]

_COPIED_BYTES = 32 << 20
"""The most bytes in memory while parts are copied."""


def merge(
    directories: Sequence[str | os.PathLike[str]],
    path: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    format: str = "auto",
    weights_only: bool = True,
    engine: str = "auto",
    progress: bool = False,
) -> SaveReport:
    """Make one ordinary file of a checkpoint that lies in parts or in shards.

    Args:
        directories: The directories of one step: one from each store, brought to this machine; or one with all shards.
        path: The file to make.
        overwrite: Replace a file that is there.
        format: "torch", "safetensors", or "auto", which takes the format from the path's suffix.
        weights_only: The option of torch.load, for data that is loaded: shards, and parts that become safetensors.
        engine: "auto", or an engine's name, which then never falls back.
        progress: Show bytes, rate and remaining time on standard error.

    Raises:
        CheckpointNotFoundError: One of the directories holds no checkpoint.
        ConfigError: The file exists already, a name is that of a file, or the directories do not belong together.
        FormatError, ChecksumError: A part is missing or damaged; the message says which, and who wrote it.
        UnsupportedError: There is nothing to merge: the checkpoint is whole; or weights_only refuses an object in it.
        StorageError: An error of the disk.

    Thread safety: any thread.
    """
    require_engine(engine)
    out = absolute_path(path)
    options = FileOptions(engine=engine, file_format=format, overwrite=overwrite)
    wants_safetensors = is_safetensors(out, format)
    names = [absolute_path(directory) for directory in directories]
    if not names:
        raise ConfigError("there is nothing to merge: name the directory of a step, one of each store")
    if not overwrite:
        refuse_existing(out)
    for name in names:
        if not os.path.isdir(name):
            if os.path.lexists(name):
                raise ConfigError(f"{name} is no directory: name that of a step; a file is whole already")
            raise CheckpointNotFoundError(errno.ENOENT, f"there is no directory {name}", name)
        if not os.path.lexists(os.path.join(name, MANIFEST_NAME)) and (steps := candidate_steps(name)):
            raise ConfigError(f"{name} holds steps: name the directory of one, such as {step_name(max(steps))}")
    if any(os.path.lexists(os.path.join(name, DCP_METADATA_NAME)) for name in names):
        _require_stores(names)
        with _one_directory(names) as directory:
            state = _shards(directory, engine, weights_only)
        if not overwrite:
            refuse_existing(out)  # it may have appeared meanwhile
        return save_file(state, out, options, progress=progress)
    with ExitStack() as stack:
        for name in names:
            stack.enter_context(hold_for_reading(name))
        file, parts = _found_parts(names)
        if not wants_safetensors:
            return _copied(file, parts, out, overwrite=overwrite, engine=engine, progress=progress)
        state = _loaded(file, parts, out, weights_only=weights_only, engine=engine, progress=progress)
    if not overwrite:
        refuse_existing(out)  # it may have appeared meanwhile
    return save_file(state, out, options)


# --------------------------------------------------------------------------------------------- parts


def _found_parts(directories: Sequence[str]) -> tuple[SplitFile, list[FoundPart]]:
    """Return the file that lies in parts, and all of its parts.

    Raises:
        CheckpointNotFoundError, ConfigError, FormatError, UnsupportedError: See `merge`.
    """
    records: list[tuple[str, PartsRecord]] = []
    found: dict[str, list[FoundPart]] = {}
    for directory in directories:
        manifest = read_manifest(directory)
        record = read_record(directory, manifest)
        if record is None:
            listed = ", ".join(entry.name for entry in manifest.files[:5])
            raise UnsupportedError(
                f"{directory} is no part of a checkpoint, it is whole: use its files ({listed}), or make one with "
                "`fastpersist convert`"
            )
        check_files(directory, manifest)
        records.append((directory, record))
        for file in record.files:
            found.setdefault(file.name, []).extend(file_in_parts(directory, record, manifest, file))
    _require_one_save(records)
    first = records[0][1]
    if len(first.files) != 1:
        raise UnsupportedError(f"{directories[0]} has {len(first.files)} files in parts; one can be merged")
    (file,) = first.files
    parts = found[file.name]
    require_whole(file.size_bytes, [part.part for part in parts], directories[0])
    return file, parts


def _require_one_save(records: Sequence[tuple[str, PartsRecord]]) -> None:
    for number, (directory, record) in enumerate(records):
        if record.token != records[0][1].token:
            raise ConfigError(
                f"{directory} and {records[0][0]} are of two saves, even if their names are the same: take the "
                "directories of one step that all stores have committed"
            )
        if any(record.store == other.store for _, other in records[:number]):
            raise ConfigError(f"{directory} is of the same store as one of the others")
    for directory, first in records[:1]:
        if missing := missing_stores(first, (record for _, record in records)):
            raise FormatError(
                f"parts are missing: those of {first.describe(missing)}. Bring the directories of that step here, and "
                "name them too",
                path=directory,
            )


def _loaded(
    file: SplitFile, parts: Sequence[FoundPart], path: str, *, weights_only: bool, engine: str, progress: bool
) -> Any:
    """Load the state from all parts: they are copied to a file without a name, which goes when this process ends."""
    directory = os.path.dirname(path)
    with ExitStack() as stack:
        with storage_errors("making a temporary file in", directory):
            fd = stack.enter_context(tempfile.TemporaryFile(dir=directory, buffering=0)).fileno()
        filesystem().allocate(fd, align_up(file.size_bytes, BLOCK_BYTES), path)
        with _bar(file, progress) as bar:
            _copy_parts(file, parts, fd, path, engine, bar.update)
        filesystem().truncate(fd, file.size_bytes, path)
        return load(f"/proc/self/fd/{fd}", weights_only=weights_only, engine=engine)


def _bar(file: SplitFile, progress: bool) -> Any:
    return progress_bar(total=file.size_bytes, unit="B", unit_scale=True, desc="merging", disable=not progress)


def _copied(
    file: SplitFile, parts: Sequence[FoundPart], path: str, *, overwrite: bool, engine: str, progress: bool
) -> SaveReport:
    """Copy all parts to their places in a new file, and publish it."""
    started_s = time.monotonic()
    target = resolve_target(path, replace_links=False)
    if target.why_not_replaceable is not None:
        raise UnsupportedError(f"cannot write {path}: {target.why_not_replaceable}")
    pending = PendingFile.create(target)
    pending.overwrite = overwrite
    with ExitStack() as stack:
        stack.callback(pending.abort)
        bar = stack.enter_context(_bar(file, progress))
        write = functools.partial(_copy_parts, file, parts, pending.fd, pending.target.path, engine, bar.update)
        published = publish_file(pending, file.size_bytes, write, durable=True)
    total_s = time.monotonic() - started_s
    return SaveReport(path, file.size_bytes, published.engine, 0.0, published.write_s, published.sync_s, total_s)


def _copy_parts(
    file: SplitFile, parts: Sequence[FoundPart], fd: int, path: str, engine: str, on_copied: Callable[[int], object]
) -> WrittenFile:
    """Copy all parts to their places in an open file, and check them; `on_copied` is told the bytes of each piece."""
    runs: list[Run] = []
    memory = torch.UntypedStorage(_COPIED_BYTES)
    with Writer(fd, path, engine=engine) as writer:
        for part in parts:
            crc = 0
            for offset_bytes, size_bytes, piece_crc in _copy_part(part, writer, memory, engine):
                runs.append((offset_bytes, size_bytes, piece_crc))
                crc = _native.combine_crc32(crc, piece_crc, size_bytes)
                on_copied(size_bytes)
            if part.entry.crc32 not in (None, crc):
                raise ChecksumError(
                    f"it is damaged: its CRC is {crc:08x}, not {part.entry.crc32:08x}; {part.author}",
                    path=part.path,
                    offset_bytes=0,
                )
        whole_crc = _native.combine_runs(runs, file.size_bytes)
        if file.crc32 not in (None, whole_crc):
            raise ChecksumError("the parts are whole, but do not make up the file that was saved", path=parts[0].path)
        used_engine = writer.finish()
    refuse_null_engine(used_engine)
    return WrittenFile(used_engine, whole_crc)


def _copy_part(part: FoundPart, writer: Writer, memory: torch.UntypedStorage, engine: str) -> Iterator[Run]:
    """Copy a part piece by piece; yield each piece."""
    with OpenPart(part.path, part.part.extents) as opened:
        for extent_offset_bytes, extent_bytes in part.part.extents:
            writer.seek(extent_offset_bytes)
            for from_bytes in range(0, extent_bytes, _COPIED_BYTES):
                size_bytes = min(_COPIED_BYTES, extent_bytes - from_bytes)
                offset_bytes = extent_offset_bytes + from_bytes
                extents = Extents()
                place = opened.map.place_of(offset_bytes)
                extents.add_memory(place, size_bytes, memory.data_ptr(), memory, with_crc=True)
                (crc,) = read_extents(opened.fd, part.path, extents, engine=engine).crcs
                pieces = Pieces()
                pieces.add_storage(memory, None, size_bytes=size_bytes)
                writer.append(pieces)
                yield offset_bytes, size_bytes, crc


# --------------------------------------------------------------------------------------------- shards


def _require_stores(directories: Sequence[str]) -> None:
    """Check that all stores of a sharded step are there, if it lies in several.

    Raises:
        ConfigError, FormatError: They are not, or are of two saves.
    """
    records = []
    for directory in directories:
        if os.path.lexists(os.path.join(directory, PARTS_NAME)):
            records.append((directory, read_record(directory, read_manifest(directory))))
    _require_one_save([(directory, record) for directory, record in records if record is not None])


@contextmanager
def _one_directory(directories: Sequence[str]) -> Iterator[str]:
    """Give a directory that holds the shards of all these directories: with links, if there are several."""
    if len(directories) == 1:
        yield directories[0]
        return
    with tempfile.TemporaryDirectory(prefix="fastpersist-merge-") as together:
        for directory in directories:
            for name in sorted(os.listdir(directory)):
                if name == DCP_METADATA_NAME or name.endswith(".distcp"):
                    try:
                        os.symlink(os.path.join(directory, name), os.path.join(together, name))
                    except FileExistsError:
                        if name != DCP_METADATA_NAME:
                            message = f"{name} is in {directory} and in another of the directories"
                            raise ConfigError(message) from None
                    except OSError as error:
                        raise StorageError(error.errno, f"linking {name}: {error.strerror}", together) from error
        yield together


def _shards(directory: str, engine: str, weights_only: bool) -> dict[str, Any]:
    """Load all shards of a DCP checkpoint into one state of whole tensors, as `Checkpointer.load` does.

    Raises:
        UnsupportedError: weights_only refuses an object in it.
    """
    from fastpersist.dcp.load_state import load_sharded_state  # torch.distributed.checkpoint takes long to import

    has_manifest = has_name(os.path.join(directory, MANIFEST_NAME))
    try:
        return load_sharded_state(
            directory,
            read_manifest(directory) if has_manifest else NO_FILES,
            into=None,
            keys=None,
            map_location=None,
            verify=False,
            weights_only=weights_only,
            engine=engine,
            read=read_extents,
            rank=0,
            count=1,
        )
    except UnsupportedError as error:
        if weights_only and isinstance(error.__cause__, pickle.UnpicklingError):
            raise UnsupportedError(f"{error}\nIf you trust the checkpoint: --no-weights-only") from error
        raise
