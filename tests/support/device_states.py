"""States on CUDA devices, and their training, on a machine without one: over the double of the driver.

Tensors on "cuda" cannot be made by a torch without CUDA, but storages can, and saving knows nothing else. What training
does on the device, `Stage.kernel` does: it changes memory when its stream comes to it.
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from support.cuda_double import CudaDouble, checked_double, cuda_storage

from fastpersist import _native
from fastpersist.loading import unpickle
from fastpersist.saving.ownership import Owners, Ownership
from fastpersist.saving.sources import Holders
from fastpersist.transfer import cuda as torch_cuda

STEP_US = 200
CHUNK_BYTES = 1 << 16
RING_CHUNKS = 8

_new_ring_chunks = itertools.count(RING_CHUNKS + 1)  # rings are of the process, and there is one for each size


class Stage:
    """The devices of a test, and the caller's current stream on each."""

    def __init__(self, cuda: CudaDouble, patch: pytest.MonkeyPatch) -> None:
        self.cuda = cuda
        self._patch = patch
        self._streams: dict[int, int] = {}
        self._in_kernels: list[torch.UntypedStorage] = []
        patch.setattr(torch_cuda, "caller_stream", self.stream)

    def stream(self, ordinal: int = 0) -> int:
        """Return the caller's current stream of a device."""
        if ordinal not in self._streams:
            self._streams[ordinal] = self.cuda.stream_new(ordinal)
        return self._streams[ordinal]

    def switch_stream(self, ordinal: int = 0) -> None:
        """Make another stream the current one."""
        self._streams[ordinal] = self.cuda.stream_new(ordinal)

    def kernel(self, storage: torch.UntypedStorage, value: int) -> None:
        """Give the current stream work that sets every byte of a storage."""
        ordinal = storage.device.index
        self._in_kernels.append(storage)  # an allocator would give its memory out again in the order of the stream
        self.cuda.stream_add_work(self.stream(ordinal), STEP_US, storage.data_ptr(), value, storage.nbytes())

    def end(self) -> None:
        """Let all kernels end."""
        self.cuda.hold_copies(-1)
        self.cuda.synchronize()
        self._in_kernels.clear()

    def own(self, storages: Mapping[str, torch.UntypedStorage], holder: torch.Tensor) -> None:
        """Let optimizers own these storages, by a tensor that stands for their parameters."""

        def look(_owners: Owners) -> Ownership:
            keys = [storage._cdata for storage in storages.values()]
            return Ownership(Holders([holder] * len(keys), keys), Holders([], []), "")

        self._patch.setattr(Owners, "look", look)

    def allow_loading(self) -> None:
        """Let loading allocate on "cuda", as a torch with CUDA would."""
        new_storage = unpickle.new_storage

        def allocate(size_bytes: int, device: torch.device) -> torch.UntypedStorage:
            if device.type != "cuda":
                return new_storage(size_bytes, device)
            return cuda_storage(bytes(size_bytes), device.index or 0)

        self._patch.setattr(unpickle, "new_storage", allocate)
        self._patch.setattr(unpickle, "_device_for", torch.device)


@contextmanager
def device_stage(patch: pytest.MonkeyPatch) -> Iterator[Stage]:
    """Give a test devices, a small ring and small chunks; misuse of the driver fails it."""
    patch.setenv("FASTPERSIST_CHUNK_BYTES", str(CHUNK_BYTES))
    patch.setenv("FASTPERSIST_RING_BYTES", str(RING_CHUNKS * CHUNK_BYTES))
    with checked_double() as cuda:
        stage = Stage(cuda, patch)
        yield stage
        stage.end()
        gc.collect()
        _native.empty_pinned_cache()  # no later test's


def use_new_ring(patch: pytest.MonkeyPatch) -> None:
    """Let saves and loads of a device_stage use a ring that nobody in this process has used, pinned or not."""
    patch.setenv("FASTPERSIST_RING_BYTES", str(next(_new_ring_chunks) * CHUNK_BYTES))


@contextmanager
def grace(duration_s: float) -> Iterator[None]:
    """Let who gives up wait so long for what a device does not end."""
    _native.set_device_grace_s(duration_s)
    try:
        yield
    finally:
        _native.set_device_grace_s(10)


def random_bytes(size_bytes: int, seed: int) -> torch.Tensor:
    """Return uint8 values, other ones for each seed."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (size_bytes,), dtype=torch.uint8, generator=generator)


def device_state(sizes_bytes: list[int], device: int = 0) -> tuple[dict[str, torch.UntypedStorage], dict[str, bytes]]:
    """Return storages on a device, by name, and the bytes in them."""
    contents = {f"s{index}": random_bytes(size, index).numpy().tobytes() for index, size in enumerate(sizes_bytes)}
    return {name: cuda_storage(data, device) for name, data in contents.items()}, contents


def bytes_in(loaded: Mapping[str, Any]) -> dict[str, bytes]:
    """Return the bytes of all storages in what was loaded."""
    found = {}
    for name, value in loaded.items():
        storage = value._untyped_storage if isinstance(value, torch.storage.TypedStorage) else value
        if isinstance(storage, torch.UntypedStorage):
            view = torch.empty(0, dtype=torch.uint8).set_(storage)
            found[name] = view.numpy().tobytes()
    return found


def packed_state(stage: Stage, sizes_bytes: list[int], gap_bytes: int = 512) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Return storages that lie in one allocation, as torch's allocator places small tensors, and the bytes in them."""
    place = 0
    places = []
    for size in sizes_bytes:
        places.append(place)
        place += -(-size // gap_bytes) * gap_bytes
    base = stage.cuda.alloc(max(place, 1), 0)
    state, contents = {}, {}
    for index, (size, start) in enumerate(zip(sizes_bytes, places, strict=True)):
        contents[f"s{index}"] = random_bytes(size, index).numpy().tobytes()
        stage.cuda.write(base + start, contents[f"s{index}"])
        state[f"s{index}"] = torch._C._construct_storage_from_data_pointer(base + start, torch.device("cuda", 0), size)
    return state, contents
