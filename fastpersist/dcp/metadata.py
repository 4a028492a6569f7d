"""Reads the `.metadata` of a DCP checkpoint, and plans of other ranks: pickles, read without running their code.

`scan_pickle` lists the calls of a pickle, and makes none of them. Here the calls that DCP's own classes are pickled as
are read field by field, and each object is made from its fields. A name in the pickle leads to an object only through
the tables below. The bytes may come from anywhere. Invariants:

- Each node is built once, however often it is used, so time and memory are linear in the length of the pickle.
- Recursion ends at `_DEPTH_MAX`, also for a container that holds itself.
- Keys of dicts are text or small scalars, or a `MetadataIndex` whose offset lies in the tensor that it names: tuples of
  tuples take exponential time to hash, and tuples of arbitrary numbers can be made to have equal hashes.
"""

from __future__ import annotations

import dataclasses
import errno
import importlib
import math
import os
import pathlib
import pickle
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Final, NamedTuple, TypeAlias

import torch
from torch.distributed.checkpoint import planner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from fastpersist.commit.filesystem import open_regular, storage_errors
from fastpersist.errors import CheckpointNotFoundError, FormatError, StorageError
from fastpersist.formats.manifest import DCP_METADATA_NAME
from fastpersist.formats.pickle_nodes import Call, Global, SymbolicDict, UnsupportedPickle
from fastpersist.formats.pickle_scan import scan_pickle
from fastpersist.transfer.garbage import no_garbage_collection

__all__ = ["METADATA_NAME", "Found", "build_pickled", "pickled", "pickled_unframed", "read_metadata"]

METADATA_NAME = DCP_METADATA_NAME

_SIZE_BYTES_MAX = 1 << 30
"""Enough for millions of chunks. Building them takes ten times as much memory, and a sparse file costs no space."""

_FRAME_BYTES: Final = 9  # the opcode FRAME and a length

_DEPTH_MAX: Final = 32
"""Metadata and plans need 6 levels; a planner may add others."""

_DIMENSIONS_MAX: Final = 64  # torch's own limit in most operations
_COUNT_MAX: Final = (1 << 63) - 1
_INT_MIN, _INT_MAX = -(1 << 63), (1 << 64) - 1
_PATH_CHARACTERS_MAX: Final = 4096  # the kernel's PATH_MAX
_FIELDS_MAX: Final = 32
_ALIKE_MAX: Final = 64
_SHOWN_CHARACTERS: Final = 80
_UNBUILT: Final = object()
_PROPERTY_TYPES: Final = (torch.dtype, torch.layout, bool, torch.memory_format, bool)
_PROPERTY_COUNT_MIN: Final = len(_PROPERTY_TYPES)
_PROPERTY_COUNT: Final = len(dataclasses.fields(TensorProperties))  # with strides since torch 2.15

_METADATA: Final = "torch.distributed.checkpoint.metadata"
_OLD_METADATA: Final = "torch.distributed._shard.sharded_tensor.metadata"
_PLANNER: Final = "torch.distributed.checkpoint.planner"
_HF_UTILS: Final = "torch.distributed.checkpoint._hf_utils"

_PATH_MODULES: Final = frozenset({"pathlib", "pathlib._local"})  # the second one in Python 3.13
_PATHS: Final = {
    "Path": pathlib.Path,
    "PosixPath": pathlib.PosixPath,
    "PurePath": pathlib.PurePath,
    "PurePosixPath": pathlib.PurePosixPath,
}

_LAYOUTS: Final = {str(one): one for one in vars(torch).values() if isinstance(one, torch.layout)}

_MEMORY_FORMATS: Final[dict[object, torch.memory_format]] = {
    **dict.fromkeys((0, "TORCH_CONTIGUOUS_FORMAT"), torch.contiguous_format),
    **dict.fromkeys((1, "TORCH_CHANNELS_LAST"), torch.channels_last),
    **dict.fromkeys((2, "TORCH_PRESERVE_FORMAT"), torch.preserve_format),
}

_ITEM_TYPES: Final[dict[object, WriteItemType]] = {
    **{one.value: one for one in WriteItemType},
    **{one.name: one for one in WriteItemType},
}

# Enums are pickled as a call of the class on the value; by Python 3.11.0 as getattr of the class and the name.
_ENUMS: Final[dict[tuple[str, str], dict[object, Any]]] = {
    (_METADATA, "_MEM_FORMAT_ENCODING"): _MEMORY_FORMATS,
    (_OLD_METADATA, "MEM_FORMAT_ENCODING"): _MEMORY_FORMATS,
    (_PLANNER, "WriteItemType"): _ITEM_TYPES,
}

_Types: TypeAlias = frozenset[type]
_SIZE: Final[_Types] = frozenset({torch.Size})
_INT: Final[_Types] = frozenset({int})
_STR: Final[_Types] = frozenset({str})
_NONE: Final[type] = type(None)
_PLAIN: Final[_Types] = frozenset({int, str, bool, float, _NONE, torch.Size, torch.dtype})
_BYTES_DATA: Final[type] = getattr(planner, "BytesIOWriteData", _NONE)  # torch 2.7 has none

_PLACE: Final = {"relative_path": _STR, "offset": _INT, "length": _INT}

_TENSOR: Final[tuple[Callable[..., Any], dict[str, _Types]]] = (
    TensorStorageMetadata,
    {"properties": frozenset({TensorProperties}), "size": _SIZE, "chunks": frozenset({list})},
)

# The fields of each dataclass, and of which types they may be. What is missing is for the class to say. A later torch
# may have more fields.
_FIELDS: Final[dict[tuple[str, str], tuple[Callable[..., Any], dict[str, _Types]]]] = {
    (_METADATA, "BytesStorageMetadata"): (BytesStorageMetadata, {}),
    (_METADATA, "ChunkStorageMetadata"): (ChunkStorageMetadata, {"offsets": _SIZE, "sizes": _SIZE}),
    (_METADATA, "MetadataIndex"): (
        MetadataIndex,
        {"fqn": _STR, "offset": frozenset({torch.Size, _NONE}), "index": frozenset({int, _NONE})},
    ),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): (
        _StorageInfo,
        {**_PLACE, "transform_descriptors": frozenset({list, tuple, _NONE})},
    ),
    # Of safetensors; what it consists of differs among releases of torch.
    (_HF_UTILS, "_HFStorageInfo"): (
        lambda **fields: importlib.import_module(_HF_UTILS)._HFStorageInfo(**fields),
        {**_PLACE, "shape": _SIZE, "dtype": frozenset({torch.dtype})},
    ),
    (_PLANNER, "BytesIOWriteData"): (_BYTES_DATA, {"nbytes": _INT}),
    (_PLANNER, "TensorWriteData"): (
        TensorWriteData,
        {"chunk": frozenset({ChunkStorageMetadata}), "properties": frozenset({TensorProperties}), "size": _SIZE},
    ),
    (_PLANNER, "WriteItem"): (
        WriteItem,
        {
            "index": frozenset({MetadataIndex}),
            "type": frozenset({WriteItemType}),
            "bytes_io_data": frozenset({_BYTES_DATA, _NONE}),
            "tensor_data": frozenset({TensorWriteData, _NONE}),
        },
    ),
}


class Found(NamedTuple):
    """The file from which metadata were read: its path, and the device and number of its inode."""

    path: str
    identity: tuple[int, int]


class _Pieces:
    """A file for a pickler. Each write lets other threads run, while pickling itself holds the GIL."""

    def __init__(self) -> None:
        self.pieces: list[bytes] = []

    def write(self, piece: bytes | memoryview) -> int:
        """Take a piece; called by the pickler."""
        self.pieces.append(bytes(piece))
        return len(piece)


def pickled(value: object) -> bytes:
    """Pickle a plan or metadata, which may be megabytes, while training goes on."""
    file = _Pieces()
    pickle.Pickler(file, protocol=4).dump(value)
    return b"".join(file.pieces)


def pickled_unframed(value: object) -> bytes:
    """Pickle an object without bytes in it, without frames: these contain lengths, and the end may be replaced."""
    file = _Pieces()
    pickle.Pickler(file, protocol=4).dump(value)
    header, pieces = file.pieces[0][:2], [file.pieces[0][2:], *file.pieces[1:]]
    return b"".join([header, *(piece[_FRAME_BYTES:] if piece[:1] == pickle.FRAME else piece for piece in pieces)])


def read_metadata(path: str) -> tuple[Metadata, Found]:
    """Read what is in a checkpoint.

    Args:
        path: The path of the metadata's file.

    Raises:
        CheckpointNotFoundError: There is no such file.
        FormatError: The metadata are damaged, or name classes that do not belong there.
        StorageError: They cannot be read.
    """
    try:
        with storage_errors("reading", path), open(open_regular(path), "rb") as file:
            status = os.fstat(file.fileno())
            if status.st_size > _SIZE_BYTES_MAX:
                raise FormatError(f"{status.st_size} bytes are too many for the metadata of a checkpoint", path=path)
            data = file.read()
    except StorageError as error:
        if error.errno != errno.ENOENT:
            raise
        message = f"there is no checkpoint at {os.path.dirname(path)}: it has no {os.path.basename(path)}"
        raise CheckpointNotFoundError(errno.ENOENT, message, path) from None
    try:
        metadata = build_pickled(data)
    except FormatError as error:
        message = f"its metadata cannot be read: {error.message}"
        raise FormatError(message, path=path, offset_bytes=error.offset_bytes) from None
    if type(metadata) is not Metadata:
        raise FormatError("these are no metadata of a DCP checkpoint", path=path)
    return metadata, Found(path, (status.st_dev, status.st_ino))


@no_garbage_collection()
def build_pickled(data: bytes) -> Any:
    """Build what DCP has pickled, and nothing else: the bytes are not trusted.

    Args:
        data: One whole pickle, protocol 2 to 5, of a `Metadata`; or of `WriteItem`s in lists, tuples and dicts.

    Returns:
        The object. A `Metadata` has dicts for what it describes and for its places, and each place is one of a tensor
        or object that it describes. This does not check whether chunks cover their tensors, and parts exist.

    Raises:
        FormatError: It is no well-formed pickle, or holds something else.

    Thread safety: a pure function of `data`.
    """
    try:
        return _Builder().build(scan_pickle(data).root)
    except UnsupportedPickle as error:
        raise FormatError(str(error)) from None


class _Builder:
    """Builds the objects for which the nodes of a scanned pickle stand."""

    def __init__(self) -> None:
        self._built: dict[int, Any] = {}  # by the id of the node; all nodes live as long as the scan
        self._makers: dict[Global, Callable[[Call], Any]] = {}
        self._chunk_lists: set[int] = set()
        self._depth = 0

    def build(self, node: object) -> Any:
        """Build what a node stands for; the same object each time it is met."""
        kind = type(node)
        if kind is str or node is None or kind is bool or kind is float or kind is bytes:
            return node
        if kind is int:
            if not _INT_MIN <= node <= _INT_MAX:  # type: ignore[operator]
                raise FormatError("a number in it has more than 64 bits")
            return node
        found = self._built.get(id(node), _UNBUILT)
        if found is not _UNBUILT:
            return found
        if self._depth == _DEPTH_MAX:
            raise FormatError(f"it is nested more than {_DEPTH_MAX} deep, or holds itself")
        self._depth += 1
        made = self._built[id(node)] = self._make(node)
        self._depth -= 1
        return made

    def _make(self, node: object) -> Any:
        if type(node) is Call:
            return self._maker_of(node.function)(node)
        if type(node) is tuple:
            return tuple([self.build(item) for item in node])
        if type(node) is list:
            return [self.build(item) for item in node]
        if type(node) is SymbolicDict:
            return self._dict(node)
        if type(node) is Global:
            dtype = vars(torch).get(node.name) if node.module == "torch" else None
            if isinstance(dtype, torch.dtype):
                return dtype
            raise _foreign(node)
        raise FormatError(f"it holds a {type(node).__name__}, which is no part of DCP's metadata and plans")

    def _maker_of(self, function: object) -> Callable[[Call], Any]:
        if type(function) is not Global:
            raise FormatError("it calls what another call returns, which is no part of DCP's metadata and plans")
        maker = self._makers.get(function)
        if maker is None:
            maker = self._makers[function] = self._new_maker(function)
        return maker

    def _new_maker(self, function: Global) -> Callable[[Call], Any]:
        name = (function.module, function.name)
        if name in _FIELDS:
            made, fields = _FIELDS[name]
            return lambda call: self._dataclass(call, made, fields)
        if name in _ENUMS:
            return lambda call: _member(call.arguments, _ENUMS[name])
        makers: dict[tuple[str, str], Callable[[Call], Any]] = {
            ("torch", "Size"): _size,
            ("torch.serialization", "_get_layout"): lambda call: _member(call.arguments, _LAYOUTS),
            (_METADATA, "TensorProperties"): self._properties,
            (_OLD_METADATA, "TensorProperties"): self._properties,
            (_METADATA, "TensorStorageMetadata"): self._tensor,
            (_METADATA, "Metadata"): self._metadata,
            ("collections", "OrderedDict"): self._ordered_dict,
            ("builtins", "getattr"): _named_member,
        }
        if name not in makers:
            raise _foreign(function)
        return makers[name]

    def _dict(self, node: SymbolicDict) -> dict[Any, Any]:
        return {_key(key): self.build(value) for key, value in node.items()}

    def _ordered_dict(self, call: Call) -> OrderedDict[Any, Any]:
        if call.arguments or call.keywords is not None or call.state is not None or call.items is not None:
            raise FormatError("an OrderedDict in it is not pickled as Python pickles it")
        return OrderedDict(self._dict(call.entries) if call.entries is not None else {})

    def _dataclass(self, call: Call, made: Callable[..., Any], allowed: dict[str, _Types]) -> Any:
        """Make a dataclass from the state that the pickle has for it."""
        fields = {}
        for name, value in _state(call):
            types = allowed.get(name)
            if types is None and name not in getattr(made, "__dataclass_fields__", ()):
                raise FormatError(f"a {_name(call)} in it has {name!r}, which this torch does not know")
            field = fields[name] = self.build(value)
            is_allowed = _is_plain(field) if types is None else type(field) in types
            if not is_allowed:
                raise FormatError(f"{name!r} of a {_name(call)} in it is a {type(field).__name__}")
        try:
            return made(**fields)
        except (AttributeError, ImportError, TypeError) as error:  # a field is missing, or the class is
            raise FormatError(f"a {_name(call)} in it cannot be made: {error}") from None

    def _properties(self, call: Call) -> TensorProperties:
        state = self.build(call.state)
        if (
            call.arguments
            or type(state) is not tuple
            or tuple(map(type, state[:_PROPERTY_COUNT_MIN])) != _PROPERTY_TYPES
            or not all(map(_is_plain, state[_PROPERTY_COUNT_MIN:]))
        ):
            raise FormatError("TensorProperties in it are not what DCP pickles")
        return TensorProperties(*state[:_PROPERTY_COUNT])

    def _tensor(self, call: Call) -> TensorStorageMetadata:
        made: TensorStorageMetadata = self._dataclass(call, *_TENSOR)
        if id(made.chunks) in self._chunk_lists:  # looked at for each of its tensors, a list may not have many
            raise FormatError("two tensors in it have the same list of chunks")
        self._chunk_lists.add(id(made.chunks))
        _require_boxes(made)
        return made

    def _metadata(self, call: Call) -> Metadata:
        if self._depth != 1:
            raise FormatError("there are metadata inside of it")
        state = dict(_state(call))
        described = self.build(state.pop("state_dict_metadata", None))
        if type(described) not in (dict, OrderedDict):
            raise FormatError("these are no metadata of a DCP checkpoint: they describe nothing")
        for name, one in described.items():
            if type(name) is not str or type(one) not in (TensorStorageMetadata, BytesStorageMetadata):
                raise FormatError(f"{name!r} in these metadata is described by a {type(one).__name__}")
        metadata = Metadata(described, storage_data=self._places(state.pop("storage_data", None)))
        metadata.storage_meta = self._storage_meta(state.pop("storage_meta", None))
        self._set(metadata, state)  # planners of others note things there, too, such as Megatron's
        return metadata

    def _places(self, node: object) -> dict[MetadataIndex, Any]:
        """Build the places of all chunks."""
        if type(node) is not SymbolicDict:
            raise FormatError("these are no metadata of a DCP checkpoint: they have no storage locations")
        places: dict[MetadataIndex, Any] = {}
        hashes = _Hashes()
        flat = node.flat
        for position in range(0, len(flat), 2):
            index, info = self.build(flat[position]), self.build(flat[position + 1])
            if type(index) is not MetadataIndex:
                raise FormatError(f"a place in these metadata is that of a {type(index).__name__}")
            if type(getattr(info, "relative_path", None)) is not str:
                raise FormatError(f"the place of {index.fqn!r} is a {type(info).__name__}, which DCP does not have")
            hashes.add(hash(index))
            places[index] = info
        return places

    def _storage_meta(self, node: object) -> StorageMeta | None:
        if node is None:
            return None
        if type(node) is not Call or _global(node) != (_METADATA, "StorageMeta"):
            raise FormatError("the storage_meta of these metadata are not DCP's")
        state = dict(_state(node))
        place = state.pop("checkpoint_id", None)
        meta = StorageMeta(checkpoint_id=_path(place) if type(place) is Call else self.build(place))
        self._set(meta, state)
        return meta

    def _set(self, made: object, state: dict[str, object]) -> None:
        """Set attributes of an instance that was made here."""
        for name, value in state.items():
            if name.startswith("__") or not name.isidentifier():
                raise FormatError(f"these metadata have {name[:_SHOWN_CHARACTERS]!r}, which DCP's have not")
            vars(made)[name] = self.build(value)


class _Hashes:
    """Counts hashes of keys, and refuses too many equal ones: each key would be compared with all of these."""

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}

    def add(self, value: int) -> None:
        """Count one."""
        count = self._counts[value] = self._counts.get(value, 0) + 1
        if count > _ALIKE_MAX:
            raise FormatError(f"more than {_ALIKE_MAX} places in these metadata have one hash")


def _state(call: Call) -> list[tuple[str, object]]:
    """Return the fields that an object is made with, by name."""
    state = call.state
    flat = state.flat if type(state) is SymbolicDict else [] if state is None else [None]
    if call.arguments or call.keywords is not None or call.items is not None or call.entries is not None:
        flat = [None]
    names = flat[: 2 * _FIELDS_MAX + 2 : 2]
    for name in names:
        if type(name) is not str or len(names) > _FIELDS_MAX:
            raise FormatError(f"a {_name(call)} in it is not pickled as Python pickles dataclasses")
    return list(zip(names, flat[1::2], strict=True))  # type: ignore[arg-type]


def _global(call: Call) -> tuple[str, str]:
    function = call.function
    return (function.module, function.name) if type(function) is Global else ("", "")


def _name(call: Call) -> str:
    return _global(call)[1]


def _foreign(what: Global) -> FormatError:
    return FormatError(
        f"it wants {what.module}.{what.name}, which is no part of DCP's metadata and plans: if you trust the file, "
        "load it with FileSystemReader"
    )


def _key(node: object) -> Any:
    """Return a key of a dict; only keys that take no longer to hash than their bytes take to read."""
    if type(node) is str or node is None or type(node) in (bool, float, bytes):
        return node
    if type(node) is int and _INT_MIN <= node <= _INT_MAX:
        return node
    raise FormatError(f"a dict in it has a {type(node).__name__} for a key")


def _size(call: Call) -> torch.Size:
    lengths = call.arguments[0] if len(call.arguments) == 1 else None
    if type(lengths) is not tuple or len(lengths) > _DIMENSIONS_MAX:
        raise FormatError(f"a torch.Size in it is not made of up to {_DIMENSIONS_MAX} numbers")
    for length in lengths:
        if type(length) is not int or not 0 <= length <= _COUNT_MAX:
            raise FormatError("a torch.Size in it has an element that is no number from 0 to 2^63 - 1")
    return torch.Size(lengths)


def _is_plain(value: object) -> bool:
    """Tell whether this may be in a field that only a later torch has."""
    if type(value) is tuple:
        return len(value) <= _DIMENSIONS_MAX and all(type(one) is int for one in value)
    return type(value) in _PLAIN


def _member(arguments: tuple[object, ...], members: dict[Any, Any]) -> Any:
    """Return the member of an enum by its value, or a layout by its name."""
    value = arguments[0] if len(arguments) == 1 else None
    if type(value) not in (int, str) or (type(value) is int and value > _COUNT_MAX) or value not in members:
        raise FormatError("it holds a member of an enum, or a layout, that this torch does not know")
    return members[value]


def _named_member(call: Call) -> Any:
    owner = call.arguments[0] if len(call.arguments) == 2 else None
    members = _ENUMS.get((owner.module, owner.name)) if type(owner) is Global else None
    if members is None:
        raise FormatError("it wants builtins.getattr of what is no enum of DCP's")
    return _member(call.arguments[1:], members)


def _path(call: Call) -> pathlib.PurePath:
    module, name = _global(call)
    if module not in _PATH_MODULES or name not in _PATHS:
        raise _foreign(Global(module, name))
    parts = [part for part in call.arguments if type(part) is str]
    if len(parts) != len(call.arguments) or sum(map(len, parts)) > _PATH_CHARACTERS_MAX:
        raise FormatError(f"a path in it is not made of up to {_PATH_CHARACTERS_MAX} characters")
    return _PATHS[name](*parts)


def _require_boxes(described: TensorStorageMetadata) -> None:
    """Refuse a shape beyond all memory, and chunks that do not lie inside of it."""
    size = described.size
    if math.prod(max(1, length) for length in size) * described.properties.dtype.itemsize > _COUNT_MAX:
        raise FormatError(f"a tensor in these metadata has shape {tuple(size)}, which is larger than any memory")
    hashes = _Hashes()
    for chunk in described.chunks:
        if type(chunk) is not ChunkStorageMetadata:
            raise FormatError(f"a chunk in these metadata is a {type(chunk).__name__}")
        if not len(chunk.offsets) == len(chunk.sizes) == len(size) or any(
            offset + length > whole for offset, length, whole in zip(chunk.offsets, chunk.sizes, size, strict=True)
        ):
            raise FormatError(
                f"a chunk in these metadata has offsets {tuple(chunk.offsets)} and sizes {tuple(chunk.sizes)}, and "
                f"does not lie in its tensor, whose shape is {tuple(size)}"
            )
        hashes.add(hash(chunk.offsets))
