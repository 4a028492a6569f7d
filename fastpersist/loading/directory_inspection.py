"""Lists the contents of a checkpoint directory, or of a root, and verifies them.

MANIFEST.json alone decides: the files that it lists must be there, with their lengths and CRCs. Files with tensors are
opened only to list the tensors, or to tell which of them are damaged. Nothing is changed. The directory is locked
meanwhile, so that no other process removes it. In a root, a step that is removed before it could be locked counts as
absent.
"""

from __future__ import annotations

import dataclasses
import errno
import logging
import os
import re
import stat
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import TypeAlias

from fastpersist.commit.directory_commit import committed_path, files_in, hold_for_reading
from fastpersist.commit.filesystem import absolute_path, has_name, storage_errors
from fastpersist.commit.locks import HeldDirectory
from fastpersist.commit.step_listing import NO_FILE, read_manifest
from fastpersist.errors import (
    CheckpointNotFoundError,
    ConfigError,
    CorruptionError,
    FastPersistError,
    FormatError,
    StorageError,
    UnsupportedError,
)
from fastpersist.formats.manifest import (
    MANIFEST_NAME,
    CheckpointManifest,
    FileEntry,
    step_of,
)
from fastpersist.formats.split_manifest import COPY_NAME
from fastpersist.loading.checkpoint_file import open_file
from fastpersist.loading.file_inspection import Damage, Manifest, VerifyReport, inspect_source, verify_source
from fastpersist.loading.part_files import read_record
from fastpersist.transfer.reader import Extents, read_extents

__all__ = ["TENSOR_SUFFIXES", "directory_bytes", "inspect_directory", "require_replaceable", "verify_directory"]

_log = logging.getLogger("fastpersist")

TENSOR_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".safetensors")
_LEFTOVER = re.compile(r"\.(?P<name>.+)\.(?P<kind>pending|retired)-[0-9a-f]{16}", re.DOTALL)
_ROOT_MARKS = ("LATEST", ".lock")

AddShards: TypeAlias = Callable[[Manifest], Manifest]
Explain: TypeAlias = Callable[[VerifyReport], VerifyReport]


def inspect_directory(path: str, *, add_shards: AddShards = lambda found: found) -> Manifest:
    """List what a checkpoint directory or a root holds; see `fastpersist.inspect`.

    Args:
        path: A directory with a MANIFEST.json, whose tensors are listed too; or one with step-* directories.
        add_shards: Adds the tensors in shards to the content of a directory, whose present place is `path`.

    Raises:
        CheckpointNotFoundError: The directory went away, or is still being written.
        FormatError: The manifest, or a file with tensors, cannot be parsed; or a file is missing or too short.
        StorageError: An error of the disk, or a directory that is neither.

    Thread safety: any thread.
    """
    if _is_checkpoint(path):
        with _held(path) as (held, manifest):
            found = _with_other_parts(_summary(path, manifest), manifest, held)
            for entry in manifest.files:
                if problem := _size_problem(held.place, entry):
                    raise FormatError(problem, path=path)
            found = _with_tensors(found, held)
            return dataclasses.replace(add_shards(dataclasses.replace(found, path=held.place)), path=path)
    _require_root(path)
    checkpoints = []
    damaged = []
    for name, step_path in _steps(path):
        try:
            with _held(step_path) as (held, manifest):
                if any(_size_problem(held.place, entry) for entry in manifest.files):
                    damaged.append(name)
                else:
                    checkpoints.append(_summary(step_path, manifest))
        except CheckpointNotFoundError:
            damaged += [name] if has_name(step_path) else []
        except FormatError:
            damaged.append(name)
    return Manifest(
        path,
        "root",
        sum(found.size_bytes for found in checkpoints),
        bool(checkpoints) and all(found.has_checksums for found in checkpoints),
        (),
        checkpoints=tuple(checkpoints),
        leftovers=tuple(sorted({*damaged, *_leftovers(path)})),
    )


def verify_directory(path: str, *, engine: str, explain: Explain = lambda report: report) -> VerifyReport:
    """Read everything in a checkpoint directory or a root and tell what is wrong; see `fastpersist.verify`.

    Args:
        path: A directory with a MANIFEST.json, or one with step-* directories.
        engine: "auto", or an engine's name.
        explain: Adds what is damaged inside a checkpoint to its report, whose `path` is the present place.

    Raises:
        CheckpointNotFoundError: The directory went away, or is still being written.
        StorageError: The directory is neither, or something in it cannot be read, and nothing else is damaged. All
            damage is in the report, which then also names what cannot be read.
        UnsupportedError: The named engine cannot be used here.

    Thread safety: any thread.
    """
    if _is_checkpoint(path):
        return _verify_checkpoint(path, engine, explain)
    _require_root(path)
    damages: list[Damage] = []
    notes: list[str] = []
    checked_bytes = 0
    steps = _steps(path)
    has_checksums = bool(steps)
    unread: list[tuple[StorageError, Damage]] = []
    for name, step_path in steps:
        try:
            try:
                report = _verify_checkpoint(step_path, engine, explain)
            except CheckpointNotFoundError as error:
                if has_name(step_path):
                    damages.append(Damage(f"{name}: {error}", file=name))
                continue
        except StorageError as error:
            unread.append((error, Damage(f"{name} cannot be read: {error}", file=name)))
            continue
        damages += [
            dataclasses.replace(
                damage, message=f"{name}: {damage.message}", file=f"{name}/{damage.file}".removesuffix("/")
            )
            for damage in report.damages
        ]
        notes += [f"{name}: {note}" for note in report.notes]
        checked_bytes += report.checked_bytes
        has_checksums = has_checksums and report.has_checksums
    damages += _unread_beside(damages, unread)
    return VerifyReport(path, tuple(damages), checked_bytes, has_checksums, _leftovers(path), tuple(notes))


def verify_listed(path: str, *, engine: str) -> VerifyReport | None:
    """Verify a safetensors file by the manifest beside it: the file itself has no CRC of its header.

    Args:
        path: The file.
        engine: "auto", or an engine's name.

    Returns:
        None if no manifest beside it has a CRC of such a file.

    Raises:
        CheckpointNotFoundError, StorageError: The file went away, or cannot be read.

    Thread safety: any thread.
    """
    directory, name = os.path.split(path)
    if not name.endswith(".safetensors"):
        return None
    with ExitStack() as stack:
        try:
            held = stack.enter_context(hold_for_reading(directory or os.curdir))
            manifest = read_manifest(held.place)
        except (CorruptionError, StorageError, CheckpointNotFoundError):
            return None
        for entry in manifest.files:
            if entry.name == name and entry.crc32 is not None:
                if problem := _size_problem(held.place, entry):
                    return VerifyReport(path, (Damage(problem),), 0, True)
                return dataclasses.replace(_verify_file(held, entry, engine), path=path)
    return None


def directory_bytes(path: str) -> int:
    """Return how many bytes `verify_directory` will read, as far as known, for a progress bar."""
    paths = [path] if _is_checkpoint(path) else [step_path for _, step_path in _steps(path)]
    size_bytes = 0
    for found in paths:
        try:
            size_bytes += sum(entry.size_bytes for entry in read_manifest(found).files)
        except (CorruptionError, StorageError, CheckpointNotFoundError):
            continue
    return size_bytes


# --------------------------------------------------------------------------------------------- what is where


def require_replaceable(path: str, belongs: Callable[[str], object]) -> None:
    """Refuse a directory with anything in it but a checkpoint, before `DirectorySave` replaces all of it.

    Args:
        path: An existing directory.
        belongs: Called with the name of each entry of the directory that its manifest does not list; returns whether
            the entry is part of a checkpoint nevertheless.

    Raises:
        ConfigError: An entry is not part of a checkpoint; the message names it.
        StorageError: The directory cannot be listed.

    Thread safety: any thread.
    """
    with storage_errors("listing", path):
        found = os.listdir(path)
    listed = {MANIFEST_NAME}
    if MANIFEST_NAME in found:
        try:
            with _held(path) as (_, manifest):
                listed.update(entry.name.split("/")[0] for entry in manifest.files)
        except FastPersistError as error:  # damaged: entries that `belongs` knows may be replaced all the same
            _log.info("%s is replaced without its manifest: %s", path, error)
    foreign = sorted(name for name in found if name not in listed and not belongs(name))
    if foreign:
        raise ConfigError(
            f"{path} is replaced as a whole, and {foreign[0]} in it is no part of a checkpoint: save into a directory "
            "of its own, or move it away"
        )


def _is_checkpoint(path: str) -> bool:
    """Tell whether a directory is a checkpoint and not a root: it has a manifest, or else the name of a step."""
    name = os.path.basename(absolute_path(path))
    hidden = _LEFTOVER.fullmatch(name)
    if step_of(hidden["name"] if hidden else name) is not None:
        return True
    return has_name(os.path.join(path, MANIFEST_NAME))


def _require_root(path: str) -> None:
    with storage_errors("listing", path):
        names = os.listdir(path)
    if not any(name in _ROOT_MARKS or step_of(name) is not None or _LEFTOVER.fullmatch(name) for name in names):
        raise StorageError(
            errno.EISDIR,
            f"{path} is a directory that holds neither a {MANIFEST_NAME} nor step-* directories: no checkpoint",
            path,
        )


def _steps(root: str) -> list[tuple[str, str]]:
    """List the directories that are, or should be, committed steps: name and present place, by step."""
    with storage_errors("listing", root):
        names = os.listdir(root)
    found: dict[int, tuple[str, str]] = {}
    for name in names:
        # While a step is replaced without an exchange, it is committed under its retired name for a moment.
        match = _LEFTOVER.fullmatch(name)
        final_name = match["name"] if match and match["kind"] == "retired" else name
        step = step_of(final_name)
        if step is not None and step not in found:
            place = committed_path(root, final_name)
            if place is not None:
                found[step] = (os.path.basename(place), place)
    return [found[step] for step in sorted(found)]


def _leftovers(root: str) -> tuple[str, ...]:
    """List pending and retired directories, without those that stand for a committed step."""
    committed = {name for name, _ in _steps(root)}
    with storage_errors("listing", root):
        return tuple(sorted(name for name in os.listdir(root) if _LEFTOVER.fullmatch(name) and name not in committed))


@contextmanager
def _held(path: str) -> Iterator[tuple[HeldDirectory, CheckpointManifest]]:
    """Give a directory and its manifest, and keep others from removing it while the block runs.

    Raises:
        CheckpointNotFoundError, FormatError, StorageError: As `read_manifest`.
    """
    manifest_path = os.path.join(path, MANIFEST_NAME)
    # Checked first: only a regular file can be held.
    with storage_errors("looking up", manifest_path), suppress(FileNotFoundError, NotADirectoryError):
        if not stat.S_ISREG(os.lstat(manifest_path).st_mode):
            raise FormatError("it is no regular file", path=manifest_path)
    with hold_for_reading(path) as held:
        yield held, read_manifest(held.place)


def _size_problem(path: str, entry: FileEntry) -> str | None:
    """Return what is wrong with a file of a checkpoint, as far as its name and length tell; None if nothing is."""
    file_path = os.path.join(path, entry.name)
    try:
        with storage_errors("looking up", file_path):
            status = os.stat(file_path)
    except StorageError as error:
        if error.errno in NO_FILE:
            return f"{entry.name} is missing"
        raise
    if not stat.S_ISREG(status.st_mode):
        return f"{entry.name} is no regular file"
    if status.st_size != entry.size_bytes:
        return f"{entry.name} is {status.st_size} bytes long, not {entry.size_bytes}"
    return None


# --------------------------------------------------------------------------------------------- inspect


def _summary(path: str, manifest: CheckpointManifest) -> Manifest:
    """Return the content of a manifest, without looking at any file."""
    return Manifest(
        path,
        "directory",
        sum(entry.size_bytes for entry in manifest.files),
        bool(manifest.files) and all(entry.crc32 is not None for entry in manifest.files),
        (),
        files=manifest.files,
        step=manifest.step,
        time_s=manifest.time_s,
        metrics=manifest.metrics,
        versions=manifest.versions,
        host=manifest.host,
        stats=manifest.stats,
        commit_number=manifest.commit_number,
    )


def _with_other_parts(found: Manifest, manifest: CheckpointManifest, held: HeldDirectory) -> Manifest:
    """Add where the rest of the checkpoint is, if this directory has only a part of it; and where other copies are."""
    record = read_record(held.place, manifest)
    copy = read_record(held.place, manifest, COPY_NAME) if record is None else None
    more = {}
    for kind, one in (("other_parts", record), ("other_copies", copy)):
        others = [] if one is None else [number for number in range(len(one.stores)) if number != one.store]
        if one is not None and others:
            more[kind] = one.describe(others)
    if copy is not None and (absent := set(copy.own_files).difference(entry.name for entry in manifest.files)):
        more["files_of_other_copies"] = ", ".join(sorted(absent)[:8]) + (" …" if len(absent) > 8 else "")
    return dataclasses.replace(found, host={**found.host, **more}) if more else found


def _with_tensors(found: Manifest, held: HeldDirectory) -> Manifest:
    """Add the tensors in the files of a checkpoint, and the globals of their pickles."""
    tensors = []
    global_names: dict[str, None] = {}
    for entry in _tensor_files(found.files):
        try:
            with open_file(held, entry.name) as source:
                if source.kind == "other":
                    continue
                inside = inspect_source(source)
        except UnsupportedError:
            continue  # the file is listed, without its tensors: only stock torch.load can read it
        tensors += [dataclasses.replace(tensor, file=entry.name) for tensor in inside.tensors]
        global_names.update(dict.fromkeys(inside.globals))
    return dataclasses.replace(found, tensors=tuple(tensors), globals=tuple(global_names))


def _tensor_files(files: tuple[FileEntry, ...]) -> Iterator[FileEntry]:
    return (entry for entry in files if entry.name.endswith(TENSOR_SUFFIXES))


# --------------------------------------------------------------------------------------------- verify


def _verify_checkpoint(path: str, engine: str, explain: Explain) -> VerifyReport:
    try:
        if os.path.isdir(path):
            manifest_path = os.path.join(path, MANIFEST_NAME)
            with storage_errors("looking up", manifest_path):
                try:
                    os.lstat(manifest_path)
                except FileNotFoundError:
                    raise FormatError("it is missing: the checkpoint was never finished, or is damaged") from None
        with _held(path) as (held, manifest):
            report = _verify_files(held, manifest, engine)
            return dataclasses.replace(explain(dataclasses.replace(report, path=held.place)), path=path)
    except FormatError as error:
        damage = Damage(f"{MANIFEST_NAME}: {error.message}", file=MANIFEST_NAME, offset_bytes=error.offset_bytes)
        return VerifyReport(path, (damage,), 0, False)


def _verify_files(held: HeldDirectory, manifest: CheckpointManifest, engine: str) -> VerifyReport:
    damages: list[Damage] = []
    checked_bytes = 0
    has_checksums = bool(manifest.files)
    unread: list[tuple[StorageError, Damage]] = []
    for entry in manifest.files:
        try:
            problem = _size_problem(held.place, entry)
            if problem is None:
                report = _verify_file(held, entry, engine)
                damages += report.damages
                checked_bytes += report.checked_bytes
                has_checksums = has_checksums and report.has_checksums
        except CheckpointNotFoundError as error:
            problem = held.named(f"{entry.name} cannot be read: {error}")
        except StorageError as error:
            told = held.named(f"{entry.name} cannot be read: {error}")
            unread.append((error, Damage(told, file=entry.name)))
            continue
        if problem is not None:
            damages.append(Damage(problem, file=entry.name))
    notes: tuple[str, ...] = ()
    try:
        notes = _surplus(held, manifest)
    except UnsupportedError as error:
        damages.append(Damage(held.named(str(error))))
    except StorageError as error:
        unread.append((error, Damage(held.named(str(error)))))
    damages += _unread_beside(damages, unread)
    return VerifyReport(held.path, tuple(damages), checked_bytes, has_checksums, notes=notes)


def _unread_beside(damages: list[Damage], unread: list[tuple[StorageError, Damage]]) -> list[Damage]:
    """Return what to tell of files that cannot be read, beside damage; without damage, raise the first error."""
    if unread and not damages:
        raise unread[0][0]
    return [told for _, told in unread]


def _verify_file(held: HeldDirectory, entry: FileEntry, engine: str) -> VerifyReport:
    """Compare the CRC of a file; if it differs, or there is none, check the CRCs inside the file."""
    file_path = os.path.join(held.path, entry.name)
    crc = None
    with open_file(held, entry.name) as source:
        if entry.crc32 is not None:
            extents = Extents()
            extents.add_checked(0, entry.size_bytes)
            (crc,) = read_extents(source.fd, file_path, extents, engine=engine).crcs
            if crc == entry.crc32:
                return VerifyReport(file_path, (), entry.size_bytes, True)
        own_damages: tuple[Damage, ...] = ()
        checked_bytes = entry.size_bytes if crc is not None else 0
        has_checksums = crc is not None
        if entry.name.endswith(TENSOR_SUFFIXES) and source.kind != "other":
            inside = verify_source(source, engine=engine)
            own_damages = inside.damages
            if crc is None:
                checked_bytes, has_checksums = inside.checked_bytes, inside.has_checksums
    damages = [
        dataclasses.replace(damage, message=f"{entry.name}: {damage.message}", file=entry.name)
        for damage in own_damages
    ]
    if crc is not None and not damages:
        where = " outside of its tensors" if entry.name.endswith(TENSOR_SUFFIXES) else ""
        damages.append(
            Damage(
                f"the bytes of {entry.name} are damaged{where}: their CRC is {crc:08x}, not {entry.crc32:08x}",
                file=entry.name,
            )
        )
    return VerifyReport(file_path, tuple(damages), checked_bytes, has_checksums)


def _surplus(held: HeldDirectory, manifest: CheckpointManifest) -> tuple[str, ...]:
    """Note the files of a directory that are not in its manifest: they are not loaded.

    Raises:
        UnsupportedError: The directory holds something that is neither a file nor a directory.
    """
    listed = {entry.name for entry in manifest.files}
    return tuple(
        f"{name} is not in the manifest, so nothing is known of it"
        for name in files_in(held.place)
        if name not in listed
    )
