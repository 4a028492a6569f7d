"""No tensor of a file reaches beyond its storage, however the pickle describes it, and whichever way it is loaded."""

from __future__ import annotations

import itertools
import json
import pickle
import random
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.archives import read_records, save_aligned
from support.crafted_pickles import HUGE, NUMEL, Made, Storage, craft, tensor
from support.sameness import assert_same, portrait
from support.torch_release import TORCH

import fastpersist as fp
from fastpersist.loading.restore import load_state
from fastpersist.loading.unpickle import new_storage

ENGINE = "threads-buffered"

# --------------------------------------------------------------------------------------------- crafted pickles


def longs(key: int, shape: tuple[int, ...]) -> Made:
    stride = (shape[-1], 1) if len(shape) == 2 else (1,)
    return tensor(shape, stride, storage=Storage(key, torch.LongStorage, 8))


def quantized(*quantizer: object) -> Made:
    storage = Storage(0, torch.QInt8Storage, 64)
    return Made(torch._utils._rebuild_qtensor, storage, 0, (HUGE,), (1,), quantizer, False, OrderedDict())


REBUILT = torch._utils
INNER = tensor((4,), (1,))

BEYOND: dict[str, Callable[[], object]] = {
    "shape": lambda: tensor((HUGE,), (1,)),
    "one element": lambda: tensor((NUMEL + 1,), (1,)),
    "offset": lambda: tensor((4,), (1,), 13),
    "offset far away": lambda: tensor((4,), (1,), 1 << 40),
    "stride": lambda: tensor((4,), (6,)),
    "stride of an inner dimension": lambda: tensor((2, 2), (1, 15)),
    "product beyond 64 bits": lambda: tensor((1 << 62, 1 << 62), (4, 4)),
    "sum beyond 64 bits": lambda: tensor((2, 2), ((1 << 63) - 1, (1 << 63) - 1)),
    "negative stride": lambda: tensor((4,), (-1,), 3),
    "negative offset": lambda: tensor((4,), (1,), -4),
    "first version": lambda: Made(REBUILT._rebuild_tensor, Storage(0), 0, (HUGE,), (1,)),
    "wider dtype": lambda: Made(
        REBUILT._rebuild_tensor_v3, Storage(0), 0, (NUMEL,), (1,), False, OrderedDict(), torch.float64
    ),
    "parameter": lambda: Made(REBUILT._rebuild_parameter, tensor((HUGE,), (1,)), True, OrderedDict()),
    "parameter with a state": lambda: Made(
        REBUILT._rebuild_parameter_with_state, tensor((HUGE,), (1,)), True, OrderedDict(), {}
    ),
    "attributes": lambda: Made(
        torch._tensor._rebuild_from_type_v2,
        REBUILT._rebuild_tensor_v2,
        torch.Tensor,
        (Storage(0), 0, (HUGE,), (1,), False, OrderedDict()),
        {"note": 1},
    ),
    "other device": lambda: Made(
        REBUILT._rebuild_device_tensor_from_cpu_tensor, tensor((HUGE,), (1,)), torch.float32, "cpu", False
    ),
    "quantized": lambda: quantized(torch.per_tensor_affine, 0.1, 0),
    "quantized by channel": lambda: quantized(torch.per_channel_affine, [0.1] * HUGE, [0] * HUGE, 0),
    "values of a sparse tensor": lambda: Made(
        REBUILT._rebuild_sparse_tensor, torch.sparse_coo, (longs(1, (1, 8)), tensor((HUGE,), (1,)), (8,))
    ),
    "indices of a sparse tensor": lambda: Made(
        REBUILT._rebuild_sparse_tensor, torch.sparse_coo, (longs(1, (1, HUGE)), tensor((8,), (1,)), (8,))
    ),
    "rows of a compressed tensor": lambda: Made(
        REBUILT._rebuild_sparse_tensor,
        torch.sparse_csr,
        (longs(1, (HUGE,)), longs(2, (8,)), tensor((8,), (1,)), (HUGE - 1, 8)),
    ),
    "buffer of a nested tensor": lambda: Made(
        REBUILT._rebuild_nested_tensor, tensor((HUGE,), (1,)), longs(1, (2, 2)), longs(2, (2, 2)), longs(3, (2,))
    ),
    "state: set_ on a tensor": lambda: tensor((4,), (1,), state=(INNER, 0, (HUGE,), (1,))),
    "state: set_ on a storage": lambda: tensor((4,), (1,), state=(Storage(0), 0, (HUGE,), (1,))),
    "legacy: a tensor that gets a storage": lambda: Made(torch.Tensor, state=(Storage(0), 0, (HUGE,), (1,))),
    "legacy: a parameter that gets a tensor": lambda: Made(
        torch.nn.Parameter, tensor((4,), (1,)), state=(tensor((HUGE,), (1,)), True, OrderedDict())
    ),
    "second tensor of a storage": lambda: [tensor((4,), (1,)), tensor((HUGE,), (1,))],
    "storage without bytes": lambda: tensor((HUGE,), (1,), storage=Storage(0, numel=0)),
    "storage that is declared longer": lambda: tensor((HUGE,), (1,), storage=Storage(0, numel=HUGE)),
}
"""One object for each way in which torch's unpickler makes a tensor, or changes where it lies."""

REFUSED_BY_TORCH_SINCE = {
    "storage that is declared longer": (2, 10),
    "quantized": (2, 13),
    "quantized by channel": (2, 13),
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.pt"


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def refusal(load: Callable[[], object]) -> str:
    """Return class and message of the error; fail if there is none."""
    try:
        loaded = load()
    except (fp.FastPersistError, RuntimeError, ValueError, TypeError, OverflowError, pickle.UnpicklingError) as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError(f"it was loaded: {loaded!r:.200}")


@pytest.mark.parametrize("name", BEYOND)
def test_tensor_beyond_its_storage_is_refused_as_by_torch(name: str, path: Path) -> None:
    craft(path, BEYOND[name]())
    if REFUSED_BY_TORCH_SINCE.get(name, TORCH) <= TORCH:
        assert refusal(lambda: torch.load(path))
    for weights_only in (True, False):
        for verify in (True, False):
            assert refusal(lambda: fp.load(path, verify=verify, weights_only=weights_only))  # noqa: B023


@pytest.mark.parametrize("name", BEYOND)
def test_tensor_beyond_its_storage_fills_no_target(name: str, path: Path) -> None:
    craft(path, {"a": BEYOND[name](), "b": tensor((2,), (1,))})
    for target in ({"a": torch.zeros(HUGE), "b": torch.zeros(2)}, {"b": torch.zeros(2)}):
        assert refusal(lambda: fp.load_into(path, target, strict=False))  # noqa: B023
        assert not any(value.any() for value in target.values())


@pytest.mark.parametrize("name", BEYOND)
def test_tensor_beyond_its_storage_restores_no_state(name: str, path: Path) -> None:
    """As Checkpointer.load reads the file of a step, with targets and without."""
    craft(path, {"a": BEYOND[name](), "b": tensor((2,), (1,))})
    options: dict[str, Any] = {"map_location": None, "weights_only": True, "engine": ENGINE}
    for verify in (True, False):
        assert refusal(lambda: load_state(str(path), into=None, verify=verify, **options))  # noqa: B023
        for into in ({"a": torch.zeros(HUGE)}, {"a": torch.zeros(HUGE), "b": torch.zeros(2)}):
            assert refusal(lambda: load_state(str(path), into=into, verify=verify, **options))  # noqa: B023
            assert not any(value.any() for value in into.values())


def test_checkpointer_goes_back_before_a_step_whose_tensor_reaches_beyond_its_storage(tmp_path: Path) -> None:
    with fp.Checkpointer(tmp_path) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, {"w": torch.full((4,), float(step))}).result()
    craft(tmp_path / "step-00000002" / "state.pt", {"w": tensor((HUGE,), (1,))})
    manifest = tmp_path / "step-00000002" / "MANIFEST.json"
    content = json.loads(manifest.read_text())
    state = (tmp_path / "step-00000002" / "state.pt").read_bytes()
    for entry in content["files"]:
        if entry["name"] == "state.pt":
            entry["size_bytes"] = len(state)
            entry.pop("crc32", None)
    manifest.write_text(json.dumps(content))
    with fp.Checkpointer(tmp_path) as checkpoints:
        with pytest.warns(RuntimeWarning, match="tensor 'w' reaches beyond"):
            assert checkpoints.load()["w"].tolist() == [1.0] * 4


def test_refusal_names_the_tensor(path: Path) -> None:
    craft(path, {"model": {"good": tensor((4,), (1,)), "bad": tensor((2, 8), (9, 1))}})
    with pytest.raises(fp.FormatError) as raised:
        fp.load(path)
    assert str(raised.value) == f"{path}: tensor 'model.bad' reaches beyond the 64 bytes of its storage 0"
    with pytest.raises(fp.FormatError, match=r"tensor 'model\.bad' reaches beyond"):
        fp.load_into(path, {"model": {"good": torch.zeros(4)}}, strict=False)


def test_tensors_that_end_with_their_storage_are_loaded(path: Path) -> None:
    craft(
        path,
        [
            tensor((NUMEL,), (1,)),
            tensor((2, 8), (8, 1)),
            tensor((0, 5), (100, 1)),
            tensor((3,), (0,), NUMEL - 1),
            tensor((4,), (5,)),
        ],
    )
    assert_same(fp.load(path, verify=True), torch.load(path))


def test_storages_that_are_handed_out_cannot_grow(tmp_path: Path) -> None:
    for size_bytes in (0, 1, 100, 1 << 20):
        storage = new_storage(size_bytes, torch.device("cpu"))
        assert storage.nbytes() == size_bytes
        with pytest.raises(RuntimeError, match="not resizable"):
            storage.resize_(size_bytes + 1)


class Grows:
    """Lets a storage grow while it is unpickled, as code of a file may with weights_only=False."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __setstate__(self, state: dict[str, torch.Tensor]) -> None:
        self.tensor = state["tensor"]
        self.tensor.untyped_storage().resize_(1 << 20)


def test_code_of_the_file_cannot_let_a_storage_grow(path: Path) -> None:
    fp.save({"spoiled": Grows(torch.ones(4))}, path)
    assert "not resizable" in refusal(lambda: torch.load(path, weights_only=False))
    assert "not resizable" in refusal(lambda: fp.load(path, weights_only=False))


def test_storage_of_a_device_that_has_grown_is_found(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch lets memory of a device grow; here host memory that can grow stands for it."""
    monkeypatch.setattr("fastpersist.loading.unpickle.new_storage", lambda size, device: torch.UntypedStorage(size))
    craft(path, {"w": tensor((HUGE,), (1,))})
    with pytest.raises(fp.FormatError, match="tensor 'w' reaches beyond the 64 bytes of its storage 0"):
        fp.load(path)


# --------------------------------------------------------------------------------------------- every byte


def small_file(path: Path, *, of_torch: bool) -> bytes:
    state = {"a": torch.arange(12.0).view(2, 6)[:, ::2], "p": torch.nn.Parameter(torch.ones(3).bfloat16())}
    if of_torch:
        save_aligned(state, path, alignment=64)
        return path.read_bytes()
    fp.save(state, path)
    return path.read_bytes()


def assert_no_more_is_taken_than_by_torch(path: Path, good: bytes, changes: Iterator[tuple[int, int]]) -> None:
    taken_count = 0
    for at, value in changes:
        path.write_bytes(good[:at] + bytes([value]) + good[at + 1 :])
        try:
            # What we leave to torch is its own affair, and may be chance: where the serialization id is said to be
            # compressed, torch takes memory that nobody has written for it, and refuses the file if that is no UTF-8.
            with pytest.MonkeyPatch.context() as patched:
                patched.setattr("fastpersist.loading.unpickle._load_stock", None)
                fp.load(path, engine=ENGINE)
        except Exception:  # noqa: BLE001 - which error is for other tests
            continue
        taken_count += 1
        try:
            torch.load(path)
        except Exception as error:
            raise AssertionError(f"torch refuses byte {at} = {value}, and we do not: {error}") from error
    assert taken_count  # in padding and in the tensors


def changed_bytes(good: bytes, seed: int) -> Iterator[tuple[int, int]]:
    rng = random.Random(seed)
    for at, byte in enumerate(good):
        if good[max(0, at - 32) : at + 32].count(byte) == 64:
            continue  # amid padding
        yield at, rng.choice([byte ^ 1, byte ^ 0x80, (byte + rng.randrange(1, 256)) % 256])


@pytest.mark.slow  # loads a file once for each of its bytes, or each third, by torch, too
@pytest.mark.parametrize("byte_step", [3, pytest.param(1, marks=pytest.mark.long)])
@pytest.mark.parametrize("of_torch", [True, False])
def test_no_changed_byte_is_taken_that_torch_refuses(of_torch: bool, byte_step: int, path: Path) -> None:
    good = small_file(path, of_torch=of_torch)
    changes = itertools.islice(changed_bytes(good, seed=1), 0, None, byte_step)
    assert_no_more_is_taken_than_by_torch(path, good, changes)


@pytest.mark.long
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("of_torch", [True, False])
def test_no_byte_of_any_value_is_taken_that_torch_refuses(of_torch: bool, path: Path) -> None:
    good = small_file(path, of_torch=of_torch)
    step = 1 if of_torch else 16  # ours is padded to pages
    changes = ((at, value) for at in range(0, len(good), step) for value in range(256) if value != good[at])
    assert_no_more_is_taken_than_by_torch(path, good, changes)


@pytest.mark.parametrize("size", [1, 5])
def test_header_that_leads_out_of_the_file_is_refused_as_by_torch(size: int, path: Path) -> None:
    fp.save({"w": torch.ones(size)}, path)
    name = next(name for name in read_records(path) if name.endswith("/data/0")).encode()
    data = bytearray(path.read_bytes())
    header = data.find(name) - 30
    data[header + 28 : header + 30] = b"\xff\xff"
    path.write_bytes(data)
    assert "invalid header" in refusal(lambda: torch.load(path))
    with pytest.raises(fp.FormatError, match="the header of record data/0 is damaged") as raised:
        fp.load(path)
    assert raised.value.offset_bytes == header
    assert portrait(fp.inspect(path).tensors[0].shape) == portrait((size,))
