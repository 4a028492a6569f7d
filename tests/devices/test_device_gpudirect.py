"""Files between the disk and a CUDA device with nothing in host memory between them: the engine "cufile", named or
chosen by "auto" where the file system is tuned so.

Over the doubles of the driver and of libcufile.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from support.cuda_double import PLAIN_ERROR, read_storage
from support.cufile_double import DISABLED, SAYS_NVFS, SAYS_P2P, SAYS_POSIX, CuFileDouble, cufile_double
from support.device_states import Stage, bytes_in, device_stage, device_state, packed_state, use_new_ring

import fastpersist as fp
from fastpersist import _native
from fastpersist.config import CUFILE_APIS
from fastpersist.errors import ConfigError, DeviceError, StorageError, UnsupportedError
from fastpersist.transfer import engine_selection, gpudirect
from fastpersist.transfer.pipeline import Extents, Pieces, Writer, read_extents

CHUNK = 1 << 16
SIZES = [5_000, 100, 20_000, 300_000, 0, 1, 11 * CHUNK, 4096]


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    with device_stage(monkeypatch) as stage:
        stage.allow_loading()
        yield stage


@pytest.fixture(params=CUFILE_APIS)
def api(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """By which of its interfaces libcufile moves the requests."""
    monkeypatch.setenv("FASTPERSIST_CUFILE_API", request.param)
    return str(request.param)


@pytest.fixture
def library(stage: Stage, api: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[CuFileDouble]:
    monkeypatch.setattr(gpudirect, "_MODULES", "/proc/self")  # which the double does not look for
    double = cufile_double()
    double.clear()
    yield double
    violations = double.violations
    double.clear()
    assert violations == []


def moving(api: str, call: str) -> str:
    """Return what the double counts and fails of what a call does."""
    return call if api == "calls" else {"cuFileWrite": "batch write", "cuFileRead": "batch read"}.get(call, call)


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
    api: str,
    tmp_path: Path,
    call: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use_new_ring(monkeypatch)  # a staging area that is not registered yet
    state, contents = device_state(SIZES)
    failures = 0
    for nth in range(1, 60):
        library.fail(moving(api, call), nth, 5030)
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


# --- "auto"


class Tuned:
    """A file system, with a tuning file in force."""

    def __init__(self, file: Path, patch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
        self._file = file
        self._caplog = caplog
        patch.delenv("FASTPERSIST_ENGINE", raising=False)
        patch.setenv("FASTPERSIST_CONFIG", str(file))
        patch.setattr(_native, "cached_bytes", lambda fd: 0)
        patch.setattr(engine_selection, "_announced", set())
        patch.setattr(engine_selection, "_distrusted", set())
        caplog.set_level(logging.INFO, "fastpersist")
        self.say("gpudirect = true")

    def say(self, text: str) -> None:
        """Put another content into the tuning file."""
        self._file.write_text(text + "\n")

    @property
    def log(self) -> str:
        return self._caplog.text


@pytest.fixture
def tuned(
    library: CuFileDouble,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> Tuned:
    """A trial has found GPUDirect worth having, and it is as it was then."""
    library.set_way(SAYS_P2P)
    return Tuned(tmp_path_factory.mktemp("tuned") / "tuning.toml", monkeypatch, caplog)


def save(state: object, path: Path, **named: bool) -> str:
    """Save without checksums; return the engine."""
    return fp.save(state, path, **{"checksum": False, **named}).engine


def loaded_bytes(path: Path, **named: bool) -> dict[str, bytes]:
    loaded = fp.load(path, weights_only=False, **named)
    return {name: read_storage(value._untyped_storage) for name, value in loaded.items()}


@pytest.mark.parametrize("says", [SAYS_P2P, SAYS_NVFS])
def test_auto_takes_gpudirect_where_the_file_system_is_tuned_so(
    says: int, stage: Stage, library: CuFileDouble, api: str, tuned: Tuned, tmp_path: Path
) -> None:
    library.set_way(says)
    state, contents = device_state(SIZES)
    assert save(state, tmp_path / "x.pt") == "cufile"
    assert library.call_count(moving(api, "cuFileWrite")) > 1
    assert stage.cuda.copied_to_host_bytes == library.host_transfer_count == 0
    assert "engine cufile for" in tuned.log
    assert loaded_bytes(tmp_path / "x.pt") == contents
    assert library.call_count(moving(api, "cuFileRead")) > 1
    assert library.host_transfer_count == 0
    (tmp_path / "ring").mkdir()
    tuned.say("")
    assert save(state, tmp_path / "ring" / "x.pt") != "cufile"
    assert (tmp_path / "ring" / "x.pt").read_bytes() == (tmp_path / "x.pt").read_bytes()
    assert ring_is_free()


def test_auto_in_the_background_takes_gpudirect_too(stage: Stage, tuned: Tuned, tmp_path: Path) -> None:
    state, contents = device_state(SIZES)
    fp.save_async(state, tmp_path / "x.pt", checksum=False).result()
    assert "engine cufile for" in tuned.log
    assert bytes_in(fp.load(tmp_path / "x.pt", map_location="cpu", weights_only=False)) == contents


@pytest.mark.parametrize("text", ["", "gpudirect = false", "threads = 2"])
def test_auto_without_the_key_leaves_gpudirect_alone(
    text: str, library: CuFileDouble, tuned: Tuned, tmp_path: Path
) -> None:
    state, contents = device_state(SIZES)
    tuned.say(text)
    assert save(state, tmp_path / "x.pt") != "cufile"
    assert loaded_bytes(tmp_path / "x.pt") == contents
    assert library.call_count("cuFileHandleRegister") == 0


def test_auto_computes_checksums_on_the_host(library: CuFileDouble, tuned: Tuned, tmp_path: Path) -> None:
    state, contents = device_state(SIZES)
    assert save(state, tmp_path / "x.pt", checksum=True) != "cufile"
    assert loaded_bytes(tmp_path / "x.pt", verify=True) == contents
    assert library.call_count("cuFileHandleRegister") == 0


@pytest.mark.parametrize("host_bytes", [12 * CHUNK, None])
def test_auto_leaves_what_lies_on_the_host_to_the_ring(
    host_bytes: int | None, library: CuFileDouble, tuned: Tuned, tmp_path: Path
) -> None:
    """Half of the bytes on a device are not enough, and less than half on each of two devices are not either."""
    state: dict[str, object] = dict(device_state([12 * CHUNK])[0])
    if host_bytes is None:
        state["other"] = device_state([12 * CHUNK], device=1)[0]["s0"]
    else:
        state["host"] = torch.arange(host_bytes, dtype=torch.uint8)
    assert save(state, tmp_path / "x.pt") != "cufile"
    assert save({"host": torch.ones(CHUNK)}, tmp_path / "y.pt") != "cufile"
    fp.load(tmp_path / "y.pt")
    fp.load(tmp_path / "x.pt", weights_only=False)
    assert library.call_count("cuFileHandleRegister") == 0


def test_auto_takes_the_few_bytes_of_the_host_along(library: CuFileDouble, tuned: Tuned, tmp_path: Path) -> None:
    state, contents = device_state([12 * CHUNK])
    assert save({**state, "host": torch.arange(99)}, tmp_path / "x.pt") == "cufile"
    assert torch.equal(torch.load(tmp_path / "x.pt", map_location="cpu", weights_only=False)["host"], torch.arange(99))
    loaded = fp.load(tmp_path / "x.pt", weights_only=False)
    assert torch.equal(loaded["host"], torch.arange(99))
    assert read_storage(loaded["s0"]._untyped_storage) == contents["s0"]


@pytest.mark.parametrize(("name", "engine"), [("threads", "threads"), ("auto", ""), ("cufile", "cufile")])
def test_environment_goes_before_the_tuning_file(
    name: str, engine: str, tuned: Tuned, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FASTPERSIST_ENGINE", name)
    used = save(device_state(SIZES)[0], tmp_path / "x.pt")
    assert used == engine or (not engine and used != "cufile")


def refuse_files(library: CuFileDouble, monkeypatch: pytest.MonkeyPatch) -> None:
    library.fail("cuFileHandleRegister", 0, 5008)


def refuse_transfers(library: CuFileDouble, monkeypatch: pytest.MonkeyPatch) -> None:
    for call in ("cuFileWrite", "cuFileRead", "batch write", "batch read"):
        library.fail(call, 0, 5044)


def refuse_memory(library: CuFileDouble, monkeypatch: pytest.MonkeyPatch) -> None:
    use_new_ring(monkeypatch)  # memory that is not registered yet
    library.fail("cuFileBufRegister", 0, 5016)


def go_through_the_host(library: CuFileDouble, monkeypatch: pytest.MonkeyPatch) -> None:
    library.set_way(SAYS_POSIX)


def say_nothing(library: CuFileDouble, monkeypatch: pytest.MonkeyPatch) -> None:
    library.set_oddity(DISABLED)


def be_gone(library: CuFileDouble, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpudirect, "_MODULES", "/nowhere")
    monkeypatch.setattr(gpudirect, "_DRIVER", "/proc/self")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (refuse_files, "(5008)"),
        (refuse_transfers, "(5044)"),
        (refuse_memory, "(5016)"),
        (go_through_the_host, "compatibility mode"),
        (say_nothing, "cuFileGetStatsL3"),
        (be_gone, "/nowhere"),
    ],
)
def test_auto_falls_back_to_the_ring_where_gpudirect_is_not_what_it_was(
    change: Callable[[CuFileDouble, pytest.MonkeyPatch], None],
    why: str,
    library: CuFileDouble,
    tuned: Tuned,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    state, contents = device_state(SIZES)
    change(library, monkeypatch)
    engine = save(state, tmp_path / "x.pt")
    assert engine != "cufile"
    assert f"engine {engine} for" in tuned.log
    assert "; not cufile: " in tuned.log
    assert why in tuned.log
    assert bytes_in(torch_loaded(tmp_path / "x.pt")) == contents
    assert loaded_bytes(tmp_path / "x.pt") == contents
    assert ring_is_free()


def torch_loaded(path: Path) -> dict[str, object]:
    loaded: dict[str, object] = torch.load(path, map_location="cpu", weights_only=False)
    return loaded


@pytest.mark.parametrize("error", [5008, 5044])
def test_save_by_auto_that_fails_in_the_middle_publishes_nothing_and_the_next_one_takes_the_ring(
    error: int, library: CuFileDouble, api: str, tuned: Tuned, tmp_path: Path
) -> None:
    state, contents = device_state(SIZES)
    library.fail(moving(api, "cuFileWrite"), 3, error)  # the first one is the trial of the file
    with pytest.raises((UnsupportedError, StorageError), match=f"\\({error}\\)"):
        save(state, tmp_path / "x.pt")
    assert os.listdir(tmp_path) == []
    assert "GPUDirect failed in the middle of" in tuned.log
    library.clear()
    library.set_way(SAYS_P2P)
    assert save(state, tmp_path / "x.pt") != "cufile"
    assert loaded_bytes(tmp_path / "x.pt") == contents
    assert library.call_count("cuFileHandleRegister") == 0
    assert ring_is_free()


def test_error_that_is_not_gpudirects_leaves_it_trusted(
    stage: Stage, tuned: Tuned, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, _ = device_state(SIZES)

    def interrupt(self: Writer, pieces: Pieces) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Writer, "append", interrupt)
        with pytest.raises(KeyboardInterrupt):
            save(state, tmp_path / "x.pt")
    assert save(state, tmp_path / "x.pt") == "cufile"


@pytest.mark.parametrize("error", [5008, 5044])
def test_load_by_auto_that_fails_in_the_middle_is_done_again_by_the_ring(
    error: int, library: CuFileDouble, api: str, tuned: Tuned, tmp_path: Path
) -> None:
    state, contents = device_state(SIZES)
    save(state, tmp_path / "x.pt")
    library.fail(moving(api, "cuFileRead"), 3, error)  # the first one is the trial of the file
    assert loaded_bytes(tmp_path / "x.pt") == contents
    assert "GPUDirect failed in the middle of" in tuned.log
    assert "; not cufile: read of" in tuned.log
    assert library.call_count(moving(api, "cuFileRead")) >= 3
    assert save(state, tmp_path / "x.pt") != "cufile"
    assert ring_is_free()


def test_file_that_ends_early_is_told_and_is_not_gpudirects_fault(tuned: Tuned, tmp_path: Path) -> None:
    storage = device_state([4 * CHUNK])[0]["s0"]
    (tmp_path / "x").write_bytes(bytes(2 * CHUNK))
    extents = Extents()
    extents.add_storage(0, storage, with_crc=False)
    with open(tmp_path / "x", "rb") as file, pytest.raises(StorageError, match="ends before"):
        read_extents(file.fileno(), "x", extents)
    assert "GPUDirect failed" not in tuned.log
    assert save({"s": storage}, tmp_path / "x.pt") == "cufile"
    assert ring_is_free()


def test_file_in_the_page_cache_is_loaded_from_there(
    library: CuFileDouble, api: str, tuned: Tuned, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, contents = device_state(SIZES)
    save(state, tmp_path / "x.pt")
    monkeypatch.setattr(_native, "cached_bytes", lambda fd: os.fstat(fd).st_size)
    assert loaded_bytes(tmp_path / "x.pt") == contents
    assert library.call_count(moving(api, "cuFileRead")) == 0
