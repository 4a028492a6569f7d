"""fp.save writes, byte for byte, the file that torch.save writes with 4096-aligned storages."""

from __future__ import annotations

import itertools
import os
import pickle
import warnings
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.archives import assert_same_files, record_places, save_aligned
from support.leaks import no_leaks
from support.sameness import assert_same
from support.specimens import SPECIMENS
from torch.utils.serialization import config

import fastpersist as fp
from fastpersist.loading.checkpoint_file import CheckpointSource

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*Sparse (CSR|CSC|BSR|BSC)|The PyTorch API of nested tensors:UserWarning"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*quantized tensor creation:UserWarning"),
    pytest.mark.filterwarnings("ignore:ComplexHalf support:UserWarning"),
]


@pytest.fixture(scope="module", autouse=True)
def nothing_is_left_behind(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with no_leaks(tmp_path_factory.getbasetemp()):  # once, since it takes a while
        yield


def save_both(obj: object, directory: Path, name: str = "model.pt", *, checksum: bool = True) -> tuple[Path, Path]:
    """Save with both writers under the same file name, which is part of the file."""
    ours, stock = directory / "ours" / name, directory / "stock" / name
    for path in (ours, stock):
        path.parent.mkdir(parents=True, exist_ok=True)
    fp.save(obj, ours, checksum=checksum, durable=False)
    save_aligned(obj, stock, checksum=checksum)
    return ours, stock


@pytest.mark.parametrize("checksum", [True, False], ids=["crc", "no_crc"])
@pytest.mark.parametrize("name", SPECIMENS)
def test_file_equals_that_of_torch_save(name: str, checksum: bool, tmp_path: Path) -> None:
    with SPECIMENS[name].made() as obj:
        ours, stock = save_both(obj, tmp_path, checksum=checksum)
    assert_same_files(ours, stock)
    if checksum:
        with zipfile.ZipFile(ours) as archive:
            assert archive.testzip() is None


def test_python_checks_the_archive(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with SPECIMENS["adam_state"].made() as obj:
        fp.save(obj, tmp_path / "model.pt")
    zipfile.main(["-t", str(tmp_path / "model.pt")])
    said = capsys.readouterr().out
    assert "Done testing" in said
    assert "bad" not in said


def test_same_object_gives_the_same_bytes(tmp_path: Path) -> None:
    for directory in ("first", "second"):
        (tmp_path / directory).mkdir()
        with SPECIMENS["adam_state"].made() as obj:
            fp.save(obj, tmp_path / directory / "model.pt")
    first, second = ((tmp_path / directory / "model.pt").read_bytes() for directory in ("first", "second"))
    assert first == second


@pytest.mark.parametrize(
    "name",
    [
        "a.b.pt",
        "no_suffix",
        ".hidden.pt",
        "..pt",
        "trailing.",
        "a space.pt",
        "model.safetensors.pt",
        "dir.with.dots/model",
        "dir.pt/model.pt",
        "gewöhnlich.pt",
        "verzeichnis-ä/model.pt",
        "模型.pt",
        "back\\slash.pt",
        "x" * 200 + ".pt",
    ],
)
def test_archive_name_is_the_one_torch_takes(name: str, tmp_path: Path) -> None:
    assert_same_files(*save_both({"weight": torch.ones(3)}, tmp_path, name))


@pytest.mark.parametrize("name", [".pt", "back\\.pt"])
def test_name_without_a_stem_is_refused_as_torch_refuses_it(name: str, tmp_path: Path) -> None:
    for save in (torch.save, fp.save):
        with pytest.raises(RuntimeError, match="invalid file name"):
            save({"weight": torch.ones(3)}, tmp_path / name)
    assert not (tmp_path / name).exists() or (tmp_path / name).stat().st_size == 0


def test_relative_path_names_the_archive_as_torch_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    fp.save(torch.ones(3), "model.pt")
    os.rename("model.pt", "ours.pt")
    save_aligned(torch.ones(3), Path("model.pt"))
    assert_same_files(Path("ours.pt"), Path("model.pt"))


@pytest.mark.slow  # pickles 65,536 tensors, which takes torch seconds
def test_more_entries_than_sixteen_bits_can_count(tmp_path: Path) -> None:
    # Empty storages: their headers alone, each padded to 4096 bytes, make 270 MB.
    ours, stock = save_both([torch.UntypedStorage(0) for _ in range(66_000)], tmp_path)
    assert_same_files(ours, stock)
    with zipfile.ZipFile(ours) as archive:
        assert len(archive.infolist()) == 66_006
    with CheckpointSource(str(ours)) as source:
        assert len(source.directory.entries) == 66_006


# --------------------------------------------------------------------------------------------- refusals


class Unpicklable:
    def __reduce__(self) -> Any:
        raise KeyError("on purpose")


def one_memory_under_two_dtypes() -> Any:
    words = torch.zeros(8)
    return [words, words.view(torch.int32)]


def storage_without_data() -> Any:
    return torch.empty(3, device="meta").untyped_storage()


def too_deep() -> Any:
    tree: Any = []
    for _ in range(100_000):
        tree = [tree]
    return tree


REFUSED = {
    "one memory under two dtypes": one_memory_under_two_dtypes,
    "tensor and its untyped storage": lambda: (lambda t: [t, t.untyped_storage()])(torch.zeros(2)),
    "storage without data": storage_without_data,
    "failing __reduce__": Unpicklable,
    "lambda": lambda: lambda: 0,
    "generator": lambda: (i for i in range(3)),
    "local class": lambda: type("Local", (), {})(),
    "unsavable dtype": lambda: torch.zeros(4, dtype=torch.uint8).view(torch.uint4),
    "too deep": too_deep,
}


@pytest.mark.parametrize("name", REFUSED)
def test_refuses_what_torch_refuses_and_changes_nothing(name: str, tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    fp.save({"old": torch.ones(3)}, path)
    before = path.read_bytes(), path.stat().st_ino, path.stat().st_mtime_ns
    obj = REFUSED[name]()
    with pytest.raises(Exception) as of_torch:  # noqa: PT011 - whatever it is, ours shall be the same
        torch.save(obj, tmp_path / "of_torch.pt")
    with pytest.raises(of_torch.type) as of_ours:
        fp.save(obj, path)
    strip_addresses = str.maketrans("", "", "0123456789abcdef")
    if of_torch.type is not RecursionError:  # its words depend on which frame was the last one
        assert str(of_ours.value).translate(strip_addresses) == str(of_torch.value).translate(strip_addresses)
    assert (path.read_bytes(), path.stat().st_ino, path.stat().st_mtime_ns) == before
    assert sorted(os.listdir(tmp_path)) == ["model.pt", "of_torch.pt"]


def test_fake_tensors_are_refused_before_any_file_is_made(tmp_path: Path) -> None:
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode(), pytest.raises((AttributeError, TypeError, RuntimeError, pickle.PicklingError)):
        fp.save(torch.ones(3), tmp_path / "model.pt")
    assert os.listdir(tmp_path) == []


def test_metadata_is_refused_for_a_torch_zip(tmp_path: Path) -> None:
    with pytest.raises(fp.ConfigError, match=r"\.safetensors"):
        fp.save(torch.ones(3), tmp_path / "model.pt", metadata={"a": "b"})
    assert os.listdir(tmp_path) == []


# --------------------------------------------------------------------------------------------- circumstances


def test_default_device_does_not_matter(tmp_path: Path) -> None:
    obj = {"weight": torch.randn(3, 4), "step": torch.tensor(3)}
    save_aligned(obj, tmp_path / "stock.pt")
    with torch.device("meta"):
        fp.save(obj, tmp_path / "model.pt")
    assert_same(torch.load(tmp_path / "model.pt"), obj)


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_grad_mode_does_not_matter(mode: Any, tmp_path: Path) -> None:
    with mode():
        obj = {"weight": torch.randn(3, 4), "view": torch.randn(4)[1:]}
        assert_same_files(*save_both(obj, tmp_path))


def test_state_is_not_touched_by_saving_it(tmp_path: Path) -> None:
    with SPECIMENS["adam_state"].made() as obj, SPECIMENS["adam_state"].made() as untouched:
        versions = [tensor._version for tensor in obj["model"].values()]
        fp.save(obj, tmp_path / "model.pt")
        assert_same(obj, untouched)
        assert [tensor._version for tensor in obj["model"].values()] == versions


def test_all_storages_start_on_a_page(tmp_path: Path) -> None:
    with SPECIMENS["adam_state"].made() as obj:
        fp.save(obj, tmp_path / "model.pt")
    places = record_places((tmp_path / "model.pt").read_bytes())
    assert sum(name.startswith("data/") for name in places) > 10
    assert {offset % 4096 for offset, _ in places.values()} == {0}


# --------------------------------------------------------------------------------------------- stock readers


@pytest.mark.parametrize("name", [n for n in SPECIMENS if n not in ("many_storages", "dtensor")])
def test_torch_load_gives_the_object_back(name: str, tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    specimen = SPECIMENS[name]
    with specimen.made() as obj:
        fp.save(obj, path, durable=False)
        assert_same(torch.load(path, weights_only=specimen.weights_only), torch_round_trip(obj, tmp_path))


def torch_round_trip(obj: object, directory: Path) -> Any:
    """What torch itself makes of an object: an autograd result comes back as a leaf, for one."""
    torch.save(obj, directory / "stock.pt")
    return torch.load(directory / "stock.pt", weights_only=False)


@pytest.mark.parametrize(
    ("mmap", "calculated", "debug"), list(itertools.product([True, False], [True, False], ["0", "1"]))
)
def test_torch_finds_the_storages_by_calculation(
    mmap: bool, calculated: bool, debug: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.pt"
    with SPECIMENS["adam_state"].made() as obj:
        obj["empty"] = [torch.empty(0), torch.ones(3), torch.empty(0)]
        fp.save(obj, path)
        monkeypatch.setenv("TORCH_SERIALIZATION_DEBUG", debug)  # torch compares calculated and real offsets
        with config.patch("load.calculate_storage_offsets", calculated):
            if not mmap:
                assert_same(torch.load(path, mmap=False), obj)
                return
            mapped = torch.load(path, mmap=True)
        torch.testing.assert_close(mapped["model"], obj["model"], rtol=0, atol=0)
        torch.testing.assert_close(mapped["optimizer"], obj["optimizer"], rtol=0, atol=0)


def test_torch_knows_the_offsets_of_storages_that_it_does_not_load(tmp_path: Path) -> None:
    from torch._subclasses import FakeTensorMode

    path = tmp_path / "model.pt"
    fp.save({"a": torch.ones(5), "b": torch.ones(5000)}, path)
    data = path.read_bytes()
    places = record_places(data)
    with FakeTensorMode():
        loads = [torch.load(path)]
    on_meta = torch.load(path, map_location="meta")
    torch.save({"a": torch.ones(5)}, tmp_path / "stock.pt")
    stock = torch.load(tmp_path / "stock.pt", map_location="meta")
    if stock["a"].untyped_storage()._checkpoint_offset is not None:  # torch 2.7 notes offsets for fake tensors alone
        loads.append(on_meta)
    for loaded in loads:
        for name, key in (("a", "data/0"), ("b", "data/1")):
            assert loaded[name].untyped_storage()._checkpoint_offset == places[key][0]


def test_warnings_of_torch_are_not_silenced_for_good(tmp_path: Path) -> None:
    fp.save(torch.ones(3), tmp_path / "model.pt")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.warn("still heard", stacklevel=1)
    assert len(caught) == 1
