"""Finds the weights of a source by name, and their places in its files. Reads headers only, and opens the files.

Sources are a directory of safetensors, one safetensors file, a torch zip, and a step of a Checkpointer. All are read in
place. `units` brings them together with a model.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import NamedTuple

import torch

from fastpersist.commit.filesystem import storage_errors
from fastpersist.errors import CheckpointNotFoundError, ConfigError, CorruptionError, StorageError, UnsupportedError
from fastpersist.formats.manifest import DCP_METADATA_NAME, STATE_NAME, step_of
from fastpersist.formats.pickle_scan import iter_tensors
from fastpersist.formats.split_manifest import PARTS_NAME
from fastpersist.loading.checkpoint_file import CheckpointSource
from fastpersist.loading.fill_tensors import StoredTensor
from fastpersist.loading.safetensors_directory import parse_index
from fastpersist.transfer.tensor_file import TensorFile

__all__ = ["Place", "WeightSource"]

_INDEX_SUFFIX = ".safetensors.index.json"


class Place(NamedTuple):
    """Where a tensor of the source lies.

    Attributes:
        file: The number of its file.
        offset_bytes: The offset of its first byte, from the file's start.
        dtype: The dtype of its elements.
        shape: The tensor's dimensions; it is row-major without gaps.
        crc32: The CRC-32 of exactly its bytes; None if none was recorded.
    """

    file: int
    offset_bytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    crc32: int | None

    @property
    def size_bytes(self) -> int:
        """Its length."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(slots=True)
class _Opened:
    file: TensorFile
    identity: tuple[int, int, int, int]  # device, inode, length, time of change


class WeightSource:
    """The tensors of a source, by name, and its open files.

    Args:
        path: A directory of safetensors, a safetensors file, a torch zip, or the directory of a step.
        engine: "auto", or an engine's name, as in `TensorFile`.

    Attributes:
        path: The path as it was given.
        places: The tensors by name.
        problems: What is wrong with files of an index, one line each: nothing is known of the tensors in them.
        file_sizes: The length of each file in bytes.
        unusable: Why a tensor that is there cannot be streamed, by name.

    Raises:
        CheckpointNotFoundError: There is nothing, or no weights.
        FormatError: A file is damaged.
        StorageError: A file cannot be read.
        UnsupportedError: The weights are in another format.

    Thread safety: after construction, any thread.
    """

    def __init__(self, path: str, *, engine: str = "auto") -> None:
        self.path = path
        self.places: dict[str, Place] = {}
        self.problems: list[str] = []
        self.unusable: dict[str, str] = {}
        self.file_sizes: list[int] = []
        self._files: list[_Opened] = []
        self._engine = engine
        try:
            if os.path.isdir(path):
                self._open_directory()
            else:
                self._open_file(path)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Wait for reads under way, and close the files."""
        files, self._files = self._files, []
        for opened in files:
            opened.file.close()

    @property
    def engine(self) -> str:
        """The engine that reads."""
        return self._files[0].file.engine if self._files else ""

    def file(self, number: int) -> TensorFile:
        """Return an open file, after checking that it has not changed.

        Raises:
            ConfigError: The source is closed; another thread may have done that.
            StorageError: It was changed in place since it was opened.
        """
        files = self._files
        if not files:
            raise ConfigError(f"{self.path} is read no more: its stream is closed")
        opened = files[number]
        path = opened.file.path
        with storage_errors("looking at", path):
            now = _identity(os.fstat(opened.file.fileno()))
        if now != opened.identity:
            raise StorageError(
                None,
                f"{path} was changed in place while its weights were streamed: the model would mix old and new "
                "weights; close the stream, and stream the model anew",
                path,
            )
        return opened.file

    # --- opening

    def _open_directory(self) -> None:
        with storage_errors("listing", self.path):
            names = sorted(os.listdir(self.path))
        indexes = [name for name in names if name.endswith(_INDEX_SUFFIX)]
        shards = [name for name in names if name.endswith(".safetensors")]
        if len(indexes) > 1:
            raise ConfigError(f"{self.path} has several indexes ({', '.join(indexes)}); name one file or directory")
        if STATE_NAME in names and DCP_METADATA_NAME not in names:
            self._open_file(os.path.join(self.path, STATE_NAME))
        elif indexes:
            self._open_indexed(indexes[0])
        elif shards:
            for name in shards:
                self._open_file(os.path.join(self.path, name))
        else:
            raise self._no_weights(names)

    def _open_indexed(self, index_name: str) -> None:
        """Open the files that an index names; what is missing is noted, so that one error tells all of it."""
        weight_map = parse_index(os.path.join(self.path, index_name))
        for name in sorted(set(weight_map.values())):
            try:
                self._open_file(os.path.join(self.path, name))
            except CheckpointNotFoundError:
                self.problems.append(f"{name}, which {index_name} names, is missing")
            except (CorruptionError, UnsupportedError) as error:
                self.problems.append(str(error))
        numbers = {os.path.basename(opened.file.path): number for number, opened in enumerate(self._files)}
        for tensor, name in weight_map.items():
            place = self.places.get(tensor)
            if name in numbers and (place is None or place.file != numbers[name]) and tensor not in self.unusable:
                self.problems.append(f"{tensor} is not in {name}, where {index_name} has it")

    def _open_file(self, path: str) -> None:
        with CheckpointSource(path) as source:
            number = len(self._files)
            if source.kind == "safetensors":
                self._note_safetensors(source, number)
            elif source.kind == "torch_zip":
                self._note_torch_zip(source, number)
            else:
                source.refuse_incomplete()
                raise UnsupportedError(
                    f"{path}: {source.explain_unknown()}; weights are streamed from safetensors and from files of "
                    "torch.save as it is since torch 1.6: load and save it anew"
                )
            file = TensorFile(path, engine=self._engine)
            with storage_errors("looking at", path):
                seen, opened = os.fstat(source.fd), os.fstat(file.fileno())
            self.file_sizes.append(source.size_bytes)
            self._files.append(_Opened(file, _identity(opened)))
            if _identity(seen) != _identity(opened):
                raise StorageError(None, f"{path} was replaced while it was opened; try again", path)

    def _note_safetensors(self, source: CheckpointSource, number: int) -> None:
        for entry in source.header.entries:
            dtype = getattr(torch, entry.torch_dtype or "", None)
            if not isinstance(dtype, torch.dtype):
                self.unusable[entry.name] = f"its dtype is {entry.dtype}, which this torch does not have"
                continue
            self._note(entry.name, Place(number, entry.offset_bytes, dtype, entry.torch_shape, entry.crc), source.path)

    def _note_torch_zip(self, source: CheckpointSource, number: int) -> None:
        if source.is_byte_swapped():
            raise UnsupportedError(f"{source.path} has the other byte order; load it and save it anew")
        entries = source.directory.entries
        for name, tensor in iter_tensors(source.scan().root):
            record = None if tensor.storage is None else entries.get(f"data/{tensor.storage.key}")
            dtype = getattr(torch, tensor.dtype, None)
            if record is None or tensor.kind != "dense" or not isinstance(dtype, torch.dtype):
                self.unusable[name] = f"it is no plain tensor with data, but {tensor.kind} of {tensor.dtype}"
                continue
            offset_bytes = record.data_offset_bytes + tensor.storage_offset * dtype.itemsize
            place = Place(number, offset_bytes, dtype, tuple(tensor.shape), None)
            stored = StoredTensor(offset_bytes, dtype, place.shape, tuple(tensor.stride))
            if not stored.is_contiguous() or tensor.is_conj or tensor.is_neg:
                self.unusable[name] = "it is a view whose elements do not lie in order in the file"
            elif tensor.end_bytes > record.size_bytes:
                self.unusable[name] = "it reaches beyond its storage: the file is damaged"
            else:
                if source.directory.has_checksums and place.size_bytes == record.size_bytes:
                    place = place._replace(crc32=record.crc)
                self._note(name, place, source.path)

    def _note(self, name: str, place: Place, path: str) -> None:
        if name in self.places:
            raise ConfigError(f"{self.path} has {name} in two files; the other is {path}: remove what is not needed")
        self.places[name] = place

    def _no_weights(self, names: list[str]) -> Exception:
        path = self.path
        if DCP_METADATA_NAME in names:
            return UnsupportedError(f"{path} is a sharded checkpoint: `fastpersist merge` makes one file of it first")
        if PARTS_NAME in names:
            return UnsupportedError(f"{path} holds a part of a step only: `fastpersist merge` makes a whole one first")
        if any(step_of(name) is not None for name in names):
            return ConfigError(f"{path} is a directory of steps; name one of them")
        if any(name.endswith((".bin", ".bin.index.json", ".pt", ".pth")) for name in names):
            return UnsupportedError(f"{path} has no safetensors; name one .pt or .bin file, or save it as safetensors")
        return CheckpointNotFoundError(2, f"{path} has no .safetensors file", path)


def _identity(found: os.stat_result) -> tuple[int, int, int, int]:
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
