"""The skeleton of an object is the pickle that torch.save writes, and its storages are the live ones, each once."""

from __future__ import annotations

import argparse
import collections
import contextlib
import copyreg
import io
import pickle
import random
import sys
import threading
import weakref
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.random_states import RandomState
from support.specimens import SPECIMENS

import fastpersist as fp
from fastpersist import _native
from fastpersist.formats.pickle_scan import scan_pickle, storage_references
from fastpersist.saving.skeleton import _torch_types, pickle_skeleton
from fastpersist.saving.sources import facts_of

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*Sparse (CSR|CSC|BSR|BSC)|The PyTorch API of nested tensors:UserWarning"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*quantized tensor creation:UserWarning"),
]


@pytest.fixture(autouse=True, params=["functions", "attributes"])
def asked_by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ask tensors by torch's functions, where they are found, and by Python's attributes."""
    if request.param == "attributes":
        monkeypatch.setattr("fastpersist.saving.skeleton.torch_functions", lambda: None)


def stock_pickle(obj: object) -> bytes:
    """Return the pickle that torch.save writes."""
    file = io.BytesIO()
    torch.save(obj, file)
    with zipfile.ZipFile(file) as archive:
        return archive.read("archive/data.pkl")


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


def is_pickled_natively(obj: object) -> bool:
    types = _torch_types()
    assert types is not None
    return _native.pickle_plain(obj, types) is not None


def training_state() -> dict[str, Any]:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
    return state | {
        "parameters": list(model.parameters()),
        "rng": (torch.get_rng_state(), random.getstate()),
        "fp8": torch.ones(3).to(torch.float8_e4m3fn),
        "arguments": argparse.Namespace(path=Path("/a"), dtype=torch.bfloat16, device=torch.device("cuda", 0)),
        "metrics": collections.defaultdict(list, loss=[0.5], seen={1, 2}, best=None),
    }


def test_training_state_is_pickled_natively() -> None:
    assert is_pickled_natively(training_state())


@pytest.mark.parametrize(
    "value",
    [torch.eye(2).to_sparse(), torch.ones(2, dtype=torch.complex64).conj(), torch.ones(2).untyped_storage()],
    ids=["sparse", "conjugated", "storage"],
)
def test_what_is_not_plain_is_left_to_python(value: object) -> None:
    assert not is_pickled_natively([torch.ones(2), value])


def test_plain_tensor_class_with_another_reduction_is_left_to_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(copyreg.dispatch_table, torch.Tensor, lambda tensor: (float, (7.0,)))
    assert pickle.loads(pickle_skeleton([torch.ones(2)]).pickle) == [7.0]


@pytest.mark.parametrize("seed", range(150))
def test_random_state_is_pickled_as_torch_does_before_and_after_a_change(seed: int) -> None:
    state = RandomState(seed)
    for _ in range(3):
        stock = io.BytesIO()
        try:
            torch.save(state.value, stock)
        except RuntimeError as error:  # such as NotImplementedError of a meta tensor: ours must be the same
            with pytest.raises(type(error)):
                pickle_skeleton(state.value)
        else:
            with zipfile.ZipFile(stock) as archive:
                assert pickle_skeleton(state.value).pickle == archive.read("archive/data.pkl")
        state.change()
    state.forget()
    with contextlib.suppress(RuntimeError):
        expected = stock_pickle(state.value)
        assert pickle_skeleton(state.value).pickle == expected


class TakesFrom:
    """Its pickling brings again what a dict, which it does not refer to, holds alone."""

    owners: dict[str, Any]

    def __init__(self, owner: str, keys: list[str]) -> None:
        self.owner = owner
        self.keys = keys

    def __reduce__(self) -> tuple[Any, ...]:
        return list, ([self.owners[self.owner][key] for key in self.keys],)


@pytest.mark.parametrize("kind", [dict, collections.OrderedDict])
def test_what_only_a_dict_holds_may_come_again_by_code_of_an_object(kind: type) -> None:
    def values() -> Any:
        return kind(a=torch.ones(3), b={"inner": torch.zeros(2)}, c="".join(["te", "xt"]), d=torch.arange(3.0)[1:])

    state = {"first": values(), "takes": TakesFrom("first", ["a", "b", "c", "d"]), "last": values()}
    state["again"] = [TakesFrom("last", ["d", "a"]), TakesFrom("first", ["a"]), state["takes"]]
    TakesFrom.owners = state
    assert is_pickled_natively(state)
    assert pickle_skeleton(state).pickle == stock_pickle(state)
    assert len(pickle_skeleton(state).storages) == 6


class TakesKeysOf:
    """Its pickling brings again the keys of a dict, to which it does not refer."""

    owners: list[Any]

    def __reduce__(self) -> tuple[Any, ...]:
        return list, ([list(owner) for owner in self.owners],)


@pytest.mark.parametrize("kind", [dict, collections.OrderedDict])
def test_keys_that_are_no_constants_may_come_again(kind: type) -> None:
    def key(name: str) -> str:
        return "".join(["a.long.", name])  # not one that Python keeps for all

    shared, listed = key("shared"), key("listed")
    first = kind([(key("first"), torch.ones(2)), (shared, torch.ones(3)), (listed, 1), (key("last"), 1)])
    second = kind([(shared, torch.zeros(2)), (key("first"), torch.ones(2)), (key("other"), None)])
    state = {"first": first, "second": second, "list": [listed, key("first")]}
    del shared, listed
    assert pickle_skeleton(state).pickle == stock_pickle(state)
    TakesKeysOf.owners = [first, second]
    state["keys"] = TakesKeysOf()
    assert is_pickled_natively(state)
    assert pickle_skeleton(state).pickle == stock_pickle(state)
    del first[next(iter(first))]
    assert pickle_skeleton(state).pickle == stock_pickle(state)


def test_keys_that_dicts_share_come_again() -> None:
    class WithAttributes:
        pass

    objects = [WithAttributes(), WithAttributes()]
    for name in ("first", "second"):
        for one in objects:
            setattr(one, "".join(["an_attribute_", name]), torch.ones(2))
    # Python's cache of types holds names of attributes, too. It is emptied by the first of these since Python 3.13.
    clear = getattr(sys, "_clear_internal_caches", None) or getattr(sys, "_clear_type_cache", None)
    if clear is not None:
        clear()
    dicts = [vars(one) for one in objects]
    state = {"ordered": collections.OrderedDict(a=1), "dicts": dicts, "again": [one.copy() for one in dicts]}
    assert pickle_skeleton(state).pickle == stock_pickle(state)


class Moves:
    """Its pickling gives a storage that was met other memory, and what was met other storages."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self.tensors = tensors

    def __reduce__(self) -> tuple[Any, ...]:
        for tensor in self.tensors:
            tensor.untyped_storage().resize_(tensor.nbytes + 4 * 1024 * 1024)
        return list, ()


def test_storages_are_known_again_though_an_object_moves_them_on_the_way() -> None:
    tensors = [torch.ones(3), torch.zeros(4)]
    skeleton = pickle_skeleton([*tensors, Moves(tensors), *(tensor[1:] for tensor in tensors), torch.ones(2)])
    assert len(skeleton.storages) == 3
    assert [tensor.untyped_storage()._cdata for tensor in tensors] == list(skeleton.facts.keys)[:2]


def test_most_random_states_are_pickled_natively() -> None:
    assert sum(is_pickled_natively(RandomState(seed).value) for seed in range(150)) > 75


def test_tensors_of_a_storage_are_those_that_hold_it() -> None:
    base = torch.arange(4.0)
    views = [base, base[1:], torch.nn.Parameter(base.detach())]
    for extra in ([], [torch.eye(2).to_sparse()]):  # natively, and by Python
        skeleton = pickle_skeleton([*views, torch.ones(2), views[0], *extra])
        of_first = [tensor for tensor, index in zip(*skeleton.holders, strict=True) if index == 0]
        assert {id(view) for view in views} <= {id(tensor) for tensor in of_first}
        assert all(tensor.untyped_storage().data_ptr() == base.data_ptr() for tensor in of_first)


class ResizesWhatWasMet:
    """Its pickling changes a storage that the pickler has passed."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.storage = storage

    def __reduce__(self) -> tuple[type, tuple[()]]:
        self.storage.resize_(4 * 1024 * 1024)
        return list, ()


def test_facts_are_those_at_the_end_though_an_object_changes_storages_on_the_way() -> None:
    tensor = torch.arange(4.0)
    skeleton = pickle_skeleton([tensor, ResizesWhatWasMet(tensor.untyped_storage())])
    assert skeleton.facts == facts_of(skeleton.storages)
    assert list(skeleton.facts.sizes_bytes) == [4 * 1024 * 1024]


class Holder:
    """An object with attributes."""


class Reduced:
    """Is reduced to a list, which `made` sees."""

    made: weakref.WeakSet[Holder]

    def __reduce__(self) -> Any:
        holder = Holder()
        self.made.add(holder)
        return list, ([holder, b"bytes", 1 << 90, {3}],)


@pytest.mark.parametrize("end", [None, torch.eye(2).to_sparse()], ids=["natively", "given up"])
def test_native_pickler_keeps_nothing_alive(end: object) -> None:
    Reduced.made = weakref.WeakSet()
    tensor, text, items = torch.ones(3), "".join(["a", "text"]), [1]
    state = {"tensor": tensor, "text": text, "items": items, "again": (items, text), "reduced": Reduced(), "end": end}
    before = [sys.getrefcount(one) for one in (tensor, text, items)]
    for _ in range(3):
        assert is_pickled_natively(state) == (end is None)
    assert [sys.getrefcount(one) for one in (tensor, text, items)] == before
    assert not Reduced.made


def test_interrupt_in_a_reduction_goes_through() -> None:
    class Interrupts:
        def __reduce__(self) -> Any:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pickle_skeleton([torch.ones(2), Interrupts()])


def test_deep_object_is_refused_as_pickle_refuses_it() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(RecursionError):
        pickle_skeleton(deep)


class Reduces:
    """Is reduced to what the test says."""

    def __init__(self, to: Callable[[Any], Any]) -> None:
        self.to = to

    def __reduce__(self) -> Any:
        return self.to(self)


class NameRaises:
    """A callable whose name cannot be read."""

    @property
    def __name__(self) -> str:
        raise ValueError("no name")

    def __call__(self) -> None: ...


@pytest.mark.parametrize(
    "value",
    [
        Reduces(lambda own: ("torch.nn.ReLU", ())),
        Reduces(lambda own: (list, [()])),
        Reduces(lambda own: (list, (), None, [1])),
        Reduces(lambda own: (dict, (), None, None, {"a": 1})),
        Reduces(lambda own: (list, (), {}, None, None, "no function")),
        Reduces(lambda own: (list, (), {}, None, None, print, 7)),
        Reduces(lambda own: (list,)),
        Reduces(lambda own: b"list"),
        Reduces(lambda own: (copyreg.__newobj__, ())),  # type: ignore[attr-defined]
        Reduces(lambda own: (copyreg.__newobj__, (list,))),  # type: ignore[attr-defined]
        Reduces(lambda own: (copyreg.__newobj_ex__, (list, ()))),  # type: ignore[attr-defined]
        Reduces(lambda own: (NameRaises(), ())),
    ],
)
def test_reduction_that_pickle_refuses_is_refused(value: object) -> None:
    with pytest.raises(Exception) as stock:  # noqa: PT011 - whichever it is
        torch.save([torch.ones(2), value], io.BytesIO())
    with pytest.raises(type(stock.value)) as raised:
        pickle_skeleton([torch.ones(2), value])
    assert str(raised.value) == str(stock.value)


def appends(to: Any, when: int) -> Reduces:
    def reduced(own: Reduces) -> Any:
        if len(to) == when:
            to.append("late")
        return int, (3,)

    return Reduces(reduced)


@pytest.mark.parametrize("before", [1, 2, 999, 1000])
def test_items_that_the_last_item_appends_are_saved(before: int) -> None:
    def made() -> list[Any]:
        items: list[Any] = ["item"] * before
        items.append(appends(items, before + 1))
        return items

    assert pickle_skeleton(made()).pickle == stock_pickle(made())
    assert pickle.loads(pickle_skeleton(made()).pickle)[-1] == "late"


def test_what_is_nested_very_deep_is_left_to_python() -> None:
    def nested(depth: int) -> Any:
        value: Any = torch.ones(1)
        for _ in range(depth):
            value = {"a": value}
        return value

    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(100_000)
    try:
        assert is_pickled_natively(nested(900))
        assert not is_pickled_natively(nested(3000))
    finally:
        sys.setrecursionlimit(limit)


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


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.complex64])
def test_a_storage_is_saved_as_far_as_it_has_whole_elements(tmp_path: Path, dtype: torch.dtype) -> None:
    buffer = torch.arange(67, dtype=torch.uint8)  # 3 bytes more than the tensors have
    state = {"start": buffer[:32].view(dtype), "all": buffer[:64].view(dtype), "other": torch.ones(3)}
    for name, value in (("plain", state), ("object", {**state, "lock": Holder()})):
        path = tmp_path / f"{name}.pt"
        fp.save(value, path)
        for load in (torch.load, fp.load):
            found = load(path, weights_only=False)
            assert all(torch.equal(found[key].view(torch.uint8), state[key].view(torch.uint8)) for key in state)
            assert found["all"].data_ptr() == found["start"].data_ptr()


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
    ours = [note for note in notes_of(raised.value) if not note.startswith("when serializing ")]  # as Python 3.14's do
    assert ours == [f"In the object that is saved, it is at {place}"]


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


def test_facts_of_a_usual_state_are_not_asked_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "half": torch.ones(3).half()}
    expected = facts_of(pickle_skeleton(state).storages)
    monkeypatch.setattr("fastpersist.saving.skeleton.facts_of", lambda storages: pytest.fail("asked again"))
    torch.nn.init.zeros_(state["half"])  # one tensor is changed, and counts
    skeleton = pickle_skeleton(state)
    assert skeleton.facts[:4] == expected[:4]
    assert list(skeleton.facts.versions) == [tensor._version for tensor in skeleton.holders.tensors]
    assert any(skeleton.facts.versions)


def test_shape_and_strides_that_dlpack_leaves_open_are_those_of_torch() -> None:
    odd = [
        torch.empty_strided((1, 3), (100, 1)),
        torch.empty_strided((2, 0), (7, 5)),
        torch.empty_strided((3, 2, 1, 2), (4, 2, 9, 1)),
        torch.tensor(3.0),
        torch.arange(6.0)[2:],
        torch.arange(6.0)[6:],
        torch.zeros(0),
    ]
    file = io.BytesIO()
    torch.save(odd, file)
    with zipfile.ZipFile(file) as archive:
        assert pickle_skeleton(odd).pickle == archive.read("archive/data.pkl")


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


def test_tensor_that_does_not_count_its_changes_has_no_count() -> None:
    with torch.inference_mode():
        silent = torch.ones(3)
    assert list(pickle_skeleton([silent, torch.ones(2)]).facts.versions) == [-1, 0]
