"""fp.load returns what torch.load returns, from every file that torch.load reads, whatever map_location says."""

from __future__ import annotations

import errno
import logging
import mmap
import os
import pickle
import threading
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import IO, Any

import pytest
import torch
from support import leaks
from support.archives import read_records, record_places, save_aligned, with_pickle, write_records
from support.sameness import assert_same, portrait
from support.specimens import SPECIMENS, Wrapper

import fastpersist as fp
from fastpersist.loading import unpickle
from fastpersist.loading.checkpoint_file import CheckpointSource

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*Sparse (CSR|CSC|BSR|BSC)|The PyTorch API of nested tensors:UserWarning"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*quantized tensor creation:UserWarning"),
    pytest.mark.filterwarnings("ignore:ComplexHalf support:UserWarning"),
]


nothing_is_left_behind = leaks.nothing_is_left_behind


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.DEBUG, logger="fastpersist")
    return caplog


def keep_storage(storage: torch.UntypedStorage, _location: str) -> torch.UntypedStorage:
    return storage


def went_the_stock_way(log: pytest.LogCaptureFixture) -> bool:
    return "stock torch.load reads" in log.text


# --------------------------------------------------------------------------------------------- every object


@pytest.mark.parametrize("writer", ["ours", "stock"])
@pytest.mark.parametrize("name", SPECIMENS)
def test_object_is_the_one_that_torch_load_gives(
    name: str, writer: str, tmp_path: Path, log: pytest.LogCaptureFixture
) -> None:
    path, specimen = tmp_path / "model.pt", SPECIMENS[name]
    with specimen.made() as obj:
        if writer == "ours":
            fp.save(obj, path, durable=False)
        else:
            save_aligned(obj, path, alignment=64)  # torch's default, unaligned for direct I/O
        expected = torch.load(path, weights_only=specimen.weights_only)
        loaded = fp.load(path, weights_only=specimen.weights_only, verify=True)
        assert_same(loaded, expected)
    assert not went_the_stock_way(log)


@pytest.mark.parametrize("alignment", [1, 2, 64, 512, 32768])
def test_any_alignment_is_read(alignment: int, tmp_path: Path) -> None:
    with SPECIMENS["adam_state"].made() as obj:
        save_aligned(obj, tmp_path / "model.pt", alignment=alignment)
        assert_same(fp.load(tmp_path / "model.pt", verify=True), obj)


def test_records_in_any_order_are_read(tmp_path: Path) -> None:
    fp.save({"a": torch.arange(500), "b": torch.ones(3)}, tmp_path / "model.pt")
    records = read_records(tmp_path / "model.pt")
    write_records(tmp_path / "reversed.pt", dict(reversed(records.items())))
    assert_same(fp.load(tmp_path / "reversed.pt", verify=True), torch.load(tmp_path / "reversed.pt"))


@pytest.mark.parametrize("load", [fp.load, torch.load])
def test_loaded_tensors_can_be_changed_and_their_storages_cannot_grow(load: Callable[..., Any], tmp_path: Path) -> None:
    fp.save({"w": torch.zeros(4)}, tmp_path / "model.pt")
    tensor = load(tmp_path / "model.pt")["w"]
    tensor += 1
    with pytest.raises(RuntimeError, match="not resizable"):
        tensor.resize_(16)
    tensor.resize_(3)
    assert tensor.tolist() == [1.0] * 3
    assert_same(fp.load(tmp_path / "model.pt"), {"w": torch.zeros(4)})


def test_file_of_a_shared_memory_tensor_is_read(tmp_path: Path) -> None:
    shared = torch.arange(10.0).share_memory_()
    fp.save(shared, tmp_path / "model.pt")
    assert fp.load(tmp_path / "model.pt").tolist() == shared.tolist()


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_large_tensors_have_pages_of_their_own(suffix: str, tmp_path: Path) -> None:
    # So direct reads may fill them without a copy, and fresh huge pages fit.
    path = tmp_path / f"model{suffix}"
    state = {"large": torch.arange(100_001.0), "huge": torch.arange(1_000_003.0), "small": torch.ones(3)}
    fp.save(state, path)
    loaded = fp.load(path)
    assert_same({name: loaded[name] for name in state}, state)
    assert [loaded[name].data_ptr() % mmap.PAGESIZE for name in ("large", "huge")] == [0, 0]
    assert not any(tensor.untyped_storage().resizable() for tensor in loaded.values() if tensor.numel() > 3)
    kept = loaded.pop("large")
    del loaded
    assert kept.sum() == state["large"].sum()  # its memory does not depend on that of the others


def test_without_mappings_torch_allocates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_more_mappings(*_arguments: object, **_keywords: object) -> object:
        raise OSError(errno.ENOMEM, "as if vm.max_map_count were reached")

    state = {"weight": torch.arange(100_000.0)}
    fp.save(state, tmp_path / "model.pt")
    monkeypatch.setattr(mmap, "mmap", no_more_mappings)
    assert_same(fp.load(tmp_path / "model.pt"), state)


# --------------------------------------------------------------------------------------------- views of the file


@pytest.mark.parametrize("writer", ["ours", "stock"])
@pytest.mark.parametrize("name", SPECIMENS)
def test_views_of_the_file_are_what_torch_load_gives(name: str, writer: str, tmp_path: Path) -> None:
    path, specimen = tmp_path / "model.pt", SPECIMENS[name]
    with specimen.made() as obj:
        if writer == "ours":
            fp.save(obj, path, durable=False)
        else:
            save_aligned(obj, path, alignment=64)
        expected = torch.load(path, weights_only=specimen.weights_only)
        assert_same(fp.load(path, weights_only=specimen.weights_only, mmap=True), expected)


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_views_change_apart_from_the_file(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"model{suffix}"
    state = {"a": torch.arange(100_000.0), "b": torch.ones(3, dtype=torch.int16), "empty": torch.empty(0)}
    fp.save(state, path)
    before = path.read_bytes()
    with torch.serialization.set_default_mmap_options(mmap.MAP_SHARED):  # for torch.load: its changes reach the file
        loaded = fp.load(path, mmap=True)
    assert any(str(path) in line for line in Path("/proc/self/maps").read_text().splitlines())
    assert_same({name: loaded[name] for name in state}, state)
    loaded["a"].add_(1)
    loaded["b"].zero_()
    assert loaded["a"][-1] == 100_000
    assert loaded["b"].tolist() == [0, 0, 0]
    assert path.read_bytes() == before
    fp.save({"a": torch.zeros(7)}, path)  # replaces the name; the old file stays with those who have it
    assert loaded["a"][-1] == 100_000
    del loaded
    assert all(str(path) not in line for line in Path("/proc/self/maps").read_text().splitlines())


def test_views_of_the_file_read_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.pt"
    fp.save({"weight": torch.arange(100_000.0)}, path)

    def refused(*_arguments: object, **_keywords: object) -> object:
        raise AssertionError("tensors are read")

    monkeypatch.setattr("fastpersist.loading.unpickle.read_extents", refused)
    monkeypatch.setattr("fastpersist.transfer.reader.read_extents", refused)
    assert fp.load(path, mmap=True)["weight"][7] == 7


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
@pytest.mark.parametrize(
    "options",
    [
        {"map_location": "meta"},
        {"map_location": "cuda:0"},
        {"map_location": keep_storage},
        {"map_location": {"cpu": "meta"}},
        {"verify": True},
        {"engine": "threads"},
        {"process_group": "a group"},
        {"mmap": "yes"},
    ],
    ids=lambda options: next(iter(options)),
)
def test_what_views_of_the_file_cannot_be_is_refused(options: dict[str, Any], suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"model{suffix}"
    fp.save({"weight": torch.ones(3)}, path)
    with pytest.raises(fp.ConfigError, match="mmap"):
        fp.load(path, **{"mmap": True, **options})


def test_file_that_only_torch_reads_has_no_views(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    torch.save({"weight": torch.ones(3)}, path, _use_new_zipfile_serialization=False)
    with pytest.raises(fp.ConfigError, match=f"{path} cannot be loaded with mmap=True: .* older torch.save"):
        fp.load(path, mmap=True)
    with path.open("rb") as file, pytest.raises(fp.ConfigError, match="takes a path"):
        fp.load(file, mmap=True)
    path.write_bytes(b"no checkpoint, but some text")
    with pytest.raises(fp.FormatError):
        fp.load(path, mmap=True)


def test_what_weights_only_refuses_is_refused_with_views_too(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    fp.save({"weight": torch.ones(3), "range": range(3)}, path)
    for mapped in (False, True):
        with pytest.raises(pickle.UnpicklingError, match=r"GLOBAL range|builtins\.range"):
            fp.load(path, mmap=mapped)
    assert fp.load(path, mmap=True, weights_only=False)["range"] == range(3)


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_truncated_file_has_no_views(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"model{suffix}"
    fp.save({"weight": torch.ones(100_000)}, path)
    os.truncate(path, path.stat().st_size // 2)
    with pytest.raises(fp.FormatError):
        fp.load(path, mmap=True)


# --------------------------------------------------------------------------------------------- map_location


MAP_LOCATIONS: dict[str, Any] = {
    "none": None,
    "name": "cpu",
    "device": torch.device("cpu"),
    "dict": {"cpu": "cpu"},
    "empty dict": {},
    "dict of another device": {"cuda:0": "cpu"},
    "dict to meta": {"cpu": "meta"},
    "callable": keep_storage,
    "callable without an opinion": lambda storage, location: None,
    "callable to meta": lambda storage, location: storage.to(device="meta"),
    "meta": "meta",
    "meta device": torch.device("meta"),
    "unavailable": "cuda",
    "unavailable with an index": "cuda:7",
    "unavailable device": torch.device("cuda", 1),
    "dict to unavailable": {"cpu": "cuda:0"},
    "nonsense": "nonsense",
    "empty name": "",
    "cpu with an index": "cpu:0",
    "number": 5,
    "dict of devices": {"cpu": torch.device("cpu")},
}


def outcome(load: Callable[[], Any]) -> Any:
    """Return the portrait of what was loaded, or the class of the error."""
    try:
        return portrait(load())
    except Exception as error:  # noqa: BLE001 - any class of error is a result here
        return type(error)


@pytest.mark.parametrize("name", MAP_LOCATIONS)
@pytest.mark.parametrize("obj", ["adam_state", "wrapper_subclass", "quantized", "raw_storages"])
def test_map_location_means_what_it_means_to_torch(name: str, obj: str, tmp_path: Path) -> None:
    if torch.cuda.is_available() and "unavailable" in name:
        pytest.skip("there is a CUDA device")
    path, wanted = tmp_path / "model.pt", MAP_LOCATIONS[name]
    with SPECIMENS[obj].made() as saved:
        fp.save(saved, path)
    expected = outcome(lambda: torch.load(path, map_location=wanted, weights_only=False))
    assert outcome(lambda: fp.load(path, map_location=wanted, weights_only=False)) == expected


def test_map_location_of_bytes_names_a_device(tmp_path: Path) -> None:
    fp.save(torch.ones(3), tmp_path / "model.pt")
    assert fp.load(tmp_path / "model.pt", map_location=b"cpu").tolist() == [1, 1, 1]


def test_unavailable_device_has_torchs_own_words(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    fp.save(torch.ones(3), tmp_path / "model.pt")
    with pytest.raises(RuntimeError, match="Attempting to deserialize object on a CUDA device"):
        fp.load(tmp_path / "model.pt", map_location="cuda")


def test_location_in_the_file_decides_without_a_map_location(tmp_path: Path) -> None:
    fp.save(torch.ones(3), tmp_path / "cpu.pt")
    pkl = read_records(tmp_path / "cpu.pt")["cpu/data.pkl"].replace(b"cpu", b"xla")
    with_pickle(tmp_path / "cpu.pt", pkl)
    for load in (torch.load, fp.load):
        with pytest.raises((RuntimeError, ModuleNotFoundError)):
            load(tmp_path / "cpu.pt")
        assert load(tmp_path / "cpu.pt", map_location="cpu").tolist() == [1, 1, 1]
        assert load(tmp_path / "cpu.pt", map_location={"xla": "cpu"}).tolist() == [1, 1, 1]


@pytest.mark.parametrize("mode", ["fake", "skip_data", "default_device", "inference"])
def test_surroundings_mean_what_they_mean_to_torch(mode: str, tmp_path: Path) -> None:
    from torch._subclasses import FakeTensorMode

    surroundings: dict[str, Callable[[], Any]] = {
        "fake": FakeTensorMode,
        "skip_data": torch.serialization.skip_data,
        "default_device": lambda: torch.device("meta"),
        "inference": torch.inference_mode,
    }
    path = tmp_path / "model.pt"
    fp.save({"a": torch.ones(3), "b": torch.arange(9)[1:]}, path)
    with surroundings[mode]():
        expected, loaded = torch.load(path), fp.load(path)
    for name, tensor in expected.items():
        other = loaded[name]
        assert (type(other), other.device, other.dtype, other.shape) == (
            type(tensor),
            tensor.device,
            tensor.dtype,
            tensor.shape,
        )
        assert other.is_inference() == tensor.is_inference()
        if mode == "fake":
            storages = other.untyped_storage(), tensor.untyped_storage()
            assert storages[0]._checkpoint_offset == storages[1]._checkpoint_offset


# --------------------------------------------------------------------------------------------- other files


def test_legacy_file_is_left_to_torch(tmp_path: Path, log: pytest.LogCaptureFixture) -> None:
    with SPECIMENS["adam_state"].made() as obj:
        torch.save(obj, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
        assert_same(fp.load(tmp_path / "old.pt"), obj)
    assert went_the_stock_way(log)
    with pytest.raises(fp.UnsupportedError, match="no checksums"):
        fp.load(tmp_path / "old.pt", verify=True)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.*looks like a TorchScript archive:UserWarning")
def test_torchscript_archive_is_left_to_torch(tmp_path: Path, log: pytest.LogCaptureFixture) -> None:
    module = torch.nn.Linear(3, 2)
    torch.jit.save(torch.jit.script(module), tmp_path / "script.pt")
    loaded = fp.load(tmp_path / "script.pt", weights_only=False)
    assert torch.equal(loaded.weight, module.weight)
    assert went_the_stock_way(log)
    with pytest.raises(RuntimeError, match="TorchScript"):
        fp.load(tmp_path / "script.pt")


def test_file_of_the_other_byte_order_is_left_to_torch(tmp_path: Path, log: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "model.pt"
    fp.save({"words": torch.arange(5, dtype=torch.int32)}, path)
    records = read_records(path)
    assert records["model/byteorder"] == b"little"
    records["model/byteorder"] = b"big"
    records["model/data/0"] = torch.arange(5, dtype=torch.int32).numpy().byteswap().tobytes()
    write_records(path, records)
    assert fp.load(path)["words"].tolist() == [0, 1, 2, 3, 4]
    assert went_the_stock_way(log)
    assert fp.load(path, verify=True)["words"].tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("record", [".format_version", ".storage_alignment", "byteorder", "version"])
def test_small_record_that_is_missing_means_what_it_means_to_torch(record: str, tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    fp.save({"a": torch.ones(3), "b": torch.arange(9)[1:]}, path)
    write_records(path, {n: d for n, d in read_records(path).items() if n != f"model/{record}"})
    assert outcome(lambda: fp.load(path)) == outcome(lambda: torch.load(path))


@pytest.mark.parametrize(("place", "value"), [(46, 0xFF), (8, 1), (10, 99)], ids=["name", "flags", "method"])
def test_damage_of_a_directory_that_torch_finds_is_a_format_error(place: int, value: int, tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    fp.save({"w": torch.ones(100)}, path)
    data = bytearray(path.read_bytes())
    data[data.rfind(b"PK\1\2") + place] = value
    path.write_bytes(data)
    for load in (fp.load, partial(fp.load, keys=["w"]), partial(fp.load, map_location={"cpu": "cpu"})):
        with pytest.raises(fp.FormatError, match="torch cannot read the archive") as caught:
            load(path)
        assert str(path) in str(caught.value)


class Picky:
    """Raises what torch raises of damaged archives, when it is loaded."""

    def __init__(self, error: Exception) -> None:
        self.says = str(error)
        self.is_value = isinstance(error, ValueError)

    def __setstate__(self, state: dict[str, Any]) -> None:
        raise (ValueError if state["is_value"] else RuntimeError)(state["says"])


@pytest.mark.parametrize("error", [ValueError("no"), RuntimeError("PytorchStreamReader: no")], ids=["value", "reader"])
@pytest.mark.parametrize("place", ["map_location", "class", "safe class", "package"])
def test_errors_of_other_code_are_no_damage(
    place: str, error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x.pt"
    torch.save({"w": torch.ones(3), "x": 3 if place in ("map_location", "package") else Picky(error)}, path)

    def refuse(storage: object, location: str) -> object:
        raise error

    options: dict[str, Any] = {}
    if place == "map_location":
        options = {"map_location": refuse}
    elif place == "class":
        options = {"weights_only": False}
    elif place == "package":
        registry = torch.serialization._package_registry
        monkeypatch.setattr(torch.serialization, "_package_registry", [(5, lambda storage: None, refuse), *registry])
    with torch.serialization.safe_globals([Picky] if place == "safe class" else []):
        for load in (fp.load, partial(fp.load, keys=["w"])):
            with pytest.raises(type(error), match="no") as caught:
                load(path, **options)
            assert not isinstance(caught.value, fp.FastPersistError)


def test_file_object_is_torchs(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    with path.open("wb") as file:
        report = fp.save({"a": torch.ones(3)}, file)
    assert report.engine == "torch.save"
    with path.open("rb") as file:
        assert_same(fp.load(file), {"a": torch.ones(3)})


def test_file_object_is_not_silently_left_unverified(tmp_path: Path) -> None:
    fp.save({"a": torch.ones(3)}, tmp_path / "model.pt")
    with (tmp_path / "model.pt").open("rb") as file, pytest.raises(fp.FastPersistError, match="verify"):
        fp.load(file, verify=True)


# --------------------------------------------------------------------------------------------- safety


class Malicious:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("verify", [False, True])
def test_code_in_a_file_is_not_run(verify: bool, tmp_path: Path) -> None:
    path, harm = tmp_path / "model.pt", tmp_path / "harm"
    fp.save({"weight": torch.ones(3), "evil": Malicious(harm)}, path)
    with pytest.raises(pickle.UnpicklingError) as of_torch:
        torch.load(path)
    with pytest.raises(pickle.UnpicklingError) as of_ours:
        fp.load(path, verify=verify)
    assert str(of_ours.value) == str(of_torch.value)
    assert "posix.mkdir" in str(of_ours.value)
    assert fp.verify(path).ok
    assert "posix.mkdir" in fp.inspect(path).globals
    with pytest.raises(pickle.UnpicklingError):
        fp.load_into(path, {"weight": torch.zeros(3)}, strict=False)
    assert not harm.exists()
    fp.load(path, weights_only=False)
    assert harm.exists()


def test_allowed_globals_go_the_fast_way(tmp_path: Path, log: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "model.pt"
    with SPECIMENS["wrapper_subclass"].made() as obj:
        fp.save(obj, path)
        with pytest.raises(pickle.UnpicklingError):
            fp.load(path)
        log.clear()
        with torch.serialization.safe_globals([Wrapper]):
            assert_same(fp.load(path), obj)
    assert not went_the_stock_way(log)


# --------------------------------------------------------------------------------------------- code while loading


class LoadsAnother:
    """Loads another file while it is being unpickled itself."""

    def __init__(self, path: str, loader: str) -> None:
        self.path, self.loader = path, loader

    def __reduce__(self) -> Any:
        return load_another, (self.path, self.loader), {"path": self.path, "loader": self.loader}

    def __setstate__(self, state: dict[str, str]) -> None:
        self.path, self.loader = state["path"], state["loader"]
        self.again = load_another(self.path, self.loader).loaded


def load_another(path: str, loader: str) -> LoadsAnother:
    made = LoadsAnother(path, loader)
    made.loaded = (fp.load if loader == "ours" else torch.load)(path)
    return made


@pytest.mark.parametrize("loader", ["ours", "stock"])
def test_load_inside_a_load(loader: str, tmp_path: Path) -> None:
    inner, path = tmp_path / "inner.pt", tmp_path / "outer.pt"
    fp.save({"inner": torch.arange(7), "empty": torch.empty(0)}, inner)
    before, after = torch.arange(3), torch.full((5,), 2.0)
    fp.save([before, LoadsAnother(str(inner), loader), after, torch.empty(0), before], path)
    loaded = fp.load(path, weights_only=False, verify=True)
    assert_same(loaded[1].loaded, torch.load(inner))
    assert_same(loaded[1].again, torch.load(inner))
    assert_same([loaded[0], *loaded[2:]], [before, after, torch.empty(0), before])


class Explodes:
    def __reduce__(self) -> Any:
        return explode, ()


def explode() -> None:
    raise LookupError("on purpose")


def test_exception_while_unpickling_goes_through_and_leaves_nothing(tmp_path: Path) -> None:
    fp.save([torch.ones(3), Explodes(), torch.ones(4)], tmp_path / "model.pt")
    with pytest.raises(LookupError, match="on purpose"):
        fp.load(tmp_path / "model.pt", weights_only=False)
    fp.save(torch.ones(3), tmp_path / "good.pt")
    assert fp.load(tmp_path / "good.pt").tolist() == [1, 1, 1]
    assert torch.load(tmp_path / "good.pt").tolist() == [1, 1, 1]


def test_many_threads_load_at_once(tmp_path: Path) -> None:
    for index in range(4):
        fp.save({"n": torch.full((300_000,), index), "empty": torch.empty(0)}, tmp_path / f"{index}.pt")
    failures: list[BaseException] = []

    def work(index: int) -> None:
        try:
            for round_number in range(8):
                load = torch.load if (index + round_number) % 4 == 0 else fp.load
                loaded = load(tmp_path / f"{index}.pt")
                assert loaded["n"].unique().tolist() == [index]
        except BaseException as error:  # noqa: BLE001 - handed to the test's own thread
            failures.append(error)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


# --------------------------------------------------------------------------------------------- damage


def test_flipped_bit_in_any_record_is_found_before_anything_is_unpickled(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    fp.save({"first": torch.ones(5), "second": {"inner": torch.arange(2000)}, "spy": Spy()}, path)
    good = path.read_bytes()
    for name, (offset, size) in record_places(good).items():
        for at in {offset, offset + size // 2, offset + size - 1}:
            bad = bytearray(good)
            bad[at] ^= 0x10
            path.write_bytes(bad)
            Spy.unpickled = 0
            with pytest.raises(fp.CorruptionError) as raised:
                fp.load(path, weights_only=False, verify=True)
            assert Spy.unpickled == 0
            message = str(raised.value)
            if name.startswith("data/"):
                assert isinstance(raised.value, fp.ChecksumError)
                assert ("first" if name == "data/0" else "second.inner") in message
                assert raised.value.offset_bytes == offset
            elif isinstance(raised.value, fp.ChecksumError):
                assert name in message
            assert str(path) in message


class Spy:
    unpickled = 0

    def __reduce__(self) -> Any:
        return spied, ()


def spied() -> Spy:
    Spy.unpickled += 1
    return Spy()


def test_all_damaged_storages_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    fp.save({str(index): torch.full((10,), index) for index in range(5)}, path)
    data = bytearray(path.read_bytes())
    for name, (offset, _) in record_places(bytes(data)).items():
        if name in ("data/1", "data/3", "data/4"):
            data[offset] ^= 1
    path.write_bytes(data)
    with pytest.raises(fp.ChecksumError, match="2 more damaged storages"):
        fp.load(path, verify=True)
    assert fp.load(path)["0"].tolist() == [0] * 10


def test_damage_is_found_by_verify_on_the_stock_way_too(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    fp.save({"weight": torch.ones(5)}, path)
    data = bytearray(path.read_bytes())
    data[record_places(bytes(data))["data/0"][0]] ^= 1
    path.write_bytes(data)
    with pytest.raises(fp.ChecksumError, match="weight"):
        fp.load(path, map_location=keep_storage, verify=True)


def test_file_without_checksums_says_so(tmp_path: Path) -> None:
    fp.save({"weight": torch.ones(5)}, tmp_path / "model.pt", checksum=False)
    for wanted in (None, keep_storage):
        with pytest.raises(fp.UnsupportedError, match="without checksums"):
            fp.load(tmp_path / "model.pt", verify=True, map_location=wanted)


def test_header_that_leads_elsewhere_does_not_mislead(tmp_path: Path) -> None:
    """Local headers that disagree with the directory: we go by the directory, and verify tells of other readers."""
    path = tmp_path / "model.pt"
    fp.save({"weight": torch.arange(5)}, path)
    data = bytearray(path.read_bytes())
    place = record_places(bytes(data))["data/0"][0]
    header = data.rfind(b"PK\x03\x04", 0, place)
    extra = int.from_bytes(data[header + 28 : header + 30], "little")
    data[header + 28 : header + 30] = (extra - 8).to_bytes(2, "little")
    path.write_bytes(data)
    assert torch.load(path)["weight"].tolist() != [0, 1, 2, 3, 4]
    assert fp.load(path, verify=True)["weight"].tolist() == [0, 1, 2, 3, 4]
    assert [damage.record for damage in fp.verify(path).damages] == ["data/0"]


def test_local_headers_of_many_storages_are_not_read_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Each lies before its storage. A read of its own makes the kernel read ahead: the file comes from the disk twice.
    path = tmp_path / "many.pt"
    state = [torch.full((3,), index) for index in range(500)]
    fp.save(state, path)
    counts = []
    read_at = CheckpointSource.read_at

    def counted(self: CheckpointSource, offset_bytes: int, size_bytes: int) -> bytes:
        counts.append(size_bytes)
        return read_at(self, offset_bytes, size_bytes)

    monkeypatch.setattr(CheckpointSource, "read_at", counted)
    assert all(map(torch.equal, fp.load(path), state))
    assert 0 < len(counts) < 60  # of the directory, the pickle, and small records


# ------------------------------------------------------------------------------------------ which unpickler


def plain_loads(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Count the loads by Python's own unpickler."""
    found: list[object] = []
    plain_load = unpickle.plain_load

    def counted(file: IO[bytes], storages: Mapping[str, torch.UntypedStorage], **options: Any) -> Any:
        found.append(file)
        return plain_load(file, storages, **options)

    monkeypatch.setattr(unpickle, "plain_load", counted)
    return found


def test_plain_states_are_loaded_by_pythons_own_unpickler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = plain_loads(monkeypatch)
    state = {"model": torch.nn.Linear(2, 3).state_dict(), "bf16": torch.ones(3, dtype=torch.bfloat16), "step": 4}
    torch.save(state, tmp_path / "x.pt")
    assert_same(fp.load(tmp_path / "x.pt"), state)
    assert len(found) == 1
    torch.save({**state, "size": torch.Size([1])}, tmp_path / "x.pt")
    fp.load(tmp_path / "x.pt")
    assert len(found) == 1


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"\x80\x02}q\x00", b"\x80\x02}r\xff\xff\xff\x7f"),  # Python's unpickler would allocate 2^32 entries
        (b"\x80\x02}q\x00", b"\x80\x03}q\x00"),
    ],
)
def test_pickles_that_torch_does_not_write_are_left_to_torchs_unpickler(
    old: bytes, new: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = plain_loads(monkeypatch)
    path = tmp_path / "x.pt"
    torch.save({"x": torch.arange(3)}, path)
    pkl = next(data for name, data in read_records(path).items() if name.endswith("/data.pkl"))
    assert pkl.startswith(old)
    with_pickle(path, pkl.replace(old, new, 1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch's, of the protocol
        assert torch.equal(fp.load(path)["x"], torch.arange(3))
    assert not found


@pytest.mark.parametrize("made_so", [b"(d", b"(lq\x010(d", b"}\x94", b"\x8c\x01x0}"])
def test_opcodes_that_torch_does_not_know_are_refused_as_by_torch(made_so: bytes, tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    torch.save({"x": torch.arange(3)}, path)
    pkl = next(data for name, data in read_records(path).items() if name.endswith("/data.pkl"))
    assert pkl.startswith(b"\x80\x02}q\x00")
    with_pickle(path, pkl.replace(b"}", made_so, 1))
    for load in (fp.load, torch.load):
        with pytest.raises(pickle.UnpicklingError, match="Unsupported operand"):
            load(path)


@pytest.mark.parametrize("state", [b"N", b"N}\x86", b"}}\x86", b")", b"]"])
def test_states_of_an_ordered_dict_mean_what_they_mean_to_torch(state: bytes, tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    torch.save({"x": torch.arange(3)}, path)
    with_pickle(path, b"\x80\x02ccollections\nOrderedDict\n)R" + state + b"b.")
    assert outcome(lambda: fp.load(path)) == outcome(lambda: torch.load(path))


def test_mapped_files_with_a_damaged_header_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    fp.save({"w": torch.ones(5)}, path)
    data = bytearray(path.read_bytes())
    header = data.find(b"x/data/0") - 30
    data[header + 28 : header + 30] = b"\xff\xff"
    path.write_bytes(data)
    for is_mapped in (False, True):
        with pytest.raises(fp.FormatError, match="the header of record data/0 is damaged"):
            fp.load(path, mmap=is_mapped)


@pytest.mark.parametrize("order", [*torch.serialization.LoadEndianness, None])
def test_files_that_do_not_tell_their_byte_order(order: Any, tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    fp.save({"a": torch.arange(3)}, path)
    write_records(path, {n: d for n, d in read_records(path).items() if n != "model/byteorder"})
    torch.serialization.set_default_load_endianness(order)
    try:
        assert_same(fp.load(path), torch.load(path))
    finally:
        torch.serialization.set_default_load_endianness(None)
