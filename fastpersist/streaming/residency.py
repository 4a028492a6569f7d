"""Chooses, for a budget, which units stay in memory, and how large the ring is. Integers only.

A pass uses each unit once and then begins again, so the unit that was used last is needed last: keeping the most recent
units would never hit, but any fixed set hits its share. If residents are spread over the depth, the disk reads into the
ring while each of them computes; if they were adjacent, the ring would be full and the disk idle while they compute.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fastpersist.streaming.ring import ring_bytes_for

__all__ = ["Residency", "choose_residents"]


@dataclass(frozen=True, slots=True)
class Residency:
    """A choice.

    Attributes:
        residents: The numbers of the units that stay.
        resident_bytes: The bytes of these units.
        ring_bytes: The bytes of the ring; 0 if all units stay.
        missing_bytes: How much more the budget must be before any choice is possible; 0 if this is one.
    """

    residents: frozenset[int]
    resident_bytes: int
    ring_bytes: int
    missing_bytes: int = 0


def choose_residents(
    units: Sequence[Sequence[int]], must_stay: Sequence[bool], budget_bytes: int, uses: Sequence[int] | None = None
) -> Residency:
    """Divide a budget between the ring and residents.

    A unit that is used twice as often as another saves twice as much for its bytes, so it comes first.

    Args:
        units: The sizes of the blocks of each unit, in the order of their use.
        must_stay: For each unit, whether it stays in any case: it is used while others come and go.
        budget_bytes: The budget for ring and residents together.
        uses: How often each unit was used, if it is known. Counts between the same two powers of two are the same.
    """
    totals = [sum(blocks) for blocks in units]
    if sum(totals) <= budget_bytes:
        return Residency(frozenset(range(len(units))), sum(totals), 0)
    residents = {number for number, stays in enumerate(must_stay) if stays}
    resident_bytes = sum(totals[number] for number in residents)
    others = [number for number in range(len(units)) if number not in residents]
    ring_bytes = ring_bytes_for(units[number] for number in others)
    rest_bytes = budget_bytes - resident_bytes - ring_bytes
    if rest_bytes < 0:
        missing_bytes = min(-rest_bytes, sum(totals) - budget_bytes)  # all in memory may be less than a ring
        return Residency(frozenset(residents), resident_bytes, ring_bytes, missing_bytes)
    ranks = [0 if uses is None else uses[number].bit_length() for number in range(len(units))]
    for rank in sorted(set(ranks), reverse=True):
        # Each unit adds its share of the rest to a balance; whenever the balance is enough, the current unit stays.
        alike = [number for number in others if ranks[number] == rank]
        share = min(rest_bytes / max(sum(totals[number] for number in alike), 1), 1)
        earned_bytes = 0.0
        for number in alike:
            earned_bytes += share * totals[number]
            if totals[number] <= earned_bytes:
                earned_bytes -= totals[number]
                residents.add(number)
                resident_bytes += totals[number]
                rest_bytes -= totals[number]
    # What is left over lets the disk read further ahead.
    return Residency(frozenset(residents), resident_bytes, budget_bytes - resident_bytes)
