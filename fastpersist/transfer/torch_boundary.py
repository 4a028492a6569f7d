"""The interface to torch: its own save and load, the globals that its loads allow, and a way around its compiler.

`stock_save` and `stock_load` are torch's functions as they were at our import. `fastpersist.install` replaces those of
torch by ours, so what we leave to torch must go to the stock ones.

`plain_load` is `stock_load` with Python's own unpickler, which is written in C, unlike torch's restricted one. It
resolves only the few names of `_PLAIN_GLOBALS`, so it runs no more of a file's code than the restricted one.
"""

from __future__ import annotations

import _compat_pickle
import functools
import hashlib
import io
import os
import pickle
import re
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from types import SimpleNamespace
from typing import IO, Any, Final, ParamSpec, TypeVar

import torch

from fastpersist import _native
from fastpersist.errors import InternalError

__all__ = [
    "has_address",
    "loads_ask_once",
    "loads_plainly",
    "no_tag",
    "not_allowed_globals",
    "plain_load",
    "python3_name",
    "sample_tensors",
    "stock_load",
    "stock_save",
    "torch_functions",
    "untraced",
]

stock_save = torch.save
stock_load = torch.load


def no_tag(storage: object) -> None:
    """Tag no storage; a load registers this with `register_package`, which asks for a function that tags."""


_NEWEST_KNOWN = (2, 15)  # a later torch may mean something else by the same names, in a way that samples do not survive


@functools.cache
def torch_functions() -> _native.TorchFunctions | None:
    """Return torch's C++ functions by which native code reads tensors; None if this torch has different ones."""
    release = re.match(r"(\d+)\.(\d+)", torch.__version__)
    if release is None or tuple(map(int, release.groups())) > _NEWEST_KNOWN:
        return None
    with torch.inference_mode(False), torch.no_grad():
        samples = sample_tensors()
        if not all(type(sample) in (torch.Tensor, torch.nn.Parameter) for sample in samples):
            return None  # a mode of the caller makes other tensors
        return _native.TorchFunctions.find(torch._C.__file__, torch.Tensor, torch.UntypedStorage, samples)


def sample_tensors() -> list[torch.Tensor]:
    """Return tensors that differ in all properties that native code reads."""
    numbers = torch.zeros(4, 6, device="cpu", dtype=torch.float32)
    changed = torch.zeros(5, device="cpu", dtype=torch.int64).add_(1).add_(1)
    hooked = torch.zeros(2, device="cpu", dtype=torch.float32)
    hooked._backward_hooks = OrderedDict()
    return [
        numbers[1:, ::2],
        numbers.t(),
        changed,
        changed[4],
        hooked,
        torch.nn.Parameter(torch.zeros(3, device="cpu", dtype=torch.bfloat16)),
        torch._neg_view(torch.zeros(2, device="cpu", dtype=torch.float64)),
        torch.zeros(0, 7, device="cpu", dtype=torch.bool),
    ]


def not_allowed_globals(global_names: tuple[str, ...]) -> list[str]:
    """Return the globals that weights_only=True would refuse.

    This is only for early warnings: torch checks for itself when it unpickles.
    """
    unpickler = torch._weights_only_unpickler
    allowed = {*unpickler._get_allowed_globals(), *unpickler._get_user_allowed_globals()}
    return [
        name
        for name in global_names
        if name not in allowed and "Storage" not in name and python3_name(name) not in allowed
    ]


def python3_name(name: str) -> str:
    """Translate the Python 2 spelling that protocol 2 uses, such as __builtin__.set."""
    module, _, attribute = name.rpartition(".")
    module, attribute = _compat_pickle.NAME_MAPPING.get(
        (module, attribute), (_compat_pickle.IMPORT_MAPPING.get(module, module), attribute)
    )
    return f"{module}.{attribute}"


def _rebuild_tensor(
    storage: torch.storage.TypedStorage,
    storage_offset: int,
    size: tuple[int, ...],
    stride: tuple[int, ...],
    requires_grad: bool,
    backward_hooks: Any,
    metadata: Any = None,
) -> torch.Tensor:
    """Build a tensor as torch._utils._rebuild_tensor_v2 does, without its look for a FakeTensorMode.

    That takes half of its time. Loads leave the file to stock torch.load while such a mode is active.
    """
    tensor: torch.Tensor = torch._utils._rebuild_tensor(storage, storage_offset, size, stride)
    tensor.requires_grad = requires_grad
    if metadata:
        torch._utils.set_tensor_metadata(tensor, metadata)
    tensor._backward_hooks = backward_hooks
    return tensor


# The globals of most models' states, beside the storages of each dtype. None of them runs code from the file.
_PLAIN_GLOBALS: Final[dict[tuple[str, str], object]] = {
    ("collections", "OrderedDict"): OrderedDict,
    ("torch._utils", "_rebuild_parameter"): torch._utils._rebuild_parameter,
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild_tensor,
    ("torch.storage", "UntypedStorage"): torch.UntypedStorage,
}
_PLAIN_NAMES: Final = frozenset(".".join(one) for one in _PLAIN_GLOBALS)


class _PlainUnpickler(pickle.Unpickler):
    """Python's unpickler, which finds nothing but these names. torch finds storages of each dtype before it asks."""

    def find_class(self, module: str, name: str, /) -> object:
        try:
            return _PLAIN_GLOBALS[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"{module}.{name} is no part of a plain state") from None


def loads_plainly(global_names: Iterable[str]) -> bool:
    """Tell whether `plain_load` resolves all of these globals."""
    return not os.environ.get("TORCH_FORCE_WEIGHTS_ONLY_LOAD") and all(
        name in _PLAIN_NAMES or (name.startswith("torch.") and name.endswith("Storage") and hasattr(torch, name[6:]))
        for name in global_names
    )


def has_address(storage: torch.UntypedStorage) -> bool:
    """Tell whether a storage has memory."""
    return storage.device.type != "meta" and storage.data_ptr() != 0


@functools.cache
def loads_ask_once() -> bool:
    """Tell whether torch.load asks once for a storage without memory, as for others (torch 2.15), or at each use."""
    asks = []

    class Locations(dict[str, str]):
        def get(self, location: Any, default: Any = None) -> Any:
            asks.append(location)
            return location

    empty = torch.empty(0, device="cpu")
    with io.BytesIO() as buffer:
        stock_save([empty, empty.view(0, 1)], buffer)
        buffer.seek(0)
        stock_load(buffer, map_location=Locations(), weights_only=True, mmap=False)
    return len(asks) == 1


def plain_load(file: IO[bytes], storages: Mapping[str, torch.UntypedStorage], *, pickle_sha256: bytes) -> Any:
    """Load a torch zip around existing storages, otherwise as `stock_load` does with weights_only=True.

    torch opens the file, and reads its small records. It is not asked for storages: that takes a third of a load of ten
    thousand tensors that are in the page cache.

    Args:
        file: A file whose pickle a scan has found plain (`builds_without_bytes`, `loads_plainly`), with a memo that is
            not longer than the pickle: Python's unpickler allocates that as a whole.
        storages: All storages that the pickle names, by key.
        pickle_sha256: The SHA-256 of the pickle that was scanned.

    Raises:
        pickle.UnpicklingError: The file has another pickle now, or it names something else.
        Exception: What torch.load raises.
    """
    by_key: dict[str, Any] = dict(storages)  # emptied at the end: a class is garbage that lives for a while

    class Scanned(_PlainUnpickler):
        def __init__(self, data: IO[bytes], **options: Any) -> None:
            content = data.read()
            if hashlib.sha256(content).digest() != pickle_sha256:
                raise pickle.UnpicklingError("data.pkl is not the one that was scanned: the file has changed meanwhile")
            super().__init__(io.BytesIO(content), **options)

        def __setattr__(self, name: str, value: object) -> None:
            if name != "persistent_load":  # torch sets its own, which reads storages
                super().__setattr__(name, value)

        def persistent_load(self, identity: Any, /) -> torch.storage.TypedStorage:
            _, kind, key, *_ = identity
            found = by_key[key]
            if isinstance(found, torch.storage.TypedStorage):
                return found
            dtype = torch.uint8 if kind is torch.UntypedStorage else kind.dtype
            typed = torch.storage.TypedStorage(wrap_storage=found, dtype=dtype, _internal=True)
            if has_address(found):  # its first use decides its dtype, as in torch
                by_key[key] = typed
            return typed

    as_module = SimpleNamespace(__name__="fastpersist", Unpickler=Scanned)
    try:
        loaded = stock_load(file, map_location="cpu", pickle_module=as_module, weights_only=False, mmap=False)
        if any(isinstance(found, torch.UntypedStorage) and has_address(found) for found in by_key.values()):
            raise InternalError("torch.load did not ask for the storages that the scan of the pickle found")
        return loaded
    finally:
        by_key.clear()


Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def untraced(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Let a function run uncompiled where compiled code calls it.

    torch's own decorator imports the compiler, which takes a second; so it is applied only when compiled code calls.
    """
    # Not a name, which the compiler loses when it is assigned; nor append, which the compiler of torch 2.7 cannot call.
    disabled: list[Callable[Parameters, Result]] = []

    @functools.wraps(function)
    def call(*arguments: Parameters.args, **keywords: Parameters.kwargs) -> Result:
        if not disabled:
            if not torch.compiler.is_compiling():
                return function(*arguments, **keywords)
            disabled[:] = [torch.compiler.disable(function)]
        return disabled[0](*arguments, **keywords)

    return call
