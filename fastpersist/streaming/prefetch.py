"""Reads units ahead: which units, in which order, and when their place in the ring is given back.

`order` predicts, `residency` has chosen the residents, `reading` reads. `stream` says when a unit is used, and binds
it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from itertools import chain, islice

import torch

from fastpersist.streaming.order import UseOrder
from fastpersist.streaming.reading import Filling, Memory, SparseMemory, start_filling
from fastpersist.streaming.residency import Residency
from fastpersist.streaming.ring import Room
from fastpersist.streaming.source import WeightSource
from fastpersist.streaming.units import Block, Unit, blocks_of_experts

__all__ = ["Prefetch"]

_IN_FLIGHT_BYTES = 256 << 20
"""Reads that are under way at once for residents, which the ring does not bound."""
_SMALL_BYTES = 1 << 20
"""Residents up to this size are read first; otherwise each would wait for the large reads before it."""


class Prefetch:
    """The units that are in memory, or being read.

    Args:
        source: The source that the units are read from.
        units: All units, by number.
        chosen: The choice of the units that stay, and of the size of the ring for the others.
        device: The device of their memory.

    Attributes:
        residents: The numbers of the units that stay.
        uses: How often each unit was used.
        read_count: Units that were read.
        read_bytes: Bytes that were read for them.
        wrong_guess_count: Units that were not being read yet when they were needed.
        outside_count: Units that were needed when the ring had no room for them.

    Thread safety: none.
    """

    def __init__(self, source: WeightSource, units: Sequence[Unit], chosen: Residency, device: torch.device) -> None:
        self.residents: frozenset[int] = frozenset()
        self.uses = [0] * len(units)
        self.read_count = self.read_bytes = 0
        self.wrong_guess_count = self.outside_count = 0
        self._source = source
        self._units = units
        self._order = UseOrder(len(units))
        self._memory = Memory(0, device)
        self._of_residents: dict[int, list[torch.Tensor]] = {}
        self._fillings: dict[int, Filling] = {}  # by unit
        self._read_first: list[int] = []
        self._ahead: deque[Unit] = deque()  # units in the ring that wait for their use, the oldest first
        self._routed: set[int] = set()  # units of which few experts were needed last time
        self._sparse = SparseMemory(max((unit.size_bytes for unit in units if unit.expert_count), default=0))
        self.choose(chosen)

    def choose(self, chosen: Residency) -> None:
        """Let these units stay from now on. Others are not in use at the moment, nor are those whose blocks changed."""
        device, staying = self._memory.device, self.residents & chosen.residents
        self._ahead.clear()
        for number in self._fillings.keys() - staying:
            self.give_back(self._units[number])
        self.residents = chosen.residents
        self._of_residents = {
            number: memory
            for number, memory in self._of_residents.items()
            if number in staying and _is_laid_out(memory, self._units[number])
        }
        self._memory = Memory(0, device)  # the old memory goes before the new one comes
        self._memory = Memory(chosen.ring_bytes, device)
        for number in sorted(self.residents - self._of_residents.keys()):
            unit = self._units[number]
            if not any(weight.converted_bytes for weight in unit.weights):  # it goes after the conversion
                self._of_residents[number] = self._memory.outside([block.size_bytes for block in unit.blocks])
        self._read_first = [
            number for number in sorted(self.residents) if self._units[number].size_bytes <= _SMALL_BYTES
        ]
        self._memory.clear_ahead([each for memory in self._of_residents.values() for each in memory])

    def use(self, unit: Unit, experts: Sequence[int] | None = None) -> Filling:
        """Return the memory of a unit that is needed now, perhaps still being filled, and start to read what follows.

        Args:
            unit: The unit.
            experts: The numbers of its experts that are needed. If they are at most half of them, only these are read,
                and the unit is not read ahead next time; all others are zeros.

        Raises:
            StorageError: A file has changed.
        """
        self._order.note(unit.number)
        self.uses[unit.number] += 1
        filling = self._fillings.get(unit.number)
        if filling is not None and self._is_sparse(filling):  # the module calls itself
            self._read_more(unit, filling, range(unit.expert_count) if experts is None else experts)
            return filling
        is_routed = experts is not None and 2 * len(experts) <= unit.expert_count and unit.number not in self.residents
        if any(self._is_sparse(each) for each in self._fillings.values()):
            is_routed = False  # the module of another unit calls this one, and has that memory
        (self._routed.add if is_routed else self._routed.discard)(unit.number)
        if filling is None and is_routed:
            filling = self._start_routed(unit, experts or ())
        elif filling is None:
            filling = self._start_now(unit)
        elif unit in self._ahead:
            self._ahead.remove(unit)
        self.read_ahead()
        return filling

    def read_ahead(self) -> None:
        """Start to read the units that come next, as far as there is room.

        A unit that waits in the ring, and is expected later than one that needs room, makes room for that one.
        """
        passed: set[int] = set()
        in_flight_bytes = sum(each.size_bytes for each in self._fillings.values() if not each.done())
        read_first, self._read_first = self._read_first, []
        for number in chain(read_first, islice(self._order.foretell(), 2 * len(self._units))):
            unit = self._units[number]
            if number in passed or not unit.blocks:
                continue
            passed.add(number)
            if number in self._fillings or number in self._routed:
                continue
            if number in self.residents and in_flight_bytes > _IN_FLIGHT_BYTES:
                return
            while (filling := self._start(unit)) is None:
                if not self._ahead or self._ahead[0].number in passed:
                    return
                self.give_back(self._ahead.popleft())
            in_flight_bytes += filling.size_bytes
            if filling.room is not None:
                self._ahead.append(unit)

    def give_back(self, unit: Unit) -> None:
        """Free the place of a unit in the ring, once its reads have completed."""
        if unit in self._ahead:  # after an error in `use`; otherwise a second release might come while it is in use
            self._ahead.remove(unit)
        filling = self._fillings.get(unit.number)
        if filling is None:
            return
        filling.land()  # Ctrl-C ends a wait, and its place must not get lost then
        del self._fillings[unit.number]
        if filling.room is not None:
            self._memory.give_back(filling.room)
        elif self._is_sparse(filling):
            self._sparse.clear()

    def forget(self, bound: Collection[int]) -> None:
        """Forget all units but those that are bound: after an error, since other reads may have failed with it."""
        self._ahead.clear()
        for number in [number for number in self._fillings if number not in bound]:
            self.give_back(self._units[number])

    def land(self) -> None:
        """Wait until no read is under way, and forget all memory."""
        for filling in self._fillings.values():
            filling.land()
        self._fillings.clear()
        self._ahead.clear()
        self._of_residents.clear()
        self._memory = Memory(0, self._memory.device)
        self._sparse = SparseMemory(0)

    def is_in_ring(self, tensor: torch.Tensor) -> bool:
        """Tell whether the memory of a tensor will be overwritten: it is in the ring, or in the memory of experts."""
        return self._memory.is_in_ring(tensor) or self._sparse.has(tensor)

    def _start_now(self, unit: Unit) -> Filling:
        """Start reading a unit that was not predicted. Units that wait in the ring make room for it."""
        if self.read_count:
            self.wrong_guess_count += 1
        while (filling := self._start(unit)) is None and self._ahead:
            self.give_back(self._ahead.popleft())
        if filling is None:
            self.outside_count += 1
            filling = self._start_outside(unit)
        return filling

    def _start_routed(self, unit: Unit, experts: Sequence[int]) -> Filling:
        """Start reading some experts of a unit to their places among all experts."""
        blocks = blocks_of_experts(unit, experts)
        return self._start_in(unit, None, self._sparse.cut([block.size_bytes for block in blocks]), blocks)

    def _read_more(self, unit: Unit, filling: Filling, experts: Sequence[int]) -> None:
        """Start reading the missing experts of a unit to their places."""
        more = start_filling(self._source, blocks_of_experts(unit, experts), filling.memory, None)
        filling.add(more)
        self.read_bytes += more.size_bytes

    def _is_sparse(self, filling: Filling) -> bool:
        return bool(filling.memory) and self._sparse.has(filling.memory[0])

    def _start(self, unit: Unit) -> Filling | None:
        """Start to read a unit to the memory that it is to have; None if the ring has no room for it now."""
        if unit.number in self.residents:
            memory = self._of_residents.get(unit.number)
            return self._start_outside(unit) if memory is None else self._start_in(unit, None, memory)
        taken = self._memory.in_ring([block.size_bytes for block in unit.blocks])
        return None if taken is None else self._start_in(unit, *taken)

    def _start_outside(self, unit: Unit) -> Filling:
        """Start to read a unit to memory of its own."""
        return self._start_in(unit, None, self._memory.outside([block.size_bytes for block in unit.blocks]))

    def _start_in(
        self, unit: Unit, room: Room | None, memory: Sequence[torch.Tensor], blocks: Sequence[Block] | None = None
    ) -> Filling:
        try:
            filling = start_filling(self._source, blocks or unit.blocks, memory, room)
        except BaseException:
            if room is not None:
                self._memory.give_back(room)
            raise
        self._fillings[unit.number] = filling
        self.read_count += 1
        self.read_bytes += filling.size_bytes
        return filling


def _is_laid_out(memory: Sequence[torch.Tensor], unit: Unit) -> bool:
    return [each.nbytes for each in memory] == [block.size_bytes for block in unit.blocks]
