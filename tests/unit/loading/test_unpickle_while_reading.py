"""Unpickling beside the read: only where no code looks at bytes, and with the errors of a read that went first."""

from __future__ import annotations

import _thread
import collections
import errno
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support import native_fixtures
from support.archives import record_places
from support.leaks import no_leaks
from support.sameness import assert_same, portrait
from support.specimens import SPECIMENS
from torch.overrides import TorchFunctionMode

import fastpersist as fp
from fastpersist.loading import unpickle
from fastpersist.loading.checkpoint_file import CheckpointSource
from fastpersist.transfer import background_read
from fastpersist.transfer.reader import Extents, read_extents

fault = native_fixtures.fault

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*Sparse (CSR|CSC|BSR|BSC)|The PyTorch API of nested tensors:UserWarning"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*quantized tensor creation:UserWarning"),
    pytest.mark.filterwarnings("ignore:ComplexHalf support:UserWarning"),
]


@pytest.fixture(scope="module", autouse=True)
def nothing_is_left_behind(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    training_state()  # torch starts threads for the first step, and keeps them
    with no_leaks(tmp_path_factory.getbasetemp()):
        yield


def training_state() -> dict[str, Any]:
    model = torch.nn.Sequential(torch.nn.Linear(300, 300), torch.nn.LayerNorm(300))
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    parameters = [torch.nn.Parameter(torch.ones(3))]
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 3, "parameters": parameters}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    fp.save(training_state(), tmp_path / "model.pt")
    return tmp_path / "model.pt"


def needs_no_bytes(path: Path) -> bool:
    with CheckpointSource(str(path)) as source:
        return source.summary.needs_no_bytes


# --------------------------------------------------------------------------------------------- what may


def test_state_of_a_training_is_unpickled_while_it_is_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unpickled = threading.Event()
    original = unpickle.unpickle_with

    def unpickle_with(*arguments: Any, **options: Any) -> Any:
        loaded = original(*arguments, **options)
        unpickled.set()
        return loaded

    def read(*arguments: Any, **options: Any) -> Any:
        assert unpickled.wait(60)  # in turn, this would never happen
        return read_extents(*arguments, **options)

    monkeypatch.setattr(unpickle, "unpickle_with", unpickle_with)
    monkeypatch.setattr(background_read, "read_extents", read)
    assert_same(fp.load(path), torch.load(path))
    assert unpickled.is_set()


class Reads:
    """Its code looks at bytes."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.seen: list[float] = []

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.seen = self.tensor.tolist()


class ReadsWhenCalled:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __reduce__(self) -> Any:
        return torch.Tensor.tolist, (self.tensor,)


class SizedByATensor:
    """torch.Size takes a tensor for a number, and looks at its bytes."""

    def __reduce__(self) -> Any:
        return torch.Size, ((torch.tensor(7),),)


class RebuiltByATensor:
    def __reduce__(self) -> Any:
        shape = (torch.tensor(2),)
        storage = torch.arange(4.0)._typed_storage()
        return torch._utils._rebuild_tensor_v2, (storage, 0, shape, (1,), False, collections.OrderedDict())


class Shouting(torch.Tensor):
    pass


@pytest.mark.parametrize(
    "obj",
    [
        Reads(torch.arange(5.0)),
        ReadsWhenCalled(torch.arange(5.0)),
        SizedByATensor(),
        RebuiltByATensor(),
        torch.arange(5.0).as_subclass(Shouting),
        torch.nn.Linear(2, 2),
        torch.ones(3).to_sparse(),
        collections.Counter(a=3),
        collections.OrderedDict(a=torch.ones(2).to_sparse()),
        torch.ones(3, dtype=torch.complex64).conj(),
    ],
    ids=["setstate", "call", "size", "rebuild", "subclass", "module", "sparse", "counter", "inside", "conjugate"],
)
def test_code_that_may_look_at_bytes_waits_for_them(obj: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.pt"
    fp.save([torch.ones(3), obj], path)
    assert not needs_no_bytes(path)

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("unpickled beside the read")

    monkeypatch.setattr(unpickle, "unpickle_while_reading", refuse)
    loaded = fp.load(path, weights_only=False)[1]
    expected = torch.load(path, weights_only=False)[1]
    if isinstance(obj, Reads):
        assert loaded.seen == [0, 1, 2, 3, 4]
    elif not isinstance(obj, torch.nn.Module):
        assert_same(loaded, expected)


@pytest.mark.parametrize("name", SPECIMENS)
def test_no_specimen_whose_tensors_are_not_plain_is_unpickled_beside_the_read(name: str, tmp_path: Path) -> None:
    with SPECIMENS[name].made() as obj:
        fp.save(obj, tmp_path / "model.pt", durable=False)
        with CheckpointSource(str(tmp_path / "model.pt")) as source:
            plain = {"collections.OrderedDict", "torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_parameter"}
            called = {name for name in source.summary.globals if "Storage" not in name} - plain
            if source.summary.needs_no_bytes:
                # What is named and not called does nothing: dtypes stand for themselves.
                assert all(
                    isinstance(getattr(torch, name.removeprefix("torch."), None), torch.dtype) for name in called
                )


class Mode(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_a_mode_of_the_caller_meets_true_bytes(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unpickle, "unpickle_while_reading", None)  # a call would be an error
    with Mode():
        loaded = fp.load(path)
    assert_same(loaded, torch.load(path))
    assert_same(fp.load(path, verify=True), loaded)  # verify promises checked bytes before anything is unpickled


def test_storages_that_can_grow_are_read_first(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Growing would free the memory that is being read into.
    expected = torch.load(path)
    monkeypatch.setattr(unpickle, "unpickle_while_reading", None)  # a call would be an error
    monkeypatch.setattr(unpickle, "new_storage", lambda size_bytes, _device: torch.UntypedStorage(size_bytes))
    assert_same(fp.load(path), expected)


# --------------------------------------------------------------------------------------------- errors


def test_failure_of_any_read_is_raised_and_nothing_is_returned(path: Path, fault: Callable[..., None]) -> None:
    expected = torch.load(path)
    failed_count = 0
    for nth in range(1, 100):
        fault(op="read", nth=nth, sys_errno=errno.EIO)
        try:
            loaded = fp.load(path, engine="fault:threads-buffered")
        except fp.StorageError as error:
            failed_count += error.errno == errno.EIO
            continue
        assert_same(loaded, expected)
        break
    assert 0 < failed_count < 99


def test_short_reads_lose_nothing(path: Path, fault: Callable[..., None]) -> None:
    expected = torch.load(path)
    for nth in range(1, 10):
        fault(op="read", nth=nth, kind="short", short_bytes=5)
        assert_same(fp.load(path, engine="fault:threads-buffered"), expected)


def test_error_of_the_read_comes_before_one_of_unpickling(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise LookupError("of unpickling")

    monkeypatch.setattr(unpickle, "unpickle_with", fail)
    with pytest.raises(LookupError, match="of unpickling"):
        fp.load(path)
    monkeypatch.setattr(background_read, "read_extents", lambda *_, **__: [][0])
    with pytest.raises(IndexError):
        fp.load(path)


@pytest.mark.parametrize("load", ["load", "load_into"])
def test_damaged_header_is_found_and_nothing_changes(load: str, path: Path) -> None:
    target = {name: torch.zeros_like(tensor) for name, tensor in torch.load(path)["model"].items()}
    before = portrait(target)
    fp.save({"model": torch.load(path)["model"]}, path)
    data = bytearray(path.read_bytes())
    header = data.rfind(b"PK\x03\x04", 0, record_places(bytes(data))["data/1"][0])
    data[header] ^= 0xFF
    path.write_bytes(data)
    with pytest.raises(fp.FormatError, match="the header of record data/1 is damaged"):
        fp.load(path) if load == "load" else fp.load_into(path, {"model": target})
    assert portrait(target) == before


# --------------------------------------------------------------------------------------------- interrupts


def polled_for_ever(started: threading.Event) -> Callable[..., Any]:
    def read(_fd: int, _path: str, _extents: Extents, *, engine: str, poll: Callable[[int], None]) -> Any:
        started.set()
        while True:
            poll(0)

    return read


def test_interrupt_while_unpickling_ends_the_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = threading.Event()

    def interrupt(*_: Any, **__: Any) -> Any:
        assert started.wait(60)
        raise KeyboardInterrupt

    monkeypatch.setattr(background_read, "read_extents", polled_for_ever(started))
    monkeypatch.setattr(unpickle, "unpickle_with", interrupt)
    with pytest.raises(KeyboardInterrupt):
        fp.load(path)


def test_interrupt_while_waiting_ends_the_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    never_ending = polled_for_ever(threading.Event())

    def read(*arguments: Any, **options: Any) -> Any:
        _thread.interrupt_main()
        return never_ending(*arguments, **options)

    monkeypatch.setattr(background_read, "read_extents", read)
    with pytest.raises(KeyboardInterrupt):
        fp.load(path)


def test_without_a_thread_it_reads_first(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise RuntimeError("can't start new thread")

    expected = torch.load(path)
    monkeypatch.setattr(_thread, "start_new_thread", refuse)
    assert_same(fp.load(path), expected)
