"""untraced: public functions called from compiled code, and no compiler imported for those who have none.

torch_functions: found and right, or not used. plain_load: resolves plain names, and nothing else.
"""

from __future__ import annotations

import hashlib
import inspect
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.archives import read_records
from support.sameness import assert_same

import fastpersist as fp
from fastpersist import _native
from fastpersist.errors import InternalError
from fastpersist.transfer import torch_boundary
from fastpersist.transfer.torch_boundary import loads_plainly, plain_load, sample_tensors, torch_functions, untraced


def save_one_file(state: object, path: Path) -> None:
    fp.save(state, path)


def save_one_file_behind(state: object, path: Path) -> None:
    fp.save_async(state, path).result()


def save_a_directory(state: object, path: Path) -> None:
    directory, name = f"{path}.directory", os.path.basename(path)  # the compiler knows not all that pathlib calls
    with fp.DirectorySave(directory) as files:
        files.save(state, name)
        files.publish().result()
    os.rename(os.path.join(directory, name), path)


@pytest.mark.parametrize("save", [save_one_file, save_one_file_behind, save_a_directory])
def test_compiled_code_may_save_and_load(tmp_path: Path, save: Callable[[object, Path], None]) -> None:
    path = tmp_path / "x.pt"

    @torch.compile(backend="eager")
    def step(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        save({"y": y}, path)
        return y * 2 + fp.load(path)["y"]

    assert torch.equal(step(torch.ones(3)), torch.full((3,), 6.0))
    assert torch.equal(torch.load(path)["y"], torch.full((3,), 2.0))


def test_compiled_code_may_save_a_step(tmp_path: Path) -> None:
    checkpoints = fp.Checkpointer(tmp_path)

    @torch.compile(backend="eager")
    def step(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        checkpoints.save(1, {"y": y})
        return y * 2

    assert torch.equal(step(torch.ones(3)), torch.full((3,), 4.0))
    checkpoints.close()
    assert torch.equal(checkpoints.load()["y"], torch.full((3,), 2.0))


def test_a_function_looks_like_itself() -> None:
    def double(value: int, *, times: int = 2) -> int:
        """Say more."""
        return value * times

    assert untraced(double)(4, times=3) == 12
    assert untraced(double).__doc__ == "Say more."
    with pytest.raises(ZeroDivisionError):
        untraced(lambda: 1 // 0)()


def found_with(samples: list[torch.Tensor]) -> _native.TorchFunctions | None:
    return _native.TorchFunctions.find(torch._C.__file__, torch.Tensor, torch.UntypedStorage, samples)


@pytest.mark.skipif(not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"), reason="this torch is asked by attributes")
@pytest.mark.parametrize("is_inference", [False, True])
def test_functions_of_torch_are_found(is_inference: bool) -> None:
    with torch.inference_mode(is_inference):
        assert torch_functions.__wrapped__() is not None


@pytest.mark.parametrize("version", ["2.16.0", "2.16.0a0+git0a1b2c3", "3.0", "unknown"])
def test_functions_of_a_torch_that_nobody_has_tried_are_not_used(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    assert torch_functions.__wrapped__() is None


def test_functions_of_torch_are_not_used_where_they_could_not_be_compared() -> None:
    samples = sample_tensors()
    assert found_with([]) is None
    assert found_with(samples[:1]) is None
    assert found_with([one for one in samples if one._backward_hooks is None]) is None
    with torch.inference_mode():
        assert found_with([*samples, torch.ones(3)]) is None  # it has no count of changes to compare
    assert _native.TorchFunctions.find("/no/library.so", torch.Tensor, torch.UntypedStorage, samples) is None


def test_functions_that_say_something_else_than_python_are_not_used() -> None:
    class Lies(torch.Tensor):
        _version = property(lambda tensor: 7)  # type: ignore[assignment]

    samples = sample_tensors()
    assert _native.TorchFunctions.find(torch._C.__file__, Lies, torch.UntypedStorage, samples) is None


# ------------------------------------------------------------------------------------------------------ plain loads


def sha256_of(path: Path) -> bytes:
    pickles = [data for name, data in read_records(path).items() if name.endswith("/data.pkl")]
    return hashlib.sha256(pickles[0]).digest()


def plain_loaded(path: Path, *, pickle_sha256: bytes | None = None) -> Any:
    records = {name.partition("/")[2]: data for name, data in read_records(path).items()}
    storages = {
        name.removeprefix("data/"): torch.tensor(list(data), dtype=torch.uint8).untyped_storage()
        for name, data in records.items()
        if name.startswith("data/")
    }
    with path.open("rb") as file:
        return plain_load(file, storages, pickle_sha256=pickle_sha256 or sha256_of(path))


def test_plain_load_takes_no_pickle_but_the_scanned_one(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    torch.save({"x": torch.ones(3)}, path)
    scanned = sha256_of(path)
    torch.save({"y": torch.ones(3)}, path)
    with pytest.raises(pickle.UnpicklingError, match="the file has changed meanwhile"):
        plain_loaded(path, pickle_sha256=scanned)


def test_plain_load_resolves_nothing_but_plain_names(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    torch.save({"run": os.system, "x": torch.ones(3)}, path)
    with pytest.raises(pickle.UnpicklingError, match="system is no part of a plain state"):
        plain_loaded(path)


def test_plain_load_gives_what_torch_gives(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    whole = torch.arange(12.0)
    state = {
        "model": torch.nn.Linear(2, 3).state_dict(),
        "p": torch.nn.Parameter(torch.ones(2)),
        "n": [1, None, "a"],
        "views": [whole, whole[3:7], whole.view(3, 4).t()],
        "dtypes": [torch.ones(2).to(dtype) for dtype in (torch.bfloat16, torch.int8, torch.bool)],
    }
    torch.save(state, path)
    found = plain_loaded(path)
    assert_same(found, torch.load(path))
    assert found["views"][0].untyped_storage().data_ptr() == found["views"][2].untyped_storage().data_ptr()


def test_tensors_are_rebuilt_from_what_torch_rebuilds_them_from() -> None:
    of_torch = inspect.signature(torch._utils._rebuild_tensor_v2).parameters
    assert list(inspect.signature(torch_boundary._rebuild_tensor).parameters) == list(of_torch)


@pytest.mark.parametrize("make", [torch.conj, torch._neg_view], ids=["conj", "neg"])
def test_plain_load_keeps_the_metadata_of_tensors(make: Callable[[torch.Tensor], torch.Tensor], tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    torch.save(make(torch.arange(3) + 1j), path)
    found = plain_loaded(path)
    assert (found.is_conj(), found.is_neg()) == (make is torch.conj, make is not torch.conj)
    assert_same(found, torch.load(path))


def test_each_use_of_an_empty_storage_has_its_own_dtype(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    empty = torch.empty(0)
    state = {"a": empty, "b": empty.view(torch.int32), "raw": [empty, empty.untyped_storage()], "c": torch.ones(0, 3)}
    torch.save(state, path)
    for found in (fp.load(path), plain_loaded(path)):
        assert [found["a"].dtype, found["b"].dtype] == [torch.float32, torch.int32]
        assert_same(found, torch.load(path))


def test_plain_load_hands_out_the_storages_that_it_was_given(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    torch.save({"x": torch.ones(3)}, path)
    given = torch.full((3,), 7.0)
    with path.open("rb") as file:
        found = plain_load(file, {"0": given.untyped_storage()}, pickle_sha256=sha256_of(path))
    assert found["x"].data_ptr() == given.data_ptr()


def test_a_torch_that_reads_storages_itself_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.pt"
    torch.save({"x": torch.ones(3)}, path)
    monkeypatch.setattr(torch_boundary, "stock_load", lambda *_, **__: {"x": torch.ones(3)})
    with pytest.raises(InternalError, match="did not ask for the storages"):
        plain_loaded(path)


@pytest.mark.parametrize(
    ("names", "is_plain"),
    [
        (["collections.OrderedDict", "torch._utils._rebuild_tensor_v2", "torch.FloatStorage"], True),
        (["torch.storage.UntypedStorage", "torch._utils._rebuild_parameter"], True),
        (["torch.SomeStorage"], False),
        (["elsewhere.FloatStorage"], False),
        (["torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_sparse_tensor"], False),
    ],
)
def test_names_that_a_plain_load_resolves(names: list[str], is_plain: bool) -> None:
    assert loads_plainly(names) is is_plain


def test_whoever_forces_torchs_own_unpickler_gets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "1")
    assert not loads_plainly(["torch.FloatStorage"])
