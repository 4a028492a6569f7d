"""What is read ahead, what a wrong guess costs, and whose place is given back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest
import torch
from safetensors.torch import save_file
from support.leaks import no_leaks
from support.tensor_files import faults
from torch import nn

from fastpersist.errors import StorageError
from fastpersist.streaming.prefetch import Prefetch
from fastpersist.streaming.residency import Residency
from fastpersist.streaming.source import WeightSource
from fastpersist.streaming.units import Unit, Weight, WeightOwner, blocks_of

COUNT = 6
VALUES = 1024  # of each unit: a page
ROOM = 8192  # of a unit in memory: its page begins behind a header


@pytest.fixture
def source(tmp_path: Path) -> Iterator[WeightSource]:
    save_file(
        {f"w{number}": torch.full((VALUES,), float(number)) for number in range(COUNT)}, tmp_path / "a.safetensors"
    )
    with no_leaks():
        opened = WeightSource(str(tmp_path), engine="fault:threads")
        yield opened
        opened.close()


def prefetch_of(source: WeightSource, *, residents: frozenset[int] = frozenset(), rooms: int = 3) -> Prefetch:
    units = []
    for number in range(COUNT):
        tensor, place = torch.empty(VALUES), source.places[f"w{number}"]
        owner = cast(WeightOwner, None)
        weight = Weight(
            f"w{number}", tensor, tensor, [], torch.Tensor, tensor, (VALUES,), torch.float32, (place,), owner
        )
        units.append(
            Unit(number, str(number), nn.Linear(1, 1), [weight], False, blocks_of([weight], source.file_sizes))
        )
        assert units[-1].size_bytes == ROOM
    return Prefetch(source, units, Residency(residents, len(residents) * ROOM, rooms * ROOM), torch.device("cpu"))


def use(prefetch: Prefetch, number: int) -> None:
    """Use a unit, compare its bytes, and give it back."""
    unit = prefetch._units[number]
    filling = prefetch.use(unit)
    filling.wait()
    ((_, at),) = filling.blocks[0].weights
    values = filling.memory[0][at : at + 4 * VALUES].view(torch.float32)
    assert values.eq(number).all()
    if number not in prefetch.residents:
        prefetch.give_back(unit)
        prefetch.read_ahead()


def test_passes_in_order_are_foretold_and_each_unit_is_read_once_for_each(source: WeightSource) -> None:
    prefetch = prefetch_of(source)
    for _ in range(4):
        for number in range(COUNT):
            use(prefetch, number)
    assert (prefetch.wrong_guess_count, prefetch.outside_count) == (0, 0)
    assert prefetch.read_count == 4 * COUNT + 3  # what the next pass begins with is there
    prefetch.land()


def test_residents_are_read_once(source: WeightSource) -> None:
    prefetch = prefetch_of(source, residents=frozenset({0, 3}))
    for _ in range(4):
        for number in range(COUNT):
            use(prefetch, number)
    assert prefetch.read_count == 2 + 4 * 4 + 3
    assert prefetch.wrong_guess_count == 0


def test_small_residents_are_read_before_all_else(source: WeightSource) -> None:
    prefetch = prefetch_of(source, residents=frozenset({COUNT - 1}), rooms=2)
    prefetch.read_ahead()
    assert list(prefetch._fillings) == [COUNT - 1, 0, 1]
    prefetch.land()


def test_wrong_guesses_cost_reads_and_no_memory(source: WeightSource) -> None:
    prefetch = prefetch_of(source)
    for number in (0, 4, 2, 2, 5, 1, 0, 3, 3, 5, 4):
        use(prefetch, number)
    assert prefetch.wrong_guess_count > 3
    assert prefetch.outside_count == 0


def test_units_in_use_at_once_share_the_ring_and_then_go_beside_it(source: WeightSource) -> None:
    prefetch = prefetch_of(source, rooms=2)
    for number in (5, 3, 1):
        prefetch.use(prefetch._units[number]).wait()
    assert prefetch.outside_count == 1
    for number in (1, 3, 5):
        prefetch.give_back(prefetch._units[number])
    for number in range(COUNT):
        use(prefetch, number)
    assert prefetch.outside_count == 1


def test_after_an_error_nothing_that_was_under_way_fails_later(source: WeightSource) -> None:
    prefetch = prefetch_of(source)
    use(prefetch, 0)
    with faults(op="read", count=100):
        prefetch.forget(())
        filling = prefetch.use(prefetch._units[1])
        with pytest.raises(StorageError):
            filling.wait()
        prefetch.forget(())
    for number in range(1, COUNT):
        use(prefetch, number)


def test_memory_is_forgotten_at_the_end(source: WeightSource) -> None:
    prefetch = prefetch_of(source)
    filling = prefetch.use(prefetch._units[0])
    filling.wait()
    assert prefetch.is_in_ring(filling.memory[0])
    prefetch.land()
    assert not prefetch.is_in_ring(filling.memory[0])


def test_memory_is_prepared_before_the_first_read(source: WeightSource) -> None:
    prepared: list[tuple[int, int]] = []

    class Prefault:
        def __init__(self, memory: list[tuple[int, int]], owner: object) -> None:
            prepared.extend(memory)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fastpersist._native.Prefault", Prefault)
        prefetch = prefetch_of(source, residents=frozenset({1}))
    assert sum(size for _, size in prepared) == (3 + 1) * ROOM
    assert prefetch.read_count == 0
    filling = prefetch.use(prefetch._units[1])
    filling.wait()
    assert (filling.memory[0].data_ptr(), ROOM) in prepared
    prefetch.land()
