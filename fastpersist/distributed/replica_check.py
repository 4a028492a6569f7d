"""Finds the storages of a state that are replicas, and checks that the ranks really hold the same bytes.

Data-parallel ranks agree on parameters and optimizer state, but not on everything that is saved. Each writer writes a
part of a replica, so ranks that differ would produce a mixture that no rank holds. So the ranks first compare samples
of each such storage, or all of its bytes.
"""

from __future__ import annotations

import ctypes
import os
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fastpersist import _native
from fastpersist.distributed.partition import CUT_BYTES_MIN
from fastpersist.errors import CoordinationError
from fastpersist.formats.byte_ranges import Extent
from fastpersist.saving.containers import Container
from fastpersist.saving.ownership import Ownership
from fastpersist.saving.sources import Source
from fastpersist.transfer.tensor_memory import byte_tensor
from fastpersist.transfer.writer import Pieces, Writer

__all__ = ["bytes_of", "difference", "host_bytes", "replicas_in", "replicas_of", "sample_crcs", "sums_of"]

_SAMPLE_COUNT = 4
_SAMPLE_BYTES = 64
"""A sample is this many bytes at this many places, spread over a tensor of any size."""

_SHOWN_COUNT = 5


def replicas_of(container: Container) -> list[int]:
    """Return which sources of a file that is saved by `fp.save` are cut, in file order: the large ones."""
    return [index for index, size in enumerate(container.sources.sizes_bytes) if size >= CUT_BYTES_MIN]


def replicas_in(container: Container, ownership: Ownership | None) -> list[int]:
    """Return which sources of a training state are cut: the large ones that an optimizer owns, or that are constant.

    Whether they can be written without a copy does not matter: that may differ from rank to rank.
    """
    if ownership is None:
        return []
    owned = {*ownership.stable.held, *ownership.constant.held}
    return [index for index in replicas_of(container) if container.sources.storages[index]._cdata in owned]


def sums_of(
    container: Container, cut: Sequence[int], interiors: Sequence[Extent], *, whole: bool
) -> Callable[[], list[int]]:
    """Sum up each cut source: its length, dtypes and interior, and samples of its bytes or all of them.

    Returns:
        A function that returns the sums of the bytes as they are now; it waits for devices. With `whole`, this function
        waits for them already.
    """
    of_data = (_crcs_of if whole else _sample_crcs_of)([container.sources[source] for source in cut])
    described = []
    dtypes_of: dict[int, set[str]] = {source: set() for source in cut}
    for tensor, source in zip(*container.holders, strict=True):
        if source in dtypes_of:
            dtypes_of[source].add(str(tensor.dtype))
    for source, interior in zip(cut, interiors, strict=True):
        dtypes = sorted(dtypes_of[source])
        described.append(repr((container.sources[source].size_bytes, dtypes, tuple(interior))).encode())
    return lambda: [zlib.crc32(text, crc) for text, crc in zip(described, of_data(), strict=True)]


def _sample_crcs_of(sources: Sequence[Source]) -> Callable[[], list[int]]:
    places = [(source, source.offset_bytes, source.offset_bytes + source.size_bytes) for source in sources]
    return sample_crcs([byte_tensor(source.storage)[start:end] for source, start, end in places])


def sample_crcs(tensors: Sequence[torch.Tensor]) -> Callable[[], list[int]]:
    """Take a CRC of the samples of each tensor as they are now; of short tensors, of all bytes.

    Args:
        tensors: Contiguous, in host memory or on devices. This does not wait for devices.

    Returns:
        A function that returns the CRCs, in the same order; it waits for devices.
    """
    crcs = [0] * len(tensors)
    on_devices: dict[tuple[torch.device, torch.Size], list[tuple[int, torch.Tensor]]] = {}
    for index, tensor in enumerate(tensors):
        if tensor.device.type == "cpu":
            crcs[index] = _sample_crc(tensor)
        else:
            samples = _samples_in(tensor)
            on_devices.setdefault((tensor.device, samples.shape), []).append((index, samples))
    copies = [_crcs_on_host(parts) for parts in on_devices.values()]

    def get() -> list[int]:
        for get_crcs in copies:
            for index, crc in get_crcs().items():
                crcs[index] = crc
        return list(crcs)

    return get


def _step_bytes(size_bytes: int) -> int:
    """Return how far the samples of a tensor are apart; 0 if all of it is taken."""
    if size_bytes <= _SAMPLE_COUNT * _SAMPLE_BYTES:
        return 0
    return (size_bytes - _SAMPLE_BYTES) // (_SAMPLE_COUNT - 1)


def _sample_crc(tensor: torch.Tensor) -> int:
    """Return the CRC of the samples of a contiguous tensor in host memory."""
    address, size_bytes = tensor.data_ptr(), tensor.nbytes
    step_bytes = _step_bytes(size_bytes)
    if not step_bytes:
        return zlib.crc32(ctypes.string_at(address, size_bytes))
    places = range(address, address + _SAMPLE_COUNT * step_bytes, step_bytes)
    return zlib.crc32(b"".join([ctypes.string_at(place, _SAMPLE_BYTES) for place in places]))


def _samples_in(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same bytes of a contiguous tensor on a device; a view."""
    flat = tensor.detach().view(-1).view(torch.uint8)
    step_bytes = _step_bytes(flat.numel())
    shape, strides = ((_SAMPLE_COUNT, _SAMPLE_BYTES), (step_bytes, 1)) if step_bytes else ((1, flat.numel()), (1, 1))
    return flat.as_strided(shape, strides, flat.storage_offset())


def _crcs_on_host(parts: Sequence[tuple[int, torch.Tensor]]) -> Callable[[], dict[int, int]]:
    """Copy samples of one shape from one device; return a function that returns the CRC of each, by its index."""
    size_bytes = parts[0][1].numel()
    copied = _copied_to_host([samples for _, samples in parts])

    def get() -> dict[int, int]:
        data = copied()
        places = range(0, len(data), size_bytes)
        return {index: zlib.crc32(data[at : at + size_bytes]) for (index, _), at in zip(parts, places, strict=True)}

    return get


def _copied_to_host(parts: Sequence[torch.Tensor]) -> Callable[[], bytes]:
    """Join and copy bytes of one device, in the order of the caller's stream; return a function that waits for them."""
    joined = torch.cat(list(parts))
    on_cuda = joined.device.type == "cuda"
    copied = joined.to("cpu", non_blocking=on_cuda)
    done = torch.cuda.current_stream(joined.device).record_event() if on_cuda else None

    def get() -> bytes:
        if done is not None:
            done.synchronize()
        return ctypes.string_at(copied.data_ptr(), copied.nbytes)

    return get


def _crcs_of(sources: Sequence[Source]) -> Callable[[], list[int]]:
    """Take a CRC of all bytes of each source; those on devices pass through the ring to /dev/null."""
    crcs: dict[int, int] = {}
    pieces = Pieces()
    slots: list[int] = []
    for index, source in enumerate(sources):
        if source.storage.device.type != "cpu":
            pieces.add_storage(
                source.storage, len(slots), offset_bytes=source.offset_bytes, size_bytes=source.size_bytes
            )
            slots.append(index)
        else:
            crcs[index] = _native.crc32(host_bytes(source, 0, source.size_bytes))
    if slots:
        with open(os.devnull, "r+b", buffering=0) as nowhere:
            with Writer(nowhere.fileno(), os.devnull, engine="null") as writer:
                writer.append(pieces)
                crcs.update(zip(slots, writer.crcs(len(slots)), strict=True))
    return lambda: [crcs[index] for index in range(len(sources))]


def bytes_of(ranges: Sequence[tuple[Source, int, int]]) -> Callable[[], list[bytes]]:
    """Take short ranges of bytes as they are now, without waiting for a device.

    Args:
        ranges: The ranges, each as the source, the first byte in it, and the length.

    Returns:
        A function that returns the bytes, in the same order; it waits for devices.
    """
    found: dict[int, bytes] = {}
    on_devices: dict[torch.device, list[tuple[int, torch.Tensor]]] = {}
    for index, (source, from_bytes, size_bytes) in enumerate(ranges):
        if source.storage.device.type == "cpu":
            found[index] = bytes(host_bytes(source, from_bytes, size_bytes))
        else:
            start = source.offset_bytes + from_bytes
            taken = byte_tensor(source.storage)[start : start + size_bytes]
            on_devices.setdefault(taken.device, []).append((index, taken))
    copies = [(parts, _copied_to_host([taken for _, taken in parts])) for parts in on_devices.values()]

    def get() -> list[bytes]:
        for parts, copied in copies:
            data, start = copied(), 0
            for index, part in parts:
                found[index] = data[start : start + part.numel()]
                start += part.numel()
        copies.clear()
        return [found[index] for index in range(len(ranges))]

    return get


def host_bytes(source: Source, from_bytes: int, size_bytes: int) -> Any:
    """Return bytes of a source in host memory as a buffer, without a copy, valid while its storage lives."""
    address = source.storage.data_ptr() + source.offset_bytes + from_bytes
    return (ctypes.c_char * size_bytes).from_address(address)


def difference(described: Sequence[tuple[Any, list[int]]], names_of: Callable[[int], list[str]]) -> CoordinationError:
    """Say what the ranks hold differently.

    Args:
        described: For each rank, what was compared, and the sum of each cut source.
        names_of: Names the tensors of a cut source, by its position.
    """
    mode, own = described[0]
    odd = [rank for rank, (other, sums) in enumerate(described) if other != mode or len(sums) != len(own)]
    if odd:
        counts = ", ".join(
            f"rank {rank} {len(described[rank][1])} ({described[rank][0]})" for rank in odd[:_SHOWN_COUNT]
        )
        return CoordinationError(
            f"the ranks do not save the same: of storages of 1 MiB or more that all hold alike, rank 0 has {len(own)} "
            f"({mode} compared), {counts}. All ranks pass the same kind of object and the same options"
        )
    where: dict[tuple[int, ...], list[str]] = {}
    for position, total in enumerate(own):
        ranks = tuple(rank for rank, (_, sums) in enumerate(described) if sums[position] != total)
        if ranks:
            where.setdefault(ranks, []).append(", ".join(names_of(position)) or f"storage {position}")
    told = []
    for ranks, names in where.items():
        more = f" and {len(names) - _SHOWN_COUNT} more" if len(names) > _SHOWN_COUNT else ""
        on = ", ".join(map(str, ranks))
        told.append(f"{'; '.join(names[:_SHOWN_COUNT])}{more} on {'rank' if len(ranks) == 1 else 'ranks'} {on}")
    return CoordinationError(
        f"replicas differ from those of rank 0: {'; '.join(told)}. Nothing was published. Data-parallel ranks hold the "
        "same parameters and optimizer state; leave state that differs out, or pass it as rank_state"
    )
