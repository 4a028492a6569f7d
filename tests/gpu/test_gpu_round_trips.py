"""Whatever is saved from a GPU comes back, in our file the bytes that torch.save writes, on every device."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.archives import assert_same_files, flip_bit, record_places, save_aligned
from support.gpu_device import DEVICE, GPU, devices_in, host_copy, host_portrait, random_tensor, run_python
from support.states import differences

import fastpersist as fp

pytestmark = [
    *GPU,
    pytest.mark.filterwarnings("ignore:ComplexHalf support:UserWarning"),
    pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning"),
]

_DTYPES = [
    dtype
    for name in (
        "float64 float32 float16 bfloat16 complex128 complex64 complex32 int64 int32 int16 int8 uint8 uint16 uint32 "
        "uint64 bool float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu float4_e2m1fn_x2"
    ).split()
    if (dtype := getattr(torch, name, None)) is not None
]


def bits(count: int, dtype: torch.dtype) -> torch.Tensor:
    """Return `count` elements of random bits on the device; as numbers, some are NaN."""
    generator = torch.Generator().manual_seed(count)
    raw = torch.randint(0, 256, (count * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    if dtype == torch.bool:
        raw &= 1
    return raw.to(DEVICE).view(dtype)


def views() -> Any:
    base = random_tensor(10_000)
    square = base[:900].view(30, 30)
    return {"base": base, "middle": base[100:200], "transposed": square.T, "stepped": base[::7], "one": base[5]}


def shared() -> Any:
    weight = torch.nn.Parameter(random_tensor(300_000))
    return {"a": weight, "b": weight, "c": [weight.detach(), weight.data[5:].view(-1, 1)]}


def mixed() -> Any:
    host = torch.arange(400_000)
    return {"host": host, "device": random_tensor(400_000), "again": host[10:], "both": (host, random_tensor(7))}


def empty() -> Any:
    return {
        "none": torch.empty(0, device=DEVICE),
        "no rows": torch.empty(0, 5, device=DEVICE),
        "scalar": torch.tensor(3.5, device=DEVICE),
        "expanded": torch.ones(1, device=DEVICE).expand(1000),
    }


def sparse() -> Any:
    dense = random_tensor(10_000).view(100, 100).relu()
    return {"coo": dense.to_sparse().coalesce(), "csr": dense.to_sparse_csr()}


def optimizer_state() -> Any:
    model = torch.nn.Sequential(torch.nn.Linear(300, 300), torch.nn.BatchNorm1d(300)).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(8, 300, device=DEVICE)).sum().backward()
    optimizer.step()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 7}


def large_and_small() -> Any:
    """More than the ring holds, beside storages that are gathered, and sizes that fit no block."""
    sizes = [1, 4095, 4096, 4097, (1 << 20) // 4 - 1, (1 << 20) // 4, 2_097_153, 20_000_003]
    return {f"{size}": random_tensor(size, size) for size in sizes} | {f"s{i}": random_tensor(i, i) for i in range(200)}


def offsets() -> Any:
    """Storages whose first byte lies anywhere in the memory that they were cut from."""
    base = torch.arange(1 << 20, dtype=torch.uint8, device=DEVICE)
    return [base[start:].clone() for start in (0, 1, 255, 4097)] + [base[3:].view(-1)[5:70_000]]


OBJECTS: list[Callable[[], Any]] = [
    views, shared, mixed, empty, sparse, optimizer_state, large_and_small, offsets,
]  # fmt: skip


def expect_the_same(obj: Any, directory: Path, *, checksum: bool = True) -> Path:
    """Save an object by us and by torch; look at the file, and at what each reader makes of it."""
    ours, stock = directory / "ours" / "model.pt", directory / "stock" / "model.pt"
    for path in (ours, stock):
        path.parent.mkdir(exist_ok=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, on sparse layouts
        before = host_portrait(obj)
        fp.save(obj, ours, checksum=checksum)
        save_aligned(obj, stock, checksum=checksum)
        assert host_portrait(obj) == before
        assert_same_files(ours, stock)
        loaded, expected = fp.load(ours, weights_only=False, verify=checksum), torch.load(stock, weights_only=False)
        assert host_portrait(loaded) == host_portrait(expected) == before
        assert devices_in(loaded) == devices_in(expected) == devices_in(obj)
    assert fp.verify(ours).ok
    return ours


@pytest.mark.parametrize("dtype", _DTYPES, ids=str)
def test_every_dtype(dtype: torch.dtype, tmp_path: Path) -> None:
    expect_the_same({"large": bits(300_001, dtype), "small": bits(3, dtype), "odd": bits(4_097, dtype)[1:]}, tmp_path)


@pytest.mark.parametrize("make", OBJECTS, ids=lambda make: make.__name__)
@pytest.mark.parametrize("checksum", [True, False])
def test_files_are_those_of_torch_save(make: Callable[[], Any], checksum: bool, tmp_path: Path) -> None:
    expect_the_same(make(), tmp_path, checksum=checksum)


def test_twelve_thousand_small_tensors(tmp_path: Path) -> None:
    numbers = random_tensor(12_000 * 50)
    expect_the_same({f"t{i}": numbers[i * 50 : i * 50 + 1 + i % 50].clone() for i in range(12_000)}, tmp_path)


@pytest.mark.parametrize("pinned", [False, True])
def test_host_tensors_beside_those_of_the_device(pinned: bool, tmp_path: Path) -> None:
    if pinned and DEVICE.type != "cuda":
        pytest.skip("pinned memory is the CUDA driver's")
    host = torch.randn(500_000, pin_memory=pinned)
    expect_the_same({"host": host, "device": random_tensor(500_000, 1), "small": torch.ones(3)}, tmp_path)


@pytest.mark.parametrize("engine", ["uring", "libaio", "threads", "threads-buffered", "uring-buffered"])
def test_every_engine_that_works_here(engine: str, tmp_path: Path) -> None:
    if not any(probe.name == engine and probe.usable for probe in fp.engines(tmp_path)):
        pytest.skip(f"{engine} does not work in this directory")
    state = large_and_small()
    fp.save(state, tmp_path / "model.pt", engine=engine)
    assert not differences(host_copy(fp.load(tmp_path / "model.pt", engine=engine)), host_copy(state))


def test_a_ring_of_four_small_chunks(tmp_path: Path) -> None:
    """Every storage is many pieces, and waits for room in the ring."""
    small_ring = {"FASTPERSIST_CHUNK_BYTES": str(64 << 10), "FASTPERSIST_RING_BYTES": str(256 << 10)}
    code = """
        state = {str(count): torch.randn(count, device=device) for count in (1, 100, 16_384, 16_385, 3_000_001)}
        state |= {f"s{i}": torch.full((100,), float(i), device=device) for i in range(2_000)}
        fp.save(state, "model.pt")
        for found in (fp.load("model.pt", verify=True), torch.load("model.pt")):
            assert found.keys() == state.keys()
            assert all(torch.equal(found[name], state[name]) for name in state)
        target = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
        fp.load_into("model.pt", target)
        assert all(torch.equal(target[name], state[name]) for name in state)
        print("done")
    """
    assert run_python(code, tmp_path, small_ring) == "done\n"


# --- loading


def as_device(storage: Any, location: str) -> Any:
    return storage.to(device=DEVICE)


MAP_LOCATIONS = {
    "None": None,
    "name": str(DEVICE),
    "type": DEVICE.type,
    "device": DEVICE,
    "host": "cpu",
    "dict to host": {str(DEVICE): "cpu"},
    "dict to device": {"cpu": str(DEVICE)},
    "callable": as_device,
}


@pytest.mark.parametrize("where", list(MAP_LOCATIONS))
@pytest.mark.parametrize("writer", ["ours", "torch"])
def test_map_location_means_what_it_means_to_torch(where: str, writer: str, tmp_path: Path) -> None:
    path, obj = tmp_path / "model.pt", {**mixed(), "views": views(), "empty": empty()}
    if writer == "ours":
        fp.save(obj, path)
    else:
        torch.save(obj, path)
    map_location: Any = MAP_LOCATIONS[where]
    loaded, expected = fp.load(path, map_location=map_location), torch.load(path, map_location=map_location)
    assert devices_in(loaded) == devices_in(expected)
    assert host_portrait(loaded) == host_portrait(expected) == host_portrait(obj)


def test_a_file_of_the_host_is_loaded_to_the_device(tmp_path: Path) -> None:
    obj = host_copy(large_and_small())
    fp.save(obj, tmp_path / "model.pt")
    loaded: Any = fp.load(tmp_path / "model.pt", map_location=DEVICE, verify=True)
    assert set(devices_in(loaded)) == {str(DEVICE)}
    assert not differences(host_copy(loaded), obj)


@pytest.mark.parametrize("source", ["cpu", str(DEVICE)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_load_into_a_module_on_the_device(source: str, dtype: torch.dtype, tmp_path: Path) -> None:
    def model() -> torch.nn.Module:
        layers = [torch.nn.Linear(700, 700), torch.nn.BatchNorm1d(700), torch.nn.Linear(700, 3, bias=False)]
        return torch.nn.Sequential(*layers)

    saved, target = model().to(source), model().to(DEVICE).to(dtype)
    fp.save(saved.state_dict(), tmp_path / "model.pt")
    places = [parameter.data_ptr() for parameter in target.parameters()]
    fp.load_into(tmp_path / "model.pt", target)
    assert [parameter.data_ptr() for parameter in target.parameters()] == places
    wanted = model().to(dtype)
    wanted.load_state_dict(host_copy(saved.state_dict()))
    assert not differences(host_copy(target.state_dict()), host_copy(wanted.state_dict()))


def test_load_into_strided_shared_and_mixed_targets(tmp_path: Path) -> None:
    state = {
        "rows": random_tensor(40_000).view(200, 200),
        "flat": random_tensor(70_001, 1),
        "host": torch.arange(9_000),
    }
    fp.save(state, tmp_path / "model.pt")
    base = torch.zeros(400, 400, device=DEVICE)
    target = {
        "rows": base[::2, ::2],
        "flat": torch.zeros(70_003, device=DEVICE)[1:70_002],
        "host": torch.zeros(9_000, dtype=torch.int64),
    }
    fp.load_into(tmp_path / "model.pt", target)
    assert all(torch.equal(target[name].cpu(), tensor.cpu()) for name, tensor in state.items())
    assert not base[1::2].any(), "between the rows nothing was to be written"
    assert not base[:, 1::2].any()


def test_safetensors_there_and_back(tmp_path: Path) -> None:
    load_file = pytest.importorskip("safetensors.torch").load_file
    state = {"a": random_tensor(300_000), "b": random_tensor(7, 1, torch.bfloat16), "c": torch.empty(0, device=DEVICE)}
    fp.save(state, tmp_path / "model.safetensors")
    assert not differences(load_file(tmp_path / "model.safetensors"), host_copy(state))
    loaded: Any = fp.load(tmp_path / "model.safetensors", map_location=DEVICE)
    assert set(devices_in(loaded)) == {str(DEVICE)}
    assert not differences(host_copy(loaded), host_copy(state))


def test_damage_is_found_on_the_way_to_the_device(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    fp.save({"a": random_tensor(3_000_000)}, path)
    offset_bytes, _ = record_places(path.read_bytes())["data/0"]
    flip_bit(path, offset_bytes + 9_000_001)
    with pytest.raises(fp.ChecksumError):
        fp.load(path, map_location=DEVICE, verify=True)
    target = {"a": torch.zeros(3_000_000, device=DEVICE)}
    with pytest.raises(fp.ChecksumError):
        fp.load_into(path, target, verify=True)
    assert not target["a"].any(), "nothing may change before all is checked"
