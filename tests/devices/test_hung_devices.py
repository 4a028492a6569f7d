"""Streams of a device that never end, as behind a collective whose peer is gone: errors are told, nothing hangs.

Over the double of the driver, whose streams stand still until they are told to go on. tests/csrc/device_hung_test.cc
looks at the same below Python.
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from support.cuda_double import cuda_storage, read_storage
from support.cufile_double import cufile_double
from support.device_states import Stage, bytes_in, device_stage, device_state, grace

import fastpersist as fp
from fastpersist import _native
from fastpersist.errors import DeviceError, PeerError
from fastpersist.transfer import gpudirect
from fastpersist.transfer.reader import Extents, read_extents
from fastpersist.transfer.writer import Pieces, Writer

CHUNK = 1 << 16
RING_BYTES = 8 * CHUNK
GRACE_S = 0.3
IN_TIME_S = 5  # on a busy machine; what hangs takes for ever


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Stage]:
    with grace(GRACE_S), device_stage(monkeypatch) as stage:
        yield stage
        stage.end()
        save_on_cpu(tmp_path)  # takes back what the device has let go of
        assert _native.ring_free_count() == _native.ring_buffer_count()


@contextmanager
def standing_still(stage: Stage) -> Iterator[None]:
    """Let the caller's stream stand still inside the block: what follows it then does, too."""
    with stage.cuda.blocked(stage.stream()):
        yield
    stage.cuda.synchronize()


def save_on_cpu(directory: Path) -> None:
    """Save and load tensors of the CPU, which must not wait for any device."""
    started_s = time.monotonic()
    state = {"a": torch.arange(RING_BYTES // 2)}
    fp.save(state, directory / "cpu.pt")
    assert time.monotonic() - started_s < IN_TIME_S
    assert torch.equal(torch.load(directory / "cpu.pt")["a"], state["a"])


def write(storage: torch.UntypedStorage, path: Path, *, fails: bool) -> None:
    """Write a storage, and, if told so, hear of a peer that has failed while that waits."""

    def poll(_done_bytes: int) -> None:
        if fails:
            raise PeerError("rank 1 is gone")

    with open(path, "w+b") as file, Writer(file.fileno(), str(path), engine="threads-buffered", poll=poll) as writer:
        pieces = Pieces()
        pieces.add_storage(storage, 0)
        writer.append(pieces)
        writer.finish()


def test_a_failed_peer_is_told_in_time_and_saves_of_cpu_tensors_go_on(stage: Stage, tmp_path: Path) -> None:
    storage = cuda_storage(bytes(range(256)) * (4 * RING_BYTES // 256))
    with standing_still(stage):
        for error in (PeerError, DeviceError):  # the second one is refused: nothing more is left to the device
            started_s = time.monotonic()
            with pytest.raises(error, match="rank 1 is gone" if error is PeerError else "cuda:0 .* stands still"):
                write(storage, tmp_path / "device", fails=True)
            assert time.monotonic() - started_s < IN_TIME_S
            save_on_cpu(tmp_path)
        with pytest.raises(DeviceError, match="saves of CPU tensors go on"):
            fp.save({"s": storage}, tmp_path / "refused.pt")
        assert not (tmp_path / "refused.pt").exists()
    write(storage, tmp_path / "device", fails=False)
    assert (tmp_path / "device").read_bytes() == read_storage(storage)


def test_a_save_of_cpu_tensors_does_not_wait_behind_one_that_waits_for_a_device(stage: Stage, tmp_path: Path) -> None:
    state, contents = device_state([4 * RING_BYTES])
    with standing_still(stage):
        pending = fp.save_async(state, tmp_path / "device.pt")
        direct = threading.Thread(target=write, args=(state["s0"], tmp_path / "direct"), kwargs={"fails": False})
        direct.start()
        stage.cuda.wait_for_queued_copies(4)
        save_on_cpu(tmp_path)
        assert not pending.done()
        assert direct.is_alive()
    direct.join()
    pending.result()
    assert (tmp_path / "direct").read_bytes() == contents["s0"]


@pytest.mark.parametrize("what", ["device", "host", "other device"])
def test_a_save_by_gpudirect_is_given_up_like_any_other(
    stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    # What is on the host goes into a ring on the device by copies for which the driver waits itself.
    monkeypatch.setattr(gpudirect, "_MODULES", "/proc/self")  # which the double does not look for
    cufile_double().clear()
    state, contents = device_state([3 * CHUNK])
    more = {"host": {"w": torch.UntypedStorage(2 * CHUNK)}, "other device": device_state([CHUNK], device=1)[0]}
    pieces = Pieces()
    for storage in [*state.values(), *more.get(what, {}).values()]:
        pieces.add_storage(storage, None)

    def poll(_done_bytes: int) -> None:
        raise PeerError("rank 1 is gone")

    with standing_still(stage), open(tmp_path / "x", "w+b") as file:
        started_s = time.monotonic()
        sources = list(state.values())
        with Writer(file.fileno(), "x", engine="cufile", poll=poll, sources=sources) as writer:
            with pytest.raises(PeerError):
                writer.append(pieces)
        assert time.monotonic() - started_s < IN_TIME_S
        save_on_cpu(tmp_path)
    fp.save(state, tmp_path / "x.pt", engine="cufile", checksum=False)
    assert bytes_in(fp.load(tmp_path / "x.pt", map_location="cpu", weights_only=False)) == contents


def test_what_is_loaded_into_stays_alive_until_the_device_has_written_there(stage: Stage, tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_bytes(bytes([7]) * RING_BYTES)
    gc.collect()  # what tracebacks of other tests keep
    allocation_count = stage.cuda.allocation_count
    storage = cuda_storage(bytes(RING_BYTES))
    extents = Extents()
    extents.add_storage(0, storage, with_crc=False)

    def poll(_done_bytes: int) -> None:
        raise PeerError("rank 1 is gone")

    with standing_still(stage):
        with path.open("rb") as file, pytest.raises(PeerError):
            read_extents(file.fileno(), str(path), extents, engine="threads-buffered", poll=poll)
        del storage, extents
        gc.collect()
        assert stage.cuda.allocation_count == allocation_count + 1
        save_on_cpu(tmp_path)
    save_on_cpu(tmp_path)
    gc.collect()
    assert stage.cuda.allocation_count == allocation_count
