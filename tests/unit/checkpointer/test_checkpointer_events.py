"""What a Checkpointer tells: the events of each save and load, to callbacks and to the log in its root."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.ranks_in_threads import eventually
from support.runs import held_writers

import fastpersist as fp
from fastpersist.events import Event, delivery, read_events, subscribe
from fastpersist.events.delivery import flush


class Heard(list[Event]):
    """What was told; who looks waits until all of it is delivered, however slow the machine is."""

    def __iter__(self) -> Iterator[Event]:
        assert flush(60)
        return super().__iter__()

    def __getitem__(self, place: Any) -> Any:
        assert flush(60)
        return super().__getitem__(place)


def logged_in(root: Path) -> list[Event]:
    assert flush(60)
    return list(read_events(root))


@pytest.fixture
def heard() -> Iterator[list[Event]]:
    found = Heard()
    unsubscribe = subscribe(found.append)
    yield found
    unsubscribe()


def state_of(count: int = 1000) -> dict[str, torch.Tensor]:
    return {"weight": torch.randn(count)}


def kinds(events: list[Event], step: int) -> list[str]:
    return [event.kind for event in events if event.step == step]


def test_save_tells_of_its_way(tmp_path: Path, heard: list[Event]) -> None:
    before_s = time.time()
    with fp.Checkpointer(tmp_path / "run") as checkpoints:
        checkpoints.save(7, state_of())
    logged = logged_in(tmp_path / "run")
    assert [event._replace(time_s=0, figures={}) for event in logged] == [
        event._replace(time_s=0, figures={}) for event in heard
    ]
    assert kinds(logged, 7) == ["save_begun", "captured", "written", "committed"]
    times = [event.time_s for event in logged]
    assert before_s <= times[0]
    assert times == sorted(times)
    assert times[-1] <= time.time()
    (stats,) = checkpoints.stats()
    committed = heard[-1]
    assert committed.path == str(tmp_path / "run" / "step-00000007")
    assert committed.root == str(tmp_path / "run")
    for name in ("stall_s", "capture_s", "write_s", "sync_s", "bytes", "engine"):
        assert committed.figures[name] == getattr(stats, name)
    assert 0 < committed.figures["commit_s"] <= stats.commit_s  # type: ignore[operator]


def test_stall_of_a_save_that_is_committed_before_it_returns_is_whole(
    tmp_path: Path, heard: list[Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    with fp.Checkpointer(tmp_path) as checkpoints:
        begin = checkpoints._saver.begin

        def begin_and_wait(*arguments: object) -> fp.PendingSave:
            pending = begin(*arguments)  # type: ignore[arg-type]
            pending.result()
            return pending

        monkeypatch.setattr(checkpoints._saver, "begin", begin_and_wait)
        checkpoints.save(1, state_of())
        (stats,) = checkpoints.stats()
    assert kinds(heard, 1)[-1] == "committed"
    assert heard[-1].figures["stall_s"] == stats.stall_s > stats.write_s


def test_gate_tells_that_the_state_is_captured(tmp_path: Path, heard: list[Event]) -> None:
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    with fp.Checkpointer(tmp_path, optimizer=optimizer) as checkpoints:
        checkpoints.save(1, {"model": model.state_dict(), "optimizer": optimizer.state_dict()})
        checkpoints.wait_captured()
        # Whoever has captured the last bytes tells it, perhaps the writer, and perhaps after this thread went on.
        eventually(lambda: [event for event in heard if event.kind == "captured"])
        captured = [event for event in heard if event.kind == "captured"]
        assert len(captured) == 1
        assert captured[0].figures["capture_s"] > 0  # type: ignore[operator]
    assert kinds(heard, 1) == ["save_begun", "captured", "written", "committed"]


def test_removed_steps_are_told(tmp_path: Path, heard: list[Event]) -> None:
    with fp.Checkpointer(tmp_path, keep=1) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(step, state_of())
        checkpoints.wait()
        checkpoints.delete(3)
    assert [event.step for event in heard if event.kind == "removed"] == [1, 2, 3]


def test_save_that_is_left_out_is_told(tmp_path: Path, heard: list[Event]) -> None:
    with fp.Checkpointer(tmp_path, busy="skip") as checkpoints, held_writers():
        checkpoints.save(1, state_of())
        assert checkpoints.save(2, state_of()).skipped()
    assert kinds(heard, 2) == ["save_begun", "skipped"]
    (skipped,) = (event for event in heard if event.kind == "skipped")
    assert "SkippedError" in str(skipped.figures["error"])


def test_failure_is_told_with_its_error(tmp_path: Path, heard: list[Event]) -> None:
    weight = torch.nn.Parameter(torch.zeros(1000))
    checkpoints = fp.Checkpointer(tmp_path, optimizer=torch.optim.SGD([weight]), gate="manual", on_error="warn")
    with held_writers():
        checkpoints.save(1, {"weight": weight}).cancel(fp.StorageError(5, "writing: Input/output error", "state.pt"))
    with pytest.warns(RuntimeWarning, match="was not saved"):
        checkpoints.close()
    assert kinds(heard, 1) == ["save_begun", "failed"]
    assert heard[-1].figures["error"] == "StorageError: writing: Input/output error"


def test_load_is_told(tmp_path: Path, heard: list[Event]) -> None:
    with fp.Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, state_of())
        checkpoints.wait()
        checkpoints.load()
    loaded = heard[-1]
    assert (loaded.kind, loaded.step) == ("loaded", 1)
    assert loaded.figures["bytes"] == (tmp_path / "step-00000001" / "state.pt").stat().st_size
    assert loaded.figures["total_s"] > 0  # type: ignore[operator]
    assert [event.kind for event in logged_in(tmp_path)][-1] == "loaded"


def test_load_makes_no_log(tmp_path: Path, heard: list[Event]) -> None:
    with fp.Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, state_of())
    (tmp_path / "events.jsonl").unlink()
    delivery._logs.clear()  # as in another process, which has saved nothing
    with fp.Checkpointer(tmp_path) as reader:
        reader.load()
    assert heard[-1].kind == "loaded"
    assert not (tmp_path / "events.jsonl").exists()


def test_load_from_a_root_that_may_only_be_read_changes_nothing(tmp_path: Path) -> None:
    with fp.Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, state_of())
    log = tmp_path / "events.jsonl"
    os.chmod(log, stat.S_IRUSR)
    before = log.read_bytes()
    with fp.Checkpointer(tmp_path) as reader:
        reader.load()
    if os.geteuid():  # root may write whatever the mode says
        assert log.read_bytes() == before


def test_log_does_not_disturb_those_who_read_roots(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with fp.Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, state_of())
        checkpoints.wait()
        assert flush(60)
        assert (tmp_path / "events.jsonl").is_file()
        for name in ("events.jsonl.1", "events-rank-00001.jsonl"):
            (tmp_path / name).write_bytes(b"{}\n")
        assert checkpoints.steps() == [1]
        assert checkpoints.latest() == 1
    assert fp.verify(tmp_path).ok
    assert fp.inspect(tmp_path).leftovers == ()
    with fp.Checkpointer(tmp_path) as checkpoints:  # sweeps
        checkpoints.save(2, state_of())
    assert checkpoints.steps() == [1, 2]
    assert sorted(name for name in os.listdir(tmp_path) if "event" in name) == [
        "events-rank-00001.jsonl",
        "events.jsonl",
        "events.jsonl.1",
    ]
    assert not caplog.records


def test_log_stays_when_all_steps_are_removed(tmp_path: Path) -> None:
    with fp.Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, state_of())
        checkpoints.delete(1)
    assert [event.kind for event in logged_in(tmp_path)][-1] == "removed"


def test_a_state_that_cannot_be_pickled_is_told_as_a_failure(tmp_path: Path, heard: list[Event]) -> None:
    with fp.Checkpointer(tmp_path) as checkpoints, pytest.raises(Exception, match="pickle"):
        checkpoints.save(1, {"key": lambda: 1})
    assert kinds(heard, 1) == ["save_begun", "failed"]
    assert "pickle" in str(heard[-1].figures["error"])


def test_a_root_behind_a_link_has_its_events(tmp_path: Path, heard: list[Event]) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "scratch").symlink_to("disk")
    root = tmp_path / "scratch" / "run"
    with fp.Checkpointer(root, keep=1) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, state_of()).result()
        checkpoints.load()
    flush()
    logged = list(read_events(root))
    assert {event.kind for event in logged} >= {"committed", "removed", "loaded"}
    assert {event.root for event in heard} == {str(root)}
    assert {os.path.dirname(event.path) for event in [*heard, *logged]} == {str(root)}
