"""fp.load_into fills modules and containers of tensors from a file, and changes nothing when anything does not fit."""

from __future__ import annotations

import gc
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support import leaks
from support.archives import flip_bit, read_records, record_places, save_aligned, with_pickle
from support.sameness import assert_same, portrait
from support.specimens import SPECIMENS, Network, trained

import fastpersist as fp
from fastpersist.formats.pickle_scan import scan_pickle
from fastpersist.loading import checkpoint_file
from fastpersist.loading.checkpoint_file import CheckpointSource
from fastpersist.loading.fill_target import Wanted, fill_target
from fastpersist.transfer.reader import read_extents

pytestmark = [
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*quantized tensor creation:UserWarning"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning"),
]


nothing_is_left_behind = leaks.nothing_is_left_behind


def refused(path: Path, target: Any, match: str, error: type[Exception] = fp.ConfigError, **options: Any) -> str:
    """Expect a refusal that leaves the target as it was, down to its version counters; return the message."""
    before = portrait(target)
    versions = [tensor._version for tensor in tensors_in(target)]
    with pytest.raises(error, match=match) as raised:
        fp.load_into(path, target, **options)
    assert portrait(target) == before
    assert [tensor._version for tensor in tensors_in(target)] == versions
    return str(raised.value)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.nn.Module):
        yield from value.state_dict(keep_vars=True).values()
    elif isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(item)


# --- shared storages


def test_tensors_that_share_bytes_are_filled_beside_objects(tmp_path: Path) -> None:
    """A dtype is not in the pickle of a plain state, which another unpickler builds."""
    weight = torch.arange(6000.0)
    fp.save({"a": weight, "tied": weight.view(60, 100), "other": torch.ones(5000), "d": torch.half}, tmp_path / "m.pt")
    target = {"a": torch.zeros(6000), "other": torch.zeros(5000), "tied": torch.zeros(60, 100)}
    fp.load_into(tmp_path / "m.pt", target, strict=False)
    assert torch.equal(target["a"], weight)
    assert torch.equal(target["other"], torch.ones(5000))
    assert torch.equal(target["tied"], weight.view(60, 100))


# --- many tensors


@pytest.mark.parametrize("more", [{}, {"step": 0}], ids=["tensors", "tensors and values"])
def test_many_tensors_are_scanned_once_and_wake_no_garbage_collector(
    more: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x.pt"
    fp.save({"x": [torch.full((2,), index) for index in range(2_000)], **more}, path)
    target: dict[str, Any] = {"x": [torch.zeros(2, dtype=torch.int64) for _ in range(2_000)], **more}
    scans: list[bytes] = []

    def counted(data: bytes) -> object:
        scans.append(data)
        return scan_pickle(data)

    monkeypatch.setattr(checkpoint_file, "scan_pickle", counted)
    collected: list[int] = []

    def note(phase: str, about: dict[str, int]) -> None:
        if phase == "start":
            collected.append(about["generation"])

    gc.collect()
    gc.callbacks.append(note)
    try:
        fp.load_into(path, target)
    finally:
        gc.callbacks.remove(note)
    assert torch.equal(torch.stack(target["x"])[:, 1], torch.arange(2_000))
    assert len(scans) == 1
    assert len(collected) < 10  # not one for some hundred objects, of which a tensor needs several


# --- modules


@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.parametrize("suffix", ["pt", "safetensors", "stock.pt", "stock.safetensors"])
def test_module_is_filled_in_place(suffix: str, verify: bool, tmp_path: Path) -> None:
    source, target, path = trained(), Network(), tmp_path / f"model.{suffix}"
    state = source.state_dict()
    if "safetensors" in suffix:
        del state["head.weight"]  # tied; the format cannot say so
    if suffix == "stock.pt":
        save_aligned(state, path, alignment=64)
    elif suffix == "stock.safetensors":
        save_file(state, path)
    else:
        fp.save(state, path)
    if verify and suffix == "stock.safetensors":
        refused(path, target, "without checksums", fp.UnsupportedError, strict=False, verify=True)
        return
    pointers = [tensor.data_ptr() for tensor in tensors_in(target)]
    fp.load_into(path, target, strict="safetensors" not in suffix, verify=verify)
    assert_same(target.state_dict(), source.state_dict())
    assert [tensor.data_ptr() for tensor in tensors_in(target)] == pointers
    assert target.head.weight is target.embedding.weight


# --- extra state


class Extra(torch.nn.Module):
    def __init__(self, state: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2))
        self.state = state

    def get_extra_state(self) -> Any:
        return self.state

    def set_extra_state(self, state: Any) -> None:
        self.state = state


EXTRA_STATES: dict[str, Any] = {
    "plain": {"scale": 2.0, "history": [1, 2]},
    "none": None,
    "tensor": torch.arange(4.0),
    "tensors inside": {"amax": torch.arange(4.0), "step": 3},
}


@pytest.mark.parametrize("kind", EXTRA_STATES)
def test_extra_state_is_set_as_load_state_dict_sets_it(kind: str, tmp_path: Path) -> None:
    source = torch.nn.Sequential(Extra(EXTRA_STATES[kind]), torch.nn.Linear(2, 2))
    fp.save(source.state_dict(), tmp_path / "model.pt")
    stock = torch.nn.Sequential(Extra("old"), torch.nn.Linear(2, 2))
    stock.load_state_dict(torch.load(tmp_path / "model.pt"))
    target = torch.nn.Sequential(Extra("old"), torch.nn.Linear(2, 2))
    fp.load_into(tmp_path / "model.pt", target)
    assert_same(target.state_dict(), stock.state_dict())


def test_extra_state_that_is_a_tensor_comes_from_safetensors_too(tmp_path: Path) -> None:
    source = torch.nn.Sequential(Extra(torch.arange(4.0)), torch.nn.Linear(2, 2))
    fp.save(source.state_dict(), tmp_path / "model.safetensors")
    target = torch.nn.Sequential(Extra("old"), torch.nn.Linear(2, 2))
    assert fp.load_into(tmp_path / "model.safetensors", target) == ([], [])
    assert_same(target.state_dict(), source.state_dict())


def test_extra_state_that_only_one_side_has_is_refused_as_by_load_state_dict(tmp_path: Path) -> None:
    fp.save({"weight": torch.ones(2)}, tmp_path / "without.pt")
    assert "_extra_state is in the target, but not" in refused(
        tmp_path / "without.pt", Extra(torch.ones(1)), "not changed"
    )
    fp.save(Extra({"amax": torch.ones(1)}).state_dict(), tmp_path / "with.pt")
    target = torch.nn.Module()
    target.register_buffer("weight", torch.zeros(2))
    assert "_extra_state is in the file, but not" in refused(tmp_path / "with.pt", target, "not changed")
    assert fp.load_into(tmp_path / "with.pt", target, strict=False) == ([], ["_extra_state"])
    assert target.weight.tolist() == [1, 1]


# --- hooks


def double(_: Any, state: Any, prefix: str, *__: Any) -> None:
    state[f"{prefix}weight"] = state[f"{prefix}weight"] * 2


class Halved(torch.nn.Module):
    """A module whose load_state_dict does not take values as they are."""

    def __init__(self, *, makes_tensors: bool) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(3))
        self.versions: list[Any] = []
        self.register_load_state_dict_pre_hook(self._halve)
        if makes_tensors:
            self.register_state_dict_post_hook(double)

    def _halve(self, _: Any, state: Any, prefix: str, metadata: Any, *__: Any) -> None:
        self.versions.append(metadata.get("version"))
        state[f"{prefix}weight"] = state[f"{prefix}weight"] / 2


@pytest.mark.parametrize("suffix", ["pt", "safetensors", "directory"])
@pytest.mark.parametrize("makes_tensors", [False, True])
def test_hooks_of_a_module_run_as_in_load_state_dict(makes_tensors: bool, suffix: str, tmp_path: Path) -> None:
    path = tmp_path / ("model.safetensors" if suffix == "directory" else f"model.{suffix}")
    source = Halved(makes_tensors=makes_tensors)
    source.weight.data += torch.tensor([2.0, 4.0, 6.0])
    fp.save(source.state_dict(), path)
    stock, target = (Halved(makes_tensors=makes_tensors) for _ in range(2))
    stock.load_state_dict(fp.load(path))
    fp.load_into(tmp_path if suffix == "directory" else path, target)
    assert torch.equal(target.weight, stock.weight)
    assert target.versions == stock.versions


class Counting(torch.nn.Linear):
    """A module with a plain value in its state_dict."""

    count = 0

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}count"] = self.count

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *arguments: Any) -> None:
        self.count = state_dict.pop(f"{prefix}count")
        super()._load_from_state_dict(state_dict, prefix, *arguments)


def test_plain_values_of_a_module_come_as_in_load_state_dict(tmp_path: Path) -> None:
    source, target = torch.nn.Sequential(Counting(2, 2)), torch.nn.Sequential(Counting(2, 2))
    source[0].count = 3
    fp.save(source.state_dict(), tmp_path / "model.pt")
    fp.load_into(tmp_path / "model.pt", target)
    assert target[0].count == 3
    assert_same(target.state_dict(), source.state_dict())


@pytest.mark.parametrize("more", [{}, {"step": 0}], ids=["tensors", "tensors and values"])
def test_hooks_may_compute_in_place_and_with_numpy(more: dict[str, int], tmp_path: Path) -> None:
    def change(_: Any, state: Any, prefix: str, *__: Any) -> None:
        state[f"{prefix}weight"].mul_(2)
        state[f"{prefix}bias"] = torch.from_numpy(state[f"{prefix}bias"].numpy() * 2)

    source, target = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    target.register_load_state_dict_pre_hook(change)
    fp.save({"model": source.state_dict(), **more}, tmp_path / "model.pt")
    fp.load_into(tmp_path / "model.pt", {"model": target, **more})
    assert torch.equal(target.weight, source.weight * 2)
    assert torch.equal(target.bias, source.bias * 2)


@pytest.mark.parametrize("more", [{}, {"step": 0}], ids=["tensors", "tensors and values"])
def test_hooks_of_a_shared_module_see_what_is_in_the_file_each_time(more: dict[str, int], tmp_path: Path) -> None:
    source, target = (torch.nn.Sequential(shared, shared) for shared in (torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)))
    target[0].register_load_state_dict_pre_hook(double)
    fp.save({"model": source.state_dict(), **more}, tmp_path / "model.pt")
    fp.load_into(tmp_path / "model.pt", {"model": target, **more})
    assert torch.equal(target[0].weight, source[0].weight * 2)


def test_tensor_that_a_module_saves_and_does_not_take_is_refused(tmp_path: Path) -> None:
    module = torch.nn.Linear(2, 2)
    module.register_state_dict_post_hook(lambda _, state, prefix, __: state.update({f"{prefix}norm": torch.ones(1)}))
    fp.save(module.state_dict(), tmp_path / "model.pt")
    with pytest.raises(fp.ConfigError, match="load_state_dict takes no norm; partly overwritten"):
        fp.load_into(tmp_path / "model.pt", module)
    fp.load_into(tmp_path / "model.pt", module, strict=False)


def test_module_with_batch_norms_is_not_looked_through_name_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = (torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2)) for _ in range(2))
    source[1].running_mean += 1
    fp.save(source.state_dict(), tmp_path / "model.pt")
    calls: list[object] = []
    monkeypatch.setattr(torch.nn.Module, "load_state_dict", lambda *_, **__: calls.append(None))
    fp.load_into(tmp_path / "model.pt", target)
    assert not calls
    assert_same(target.state_dict(), source.state_dict())


def test_error_of_a_hook_says_what_is_partly_overwritten(tmp_path: Path) -> None:
    def fail(*_: Any) -> None:
        raise ValueError("not today")

    fp.save({"inner": torch.nn.Linear(2, 2).state_dict()}, tmp_path / "model.pt")
    target = torch.nn.Linear(2, 2)
    target.register_load_state_dict_pre_hook(fail)
    with pytest.raises(fp.ConfigError, match=r"inner refused what .* not today; partly overwritten"):
        fp.load_into(tmp_path / "model.pt", {"inner": target})


# --- refusals


def test_every_difference_is_listed_and_nothing_changes(tmp_path: Path) -> None:
    fp.save({"a": torch.ones(3), "b": torch.ones(2), "extra": torch.ones(1), "same": torch.ones(5)}, tmp_path / "m.pt")
    target = {"a": torch.zeros(4), "b": torch.zeros(2, 1), "missing": torch.zeros(1), "same": torch.zeros(5)}
    message = refused(tmp_path / "m.pt", target, "was not changed")
    for part in (
        "a has shape (4,) in the target, (3,) in the file",
        "b has shape (2, 1) in the target, (2,) in the file",
        "missing is in the target, but not in the file",
        "extra is in the file, but not in the target",
    ):
        assert part in message
    assert "same" not in message


def test_long_lists_of_differences_are_cut(tmp_path: Path) -> None:
    fp.save({}, tmp_path / "model.pt")
    message = refused(tmp_path / "model.pt", {str(i): torch.zeros(1) for i in range(50)}, "was not changed")
    assert "40 more" in message


def test_without_strict_the_common_part_is_filled(tmp_path: Path) -> None:
    fp.save({"a": torch.ones(3), "extra": torch.ones(1)}, tmp_path / "model.pt")
    target = {"a": torch.zeros(3), "missing": torch.zeros(1)}
    fp.load_into(tmp_path / "model.pt", target, strict=False)
    assert target["a"].tolist() == [1, 1, 1]
    assert target["missing"].tolist() == [0]


def test_without_strict_shapes_must_agree_all_the_same(tmp_path: Path) -> None:
    fp.save({"a": torch.ones(3)}, tmp_path / "model.pt")
    refused(tmp_path / "model.pt", {"a": torch.zeros(4)}, "shape", strict=False)


def test_module_with_other_names_is_refused(tmp_path: Path) -> None:
    fp.save(Network().state_dict(), tmp_path / "model.pt")
    message = refused(tmp_path / "model.pt", torch.nn.Linear(6, 6), "was not changed")
    assert "weight is in the target, but not in the file" in message
    assert "embedding.weight is in the file, but not in the target" in message


def test_lazy_module_is_refused(tmp_path: Path) -> None:
    fp.save(torch.nn.Linear(3, 2).state_dict(), tmp_path / "model.pt")
    with pytest.raises(fp.ConfigError, match="weight"):
        fp.load_into(tmp_path / "model.pt", torch.nn.LazyLinear(2))


TARGETS: dict[str, Callable[[], torch.Tensor]] = {
    "meta": lambda: torch.zeros(2, 2, device="meta"),
    "expanded": lambda: torch.zeros(1, 2).expand(2, 2),
    "sparse": lambda: torch.zeros(2, 2).to_sparse(),
    "subclass": lambda: torch.zeros(2, 2).as_subclass(type("Sub", (torch.Tensor,), {})),
    "conjugated": lambda: torch.zeros(2, 2, dtype=torch.complex64).conj(),
}


@pytest.mark.parametrize("kind", TARGETS)
def test_target_that_cannot_be_filled_is_refused(kind: str, tmp_path: Path) -> None:
    fp.save({"w": torch.ones(2, 2), "other": torch.ones(3)}, tmp_path / "model.pt")
    refused(tmp_path / "model.pt", {"w": TARGETS[kind](), "other": torch.zeros(3)}, "w is")


@pytest.mark.parametrize("name", ["sparse_coo", "conjugated", "negated", "nested_strided", "quantized"])
def test_file_that_cannot_fill_is_refused(name: str, tmp_path: Path) -> None:
    with SPECIMENS[name].made() as obj:
        fp.save([torch.ones(2), obj], tmp_path / "model.pt")
    with torch.serialization.safe_globals([torch._utils._rebuild_nested_tensor]):  # torch 2.15 has it on no list
        refused(tmp_path / "model.pt", [torch.zeros(2), [torch.zeros(2)]], "load", fp.UnsupportedError)


def test_file_of_tensors_without_data_is_refused(tmp_path: Path) -> None:
    fp.save({"w": torch.empty(2, device="meta")}, tmp_path / "model.pt")
    refused(tmp_path / "model.pt", {"w": torch.zeros(2)}, "without data", fp.UnsupportedError)


def test_other_kinds_of_file_are_refused(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "legacy.pt", _use_new_zipfile_serialization=False)
    refused(tmp_path / "legacy.pt", {"w": torch.zeros(2)}, "load_state_dict", fp.UnsupportedError)
    with pytest.raises(fp.CheckpointNotFoundError):
        fp.load_into(tmp_path / "nothing.pt", {"w": torch.zeros(2)})


def test_pickled_module_is_refused_by_torch(tmp_path: Path) -> None:
    fp.save(Network(), tmp_path / "model.pt")
    refused(tmp_path / "model.pt", Network(), "Weights only load failed", pickle.UnpicklingError)


def test_file_whose_tensors_reach_beyond_their_storage_is_refused(tmp_path: Path) -> None:
    fp.save({"w": torch.ones(4)}, tmp_path / "model.pt")
    pkl = read_records(tmp_path / "model.pt")["model/data.pkl"]
    shape = b"K\x04\x85q\x08"
    assert pkl.count(shape) == 1
    with_pickle(tmp_path / "model.pt", pkl.replace(shape, b"K\x09\x85q\x08"))
    with pytest.raises((fp.FormatError, RuntimeError)):
        fp.load_into(tmp_path / "model.pt", {"w": torch.zeros(9)})


def test_module_on_the_meta_device_is_told_to_get_memory(tmp_path: Path) -> None:
    fp.save(torch.nn.Linear(2, 2).state_dict(), tmp_path / "model.pt")
    with torch.device("meta"):
        model = torch.nn.Linear(2, 2)
    with pytest.raises(fp.ConfigError, match=r"weight is on the meta device and has no memory yet; call to_empty"):
        fp.load_into(tmp_path / "model.pt", model)
    model.to_empty(device="cpu")
    fp.load_into(tmp_path / "model.pt", model)


# --- damage


@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
def test_verify_leaves_the_target_alone_when_any_byte_is_damaged(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"model.{suffix}"
    fp.save({"a": torch.ones(3), "b": torch.full((5000,), 2.0)}, path)
    if suffix == "pt":
        offset = record_places(path.read_bytes())["data/1"][0] + 17
    else:
        offset = next(t.offset_bytes for t in fp.inspect(path).tensors if t.name == "b") + 17
    flip_bit(path, offset)
    refused(path, {"a": torch.zeros(3), "b": torch.zeros(5000)}, "b", fp.ChecksumError, verify=True)


def test_file_without_checksums_is_not_verified(tmp_path: Path) -> None:
    fp.save({"a": torch.ones(3)}, tmp_path / "model.pt", checksum=False)
    refused(tmp_path / "model.pt", {"a": torch.zeros(3)}, "without checksums", fp.UnsupportedError, verify=True)


@pytest.mark.parametrize("kind", ["disk", "peer"])
def test_error_while_tensors_are_filled_names_those_that_may_have_changed(kind: str, tmp_path: Path) -> None:
    fp.save({f"w{index}": torch.ones(5) for index in range(12)}, tmp_path / "model.pt")
    error: fp.FastPersistError = (
        fp.StorageError(5, "no", "model.pt", 7) if kind == "disk" else fp.PeerError("no", rank=3)
    )

    def read(fd: int, path: str, extents: Any, **options: Any) -> Any:
        if not len(extents):
            return read_extents(fd, path, extents, **options)
        raise error

    target = {f"w{index}": torch.zeros(5) for index in range(12)}
    with CheckpointSource(str(tmp_path / "model.pt")) as source:
        with pytest.raises(type(error), match=r"no; target partly overwritten.*: w0, w1, .*w9 and 2 more") as caught:
            fill_target(source, Wanted(target), verify=False, engine="auto", read=read)
    for name in ("errno", "filename", "offset_bytes", "rank"):
        assert getattr(caught.value, name, None) == getattr(error, name, None)


def test_nothing_changes_when_another_rank_has_failed_before(tmp_path: Path) -> None:
    fp.save(torch.nn.Linear(2, 2).state_dict(), tmp_path / "model.pt")
    target = torch.nn.Linear(2, 2)
    before = portrait(target.state_dict())

    def read(fd: int, path: str, extents: Any, **options: Any) -> Any:
        raise fp.PeerError("rank 1 has failed", rank=1)

    with CheckpointSource(str(tmp_path / "model.pt")) as source:
        with pytest.raises(fp.PeerError) as caught:
            fill_target(source, Wanted(target), verify=False, engine="auto", read=read)
    assert str(caught.value) == "rank 1 has failed"
    assert portrait(target.state_dict()) == before
