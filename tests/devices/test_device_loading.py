"""Loading to a CUDA device: it copies out of the ring while chunks are read, in the order of the caller's stream.

Over the double of the driver.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.cuda_double import PLAIN_ERROR, cuda_storage, read_storage
from support.device_states import Stage, device_stage, device_state, grace, random_bytes

import fastpersist as fp
from fastpersist import _native
from fastpersist.errors import ChecksumError, DeviceError
from fastpersist.formats.byte_ranges import ByteRange
from fastpersist.transfer.reader import Extents

CHUNK = 1 << 16
SIZES = [5_000, 100, 20_000, 300_000, 0, 1, 11 * CHUNK, 4096]


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    with device_stage(monkeypatch) as stage:
        stage.allow_loading()
        yield stage


def storages_in(loaded: Any) -> dict[str, torch.UntypedStorage]:
    return {name: value._untyped_storage for name, value in loaded.items()}


def ring_is_free() -> bool:
    """Tell whether no transfer has a buffer; a device that failed may hold some in quarantine."""
    return _native.ring_free_count() + _native.ring_quarantined_count() == _native.ring_buffer_count()


@pytest.fixture
def saved(stage: Stage, tmp_path: Path) -> tuple[Path, dict[str, bytes]]:
    state, contents = device_state(SIZES)
    fp.save(state, tmp_path / "x.pt")
    return tmp_path / "x.pt", contents


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("engine", ["auto", "threads-buffered"])
@pytest.mark.parametrize("map_location", [None, "cuda:1", {"cuda:0": "cuda:1"}])
def test_storages_come_to_the_device(
    stage: Stage, saved: tuple[Path, dict[str, bytes]], map_location: Any, engine: str, verify: bool
) -> None:
    path, contents = saved
    stage.cuda.delay_us(50)
    loaded = storages_in(fp.load(path, map_location=map_location, weights_only=False, verify=verify, engine=engine))
    assert {storage.device.index for storage in loaded.values()} == {0 if map_location is None else 1}
    assert {name: read_storage(storage) for name, storage in loaded.items()} == contents
    assert stage.cuda.copied_to_device_bytes == sum(SIZES)
    assert stage.cuda.pageable_copy_count == 0
    assert ring_is_free()


def test_reads_go_on_while_the_device_copies(stage: Stage, tmp_path: Path) -> None:
    state, contents = device_state([20 * CHUNK])
    fp.save(state, tmp_path / "x.pt")
    found = []
    with stage.cuda.held_copies():
        loading = threading.Thread(target=lambda: found.append(fp.load(tmp_path / "x.pt", weights_only=False)))
        loading.start()
        stage.cuda.wait_for_queued_copies(8)  # as many as the ring has chunks
    loading.join()
    assert read_storage(storages_in(found[0])["s0"]) == contents["s0"]


def test_memory_that_the_callers_stream_still_uses_is_left_alone(stage: Stage, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"\x05" * 3 * CHUNK)
    target = cuda_storage(bytes(3 * CHUNK))
    extents = Extents()
    extents.add_storage(0, target, with_crc=False)
    with stage.cuda.blocked(stage.stream()), open(tmp_path / "x", "rb") as file:
        stage.kernel(target, 9)  # of whoever had this memory before
        reading = threading.Thread(
            target=extents.read, args=(file.fileno(), "x"), kwargs={"engine": "auto", "poll": None}
        )
        reading.start()
        stage.cuda.wait_for_queued_copies(1)
        stage.cuda.stream_unblock(stage.stream())
        reading.join()
    assert read_storage(target) == b"\x05" * 3 * CHUNK


def test_parts_of_an_extent_come_to_their_places(stage: Stage, tmp_path: Path) -> None:
    data = random_bytes(4 * CHUNK, 1).numpy().tobytes()
    (tmp_path / "x").write_bytes(data)
    target = cuda_storage(bytes(4 * CHUNK))
    extents = Extents()
    index = extents.add_storage(0, target, with_crc=True)
    assert extents.host_memory(index) is None
    parts = extents.parts([ByteRange(index, CHUNK + 3, CHUNK), ByteRange(index, 3 * CHUNK, 100)])
    with open(tmp_path / "x", "rb") as file:
        parts.read(file.fileno(), "x", engine="auto", poll=None)
    expected = bytearray(4 * CHUNK)
    for start, size in ((CHUNK + 3, CHUNK), (3 * CHUNK, 100)):
        expected[start : start + size] = data[start : start + size]
    assert read_storage(target) == bytes(expected)


def test_a_damaged_file_is_found(stage: Stage, saved: tuple[Path, dict[str, bytes]]) -> None:
    path, contents = saved
    data = bytearray(path.read_bytes())
    place = data.index(contents["s6"][:64])
    data[place + 40] ^= 1
    path.write_bytes(data)
    with pytest.raises(ChecksumError):
        fp.load(path, weights_only=False, verify=True)
    assert ring_is_free()


@pytest.mark.parametrize("call", ["cuMemcpyHtoDAsync_v2", "cuEventCreate", "cuEventRecord", "cuEventQuery"])
def test_whichever_call_fails_the_next_load_works(
    stage: Stage, saved: tuple[Path, dict[str, bytes]], call: str
) -> None:
    path, contents = saved
    failures = []
    for nth in range(1, 200):
        stage.cuda.fail(call, nth, PLAIN_ERROR)
        try:
            fp.load(path, weights_only=False)
        except DeviceError as error:
            failures.append(str(error))
        else:
            break
        finally:
            stage.cuda.clear()
        assert ring_is_free()
    assert all("CUDA_ERROR_INVALID_VALUE" in failure for failure in failures)
    assert failures or call == "cuEventCreate"  # events of earlier transfers are used again
    loaded = storages_in(fp.load(path, weights_only=False))
    assert {name: read_storage(storage) for name, storage in loaded.items()} == contents


def test_a_copy_that_fails_when_it_is_made_fails_the_load(stage: Stage, saved: tuple[Path, dict[str, bytes]]) -> None:
    stage.cuda.fail_async("cuMemcpyHtoDAsync_v2", 3, PLAIN_ERROR)
    with grace(0.3), pytest.raises(DeviceError):
        fp.load(saved[0], weights_only=False)
    assert ring_is_free()
