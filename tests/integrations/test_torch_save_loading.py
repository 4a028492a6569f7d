"""Installed, torch.load does what torch's own does: same objects, same errors and warnings, for every way to call it.

Each case is one call, made twice, with torch's own function and with ours, and the outcomes are compared.
"""

from __future__ import annotations

import io
import os
import pathlib
import pickle
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from support.sameness import assert_same
from support.specimens import SPECIMENS, Network, PlainSubclass, Specimen
from support.torch_save_calls import FUNCTION_PICKLE, STOCK_LOAD, STOCK_SAVE, is_ours, outcome, registered_device
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.serialization import LoadEndianness, safe_globals, set_default_load_endianness
from torch.utils.serialization import config

import fastpersist as fp
from fastpersist.integrations import torch_save as integration

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")

Case = Callable[[], Any]

FAST: dict[str, Case] = {}
"""Calls of torch.load that go to `fastpersist.load`."""

STOCK: dict[str, Case] = {}
"""Those that it never sees, or refuses."""


def fast(call: Case) -> Case:
    FAST[call.__name__] = call
    return call


def stock(call: Case) -> Case:
    STOCK[call.__name__] = call
    return call


def state() -> dict[str, Any]:
    return {"weight": torch.arange(3000.0), "step": 7, "text": "é", "tied": [torch.ones(3)] * 2}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What is there to be loaded."""
    directory = tmp_path_factory.mktemp("files")
    STOCK_SAVE(state(), directory / "x.pt")
    fp.save(state(), directory / "ours.pt")
    fp.save(state(), directory / "ours_as.safetensors", format="torch")
    STOCK_SAVE(state(), directory / "ünï.pt")
    STOCK_SAVE(Network(), directory / "module.pt")
    STOCK_SAVE(torch.ones(3).as_subclass(PlainSubclass), directory / "subclass.pt")
    STOCK_SAVE(state(), directory / "legacy.pt", _use_new_zipfile_serialization=False)
    STOCK_SAVE(state(), directory / "protocol_5.pt", pickle_protocol=5)
    STOCK_SAVE({"function": outcome}, directory / "function.pt")
    STOCK_SAVE({"function": lambda: 5}, directory / "lambda.pt", pickle_module=FUNCTION_PICKLE)
    STOCK_SAVE(state(), directory / "no_byteorder.pt", _disable_byteorder_record=True)
    with torch.serialization.skip_data():
        STOCK_SAVE(state(), directory / "no_data.pt")
    with registered_device():
        STOCK_SAVE(torch.ones(3), directory / "own_device.pt")
    safetensors.torch.save_file({"weight": torch.arange(3.0)}, directory / "x.safetensors")
    safetensors.torch.save_file({"weight": torch.arange(3.0)}, directory / "safetensors.pt")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.jit.script(torch.nn.Linear(2, 2)).save(str(directory / "script.pt"))
    whole = (directory / "ours.pt").read_bytes()
    (directory / "truncated.pt").write_bytes(whole[:-5000])
    (directory / "only_magic.pt").write_bytes(whole[:4])
    (directory / "zeroed_tail.pt").write_bytes(whole[:-64] + bytes(64))
    (directory / "bad_pickle.pt").write_bytes(whole.replace(b"step", b"\xff\xff\xff\xff", 1))
    (directory / "empty.pt").write_bytes(b"")
    (directory / "garbage.pt").write_bytes(b"garbage" * 500)
    (directory / "plain.pickle").write_bytes(pickle.dumps([1, 2]))
    (directory / "directory").mkdir()
    (directory / "loop.pt").symlink_to("loop.pt")
    (directory / "link.pt").symlink_to("ours.pt")
    return directory


@pytest.fixture(autouse=True)
def in_their_directory(files: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(files)
    yield
    assert (torch.save, torch.load) == (STOCK_SAVE, STOCK_LOAD)


@pytest.fixture
def fast_loads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The paths that we have loaded, from now on."""
    loaded: list[str] = []
    fast_load = integration.fast_load

    def note(path: str, **options: Any) -> Any:
        value = fast_load(path, **options)
        loaded.append(path)
        return value

    monkeypatch.setattr(integration, "fast_load", note)
    return loaded


# --------------------------------------------------------------------------------------------- calls

for name in ("x.pt", "ours.pt", "ünï.pt", "link.pt", "./x.pt"):
    FAST[f"path {name}"] = lambda name=name: torch.load(name)

for path in (Path("x.pt"), pathlib.PurePosixPath("x.pt")):
    FAST[f"path {path!r}"] = lambda path=path: torch.load(path)

for name in (
    *("missing.pt", "missing/x.pt", "", "directory", "loop.pt", "x.pt/x", "nul\0.pt", "/dev/null"),
    *("empty.pt", "garbage.pt", "plain.pickle", "truncated.pt", "only_magic.pt", "zeroed_tail.pt", "bad_pickle.pt"),
    *("legacy.pt", "script.pt", "x.safetensors", "safetensors.pt", "ours_as.safetensors"),
    *("module.pt", "subclass.pt", "function.pt", "lambda.pt", "own_device.pt"),
):
    for weights_only in (True, False):
        STOCK[f"path {name} {weights_only}"] = lambda name=name, weights_only=weights_only: torch.load(
            name, weights_only=weights_only
        )
for name in ("module.pt", "subclass.pt", "function.pt"):
    FAST[f"path {name} False"] = STOCK.pop(f"path {name} False")
for name in ("script.pt", "lambda.pt"):  # no two objects from them are the same
    del STOCK[f"path {name} False"]

for number, location in enumerate(
    [
        *("cpu", torch.device("cpu"), {}, {"cpu": "cpu"}, {"cuda:0": "cpu"}),
        *("meta", torch.device("meta"), {"cpu": "meta"}),
        *(["cuda", {"cpu": "cuda:0"}] if torch.cuda.is_available() else []),
    ]
):
    FAST[f"map_location {number}"] = lambda location=location: torch.load("x.pt", map_location=location)

for number, location in enumerate(
    [
        *("cuda:99", "nonsense", "CPU", "cpu:0", b"cpu", 0, 3.5, []),
        *({"cpu": torch.device("cpu")}, {"cpu": "nonsense"}),
        *(lambda storage, location: storage, lambda storage, location: None, lambda storage, location: location),
    ]
):
    STOCK[f"map_location {number}"] = lambda location=location: torch.load("x.pt", map_location=location)
    STOCK[f"map_location {number} safetensors"] = lambda location=location: torch.load("x.safetensors", location)

for weights_only in (None, True, False, 1, 0, "yes", ""):
    FAST[f"weights_only {weights_only!r}"] = lambda value=weights_only: torch.load("x.pt", weights_only=value)
    (STOCK if weights_only in (None, True, "yes") else FAST)[f"weights_only {weights_only!r} of a module"] = (
        lambda value=weights_only: torch.load("module.pt", weights_only=value)
    )


@fast
def from_its_module() -> Any:
    return torch.serialization.load("x.pt")


@fast
def by_name() -> Any:
    return torch.load(f="x.pt", map_location=None, pickle_module=None, weights_only=None, mmap=None)


@fast
def inside_a_default_device() -> Any:
    with torch.device("meta"):
        return torch.load("x.pt")


@fast
def with_allowed_globals() -> Any:
    with safe_globals([PlainSubclass]):
        return torch.load("subclass.pt")


@fast
def without_a_byte_order_record() -> Any:
    return torch.load("no_byteorder.pt")


@fast
def of_protocol_5() -> Any:
    return torch.load("protocol_5.pt", weights_only=False)


@stock
def from_an_open_file() -> Any:
    with open("x.pt", "rb") as file:
        return torch.load(file)


@stock
def from_memory() -> Any:
    return torch.load(io.BytesIO(Path("x.pt").read_bytes()))


@stock
def from_a_pipe() -> Any:
    end, other_end = os.pipe()
    os.close(other_end)
    with open(end, "rb") as file:
        return torch.load(file)


@stock
def from_a_named_pipe() -> Any:
    os.mkfifo("pipe")
    fd = os.open("pipe", os.O_RDWR)
    os.write(fd, b"PK\x03\x04 and more")
    try:
        torch.load("pipe")
    finally:
        assert os.read(fd, 100) == b"PK\x03\x04 and more"
        os.close(fd)
        os.unlink("pipe")


@stock
def from_what_is_no_path() -> Any:
    return torch.load(5)


@stock
def from_a_path_of_bytes() -> Any:
    return torch.load(b"x.pt")


@fast
def of_torchscript() -> Any:
    return torch.load("script.pt", weights_only=False).state_dict()


@stock
def with_a_pickle_module_that_can_more() -> Any:
    return torch.load("lambda.pt", pickle_module=FUNCTION_PICKLE, weights_only=False)["function"]()


@stock
def with_pickle_by_name() -> Any:
    return torch.load("module.pt", pickle_module=pickle, weights_only=False)


@stock
def with_a_pickle_module_and_weights_only() -> Any:
    return torch.load("x.pt", pickle_module=pickle, weights_only=True)


@stock
def mapped() -> Any:
    return torch.load("ours.pt", mmap=True)


@stock
def mapped_with_offsets_that_torch_calculates() -> Any:
    with config.patch({"load.calculate_storage_offsets": True}):
        return torch.load("ours.pt", mmap=True)


@stock
def mapped_where_that_is_impossible() -> Any:
    return torch.load("legacy.pt", mmap=True)


@stock
def mapped_by_default() -> Any:
    with config.patch({"load.mmap": True}):
        return torch.load("x.pt")


@fast
def not_mapped_in_spite_of_the_default() -> Any:
    with config.patch({"load.mmap": True}):
        return torch.load("x.pt", mmap=False)


@stock
def with_an_encoding() -> Any:
    return torch.load("x.pt", encoding="latin1", weights_only=False)


@stock
def with_an_encoding_that_is_not_used() -> Any:
    return torch.load("x.pt", encoding="utf-8")


@stock
def with_unknown_options() -> Any:
    return torch.load("x.pt", weights_only=False, unknown=1)


@stock
def with_positions_that_do_not_exist() -> Any:
    return torch.load("x.pt", None, None, True)  # type: ignore[misc]


@fast
def without_data() -> Any:
    with torch.serialization.skip_data():
        return torch.load("no_data.pt")["weight"].shape


@fast
def fake_tensors() -> Any:
    with FakeTensorMode():
        weight = torch.load("x.pt")["weight"]
    return type(weight), weight.shape, weight.untyped_storage()._checkpoint_offset


@stock
def in_the_other_byte_order() -> Any:
    set_default_load_endianness(LoadEndianness.BIG)
    try:
        return torch.load("no_byteorder.pt")
    finally:
        set_default_load_endianness(None)


@fast
def of_a_registered_device() -> Any:
    with registered_device():
        return torch.load("own_device.pt")


for variable in ("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"):
    for weights_only in (None, True, False):

        def forced(variable: str = variable, weights_only: bool | None = weights_only) -> Any:
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv(variable, "1")
                return torch.load("module.pt", weights_only=weights_only)

        STOCK[f"{variable} {weights_only}"] = forced


@pytest.mark.parametrize("name", FAST)
def test_what_we_load_is_what_torch_loads(name: str, fast_loads: list[str]) -> None:
    expected = outcome(FAST[name])
    assert expected.error is None
    with fp.installed():
        ended = outcome(FAST[name])
    ended.assert_like(expected)
    assert fast_loads


@pytest.mark.parametrize("name", STOCK)
def test_what_is_passed_on_ends_as_torch_ends_it(name: str, fast_loads: list[str]) -> None:
    expected = outcome(STOCK[name])
    with fp.installed():
        ended = outcome(STOCK[name])
    ended.assert_like(expected)
    assert not fast_loads


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's, of what it calls experimental or deprecated
@pytest.mark.parametrize("specimen", SPECIMENS.values(), ids=SPECIMENS)
def test_every_kind_of_object_goes_both_ways(specimen: Specimen, tmp_path: Path, fast_loads: list[str]) -> None:
    with specimen.made() as obj:
        STOCK_SAVE(obj, tmp_path / "x.pt")
        expected = STOCK_LOAD(tmp_path / "x.pt", weights_only=specimen.weights_only)
        (tmp_path / "ours").mkdir()
        with fp.installed():
            torch.save(obj, tmp_path / "ours" / "x.pt")
            assert_same(torch.load(tmp_path / "ours" / "x.pt", weights_only=specimen.weights_only), expected)
            assert_same(torch.load(tmp_path / "x.pt", weights_only=specimen.weights_only), expected)
        assert is_ours(tmp_path / "ours" / "x.pt")
        assert len(fast_loads) == 2
        assert_same(STOCK_LOAD(tmp_path / "ours" / "x.pt", weights_only=specimen.weights_only), expected)
