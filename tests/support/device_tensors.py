"""Tensors on "cuda" over the double of the driver, for a torch that has no CUDA: it views them, and moves no byte.

Such a torch makes storages in memory of the double (`cuda_storage`), but no tensors of them. By DLPack it does.
"""

from __future__ import annotations

import ctypes
import weakref
from typing import Any, cast

import pytest
import torch
from support.cuda_double import cuda_double

_CUDA = 2  # kDLCUDA
_UNSIGNED = 1  # kDLUInt


class _Device(ctypes.Structure):
    _fields_ = (("kind", ctypes.c_int32), ("ordinal", ctypes.c_int32))


class _Type(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("dim_count", ctypes.c_int32),
        ("type", _Type),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Managed(ctypes.Structure):
    """A DLManagedTensor: https://dmlc.github.io/dlpack/latest/c_api.html."""

    _fields_ = (("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


_managed: list[_Managed] = []  # for ever: torch looks for a deleter when it has let go of the storage

_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]


def cuda_tensor(
    data: bytes | torch.Tensor, device: int = 0, *, dtype: torch.dtype = torch.uint8, shifted_bytes: int = 0
) -> torch.Tensor:
    """Return a tensor of one dimension on "cuda:<device>" that holds the bytes, in memory that lives as long as it.

    Args:
        data: The bytes, or a tensor on the CPU whose bytes to take.
        device: The ordinal of the device.
        dtype: The dtype of the elements.
        shifted_bytes: The offset in its memory at which the tensor begins.
    """
    if isinstance(data, torch.Tensor):
        data = data.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    double = cuda_double()
    base = double.alloc(max(len(data), 1) + shifted_bytes, device)
    double.write(base + shifted_bytes, data)
    shape = (ctypes.c_int64 * 1)(len(data))
    managed = _Managed(
        _Tensor(base + shifted_bytes, _Device(_CUDA, device), 1, _Type(_UNSIGNED, 8, 1), shape, None, 0), None, None
    )
    capsule = _new_capsule(ctypes.addressof(managed), b"dltensor", None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "_lazy_init", lambda: None)  # there is none
        tensor = cast(torch.Tensor, cast(Any, torch)._C._from_dlpack(capsule))
    _managed.append(managed)
    weakref.finalize(tensor.untyped_storage(), double.free, base).atexit = False
    return tensor.view(dtype)


def bytes_on_device(tensor: torch.Tensor) -> bytes:
    """Return what a tensor's memory on its device holds now; no stream is waited for."""
    return cuda_double().read(tensor.data_ptr(), tensor.nbytes)
