"""List what a checkpoint file holds, and tell whether it is whole, without loading it or running its code.

`directory_inspection` does the same for directories.
"""

from __future__ import annotations

import math
import struct
import zipfile
from dataclasses import dataclass, field

from fastpersist.display import html_table, size_text, time_text
from fastpersist.errors import CorruptionError, UnsupportedError
from fastpersist.formats import npy
from fastpersist.formats.foreign import LOOK_BYTES
from fastpersist.formats.manifest import FileEntry
from fastpersist.formats.pickle_scan import DTYPE_ITEMSIZE_BYTES, iter_tensors
from fastpersist.formats.torch_zip import header_damages
from fastpersist.loading.checkpoint_file import CheckpointSource
from fastpersist.transfer.garbage import no_garbage_collection
from fastpersist.transfer.reader import Extents, read_extents

__all__ = [
    "Damage",
    "Manifest",
    "TensorEntry",
    "VerifyReport",
    "inspect_source",
    "refuse_without_checksums",
    "verify_source",
]


_FLAG_ENCRYPTED = 0x0001


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a file.

    Attributes:
        name: The tensor's place in the object: `model.layer.weight`, `optimizer.state[0].exp_avg`.
        dtype: torch's name of the tensor's dtype, such as "bfloat16".
        shape: The dimensions of the tensor.
        size_bytes: Bytes of its elements, not of the storage that it views; 0 for an unknown dtype.
        offset_bytes: Offset of its first element from the start of the file; None for a tensor without data (meta).
        record: The record with its storage, such as "data/0"; for safetensors the name of the tensor.
        crc32: The recorded CRC-32 of that record; None without checksums.
        file: In a checkpoint directory, the name of the file with the tensor; "" if a single file was inspected.
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
    """The content of a file, of a checkpoint directory, or of a root (a directory of checkpoint directories).

    Attributes:
        path: The file or directory.
        format: "torch_zip", "safetensors", "directory" (a checkpoint directory) or "root".
        size_bytes: Length of the file, or of all files together.
        has_checksums: Whether CRCs were recorded: for every file of a directory, for every checkpoint of a root.
        tensors: All tensors; several may share a storage. For a directory those of all its files. Empty for a root and
            for the checkpoints in it: inspect such a checkpoint by its own path.
        globals: What loading the pickles would import, as "module.name"; empty for safetensors.
        metadata: The metadata of a safetensors header.
        files: For a directory: the files in its manifest.
        step: For a directory: the step of the training; None if it belongs to none.
        time_s: For a directory: when it was written, in seconds of Unix time.
        metrics: For a directory: the metrics that were saved with the step.
        versions: For a directory: names and versions of the software that wrote it.
        host: For a directory: facts about the machine that wrote it.
        stats: For a directory: what the save cost.
        commit_number: For a directory: its number in the order of commits of its root; None if the manifest has none.
        checkpoints: For a root: the committed checkpoints, by step.
        leftovers: For a root: names of directories that are no committed checkpoints: damaged ones, and unfinished or
            replaced ones, which the next save removes.
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

    def _repr_html_(self) -> str:
        title = repr(self).strip("<>")
        if self.format == "root":
            steps = [
                (
                    "none" if one.step is None else str(one.step),
                    time_text(one.time_s),
                    size_text(one.size_bytes),
                    ", ".join(f"{name} {value:.6g}" for name, value in one.metrics.items()),
                )
                for one in reversed(self.checkpoints)
            ]
            notes = [f"no committed checkpoints: {', '.join(self.leftovers)}"] if self.leftovers else []
            return html_table(title, ("step", "time", "size", "metrics"), steps, notes)
        tensors = [
            (one.name, one.dtype, "×".join(map(str, one.shape)) or "scalar", size_text(one.size_bytes), one.file)
            for one in self.tensors
        ]
        return html_table(title, ("tensor", "dtype", "shape", "size", "file"), tensors)


@dataclass(frozen=True, slots=True)
class Damage:
    """One thing that is wrong with a file or a directory.

    Attributes:
        message: What is wrong, in one line.
        tensors: The names of the damaged tensors.
        record: The damaged record; "" if the structure of the file is damaged.
        offset_bytes: Where the damage is, from the start of the file; None if it has no place.
        file: In a directory, the damaged file, relative to the directory; the message names it too.
    """

    message: str
    tensors: tuple[str, ...] = ()
    record: str = ""
    offset_bytes: int | None = None
    file: str = ""


@dataclass(frozen=True, slots=True, repr=False)
class VerifyReport:
    """The result of verifying a file or a directory. As a bool it is `ok`.

    Attributes:
        path: The file or directory.
        damages: All that is wrong; empty if nothing is.
        checked_bytes: Bytes whose CRC was compared.
        has_checksums: False if only the structure could be checked, because the file (or a file of the directory) was
            saved without CRCs.
        leftovers: For a root: names of unfinished and replaced checkpoints, which are no damage.
        notes: What is no damage, but worth knowing: files in a checkpoint's directory that are not in its manifest.
    """

    path: str
    damages: tuple[Damage, ...]
    checked_bytes: int
    has_checksums: bool
    leftovers: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong with what could be checked."""
        return not self.damages

    def __bool__(self) -> bool:
        return self.ok

    def __repr__(self) -> str:
        said = f"ok, {self.checked_bytes} bytes compared" if self.ok else f"DAMAGED: {self.damages[0].message}"
        more = f" (and {len(self.damages) - 1} more)" if len(self.damages) > 1 else ""
        return f"<VerifyReport of {self.path}: {said}{more}{'' if self.has_checksums else ', no checksums'}>"

    def _repr_html_(self) -> str:
        damages = [(one.message, ", ".join(one.tensors)) for one in self.damages]
        said = f"{'ok' if self.ok else 'DAMAGED'}, {size_text(self.checked_bytes)} compared with checksums"
        notes = [*self.notes, *(f"no committed checkpoint: {name}" for name in self.leftovers)]
        if not self.has_checksums:
            notes.insert(0, "saved without checksums: only the structure could be checked")
        return html_table(f"{self.path}: {said}", ("damage", "tensors"), damages, notes)


@no_garbage_collection()
def inspect_source(source: CheckpointSource) -> Manifest:
    """List what an open file holds; see `fastpersist.inspect`."""
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


def verify_source(source: CheckpointSource, *, engine: str) -> VerifyReport:
    """Read an open file and tell what is wrong; see `fastpersist.verify`."""
    try:
        if source.kind == "safetensors":
            return _verify_safetensors(source, engine)
        if source.kind == "torch_zip":
            try:
                _ = source.directory
            except UnsupportedError as error:  # of this file; one of the engine, below, says nothing of the file
                return VerifyReport(source.path, (Damage(f"it cannot be checked: {error}"),), 0, False)
            return _verify_torch_zip(source, engine)
    except CorruptionError as error:
        return VerifyReport(source.path, (Damage(error.message, offset_bytes=error.offset_bytes),), 0, False)
    return VerifyReport(source.path, (Damage(source.explain_unknown(), offset_bytes=0),), 0, False)


def refuse_without_checksums(source: CheckpointSource) -> None:
    """Refuse a file that nothing here can check, which is no damage.

    Raises:
        UnsupportedError: It is one of an older torch.save, a TorchScript archive, a zip archive that another program
            has compressed, or arrays of NumPy.
    """
    kind = ""
    if source.kind == "other" and source.is_of_older_torch():
        kind = "a file of an older torch.save, which has no checksums"
    elif source.path.endswith(".npy") and npy.is_npy(source.read_at(0, min(LOOK_BYTES, source.size_bytes))):
        kind = source.looks_like()  # under the name of a checkpoint it would be damage
    elif source.kind == "torch_zip":
        kind = _kind_of_other_zip(source)
    if kind:
        raise UnsupportedError(f"{source.path} cannot be checked: it is {kind}")


def _kind_of_other_zip(source: CheckpointSource) -> str:
    """Say what a zip archive is that torch.save does not write, with an article; "" if it may be a torch zip."""
    try:
        return "a TorchScript archive" if "constants.pkl" in source.directory.entries else ""
    except CorruptionError:
        if not source.path.endswith(".npz"):  # under the name of a checkpoint it would be damage
            return ""
    except UnsupportedError:  # compressed, as torch.jit.save writes code
        pass
    try:
        with source.open_whole() as file:
            members = zipfile.ZipFile(file).infolist()
        if any(member.filename.endswith("/constants.pkl") for member in members):
            return "a TorchScript archive"
        if all(member.filename.endswith(".npy") for member in members):
            return "an npz file of NumPy"
        if any(_is_surely_packed(source, member) for member in members):
            return "a zip archive with compressed or encrypted records, which torch.save does not write"
    except (OSError, ValueError, NotImplementedError, zipfile.BadZipFile, CorruptionError):
        pass  # it is damaged, which `verify_source` tells
    return ""


def _is_surely_packed(source: CheckpointSource, member: zipfile.ZipInfo) -> bool:
    """Tell whether both the directory and the record's own header say that it is compressed or encrypted."""
    flags, method = struct.unpack("<HH", source.read_at(member.header_offset + 6, 4))
    is_compressed = method == member.compress_type != zipfile.ZIP_STORED
    return is_compressed or bool(flags & member.flag_bits & _FLAG_ENCRYPTED)


def _verify_safetensors(source: CheckpointSource, engine: str) -> VerifyReport:
    entries = [entry for entry in source.header.entries if entry.crc is not None]
    extents = Extents()
    for entry in entries:
        extents.add_checked(entry.offset_bytes, entry.size_bytes)
    crcs = read_extents(source.fd, source.path, extents, engine=engine).crcs
    damages = tuple(
        Damage(_mismatch(entry.name, crc, entry.crc or 0), (entry.name,), entry.name, entry.offset_bytes)
        for entry, crc in zip(entries, crcs, strict=True)
        if crc != entry.crc
    )
    checked_bytes = sum(entry.size_bytes for entry in entries)
    return VerifyReport(source.path, damages, checked_bytes, bool(entries))


def _verify_torch_zip(source: CheckpointSource, engine: str) -> VerifyReport:
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
    crcs = read_extents(source.fd, source.path, extents, engine=engine).crcs
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
    """Find damage outside of the records: no CRC covers the directory, and other readers use local headers."""
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
