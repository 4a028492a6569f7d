"""A save that fails is told of exactly once, by whoever comes first; and the end of a program finishes its saves."""

from __future__ import annotations

import errno
import logging
import re
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from support.filesystems import FullFor, FullForNames
from support.runs import Run, held_writers, hidden_names
from support.training import PATIENCE_S

import fastpersist as fp
from fastpersist.commit.filesystem import Filesystem, using
from fastpersist.saving.directory_save import DirectorySave
from fastpersist.saving.pending_save import Lane

STATE = {"weights": torch.arange(1000.0), "name": "a state"}


def save_that_fails(checkpointer: fp.Checkpointer, step: int = 1) -> fp.PendingSave:
    with using(FullFor()):
        pending = checkpointer.save(step, STATE)
        assert pending.join(PATIENCE_S)
    return pending


def result(checkpointer: fp.Checkpointer, pending: fp.PendingSave) -> None:
    pending.result()


def wait(checkpointer: fp.Checkpointer, pending: fp.PendingSave) -> None:
    checkpointer.wait()


def next_save(checkpointer: fp.Checkpointer, pending: fp.PendingSave) -> None:
    checkpointer.save(2, STATE)


def close(checkpointer: fp.Checkpointer, pending: fp.PendingSave) -> None:
    checkpointer.close()


tellers = pytest.mark.parametrize("tell", [result, wait, next_save, close])


@tellers
def test_failure_is_raised_by_whoever_comes_first_and_by_nobody_else(
    tmp_path: Path, tell: Callable[[fp.Checkpointer, fp.PendingSave], None], leak_check: None
) -> None:
    checkpointer = fp.Checkpointer(tmp_path)
    pending = save_that_fails(checkpointer)
    with pytest.raises(fp.NoSpaceError, match="step-00000001"):
        tell(checkpointer, pending)
    if tell is not close:
        checkpointer.wait()
        checkpointer.save(2, STATE)
        checkpointer.wait()
        assert checkpointer.steps() == [2]
    checkpointer.close()
    checkpointer.close()
    assert isinstance(pending.exception(), fp.NoSpaceError)  # which says it as often as it is asked
    assert hidden_names(tmp_path) == []


def test_exception_counts_as_delivery(tmp_path: Path) -> None:
    with fp.Checkpointer(tmp_path) as checkpointer:
        pending = save_that_fails(checkpointer)
        assert isinstance(pending.exception(), fp.NoSpaceError)
        checkpointer.save(2, STATE)
    assert checkpointer.steps() == [2]


def test_each_of_several_failures_is_told(tmp_path: Path) -> None:
    checkpointer = fp.Checkpointer(tmp_path)
    with using(FullFor()):
        with held_lane(checkpointer):
            checkpointer.save(1, STATE)
            checkpointer.save(2, STATE)
        for name in ("step-00000001", "step-00000002"):
            with pytest.raises(fp.NoSpaceError, match=name):
                checkpointer.wait()
    checkpointer.close()


@contextmanager
def held_lane(checkpointer: fp.Checkpointer) -> Iterator[None]:
    """Let no save of a Checkpointer begin while the block runs."""
    over = threading.Event()

    def wait_for_the_end() -> None:
        over.wait(PATIENCE_S)

    checkpointer._saver._lane.submit(wait_for_the_end)
    try:
        yield
    finally:
        over.set()


@pytest.mark.parametrize("when", ["at once", "late"])
@pytest.mark.parametrize("fails", [True, False], ids=["fails", "succeeds"])
def test_save_that_is_over_before_save_returns_is_counted_like_any_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool, when: str
) -> None:
    submit = Lane.submit

    def submit_and_wait(self: Lane, task: Callable[[], None]) -> None:
        submit(self, task)
        if when == "at once":
            while not self.is_idle():
                time.sleep(0.001)

    monkeypatch.setattr(Lane, "submit", submit_and_wait)
    publish = DirectorySave.publish

    def publish_and_wait(self: DirectorySave, **arguments: Any) -> fp.PendingSave:
        pending = publish(self, **arguments)
        pending.join()
        return pending

    monkeypatch.setattr(DirectorySave, "publish", publish_and_wait)
    checkpointer = fp.Checkpointer(tmp_path)
    with using(FullFor() if fails else Filesystem()):
        checkpointer.save(1, STATE)
    if fails:
        with pytest.raises(fp.NoSpaceError):
            checkpointer.wait()
    checkpointer.close()
    assert [stats.error is not None for stats in checkpointer.stats()] == [fails]
    assert checkpointer.steps() == ([] if fails else [1])


def test_failed_save_is_in_the_log_and_in_the_stats(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    checkpointer = fp.Checkpointer(tmp_path)
    save_that_fails(checkpointer)
    assert [record.levelno for record in caplog.records if "step-00000001 failed" in record.message] == [logging.ERROR]
    (stats,) = checkpointer.stats()
    assert stats.step == 1
    assert "disk full" in (stats.error or "")
    with pytest.raises(fp.NoSpaceError):
        checkpointer.close()


@pytest.mark.parametrize("disk", [FullFor, FullForNames])
def test_on_error_warn_keeps_training_alive_and_says_so_each_time(
    tmp_path: Path, disk: type[Filesystem], leak_check: None
) -> None:
    checkpointer = fp.Checkpointer(tmp_path, on_error="warn")
    checkpointer.save(1, STATE).result()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with using(disk()):
            failed = [checkpointer.save(step, STATE) for step in (2, 3)]
            checkpointer.wait()
        checkpointer.save(4, STATE)
        checkpointer.wait()
        checkpointer.close()
    told = [str(warning.message) for warning in caught if "training goes on" in str(warning.message)]
    assert len(told) == 2
    assert "step-00000002" in told[0]
    assert "step-00000003" in told[1]
    assert {warning.filename for warning in caught} == {__file__}
    for pending in failed:
        with pytest.raises(fp.NoSpaceError):
            pending.result()
    assert checkpointer.steps() == [1, 4]
    assert {stats.step: stats.error is None for stats in checkpointer.stats()} == {1: True, 2: False, 3: False, 4: True}


def save_and_wait(checkpointer: fp.Checkpointer, **arguments: Any) -> fp.PendingSave:
    pending = checkpointer.save(1, STATE, **arguments)
    checkpointer.wait()
    return pending


def test_on_error_warn_is_for_every_error_of_the_writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_new = DirectorySave._check_new

    def check_late(self: DirectorySave, name: str) -> None:
        while not self._lane.is_idle():
            time.sleep(0.001)
        check_new(self, name)

    class Unsupported(Filesystem):
        def allocate(self, fd: int, size_bytes: int, path: str) -> None:
            raise fp.UnsupportedError("not here")

    monkeypatch.setattr(DirectorySave, "_check_new", check_late)
    checkpointer = fp.Checkpointer(tmp_path, on_error="warn")
    with using(Unsupported()):
        with pytest.warns(RuntimeWarning, match="not here"):
            pending = save_and_wait(checkpointer, rank_state={"a": 1})
    assert isinstance(pending.exception(), fp.UnsupportedError)
    checkpointer.close()
    assert [stats.error is None for stats in checkpointer.stats()] == [False]


@pytest.mark.parametrize("on_error", ["raise", "warn"])
def test_state_that_cannot_be_pickled_is_its_owners_error_and_leaves_nothing(
    tmp_path: Path, on_error: Any, leak_check: None
) -> None:
    checkpointer = fp.Checkpointer(tmp_path, on_error=on_error)
    for arguments in ({"state": {"a": lambda: 1}}, {"state": STATE, "rank_state": {"a": lambda: 1}}):
        with pytest.raises(Exception, match=r"pickle|lambda"):
            checkpointer.save(1, **arguments)
        checkpointer.wait()
        assert hidden_names(tmp_path) == []
    checkpointer.save(1, STATE)
    checkpointer.close()
    assert checkpointer.steps() == [1]


def test_torn_state_is_told_and_the_next_save_is_whole(tmp_path: Path) -> None:
    run = Run().advance()
    with fp.Checkpointer(tmp_path, optimizer=run.optimizer) as checkpointer:
        checkpointer.save(1, run.state()).result()
        with held_writers() as writers:
            pending = checkpointer.save(2, run.state())
            with torch.no_grad():
                run.model[0].add_(1.0)
            writers.release()
            with pytest.raises(fp.TornStateError, match=re.escape("model.0")):
                pending.result()
        checkpointer.save(3, run.state())
        with torch.no_grad():
            run.model[0].sub_(1.0)
    assert checkpointer.steps() == [1, 3]
    assert torch.equal(checkpointer.load(3)["model"]["0"] - 1.0, run.model[0])


@pytest.mark.parametrize("memory", [0, None])
def test_save_that_fails_lets_everybody_go_who_waits_for_it(tmp_path: Path, memory: int | None) -> None:
    run = Run().advance()
    with using(FullFor()):
        checkpointer = fp.Checkpointer(tmp_path, optimizer=run.optimizer, max_host_bytes=memory, on_error="warn")
        with warnings.catch_warnings(record=True):
            warnings.simplefilter("always")
            for _ in range(3):
                checkpointer.save(run.step, {**run.state(), "large": torch.ones(100_000)})
                run.advance()
            checkpointer.close()
    assert checkpointer.steps() == []
    assert len(checkpointer.stats()) == 3


# --- the end


class SyncFailsOnce(Filesystem):
    """A file system that cannot make a step's name durable, when `step` has become visible in `root`."""

    def __init__(self, root: Path, step: int) -> None:
        self.step_path, self.root, self.has_failed = root / f"step-{step:08d}", str(root), False

    def sync_directory(self, path: str) -> None:
        if path == self.root and self.step_path.exists() and not self.has_failed:
            self.has_failed = True
            raise fp.StorageError(errno.EIO, "the disk failed", path)
        super().sync_directory(path)


@pytest.mark.parametrize(("keep", "stay"), [(1, [4]), (2, [3, 4]), (3, [2, 3, 4])])
def test_step_that_is_visible_though_its_save_failed_goes_like_any_other(
    keep: int, stay: list[int], tmp_path: Path
) -> None:
    filesystem = SyncFailsOnce(tmp_path, 2)
    with using(filesystem), fp.Checkpointer(tmp_path, keep=keep) as checkpointer:
        checkpointer.save(1, {"x": 1}).result()
        error = checkpointer.save(2, {"x": 2}).exception()
        assert isinstance(error, fp.StorageError)
        assert "is published, but" in str(error)
        assert checkpointer.steps() == [1, 2]  # what is not durable takes nothing's place
        checkpointer.save(3, {"x": 3}).result()
        checkpointer.save(4, {"x": 4}).result()
    assert fp.Checkpointer(tmp_path).steps() == stay
    assert fp.load(tmp_path / "step-00000004" / "state.pt") == {"x": 4}


def test_with_finishes_the_saves_and_gives_the_root_back(tmp_path: Path, leak_check: None) -> None:
    with held_writers() as writers:
        with fp.Checkpointer(tmp_path) as checkpointer:
            pending = checkpointer.save(1, STATE)
            writers.release()
        assert pending.done()
    with pytest.raises(fp.ConfigError, match="closed"):
        checkpointer.save(2, STATE)
    assert checkpointer.load()["name"] == "a state"  # reading goes on
    with fp.Checkpointer(tmp_path) as another:
        another.save(2, STATE)


def test_exception_in_the_block_is_not_replaced_by_a_failed_save(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(KeyError, match="mine"):
        with fp.Checkpointer(tmp_path) as checkpointer:
            save_that_fails(checkpointer)
            raise KeyError("mine")
    assert any("another exception" in record.message for record in caplog.records)
    checkpointer.close()  # it has been told


def test_failed_save_is_raised_at_the_end_of_the_block(tmp_path: Path) -> None:
    with pytest.raises(fp.NoSpaceError):
        with fp.Checkpointer(tmp_path) as checkpointer:
            save_that_fails(checkpointer)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"writers": "foo"}, "writers must be 'auto', 'all', 'node' or a number of ranks, not 'foo'"),
        ({"writers": 0}, "writers must be .*, not 0"),
        ({"peer_timeout_s": -1}, "peer_timeout_s is a number of seconds above 0, not -1"),
        ({"peer_timeout_s": "1m"}, "peer_timeout_s is a number of seconds above 0, not '1m'"),
    ],
)
def test_options_for_several_ranks_are_checked_with_one(options: dict[str, Any], told: str, tmp_path: Path) -> None:
    with pytest.raises(fp.ConfigError, match=told):
        fp.Checkpointer(tmp_path / "root", **options)
    if "writers" in options:
        with pytest.raises(fp.ConfigError, match=told):
            fp.save({}, tmp_path / "x.pt", **options)
    assert not list(tmp_path.iterdir())
