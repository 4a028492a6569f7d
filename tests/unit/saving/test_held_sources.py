"""Which sources tensors hold, natively: by identity where the object lists an owner's tensors, else by storage."""

from __future__ import annotations

import pytest
import torch

from fastpersist import _native
from fastpersist.saving.ownership import storage_keys
from fastpersist.transfer.torch_boundary import torch_functions

QUESTIONS = _native.TensorQuestions(torch.Tensor, torch.nn.Parameter, torch.UntypedStorage)
STABLE, VOLATILE = 0, 1


@pytest.fixture(autouse=True, params=["functions", "attributes"])
def asked_by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ask tensors by torch's functions, where they are found, and by Python's attributes."""
    functions = torch_functions() if request.param == "functions" else None
    questions = _native.TensorQuestions(torch.Tensor, torch.nn.Parameter, torch.UntypedStorage, functions)
    monkeypatch.setattr(f"{__name__}.QUESTIONS", questions)


def held_sources(tensors: list[torch.Tensor], held: list[int]) -> _native.HeldSources:
    """Return the sources that tensors hold; `held` are their indices, and several may lie in one storage."""
    keys = [0] * (max(held) + 1)
    for tensor, source in zip(tensors, held, strict=True):
        keys[source] = tensor.untyped_storage()._cdata
    return _native.HeldSources(QUESTIONS, keys, tensors, held, [])


def stable_sources(sources: _native.HeldSources, owned: list[torch.Tensor], count: int) -> list[int]:
    kinds = bytearray([VOLATILE]) * count
    sources.mark(kinds, sources.owned_by(owned, storage_keys), STABLE)
    return [source for source, kind in enumerate(kinds) if kind == STABLE]


def test_owned_tensors_are_found_in_any_order_and_by_other_tensors_of_their_storage() -> None:
    tensors = [torch.ones(3) for _ in range(5)]
    sources = held_sources(tensors, [0, 1, 2, 3, 4])
    assert stable_sources(sources, tensors, 5) == [0, 1, 2, 3, 4]
    assert stable_sources(sources, [tensors[3], tensors[1], torch.ones(1), tensors[2][1:]], 5) == [1, 2, 3]
    assert stable_sources(sources, [torch.eye(2).to_sparse(), torch.nn.Parameter(tensors[4])], 5) == [4]


def test_all_sources_of_a_storage_are_owned_though_one_tensor_is_met() -> None:
    whole, other = torch.ones(8), torch.ones(2)
    sources = held_sources([whole, whole, other, whole], [0, 1, 2, 3])
    assert sources.sources_of(whole.untyped_storage()._cdata) == [0, 1, 3]
    assert stable_sources(sources, [whole, whole], 4) == [0, 1, 3]
    assert stable_sources(sources, [other, whole], 4) == [0, 1, 2, 3]


def test_changes_are_seen_through_the_object_and_through_the_owner() -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    state, detached = torch.zeros(3), parameter.detach()
    apart = parameter.data  # has a counter of its own
    sources = held_sources([detached, state], [0, 1])
    kinds = bytearray([STABLE, STABLE])
    owned = sources.owned_by([parameter, state, apart], storage_keys)
    for tensor, source in ((state, 1), (detached, 0), (apart, 0)):
        counters = sources.watch(kinds, STABLE, VOLATILE, [owned])
        assert counters.changed() == []
        tensor.add_(1)
        assert counters.changed() == [source]


def test_storage_of_a_tensor_that_does_not_count_gets_the_other_kind() -> None:
    with torch.inference_mode():
        silent = torch.ones(4)
    sources = held_sources([silent, silent, torch.ones(1)], [0, 2, 1])
    kinds = bytearray([STABLE] * 3)
    assert sources.watch(kinds, STABLE, VOLATILE, []).changed() == []
    assert list(kinds) == [VOLATILE, STABLE, VOLATILE]


def test_storage_that_was_resized_is_told() -> None:
    tensors = [torch.ones(4), torch.ones(4)]
    storages = [tensor.untyped_storage() for tensor in tensors]
    sources = held_sources(tensors, [0, 1])
    addresses, sizes = [storage.data_ptr() for storage in storages], [storage.nbytes() for storage in storages]
    places = sources.places(bytearray([VOLATILE, STABLE]), STABLE, storages, addresses, sizes)
    storages[0].resize_(1 << 20)
    assert places.moved() is None
    storages[1].resize_(1 << 20)
    assert places.moved() == 1


def test_columns_of_unequal_length_are_refused() -> None:
    with pytest.raises(ValueError, match="holder"):
        _native.HeldSources(QUESTIONS, [1], [torch.ones(1)], [], [])
    with pytest.raises(ValueError, match="not there"):
        _native.HeldSources(QUESTIONS, [], [torch.ones(1)], [0], [])
    with pytest.raises(ValueError, match="count"):
        _native.HeldSources(QUESTIONS, [1], [torch.ones(1)], [0], [1, 2])
    with pytest.raises(ValueError, match="kind"):
        held_sources([torch.ones(1)], [0]).watch(bytearray(2), STABLE, VOLATILE, [])
