"""What a rank holds, packed: it comes back as it was, and what is no such thing is refused."""

from __future__ import annotations

import pickle
from array import array
from typing import Any

import pytest
from support.held_groups import held, item
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType

from fastpersist.dcp.global_plan.held_items import NO_SUM, from_runs, packed_tensors, runs_of
from fastpersist.errors import ConfigError, FormatError

ITEMS = [item("a", (4, 3), (0, 0), (2, 3)), item("a", (4, 3), (2, 0), (2, 3)), item("b", (), (), ())]


def test_items_come_back() -> None:
    names, chunks = packed_tensors(ITEMS, {"a": ("a",), "b": ("b", 0), "c": ("c",)}, {"a": 7, "b": 1 << 32})
    found = held(names, chunks)
    assert [found.place(number) for number in range(3)] == [((0, 0), (2, 3)), ((2, 0), (2, 3)), ((), ())]
    assert [found.described.names[name] for name in found.described.name_of] == ["a", "a", "b"]
    assert found.described.paths == {"a": ("a",), "b": ("b", 0)}
    kinds: list[Any] = [found.kind(number).tensor_data for number in range(3)]
    assert [kind.size for kind in kinds] == [(4, 3), (4, 3), ()]
    assert list(found.sums_of_items()) == [NO_SUM, NO_SUM, 1 << 32]  # a sum is of all that is held under a name


def test_an_item_takes_tens_of_bytes() -> None:
    """A pickled WriteItem takes hundreds, and in memory more than a thousand."""
    many = [item(f"layers.{number}.weight", (1024, 64), (128, 0), (128, 64)) for number in range(2000)]
    names, chunks = packed_tensors(many, {}, {})
    assert len(names) + len(chunks) < 100 * len(many)
    of_another_shard = [item(f"layers.{number}.weight", (1024, 64), (256, 0), (128, 64)) for number in range(2000)]
    assert packed_tensors(of_another_shard, {}, {})[0] == names


def test_an_item_that_lies_elsewhere_than_its_chunk_is_refused() -> None:
    odd = WriteItem(MetadataIndex("a", (1, 0)), WriteItemType.SHARD, tensor_data=ITEMS[0].tensor_data)
    with pytest.raises(ConfigError, match="'a' is planned at"):
        packed_tensors([odd], {}, {})


def columns(**changed: Any) -> tuple[bytes, bytes]:
    names, chunks = (pickle.loads(blob) for blob in packed_tensors(ITEMS, {}, {}))
    keys = ("names", "paths", "name_of", "kind_of", "kinds")
    named = {**dict(zip(keys, names, strict=True)), **{key: changed[key] for key in keys if key in changed}}
    found = {**dict(zip(("places", "sums"), chunks, strict=True))}
    found.update({key: changed[key] for key in ("places", "sums") if key in changed})
    return pickle.dumps(tuple(named.values())), pickle.dumps(tuple(found.values()))


@pytest.mark.parametrize(
    "changed",
    [
        {"names": ["a", "a"]},
        {"names": ["a"]},
        {"names": ["a", "b", "c"]},
        {"names": ["a", 7]},
        {"name_of": b"123"},
        {"name_of": array("I", [0, 1]).tobytes()},
        {"kind_of": array("I", [0, 0, 9]).tobytes()},
        {"kinds": []},
        {"kinds": [WriteItem(MetadataIndex(""), WriteItemType.BYTE_IO)] * 2},
        {"places": b""},
        {"places": array("q", [0, 0, 2, 3, 3, 0, 2, 3]).tobytes()},
        {"places": array("q", [0, 0, 2, 3, -1, 0, 2, 3]).tobytes()},
        {"places": array("q", [0, 0, 2, 3, 0, 0, -2, 3]).tobytes()},
        {"sums": b""},
        {"sums": "text"},
    ],
)
def test_what_is_no_such_thing_is_refused(changed: dict[str, Any]) -> None:
    assert len(held(*columns())) == 3
    with pytest.raises(FormatError):
        held(*columns(**changed))


@pytest.mark.parametrize("numbers", [[], [0], [0, 1, 2, 5, 6, 9], [3, 2, 1]])
def test_runs_come_back(numbers: list[int]) -> None:
    assert from_runs(runs_of(numbers), 10) == numbers


@pytest.mark.parametrize("data", [b"123", array("I", [1]).tobytes(), array("I", [0, 1 << 31]).tobytes()])
def test_runs_that_are_none_are_refused(data: bytes) -> None:
    with pytest.raises(FormatError):
        from_runs(data, 10)


def test_a_run_beyond_the_limit_is_refused() -> None:
    with pytest.raises(FormatError):
        from_runs(runs_of([9, 10]), 10)
