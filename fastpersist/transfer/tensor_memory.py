"""The memory of tensors: views of tensors, storages and addresses as bytes, and locked tensors.

Moves nothing itself: `writer`, `reader` and `tensor_file` do. csrc/core/memory locks the pages.
"""

from __future__ import annotations

import ctypes
import logging
import math
import operator
import weakref
from collections.abc import Iterable, Sequence

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fastpersist import _native
from fastpersist.errors import ConfigError
from fastpersist.transfer.torch_boundary import untraced

__all__ = [
    "PLAIN_TYPES",
    "address_of",
    "byte_tensor",
    "byte_view",
    "check_bytes",
    "crc32_of",
    "host_tensor",
    "locked_tensor",
    "storage_without_memory",
]

_log = logging.getLogger("fastpersist")

PLAIN_TYPES = frozenset({torch.Tensor, torch.nn.Parameter})
"""The types whose storage is their own."""

_ADDRESSABLE_BYTES = (1 << 63) - 1


# ------------------------------------------------------------------------------------------------ bytes of a tensor


def storage_without_memory(size_bytes: int, address: int) -> torch.UntypedStorage:
    """Return a storage that has a length and an address, and no memory, so that files of any size can be planned.

    Its bytes must not be read or written.
    """
    if not size_bytes:
        return torch.UntypedStorage(0, device="cpu")
    return host_tensor(address, size_bytes).untyped_storage()


def byte_tensor(storage: torch.UntypedStorage) -> torch.Tensor:
    """View a storage as a uint8 tensor of shape [nbytes], on its own device, without a copy."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def host_tensor(address: int, size_bytes: int) -> torch.Tensor:
    """View host memory that other code owns as a uint8 tensor of shape [size_bytes]."""
    return torch.frombuffer((ctypes.c_char * size_bytes).from_address(address), dtype=torch.uint8)


def address_of(tensor: torch.Tensor) -> int:
    """Return where a dense tensor's first element lies; 0 if it has no memory, as fake ones and those of transforms."""
    try:
        if type(tensor) not in PLAIN_TYPES and tensor.untyped_storage().device.type == "meta":  # torch would warn
            return 0
        return tensor.data_ptr()
    except RuntimeError:
        return 0


def crc32_of(data: torch.Tensor, before: int = 0) -> int:
    """Return the CRC-32 of a contiguous tensor's bytes on the host, behind bytes whose CRC-32 is `before`."""
    return _native.crc32((ctypes.c_char * data.nbytes).from_address(data.data_ptr()), before)


def check_bytes(tensor: torch.Tensor) -> None:
    """Refuse, as `byte_view` does, what has no bytes that lie in order in memory of its own."""
    if not isinstance(tensor, torch.Tensor):
        raise ConfigError(f"a tensor is needed, not {type(tensor).__name__}")
    reason = _why_no_bytes(tensor)
    if reason:
        raise ConfigError(f"{_described(tensor)} cannot be seen as bytes: {reason}")


@untraced
def byte_view(tensor: torch.Tensor) -> torch.Tensor:
    """View a tensor's bytes as a uint8 tensor, in the order they have in memory, without a copy.

    The view keeps the memory alive, whatever becomes of the tensor. It takes no part in autograd: it may be written to
    where the tensor itself is a parameter, or needed by backward. Each in-place write to it by torch counts as one of
    the tensor too (`_version`), so backward notices; inference and quantized tensors do not count it, and writes by
    address, such as numpy's, are counted nowhere.

    Args:
        tensor: A contiguous tensor of any dtype, shape and device; also a parameter, an inference tensor, or a part of
            a larger storage. Quantized tensors lose their scales, which are no part of their memory.

    Returns:
        A plain uint8 tensor of shape [bytes], on the device of the tensor; empty when that has no elements.

    Raises:
        ConfigError: It is no tensor, or its elements do not lie in order in memory of its own; the message says what
            helps.

    Thread safety: any thread.
    """
    check_bytes(tensor)
    try:
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False):  # or the view would be one, and no write to it be counted
                return _aliased(tensor)
        return _aliased(tensor)
    except (AssertionError, NotImplementedError, RuntimeError, TypeError) as error:  # a mode that takes over torch
        raise ConfigError(f"{_described(tensor)} cannot be seen as bytes: torch says: {error}") from error


def _aliased(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_quantized:  # a view of it would be half a quantized tensor
        view = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        view.set_(tensor.untyped_storage(), tensor.storage_offset() * tensor.element_size(), (tensor.nbytes,), (1,))
    elif type(tensor) in PLAIN_TYPES:
        view = tensor.detach().view(-1).view(torch.uint8)  # they share the count of changes with the tensor
    else:
        with torch._C.DisableTorchFunction():
            view = tensor.detach().view(-1).view(torch.uint8)
    if view.untyped_storage().device.type == "meta":
        raise TypeError("a FakeTensorMode is active; leave it first")
    return view


def _why_no_bytes(tensor: torch.Tensor) -> str:
    """Say why a tensor has no contiguous bytes of its own, and what helps; an empty string when it has."""
    if tensor.is_nested:
        return "it is nested; pass its .values()"
    if tensor.layout != torch.strided:
        return _why_not_strided(tensor)
    anything: object = tensor  # mypy takes a tensor for no wrapper
    is_plain = type(tensor) in PLAIN_TYPES
    if not is_plain and is_traceable_wrapper_subclass(anything):
        parts = [f".{name}" for name in anything.__tensor_flatten__()[0]]
        return "its memory lies in other tensors; pass " + (
            ".to_local()" if hasattr(tensor, "to_local") else " and ".join(parts)
        )
    if tensor.is_conj():
        return "it is conjugated only when it is read; pass .resolve_conj()"
    if tensor.is_neg():
        return "it is negated only when it is read; pass .resolve_neg()"
    try:
        storage = tensor.untyped_storage()
        # Storages of fake tensors are, whatever device these claim.
        if tensor.is_meta if is_plain else storage.device.type == "meta":
            return "it is fake, or on the meta device, and has no memory; pass one like it on a real device"
        address = storage.data_ptr()
    except (NotImplementedError, RuntimeError):
        return "it has no memory of its own, as inside torch.func transforms, in zero tensors and in some subclasses"
    if not tensor.is_contiguous():
        return _why_not_contiguous(tensor)
    needed_bytes = (tensor.storage_offset() + tensor.numel()) * tensor.element_size()
    if tensor.numel() and (storage.nbytes() < needed_bytes or not address):
        return (
            f"its storage has {storage.nbytes()} bytes, and the tensor would reach to byte {needed_bytes}; its dtype "
            "is packed, or its memory was given back (FSDP does that between uses of a parameter)"
        )
    return ""


def _why_not_strided(tensor: torch.Tensor) -> str:
    if tensor.layout == torch.sparse_coo:
        return "it is sparse; pass its .indices() and .values(), or .to_dense()"
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return "it is sparse; pass its .crow_indices(), .col_indices() and .values(), or .to_dense()"
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return "it is sparse; pass its .ccol_indices(), .row_indices() and .values(), or .to_dense()"
    return f"its layout is {tensor.layout}; pass .to_dense()"


def _why_not_contiguous(tensor: torch.Tensor) -> str:
    """Say which view of a tensor is contiguous, if one is: the same bytes, with the dimensions in another order."""
    lengths = tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda dim: -lengths[dim])
    strides = f"it is not contiguous (strides {lengths})"
    if tensor.permute(order).is_contiguous():
        numbers = ", ".join(map(str, order))
        return f"{strides}; .permute({numbers}) is, and has the same bytes; .contiguous() would be a copy"
    return f"{strides}; write .contiguous(), which is a copy; read into a contiguous tensor, and copy_() from that"


def _described(tensor: torch.Tensor) -> str:
    kind = type(tensor).__name__ if type(tensor) not in PLAIN_TYPES else "tensor"
    shape = "" if tensor.is_nested else f" of shape {tuple(tensor.shape)}"
    return f"a {tensor.dtype} {kind}{shape}"


# -------------------------------------------------------------------------------------------------- locked tensors


@untraced
def locked_tensor(shape: int | Sequence[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Make a host tensor whose pages are locked in memory: files are read into it, and written from it, without a copy.

    Its memory begins on a page, holds zeros, and is unlocked and freed with the last reference to the tensor, a view of
    it, or its storage. In a process that has initialised CUDA (`torch.cuda.is_initialized()`) it is registered there
    too, so that `copy_(..., non_blocking=True)` to and from a device does not wait, as with pinned memory. Elsewhere
    CUDA stays as it is, and the tensor is not registered later either. A forked child has a copy that is not locked.

    Args:
        shape: The shape of the tensor, or its number of elements.
        dtype: Any dtype but quantized ones.

    Returns:
        A contiguous CPU tensor; an ordinary one when it has no elements.

    Raises:
        ConfigError: No such shape or dtype.
        StorageError: This process may lock no more memory (RLIMIT_MEMLOCK, `ulimit -l`), or there is none.

    Thread safety: any thread.
    """
    sizes = _sizes_of(shape)
    if not isinstance(dtype, torch.dtype) or str(dtype).startswith(("torch.q", "torch.quint")):
        raise ConfigError(f"locked_tensor: dtype is a torch.dtype that is not quantized, not {dtype!r}")
    size_bytes = math.prod(sizes) * dtype.itemsize
    if size_bytes > _ADDRESSABLE_BYTES:
        raise ConfigError(f"locked_tensor: a tensor of shape {sizes} would have {size_bytes} bytes")
    if size_bytes == 0:
        return torch.empty(sizes, dtype=dtype, device="cpu")
    memory = _native.LockedMemory(size_bytes)
    exporter = _registered(memory) if torch.cuda.is_initialized() else memory
    storage = torch.frombuffer(exporter, dtype=torch.uint8).untyped_storage()  # keeps the exporter
    strides = torch.empty(sizes, device="meta").stride()
    tensor = torch.empty(0, dtype=dtype, device="cpu")
    tensor.set_(storage, 0, sizes, strides)  # no view of another tensor, like any that torch makes
    return tensor


def _sizes_of(shape: int | Sequence[int]) -> tuple[int, ...]:
    try:
        sizes = tuple(map(operator.index, shape if isinstance(shape, Iterable) else (shape,)))
    except TypeError:
        sizes = (-1,)
    if any(size < 0 for size in sizes):
        raise ConfigError(f"locked_tensor: shape is a number or a sequence of numbers, 0 or more, not {shape!r}")
    return sizes


# ---------------------------------------------------------------------------------------------------------- CUDA


def _registered(memory: _native.LockedMemory) -> memoryview | _native.LockedMemory:
    """Register memory with CUDA; return what to export it by, whose end unregisters it before it is freed."""
    runtime = torch.cuda.cudart()
    result = runtime.cudaHostRegister(memory.address, memory.size_bytes, 0)
    if result != runtime.cudaError.success:
        _forget_cuda_error()
        _log.warning(
            "CUDA did not register %d bytes of locked memory (%s): copies to the device wait for them",
            memory.size_bytes,
            runtime.cudaGetErrorString(result),
        )
        return memory
    exporter = memoryview(memory)
    # The finalizer holds the memory until it has run. One on the memory itself would come after its end.
    weakref.finalize(exporter, _unregister, memory)
    return exporter


def _unregister(memory: _native.LockedMemory) -> None:
    if torch.cuda.is_initialized():  # not in a forked child, which has neither the memory nor CUDA
        torch.cuda.cudart().cudaHostUnregister(memory.address)


def _forget_cuda_error() -> None:
    """Clear the error that a refused call has left; otherwise the next kernel of the training would report it."""
    loaded = ctypes.CDLL(None)
    for name in ("cudaGetLastError", "hipGetLastError"):
        if hasattr(loaded, name):
            getattr(loaded, name)()
