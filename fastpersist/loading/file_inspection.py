"""List what a checkpoint file holds and say whether it is whole, without loading it and without running its code.

`directory_inspection` gives the same kinds of answers for directories.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from fastpersist.errors import CorruptionError, UnsupportedError
from fastpersist.formats.manifest import FileEntry
from fastpersist.formats.pickle_scan import DTYPE_ITEMSIZE_BYTES, iter_tensors
from fastpersist.formats.torch_zip import header_damages
from fastpersist.loading.checkpoint_file import CheckpointSource
from fastpersist.transfer.progress import Poll
from fastpersist.transfer.reader import Extents, read_extents

__all__ = ["Damage", "Manifest", "TensorEntry", "VerifyReport", "inspect_source", "verify_source"]


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a file.

    Attributes:
        name: Where it is in the object: `model.layer.weight`, `optimizer.state[0].exp_avg`.
        dtype: torch's name of its dtype, such as "bfloat16".
        shape: Its dimensions.
        size_bytes: Bytes of its elements (a view of a larger storage counts only its own); 0 for an unknown dtype.
        offset_bytes: Where its first element lies, from the file's start; None for one without data (meta).
        record: The record that holds its storage, such as "data/0"; for safetensors its own name.
        crc32: Recorded CRC-32 of that record, None without checksums.
        file: In a checkpoint directory, the file it is in; "" for a file that is looked at by itself.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    size_bytes: int
    offset_bytes: int | None
    record: str
    crc32: int | None
    file: str = ""


@dataclass(frozen=True, slots=True, repr=False)
class Manifest:
    """What a file, a checkpoint directory, or a directory of those holds.

    Attributes:
        path: The file or directory.
        format: "torch_zip", "safetensors", "directory" (a checkpoint directory) or "root" (a directory of those).
        size_bytes: Length of the file, or of all files together.
        has_checksums: Whether CRCs were recorded: of every file of a directory, of every checkpoint of a root.
        tensors: Every tensor by name; one storage may hold several. For a directory those of all its files. Empty for
            a root and for the checkpoints in it: inspect one of them by itself.
        globals: What the pickles would import when loaded, as "module.name"; empty for safetensors.
        metadata: The metadata of a safetensors header.
        files: Directory: what its manifest lists.
        step: Directory: step of the training, None if it belongs to none.
        time_s: Directory: when it was written, Unix time.
        metrics: Directory: values of the training at that step.
        versions: Directory: name and version of what wrote it.
        host: Directory: facts of the machine that wrote it.
        stats: Directory: what the save cost.
        commit_number: Directory: its place in the order in which the steps of its root were committed; None if its
            manifest says none.
        checkpoints: Root: the committed checkpoints, by step.
        leftovers: Root: names of what is no committed checkpoint: unfinished or replaced ones, which the next save
            removes, and damaged ones.
    """

    path: str
    format: str
    size_bytes: int
    has_checksums: bool
    tensors: tuple[TensorEntry, ...]
    globals: tuple[str, ...] = ()
    metadata: dict[str, str] = field(default_factory=dict)
    files: tuple[FileEntry, ...] = ()
    step: int | None = None
    time_s: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    host: dict[str, str | int] = field(default_factory=dict)
    stats: dict[str, float | int | str] = field(default_factory=dict)
    commit_number: int | None = None
    checkpoints: tuple[Manifest, ...] = ()
    leftovers: tuple[str, ...] = ()

    def __repr__(self) -> str:
        counts = {"checkpoints": len(self.checkpoints), "files": len(self.files), "tensors": len(self.tensors)}
        said = [self.format] + ([] if self.step is None else [f"step {self.step}"])
        said += [f"{count} {name}" for name, count in counts.items() if count] + [f"{self.size_bytes} bytes"]
        return f"<Manifest of {self.path}: {', '.join(said)}{'' if self.has_checksums else ', no checksums'}>"


@dataclass(frozen=True, slots=True)
class Damage:
    """One thing that is wrong with a file or a directory.

    Attributes:
        message: What, in one line.
        tensors: The names of the tensors that it touches.
        record: The record it is in, "" when the file's structure is damaged.
        offset_bytes: Where, from the file's start; None when it has no place.
        file: In a directory, the file it is in, named from that directory; the message names it too.
    """

    message: str
    tensors: tuple[str, ...] = ()
    record: str = ""
    offset_bytes: int | None = None
    file: str = ""


@dataclass(frozen=True, slots=True, repr=False)
class VerifyReport:
    """The result of reading a whole file, or a whole directory.

    Attributes:
        path: The file or directory.
        damages: All that is wrong, empty when nothing is.
        checked_bytes: Bytes whose CRC was compared.
        has_checksums: False: the structure was checked, but there is nothing to compare the bytes (of some file of a
            directory) with.
        leftovers: Of a directory of checkpoints: names of unfinished and replaced ones, which are no damage.
        notes: What is worth knowing and no damage: files that stand in a checkpoint's directory beside its own.

    As a bool it is `ok`.
    """

    path: str
    damages: tuple[Damage, ...]
    checked_bytes: int
    has_checksums: bool
    leftovers: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Nothing is wrong with what could be checked."""
        return not self.damages

    def __bool__(self) -> bool:
        return self.ok

    def __repr__(self) -> str:
        said = f"ok, {self.checked_bytes} bytes compared" if self.ok else f"DAMAGED: {self.damages[0].message}"
        more = f" (and {len(self.damages) - 1} more)" if len(self.damages) > 1 else ""
        return f"<VerifyReport of {self.path}: {said}{more}{'' if self.has_checksums else ', no checksums'}>"


def inspect_source(source: CheckpointSource) -> Manifest:
    """See `fastpersist.inspect`."""
    if source.kind == "safetensors":
        return _inspect_safetensors(source)
    if source.kind == "torch_zip":
        return _inspect_torch_zip(source)
    source.refuse_incomplete()
    raise UnsupportedError(f"{source.path}: {source.explain_unknown()}; there is nothing that could be listed")


def _inspect_safetensors(source: CheckpointSource) -> Manifest:
    header = source.header
    tensors = tuple(
        TensorEntry(
            entry.name,
            entry.torch_dtype or entry.dtype,
            entry.torch_shape,
            entry.size_bytes,
            entry.offset_bytes,
            entry.name,
            entry.crc,
        )
        for entry in header.entries
    )
    has_checksums = bool(tensors) and all(tensor.crc32 is not None for tensor in tensors)
    return Manifest(
        source.path, "safetensors", source.size_bytes, has_checksums, tensors, metadata=dict(header.metadata)
    )


def _inspect_torch_zip(source: CheckpointSource) -> Manifest:
    entries = source.directory.entries
    has_checksums = source.directory.has_checksums
    scan = source.scan()
    tensors = []
    for name, tensor in iter_tensors(scan.root):
        storage = tensor.storage
        record = "" if storage is None else f"data/{storage.key}"
        entry = entries.get(record)
        itemsize = DTYPE_ITEMSIZE_BYTES.get(tensor.dtype, 0)  # a dtype that is newer than this table
        size_bytes = math.prod(tensor.shape) * itemsize
        offset_bytes = crc = None
        if entry is not None:
            offset_bytes = entry.data_offset_bytes + tensor.storage_offset * itemsize
            crc = entry.crc if has_checksums else None
        tensors.append(TensorEntry(name, tensor.dtype, tensor.shape, size_bytes, offset_bytes, record, crc))
    return Manifest(
        source.path,
        "torch_zip",
        source.size_bytes,
        has_checksums,
        tuple(tensors),
        globals=scan.globals,
    )


def verify_source(source: CheckpointSource, *, engine: str, poll: Poll | None) -> VerifyReport:
    """See `fastpersist.verify`."""
    try:
        if source.kind == "safetensors":
            return _verify_safetensors(source, engine, poll)
        if source.kind == "torch_zip":
            try:
                _ = source.directory
            except UnsupportedError as error:  # of this file; one of the engine, below, says nothing of the file
                return VerifyReport(source.path, (Damage(f"it cannot be checked: {error}"),), 0, False)
            return _verify_torch_zip(source, engine, poll)
    except CorruptionError as error:
        return VerifyReport(source.path, (Damage(error.message, offset_bytes=error.offset_bytes),), 0, False)
    return VerifyReport(source.path, (Damage(source.explain_unknown(), offset_bytes=0),), 0, False)


def _verify_safetensors(source: CheckpointSource, engine: str, poll: Poll | None) -> VerifyReport:
    entries = [entry for entry in source.header.entries if entry.crc is not None]
    extents = Extents()
    for entry in entries:
        extents.add_checked(entry.offset_bytes, entry.size_bytes)
    crcs = read_extents(source.fd, source.path, extents, engine=engine, poll=poll).crcs
    damages = tuple(
        Damage(_mismatch(entry.name, crc, entry.crc or 0), (entry.name,), entry.name, entry.offset_bytes)
        for entry, crc in zip(entries, crcs, strict=True)
        if crc != entry.crc
    )
    checked_bytes = sum(entry.size_bytes for entry in entries)
    return VerifyReport(source.path, damages, checked_bytes, bool(entries))


def _verify_torch_zip(source: CheckpointSource, engine: str, poll: Poll | None) -> VerifyReport:
    damages = []
    try:
        # Also proves that every storage that the pickle asks for is there in full.
        for reference in {reference.key: reference for reference in source.summary.references}.values():
            entry = source.directory.entries.get(f"data/{reference.key}")
            if entry is None or entry.size_bytes != reference.size_bytes:
                names = tuple(source.tensor_names([reference.key])[reference.key])
                found = "missing" if entry is None else f"{entry.size_bytes} bytes long, not {reference.size_bytes}"
                damages.append(Damage(f"storage {reference.key} is {found}", names, f"data/{reference.key}"))
    except CorruptionError as error:
        damages.append(Damage(error.message, record="data.pkl", offset_bytes=error.offset_bytes))
    except UnsupportedError:
        pass  # a pickle that only its own loader understands; its bytes are checked all the same
    damages += _header_damages(source)
    if not source.directory.has_checksums:
        return VerifyReport(source.path, tuple(damages), 0, False)

    entries = list(source.directory.entries.values())
    extents = Extents()
    for entry in entries:
        extents.add_checked(entry.data_offset_bytes, entry.size_bytes)
    crcs = read_extents(source.fd, source.path, extents, engine=engine, poll=poll).crcs
    bad = {entry.name: (entry, crc) for entry, crc in zip(entries, crcs, strict=True) if crc != entry.crc}
    names_by_key: dict[str, list[str]] = {}
    if bad and "data.pkl" not in bad:
        try:
            names_by_key = source.tensor_names([name.removeprefix("data/") for name in bad])
        except (CorruptionError, UnsupportedError):
            pass  # the damage is reported by record instead
    for name, (entry, crc) in bad.items():
        tensors = tuple(names_by_key.get(name.removeprefix("data/"), ()))
        message = _mismatch(", ".join(tensors) or f"record {name}", crc, entry.crc)
        damages.append(Damage(message, tensors, name, entry.data_offset_bytes))
    return VerifyReport(source.path, tuple(damages), sum(entry.size_bytes for entry in entries), True)


def _header_damages(source: CheckpointSource) -> list[Damage]:
    """Find what is wrong outside of the records: other readers go by local headers, and no CRC covers the directory."""
    found = header_damages(source.read_at, source.size_bytes, source.directory, path=source.path)
    damages = []
    for name, why in found.items():
        entry = source.directory.entries.get(name)
        what = f"the header of record {name} is damaged: {why}" if entry else why
        offset_bytes = source.directory.offset_bytes if entry is None else entry.header_offset_bytes
        damages.append(Damage(what, (), name, offset_bytes))
    return damages


def _mismatch(what: str, found: int, expected: int) -> str:
    return f"the bytes of {what} are damaged: their CRC is {found:08x}, not {expected:08x}"
