"""Splits an object into skeleton and storages: the pickle of an object without the bytes of its tensors.

A pickler writes a persistent id for each storage, ("storage", class, key, location, numel), and leaves the bytes out.
All other objects are reduced as by Python's pickler. So parameters, views, quantized, sparse and nested tensors,
subclasses and DTensors come out as torch.save writes them, and the pickle has the same bytes.

A training step waits for this, and a state may have many thousands of tensors. So a native pickler
(csrc/binding/plain_pickler.cc) writes states of plain tensors and ordinary objects. If it meets something else, such as
a tensor subclass, Python's pickler writes the whole object, about eight times slower per tensor.
"""

from __future__ import annotations

import copyreg
import enum
import functools
import io
import pickle
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from fastpersist import _native
from fastpersist.errors import UnsavableTensorError
from fastpersist.formats.pickle_scan import iter_tensors, scan_pickle
from fastpersist.saving.ownership import storage_key
from fastpersist.saving.sources import Holders, StorageFacts, facts_of
from fastpersist.transfer.tensor_memory import PLAIN_TYPES
from fastpersist.transfer.torch_boundary import no_tag, torch_functions

__all__ = ["PICKLE_PROTOCOL", "ZERO_TENSOR", "Skeleton", "pickle_skeleton"]

PICKLE_PROTOCOL = 2
"""What torch.save writes and torch.load(weights_only=True) reads."""

ZERO_TENSOR = "a ZeroTensor (torch._efficientzerotensor) has no memory; save tensor.clone()"
"""Why such a tensor cannot be saved, for messages."""


@dataclass(frozen=True, slots=True)
class Skeleton:
    """An object without the bytes of its storages.

    Attributes:
        pickle: The pickle, protocol 2, with persistent ids in place of storages.
        storages: Each storage once, in the order in which the pickler met them; its index is its key in the file.
        facts: The properties of the storages when pickling has ended.
        holders: The plain tensors, and for each the index of its storage.
        wrappers: Tensors of a subclass (a DTensor, say), whose own storages lie inside other tensors.
        cut_bytes: By index, how many bytes of a storage are whole elements, if not all are. torch.save writes the rest,
            too, and torch.load refuses the file; no tensor in it sees the rest.
    """

    pickle: bytes
    storages: list[torch.UntypedStorage]
    facts: StorageFacts
    holders: Holders
    wrappers: list[torch.Tensor]
    cut_bytes: dict[int, int]


class _Kind(enum.Enum):
    """What the pickler has to do with an object of some type."""

    OTHER = enum.auto()
    TENSOR = enum.auto()
    WRAPPER = enum.auto()
    STORAGE = enum.auto()


_CLASSIC_DTYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)
"""Those that have a storage class; torch pickles newer dtypes, and quantized tensors, in other ways."""

_TORCH_REDUCES = {kind: kind.__reduce_ex__ for kind in PLAIN_TYPES}


class _SkeletonPickler(pickle.Pickler):
    """Replaces storages by persistent ids, which a `_Storages` gives.

    It keeps no reference to the object, and nothing that it makes refers back to it: a cycle would keep the state, and
    with it gigabytes, until Python next looks for cycles.
    """

    def __init__(self, file: io.BytesIO, storages: _Storages) -> None:
        # Set before the pickler is made, which looks its method up only once.
        self.persistent_id = storages.persistent_id  # type: ignore[method-assign]
        self._zeros = storages.stand_in_for_zeros
        super().__init__(file, protocol=PICKLE_PROTOCOL)

    def reducer_override(self, obj: object) -> Any:
        if type(obj) in PLAIN_TYPES and obj._is_zerotensor():  # type: ignore[attr-defined]
            # It has no address to ask for. It is refused when all is pickled: then its name is known.
            return torch._utils._rebuild_tensor_v2, (self._zeros(), 0, (0,), (1,), False, OrderedDict())
        return NotImplemented


class _Storages:
    """Gives each storage a persistent id, and remembers the tensors through which the pickler reached it."""

    def __init__(self) -> None:
        self.storages: list[torch.UntypedStorage] = []
        self._reached = Holders([], [])
        self.wrappers: list[torch.Tensor] = []
        self.zeros: list[torch.UntypedStorage] = []
        self.cut_bytes: dict[int, int] = {}
        self._on_the_way: list[torch.Tensor] = []  # tensors met since the last storage
        self._keys: dict[int, str] = {}
        self._dtype_at: dict[int, torch.dtype] = {}
        self._kind_of: dict[type, _Kind] = {}

    def stand_in_for_zeros(self) -> torch.storage.TypedStorage:
        """Return the placeholder that is pickled for the storage of a ZeroTensor, and note it."""
        stand_in = torch.UntypedStorage(0, device="meta")
        self.zeros.append(stand_in)
        return _typed(stand_in, torch.float32)

    def zero_keys(self) -> set[str]:
        """Return the keys of the placeholders for ZeroTensors."""
        return {self._keys[storage._cdata] for storage in self.zeros if storage._cdata in self._keys}

    def holders(self) -> Holders:
        """Return the plain tensors, with the index of each one's storage; the pickler met others on the way, too."""
        found = Holders([], [])
        for tensor, index in zip(*self._reached, strict=True):
            if type(tensor) in PLAIN_TYPES and storage_key(tensor) == self.storages[index]._cdata:
                found.add(tensor, index)
        return found

    def persistent_id(self, obj: object) -> tuple[str, type, str, str, int] | None:
        """Answer what the pickler asks about every object in the tree."""
        kind = self._kind_of.get(type(obj))
        if kind is None:
            kind = self._kind_of[type(obj)] = _kind(obj)
        if kind is _Kind.OTHER:
            return None
        if kind is _Kind.STORAGE:
            return self._storage_id(obj)
        self._on_the_way.append(obj)  # type: ignore[arg-type]
        if kind is _Kind.WRAPPER:
            self.wrappers.append(obj)  # type: ignore[arg-type]
        return None

    def _storage_id(self, obj: object) -> tuple[str, type, str, str, int]:
        if isinstance(obj, torch.storage.TypedStorage):
            storage, dtype = obj._untyped_storage, obj.dtype
            storage_class = getattr(torch, obj._pickle_storage_type())
            numel = storage.nbytes() // dtype.itemsize
        else:
            storage, dtype = obj, torch.uint8  # type: ignore[assignment]
            storage_class = torch.serialization.normalize_storage_type(type(obj))
            numel = storage.nbytes()
        self._check_dtype(storage, dtype)
        key = self._keys.get(storage._cdata)
        if key is None:
            key = self._keys[storage._cdata] = str(len(self.storages))
            self.storages.append(storage)
            if storage.nbytes() % dtype.itemsize:
                self.cut_bytes[int(key)] = numel * dtype.itemsize
        for tensor in self._on_the_way:
            self._reached.add(tensor, int(key))
        self._on_the_way = []
        fake_device = getattr(obj, "_fake_device", None)
        location = torch.serialization.location_tag(storage) if fake_device is None else str(fake_device)
        return ("storage", storage_class, key, location, numel)

    def _check_dtype(self, storage: torch.UntypedStorage, dtype: torch.dtype) -> None:
        """Refuse, with torch's words, storages of two dtypes at one address: its readers could not tell them apart."""
        if storage.device.type == "meta":
            return
        address = storage.data_ptr()
        if address and self._dtype_at.setdefault(address, dtype) != dtype:
            raise RuntimeError("Cannot save multiple tensors or storages that view the same data as different types")


def _typed(storage: torch.UntypedStorage, dtype: torch.dtype) -> torch.storage.TypedStorage:
    return torch.storage.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)


def _kind(obj: object) -> _Kind:
    if isinstance(obj, torch.Tensor):
        return _Kind.TENSOR if type(obj) in (torch.Tensor, torch.nn.Parameter) else _Kind.WRAPPER
    is_storage = isinstance(obj, torch.storage.TypedStorage) or torch.is_storage(obj)
    return _Kind.STORAGE if is_storage else _Kind.OTHER


def pickle_skeleton(obj: object) -> Skeleton:
    """Pickle an object as torch.save does, without the bytes of its storages.

    Returns:
        The pickle and the storages it names. The storages are the live ones, not copies.

    Raises:
        UnsavableTensorError: There is a ZeroTensor in it.
        RuntimeError: Tensors view the same data as different dtypes; torch.save refuses that too.
        TypeError, AttributeError, pickle.PicklingError: A value cannot be pickled; a note says where it is.
        Exception: What a `__reduce__` of the object raises goes through.
    """
    try:
        return _pickled(obj)
    except (TypeError, AttributeError, pickle.PicklingError) as error:
        place = _place_of_failure(obj, type(error))
        if place and hasattr(error, "add_note"):  # not before Python 3.11; the message stays torch's
            error.add_note(f"In the object that is saved, it is at {place}")
        raise


def _torch_types() -> _native.TorchTypes | None:
    """Return the objects that the native pickler needs; None if other code has changed how tensors are reduced."""
    slot_names: Callable[[type], list[str]] = copyreg._slotnames  # type: ignore[attr-defined]
    for kind, reduce in _TORCH_REDUCES.items():
        if kind.__reduce_ex__ is not reduce or kind in copyreg.dispatch_table or slot_names(kind):
            return None
    return _native.TorchTypes(
        tensor=torch.Tensor,
        parameter=torch.nn.Parameter,
        storage=torch.UntypedStorage,
        rebuild_parameter=torch._utils._rebuild_parameter,
        ordered_dict=OrderedDict,
        rebuild_by_dtype=_rebuild_by_dtype(),
        is_ordinary=lambda obj: _kind(obj) is _Kind.OTHER,
        global_opcode=_global_opcode,
        location_of=torch.serialization.location_tag,
        # Unless other code registered a tagger before torch's own (10 and up).
        is_host_tagged_cpu=all(entry[0] >= 10 or entry[1] is no_tag for entry in torch.serialization._package_registry),
        functions=torch_functions(),
    )


@functools.cache
def _rebuild_by_dtype() -> dict[torch.dtype, tuple[Callable[..., object], type, int, bool]]:
    """Return how a pickle rebuilds tensors of each dtype; see csrc/binding/plain_pickler.h."""
    of_new = (torch._utils._rebuild_tensor_v3, torch.storage.UntypedStorage, 1, True)
    found: dict[torch.dtype, tuple[Callable[..., object], type, int, bool]]
    found = dict.fromkeys(torch.storage._new_dtypes(), of_new)
    empty = torch.UntypedStorage(0)
    for dtype in _CLASSIC_DTYPES:
        storage_class = getattr(torch, _typed(empty, dtype)._pickle_storage_type())
        found[dtype] = (torch._utils._rebuild_tensor_v2, storage_class, dtype.itemsize, False)
    return found


def _global_opcode(obj: object) -> bytes | None:
    """Return the opcode by which a pickle names a class or function; None where it takes more than one."""
    opcode = pickle.dumps(obj, PICKLE_PROTOCOL)[2:-3]  # without the protocol, the number and the end
    is_one = opcode.startswith(b"c") and opcode.endswith(b"\n") and opcode.count(b"\n") == 2
    return opcode if is_one else None


def _pickled(obj: object) -> Skeleton:
    types = _torch_types()
    plain = None if types is None else _native.pickle_plain(obj, types)
    if plain is not None:
        pickled, live, noted, tensors, held = plain
        facts = facts_of(live) if noted is None else StorageFacts(*noted)
        return Skeleton(pickled, live, facts, Holders(tensors, held), wrappers=[], cut_bytes={})
    file = io.BytesIO()
    found = _Storages()
    _SkeletonPickler(file, found).dump(obj)
    if found.zeros:
        _refuse_zeros(file.getvalue(), found.zero_keys())
    # Storages without memory behind them (meta, fake) are refused by torch here, before any file is touched.
    storages = [storage.cpu() if storage.device.type == "meta" else storage for storage in found.storages]
    return Skeleton(file.getvalue(), storages, facts_of(storages), found.holders(), found.wrappers, found.cut_bytes)


def _refuse_zeros(pickled: bytes, keys: set[str]) -> None:
    """Raise with the names of the tensors whose storages have these keys."""
    tensors = iter_tensors(scan_pickle(pickled).root)
    names = [name for name, tensor in tensors if tensor.storage is not None and tensor.storage.key in keys]
    shown = ", ".join(repr(name) for name in names[:3]) or "a tensor"
    raise UnsavableTensorError(f"{shown} cannot be saved: {ZERO_TENSOR}")


def _place_of_failure(obj: object, kind: type[Exception]) -> str:
    """Return the path of the value that cannot be pickled: `a.b[1].c`; "" if it is the object itself."""
    place = ""
    seen: set[int] = set()
    while True:
        seen.add(id(obj))
        for part, child in _children(obj):
            if id(child) not in seen and _fails(child, kind):
                place, obj = place + part, child
                break
        else:
            return place.removeprefix(".")


def _children(obj: object) -> Iterator[tuple[str, object]]:
    if isinstance(obj, Mapping):
        yield from ((f".{key}" if isinstance(key, str) else f"[{key!r}]", value) for key, value in obj.items())
    elif isinstance(obj, (list, tuple, set, frozenset)):
        yield from ((f"[{index}]", value) for index, value in enumerate(obj))
    if hasattr(obj, "__dict__") and not isinstance(obj, type):
        yield from ((f".{name}", value) for name, value in vars(obj).items())


def _fails(obj: object, kind: type[Exception]) -> bool:
    try:
        _pickled(obj)
    except kind:
        return True
    except Exception:  # noqa: BLE001 - another error than the one that is explained
        return False
    return False
