"""Object → skeleton + storages: the pickle of an object without the bytes of its tensors.

The pickler is Python's, with torch's persistent ids: for a storage it writes ("storage", class, key, location, numel)
and leaves the bytes out. All other objects take their own `__reduce__`. So parameters, views, quantized, sparse and
nested tensors, subclasses and DTensors come out as torch.save writes them, and the pickle has the same bytes.

A training step waits for this. So plain dense tensors, of which a state has hundreds, take a shorter way to the same
bytes. To reuse the last pickle instead, one would have to prove for each object that nothing but tensor bytes has
changed, which costs as much.
"""

from __future__ import annotations

import copyreg
import enum
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
from fastpersist.transfer.torch_boundary import no_tag

__all__ = ["PICKLE_PROTOCOL", "ZERO_TENSOR", "Skeleton", "pickle_skeleton", "reduced_types"]

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
        tensors: For each storage the tensors through which the pickler reached it, the outermost first.
        wrappers: Tensors of a subclass (a DTensor, say), whose own storages lie inside other tensors.
    """

    pickle: bytes
    storages: list[torch.UntypedStorage]
    tensors: list[list[torch.Tensor]]
    wrappers: list[torch.Tensor]


class _Kind(enum.Enum):
    """What the pickler has to do with an object of some type."""

    OTHER = enum.auto()
    TENSOR = enum.auto()
    WRAPPER = enum.auto()
    STORAGE = enum.auto()


_CLASSIC_DTYPES = {
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.complex128,
}
"""Those that `_rebuild_tensor_v2` takes; torch pickles newer dtypes in another way."""

_TORCH_REDUCE = torch.Tensor.__reduce_ex__


class _PlainStorage:
    """The storage of a plain tensor on its way to `persistent_id`, in place of a TypedStorage."""

    __slots__ = ("dtype", "storage")

    def __init__(self, storage: torch.UntypedStorage, dtype: torch.dtype) -> None:
        self.storage = storage
        self.dtype = dtype


def _is_plain(tensor: torch.Tensor) -> bool:
    """Tell whether torch would reduce a tensor of exactly this type to `_rebuild_tensor_v2`, and nothing more."""
    return (
        tensor.device.type in ("cpu", "cuda")
        and tensor.layout is torch.strided
        and tensor.dtype in _CLASSIC_DTYPES
        and tensor._backward_hooks is None
        and not tensor.__dict__
        and not tensor.is_nested
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


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
        # The shorter way is right only while nobody has changed how tensors are reduced.
        self._takes_short_way = (
            torch.Tensor.__reduce_ex__ is _TORCH_REDUCE
            and torch.Tensor not in copyreg.dispatch_table
            and not copyreg._slotnames(torch.Tensor)  # type: ignore[attr-defined]
        )

    def reducer_override(self, obj: object) -> Any:
        if type(obj) is OrderedDict and not obj and not obj.__dict__:  # every tensor brings one
            return OrderedDict, ()
        if type(obj) in (torch.Tensor, torch.nn.Parameter) and obj._is_zerotensor():  # type: ignore[attr-defined]
            # It has no address to ask for. It is refused when all is pickled: then its name is known.
            return torch._utils._rebuild_tensor_v2, (self._zeros(), 0, (0,), (1,), False, OrderedDict())
        if type(obj) is not torch.Tensor or not self._takes_short_way or not _is_plain(obj):
            return NotImplemented
        return torch._utils._rebuild_tensor_v2, (
            _PlainStorage(obj.untyped_storage(), obj.dtype),
            obj.storage_offset(),
            tuple(obj.size()),
            obj.stride(),
            obj.requires_grad,
            OrderedDict(),
        )


class _Storages:
    """Gives each storage a persistent id, and remembers the tensors through which the pickler reached it."""

    def __init__(self) -> None:
        self.storages: list[torch.UntypedStorage] = []
        self.tensors: list[list[torch.Tensor]] = []
        self.wrappers: list[torch.Tensor] = []
        self.zeros: list[torch.UntypedStorage] = []
        self._on_the_way: list[torch.Tensor] = []  # tensors met since the last storage
        self._keys: dict[int, str] = {}
        self._dtype_at: dict[int, torch.dtype] = {}
        self._class_by_dtype: dict[torch.dtype, type] = {}
        # Host memory is tagged "cpu", unless somebody registered a tagger before torch's own (10 and up).
        registry = torch.serialization._package_registry
        self._cpu_is_plain = all(entry[0] >= 10 or entry[1] is no_tag for entry in registry)
        self._kind_of: dict[type, _Kind] = {_PlainStorage: _Kind.STORAGE}
        self._uninteresting: dict[type, None] = {}

    def stand_in_for_zeros(self) -> _PlainStorage:
        """Return what is pickled in place of the storage of a ZeroTensor, and note it."""
        stand_in = torch.UntypedStorage(0, device="meta")
        self.zeros.append(stand_in)
        return _PlainStorage(stand_in, torch.float32)

    def zero_keys(self) -> set[str]:
        """Return the keys of what stands for ZeroTensors."""
        return {self._keys[storage._cdata] for storage in self.zeros if storage._cdata in self._keys}

    @property
    def persistent_id(self) -> Callable[[object], Any]:
        """What the pickler asks about every object in the tree."""
        return _native.type_filter(self._uninteresting, self._persistent_id)

    def _persistent_id(self, obj: object) -> tuple[str, type, str, str, int] | None:
        kind = self._kind_of.get(type(obj))
        if kind is None:
            kind = self._kind_of[type(obj)] = _kind(obj)
            if kind is _Kind.OTHER:
                self._uninteresting[type(obj)] = None
        if kind is _Kind.OTHER:
            return None
        if kind is _Kind.STORAGE:
            return self._storage_id(obj)
        self._on_the_way.append(obj)  # type: ignore[arg-type]
        if kind is _Kind.WRAPPER:
            self.wrappers.append(obj)  # type: ignore[arg-type]
        return None

    def _storage_id(self, obj: object) -> tuple[str, type, str, str, int]:
        if isinstance(obj, _PlainStorage):
            storage, dtype = obj.storage, obj.dtype
            storage_class = self._class_by_dtype.get(dtype) or self._class_of(_typed(storage, dtype))
            numel = storage.nbytes() // dtype.itemsize
        elif isinstance(obj, torch.storage.TypedStorage):
            storage = obj._untyped_storage
            dtype = obj.dtype
            storage_class = self._class_of(obj)
            numel = storage.nbytes() // dtype.itemsize
        else:
            storage = obj  # type: ignore[assignment]
            dtype = torch.uint8
            storage_class = torch.serialization.normalize_storage_type(type(obj))
            numel = storage.nbytes()
        self._check_dtype(storage, dtype)
        key = self._keys.get(storage._cdata)
        if key is None:
            key = self._keys[storage._cdata] = str(len(self.storages))
            self.storages.append(storage)
            self.tensors.append(self._on_the_way)
        else:
            self.tensors[int(key)].extend(self._on_the_way)
        self._on_the_way = []
        fake_device = getattr(obj, "_fake_device", None)
        location = self._location_of(storage) if fake_device is None else str(fake_device)
        return ("storage", storage_class, key, location, numel)

    def _class_of(self, typed: torch.storage.TypedStorage) -> type:
        """Return the class that stands for a dtype in the pickle, such as torch.FloatStorage."""
        found = self._class_by_dtype.get(typed.dtype)
        if found is None:
            found = self._class_by_dtype[typed.dtype] = getattr(torch, typed._pickle_storage_type())
        return found

    def _location_of(self, storage: torch.UntypedStorage) -> str:
        if self._cpu_is_plain and storage.device.type == "cpu":
            return "cpu"
        return str(torch.serialization.location_tag(storage))

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


def _pickled(obj: object) -> Skeleton:
    file = io.BytesIO()
    found = _Storages()
    _SkeletonPickler(file, found).dump(obj)
    if found.zeros:
        _refuse_zeros(file.getvalue(), found.zero_keys())
    return Skeleton(file.getvalue(), found.storages, found.tensors, found.wrappers)


class _ReducedTypes(_Storages):
    """Notes, of each class that is neither built in nor torch's tensors, what the first object of it is reduced to."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[type, tuple[Any, ...]] = {}

    def _persistent_id(self, obj: object) -> tuple[str, type, str, str, int] | None:
        kind = type(obj)
        if kind not in self._kind_of and kind.__module__ != "builtins" and not isinstance(obj, type):
            if _kind(obj) is _Kind.OTHER:
                reduce = copyreg.dispatch_table.get(kind)  # as a pickler does: a torch.layout has nothing else
                reduced = obj.__reduce_ex__(PICKLE_PROTOCOL) if reduce is None else reduce(obj)
                if isinstance(reduced, tuple):
                    self.found[kind] = reduced
        return super()._persistent_id(obj)


def reduced_types(obj: object) -> dict[type, tuple[Any, ...]]:
    """Return, by class, what the first object of it in the tree is reduced to (as by `__reduce_ex__`)."""
    found = _ReducedTypes()
    _SkeletonPickler(io.BytesIO(), found).dump(obj)
    return found.found


def _refuse_zeros(pickled: bytes, keys: set[str]) -> None:
    """Raise with the names of the tensors whose storages have these keys."""
    tensors = iter_tensors(scan_pickle(pickled).root)
    names = [name for name, tensor in tensors if tensor.storage is not None and tensor.storage.key in keys]
    shown = ", ".join(repr(name) for name in names[:3]) or "a tensor"
    raise UnsavableTensorError(f"{shown} cannot be saved: {ZERO_TENSOR}")


def _place_of_failure(obj: object, kind: type[Exception]) -> str:
    """Say where in an object the value is that cannot be pickled: `a.b[1].c`; "" if it is the object itself."""
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
