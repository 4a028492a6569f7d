"""The log of a root: one line for each event, whole or passed over, never more than two files of 8 MiB for a rank."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from fastpersist import StorageError
from fastpersist.events import Event, log, read_events
from fastpersist.events.log import EventLog, LogFollower, decode_line, encode_line, events_name


def event_at(time_s: float, root: Path, *, kind: str = "committed", step: int = 1, rank: int = 0) -> Event:
    path = str(root / f"step-{step:08d}")
    return Event(kind, time_s, str(root), path, step, rank, {"stall_s": 0.25, "bytes": 12, "engine": "uring"})


def test_event_comes_back_as_it_was(tmp_path: Path) -> None:
    EventLog(str(tmp_path), 0).append(event_at(1700000000.5, tmp_path))
    assert list(read_events(tmp_path)) == [event_at(1700000000.5, tmp_path)]


def test_line_is_what_the_reference_says(tmp_path: Path) -> None:
    EventLog(str(tmp_path), 0).append(event_at(1700000000.5, tmp_path))
    assert json.loads((tmp_path / "events.jsonl").read_text()) == {
        "event": "committed",
        "time_s": 1700000000.5,
        "step": 1,
        "rank": 0,
        "path": "step-00000001",
        "stall_s": 0.25,
        "bytes": 12,
        "engine": "uring",
    }


@pytest.mark.parametrize(("rank", "name"), [(0, "events.jsonl"), (7, "events-rank-00007.jsonl")], ids=str)
def test_each_rank_has_a_file(rank: int, name: str, tmp_path: Path) -> None:
    EventLog(str(tmp_path), rank).append(event_at(1.0, tmp_path, rank=rank))
    assert os.listdir(tmp_path) == [name]
    assert events_name(rank) == name


def test_ranks_are_merged_by_time(tmp_path: Path) -> None:
    for rank, times in ((0, (1.0, 4.0)), (1, (3.0, 2.0))):
        of_rank = EventLog(str(tmp_path), rank)
        for time_s in times:
            of_rank.append(event_at(time_s, tmp_path, rank=rank))
    assert [(event.time_s, event.rank) for event in read_events(tmp_path)] == [(1, 0), (2, 1), (3, 1), (4, 0)]


def test_file_that_is_full_becomes_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = len(encode_line(event_at(100.0, tmp_path)))
    monkeypatch.setattr(log, "_SIZE_MAX_BYTES", 3 * size)
    of_root = EventLog(str(tmp_path), 0)
    for number in range(10):
        of_root.append(event_at(100.0 + number, tmp_path))
        assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 6 * size
    assert sorted(os.listdir(tmp_path)) == ["events.jsonl", "events.jsonl.1"]
    assert [event.time_s for event in read_events(tmp_path)] == [106, 107, 108, 109]


def test_cut_line_costs_itself_only(tmp_path: Path) -> None:
    EventLog(str(tmp_path), 0).append(event_at(1.0, tmp_path))
    with open(tmp_path / "events.jsonl", "ab") as file:
        file.write(encode_line(event_at(2.0, tmp_path))[:20])
    assert [event.time_s for event in read_events(tmp_path)] == [1]
    EventLog(str(tmp_path), 0).append(event_at(3.0, tmp_path))
    assert [event.time_s for event in read_events(tmp_path)] == [1, 3]


def test_line_that_a_full_disk_cuts_costs_no_later_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, room_bytes = os.write, 100

    def write_where_there_is_room(fd: int, data: bytes) -> int:
        nonlocal room_bytes
        if not room_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written_bytes = write(fd, data[:room_bytes])
        room_bytes -= written_bytes
        return written_bytes

    of_root = EventLog(str(tmp_path), 0)
    of_root.append(event_at(1.0, tmp_path))
    with monkeypatch.context() as full:
        full.setattr(os, "write", write_where_there_is_room)
        for time_s in (2.0, 3.0):
            of_root.append(event_at(time_s, tmp_path))
    for time_s in (4.0, 5.0):
        of_root.append(event_at(time_s, tmp_path))
    assert [event.time_s for event in read_events(tmp_path)] == [1, 4, 5]


@pytest.mark.parametrize(
    "line",
    [
        b"\n",
        b"[]\n",
        b"null\n",
        b"\xff\xfe\n",
        b"[" * 100_000 + b"\n",
        b'{"event": "loaded", "time_s": NaN, "step": 1, "rank": 0, "path": "p"}\n',
        b'{"event": "loaded", "time_s": 1' + b"0" * 5000 + b', "step": 1, "rank": 0, "path": "p"}\n',
        b'{"event": "loaded", "time_s": 1, "step": -1, "rank": 0, "path": "p"}\n',
        b'{"event": "loaded", "time_s": 1, "step": true, "rank": 0, "path": "p"}\n',
        b'{"event": "loaded", "time_s": 1, "step": 1, "rank": null, "path": "p"}\n',
        b'{"event": 5, "time_s": 1, "step": 1, "rank": 0, "path": "p"}\n',
        b'{"event": "loaded", "time_s": 1, "step": 1, "rank": 0}\n',
        b'{"event": "loaded", "time_s": 1, "step": 1, "rank": 0, "path": "p"}',
    ],
    ids=range(13),
)
def test_damaged_line_is_passed_over(line: bytes, tmp_path: Path) -> None:
    assert decode_line(line, "/root") is None
    (tmp_path / "events.jsonl").write_bytes(line)
    assert list(read_events(tmp_path)) == []


def test_figures_that_are_no_numbers_or_text_are_left_out() -> None:
    line = b'{"event": "loaded", "time_s": 1, "step": null, "rank": 0, "path": "p", "a": [1], "b": Infinity, "c": 2}\n'
    event = decode_line(line, "/root")
    assert event is not None
    assert event.figures == {"c": 2}


def test_long_error_stays_within_a_line(tmp_path: Path) -> None:
    long = event_at(1.0, tmp_path)._replace(figures={"error": "\U0001f4be" * 100_000, "stall_s": float("nan")})
    EventLog(str(tmp_path), 0).append(long)
    (event,) = read_events(tmp_path)
    assert event.figures == {"error": "\U0001f4be" * 4000}


def test_load_makes_no_file_and_appends_to_one_that_is_there(tmp_path: Path) -> None:
    EventLog(str(tmp_path), 0).append(event_at(1.0, tmp_path, kind="loaded"))
    assert os.listdir(tmp_path) == []
    EventLog(str(tmp_path), 0).append(event_at(2.0, tmp_path))
    EventLog(str(tmp_path), 0).append(event_at(3.0, tmp_path, kind="loaded"))
    assert [event.kind for event in read_events(tmp_path)] == ["committed", "loaded"]


def test_load_is_silent_where_the_log_may_not_be_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "events.jsonl").mkdir()
    EventLog(str(tmp_path), 0).append(event_at(3.0, tmp_path, kind="loaded"))
    assert not caplog.records


def test_events_before_the_root_is_made_come_later(tmp_path: Path) -> None:
    root = tmp_path / "root"
    of_root = EventLog(str(root), 0)
    of_root.append(event_at(1.0, root, kind="save_begun"))
    assert not root.exists()
    root.mkdir()
    of_root.append(event_at(2.0, root))
    assert [event.kind for event in read_events(root)] == ["save_begun", "committed"]


def test_nothing_is_written_to_the_directory_below_a_root_that_is_unmounted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def mount(device: int) -> None:
        monkeypatch.setattr(log, "_device_of", lambda fd: device)

    mount(1)
    of_root = EventLog(str(tmp_path), 0)
    of_root.append(event_at(1.0, tmp_path))
    mount(2)
    of_root.append(event_at(2.0, tmp_path))
    assert [event.time_s for event in read_events(tmp_path)] == [1]
    (tmp_path / ".lock").touch()  # mounted again, as another device
    of_root.append(event_at(3.0, tmp_path))
    assert [event.time_s for event in read_events(tmp_path)] == [1, 2, 3]


@pytest.mark.parametrize("kind", ["fifo", "directory"])
def test_error_of_the_disk_is_logged_once(kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "events.jsonl"
    os.mkfifo(path) if kind == "fifo" else path.mkdir()
    of_root = EventLog(str(tmp_path), 0)
    of_root.append(event_at(1.0, tmp_path))
    of_root.append(event_at(2.0, tmp_path))
    assert len(caplog.records) == 1
    assert "events are not logged" in caplog.text


def test_root_without_a_log_has_no_events(tmp_path: Path) -> None:
    assert list(read_events(tmp_path)) == []


def test_root_that_is_missing_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="listing"):
        list(read_events(tmp_path / "none"))


def test_follower_tells_each_event_once_over_rotations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = EventLog(str(tmp_path), 0)
    event = event_at(1700000000.0, tmp_path)
    monkeypatch.setattr(log, "_SIZE_MAX_BYTES", 3 * len(encode_line(event)))
    follower = LogFollower(str(tmp_path))
    assert follower.news() == []
    found: list[float] = []
    told = 0
    for count in (1, 1, 2, 1, 3, 0, 2, 4):  # the log is rotated at each third event: between readings, and at them
        for _ in range(count):
            written.append(event_at(1700000000.0 + told, tmp_path))
            told += 1
        found += [one.time_s - 1700000000.0 for one in follower.news()]
    assert found == list(range(told))


def test_follower_reads_no_line_again_and_waits_for_the_end_of_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded: list[bytes] = []
    monkeypatch.setattr(log, "decode_line", lambda line, root: decoded.append(line) or decode_line(line, root))
    line = encode_line(event_at(1700000000.0, tmp_path))
    path = tmp_path / "events.jsonl"
    path.write_bytes(line + line[:20])
    follower = LogFollower(str(tmp_path))
    assert len(follower.news()) == 1
    with path.open("ab") as file:
        file.write(line[20:])
    assert len(follower.news()) == 1
    assert follower.news() == []
    assert decoded == [line, line]
