"""Files between the disk and a CUDA device with nothing in host memory between them: the engine "cufile".

Over the doubles of the driver and of libcufile.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.cuda_double import PLAIN_ERROR, read_storage
from support.cufile_double import CuFileDouble, cufile_double
from support.device_states import Stage, bytes_in, device_stage, device_state, packed_state

import fastpersist as fp
from fastpersist import _native, cufile
from fastpersist.errors import ConfigError, DeviceError, StorageError, UnsupportedError
from fastpersist.pipeline import Pieces, Writer

CHUNK = 1 << 16
SIZES = [5_000, 100, 20_000, 300_000, 0, 1, 11 * CHUNK, 4096]


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    with device_stage(monkeypatch) as stage:
        stage.allow_loading()
        yield stage


@pytest.fixture
def library(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> Iterator[CuFileDouble]:
    monkeypatch.setattr(cufile, "_MODULES", "/proc/self")  # which the double does not look for
    double = cufile_double()
    double.clear()
    yield double
    violations = double.violations
    double.clear()
    assert violations == []


def ring_is_free() -> bool:
    return _native.ring_free_count() == _native.ring_buffer_count()


def test_bytes_go_between_the_file_and_the_device(stage: Stage, library: CuFileDouble, tmp_path: Path) -> None:
    state, contents = device_state(SIZES)
    path = tmp_path / "x.pt"
    report = fp.save({**state, "host": torch.arange(9)}, path, engine="cufile", checksum=False)
    assert report.engine == "cufile"
    assert stage.cuda.copied_to_host_bytes == 0
    assert library.host_transfer_count == 0
    assert torch.equal(torch.load(path, map_location="cpu", weights_only=False)["host"], torch.arange(9))
    loaded = fp.load(path, weights_only=False, engine="cufile")
    assert {name: read_storage(loaded[name]._untyped_storage) for name in contents} == contents
    assert torch.equal(loaded["host"], torch.arange(9))
    assert library.host_transfer_count == 0
    assert ring_is_free()


def test_the_file_is_that_of_any_other_engine(stage: Stage, library: CuFileDouble, tmp_path: Path) -> None:
    state, _ = packed_state(stage, [*SIZES, 7, 3 * CHUNK])
    for engine in ("auto", "cufile"):
        (tmp_path / engine).mkdir()
        fp.save(state, tmp_path / engine / "x.pt", engine=engine, checksum=False)
    assert (tmp_path / "auto" / "x.pt").read_bytes() == (tmp_path / "cufile" / "x.pt").read_bytes()


def test_a_second_device_and_the_host_are_loaded_by_way_of_the_host(
    stage: Stage, library: CuFileDouble, tmp_path: Path
) -> None:
    first, first_bytes = device_state([3 * CHUNK + 5, 700])
    second, second_bytes = device_state([2 * CHUNK, 900], device=1)
    state = {**first, **{f"other {name}": storage for name, storage in second.items()}}
    contents = {**first_bytes, **{f"other {name}": data for name, data in second_bytes.items()}}
    fp.save(state, tmp_path / "x.pt", engine="cufile", checksum=False)
    assert bytes_in(fp.load(tmp_path / "x.pt", map_location="cpu", weights_only=False)) == contents
    loaded = fp.load(tmp_path / "x.pt", weights_only=False, engine="cufile")
    assert {name: read_storage(value._untyped_storage) for name, value in loaded.items()} == contents


def test_with_checksums_bytes_go_through_host_memory(stage: Stage, library: CuFileDouble, tmp_path: Path) -> None:
    state, contents = device_state(SIZES)
    fp.save(state, tmp_path / "x.pt", engine="cufile")
    assert library.host_transfer_count > 0
    assert stage.cuda.copied_to_host_bytes == sum(SIZES)
    assert fp.verify(tmp_path / "x.pt").ok
    loaded = fp.load(tmp_path / "x.pt", weights_only=False, engine="cufile", verify=True)
    assert {name: read_storage(value._untyped_storage) for name, value in loaded.items()} == contents


@pytest.mark.parametrize("is_captured", [True, False])
def test_a_save_in_the_background_is_that_of_the_call(
    stage: Stage, library: CuFileDouble, tmp_path: Path, is_captured: bool
) -> None:
    state, contents = device_state(SIZES)
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    stage.own(state if not is_captured else {}, parameter)
    with stage.cuda.held_copies():
        pending = fp.save_async(state, tmp_path / "x.pt", optimizer=optimizer, engine="cufile", checksum=False)
        optimizer.step()
        for storage in state.values():
            stage.kernel(storage, 5)
    pending.result()
    assert bytes_in(fp.load(tmp_path / "x.pt", map_location="cpu", weights_only=False)) == contents


@pytest.mark.parametrize(
    ("call", "chunk_count"), [("cuFileWrite", 20), ("cuFileBufRegister", 21), ("cuFileHandleRegister", 22)]
)
def test_whichever_call_of_the_library_fails_nothing_is_published(
    stage: Stage, library: CuFileDouble, tmp_path: Path, call: str, chunk_count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FASTPERSIST_RING_BYTES", str(chunk_count * CHUNK))  # a staging area that is not registered yet
    state, contents = device_state(SIZES)
    failures = 0
    for nth in range(1, 60):
        library.fail(call, nth, 5030)
        try:
            fp.save(state, tmp_path / "x.pt", engine="cufile", checksum=False)
        except (StorageError, DeviceError, UnsupportedError):
            failures += 1
            assert os.listdir(tmp_path) == []
            assert ring_is_free()
        else:
            break
        finally:
            library.clear()
    assert failures
    assert bytes_in(fp.load(tmp_path / "x.pt", map_location="cpu", weights_only=False)) == contents


@pytest.mark.parametrize("call", ["cuMemcpyDtoDAsync_v2", "cuMemsetD8Async", "cuMemcpyHtoDAsync_v2", "cuEventRecord"])
def test_whichever_call_of_the_driver_fails_the_next_save_works(
    stage: Stage, library: CuFileDouble, tmp_path: Path, call: str
) -> None:
    state, contents = device_state(SIZES)
    fp.save(state, tmp_path / "x.pt", engine="cufile", checksum=False)
    failures = 0
    for nth in range(1, 100):
        stage.cuda.fail(call, nth, PLAIN_ERROR)
        try:
            fp.save(state, tmp_path / "x.pt", engine="cufile", checksum=False)
        except DeviceError:
            failures += 1
            assert ring_is_free()
        else:
            break
        finally:
            stage.cuda.clear()
    assert failures
    assert bytes_in(fp.load(tmp_path / "x.pt", map_location="cpu", weights_only=False)) == contents


def test_a_piece_with_a_checksum_is_refused_in_a_devices_ring(
    stage: Stage, library: CuFileDouble, tmp_path: Path
) -> None:
    state, _ = device_state([2 * CHUNK])
    pieces = Pieces()
    pieces.add_storage(state["s0"], 0)
    with open(tmp_path / "x", "w+b") as file, pytest.raises(ConfigError, match="no CPU sees"):
        with Writer(file.fileno(), "x", engine="cufile", sources=state.values()) as writer:
            writer.append(pieces)
    assert ring_is_free()
