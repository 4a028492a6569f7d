"""Kernels for a torch that was built for CUDA and runs over the doubles of the runtime and of the driver.

torch's allocator, streams, events and copies then work as with a GPU: in streams, asynchronously, in memory that the
CPU cannot access. What is missing are the kernels. Each operator of torch that has one is computed here on the host:
its inputs are read where its stream stands, its results are written in the order of the stream. A kernel that only
writes (`fill_`, `zero_`) does not wait for the stream; any other one does, as no kernel of a GPU would.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from support.cuda_double import SONAME, CudaDouble
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

__all__ = ["double", "install"]

# These allocate, view or order; their own code is what is to be tested.
_NATIVE = {
    "as_strided", "empty.memory_format", "empty_strided", "is_set_to", "record_stream", "resize_",
    "set_", "set_.source_Storage", "set_.source_Storage_storage_offset", "set_.source_Tensor",
    "_reshape_alias", "unfold", "view", "view_as_complex", "view_as_real",
}  # fmt: skip

_ASSERT = 710  # CUDA_ERROR_ASSERT

_PENDING_COUNT = 64
_PENDING_BYTES = 256 << 20

_library: Any = None  # of the registrations; they end with it
_double: CudaDouble | None = None
_lock = threading.Lock()
_copied: list[tuple[torch.cuda.Event, torch.UntypedStorage]] = []  # pinned memory that copies may still use
_pending: list[tuple[int, int, int]] = []  # address, size, stream: of memory that copies in streams may still read


def double() -> CudaDouble:
    """Return the double that torch runs over."""
    assert _double is not None, "emulation.install() comes first"
    return _double


def install() -> None:
    """Give torch its kernels. Once in a process, before the first tensor on a device."""
    global _double, _library
    # Of what only GPUs have there are others that the host has, too.
    torch.backends.cudnn.enabled = False
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_cudnn_sdp(False)
    _double = CudaDouble(ctypes.CDLL(SONAME))
    _library = torch.library.Library("aten", "IMPL")
    names = {name.removeprefix("aten::") for name in torch._C._dispatch_get_registrations_for_dispatch_key("CUDA")
             if name.startswith("aten::")}  # fmt: skip
    for name in sorted(names - _NATIVE):
        packet, _, overload = name.partition(".")
        operator = getattr(getattr(torch.ops.aten, packet), overload or "default")
        _library.impl(name, _on_host(operator), "CUDA", allow_override=True)
    _library.impl("copy_", _copy, "CUDA", allow_override=True)
    torch.cuda.CUDAGraph.capture_end = _capture_end  # type: ignore[method-assign]
    torch.cuda.CUDAGraph.replay = _replay  # type: ignore[method-assign]
    for name, value in (("zero_", 0), ("fill_.Scalar", None)):
        _library.impl(name, _filling(value), "CUDA", allow_override=True)


def _runtime() -> ctypes.CDLL:
    return ctypes.CDLL("libcudart.so.13")


# --- memory


def _stream(device: torch.device) -> int:
    handle = torch.cuda.current_stream(device).cuda_stream
    return handle if handle > 2 else double().default_stream(device.index)


def _is_capturing() -> bool:
    return torch.cuda.is_current_stream_capturing()


def _bytes_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Return where the elements of a tensor begin and end in its storage."""
    if tensor.numel() == 0:
        return 0, 0
    first = tensor.storage_offset()
    last = first + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return first * tensor.itemsize, (last + 1) * tensor.itemsize


class _Images:
    """Host memory with what the storages of some tensors hold, where their streams stand now."""

    def __init__(self) -> None:
        self._storages: dict[int, torch.UntypedStorage] = {}
        self._tensors: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by the image's id: tensor, image

    def of(self, tensor: torch.Tensor, *, read: bool = True) -> torch.Tensor:
        storage = tensor.untyped_storage()
        host = self._storages.get(storage.data_ptr())
        if host is None:
            host = self._storages[storage.data_ptr()] = torch.UntypedStorage(storage.nbytes())
            if read and storage.nbytes():
                double().stream_synchronize(_stream(tensor.device))
                assert double().library.double_read(storage.data_ptr(), host.data_ptr(), storage.nbytes()) == 0
        image = torch.empty(0, dtype=tensor.dtype)
        image.set_(host, tensor.storage_offset(), tensor.shape, tensor.stride())
        if tensor.is_conj():
            image = torch._conj(image)
        if tensor.is_neg():
            image = torch._neg_view(image)
        self._tensors[id(image)] = (tensor, image)
        return image

    def original(self, image: torch.Tensor) -> torch.Tensor | None:
        return self._tensors.get(id(image), (None,))[0]


def _write(tensor: torch.Tensor, image: torch.Tensor) -> None:
    """Write what an image holds into its tensor's memory, in the order of the current stream."""
    begin, end = _bytes_of(tensor)
    if begin == end:
        return
    stream = _stream(tensor.device)
    temporary = double().alloc(end - begin)
    source = image.untyped_storage().data_ptr() + begin
    assert double().library.double_write(temporary, source, end - begin) == 0
    double().stream_add_copy(stream, tensor.untyped_storage().data_ptr() + begin, temporary, end - begin)
    with _lock:
        _pending.append((temporary, end - begin, stream))
        if len(_pending) < _PENDING_COUNT and sum(size for _, size, _ in _pending) < _PENDING_BYTES:
            return
        done, _pending[:] = _pending[:], []
    for address, _, used in done:
        double().stream_synchronize(used)
        double().free(address)


def _new_on(device: torch.device, result: torch.Tensor) -> torch.Tensor:
    if result.layout != torch.strided:
        return result.to(device)
    made = torch.empty_strided(result.shape, result.stride(), dtype=result.dtype, device=device)
    image = torch.empty(0, dtype=result.dtype).set_(
        result.untyped_storage(), result.storage_offset(), result.shape, result.stride()
    )
    begin, end = _bytes_of(image)
    if end > begin:
        moved = torch.empty(0, dtype=torch.uint8).set_(result.untyped_storage(), begin, (end - begin,), (1,)).clone()
        _write_bytes(made, moved)
    return made


def _write_bytes(tensor: torch.Tensor, data: torch.Tensor) -> None:
    """The same for bytes that begin at the tensor's first element."""
    stand_in = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(
        tensor.untyped_storage(), tensor.storage_offset() * tensor.itemsize, (data.numel(),), (1,)
    )
    image = torch.empty(stand_in.storage_offset() + data.numel(), dtype=torch.uint8)
    image[stand_in.storage_offset() :] = data
    _write(stand_in, image)


# --- graphs: what is captured is done when they are replayed

_captured: list[Callable[[], Any]] = []
_capture_end_of_torch = torch.cuda.CUDAGraph.capture_end


def _capture_end(graph: Any) -> None:
    _capture_end_of_torch(graph)
    graph.kernels, _captured[:] = _captured[:], []


def _replay(graph: Any) -> None:
    for kernel in graph.kernels:
        kernel()


# --- kernels


@contextmanager
def _below_autograd() -> Iterator[None]:
    with torch._C._AutoDispatchBelowAutograd(), torch.no_grad():
        yield


def _on_host(operator: Any) -> Callable[..., Any]:
    written = [
        (argument.alias_info is not None and argument.alias_info.is_write)
        or (operator.__name__.startswith("native_batch_norm") and argument.name in ("running_mean", "running_var"))
        for argument in operator._schema.arguments
    ]
    names = [argument.name for argument in operator._schema.arguments]

    def kernel(*positional: Any, **named: Any) -> Any:
        given = dict(zip(names, positional, strict=False)) | named
        with _below_autograd():
            result = compute(given, is_captured=_is_capturing())
        if _is_capturing():
            _captured.append(lambda: again(given, result))
        return result

    def again(given: dict[str, Any], result: Any) -> None:
        with _below_autograd():
            new = compute(given, is_captured=False)
            for old, value in zip(tree_flatten(result)[0], tree_flatten(new)[0], strict=True):
                if isinstance(old, torch.Tensor) and old is not value:
                    _copy(old, value)

    def compute(given: dict[str, Any], *, is_captured: bool) -> Any:
        images = _Images()
        devices: list[torch.device] = []

        def to_host(value: Any) -> Any:
            if isinstance(value, torch.Tensor) and value.device.type == "cuda":
                devices.append(value.device)
                if value.layout != torch.strided:
                    return value.cpu()
                return images.of(value, read=not is_captured)
            if isinstance(value, torch.device):
                index = torch.cuda.current_device() if value.index is None else value.index
                devices.append(torch.device("cuda", index))
                return torch.device("cpu")
            return None if isinstance(value, torch.Generator) else value

        on_host = {name: tree_map(to_host, value) for name, value in given.items()}
        if "pin_memory" in on_host:
            on_host["pin_memory"] = False
        device = devices[0] if devices else torch.device("cuda", torch.cuda.current_device())
        with torch.cuda.device(device):
            try:
                result = _call(operator, on_host)
            except IndexError:
                return _lose_context(device)
            for name, is_written in zip(names, written, strict=True):
                for image in tree_flatten(on_host.get(name))[0] if is_written and not is_captured else ():
                    original = images.original(image) if isinstance(image, torch.Tensor) else None
                    if original is not None and original.shape == image.shape:
                        _write(original, image)
                    elif original is not None:
                        original.resize_(image.shape)
                        _write_bytes(original, image.contiguous().reshape(-1).view(torch.uint8))
            leaves, structure = tree_flatten(result)
            return tree_unflatten([_back(leaf, images, device) for leaf in leaves], structure)

    return kernel


def _lose_context(device: torch.device) -> torch.Tensor:
    """Do as a kernel does whose assertion fails: from when its turn comes, every call fails."""
    made = torch.empty(1, device=device)
    double().fail_async("cuMemsetD8Async", 1, _ASSERT)
    ctypes.CDLL("libcudart.so.13").cudaMemsetAsync(
        ctypes.c_void_p(made.data_ptr()),
        0,
        ctypes.c_size_t(4),
        ctypes.c_void_p(torch.cuda.current_stream().cuda_stream),
    )
    return made


def _call(operator: Any, arguments: dict[str, Any]) -> Any:
    schema = operator._schema.arguments
    positional = [arguments[one.name] for one in schema if not one.kwarg_only and one.name in arguments]
    return operator(*positional, **{one.name: arguments[one.name] for one in schema
                                    if one.kwarg_only and one.name in arguments})  # fmt: skip


def _back(leaf: Any, images: _Images, device: torch.device) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    original = images.original(leaf)
    return original if original is not None else _new_on(device, leaf)


def _filling(value: float | None) -> Callable[..., torch.Tensor]:
    def kernel(tensor: torch.Tensor, number: Any = value) -> torch.Tensor:
        with _below_autograd(), torch.cuda.device(tensor.device):
            begin, end = _bytes_of(tensor)
            if _is_capturing():
                _captured.append(lambda: kernel(tensor, number))
            elif end > begin:
                is_dense = tensor.numel() * tensor.itemsize == end - begin
                image = _Images().of(tensor, read=not is_dense)
                _write(tensor, image.fill_(number))
        return tensor

    return kernel


def _copy(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    if target.device.type == "cuda" and _is_capturing():
        _captured.append(lambda: _copy(target, source))
        return target
    with _below_autograd():
        if target.numel() == 0:
            return target
        source = source.expand(target.shape)
        is_same = target.dtype == source.dtype and target.stride() == source.stride()
        is_plain = not (target.is_conj() or source.is_conj() or target.is_neg() or source.is_neg())
        begin, end = _bytes_of(target)
        is_dense = end - begin == target.numel() * target.itemsize
        is_one_device = target.device == source.device or "cpu" in (target.device.type, source.device.type)
        if is_same and is_plain and is_dense and is_one_device:
            _copy_bytes(target, source, end - begin, non_blocking)
            return target
        images = _Images()
        host_source = images.of(source) if source.device.type == "cuda" else source
        if target.device.type != "cuda":
            return target.copy_(host_source)
        with torch.cuda.device(target.device):
            _write(target, images.of(target).copy_(host_source))
        return target


def _copy_bytes(target: torch.Tensor, source: torch.Tensor, size_bytes: int, non_blocking: bool) -> None:
    device = target.device if target.device.type == "cuda" else source.device
    with torch.cuda.device(device):
        stream = torch.cuda.current_stream(device)
        result = _runtime().cudaMemcpyAsync(
            ctypes.c_void_p(target.data_ptr()), ctypes.c_void_p(source.data_ptr()), ctypes.c_size_t(size_bytes), 4,
            ctypes.c_void_p(stream.cuda_stream),
        )  # fmt: skip
        if result != 0:
            raise RuntimeError(f"CUDA error: {result}")
        if target.device != source.device:
            host = target if target.device.type == "cpu" else source
            if not (non_blocking and host.is_pinned()):
                stream.synchronize()
                return
            # torch's own copy tells the allocator of pinned memory, which then waits for the stream before it gives
            # the memory to others. Nothing of that can be called from here: so the memory is kept until then.
            with _lock:
                _copied[:] = [(event, memory) for event, memory in _copied if not event.query()]
                _copied.append((stream.record_event(), host.untyped_storage()))
