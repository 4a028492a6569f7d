"""Tells on which device storages lie, and orders the native side's copies after and before torch's CUDA streams.

The native side talks to the driver, not to torch: it gets ordinals, addresses and stream handles. Its copies run on
streams of its own. They come after the work that torch's current stream has at a save or load, and before the work that
the current stream gets after a gate; so no thread waits for the device. Torch itself copies from and to other devices
(ROCm, XPU, MPS), in ring-sized pieces for `writer` and `reader`.
"""

from __future__ import annotations

import logging

import torch

from fastpersist import _native

__all__ = [
    "caller_stream",
    "follow_caller",
    "is_host_memory",
    "ordinal_of",
    "tell_of_gathers",
    "tell_of_paranoia",
    "tell_of_pinning",
    "why_not_native",
]

_log = logging.getLogger("fastpersist")
_HOST = torch.device("cpu")  # its storages have no index; to compare costs a quarter of asking for the type

_told: set[str] = set()  # warnings that were logged, each once


def why_not_native() -> str:
    """Return why CUDA tensors are copied by torch and not by the native side, in one sentence; "" when they are not.

    This initialises the driver, so call it only if there are CUDA tensors.
    """
    if torch.version.hip is not None:
        return "this torch is built for ROCm"
    return _native.cuda_why_not()


def is_host_memory(storage: torch.UntypedStorage) -> bool:
    """Tell whether the native side can read the storage's bytes at its address."""
    return storage.device == _HOST


def ordinal_of(storage: torch.UntypedStorage) -> int | None:
    """Return the ordinal of the CUDA device of a storage; None if it is on no such device, or torch has to copy it."""
    device = storage.device
    if device.type != "cuda":
        return None
    if why_not := why_not_native():
        _tell(f"CUDA tensors are copied by torch, one piece after the other: {why_not}")
        return None
    return 0 if device.index is None else device.index


def caller_stream(ordinal: int) -> int:
    """Return the calling thread's current stream of a device, as the driver knows it."""
    return int(torch.cuda.current_stream(ordinal).cuda_stream)


def follow_caller(ordinal: int, *, to_host: bool) -> None:
    """Let copies that start from now on come after the work that the calling thread's current stream has now.

    Args:
        ordinal: The ordinal of the device.
        to_host: Whether the copies are from the device; else they are to it.

    Raises:
        UnsupportedError: That stream is being captured into a CUDA graph.
        DeviceError: The device refuses.
    """
    _native.follow_caller(ordinal, caller_stream(ordinal), to_host)


def tell_of_pinning() -> None:
    """Log, once, that host memory could not be pinned: copies are right then, but slower."""
    if why_not := _native.why_not_pinned():
        _tell(f"copies from and to the device use memory that is not pinned, and are slower: {why_not}", about="pins")


def tell_of_gathers(error: Exception) -> None:
    """Log, once, why devices do not gather cached rows: the host does, which is slower."""
    _tell(f"the host gathers cached rows, since the device does not: {error}", about="gathers")


def tell_of_paranoia() -> None:
    """Log, once, that `paranoid` looks at host memory only."""
    _tell("paranoid=True compares samples of what lies in host memory; tensors on a device are not looked at")


def _tell(text: str, about: str | None = None) -> None:
    if (about or text) not in _told:
        _told.add(about or text)
        _log.warning("%s", text)
