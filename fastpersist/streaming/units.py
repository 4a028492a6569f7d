"""Units: the parts of a model whose weights are read and bound together, and the blocks of files that they consist of.

A module is a unit if all weights below it are small enough together; otherwise its children are examined. Its own
weights then make a unit that stays in memory, because its forward spans those of the children. `matching` finds the
weights.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch

from fastpersist.config import BLOCK_BYTES
from fastpersist.formats.layout import align_up
from fastpersist.streaming.source import Place

__all__ = [
    "ROUTING_ARGUMENT",
    "Block",
    "FileRange",
    "Unit",
    "Weight",
    "WeightOwner",
    "blocks_of",
    "blocks_of_experts",
    "cut",
    "expert_count_of",
    "has_forward",
]

_GAP_BYTES = 64 << 10  # read over rather than read around
_BLOCK_BYTES_MAX = 16 << 20  # of several weights: a block lies in the ring in one piece


class WeightOwner(Protocol):
    """The part of their stream that unbound weights need."""

    def read_on_demand(self, weight: Weight) -> torch.Tensor:
        """Read a weight; return it, or a tensor that has its values."""

    def read_rows(self, weight: Weight, ids: torch.Tensor) -> torch.Tensor:
        """Return the rows of these ids, of shape ids.shape + weight.shape[1:]."""

    def is_inside(self) -> bool:
        """Tell whether this thread runs the forward of a unit."""

    @property
    def closed(self) -> bool:
        """Whether nothing can be read any more."""


@dataclass(eq=False, slots=True)
class Weight:
    """A parameter or buffer whose values are in the source.

    Attributes:
        name: The first of its names in the model.
        tensor: The object in the model, which stays the same while it is streamed.
        found: The object that was in the model before: the same one, or one on the meta device.
        places: The modules that have it, and its name in each.
        bound_class: The class of the object when it has its values.
        stand_in: The memory of the object when it has no values.
        shape: The dimensions of the weight.
        dtype: The dtype in the model; the file's may be another.
        pieces: Where its bytes lie, end to end; mostly one.
        owner: The stream.
        version: The version of the tensor when it was bound; an in-place change makes a different one.
    """

    name: str
    tensor: torch.Tensor
    found: torch.Tensor
    places: Sequence[tuple[torch.nn.Module, str]]
    bound_class: type[torch.Tensor]
    stand_in: torch.Tensor
    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: tuple[Place, ...]
    owner: WeightOwner
    version: int | None = None

    @property
    def file_dtype(self) -> torch.dtype:
        """The dtype of its bytes in the file."""
        return self.pieces[0].dtype

    @property
    def file_bytes(self) -> int:
        """Its bytes in the file."""
        return sum(piece.size_bytes for piece in self.pieces)

    @property
    def converted_bytes(self) -> int:
        """Bytes of memory that its conversion takes beside those of the file; 0 if there is none."""
        return 0 if self.dtype == self.file_dtype else math.prod(self.shape) * self.dtype.itemsize


class FileRange(NamedTuple):
    """Bytes of a file, and where they go in a block."""

    file: int
    offset_bytes: int
    size_bytes: int
    at_bytes: int


class Block(NamedTuple):
    """Memory in one piece for some weights of a unit: whole pages, beginning on one.

    Attributes:
        size_bytes: The length of the block.
        ranges: The ranges of files that are read to it.
        weights: The weights in it, and where each begins.
    """

    size_bytes: int
    ranges: tuple[FileRange, ...]
    weights: tuple[tuple[Weight, int], ...]


@dataclass(eq=False, slots=True)
class Unit:
    """Weights that are bound while the forward of a module runs.

    Attributes:
        number: The unit's number, in the order of registration.
        name: The name of the module in the model.
        module: The module; the weights are bound during its forward.
        weights: All weights of the unit.
        must_stay: Other units come and go during its forward, so it cannot be in the ring.
        blocks: The memory that the unit needs; whoever changes `weights` makes them anew.
        expert_count: How many experts it consists of, if its module is told which ones are needed; 0 if it is not.
    """

    number: int
    name: str
    module: torch.nn.Module
    weights: list[Weight]
    must_stay: bool
    blocks: list[Block] = field(default_factory=list)
    expert_count: int = 0

    @property
    def size_bytes(self) -> int:
        """Bytes of memory that it needs, without conversions."""
        return sum(block.size_bytes for block in self.blocks)


def blocks_of(weights: Iterable[Weight], file_sizes: Sequence[int], *, apart: bool = False) -> list[Block]:
    """Lay weights out in blocks, in the order of the files, so that as much as possible is read straight to its place.

    In a block of neighbours each weight lies at an address that equals its offset in the file modulo the page, and all
    of it is read as one range of whole disk blocks. A weight that consists of pieces, or whose offset is no multiple of
    its item size, has a block of its own, which begins with it.

    Args:
        weights: The weights, in any order.
        file_sizes: The length of each file.
        apart: Give each weight a block of its own: devices want every weight aligned, and copy it anyway.
    """
    blocks: list[Block] = []
    neighbours: list[Weight] = []
    for weight in sorted(weights, key=lambda each: each.pieces[0][:2]):
        place = weight.pieces[0]
        if apart or len(weight.pieces) > 1 or place.offset_bytes % place.dtype.itemsize:
            blocks.append(_own_block(weight))
            continue
        if neighbours:
            last, first = neighbours[-1].pieces[0], neighbours[0].pieces[0]
            gap_bytes = place.offset_bytes - (last.offset_bytes + last.size_bytes)
            length_bytes = place.offset_bytes + place.size_bytes - first.offset_bytes
            if last.file != place.file or gap_bytes > _GAP_BYTES or length_bytes > _BLOCK_BYTES_MAX:
                blocks.append(_shared_block(neighbours, file_sizes))
                neighbours = []
        neighbours.append(weight)
    if neighbours:
        blocks.append(_shared_block(neighbours, file_sizes))
    return blocks


def _own_block(weight: Weight) -> Block:
    ranges = []
    at_bytes = 0
    for piece in weight.pieces:
        ranges.append(FileRange(piece.file, piece.offset_bytes, piece.size_bytes, at_bytes))
        at_bytes += piece.size_bytes
    return Block(align_up(max(at_bytes, 1), BLOCK_BYTES), tuple(ranges), ((weight, 0),))


def _shared_block(weights: Sequence[Weight], file_sizes: Sequence[int]) -> Block:
    file = weights[0].pieces[0].file
    start_bytes = weights[0].pieces[0].offset_bytes // BLOCK_BYTES * BLOCK_BYTES
    end_bytes = align_up(max(each.pieces[0].offset_bytes + each.pieces[0].size_bytes for each in weights), BLOCK_BYTES)
    size_bytes = min(end_bytes, file_sizes[file]) - start_bytes
    return Block(
        max(end_bytes - start_bytes, BLOCK_BYTES),
        (FileRange(file, start_bytes, size_bytes, 0),),
        tuple((each, each.pieces[0].offset_bytes - start_bytes) for each in weights),
    )


# -------------------------------------------------------------------------------------------------------- experts

ROUTING_ARGUMENT = "top_k_index"
"""The argument by which modules of experts are told which ones each token needs, as transformers calls it."""


def expert_count_of(unit: Unit) -> int:
    """Return how many experts a unit has, of which single ones can be read; 0 if it is no such unit.

    Its module takes the routing as an argument, and the first dimension of each of its weights counts the experts.
    """
    own = {id(tensor) for tensor in unit.module._parameters.values()}
    counts = {weight.shape[0] if weight.shape else 0 for weight in unit.weights}
    if len(counts) != 1 or not all(id(weight.found) in own for weight in unit.weights):
        return 0
    (count,) = counts
    is_told = ROUTING_ARGUMENT in inspect.signature(unit.module.forward).parameters
    is_divisible = count > 1 and all(len(weight.pieces) in (1, count, 2 * count) for weight in unit.weights)
    return count if is_told and is_divisible else 0


def blocks_of_experts(unit: Unit, experts: Iterable[int]) -> list[Block]:
    """Return the blocks of a unit, with only the bytes of some of its experts to be read."""
    experts = list(experts)
    found = []
    for block in unit.blocks:
        ranges: list[FileRange] = []
        for weight, at_bytes in block.weights:
            size_bytes = weight.file_bytes // unit.expert_count
            for expert in experts:
                at = at_bytes + expert * size_bytes
                if len(weight.pieces) == 1:
                    place = weight.pieces[0]
                    ranges.append(FileRange(place.file, place.offset_bytes + expert * size_bytes, size_bytes, at))
                    continue
                of_expert = len(weight.pieces) // unit.expert_count
                for piece in weight.pieces[expert * of_expert : (expert + 1) * of_expert]:
                    ranges.append(FileRange(piece.file, piece.offset_bytes, piece.size_bytes, at))
                    at += piece.size_bytes
        found.append(block._replace(ranges=tuple(ranges)))
    return found


# -------------------------------------------------------------------------------------------------------- cutting


def has_forward(module: torch.nn.Module) -> bool:
    """Tell whether a module is called; containers such as ModuleList are not."""
    return type(module).forward is not torch.nn.Module.forward


def _looked_at_by(module: torch.nn.Module) -> Iterable[torch.nn.Module]:
    """Return the modules whose weights the forward of a module examines.

    torch's transformer modules have fast paths that do not call their children; if a weight is no plain parameter, they
    take slow paths, which give other bits. An encoder decides by its first layer.
    """
    if isinstance(module, torch.nn.MultiheadAttention | torch.nn.TransformerEncoderLayer):
        return module.modules()
    if isinstance(module, torch.nn.TransformerEncoder) and len(module.layers):
        return module, *module.layers[0].modules()
    return (module,)


def cut(
    model: torch.nn.Module, weights: Mapping[int, Weight], limit_bytes: int, by_rows: Set[int] = frozenset()
) -> list[Unit]:
    """Cut a model into units, in the order of registration. Each weight gets into one of them.

    Args:
        model: The root.
        weights: The weights that units are to have, by the id of the tensor that was found in the model.
        limit_bytes: Units are not larger than this, unless the weights that a module has of its own are.
        by_rows: Ids of weights that embeddings do not need as a whole.
    """
    cutting = _Cutting(weights, limit_bytes, by_rows)
    cutting.visit(model, "", None)
    return cutting.units


class _Cutting:
    def __init__(self, weights: Mapping[int, Weight], limit_bytes: int, by_rows: Set[int]) -> None:
        self._left = dict(weights)
        self._wanted = frozenset(weights)
        self._by_rows = by_rows
        self._limit_bytes = limit_bytes
        self._seen: set[int] = set()
        self.units: list[Unit] = []

    def visit(self, module: torch.nn.Module, name: str, around: Unit | None) -> None:
        """Make the units at and below a module; `around` is the unit of the nearest module above that is called."""
        if id(module) in self._seen:
            return
        self._seen.add(id(module))
        below = [self._left[key] for key in self._ids_of(module.modules())]
        if not below:
            if isinstance(module, torch.nn.Embedding) and id(module.weight) in self._by_rows & self._wanted:
                self._add(module, name, [], must_stay=False)  # it takes its turn with the module that binds the weight
            return
        is_called = has_forward(module)
        own = [self._left[key] for key in self._ids_of(_looked_at_by(module))]
        total_bytes = sum(weight.file_bytes for weight in below)
        if is_called and (total_bytes <= self._limit_bytes or len(own) == len(below)):
            self._add(module, name, below, must_stay=False)
            return
        unit = around
        if is_called:
            # Made even without weights: those of containers below it may be added, and then it is in its place.
            unit = self._add(module, name, own, must_stay=True)
        elif own and around is not None:
            around.weights += own
            self._forget(own)
        elif own:
            unit = self._add(module, name, own, must_stay=True)
        for child_name, child in module.named_children():
            self.visit(child, f"{name}.{child_name}" if name else child_name, unit)
        if unit is not around and unit is not None and not unit.weights:
            self._remove(unit)

    def _add(self, module: torch.nn.Module, name: str, weights: list[Weight], *, must_stay: bool) -> Unit:
        unit = Unit(len(self.units), name, module, list(weights), must_stay)
        self.units.append(unit)
        self._forget(weights)
        return unit

    def _forget(self, weights: list[Weight]) -> None:
        for weight in weights:
            self._left.pop(id(weight.found), None)

    def _remove(self, unit: Unit) -> None:
        self.units.remove(unit)
        for number, each in enumerate(self.units):
            each.number = number

    def _ids_of(self, modules: Iterable[torch.nn.Module]) -> Iterator[int]:
        """Yield the ids of the weights that modules have of their own and no unit has yet, each once."""
        seen: set[int] = set()
        for module in modules:
            done = self._by_rows if isinstance(module, torch.nn.Embedding) else frozenset()
            for tensor in (*module._parameters.values(), *module._buffers.values()):
                if id(tensor) in self._left and id(tensor) not in seen and id(tensor) not in done:
                    seen.add(id(tensor))
                    yield id(tensor)
