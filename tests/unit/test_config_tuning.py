"""What a tuning file says is what saves and loads do: each key, seen where it takes effect."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.forking import in_child
from support.states import differences, make_state

import fastpersist as fp
from fastpersist import _native
from fastpersist.config import TUNING_KEYS, tuning_path
from fastpersist.distributed.partition import choose_writers
from fastpersist.transfer import engine_selection
from fastpersist.transfer.engine_selection import engine_ladder

MIB = 1 << 20
Options = Callable[[], list[dict[str, Any]]]


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in os.environ if name.startswith("FASTPERSIST_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home"))


@pytest.fixture
def tuned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Put a tuning file in force that somebody names."""

    def put(text: str) -> Path:
        path = tmp_path / "tuning.toml"
        path.write_text(text)
        monkeypatch.setenv("FASTPERSIST_CONFIG", str(path))
        return path

    return put


@pytest.fixture
def found(tmp_path: Path) -> Callable[[str], Path]:
    """Put a tuning file where the library finds it by itself for tmp_path."""

    def put(text: str) -> Path:
        fd = os.open(tmp_path, os.O_PATH)
        path = Path(tuning_path(fd) or "")
        os.close(fd)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    return put


@pytest.fixture
def options(monkeypatch: pytest.MonkeyPatch) -> Options:
    """What the native side was given for each transfer."""
    seen: list[dict[str, Any]] = []
    real = _native.TransferOptions

    def record(**given: Any) -> _native.TransferOptions:
        seen.append(given)
        return real(**given)

    monkeypatch.setattr(_native, "TransferOptions", record)
    return lambda: seen


# --- each key of a tuning file


def engine_is_heeded(tmp_path: Path) -> None:
    assert fp.save(make_state(1), tmp_path / "model.pt").engine == "threads-buffered"


def first_transfer(tmp_path: Path) -> dict[str, Any]:
    seen: list[dict[str, Any]] = []
    real = _native.TransferOptions
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_native, "TransferOptions", lambda **given: seen.append(given) or real(**given))
        fp.save(make_state(1), tmp_path / "model.pt")
    return seen[0]


def chunk_is_heeded(tmp_path: Path) -> None:
    assert first_transfer(tmp_path)["chunk_bytes"] == MIB
    assert _native.ring_buffer_count() == 64


def ring_is_heeded(tmp_path: Path) -> None:
    assert first_transfer(tmp_path)["ring_bytes"] == 32 * MIB
    assert _native.ring_buffer_count() == 4


def depth_is_heeded(tmp_path: Path) -> None:
    assert first_transfer(tmp_path)["queue_depth"] == 3


def threads_are_heeded(tmp_path: Path) -> None:
    assert first_transfer(tmp_path)["thread_count"] == 2


KEYS = {
    "engine": ('engine = "threads-buffered"', engine_is_heeded),
    "chunk_bytes": ("chunk_bytes = 1048576", chunk_is_heeded),
    "ring_bytes": ("ring_bytes = 33554432", ring_is_heeded),
    "queue_depth": ("queue_depth = 3", depth_is_heeded),
    "threads": ("threads = 2", threads_are_heeded),
}


def test_no_key_is_left_out_here() -> None:
    assert sorted([*KEYS, "writers"]) == sorted(TUNING_KEYS)  # writers: tests/ranks/test_tuned_writers.py


@pytest.mark.parametrize("how", ["named", "found"])
@pytest.mark.parametrize("key", KEYS)
@in_child({})
def test_key_takes_effect_in_a_save(
    key: str, how: str, tmp_path: Path, tuned: Callable[[str], Path], found: Callable[[str], Path]
) -> None:
    text, is_heeded = KEYS[key]
    with pytest.raises(AssertionError):  # or this test proves nothing
        is_heeded(tmp_path)
    (tuned if how == "named" else found)(text)
    if key in ("chunk_bytes", "ring_bytes"):  # a ring is for life: the child of a child has none yet
        in_child({})(is_heeded)(tmp_path)
    else:
        is_heeded(tmp_path)


@in_child({})
def test_values_count_for_loading_too(tmp_path: Path, tuned: Callable[[str], Path], options: Options) -> None:
    tuned("chunk_bytes = 1048576\nqueue_depth = 3")
    fp.save(make_state(1), tmp_path / "model.pt")
    del options()[:]
    assert not differences(fp.load(tmp_path / "model.pt"), make_state(1))
    assert [(one["chunk_bytes"], one["queue_depth"]) for one in options()] == [(MIB, 3)]


# --- the engine is a wish


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """The file system of every file is a disk's, and nothing is in the page cache."""
    monkeypatch.setattr(_native, "filesystem_type", lambda fd: 0xEF53)
    monkeypatch.setattr(_native, "cached_bytes", lambda fd: 0)


def test_ladder_begins_with_the_wish_and_goes_on_with_the_others(
    tmp_path: Path, disk: None, tuned: Callable[[str], Path]
) -> None:
    ladder = list(engine_selection.AUTO_LADDER)
    with open(tmp_path / "file", "wb") as file:
        tuned('engine = "threads"')
        assert engine_ladder("auto", file.fileno()) == ["threads", "uring", "libaio", "threads-buffered"]
        assert engine_ladder("auto", file.fileno(), for_reading=True) == engine_ladder("auto", file.fileno())
        assert engine_ladder("libaio", file.fileno()) == ["libaio"]
        tuned('engine = "uring-buffered"')
        assert engine_ladder("auto", file.fileno()) == ["uring-buffered", "threads-buffered"]  # and no direct one
        assert engine_ladder("auto", file.fileno(), for_reading=True) == ladder
        tuned('engine = "auto"')
        assert engine_ladder("auto", file.fileno()) == ladder


def test_wish_comes_before_the_page_cache_for_saves_alone(
    tmp_path: Path, tuned: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_native, "filesystem_type", lambda fd: 0x6969)
    tuned('engine = "threads"')
    with open(tmp_path / "file", "wb") as file:
        assert engine_ladder("auto", file.fileno()) == ["threads", "threads-buffered"]
        monkeypatch.setattr(_native, "cached_bytes", lambda fd: 1)
        assert engine_ladder("auto", file.fileno(), for_reading=True) == ["threads-buffered"]


def test_engine_of_the_environment_stays_strict(
    tmp_path: Path, disk: None, tuned: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    tuned('engine = "threads"')
    monkeypatch.setenv("FASTPERSIST_ENGINE", "threads-buffered")
    with open(tmp_path / "file", "wb") as file:
        assert engine_ladder("auto", file.fileno()) == ["threads-buffered"]


def test_wish_that_does_not_work_here_is_left_for_the_next_engine(
    tmp_path: Path,
    disk: None,
    tuned: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(_native, "engine_names", lambda: ["fault:threads", "threads-buffered"])
    monkeypatch.setattr(engine_selection, "AUTO_LADDER", ("threads-buffered",))
    monkeypatch.setattr(engine_selection, "_announced", set())
    caplog.set_level(logging.WARNING, logger="fastpersist")
    tuned('engine = "fault:threads"')
    _native.set_fault_plan(_native.FaultPlan(sys_errno=95, count=2**64 - 1))
    try:
        report = fp.save(make_state(1), tmp_path / "model.pt")
    finally:
        _native.clear_fault_plan()
    assert report.engine == "threads-buffered"
    assert not differences(torch.load(tmp_path / "model.pt"), make_state(1))
    assert "not fault:threads" in caplog.text


# --- a tuning file is no reason for a save to fail


@pytest.mark.parametrize("text", ["engine = ", 'engine = "warp"', "chunk_bytes = 1", "unheard_of = 1"])
def test_save_goes_on_without_a_damaged_file(
    text: str, tmp_path: Path, found: Callable[[str], Path], options: Options
) -> None:
    found(text)
    fp.save(make_state(1), tmp_path / "model.pt")
    assert not differences(fp.load(tmp_path / "model.pt"), make_state(1))
    assert options()[0]["chunk_bytes"] == 8 * MIB


@pytest.mark.parametrize("call", [fp.save, fp.save_async], ids=["save", "save_async"])
def test_damaged_file_that_was_named_is_told_and_nothing_is_left(
    call: Callable[..., object], tmp_path: Path, tuned: Callable[[str], Path]
) -> None:
    tuned("queue_depth = 0")
    with pytest.raises(fp.ConfigError, match=r"tuning\.toml"):
        call(make_state(1), tmp_path / "model.pt")
    assert sorted(os.listdir(tmp_path)) == ["tuning.toml"]


def test_values_may_change_between_saves_of_many_threads(
    tmp_path: Path, found: Callable[[str], Path], options: Options
) -> None:
    path = found("queue_depth = 1")
    stop = threading.Event()
    failed = []

    def save(number: int) -> None:
        try:
            while not stop.is_set():
                fp.save({"a": torch.arange(10)}, tmp_path / f"{number}.pt")
        except BaseException as error:  # noqa: BLE001 - for the test to look at
            failed.append(error)

    threads = [threading.Thread(target=save, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for depth in range(2, 30):
        new = path.with_name("new")
        new.write_text(f"queue_depth = {depth}")
        new.replace(path)
    stop.set()
    for thread in threads:
        thread.join()
    assert not failed
    assert {one["queue_depth"] for one in options()} <= set(range(1, 30))


# --- the depth


def test_background_saves_keep_half_the_requests_in_flight_or_what_was_tuned(
    tmp_path: Path, tuned: Callable[[str], Path], options: Options
) -> None:
    fp.save(make_state(1), tmp_path / "model.pt")
    fp.save_async(make_state(1), tmp_path / "model.pt").result()
    whole, half = (given["queue_depth"] for given in options()[-2:])
    assert (half, whole % 2) == (whole // 2, 0)
    tuned("queue_depth = 7")
    fp.save_async(make_state(1), tmp_path / "model.pt").result()
    assert options()[-1]["queue_depth"] == 7


@in_child({"FASTPERSIST_CHUNK_BYTES": str(64 << 10), "FASTPERSIST_RING_BYTES": str(512 << 20)})
def test_ring_of_more_chunks_than_an_engine_takes_requests_is_fine(tmp_path: Path) -> None:
    fp.save(make_state(1), tmp_path / "model.pt", engine="threads-buffered")
    assert not differences(fp.load(tmp_path / "model.pt"), make_state(1))


@pytest.mark.parametrize("engine", ["uring-buffered", "libaio-buffered"])
def test_a_table_is_written_through_the_page_cache_and_read_past_it(
    tmp_path: Path, engine: str, disk: None, tuned: Callable[[str], Path]
) -> None:
    tuned(f'engine = "{engine}"')
    rows = torch.arange(4096.0).reshape(64, 64)
    fp.write_rows(tmp_path / "rows.npy", rows)
    with fp.RowStore(tmp_path / "rows.npy") as store:
        assert torch.equal(store.gather(torch.arange(64)), rows)
        assert (
            store.stats().engine in engine_selection.AUTO_LADDER
        )  # the tuned one is not, unless direct I/O fails here


# --- writers


@pytest.mark.parametrize(
    ("tuned_count", "nodes", "writers"),
    [
        (2, (0,) * 4, [0, 1]),
        (1, (0,) * 4, [0]),
        (12, (0,) * 12, list(range(12))),
        (12, (0,) * 3, [0, 1, 2]),
        (None, (0,) * 12, list(range(8))),
        (4, (0, 0, 1, 1), [0, 2]),
    ],
)
def test_tuned_number_of_writers_is_that_of_one_node(
    tuned_count: int | None, nodes: tuple[int, ...], writers: list[int]
) -> None:
    assert choose_writers("auto", nodes, tuned_count) == writers
    assert choose_writers("all", nodes, tuned_count) == list(range(len(nodes)))
