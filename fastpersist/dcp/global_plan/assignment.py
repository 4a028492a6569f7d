"""Decides which rank writes what, from what all ranks hold. For thousands of ranks: equal ranks form one group.

- A chunk that only one rank holds is written by that rank.
- A chunk of 2 MiB or more that several ranks hold is cut along its first dimension, and each of them writes some rows.
- Other chunks that several ranks hold, and objects, lie in few files: the first of their holders writes them, until it
  has 64 MiB of such; then the next one. Larger ones go to the holder that has least to write.

The chunks must make up whole tensors; otherwise the plan is refused. An error names ranks that hold different tensors
under one name.
"""

from __future__ import annotations

import heapq
import math
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType

from fastpersist.dcp.coverage import is_covered
from fastpersist.dcp.global_plan.held_items import NO_SUM, HeldTensors
from fastpersist.dcp.plan_comparison import CUT_TENSOR_BYTES_MIN, two_under_one_name
from fastpersist.errors import CoordinationError, FormatError
from fastpersist.transfer.garbage import no_garbage_collection

__all__ = ["WHOLE", "Group", "Share", "WholePlan", "assign", "common_of"]

WHOLE = -1
"""In place of the first row of an item that is not cut."""

_CUT_BYTES_MIN = CUT_TENSOR_BYTES_MIN // 2
_PACKED_BYTES = 64 << 20
"""So many bytes of small replicas go into one file before the next holder's file is begun."""

_SHOWN_COUNT = 5


@dataclass(frozen=True)
class Group:
    """Ranks that hold the same tensors, with the same samples."""

    ranks: list[int]
    held: HeldTensors


@dataclass
class Share:
    """What one rank writes.

    Attributes:
        items: Numbers of the items of the rank's tensors, in order.
        first_rows: For each item, the first row of its chunk that is written; WHOLE for all of it.
        row_counts: For each item, the number of rows that are written.
        objects: The names of the objects that the rank writes.
    """

    items: array[int] = field(default_factory=lambda: array("I"))
    first_rows: array[int] = field(default_factory=lambda: array("q"))
    row_counts: array[int] = field(default_factory=lambda: array("q"))
    objects: list[str] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.items) + len(self.objects)


@dataclass(frozen=True)
class WholePlan:
    """What all ranks write; `kept_metadata` makes `.metadata` of it.

    Attributes:
        groups: The groups of ranks that hold the same tensors.
        shares: For each rank, what it writes.
        paths: The paths of all names, in the order of the state: those of the coordinator, then those of other ranks.
    """

    groups: list[Group]
    shares: list[Share]
    paths: dict[str, Any]

    def held_by(self) -> list[HeldTensors]:
        """Return by rank what it holds."""
        found: list[HeldTensors] = [self.groups[0].held] * len(self.shares)
        for group in self.groups:
            for rank in group.ranks:
                found[rank] = group.held
        return found


class _Chunks:
    """The chunks of all ranks, each once.

    Attributes:
        names: The names of the tensors.
        kinds: For each name, the kind of its items.
        name_of: For each chunk, the number of its name.
        first_holder: For each chunk: the first group that holds it, and the number of its item in that group.
        further_holders: For each chunk: every other group that holds it, with the number of its item there.
        bytes_of: For each chunk, its bytes.
    """

    def __init__(self, groups: Sequence[Group], objects: Sequence[Sequence[str]]) -> None:
        self.names: list[str] = []
        self.kinds: list[WriteItem] = []
        self.name_of = array("I")
        self.first_holder = array("I")
        self.further_holders: dict[int, list[tuple[int, int]]] = {}
        self.bytes_of = array("Q")
        self._first_ranks: list[int] = []  # by name
        self._groups = groups
        numbers: dict[str, int] = {}
        found: dict[tuple[int, tuple[int, ...]], int] = {}
        for number, group in enumerate(groups):
            self._add(number, group, numbers, found)
        for rank, names in enumerate(objects):
            for name in names:
                if name in numbers:
                    first = numbers[name]
                    raise _different(name, self.kinds[first], self._first_ranks[first], None, rank)

    def _add(
        self, number: int, group: Group, numbers: dict[str, int], found: dict[tuple[int, tuple[int, ...]], int]
    ) -> None:
        held, described = group.held, group.held.described
        own_names = [self._number_of(name, numbers) for name in described.names]
        essences = [_essence(kind) for kind in described.kinds]
        tensors: list[Any] = [kind.tensor_data for kind in described.kinds]
        item_bytes = [data.properties.dtype.itemsize for data in tensors]
        seen: dict[tuple[int, int], bool] = {}
        for item, (own_name, kind) in enumerate(zip(described.name_of, described.kind_of, strict=True)):
            name = own_names[own_name]
            if (name, kind) not in seen:
                seen[name, kind] = True
                self._note_kind(name, described.kinds[kind], essences[kind], group.ranks[0])
            offsets, lengths = held.place(item)
            chunk = found.setdefault((name, offsets), len(self.name_of))
            if chunk == len(self.name_of):
                self.name_of.append(name)
                self.first_holder.extend((number, item))
                self.bytes_of.append(math.prod(lengths) * item_bytes[kind])
                continue
            first = self.holder(chunk)
            if first[0] != number and lengths == self._groups[first[0]].held.place(first[1])[1]:
                self.further_holders.setdefault(chunk, []).append((number, item))
            elif all(lengths) and not self.bytes_of[chunk]:  # an empty chunk has this place, and no rank writes it
                self.further_holders.pop(chunk, None)
                self.first_holder[2 * chunk], self.first_holder[2 * chunk + 1] = number, item
                self.bytes_of[chunk] = math.prod(lengths) * item_bytes[kind]
            elif all(lengths):
                raise _not_whole([self.names[name]], "two chunks of it begin at the same place")

    def _number_of(self, name: str, numbers: dict[str, int]) -> int:
        number = numbers.setdefault(name, len(numbers))
        if number == len(self.names):
            self.names.append(name)
        return number

    def _note_kind(self, name: int, kind: WriteItem, essence: object, rank: int) -> None:
        while len(self.kinds) <= name:  # names of a group are numbered before its items are looked at
            self.kinds.append(kind)
            self._first_ranks.append(-1)
        if self._first_ranks[name] < 0:
            self.kinds[name], self._first_ranks[name] = kind, rank
        elif _essence(self.kinds[name]) != essence:
            raise _different(self.names[name], self.kinds[name], self._first_ranks[name], kind, rank)

    def holder(self, chunk: int) -> tuple[int, int]:
        """Return the first group that holds a chunk, and which item of it that is."""
        return self.first_holder[2 * chunk], self.first_holder[2 * chunk + 1]

    def holders(self, chunk: int) -> list[tuple[int, int]]:
        """Return all groups that hold a chunk, and which item of each it is."""
        return [self.holder(chunk), *self.further_holders.get(chunk, ())]

    def row_count(self, chunk: int) -> int:
        """Return the length of a chunk in its first dimension; 0 if it has none."""
        group, item = self.holder(chunk)
        lengths = self._groups[group].held.place(item)[1]
        return lengths[0] if lengths else 0

    def require_whole(self) -> None:
        """Refuse tensors whose chunks, each counted once, do not make the tensor."""
        chunks_of: list[list[int]] = [[] for _ in self.names]
        for chunk, name in enumerate(self.name_of):
            chunks_of[name].append(chunk)
        odd = [
            self.names[name]
            for name, chunks in enumerate(chunks_of)
            if not _makes(
                tuple(self.kinds[name].tensor_data.size),  # type: ignore[union-attr]
                [self._groups[group].held.place(item) for group, item in map(self.holder, chunks)],
            )
        ]
        if odd:
            raise _not_whole(odd, "their chunks are more or less than the tensor")


@no_garbage_collection()
def assign(groups: Sequence[Group], objects: Sequence[Sequence[str]], paths: Iterable[Mapping[str, Any]]) -> WholePlan:
    """Decide who writes what.

    Args:
        groups: The groups of ranks; each rank is in one of them.
        objects: For each rank, the names of what is no tensor.
        paths: For each rank, the paths of its names; those of the coordinator come first.

    Raises:
        CoordinationError: Ranks hold one name differently, or what they hold makes no whole tensors.
    """
    chunks = _Chunks(groups, objects)
    chunks.require_whole()
    rank_count = len(objects)
    loads = _Loads(groups, rank_count)
    writes: list[list[tuple[int, int, int]]] = [[] for _ in range(rank_count)]  # item, first row, row count
    shared = []
    for chunk, size_bytes in enumerate(chunks.bytes_of):
        ranks = loads.ranks_of(chunks, chunk)
        if len(ranks) == 1:
            loads.add(ranks[0], size_bytes)
            writes[ranks[0]].append((chunks.holder(chunk)[1], WHOLE, 0))
        else:
            shared.append(chunk)
    for chunk in sorted(shared, key=lambda chunk: -chunks.bytes_of[chunk]):
        _assign_shared(chunks, chunk, loads, writes)
    shares = []
    for own in writes:
        own.sort()
        share = Share()
        for item, first_row, row_count in own:
            share.items.append(item)
            share.first_rows.append(first_row)
            share.row_counts.append(row_count)
        shares.append(share)
    written: set[str] = set()
    for share, names in zip(shares, objects, strict=True):  # the first holder writes an object
        share.objects = [name for name in names if name not in written]
        written.update(names)
    ordered: dict[str, Any] = {}
    for own_paths in paths:
        for name, path in own_paths.items():
            ordered.setdefault(name, path)
    return WholePlan(list(groups), shares, ordered)


def _assign_shared(chunks: _Chunks, chunk: int, loads: _Loads, writes: list[list[tuple[int, int, int]]]) -> None:
    """Assign a chunk that several ranks hold."""
    size_bytes = chunks.bytes_of[chunk]
    holders = chunks.holders(chunk)
    row_count = chunks.row_count(chunk)
    part_count = min(loads.holder_count(holders), size_bytes // _CUT_BYTES_MIN, row_count)
    if part_count >= 2:
        bounds = [row_count * part // part_count for part in range(part_count + 1)]
        for part, rank in enumerate(loads.least(holders, part_count)):
            loads.add(rank, size_bytes // part_count)
            item = loads.item_of(rank, holders)
            writes[rank].append((item, bounds[part], bounds[part + 1] - bounds[part]))
        return
    rank = loads.packing(holders, size_bytes) if size_bytes < _CUT_BYTES_MIN else loads.least(holders, 1)[0]
    loads.add(rank, size_bytes)
    writes[rank].append((loads.item_of(rank, holders), WHOLE, 0))


class _Loads:
    """How much each rank writes, and which of several ranks has least to write."""

    def __init__(self, groups: Sequence[Group], rank_count: int) -> None:
        self._groups = groups
        self._bytes = [0] * rank_count
        self._group_of = [0] * rank_count
        for number, group in enumerate(groups):
            for rank in group.ranks:
                self._group_of[rank] = number
        self._ranks: dict[tuple[int, ...], list[int]] = {}  # by the groups that hold a chunk
        self._heaps: dict[tuple[int, ...], list[tuple[int, int]]] = {}
        self._packed: dict[tuple[int, ...], tuple[int, int]] = {}  # who takes small replicas, and how much it has

    def ranks_of(self, chunks: _Chunks, chunk: int) -> list[int]:
        """Return the ranks that hold a chunk."""
        return self._ranks_in(tuple(number for number, _ in chunks.holders(chunk)))

    def _ranks_in(self, key: tuple[int, ...]) -> list[int]:
        found = self._ranks.get(key)
        if found is None:
            found = self._ranks[key] = sorted(rank for number in key for rank in self._groups[number].ranks)
        return found

    def holder_count(self, holders: Sequence[tuple[int, int]]) -> int:
        """Return how many ranks hold a chunk."""
        return sum(len(self._groups[number].ranks) for number, _ in holders)

    def item_of(self, rank: int, holders: Sequence[tuple[int, int]]) -> int:
        """Return which of a rank's items a chunk is."""
        own = self._group_of[rank]
        return next(item for number, item in holders if number == own)

    def add(self, rank: int, size_bytes: int) -> None:
        """Count what a rank writes."""
        self._bytes[rank] += size_bytes

    def least(self, holders: Sequence[tuple[int, int]], count: int) -> list[int]:
        """Return those of the holders that have least to write, the least first."""
        key = tuple(number for number, _ in holders)
        heap = self._heaps.get(key)
        if heap is None:
            heap = self._heaps[key] = [(self._bytes[rank], rank) for rank in self._ranks_in(key)]
            heapq.heapify(heap)
        found: list[int] = []
        while len(found) < count:
            load, rank = heapq.heappop(heap)
            if load == self._bytes[rank]:
                found.append(rank)
            else:  # it has got more since
                heapq.heappush(heap, (self._bytes[rank], rank))
        for rank in found:
            heapq.heappush(heap, (self._bytes[rank], rank))
        return found

    def packing(self, holders: Sequence[tuple[int, int]], size_bytes: int) -> int:
        """Return the holder that now takes small replicas."""
        key = tuple(number for number, _ in holders)
        ranks = self._ranks_in(key)
        number, packed_bytes = self._packed.get(key, (0, 0))
        if packed_bytes >= _PACKED_BYTES:
            number, packed_bytes = (number + 1) % len(ranks), 0
        self._packed[key] = (number, packed_bytes + size_bytes)
        return ranks[number]


@no_garbage_collection()
def common_of(groups: Sequence[Group]) -> list[dict[str, list[str]]]:
    """Return for each group what its ranks share with others, as far as it is sampled: names by the ranks, as text.

    Raises:
        CoordinationError: Ranks hold different values of the same chunk.
    """
    common: list[dict[str, list[str]]] = [{} for _ in groups]
    keys: dict[tuple[int, ...], str] = {}
    holders: dict[tuple[str, tuple[int, ...]], list[tuple[int, int]]] = {}
    for number, group in enumerate(groups):
        held = group.held
        names = held.described.names
        for item, (name, total) in enumerate(zip(held.described.name_of, held.sums_of_items(), strict=True)):
            if total != NO_SUM:
                holders.setdefault((names[name], held.place(item)[0]), []).append((number, total))
    for (shared, _), held_by in holders.items():
        first_number, first_total = held_by[0]
        odd = [groups[number].ranks[0] for number, total in held_by if total != first_total]
        if odd:
            ranks = [groups[first_number].ranks[0], *odd]
            raise two_under_one_name(shared, "other values of it", ranks, "or passed as rank_state")
        numbers = tuple(number for number, _ in held_by)
        if len(numbers) == 1 and len(groups[first_number].ranks) == 1:
            continue
        key = keys.get(numbers)
        if key is None:
            key = keys[numbers] = " ".join(map(str, sorted(rank for one in numbers for rank in groups[one].ranks)))
        for number in numbers:
            common[number].setdefault(key, []).append(shared)
    return common


def _makes(size: tuple[int, ...], places: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> bool:
    """Tell whether chunks make a tensor of this shape: all of it, and nothing twice."""
    if sum(math.prod(lengths) for _, lengths in places) != math.prod(size):
        return False
    if len(places) == 1:
        return places[0][1] == size
    end = 0
    for offsets, lengths in sorted(places):  # rows that follow each other, as most tensors are cut
        if not lengths or lengths[1:] != size[1:] or offsets[0] != end:
            break
        end += lengths[0]
    else:
        return end == size[0]
    chunks = (ChunkStorageMetadata(torch.Size(offsets), torch.Size(lengths)) for offsets, lengths in places)
    try:
        return is_covered(size, chunks)
    except FormatError:
        return False


def _not_whole(names: Sequence[str], why: str) -> CoordinationError:
    shown = ", ".join(names[:_SHOWN_COUNT])
    return CoordinationError(f"what the ranks hold makes no whole tensors ({shown}): {why}")


def _essence(kind: WriteItem) -> object:
    data: Any = kind.tensor_data
    return (kind.type, tuple(data.size), data.properties.dtype)


def _different(
    name: str, first: WriteItem | None, first_rank: int, other: WriteItem | None, rank: int
) -> CoordinationError:
    return CoordinationError(
        f"the ranks do not save the same: {name!r} is {_described(first)} on rank {first_rank}, "
        f"and {_described(other)} on rank {rank}"
    )


def _described(kind: WriteItem | None) -> str:
    if kind is None or kind.tensor_data is None:
        return "an object"
    sort = "a sharded tensor" if kind.type == WriteItemType.SHARD else "a plain tensor"
    return f"{sort} of shape {tuple(kind.tensor_data.size)} and {kind.tensor_data.properties.dtype}"
