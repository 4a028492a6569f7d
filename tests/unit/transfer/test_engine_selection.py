"""Which engine is taken and what is said of it: probes, the ladder of "auto", and the way down."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import native_fixtures
from support.forking import SMALL_RING, in_child
from support.states import differences, load_step, make_state, pending_files

import fastpersist as fp
from fastpersist import _native
from fastpersist.config import Config
from fastpersist.errors import ConfigError, StorageError, UnsupportedError
from fastpersist.transfer import engine_selection
from fastpersist.transfer.engine_selection import engine_ladder, engines, transfer_options
from fastpersist.transfer.writer import Writer

EVERY = 2**64 - 1


fault = native_fixtures.fault
open_file = native_fixtures.open_file


# --- engines


def test_each_engine_is_probed_once_and_nothing_is_left(tmp_path: Path, leak_check: None) -> None:
    probes = engines(tmp_path)
    assert [probe.name for probe in probes] == [name for name in _native.engine_names() if name != "null"]
    assert os.listdir(tmp_path) == []
    for probe in probes:
        assert probe.usable == (probe.why_not == "")
    assert next(probe for probe in probes if probe.name == "threads-buffered").usable


def test_engine_that_a_probe_calls_usable_saves_and_loads(tmp_path: Path) -> None:
    for step, probe in enumerate(engines(tmp_path)):
        path = tmp_path / f"{probe.name}.pt"
        if probe.name == "cufile":
            continue  # the probe starts no CUDA, a save does: tests/devices/test_gpudirect.py
        if probe.usable:
            assert fp.save(make_state(step), path, engine=probe.name).engine == probe.name
            assert differences(fp.load(path, engine=probe.name), make_state(step)) == []
        else:
            with pytest.raises((UnsupportedError, StorageError)) as caught:
                fp.save(make_state(step), path, engine=probe.name)
            assert str(caught.value)


def test_probe_of_the_working_directory_is_the_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert [probe.name for probe in engines()] == [probe.name for probe in engines(tmp_path)]


@pytest.mark.parametrize(("name", "number"), [("missing", errno.ENOENT), ("file", errno.ENOTDIR)])
def test_place_where_nothing_can_be_probed_is_a_clear_error(name: str, number: int, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError) as caught:
        engines(tmp_path / name)
    assert caught.value.errno == number
    assert str(tmp_path / name) in str(caught.value)


def test_engine_that_reads_back_other_bytes_is_not_usable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_native, "engine_names", lambda: ["fault:null"])
    (probe,) = engines(tmp_path)
    assert not probe.usable
    assert "other bytes" in probe.why_not


def test_engine_that_fails_its_probe_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Callable[..., None]
) -> None:
    monkeypatch.setattr(_native, "engine_names", lambda: ["fault:threads-buffered"])
    fault(op="read", sys_errno=errno.EIO)
    (probe,) = engines(tmp_path)
    assert not probe.usable
    assert os.strerror(errno.EIO) in probe.why_not
    assert os.listdir(tmp_path) == []


# --- the ladder


def test_named_engine_stands_alone(open_file: Callable[..., int]) -> None:
    fd = open_file()
    for name in [*_native.engine_names(), "fault:uring"]:
        assert engine_ladder(name, fd) == [name]


@pytest.mark.parametrize("name", ["", "abacus", "URING", "fault:", "fault:auto", "fault:fault:null"])
def test_unknown_engine_is_refused_before_anything_is_written(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no engine") as caught:
        fp.save(make_state(1), tmp_path / "model.pt", engine=name)
    assert "threads-buffered" in str(caught.value)
    assert "null" not in str(caught.value).removeprefix(f"there is no engine {name!r}")  # it is for measurements only
    assert os.listdir(tmp_path) == []


def test_a_build_without_the_fault_engine_knows_no_engine_of_that_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_native, "HAS_FAULT_ENGINE", False)
    with pytest.raises(ConfigError, match="there is no engine 'fault:threads'; known are auto, uring"):
        engine_selection.require_engine("fault:threads")


def test_environment_says_what_auto_means(
    tmp_path: Path, open_file: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    fd = open_file()
    monkeypatch.setenv("FASTPERSIST_ENGINE", "threads-buffered")
    assert engine_ladder("auto", fd) == ["threads-buffered"]
    assert engine_ladder("uring", fd) == ["uring"]
    assert fp.save(make_state(1), tmp_path / "model.pt").engine == "threads-buffered"
    monkeypatch.setenv("FASTPERSIST_ENGINE", "abacus")
    with pytest.raises(ConfigError, match=r"^FASTPERSIST_ENGINE: there is no engine 'abacus'"):
        fp.save(make_state(2), tmp_path / "model.pt")
    assert pending_files(tmp_path) == []


@pytest.mark.parametrize("kind", [0x01021994, 0x6969, 0x65735546], ids=["tmpfs", "nfs", "fuse"])
def test_file_systems_without_use_for_direct_io_are_buffered(
    kind: int, open_file: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_native, "filesystem_type", lambda fd: kind)
    assert engine_ladder("auto", open_file()) == ["threads-buffered"]


@pytest.mark.parametrize(("kind", "direct"), [(0x01021994, False), (0x6969, False), (0x65735546, True)])
def test_a_file_with_one_writer_is_tried_with_direct_io_where_that_is_faster(
    kind: int, direct: bool, tmp_path: Path, open_file: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_native, "filesystem_type", lambda fd: kind)
    ladder = list(engine_selection.AUTO_LADDER) if direct else ["threads-buffered"]
    assert engine_ladder("auto", open_file(), one_writer=True) == ladder
    for shared in (False, True):
        with Writer(open_file(), "file.bin", shared=shared) as writer:
            assert (writer.finish() == "threads-buffered") == (shared or not direct)


def test_cached_file_is_read_from_the_cache(open_file: Callable[..., int], monkeypatch: pytest.MonkeyPatch) -> None:
    fd = open_file(content=bytes(100_000))
    monkeypatch.setattr(_native, "filesystem_type", lambda fd: 0xEF53)
    ladder = list(engine_selection.AUTO_LADDER)
    for cached_bytes, expected in ((100_000, ["threads-buffered"]), (50_000, ladder), (0, ladder)):
        monkeypatch.setattr(_native, "cached_bytes", lambda fd, answer=cached_bytes: answer)
        assert engine_ladder("auto", fd, for_reading=True) == expected
        assert engine_ladder("auto", fd) == ladder


@pytest.fixture
def messages(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    """What is said about engines, as if nothing had been said before."""
    monkeypatch.setattr(engine_selection, "_announced", set())
    caplog.set_level(logging.INFO, logger="fastpersist")
    return lambda: [r.getMessage() for r in caplog.records if r.getMessage().startswith("engine ")]


def test_choice_of_auto_is_logged_once(tmp_path: Path, messages: Callable[[], list[str]]) -> None:
    for step in range(3):
        used = fp.save(make_state(step), tmp_path / f"model-{step}.pt").engine
    (message,) = messages()
    assert message.startswith(f"engine {used} for ")
    assert str(tmp_path / "model-0.pt") in message


def test_named_engine_is_not_logged(tmp_path: Path, messages: Callable[[], list[str]]) -> None:
    fp.save(make_state(1), tmp_path / "model.pt", engine="threads")
    fp.load(tmp_path / "model.pt", engine="threads")
    assert messages() == []


# --- demotion


@pytest.fixture
def faulty_ladder(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first rung of "auto" is one that faults can be injected into."""
    monkeypatch.setattr(_native, "filesystem_type", lambda fd: 0xEF53)
    monkeypatch.setattr(_native, "cached_bytes", lambda fd: 0)
    monkeypatch.setattr(engine_selection, "AUTO_LADDER", ("fault:threads", "threads-buffered"))


@pytest.mark.parametrize("number", [errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS, errno.EPERM])
def test_engine_that_fails_in_mid_file_is_replaced_and_nothing_lost(
    number: int,
    tmp_path: Path,
    fault: Callable[..., None],
    faulty_ladder: None,
    messages: Callable[[], list[str]],
) -> None:
    @in_child(SMALL_RING)
    def test() -> None:
        path = tmp_path / "model.pt"
        fault(op="write", nth=3, count=EVERY, sys_errno=number)
        assert fp.save(make_state(1), path).engine == "threads-buffered"
        fault(op="read", nth=3, count=EVERY, sys_errno=number)
        assert differences(fp.load(path, verify=True), make_state(1)) == []
        for message in messages():
            assert message.startswith("engine threads-buffered for ")
            assert "; not fault:threads: " in message
            assert os.strerror(number) in message
        assert len(messages()) in (1, 2)  # the reason may differ between writing and reading

    test()
    assert load_step(tmp_path / "model.pt") == 1


def test_same_reason_is_logged_once_for_any_number_of_files(
    tmp_path: Path, fault: Callable[..., None], faulty_ladder: None, messages: Callable[[], list[str]]
) -> None:
    for step in range(3):
        fault(op="write", count=EVERY, sys_errno=errno.EOPNOTSUPP)
        fp.save(make_state(step), tmp_path / f"model-{step}.pt")
    assert len(messages()) == 1


def test_named_engine_that_fails_in_mid_file_is_not_replaced(
    tmp_path: Path, fault: Callable[..., None], leak_check: None
) -> None:
    path = tmp_path / "model.pt"
    fp.save(make_state(1), path)
    fault(op="write", sys_errno=errno.EOPNOTSUPP)
    with pytest.raises(UnsupportedError, match=os.strerror(errno.EOPNOTSUPP)):
        fp.save(make_state(2), path, engine="fault:threads-buffered")
    fault(op="write", sys_errno=errno.EINVAL)
    with pytest.raises(StorageError) as caught:
        fp.save(make_state(2), path, engine="fault:threads-buffered")
    assert caught.value.errno == errno.EINVAL
    assert load_step(path) == 1
    assert pending_files(tmp_path) == []


# --- GPUDirect


@pytest.mark.parametrize("for_reading", [False, True])
@pytest.mark.parametrize("filesystem_type", [0xEF53, 0x0BD00BD0])  # ext4, Lustre
def test_ladder_of_auto_has_no_gpudirect(
    for_reading: bool, filesystem_type: int, open_file: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FASTPERSIST_ENGINE", raising=False)
    monkeypatch.setattr(_native, "filesystem_type", lambda fd: filesystem_type)
    monkeypatch.setattr(_native, "cached_bytes", lambda fd: 0)
    fd = open_file(content=b"x")
    assert "cufile" not in engine_ladder("auto", fd, for_reading=for_reading)
    assert engine_ladder("cufile", fd, for_reading=for_reading) == ["cufile"]


# --- the options of a transfer


@pytest.fixture
def given_options(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What the native side was given for each transfer."""
    seen: list[dict[str, Any]] = []
    monkeypatch.setattr(_native, "TransferOptions", lambda **given: seen.append(given))
    return seen


@pytest.mark.parametrize(
    ("limits", "depths"),
    [
        (Config(ring_bytes=64 << 20, chunk_bytes=8 << 20), [8, 4]),
        (Config(ring_bytes=64 << 20, chunk_bytes=8 << 20, queue_depth=20), [20, 20]),
        (Config(ring_bytes=1 << 30, chunk_bytes=1 << 16), [4096, 2048]),
        (Config(ring_bytes=32 << 20, chunk_bytes=8 << 20), [4, 2]),
    ],
    ids=["as many as there are chunks", "as tuned", "as many as an engine takes", "the smallest ring"],
)
def test_queue_is_as_deep_as_the_ring_and_half_of_it_if_sparing_but_always_as_tuned(
    limits: Config,
    depths: list[int],
    open_file: Callable[..., int],
    given_options: list[dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine_selection, "config_for", lambda fd: limits)
    fd = open_file()
    for sparing in (False, True):
        transfer_options(fd, "file.bin", "threads", placed=[], sparing=sparing)
    assert [given["queue_depth"] for given in given_options] == depths
    for given in given_options:
        assert (given["fd"], given["path"], given["engines"]) == (fd, b"file.bin", ["threads"])
        assert (given["ring_bytes"], given["chunk_bytes"]) == (limits.ring_bytes, limits.chunk_bytes)


@pytest.mark.parametrize(
    ("placed", "device"),
    [
        ([], None),
        ([(None, 100)], None),
        ([(1, 0), (None, 100)], 1),
        ([(0, 10), (1, 30), (0, 10), (None, 100)], 1),
        ([(0, 10), (1, 15), (0, 10)], 0),
    ],
)
def test_ring_of_cufile_is_memory_of_the_device_with_the_largest_share(
    placed: list[tuple[int | None, int]],
    device: int | None,
    open_file: Callable[..., int],
    given_options: list[dict[str, Any]],
) -> None:
    fd = open_file()
    for engine in ("cufile", "fault:cufile", "threads"):
        transfer_options(fd, "file.bin", engine, placed=placed)
    assert [given["ring_device"] for given in given_options] == [device, device, None]
