"""The skeleton of an object is the pickle that torch.save writes, and its storages are the live ones, each once."""

from __future__ import annotations

import io
import pickle
import sys
import threading
import zipfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.specimens import SPECIMENS

from fastpersist.formats.pickle_scan import scan_pickle, storage_references
from fastpersist.saving.skeleton import pickle_skeleton

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*Sparse (CSR|CSC|BSR|BSC)|The PyTorch API of nested tensors:UserWarning"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*quantized tensor creation:UserWarning"),
]


@pytest.mark.parametrize("name", SPECIMENS)
def test_pickle_is_torchs_and_the_scan_finds_the_storages(name: str) -> None:
    with SPECIMENS[name].made() as obj:
        skeleton = pickle_skeleton(obj)
        stock = io.BytesIO()
        torch.save(obj, stock)
    with zipfile.ZipFile(stock) as archive:
        assert skeleton.pickle == archive.read("archive/data.pkl")
        sizes = [archive.getinfo(name).file_size for name in archive.namelist() if name.startswith("archive/data/")]
    assert [storage.nbytes() for storage in skeleton.storages] == sizes
    references = storage_references(scan_pickle(skeleton.pickle))
    by_key = {int(reference.key): reference.size_bytes for reference in references}
    assert by_key == dict(enumerate(sizes))


def test_storages_are_the_live_ones() -> None:
    tensor = torch.zeros(3)
    skeleton = pickle_skeleton({"a": tensor, "b": tensor[1:], "c": torch.ones(1)})
    assert len(skeleton.storages) == 2
    assert skeleton.storages[0].data_ptr() == tensor.data_ptr()


def test_storages_made_by_a_reduction_are_kept_alive() -> None:
    class Fresh:
        def __reduce__(self) -> Any:
            return list, ([torch.full((1000,), 7.0)],)

    skeleton = pickle_skeleton([Fresh() for _ in range(50)])
    assert len(skeleton.storages) == 50
    assert len({storage.data_ptr() for storage in skeleton.storages}) == 50
    for storage in skeleton.storages:
        assert torch.empty(0).set_(storage).unique().tolist() == [7.0]


def test_same_memory_under_two_storages_of_one_dtype_is_stored_twice() -> None:
    tensor = torch.zeros(4)
    other = torch.frombuffer(tensor.numpy(), dtype=torch.float32)
    assert len(pickle_skeleton([tensor, other]).storages) == 2
    with pytest.raises(RuntimeError, match="different types"):
        pickle_skeleton([tensor, torch.frombuffer(tensor.numpy(), dtype=torch.int32)])


class Holder:
    """An object with attributes."""


def deep(value: object) -> object:
    inner, outer = Holder(), Holder()
    inner.c = value  # type: ignore[attr-defined]
    outer.b = [1, inner]  # type: ignore[attr-defined]
    return {"ok": torch.ones(2), "a": outer}


@pytest.mark.skipif(sys.version_info < (3, 11), reason="errors have notes since Python 3.11")
@pytest.mark.parametrize(
    ("make", "place"),
    [
        (lambda: deep(threading.Lock()), "a.b[1].c"),
        (lambda: deep(lambda: None), "a.b[1].c"),
        (lambda: {"x": {3: (0, (i for i in ()))}}, "x[3][1]"),
        (lambda: [torch.ones(1), {"f": open}, threading.Lock()], "[2]"),
    ],
)
def test_value_that_cannot_be_pickled_is_named_by_its_place(make: Callable[[], object], place: str) -> None:
    with pytest.raises((TypeError, AttributeError, pickle.PicklingError)) as stock:
        torch.save(make(), io.BytesIO())
    with pytest.raises(type(stock.value)) as raised:
        pickle_skeleton(make())
    assert str(raised.value).partition(" at 0x")[0] == str(stock.value).partition(" at 0x")[0]
    assert notes_of(raised.value) == [f"In the object that is saved, it is at {place}"]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="errors have notes since Python 3.11")
def test_object_that_holds_itself_and_a_lock_is_searched_once() -> None:
    loop: list[object] = []
    loop += [loop, threading.Lock()]
    with pytest.raises(TypeError) as raised:
        pickle_skeleton(loop)
    assert notes_of(raised.value) == ["In the object that is saved, it is at [1]"]
    with pytest.raises(TypeError) as raised:
        pickle_skeleton(threading.Lock())
    assert notes_of(raised.value) == []


def notes_of(error: BaseException) -> list[str]:
    return getattr(error, "__notes__", [])


def test_storage_in_host_memory_is_tagged_without_asking_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    import fastpersist  # noqa: F401  its loads have an entry in the registry, which tags nothing

    def ask(storage: object) -> str:
        raise AssertionError("asked the registry, which takes longer than all else of a small storage")

    monkeypatch.setattr(torch.serialization, "location_tag", ask)
    assert len(pickle_skeleton({"w": torch.ones(3)}).storages) == 1
    others = [*torch.serialization._package_registry]
    monkeypatch.setattr(torch.serialization, "_package_registry", others)
    torch.serialization.register_package(1, lambda storage: "mine", lambda storage, location: None)
    with pytest.raises(AssertionError, match="asked"):
        pickle_skeleton({"w": torch.ones(3)})
