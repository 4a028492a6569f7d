"""How a model is cut into units, and how their weights lie in blocks and in files."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any, cast

import pytest
import torch
from torch import nn

from fastpersist.streaming.source import Place
from fastpersist.streaming.units import Unit, Weight, WeightOwner, blocks_of, cut, has_forward

PAGE = 4096
NOBODY = cast(WeightOwner, None)


def weight_of(name: str, tensor: torch.Tensor, *places: Place) -> Weight:
    shape = tuple(tensor.shape)
    return Weight(name, tensor, tensor, [], type(tensor), tensor, shape, tensor.dtype, places, NOBODY)


def weights_in(model: nn.Module) -> dict[int, Weight]:
    """Give every weight of a model a place, one behind the other."""
    found: dict[int, Weight] = {}
    at = 100
    for name, each in (*model.named_parameters(), *model.named_buffers()):
        at += -at % each.element_size()
        found[id(each)] = weight_of(name, each, Place(0, at, each.dtype, tuple(each.shape), None))
        at += each.nbytes
    return found


def cut_all(model: nn.Module, limit: int, **options: Any) -> list[Unit]:
    """Cut a model, and expect every weight in one unit, numbers in order, and names that lead to the modules."""
    weights = weights_in(model)
    units = cut(model, weights, limit, **options)
    held = [weight.name for unit in units for weight in unit.weights]
    by_rows = options.get("by_rows", frozenset())
    assert sorted(held) == sorted(each.name for key, each in weights.items() if key not in by_rows)
    assert [unit.number for unit in units] == list(range(len(units)))
    for unit in units:
        assert model.get_submodule(unit.name) is unit.module
        assert has_forward(unit.module) or unit.module is model
    return units


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(10, 10), nn.Linear(10, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.b(self.a(x))
        return result


def test_a_model_that_is_small_enough_is_one_unit() -> None:
    (unit,) = cut_all(Block(), 880)
    assert (unit.name, unit.must_stay, len(unit.weights)) == ("", False, 4)


def test_one_that_is_too_large_is_cut_at_its_children() -> None:
    assert [(unit.name, unit.must_stay) for unit in cut_all(Block(), 879)] == [("a", False), ("b", False)]
    # Further than to a module without children nothing is cut.
    assert [unit.name for unit in cut_all(Block(), 1)] == ["a", "b"]


def test_containers_are_no_units() -> None:
    model = nn.ModuleDict({"x": nn.ModuleList([Block(), Block()]), "y": nn.Sequential(Block())})
    assert [unit.name for unit in cut_all(model, 10**9)] == ["x.0", "x.1", "y"]
    assert not has_forward(model)


def test_weights_beside_children_stay_with_the_module_that_is_called() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(10))
            self.steps = nn.ParameterList([torch.ones(10)])
            self.blocks = nn.ModuleList([Block()])
            self.blocks.bias = nn.Parameter(torch.ones(10))

        def forward(self) -> None:
            pass

    own, a, b = cut_all(Own(), 500)
    assert own.must_stay
    assert [weight.name for weight in own.weights] == ["scale", "steps.0", "blocks.bias"]
    assert [(each.name, each.must_stay) for each in (a, b)] == [("blocks.0.a", False), ("blocks.0.b", False)]


def test_shared_modules_and_tied_weights_are_in_the_first_unit() -> None:
    class Shares(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = Block()
            self.again = self.first
            self.tied = Block()
            self.tied.a.weight = self.first.b.weight

        def forward(self) -> None:
            pass

    units = cut_all(Shares(), 880)
    assert [unit.name for unit in units] == ["first", "tied"]
    assert [weight.name for weight in units[1].weights] == ["tied.a.bias", "tied.b.weight", "tied.b.bias"]


def test_modules_that_take_weights_of_their_children_are_not_cut() -> None:
    model = nn.Sequential(nn.TransformerEncoderLayer(16, 2, 32), nn.Sequential(nn.MultiheadAttention(16, 2), Block()))
    assert [unit.name for unit in cut_all(model, 1)] == ["0", "1.0", "1.1.a", "1.1.b"]


def test_embeddings_of_which_rows_are_read_are_in_no_unit() -> None:
    model = nn.Sequential(nn.Embedding(10, 10), Block())
    weights = weights_in(model)
    rows = frozenset({id(model[0].weight)})
    units = cut(model, {key: each for key, each in weights.items() if key not in rows}, 500, rows)
    assert [unit.name for unit in units] == ["1.a", "1.b"]


def test_a_tied_embedding_takes_its_turn_without_weights() -> None:
    model = nn.Sequential(nn.Embedding(10, 10), nn.Linear(10, 10, bias=False))
    model[1].weight = model[0].weight
    units = cut_all(model, 1)
    assert [len(unit.weights) for unit in units] == [1]
    weights = weights_in(model)
    units = cut(model, weights, 1, frozenset(weights))
    assert [(unit.name, len(unit.weights)) for unit in units] == [("0", 0), ("1", 1)]


# ----------------------------------------------------------------------------------------------------------- blocks


def expect_whole(weights: Iterable[Weight], sizes: list[int], **options: Any) -> int:
    """Fill blocks from files of known bytes: every weight finds its own, at a congruent address, within the files."""
    generator = random.Random(1)
    files = [generator.randbytes(size) for size in sizes]
    weights = list(weights)
    blocks = blocks_of(weights, sizes, **options)
    assert sorted(weight.name for block in blocks for weight, _ in block.weights) == sorted(w.name for w in weights)
    for block in blocks:
        assert block.size_bytes % PAGE == 0
        memory = bytearray(block.size_bytes)
        for each in block.ranges:
            assert 0 <= each.at_bytes <= each.at_bytes + each.size_bytes <= block.size_bytes
            assert each.offset_bytes + each.size_bytes <= sizes[each.file]
            data = files[each.file][each.offset_bytes : each.offset_bytes + each.size_bytes]
            memory[each.at_bytes : each.at_bytes + each.size_bytes] = data
        for weight, at in block.weights:
            expected = b"".join(
                files[piece.file][piece.offset_bytes : piece.offset_bytes + piece.size_bytes] for piece in weight.pieces
            )
            assert memory[at : at + len(expected)] == expected
            place = weight.pieces[0]
            if len(weight.pieces) > 1 or place.offset_bytes % place.dtype.itemsize or options.get("apart"):
                assert len(block.weights) == 1
            else:
                assert at % PAGE == place.offset_bytes % PAGE
    return len(blocks)


def laid(*places: tuple[int, int, int], dtype: torch.dtype = torch.float32) -> list[Weight]:
    return [
        weight_of(str(number), torch.empty(0), Place(file, offset, dtype, (count,), None))
        for number, (file, offset, count) in enumerate(places)
    ]


@pytest.mark.parametrize("size", [9000, 8192, 8192 + 4])
def test_neighbours_are_one_read_up_to_the_end_of_the_file(size: int) -> None:
    assert expect_whole(laid((0, 100, 1000), (0, 4100, 0), (0, 4100, 1023)), [size]) == 1


def test_what_is_far_apart_or_in_another_file_has_a_block_of_its_own() -> None:
    assert expect_whole(laid((0, 0, 10), (0, 60_000, 10), (0, 200_000, 10), (1, 200_040, 10)), [300_000] * 2) == 3


def test_empty_tensors_have_a_place_too() -> None:
    assert expect_whole(laid((0, 0, 0)), [0]) == 1
    assert expect_whole(laid((0, 8192, 0)), [8192]) == 1
    assert expect_whole(laid((0, 8191, 0)), [8191]) == 1


def test_an_offset_that_is_no_multiple_of_the_item_size_begins_a_block() -> None:
    assert expect_whole(laid((0, 101, 1000), (0, 4101, 3), (0, 4116, 3)), [9000]) == 3


def test_pieces_are_put_end_to_end() -> None:
    pieces = [Place(1, 5000, torch.float32, (7,), None), Place(0, 3, torch.float32, (2, 5), None)]
    assert expect_whole([weight_of("w", torch.empty(0), *pieces), *laid((0, 60, 5))], [9000, 9000]) == 2


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("apart", [False, True])
def test_random_files(seed: int, apart: bool) -> None:
    generator = random.Random(seed)
    sizes, weights = [], []
    for file in range(generator.randrange(1, 4)):
        at = generator.randrange(200)
        for _ in range(generator.randrange(1, 20)):
            at += generator.choice([0, 0, 0, 1, 8, 5000, 70_000])
            count = generator.choice([0, 1, 3, 1000, 20_000])
            place = Place(file, at, generator.choice([torch.float32, torch.bfloat16, torch.uint8]), (count,), None)
            weights.append(weight_of(f"{file}.{len(weights)}", torch.empty(0), place))
            at += place.size_bytes
        sizes.append(at + generator.choice([0, 0, 1, 5000]))
    generator.shuffle(weights)
    expect_whole(weights, sizes, apart=apart)


def test_a_unit_is_as_large_as_its_blocks() -> None:
    weights = laid((0, 100, 10), (0, 100_000, 2000))
    unit = Unit(0, "", nn.Linear(1, 1), weights, False, blocks_of(weights, [200_000]))
    assert unit.size_bytes == PAGE + 3 * PAGE
