"""save and save_async: which format a file gets, whatever its name, and what becomes of a file with several names."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from support.archives import assert_same_files, save_aligned
from support.filesystems import FullFor
from support.runs import Run, copied, held_writers
from support.sameness import assert_same
from support.states import pending_files
from support.strategies import nested_objects, storages
from support.training import PATIENCE_S

import fastpersist as fp
from fastpersist.commit.filesystem import using
from fastpersist.formats.safetensors import DTYPE_NAMES

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support:UserWarning")

DISK = settings(max_examples=30)

STATE = {"weight": torch.arange(3000.0), "bias": torch.arange(7)}
OTHER = {"weight": torch.arange(3000.0) * 2, "bias": torch.arange(9)}

Save = Callable[..., object]


def save_async(obj: object, path: Path, **options: Any) -> None:
    fp.save_async(obj, path, **options).result(PATIENCE_S)


savers = pytest.mark.parametrize("save", [fp.save, save_async], ids=["save", "save_async"])
names = pytest.mark.parametrize("name", ["model.pt", "model", "model.safetensors", "model.safetensors.pt", "m.bin"])


def tensors_of(pairs: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return tensors that safetensors has a dtype for; none share memory."""
    return {
        name: torch.empty(0, dtype=dtype).set_(storage.clone())
        for name, (storage, dtype) in pairs.items()
        if str(dtype).removeprefix("torch.") in DTYPE_NAMES
    }


def is_zip(path: Path) -> bool:
    return path.read_bytes()[:2] == b"PK"


@pytest.fixture(scope="module")
def directory() -> Iterator[Path]:
    """One directory for all examples: tmp_path would be one per test and function-scoped."""
    with tempfile.TemporaryDirectory(prefix="fastpersist-formats-") as name:
        yield Path(name)


# --- which format ---


@savers
@names
@pytest.mark.parametrize("file_format", ["auto", "torch", "safetensors"])
def test_format_is_what_was_asked_for_and_the_name_decides_only_in_auto(
    tmp_path: Path, save: Save, name: str, file_format: str, leak_check: None
) -> None:
    path = tmp_path / name
    for obj in (STATE, OTHER):  # the second replaces the first
        save(obj, path, format=file_format)
        expects_zip = file_format == "torch" or (file_format == "auto" and not name.endswith(".safetensors"))
        assert is_zip(path) == expects_zip
        if expects_zip:
            with open(path, "rb") as file:  # by the name torch.load would take it for safetensors
                assert_same(torch.load(file), obj)
        else:
            assert_same(dict(sorted(load_file(path).items())), dict(sorted(obj.items())))
        loaded = fp.load(path, verify=True)
        assert_same(dict(sorted(loaded.items())), dict(sorted(obj.items())))
        assert fp.inspect(path).format == ("torch_zip" if expects_zip else "safetensors")
        assert fp.verify(path).ok
    assert os.listdir(tmp_path) == [name]


@DISK
@given(nested_objects(), st.sampled_from(["model.safetensors", "model.pt", "model"]), st.booleans())
def test_any_object_is_a_torch_file_of_any_name(directory: Path, obj: Any, name: str, checksum: bool) -> None:
    ours, stock = directory / "ours" / name, directory / "stock" / name
    for path in (ours, stock):
        path.parent.mkdir(exist_ok=True)
    fp.save(obj, ours, durable=False, checksum=checksum, format="torch")
    save_aligned(obj, stock, checksum=checksum)
    assert_same_files(ours, stock)
    fp.save_async(obj, ours, durable=False, checksum=checksum, format="torch").result(PATIENCE_S)
    assert_same_files(ours, stock)


@DISK
@given(
    st.dictionaries(st.text(max_size=8), storages(), max_size=6),
    st.sampled_from(["model.bin", "model.pt", "model", "model.safetensors"]),
)
def test_any_tensors_are_a_safetensors_file_of_any_name(directory: Path, pairs: Any, name: str) -> None:
    tensors = tensors_of(pairs)
    path, named = directory / name, directory / "named.safetensors"
    fp.save(tensors, named, durable=False)
    fp.save(tensors, path, durable=False, format="safetensors")
    assert path.read_bytes() == named.read_bytes()
    path.unlink()
    fp.save_async(tensors, path, durable=False, format="safetensors").result(PATIENCE_S)
    assert path.read_bytes() == named.read_bytes()


@pytest.mark.parametrize(("name", "file_format"), [("m.pt", "safetensors"), ("m.safetensors", "auto")])
def test_metadata_goes_with_the_format_and_not_with_the_name(tmp_path: Path, name: str, file_format: str) -> None:
    fp.save(STATE, tmp_path / name, format=file_format, metadata={"who": "me"})
    with safe_open(tmp_path / name, "pt") as file:
        assert file.metadata()["who"] == "me"


def refuse(save: Save, *arguments: Any, match: str, **options: Any) -> None:
    with pytest.raises(fp.ConfigError, match=match):
        save(*arguments, **options)


@savers
@pytest.mark.parametrize("exists", [True, False], ids=["replaces", "first"])
@pytest.mark.parametrize(
    ("obj", "name", "file_format", "match"),
    [
        (STATE, "m.pt", "zip", "'auto', 'torch' or 'safetensors', not 'zip'"),
        (STATE, "m.pt", "", "'auto', 'torch' or 'safetensors', not ''"),
        ([torch.ones(1)], "m.pt", "safetensors", "not list"),
        ({"t": 1}, "m.pt", "safetensors", "it is int, not a tensor"),
        ({"t": torch.ones(2, 3).T}, "m.bin", "safetensors", "not contiguous"),
        ({"a": STATE["weight"], "b": STATE["weight"]}, "m", "safetensors", "share memory"),
    ],
    ids=["unknown", "empty", "list", "number", "stride", "shared"],
)
def test_what_the_format_cannot_hold_is_refused_and_nothing_is_touched(
    tmp_path: Path, save: Save, exists: bool, obj: Any, name: str, file_format: str, match: str, leak_check: None
) -> None:
    path = tmp_path / name
    if exists:
        path.write_bytes(b"as it was")
    refuse(save, obj, path, match=match, format=file_format)
    assert os.listdir(tmp_path) == ([name] if exists else [])
    assert not exists or path.read_bytes() == b"as it was"


@savers
@pytest.mark.parametrize("name", ["m.pt", "m.safetensors"])
def test_zero_tensors_are_refused_by_name_and_nothing_is_touched(
    tmp_path: Path, save: Save, name: str, leak_check: None
) -> None:
    zeros = torch._efficientzerotensor(3)
    state = {"weight": torch.ones(3), "grad.0": zeros}
    with pytest.raises(fp.UnsavableTensorError, match=r"'grad\.0' cannot .* ZeroTensor .*clone\(\)"):
        save(state, tmp_path / name)
    assert os.listdir(tmp_path) == []
    save({**state, "grad.0": zeros.clone()}, tmp_path / name)


@savers
@pytest.mark.parametrize("wrap", [lambda t: t, torch.nn.Parameter], ids=["tensor", "parameter"])
def test_zero_tensors_deep_in_an_object_are_named(tmp_path: Path, save: Save, wrap: Callable[..., Any]) -> None:
    zeros = wrap(torch._efficientzerotensor(2, 2))
    state = {"model": {"a": torch.ones(3)}, "optimizer": [{"state": (1, zeros)}, zeros]}
    with pytest.raises(RuntimeError, match=r"'optimizer\[0\]\.state\[1\]', 'optimizer\[1\]' .* ZeroTensor"):
        save(state, tmp_path / "m.pt")
    assert os.listdir(tmp_path) == []


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning")  # by the package
@pytest.mark.parametrize(
    "state",
    [
        {"a": STATE["weight"], "b": STATE["weight"]},
        {"a": torch.ones(2, device="meta")},
        {"a": torch._efficientzerotensor(3)},
    ],
    ids=["shared", "meta", "zero"],
)
def test_what_the_package_refuses_as_a_runtime_error_is_one(tmp_path: Path, state: dict[str, torch.Tensor]) -> None:
    path = tmp_path / "m.safetensors"
    with pytest.raises(RuntimeError):
        save_file(state, path)
    with pytest.raises(RuntimeError) as refused:
        fp.save(state, path)
    assert isinstance(refused.value, fp.ConfigError)


@pytest.mark.parametrize(("name", "file_format"), [("m.safetensors", "torch"), ("m.pt", "auto")])
def test_metadata_is_refused_for_torch_files(tmp_path: Path, name: str, file_format: str) -> None:
    refuse(fp.save, STATE, tmp_path / name, match="metadata=", format=file_format, metadata={})
    assert os.listdir(tmp_path) == []


def test_saves_of_both_formats_to_one_path_stay_in_order(tmp_path: Path) -> None:
    path = tmp_path / "model"
    with held_writers():
        saves = [
            fp.save_async({"t": torch.full((500,), count)}, path, format=("torch", "safetensors")[count % 2])
            for count in range(6)
        ]
    for pending in saves:
        pending.result(PATIENCE_S)
    assert not is_zip(path)
    assert fp.load(path)["t"][0] == 5


@pytest.mark.parametrize("file_format", ["torch", "safetensors"])
def test_optimizers_tensors_are_taken_as_they_were_in_either_format(tmp_path: Path, file_format: str) -> None:
    run = Run().advance()
    expected = copied(dict(run.model.state_dict()))
    with held_writers() as writers:
        pending = fp.save_async(
            dict(run.model.state_dict()), tmp_path / "model", optimizer=run.optimizer, format=file_format
        )
        assert writers.reached.wait(PATIENCE_S)
        assert not pending.captured()
        run.advance()
    pending.result(PATIENCE_S)
    loaded = fp.load(tmp_path / "model", verify=True)
    assert_same({name: loaded[name] for name in expected}, expected)


# --- several names ---


def linked(directory: Path, count: int, name: str = "model.pt") -> tuple[Path, list[Path]]:
    """Make a file with so many further names; return it and them."""
    path = directory / name
    fp.save(STATE, path, format="torch")
    others = [directory / f"other-{number}" for number in range(count)]
    for other in others:
        os.link(path, other)
    return path, others


def holds(path: Path, obj: object) -> bool:
    with open(path, "rb") as file:
        loaded = torch.load(file)
    return all(torch.equal(loaded[name], tensor) for name, tensor in obj.items())  # type: ignore[attr-defined]


def in_place_warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [text for text in caplog.messages if "torch.save itself writes" in text]


@savers
@pytest.mark.parametrize("count", [0, 1, 3])
@pytest.mark.parametrize("through_link", [True, False], ids=["symlink", "plain"])
def test_replacing_one_name_leaves_the_old_file_to_the_others(
    tmp_path: Path, save: Save, count: int, through_link: bool, caplog: pytest.LogCaptureFixture, leak_check: None
) -> None:
    path, others = linked(tmp_path, count)
    path.chmod(0o640)
    asked_for = path
    if through_link:
        asked_for = tmp_path / "link"
        asked_for.symlink_to(path)
    inodes = [other.stat().st_ino for other in others]
    save(OTHER, asked_for, replace_links=True)
    assert holds(path, OTHER)
    assert path.stat().st_nlink == 1
    assert path.stat().st_mode & 0o777 == 0o640
    assert asked_for.is_symlink() == through_link
    assert [other.stat().st_ino for other in others] == inodes
    assert all(holds(other, STATE) for other in others)
    assert in_place_warnings(caplog) == []


@savers
@pytest.mark.parametrize("count", [1, 3])
def test_without_that_every_name_sees_the_new_bytes(
    tmp_path: Path, save: Save, count: int, caplog: pytest.LogCaptureFixture
) -> None:
    path, others = linked(tmp_path, count)
    inode = path.stat().st_ino
    with caplog.at_level(logging.WARNING, "fastpersist"):
        save(OTHER, path)
    assert len(in_place_warnings(caplog)) == 1
    assert f"{count + 1} hard links" in in_place_warnings(caplog)[0]
    assert all(holds(name, OTHER) and name.stat().st_ino == inode for name in (path, *others))


@savers
@pytest.mark.parametrize("file_format", ["auto", "safetensors"])
def test_safetensors_file_with_several_names_needs_to_be_replaced(tmp_path: Path, save: Save, file_format: str) -> None:
    path, others = linked(tmp_path, 1, "model.safetensors" if file_format == "auto" else "model")
    with pytest.raises(fp.UnsupportedError, match="2 hard links"):
        save(OTHER, path, format=file_format)
    assert holds(path, STATE)
    save(OTHER, path, format=file_format, replace_links=True)
    assert torch.equal(load_file(path)["weight"], OTHER["weight"])
    assert holds(others[0], STATE)


def test_file_with_several_names_is_replaced_only_when_the_new_one_is_there(tmp_path: Path) -> None:
    path, others = linked(tmp_path, 2)
    with held_writers() as writers:
        pending = fp.save_async(OTHER, path, replace_links=True)
        assert writers.reached.wait(PATIENCE_S)
        assert all(holds(name, STATE) for name in (path, *others))
        assert path.stat().st_nlink == 3
    pending.result(PATIENCE_S)
    assert holds(path, OTHER)


def test_name_that_gets_a_link_meanwhile_is_replaced_all_the_same(tmp_path: Path) -> None:
    path, _ = linked(tmp_path, 0)
    with held_writers() as writers:
        pending = fp.save_async(OTHER, path)
        assert writers.reached.wait(PATIENCE_S)
        os.link(path, tmp_path / "late")
    pending.result(PATIENCE_S)
    assert holds(path, OTHER)
    assert holds(tmp_path / "late", STATE)


@savers
def test_full_disk_leaves_every_name_as_it_was(tmp_path: Path, save: Save, leak_check: None) -> None:
    path, others = linked(tmp_path, 2)
    with using(FullFor()), pytest.raises(fp.NoSpaceError):
        save(OTHER, path, replace_links=True)
    assert path.stat().st_nlink == 3
    assert all(holds(name, STATE) for name in (path, *others))
    assert pending_files(tmp_path) == []


def test_metadata_of_an_asynchronous_save_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    fp.save_async({"w": torch.ones(3)}, path, metadata={"format": "pt"}).result()
    with safe_open(path, "pt") as file:
        assert file.metadata()["format"] == "pt"
    with pytest.raises(fp.ConfigError, match="metadata="):
        fp.save_async({"w": torch.ones(3)}, tmp_path / "w.pt", metadata={"format": "pt"})
