"""Files between the disk and a CUDA device with nothing in host memory between them: the engine "cufile".

Over the doubles of the driver and of libcufile.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from support.cuda_double import PLAIN_ERROR, read_storage
from support.cufile_double import SAYS_NVFS, SAYS_P2P, CuFileDouble, cufile_double
from support.device_states import Stage, bytes_in, device_stage, device_state, packed_state, use_new_ring

import fastpersist as fp
from fastpersist import _native
from fastpersist.errors import ConfigError, DeviceError, StorageError, UnsupportedError
from fastpersist.transfer import gpudirect
from fastpersist.transfer.reader import Extents, read_extents
from fastpersist.transfer.writer import Pieces, Writer

CHUNK = 1 << 16
SIZES = [5_000, 100, 20_000, 300_000, 0, 1, 11 * CHUNK, 4096]


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    with device_stage(monkeypatch) as stage:
        stage.allow_loading()
        yield stage


@pytest.fixture
def library(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> Iterator[CuFileDouble]:
    monkeypatch.setattr(gpudirect, "_MODULES", "/proc/self")  # which the double does not look for
    double = cufile_double()
    double.clear()
    yield double
    violations = double.violations
    double.clear()
    assert violations == []


def ring_is_free() -> bool:
    return _native.ring_free_count() == _native.ring_buffer_count()


def test_host_memory_that_the_device_reads_by_itself_stays_until_it_has(
    stage: Stage, library: CuFileDouble, tmp_path: Path
) -> None:
    stage.cuda.set_pageable_waits(False)
    stage.cuda.delay_us(2_000)
    state, contents = device_state(SIZES)
    host = {f"h{index}": torch.randn(5 * CHUNK // 4) for index in range(6)}
    path = tmp_path / "x.pt"
    fp.save({**state, **host}, path, engine="cufile", checksum=False)
    loaded = fp.load(path, weights_only=False, engine="cufile")
    assert {name: read_storage(loaded[name]._untyped_storage) for name in contents} == contents
    on_host = torch.load(path, map_location="cpu", weights_only=False)
    assert all(
        torch.equal(loaded[name], tensor) and torch.equal(on_host[name], tensor) for name, tensor in host.items()
    )


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


@pytest.mark.parametrize("call", ["cuFileWrite", "cuFileBufRegister", "cuFileHandleRegister"])
def test_whichever_call_of_the_library_fails_nothing_is_published(
    stage: Stage,
    library: CuFileDouble,
    tmp_path: Path,
    call: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use_new_ring(monkeypatch)  # a staging area that is not registered yet
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


# --- a named engine never falls back


def refuse_files(library: CuFileDouble, monkeypatch: pytest.MonkeyPatch) -> None:
    library.fail("cuFileHandleRegister", 0, 5008)


def refuse_transfers(library: CuFileDouble, monkeypatch: pytest.MonkeyPatch) -> None:
    for call in ("cuFileWrite", "cuFileRead"):
        library.fail(call, 0, 5044)


def refuse_memory(library: CuFileDouble, monkeypatch: pytest.MonkeyPatch) -> None:
    use_new_ring(monkeypatch)  # memory that is not registered yet
    library.fail("cuFileBufRegister", 0, 5016)


def be_gone(library: CuFileDouble, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpudirect, "_MODULES", "/nowhere")
    monkeypatch.setattr(gpudirect, "_DRIVER", "/proc/self")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (refuse_files, "(5008)"),
        (refuse_transfers, "(5044)"),
        (refuse_memory, "(5016)"),
        (be_gone, "/nowhere"),
    ],
)
def test_nothing_takes_over_where_gpudirect_cannot_be_used(
    change: Callable[[CuFileDouble, pytest.MonkeyPatch], None],
    why: str,
    library: CuFileDouble,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    state, contents = device_state(SIZES)
    path = tmp_path / "x.pt"
    fp.save(state, path, checksum=False)
    change(library, monkeypatch)
    with pytest.raises((UnsupportedError, StorageError)) as caught:
        fp.save(state, tmp_path / "y.pt", engine="cufile", checksum=False)
    assert why in str(caught.value)
    assert os.listdir(tmp_path) == ["x.pt"]
    with pytest.raises((UnsupportedError, StorageError)) as caught:
        fp.load(path, weights_only=False, engine="cufile")
    assert why in str(caught.value)
    assert loaded_bytes(path) == contents
    assert ring_is_free()


@pytest.mark.parametrize("error", [5008, 5044])
def test_load_that_fails_in_the_middle_is_an_error(error: int, library: CuFileDouble, tmp_path: Path) -> None:
    state, contents = device_state(SIZES)
    path = tmp_path / "x.pt"
    fp.save(state, path, engine="cufile", checksum=False)
    library.fail("cuFileRead", 3, error)
    with pytest.raises((UnsupportedError, StorageError), match=f"\\({error}\\)"):
        fp.load(path, weights_only=False, engine="cufile")
    assert library.call_count("cuFileRead") >= 3
    assert ring_is_free()
    assert loaded_bytes(path) == contents


def test_file_that_ends_early_is_told(library: CuFileDouble, tmp_path: Path) -> None:
    storage = device_state([4 * CHUNK])[0]["s0"]
    (tmp_path / "x").write_bytes(bytes(2 * CHUNK))
    extents = Extents()
    extents.add_storage(0, storage, with_crc=False)
    with open(tmp_path / "x", "rb") as file, pytest.raises(StorageError, match="ends before"):
        read_extents(file.fileno(), "x", extents, engine="cufile")
    assert ring_is_free()


# --- "auto"


def loaded_bytes(path: Path) -> dict[str, bytes]:
    loaded = fp.load(path, weights_only=False)
    return {name: read_storage(value._untyped_storage) for name, value in loaded.items()}


@pytest.mark.parametrize("says", [SAYS_P2P, SAYS_NVFS])
def test_auto_never_takes_gpudirect(
    says: int, library: CuFileDouble, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even where it is real, and all that is moved lies on a device and needs no checksum."""
    monkeypatch.delenv("FASTPERSIST_ENGINE", raising=False)
    monkeypatch.setattr(_native, "cached_bytes", lambda fd: 0)
    library.set_way(says)
    state, contents = device_state(SIZES)
    path = tmp_path / "x.pt"
    assert fp.save(state, path, checksum=False).engine != "cufile"
    assert loaded_bytes(path) == contents
    fp.save_async(state, path, checksum=False).result()
    assert loaded_bytes(path) == contents
    assert library.call_count("cuFileHandleRegister") == 0


def test_environment_may_name_it_for_auto(
    library: CuFileDouble, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FASTPERSIST_ENGINE", "cufile")
    state, contents = device_state(SIZES)
    assert fp.save(state, tmp_path / "x.pt", checksum=False).engine == "cufile"
    assert loaded_bytes(tmp_path / "x.pt") == contents
    assert library.host_transfer_count == 0
