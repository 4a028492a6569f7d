"""Capture the tensors of a state dict that this rank holds, before the ranks have planned which of them it writes.

All ranks plan together which rank writes what. Planning takes a while, and training does not wait for it. So
`saving.capture` captures everything that this rank holds: tensors of an optimizer stay in place until the next step,
tensors that may change at once are copied. When the plan is known, `settle` drops the bytes that other ranks write;
`part_writer` writes the rest.
"""

from __future__ import annotations

import bisect
import copy
import itertools
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from fastpersist.dcp.blobs import is_plain
from fastpersist.errors import ConfigError, InternalError, UnsupportedError
from fastpersist.saving.capture import Capture
from fastpersist.saving.ownership import Owners, Ownership
from fastpersist.saving.sources import Holders, Source, SourceTable
from fastpersist.transfer import cuda
from fastpersist.transfer.arena import Arena
from fastpersist.transfer.garbage import no_garbage_collection
from fastpersist.transfer.tensor_memory import PLAIN_TYPES
from fastpersist.transfer.writer import Pieces

__all__ = ["Piece", "ShardedCapture"]

Piece: TypeAlias = tuple[int, int]
"""A source of a snapshot, and how many bytes of it are written."""


class ShardedCapture:
    """The bytes of this rank's tensors in a state dict, from save() until they are written.

    Its construction only finds the tensors; `capture` then copies, holds back steps and raises as for any save. One
    thread saves, one writes.

    Args:
        state: Nested dicts and lists of tensors (plain, DTensor, ShardedTensor) and objects. Objects are copied at
            once, as are tensors of other kinds, and those that are not contiguous.
        owners: The owners of stable storages.
        arena: Host memory for copied bytes.
        paranoid: The option of `capture`.
        on_gate: The option of `capture`.
        look: The option of `capture`.
        piece_bytes: The most bytes of one source; a longer tensor becomes several. None: each tensor is one source.

    Attributes:
        state: The state to plan and resolve items from: the same tensors, and copies of everything else.
        capture: The capture of the tensors: it waits, holds back steps, and raises.
        snapshot: The sources that the file is written from.
        size_bytes: The bytes of all tensors.
    """

    @no_garbage_collection()
    def __init__(
        self,
        state: object,
        owners: Owners,
        arena: Arena,
        *,
        paranoid: bool = False,
        on_gate: Callable[[float], None] | None = None,
        look: Callable[[], Ownership] | None = None,
        piece_bytes: int | None = None,
    ) -> None:
        self._held = _Held(piece_bytes)
        self._memo: dict[int, Any] = {}  # of deepcopy: what is shared stays shared
        self.state: Any = self._copied(state, "")
        self.capture = Capture(owners, arena, paranoid=paranoid, on_gate=on_gate, look=look)
        self.snapshot = self.capture.add(self._held)
        for ordinal in self._held.private_devices():  # their copies were made in the stream of this thread
            cuda.follow_caller(ordinal, to_host=True)
        self.size_bytes = sum(self._held.sources.sizes_bytes)
        self._resolved: list[_Resolved | None] = []

    def settle(self, items: Sequence[WriteItem], planner: SavePlanner) -> None:
        """Keep what this rank writes, and drop the rest; called once, before anything is written.

        Args:
            items: The items that this rank writes, in the order in which they are written.
            planner: Resolves the items to the tensors of `state`, or to rows of these.

        Raises:
            UnsupportedError: The planner makes new tensors, which would be computed while training changes the state.
        """
        unclaimed = self._held.by_place()
        claimed: set[int] = set()
        for item in items:
            if item.type == WriteItemType.BYTE_IO:
                self._resolved.append(None)
                continue
            data = planner.resolve_data(item)
            if not isinstance(data, torch.Tensor):
                raise UnsupportedError(f"{item.index.fqn!r} is planned as a tensor, and the planner gives bytes")
            data = data.detach()
            pieces: list[Piece] = []
            if is_plain(data) and data.numel() and not self._held.is_private(data):
                pieces = self._narrow(*unclaimed.take(data, item), data.nbytes)
                claimed.update(source for source, _ in pieces)
            self._resolved.append(_Resolved(data, pieces))
        for source in range(len(self._held.sources)):
            if source not in claimed:
                self.snapshot.narrow(source, 0, 0)

    def tensor_of(self, slot: int) -> torch.Tensor | None:
        """Return the tensor of an item; None for bytes. Its values may have changed by now.

        Args:
            slot: The item's place among those that were settled.
        """
        resolved = self._resolved[slot]
        return None if resolved is None else resolved.tensor

    def add_to(self, pieces: Pieces, slot: int) -> bool:
        """Have the captured bytes of an item's tensor written, with their CRC into the slot of its number.

        Returns:
            False if they are not captured: the tensor is a private copy, which does not change.
        """
        captured = self.pieces_of(slot)
        for source, size_bytes in captured:
            pieces.add_captured(self.snapshot, source, size_bytes, slot)
        return bool(captured)

    def pieces_of(self, slot: int) -> Sequence[Piece]:
        """Return the sources that have the bytes of an item, in order; none if it is a private copy."""
        resolved = self._resolved[slot]
        return () if resolved is None else resolved.pieces

    def _narrow(self, tensor: _HeldTensor, from_bytes: int, size_bytes: int) -> list[Piece]:
        """Keep only these bytes of a tensor; return the sources that have them, and how many bytes of each."""
        found, until_bytes, piece_bytes = [], from_bytes + size_bytes, tensor.piece_bytes
        for number in range(from_bytes // piece_bytes, -(-until_bytes // piece_bytes)):
            at = number * piece_bytes
            low, high = max(0, from_bytes - at), min(piece_bytes, until_bytes - at)
            self.snapshot.narrow(tensor.first_source + number, low, high)
            found.append((tensor.first_source + number, high - low))
        return found

    # --- what is captured

    def _copied(self, value: object, name: str) -> Any:
        if isinstance(value, torch.Tensor):
            return self._hold(value, name)
        # DCP flattens mappings and lists of any type, and does not keep the type. It pickles everything else, later.
        if isinstance(value, Mapping) and value:
            kind: Any = type(value) if type(value) in (dict, OrderedDict) else dict
            return kind((key, self._copied(inner, _below(name, key))) for key, inner in value.items())
        if isinstance(value, list):
            return [self._copied(inner, _below(name, index)) for index, inner in enumerate(value)]
        known_count = len(self._memo)
        try:
            own = copy.deepcopy(value, self._memo)
        except Exception as error:
            raise UnsupportedError(f"{name!r}, a {type(value).__name__}, cannot be copied: {error}") from error
        if any(map(_is_shard, itertools.islice(self._memo.values(), known_count, None))):
            raise ConfigError(
                f"{name!r}, a {type(value).__name__}, has shards in it, of which only rank 0's would be saved: put its "
                "tensors into a dict or a list, or save the state_dict() of a module"
            )
        return own

    def _hold(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        """Return a tensor of which all bytes are captured, or are a private copy."""
        locals_ = _local_tensors(tensor)
        if locals_ is None:
            try:  # most kinds of sparse tensors have no deepcopy
                is_known = type(tensor) in (torch.Tensor, torch.nn.Parameter)
                return tensor.detach().clone() if is_known else copy.deepcopy(tensor.detach(), self._memo)
            except Exception as error:
                raise UnsupportedError(f"{name!r}, a {type(tensor).__name__}, cannot be copied: {error}") from error
        if all(_is_whole(local) for local in locals_):
            for local in locals_:
                self._held.add(local, tensor, name)
            return tensor
        if isinstance(tensor, DTensor):
            own = _own_copy(tensor._local_tensor)
            self._held.add_private(own)
            return DTensor.from_local(
                own,
                tensor.device_mesh,
                tensor.placements,
                run_check=False,
                shape=tensor.size(),
                stride=tensor.stride(),
            )
        own = copy.deepcopy(tensor.detach(), self._memo) if len(locals_) > 1 else _own_copy(tensor)
        for local in _local_tensors(own) or []:
            self._held.add_private(local)
        return own


class _Resolved:
    """The tensor of an item, and the sources that have its bytes; no sources for a private copy."""

    __slots__ = ("pieces", "tensor")

    def __init__(self, tensor: torch.Tensor, pieces: list[Piece]) -> None:
        self.tensor = tensor
        self.pieces = pieces


class _HeldTensor(NamedTuple):
    """Where a tensor lies, and the sources into which it is cut: all of one length except the last."""

    address: int
    size_bytes: int
    first_source: int
    piece_bytes: int


class _Held:
    """The sources of a state dict, for `saving.capture`: one or several for each local tensor, in the dict's order."""

    def __init__(self, piece_bytes: int | None) -> None:
        self._piece_bytes = piece_bytes
        self.sources = SourceTable([], [], [])
        self.holders = Holders([], [])
        self.wrappers: list[torch.Tensor] = []
        self._names: list[str] = []
        self._tensors: list[_HeldTensor] = []
        self._private: set[int] = set()
        self._kept: list[torch.Tensor] = []

    def names_of(self, source: int) -> list[str]:
        """Return the names of the tensors in a source."""
        return [self._names[source]]

    def add(self, local: torch.Tensor, holder: torch.Tensor, name: str) -> None:
        """Add the bytes of the tensor in which `holder` has its elements."""
        if not local.numel():
            return
        storage, size_bytes = local.untyped_storage(), local.nbytes
        piece_bytes = min(self._piece_bytes or size_bytes, size_bytes)
        self._tensors.append(_HeldTensor(local.data_ptr(), size_bytes, len(self.sources), piece_bytes))
        first_byte = int(local.storage_offset()) * local.element_size()
        for at in range(0, size_bytes, piece_bytes):
            if type(local) in PLAIN_TYPES:
                self.holders.add(local, len(self.sources))
            self.sources.append(Source(storage, first_byte + at, min(piece_bytes, size_bytes - at)))
            self._names.append(name)
        if holder is not local:
            self.wrappers.append(holder)

    def add_private(self, local: torch.Tensor) -> None:
        """Add a private copy of a tensor: it does not change, on any device."""
        self._private.add(local.untyped_storage()._cdata)
        self._kept.append(local)

    def private_devices(self) -> set[int]:
        """Return the CUDA devices of the copies."""
        ordinals = (cuda.ordinal_of(tensor.untyped_storage()) for tensor in self._kept)
        return {ordinal for ordinal in ordinals if ordinal is not None}

    def is_private(self, tensor: torch.Tensor) -> bool:
        """Tell whether a tensor is a private copy."""
        return tensor.untyped_storage()._cdata in self._private

    def by_place(self) -> _Unclaimed:
        """Return the tensors by their addresses; of those at one address, the shortest last."""
        return _Unclaimed(sorted(self._tensors, key=lambda held: (held.address, -held.size_bytes)))


class _Unclaimed:
    """The tensors that no item has taken yet. Of several tensors at one place, any one fits an item."""

    def __init__(self, places: list[_HeldTensor]) -> None:
        self._places = places
        self._addresses = [held.address for held in places]
        self._taken: set[int] = set()

    def take(self, tensor: torch.Tensor, item: WriteItem) -> tuple[_HeldTensor, int]:
        """Take a held tensor in which an item's tensor lies; return it, and the offset in it."""
        address = tensor.data_ptr()
        if tensor.is_contiguous():
            # The last one that begins at the address or before it, and is long enough. Others that overlap it begin
            # earlier, or are longer and belong to other items.
            for place in range(bisect.bisect_right(self._addresses, address) - 1, -1, -1):
                held = self._places[place]
                if place not in self._taken and address + tensor.nbytes <= held.address + held.size_bytes:
                    self._taken.add(place)
                    return held, address - held.address
        raise UnsupportedError(
            f"the planner makes a tensor of its own of {item.index.fqn!r}, or takes parts of it that do not lie "
            "together: in the background that would be of a state that has changed. Pass async_stager=DefaultStager() "
            "to dcp.async_save, or save with dcp.save"
        )


def _below(name: str, key: object) -> str:
    return f"{name}.{key}" if name else str(key)


def _is_shard(value: object) -> bool:
    """Tell whether this rank holds only a part of this tensor."""
    if isinstance(value, DTensor):
        return value.device_mesh.size() > 1 and not all(placement.is_replicate() for placement in value.placements)
    return isinstance(value, ShardedTensor)


def _local_tensors(tensor: torch.Tensor) -> list[torch.Tensor] | None:
    """Return this rank's tensors that hold the elements; None for a kind of tensor that is not known here."""
    if isinstance(tensor, DTensor):
        found = [tensor._local_tensor]
    elif isinstance(tensor, ShardedTensor):
        found = [shard.tensor for shard in tensor.local_shards()]
    else:
        found = [tensor]
    return found if all(is_plain(local) for local in found) else None


def _is_whole(local: torch.Tensor) -> bool:
    return local.is_contiguous() and not local.is_conj() and not local.is_neg()


def _own_copy(tensor: torch.Tensor) -> torch.Tensor:
    own = tensor.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    if not own.is_contiguous():
        raise InternalError("a contiguous copy of a tensor is not contiguous")
    return own
