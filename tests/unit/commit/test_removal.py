"""What dead saves leave is swept, what lives stays; removed checkpoints lose their name first."""

from __future__ import annotations

import errno
import fcntl
import itertools
import logging
import os
import re
import secrets
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path

import pytest
from support.directories import (
    NAME,
    STEPS,
    FailingLowerLayer,
    KillingLowerLayer,
    LowerLayer,
    Recording,
    RecordingLowerLayer,
    Refusing,
    begin,
    hidden,
    kill_alone,
    leave,
    lock_is_free,
    make_foreign,
    make_link,
    save,
    step_in,
    wait_for_report,
)
from support.filesystems import FailingFilesystem, KillingFilesystem, Operation, SillyRenames, WatchedFilesystem
from support.forking import Child, Report, run_in_child
from support.sandbox import become_ordinary_user, open_directory

import fastpersist as fp
from fastpersist.commit import locks, removal
from fastpersist.commit.directory_commit import (
    PendingDirectory,
    RootLock,
    committed_path,
    hold_for_reading,
    remove_directory,
    sweep_directories,
)
from fastpersist.commit.filesystem import Filesystem, using
from fastpersist.errors import (
    CheckpointNotFoundError,
    ConfigError,
    StorageError,
)
from fastpersist.events.log import EVENTS_NAME

# --- leftovers


@pytest.mark.parametrize("manifest", [None, b"", b'{"step": 0}\n'], ids=["bare", "empty", "complete"])
@pytest.mark.parametrize("name", [NAME, STEPS], ids=["name", "pattern"])
def test_dead_pending_directory_is_removed(name: re.Pattern[str] | str, manifest: bytes | None, tmp_path: Path) -> None:
    left = leave(tmp_path, manifest=manifest)
    bare = tmp_path / f".{NAME}.pending-{secrets.token_hex(8)}"
    bare.mkdir()
    with using(recording := Recording()):
        assert sorted(sweep_directories(str(tmp_path), name)) == sorted([str(left), str(bare)])
    assert os.listdir(tmp_path) == []
    names = [operation.name for operation in recording.operations]
    assert names.count("sync_directory") == 1
    assert names.index("sync_directory") < names.index("unlink")  # it may have been replaced a moment ago


def test_what_only_looks_like_a_leftover_stays(tmp_path: Path) -> None:
    token = secrets.token_hex(8)
    for odd in (f".{NAME}.pending-{token}x", f".{NAME}.pending-", f".other.pending-{token}", f"{NAME}.pending-{token}"):
        (tmp_path / odd).mkdir()
    (tmp_path / f".{NAME}.pending-{token}").write_bytes(b"a pending file is another protocol's")
    (tmp_path / f".{NAME}.retired-{token}").symlink_to(tmp_path / f".other.pending-{token}")
    before = sorted(os.listdir(tmp_path))
    assert sweep_directories(str(tmp_path), NAME) == []
    assert sweep_directories(str(tmp_path), STEPS) == []
    assert sorted(os.listdir(tmp_path)) == before
    assert sweep_directories(str(tmp_path / "missing"), NAME) == []


def test_live_directory_is_left_alone_and_keeps_its_lock(tmp_path: Path) -> None:
    pending = begin(tmp_path / NAME)
    assert sweep_directories(str(tmp_path), NAME) == []
    with pytest.raises(CheckpointNotFoundError, match="still being written"), hold_for_reading(pending.path):
        pass
    assert not remove_directory(pending.path)
    assert not lock_is_free(Path(pending.path) / "MANIFEST.json")
    run_in_child(lambda report: sweep_directories(str(tmp_path), STEPS) and None)
    pending.publish(b'{"step": 1}\n')
    assert step_in(tmp_path / NAME) == 1
    assert lock_is_free(tmp_path / NAME / "MANIFEST.json")


def test_killed_writer_leaves_a_dead_directory_even_while_its_forked_child_lives(tmp_path: Path) -> None:
    def work(report: Report) -> None:
        _held = begin(tmp_path / NAME)
        worker = os.fork()
        if worker == 0:
            signal.pause()
        report(worker)
        signal.pause()

    with Child(work) as child:
        wait_for_report(child, 1)
        worker = child.reported
        try:
            (left,) = hidden(tmp_path)
            assert sweep_directories(str(tmp_path), NAME) == []
            kill_alone(child)
            assert sweep_directories(str(tmp_path), NAME) == [str(left)]
        finally:
            os.kill(worker, signal.SIGKILL)


def test_empty_directory_may_be_of_a_save_that_lives(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    leave(tmp_path, manifest=b"")
    (tmp_path / f".{NAME}.pending-{secrets.token_hex(8)}").mkdir()
    with caplog.at_level(logging.INFO, logger="fastpersist"):
        sweep_directories(str(tmp_path), NAME)
    told = sorted(record.getMessage().partition(", ")[2] for record in caplog.records)
    assert told == ["left by a save that died", "which was empty: its save died, or is about to make another one"]


@pytest.mark.parametrize("step", ["make_directory", "create"])
def test_directory_that_is_swept_before_it_is_locked_is_made_anew(step: str, tmp_path: Path, leak_check: None) -> None:
    class Swept(WatchedFilesystem):
        count = 0

        @contextmanager
        def around(self, operation: Operation) -> Iterator[None]:
            yield
            if operation.name == step and self.count < 2:
                self.count += 1
                with using(Filesystem()):
                    run_in_child(lambda report: report(len(sweep_directories(str(tmp_path), NAME))))

    with using(swept := Swept()):
        pending = PendingDirectory.create(str(tmp_path / NAME), overwrite=False)
    assert swept.count == 2
    assert hidden(tmp_path) == [Path(pending.path)]
    pending.abort()


def test_directory_that_a_sweeper_is_looking_at_is_made_anew(tmp_path: Path, leak_check: None) -> None:
    """The sweeper has locked the manifest and not deleted it yet."""

    class Locked(Filesystem):
        locked = False

        def create(self, path: str, mode: int = 0o666) -> int:
            fd = super().create(path, mode)
            if not self.locked:
                self.locked = True

                def work(report: Report) -> None:
                    fcntl.lockf(os.open(path, os.O_RDWR), fcntl.LOCK_EX)
                    report(0)
                    signal.pause()

                wait_for_report(children.enter_context(Child(work)))
            return fd

    with ExitStack() as children, using(Locked()):
        pending = PendingDirectory.create(str(tmp_path / NAME), overwrite=False)
        assert hidden(tmp_path) == [Path(pending.path)]
    pending.abort()


def test_two_sweepers_at_once_remove_everything(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(30):
        leave(tmp_path, manifest=b"" if secrets.randbelow(2) else None)
    save(tmp_path / NAME, 1)
    for _ in range(30):
        leave(tmp_path, "retired", manifest=b"{}")

    def work(report: Report) -> None:
        while hidden(tmp_path):
            sweep_directories(str(tmp_path), STEPS)

    with Child(work) as first, Child(work) as second:
        work(lambda step: None)
        for child in (first, second):
            assert child.wait().verdict == "passed", child.wait().message
    assert os.listdir(tmp_path) == [NAME]
    assert step_in(tmp_path / NAME) == 1
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_sweeper_that_has_locked_what_was_just_published_leaves_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, leak_check: None
) -> None:
    """Its writer let go between the opening and the lock, so the lock is had, of a directory with another name."""
    save(tmp_path / NAME, 1)
    left = leave(tmp_path)
    lock = locks._lock_for_removal

    def publish_first(fd: int, writable: bool, path: str) -> locks.Lock:
        Filesystem().exchange(str(left), str(tmp_path / NAME))
        return lock(fd, writable, path)

    with monkeypatch.context() as patched:
        patched.setattr(locks, "_lock_for_removal", publish_first)
        assert sweep_directories(str(tmp_path), NAME) == []
    assert step_in(left) == 1
    assert sweep_directories(str(tmp_path), NAME) == [str(left)]
    remove_directory(str(tmp_path / NAME))


def test_directory_whose_manifest_is_made_while_a_sweeper_looks_is_left_alone(tmp_path: Path, leak_check: None) -> None:
    """The sweeper saw no manifest, and the writer makes it before the sweeper has removed the directory."""
    bare = leave(tmp_path, manifest=None)

    class MadeMeanwhile(Filesystem):
        def remove_directory(self, path: str) -> None:
            def work(report: Report) -> None:
                fd = os.open(bare / "MANIFEST.json", os.O_RDWR | os.O_CREAT)
                fcntl.lockf(fd, fcntl.LOCK_EX)
                report(0)
                signal.pause()

            wait_for_report(children.enter_context(Child(work)))
            super().remove_directory(path)

    with ExitStack() as children, using(MadeMeanwhile()):
        assert sweep_directories(str(tmp_path), NAME) == []
        assert (bare / "state.pt").exists()
    assert sweep_directories(str(tmp_path), NAME) == [str(bare)]


def test_newest_retired_directory_counts_as_committed_and_gets_its_name_back(tmp_path: Path) -> None:
    for step in (5, 6, 4):
        left = leave(tmp_path, "retired", manifest=b'{"step": %d}\n' % step, step=step)
        os.utime(left / "MANIFEST.json", (step, step))
    leave(tmp_path, "retired", manifest=b"", step=9)  # was never published
    leave(tmp_path, "pending", manifest=b'{"step": 8}\n', step=8)
    assert step_in(committed_path(str(tmp_path), NAME)) == 6
    assert committed_path(str(tmp_path), "step-00000002") is None
    assert len(sweep_directories(str(tmp_path), STEPS)) == 4
    assert os.listdir(tmp_path) == [NAME]
    assert step_in(tmp_path / NAME) == 6


def test_save_without_overwrite_sees_a_checkpoint_that_was_retired(tmp_path: Path) -> None:
    leave(tmp_path, "retired", manifest=b'{"step": 5}\n', step=5)
    with pytest.raises(ConfigError, match="exists already"):
        PendingDirectory.create(str(tmp_path / NAME), overwrite=False)
    assert step_in(tmp_path / NAME) == 5


def test_leftover_that_cannot_be_removed_is_reported_and_the_save_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    left = leave(tmp_path)

    class Stubborn(Filesystem):
        def unlink(self, path: str) -> None:
            raise StorageError(errno.EIO, f"removing {path}: Input/output error", path)

    with using(Stubborn()):
        save(tmp_path / NAME, 1)
    assert "a leftover stays" in caplog.text
    assert left.exists()
    assert step_in(tmp_path / NAME) == 1


def test_without_locks_leftovers_are_reported_and_removed_when_a_day_old(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(fd: int, *arguments: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "lockf", refuse)
    monkeypatch.setattr(fcntl, "fcntl", refuse)
    young, old = leave(tmp_path), leave(tmp_path)
    day_ago_s = time.time() - 25 * 3600
    for path in (old, old / "MANIFEST.json"):
        os.utime(path, (day_ago_s, day_ago_s))
    save(tmp_path / NAME, 1)
    save(tmp_path / NAME, 2)
    assert hidden(tmp_path) == [young]
    assert "removed when a day old" in caplog.text
    with hold_for_reading(str(tmp_path / NAME)):
        assert step_in(tmp_path / NAME) == 2
    assert remove_directory(str(tmp_path / NAME))
    RootLock.acquire(str(tmp_path)).release()


# --- removing


def test_removed_directory_loses_its_name_durably_before_its_files(tmp_path: Path, leak_check: None) -> None:
    save(tmp_path / NAME)
    with using(recording := Recording()):
        assert remove_directory(str(tmp_path / NAME))
    assert [operation.name for operation in recording.operations[:3]] == ["rename", "sync_directory", "unlink"]
    assert re.fullmatch(rf"\.{NAME}\.pending-[0-9a-f]{{16}}", Path(recording.operations[0].target).name)
    assert recording.operations[-2].path.endswith("MANIFEST.json")
    assert os.listdir(tmp_path) == []


class SillyRefusing(SillyRenames):
    exchange = Refusing.exchange


def remove_a_step(root: Path) -> None:
    save(root / NAME, 1)
    assert remove_directory(str(root / NAME))


def sweep_what_is_left(root: Path) -> None:
    leave(root)
    leave(root, "retired")
    assert len(sweep_directories(str(root), NAME)) == 2


def replace_a_step(root: Path) -> None:
    save(root / NAME, 1)
    save(root / NAME, 2)
    assert step_in(root / NAME) == 2
    assert remove_directory(str(root / NAME))


def give_up_a_step(root: Path) -> None:
    begin(root / NAME).abort()


def keep_one_step(root: Path) -> None:
    with fp.Checkpointer(root, keep=1) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(step, {"step": step})
    assert remove_directory(str(root / "step-00000003"))
    for name in ("LATEST", ".lock", EVENTS_NAME):
        (root / name).unlink()


@pytest.mark.parametrize("filesystem", [SillyRenames, SillyRefusing], ids=["exchange", "two-steps"])
@pytest.mark.parametrize("work", [remove_a_step, sweep_what_is_left, replace_a_step, give_up_a_step, keep_one_step])
def test_no_file_is_removed_while_it_is_open(
    work: Callable[[Path], None],
    filesystem: Callable[[], SillyRenames],
    tmp_path: Path,
    leak_check: None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """NFS keeps an open file under a `.nfs…` name in its directory, which can then not be removed."""
    with using(double := filesystem()):
        work(tmp_path)
    assert double.renamed == []
    assert os.listdir(tmp_path) == []
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("finish", [remove_directory, sweep_directories], ids=["remove", "sweep"])
def test_directory_that_is_nearly_removed_never_gets_its_name_back(
    finish: Callable[..., object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, leak_check: None
) -> None:
    """Between the closing of the manifest and its removal nobody holds a lock, and other sweepers come."""

    class Swept(Filesystem):
        found: str | None = None

        def unlink(self, path: str) -> None:
            if path.endswith("MANIFEST.json"):
                with using(Filesystem()):
                    self.found = committed_path(str(tmp_path), NAME)
                    run_in_child(lambda report: sweep_directories(str(tmp_path), NAME) and None)
                assert not (tmp_path / NAME).exists()
            super().unlink(path)

    if finish is remove_directory:
        save(tmp_path / NAME)
        arguments = [str(tmp_path / NAME)]
    else:
        leave(tmp_path, "retired", manifest=b'{"step": 0}\n')
        monkeypatch.setattr(removal, "_give_name_back", lambda leftover: False)  # something has the name
        arguments = [str(tmp_path), NAME]
    with using(double := Swept()):
        finish(*arguments)
    assert double.found is None
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("name", ["rename", "sync_directory", "unlink", "remove_directory"])
def test_killed_removal_leaves_a_whole_checkpoint_or_a_dead_leftover(name: str, when: str, tmp_path: Path) -> None:
    save(tmp_path / NAME)

    def work(report: Report) -> None:
        with using(KillingFilesystem(name, when)):  # type: ignore[arg-type]
            remove_directory(str(tmp_path / NAME))

    with Child(work) as child:
        assert child.wait().signal == signal.SIGKILL, child.wait().message
    if (name, when) == ("rename", "before"):
        assert step_in(tmp_path / NAME) == 1
    else:
        assert not (tmp_path / NAME).exists()
        assert len(sweep_directories(str(tmp_path), STEPS)) == 1
        assert os.listdir(tmp_path) == []


def test_failed_removal_leaves_a_whole_checkpoint_or_a_leftover(
    tmp_path: Path, leak_check: None, caplog: pytest.LogCaptureFixture
) -> None:
    for nth in itertools.count(1):
        save(tmp_path / NAME)
        with using(double := FailingFilesystem(nth, errno.EIO)):
            if nth <= 2:
                with pytest.raises(StorageError):
                    remove_directory(str(tmp_path / NAME))
            else:
                assert remove_directory(str(tmp_path / NAME))
        if not double.failed:
            break
        assert (tmp_path / NAME).exists() == (nth == 1)
        assert ("left behind" in caplog.text) == (nth > 2)
        sweep_directories(str(tmp_path), NAME)
    assert os.listdir(tmp_path) == []


def test_removal_follows_no_link_and_takes_what_others_put_there(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_bytes(b"not ours")
    save(tmp_path / NAME)
    (tmp_path / NAME / "link").symlink_to(outside)
    (tmp_path / NAME / "tokenizer" / "link").symlink_to(outside / "file")
    os.mkfifo(tmp_path / NAME / "pipe")
    (tmp_path / NAME / "a" / "b" / "c").mkdir(parents=True)
    (tmp_path / NAME / "a" / "b" / "later.txt").write_bytes(b"x")
    assert remove_directory(str(tmp_path / NAME))
    assert os.listdir(tmp_path) == ["outside"]
    assert (outside / "file").read_bytes() == b"not ours"


def test_read_only_directories_and_files_are_removed(tmp_path: Path) -> None:
    with open_directory(tmp_path) as directory:

        def work(report: Report) -> None:
            become_ordinary_user()
            for step in (1, 2):
                save(directory / NAME, step)
                (directory / NAME / "MANIFEST.json").chmod(0o444)
                (directory / NAME / "tokenizer").chmod(0o555)
                (directory / NAME).chmod(0o555)
            with hold_for_reading(str(directory / NAME)):
                assert not remove_directory(str(directory / NAME))
            assert remove_directory(str(directory / NAME))

        run_in_child(work)
        assert os.listdir(directory) == []


# --- removing what cannot be renamed


def test_directory_that_cannot_be_renamed_loses_its_manifest_durably_before_its_files(
    tmp_path: Path, leak_check: None
) -> None:
    save(tmp_path / NAME)
    with using(recording := RecordingLowerLayer()):
        assert remove_directory(str(tmp_path / NAME))
    names = [operation.name for operation in recording.operations]
    assert names == ["rename", "sync_directory", "unlink", "unlink", "remove_directory", "unlink", "remove_directory"]
    assert recording.operations[0].path == recording.operations[1].path + "/MANIFEST.json"
    assert recording.operations[-2].path == recording.operations[0].target
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("name", [NAME, STEPS], ids=["name", "pattern"])
@pytest.mark.parametrize("nth", range(1, 9))
def test_killed_removal_of_what_cannot_be_renamed_never_leaves_what_looks_whole(
    nth: int, name: re.Pattern[str] | str, tmp_path: Path
) -> None:
    save(tmp_path / NAME)

    def work(report: Report) -> None:
        with using(KillingLowerLayer(nth)):
            remove_directory(str(tmp_path / NAME))

    with Child(work) as child:
        ended = child.wait()
    if nth == 8:
        assert ended.verdict == "passed", ended.message
        assert os.listdir(tmp_path) == []
        return
    assert ended.signal == signal.SIGKILL, ended.message
    if nth == 1:
        assert step_in(tmp_path / NAME) == 1
        return
    assert not (tmp_path / NAME / "MANIFEST.json").exists()
    with using(recording := RecordingLowerLayer()):
        assert sweep_directories(str(tmp_path), name) == ([] if nth == 7 else [str(tmp_path / NAME)])
        assert (tmp_path / NAME).exists() == (nth == 7)  # it is empty, as any other empty directory
        save(tmp_path / NAME, 2)
    assert recording.operations[0].name == ("make_directory" if nth == 7 else "sync_directory")
    assert step_in(tmp_path / NAME) == 2


def test_failed_removal_of_what_cannot_be_renamed_is_finished_by_the_next_save(
    tmp_path: Path, leak_check: None, caplog: pytest.LogCaptureFixture
) -> None:
    for nth in itertools.count(1):
        save(tmp_path / NAME)
        with using(double := FailingLowerLayer(nth, errno.EIO)):
            if nth <= 2:
                with pytest.raises(StorageError):
                    remove_directory(str(tmp_path / NAME))
            else:
                assert remove_directory(str(tmp_path / NAME))
        if not double.failed:
            break
        assert ("left behind" in caplog.text) == (nth > 2)
        with using(FailingLowerLayer(1000, errno.EIO)):
            if nth > 1:
                save(tmp_path / NAME, 2)
                assert step_in(tmp_path / NAME) == 2
            assert remove_directory(str(tmp_path / NAME))
    assert os.listdir(tmp_path) == []


def test_removal_under_the_final_name_is_left_to_the_process_that_does_it(tmp_path: Path, leak_check: None) -> None:
    class Swept(LowerLayer):
        swept_count = 0

        def around(self, operation: Operation) -> AbstractContextManager[None]:
            if operation.name == "unlink":
                with using(Filesystem()):
                    assert sweep_directories(str(tmp_path), STEPS) == []
                    run_in_child(lambda report: report(len(sweep_directories(str(tmp_path), STEPS))))
                self.swept_count += 1
            return nullcontext()

    save(tmp_path / NAME)
    with using(double := Swept()):
        assert remove_directory(str(tmp_path / NAME))
    assert double.swept_count == 3
    assert os.listdir(tmp_path) == []


def test_file_called_as_a_removed_manifest_is_no_leftover_of_a_removal(tmp_path: Path) -> None:
    for name, manifest in ((NAME, "MANIFEST.json"), ("other", "notes.txt")):
        (tmp_path / name).mkdir()
        for file in (manifest, "MANIFEST.json.removed"):
            (tmp_path / name / file).write_bytes(b"{}")
    (tmp_path / "step-00000002").symlink_to(tmp_path / "other")
    assert sweep_directories(str(tmp_path), STEPS) == []
    assert sorted(os.listdir(tmp_path)) == ["other", NAME, "step-00000002"]
    assert all(len(os.listdir(tmp_path / name)) == 2 for name in (NAME, "other"))


@pytest.mark.parametrize("make", [lambda path: None, Path.mkdir, make_foreign, make_link, Path.touch])
def test_what_is_no_checkpoint_is_not_removed(make: Callable[[Path], None], tmp_path: Path) -> None:
    make(tmp_path / NAME)
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(CheckpointNotFoundError, match="so it is not removed"):
        remove_directory(str(tmp_path / NAME))
    assert sorted(os.listdir(tmp_path)) == before
