"""Symbolic nodes: entries as the real dict would have them, and nothing that a hostile pickle makes expensive."""

from __future__ import annotations

import math
import random

import pytest

from fastpersist.errors import UnsupportedError
from fastpersist.formats.pickle_nodes import (
    Call,
    Global,
    PersistentId,
    PickleScan,
    SymbolicDict,
    SymbolicSet,
    UnsupportedPickle,
)

MODULUS = (1 << 61) - 1  # of Python's hash of an int


def test_entries_are_those_of_the_real_dict() -> None:
    chance = random.Random(1)
    keys = ["a", "b", "", b"a", b"", 0, 1, -1, 2, 0.0, 1.0, 0.5, -0.0, True, False, None, (1 << 60) - 1]
    for _ in range(300):
        flat: list[object] = []
        for number in range(chance.randrange(8)):
            flat += [chance.choice(keys), number]
        real = dict(zip(flat[::2], flat[1::2], strict=True))
        entries = SymbolicDict(flat).items()
        assert [value for _, value in entries] == list(real.values())
        assert [key for key, _ in entries] == list(real)


def test_keys_that_are_nodes_are_told_apart_by_identity() -> None:
    one, other = Global("module", "Name"), Global("module", "Name")
    shared, equal = [1, 2], [1, 2]
    flat = [one, "first", other, "second", shared, "third", equal, "fourth", one, "last"]
    assert SymbolicDict(flat).items() == [(one, "last"), (other, "second"), (shared, "third"), (equal, "fourth")]


def test_key_that_is_unhashable_or_costly_to_hash_is_not_hashed() -> None:
    deep: tuple[object, ...] = ()
    for _ in range(200):
        deep = (deep, deep)  # its hash would visit 2^200 tuples
    unhashable: list[object] = [{}]
    assert SymbolicDict([deep, 1, unhashable, 2, deep, 3]).items() == [(deep, 3), (unhashable, 2)]


def test_ints_that_could_be_made_to_collide_are_not_hashed() -> None:
    colliding = [MODULUS * factor + 7 for factor in range(1, 20_000)]
    assert len({hash(key) for key in colliding}) == 1
    flat: list[object] = []
    for key in colliding:
        flat += [key, None]
    assert len(SymbolicDict(flat).items()) == len(colliding)  # by hash 200 million comparisons


def test_nan_is_a_key_of_its_own() -> None:
    first, second = math.nan, float("nan")
    assert [value for _, value in SymbolicDict([first, 1, second, 2, first, 3]).items()] == [3, 2]


@pytest.mark.parametrize(
    "make",
    [
        lambda inside: PersistentId(inside),
        lambda inside: SymbolicDict([inside, inside]),
        lambda inside: SymbolicSet([inside], is_frozen=False),
        lambda inside: Call(inside, (inside,), state=inside, items=[inside]),
        lambda inside: PickleScan(inside, [], (), has_negative_int=False, has_other_opcodes=False, memo_index_max=0),
    ],
)
def test_nodes_compare_by_identity_and_print_without_their_contents(make: object) -> None:
    inside: object = "contents"
    for _ in range(50):
        inside = [inside, inside]  # printing or comparing it would visit 2^50 lists
    node, same = make(inside), make(inside)  # type: ignore[operator]
    assert node == node
    assert node != same
    assert len(repr(node)) < 200
    assert "contents" not in repr(node)


def test_global_prints_its_name() -> None:
    assert repr(Global("os", "system")) == "Global(module='os', name='system')"


def test_unsupported_pickle_is_an_unsupported_error() -> None:
    assert issubclass(UnsupportedPickle, UnsupportedError)
