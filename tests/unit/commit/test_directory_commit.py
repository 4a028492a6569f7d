"""The commit protocol of directories: its order, its failures, names that are taken, files and modes."""

from __future__ import annotations

import errno
import gc
import itertools
import json
import os
import re
import secrets
import signal
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal

import pytest
import torch
from support.directories import (
    NAME,
    STEPS,
    FailingRefusing,
    KillingRefusing,
    Recording,
    RecordingRefusing,
    Refusing,
    begin,
    hidden,
    make_foreign,
    make_link,
    save,
    step_in,
)
from support.filesystems import FailingFilesystem, FailingOpenFiles, KillingFilesystem, Operation, WatchedFilesystem
from support.forking import Child, Report, run_in_child
from support.sandbox import bind_mounted

import fastpersist as fp
from fastpersist import _native
from fastpersist.commit.directory_commit import (
    PendingDirectory,
    committed_path,
    files_in,
    hold_for_reading,
    remove_directory,
    sweep_directories,
)
from fastpersist.commit.file_commit import hidden_prefix
from fastpersist.commit.filesystem import Filesystem, using
from fastpersist.errors import (
    ConfigError,
    InternalError,
    NoSpaceError,
    StorageError,
    UnsupportedError,
)

# --- the protocol


def test_directory_is_complete_and_synced_before_it_gets_its_name(tmp_path: Path, leak_check: None) -> None:
    path = tmp_path / NAME
    with using(recording := Recording()):
        pending = begin(path)
        written = len(recording.operations)
        (Path(pending.path) / "notes").mkdir()
        (Path(pending.path) / "notes" / "mine.txt").write_bytes(b"of the user")
        pending.publish(b'{"step": 1}\n')
    hidden_path = pending.path
    assert Path(hidden_path).parent == tmp_path
    assert re.fullmatch(r"\.step-00000001\.pending-[0-9a-f]{16}", Path(hidden_path).name)
    operations = [(operation.name, operation.path) for operation in recording.operations[written:]]
    assert operations[:3] == [
        ("sync", f"{hidden_path}/notes/mine.txt"),
        ("write", f"{hidden_path}/MANIFEST.json"),
        ("sync", f"{hidden_path}/MANIFEST.json"),
    ]
    assert sorted(operations[3:5]) == [
        ("sync_directory", f"{hidden_path}/notes"),
        ("sync_directory", f"{hidden_path}/tokenizer"),
    ]
    assert operations[5:] == [
        ("sync_directory", hidden_path),
        ("rename_to_free_name", hidden_path),
        ("sync_directory", str(tmp_path)),
    ]
    assert [(operation.name, operation.path) for operation in recording.operations[:2]] == [
        ("make_directory", hidden_path),
        ("create", f"{hidden_path}/MANIFEST.json"),
    ]
    assert step_in(path) == 1
    assert (path / "notes" / "mine.txt").read_bytes() == b"of the user"
    assert os.listdir(tmp_path) == [NAME]
    assert pending.sync_s > 0


@pytest.mark.parametrize("double", [Recording, RecordingRefusing], ids=["exchange", "retire"])
def test_replaced_directory_is_removed_after_the_parent_is_synced(
    double: type[Recording], tmp_path: Path, leak_check: None
) -> None:
    save(tmp_path / NAME, 1)
    with using(recording := double()):
        save(tmp_path / NAME, 2)
    synced = recording.index("sync_directory", -1)
    assert recording.operations[synced].path == str(tmp_path)
    visible = recording.index("exchange" if double is Recording else "rename_to_free_name")
    removals = [index for index, operation in enumerate(recording.operations) if operation.name == "unlink"]
    assert visible < synced < removals[0]
    assert recording.operations[removals[-1]].path.endswith("MANIFEST.json")
    assert step_in(tmp_path / NAME) == 2
    assert os.listdir(tmp_path) == [NAME]


def test_save_that_need_not_be_durable_syncs_nothing(tmp_path: Path) -> None:
    with using(recording := Recording()):
        pending = PendingDirectory.create(str(tmp_path / NAME), overwrite=False)
        pending.publish(b"{}", durable=False)
    names = [operation.name for operation in recording.operations]
    assert names == ["make_directory", "create", "write", "rename_to_free_name"]
    assert pending.sync_s == 0.0


@pytest.mark.parametrize("sys_errno", [errno.EIO, errno.ENOSPC], ids=errno.errorcode.get)
@pytest.mark.parametrize("way", ["first", "exchange", "retire"])
def test_failure_of_any_operation_leaves_the_old_or_the_new_directory(
    way: str, sys_errno: int, tmp_path: Path, leak_check: None
) -> None:
    path = tmp_path / NAME
    failed_names = set()
    for nth in itertools.count(1):
        if way != "first":
            save(path, 1)
        double = (FailingRefusing if way == "retire" else FailingFilesystem)(nth, sys_errno)
        error: StorageError | None = None
        with using(double):
            try:
                save(path, 2)
            except StorageError as raised:
                error = raised.with_traceback(None)
        failed_names.add(double.failed)
        if not double.failed:
            break
        committed = {"rename_to_free_name", "exchange"} & set(double.names[: nth - 1])
        if committed and double.failed != "sync_directory":  # the old one could not be removed, which is no error
            assert error is None
            assert step_in(path) == 2
        else:
            assert type(error) is (NoSpaceError if sys_errno == errno.ENOSPC else StorageError)
            assert error.errno == sys_errno
            assert str(path) in str(error)
            assert ("a power failure may undo that" in str(error)) == bool(committed)
            if way == "first" and not committed:
                assert committed_path(str(tmp_path), NAME) is None
            else:
                assert step_in(path) == (2 if committed else 1)
        if not committed:
            assert hidden(tmp_path) == []
        assert len(hidden(tmp_path)) <= 1
        save(path, 3)
        assert step_in(path) == 3
        assert hidden(tmp_path) == []
        if way == "first":
            assert remove_directory(str(path))
    assert error is None
    wanted = {"make_directory", "create", "write", "sync", "sync_directory", "rename_to_free_name"}
    if way != "first":
        wanted |= {"unlink", "remove_directory", "exchange" if way == "exchange" else "rename"}
    if way == "exchange":
        wanted -= {"rename_to_free_name"}
    assert failed_names == wanted | {""}


@pytest.mark.parametrize("way", ["first", "exchange", "retire"])
def test_everything_that_fails_from_some_point_on_leaves_a_whole_checkpoint(
    way: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / NAME
    for nth in itertools.count(1):
        if way != "first":
            save(path, 1)
        double = (FailingRefusing if way == "retire" else FailingFilesystem)(nth, errno.EROFS, lasting=True)
        with using(double), suppress(StorageError):
            save(path, 2)
        if not double.failed:
            break
        found = committed_path(str(tmp_path), NAME)
        assert found is None if found is None and way == "first" else step_in(found) in (1, 2)
        save(path, 3)
        assert step_in(path) == 3
        assert hidden(tmp_path) == []
        if way == "first":
            remove_directory(str(path))
    assert "is left behind" in caplog.text


KILL_POINTS = ["make_directory", "create", "write", "sync", "sync_directory"]


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(
    ("way", "name"),
    [
        *(("first", name) for name in [*KILL_POINTS, "rename_to_free_name"]),
        *(("exchange", name) for name in [*KILL_POINTS, "exchange", "unlink", "remove_directory"]),
        *(("retire", name) for name in ["rename", "rename_to_free_name", "unlink", "remove_directory"]),
    ],
)
def test_killed_at_a_point_of_the_protocol(way: str, name: str, when: str, tmp_path: Path) -> None:
    path = tmp_path / NAME
    if way != "first":
        save(path, 1)
    run = KillingRefusing if way == "retire" else KillingFilesystem

    def work(report: Report) -> None:
        with using(run(name, when)):  # type: ignore[arg-type]
            save(path, 2)

    with Child(work) as child:
        ending = child.wait()
        assert ending.signal == signal.SIGKILL, ending.message
    points = [*KILL_POINTS, "rename"] if way == "retire" else list(KILL_POINTS)
    commit_point = "exchange" if way == "exchange" else "rename_to_free_name"
    committed = name not in points and (name, when) != (commit_point, "before")
    found = committed_path(str(tmp_path), NAME)
    if way == "first" and not committed:
        assert found is None
    else:
        assert step_in(found) == (2 if committed else 1)
        with hold_for_reading(str(found)):
            assert step_in(found) == (2 if committed else 1)
    between = (way, name, when) in {("retire", "rename", "after"), ("retire", "rename_to_free_name", "before")}
    assert (found == str(path)) == (not between and found is not None)
    sweep_directories(str(tmp_path), STEPS)
    assert os.listdir(tmp_path) == ([] if found is None else [NAME])
    save(path, 3)
    assert step_in(path) == 3
    assert os.listdir(tmp_path) == [NAME]


# --- names that are taken


TAKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "file": (lambda path: path.write_bytes(b"a file"), "is a file, not a directory"),
    "link": (make_link, "is a symbolic link"),
    "dangling": (lambda path: path.symlink_to("nowhere"), "is a symbolic link"),
    "foreign": (make_foreign, "no MANIFEST.json"),
}


@pytest.mark.parametrize("what", TAKEN)
@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_name_that_is_no_checkpoint_is_never_replaced(what: str, when: str, tmp_path: Path, leak_check: None) -> None:
    path = tmp_path / NAME
    make, message = TAKEN[what]
    pending = begin(path) if when == "meanwhile" else None
    make(path)
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(ConfigError, match=message):
        if pending is None:
            save(path, 2)
        else:
            pending.publish(b"{}", overwrite=True)
    assert sorted(os.listdir(tmp_path)) == [name for name in before if ".pending-" not in name]
    if what == "link":
        assert step_in(tmp_path / "elsewhere") == 7
    if what == "foreign":
        assert os.listdir(path) == ["thesis.tex"]


@pytest.mark.parametrize("in_one_step", [True, False])
@pytest.mark.parametrize("make", [Path.mkdir, save], ids=["empty", "checkpoint"])
def test_directory_that_appears_meanwhile_is_not_replaced_without_overwrite(
    make: Callable[[Path], object],
    in_one_step: bool,
    tmp_path: Path,
    leak_check: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(source: bytes, target: bytes) -> None:
        raise UnsupportedError("no such rename")

    class AtTheLastMoment(Filesystem):
        def rename_to_free_name(self, source: str, target: str) -> None:
            with using(Filesystem()):
                make(Path(target))
            if not in_one_step:
                monkeypatch.setattr(_native, "rename_to_free_name", refuse)
            super().rename_to_free_name(source, target)

    path = tmp_path / NAME
    pending = begin(path, 2, overwrite=False)
    with using(AtTheLastMoment()), pytest.raises(ConfigError, match=r"exists already: pass overwrite=True"):
        pending.publish(b"{}", overwrite=False)
    assert os.listdir(tmp_path) == [NAME]
    assert os.listdir(path) == [] if make is Path.mkdir else step_in(path) == 1


def test_file_that_appears_between_look_and_rename_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(source: bytes, target: bytes) -> None:
        raise UnsupportedError("no such rename")

    monkeypatch.setattr(_native, "rename_to_free_name", refuse)
    monkeypatch.setattr(os.path, "lexists", lambda path: False)
    (tmp_path / "new").mkdir()
    (tmp_path / "file").write_bytes(b"a file")
    with pytest.raises(StorageError) as caught:
        Filesystem().rename_to_free_name(str(tmp_path / "new"), str(tmp_path / "file"))
    assert caught.value.errno == errno.EEXIST
    assert (tmp_path / "file").read_bytes() == b"a file"


@pytest.mark.parametrize("make", [Path.mkdir, save], ids=["empty", "checkpoint"])
def test_existing_directory_needs_overwrite(make: Callable[[Path], object], tmp_path: Path) -> None:
    make(tmp_path / NAME)
    with pytest.raises(ConfigError, match="pass overwrite=True"):
        PendingDirectory.create(str(tmp_path / NAME), overwrite=False)
    save(tmp_path / NAME, 2, overwrite=True)
    assert step_in(tmp_path / NAME) == 2
    assert os.listdir(tmp_path) == [NAME]


@pytest.mark.parametrize("refusing", [False, True], ids=["exchange", "retire"])
def test_directory_that_goes_away_while_it_is_replaced_is_no_error(refusing: bool, tmp_path: Path) -> None:
    class GoesAway(Filesystem):
        def exchange(self, first: str, second: str) -> None:
            with using(Filesystem()):
                remove_directory(second)
            if refusing:
                raise UnsupportedError("no exchange")
            super().exchange(first, second)

    save(tmp_path / NAME, 1)
    pending = begin(tmp_path / NAME, 2)
    with using(GoesAway()):
        pending.publish(b'{"step": 2}\n', overwrite=True)
    assert step_in(tmp_path / NAME) == 2
    assert os.listdir(tmp_path) == [NAME]


def test_retired_directory_that_a_sweeper_puts_back_is_retired_again(tmp_path: Path) -> None:
    class Swept(Refusing, Recording):
        swept: list[str]

        def rename_to_free_name(self, source: str, target: str) -> None:
            if not self.swept:
                self.swept.append(source)
                with using(Filesystem()):
                    run_in_child(lambda report: sweep_directories(str(tmp_path), NAME) and None)
            super().rename_to_free_name(source, target)

    double = Swept()
    double.swept = []
    save(tmp_path / NAME, 1)
    with using(double):
        save(tmp_path / NAME, 2)
    renamed = [operation.path for operation in double.operations if operation.name == "rename"]
    assert renamed.count(str(tmp_path / NAME)) == 2
    assert step_in(tmp_path / NAME) == 2
    assert os.listdir(tmp_path) == [NAME]


def test_missing_parent_is_an_error_that_names_the_target(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=f"cannot save .*missing/{NAME}") as caught:
        PendingDirectory.create(str(tmp_path / "missing" / NAME), overwrite=False)
    assert caught.value.errno == errno.ENOENT
    with pytest.raises(ConfigError):
        PendingDirectory.create("/", overwrite=True)


def test_mount_point_is_refused(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / NAME).mkdir()
    with bind_mounted(tmp_path / "other", tmp_path / NAME), pytest.raises(ConfigError, match="mounted"):
        PendingDirectory.create(str(tmp_path / NAME), overwrite=True)


def test_long_names_and_links_in_the_parent_work(tmp_path: Path, leak_check: None) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    name = "x" * 250
    save(tmp_path / "link" / name, 1)
    dead = tmp_path / (hidden_prefix(name) + secrets.token_hex(8))
    dead.mkdir()
    save(tmp_path / name, 2)
    assert step_in(tmp_path / name) == 2
    assert sorted(os.listdir(tmp_path)) == ["link", name]


# --- modes


@pytest.mark.parametrize("bits", [0o022, 0o077, 0o002])
def test_new_directory_has_the_mode_that_mkdir_gives(bits: int, tmp_path: Path) -> None:
    before = os.umask(bits)
    try:
        save(tmp_path / NAME)
    finally:
        os.umask(before)
    for below in ("", "tokenizer"):
        assert stat.S_IMODE((tmp_path / NAME / below).stat().st_mode) == 0o777 & ~bits
    assert stat.S_IMODE((tmp_path / NAME / "MANIFEST.json").stat().st_mode) == 0o666 & ~bits


def test_directory_that_replaces_a_private_one_is_never_open_to_others(tmp_path: Path) -> None:
    modes = []

    class Looking(WatchedFilesystem):
        @contextmanager
        def around(self, operation: Operation) -> Iterator[None]:
            modes.extend(stat.S_IMODE(path.stat().st_mode) for path in [*hidden(tmp_path), tmp_path / NAME])
            yield

    save(tmp_path / NAME, 1)
    (tmp_path / NAME).chmod(0o700)
    with using(Looking()):
        save(tmp_path / NAME, 2)
    assert set(modes) == {0o700}
    (tmp_path / NAME).chmod(0o755)
    save(tmp_path / NAME, 3)
    assert stat.S_IMODE((tmp_path / NAME).stat().st_mode) == 0o755


# --- files


@pytest.mark.parametrize("name", ["../state.pt", "/state.pt", "", "a/../b", "MANIFEST.json", "a//b"])
def test_file_outside_the_directory_is_refused(name: str, tmp_path: Path) -> None:
    pending = begin(tmp_path / NAME)
    with pytest.raises(ConfigError):
        pending.create_file(name)
    pending.abort()


@pytest.mark.parametrize(("name", "number"), [("state.pt", errno.EEXIST), ("state.pt/x", errno.ENOTDIR)])
def test_file_whose_name_is_taken_is_refused(name: str, number: int, tmp_path: Path) -> None:
    pending = begin(tmp_path / NAME)
    with pytest.raises(StorageError) as caught:
        pending.create_file(name)
    assert caught.value.errno == number
    pending.abort()


def test_file_is_not_created_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    pending = begin(tmp_path / NAME)
    (Path(pending.path) / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StorageError):
        pending.create_file("link/state.pt")
    pending.abort()
    assert os.listdir(tmp_path / "elsewhere") == []


def test_files_in_names_all_files_but_the_manifest(tmp_path: Path) -> None:
    pending = begin(tmp_path / NAME)
    (Path(pending.path) / "tokenizer" / "MANIFEST.json").write_bytes(b"another")
    assert list(files_in(pending.path)) == ["state.pt", "tokenizer/MANIFEST.json", "tokenizer/vocabulary.txt"]
    pending.abort()
    with pytest.raises(StorageError):
        files_in(pending.path)


@pytest.mark.parametrize(
    ("make", "kind"),
    [(lambda path: path.symlink_to("state.pt"), "a symbolic link"), (os.mkfifo, "a special file")],
    ids=["link", "pipe"],
)
def test_what_is_no_file_is_named_and_not_published(
    make: Callable[[Path], None], kind: str, tmp_path: Path, leak_check: None
) -> None:
    pending = begin(tmp_path / NAME)
    make(Path(pending.path) / "tokenizer" / "odd")
    with pytest.raises(UnsupportedError, match=f"tokenizer/odd is {kind}"):
        files_in(pending.path)
    with pytest.raises(UnsupportedError, match=kind):
        pending.publish(b"{}")
    assert os.listdir(tmp_path) == []


# --- abort


def test_abort_removes_everything_and_may_come_again(tmp_path: Path, leak_check: None) -> None:
    pending = begin(tmp_path / NAME)
    pending.create_file("open")
    pending.abort()
    pending.abort()
    assert os.listdir(tmp_path) == []
    for call in (lambda: pending.publish(b"{}"), lambda: pending.create_file("x"), lambda: pending.close_file(3)):
        with pytest.raises(InternalError):
            call()


def test_files_must_be_closed_before_publishing(tmp_path: Path, leak_check: None) -> None:
    pending = begin(tmp_path / NAME)
    pending.create_file("open.pt")
    with pytest.raises(InternalError, match=r"open\.pt must be closed"):
        pending.publish(b"{}")
    pending.abort()


@pytest.mark.parametrize("durable", [True, False])
@pytest.mark.parametrize("what", ["", "state.pt", "MANIFEST.json"])
def test_directory_that_is_deleted_while_it_is_written_is_not_published(
    what: str, durable: bool, tmp_path: Path, leak_check: None
) -> None:
    save(tmp_path / NAME, 1)
    pending = begin(tmp_path / NAME, 2)
    if what:
        (Path(pending.path) / what).unlink()
    else:
        os.rename(pending.path, tmp_path / "moved")
    with pytest.raises(StorageError, match=f"cannot save .*{NAME}") as caught:
        pending.publish(b"{}", overwrite=True, durable=durable)
    assert caught.value.errno == errno.ENOENT
    assert step_in(tmp_path / NAME) == 1
    assert hidden(tmp_path) == []


def test_manifest_that_somebody_else_wrote_is_not_published(tmp_path: Path) -> None:
    pending = begin(tmp_path / NAME)
    (Path(pending.path) / "MANIFEST.json").write_bytes(b"mine")
    with pytest.raises(StorageError, match="written by another program"):
        pending.publish(b"{}")
    assert os.listdir(tmp_path) == []


def test_interrupt_right_after_the_exchange_leaves_the_old_one_to_the_sweep(tmp_path: Path, leak_check: None) -> None:
    class Interrupted(Filesystem):
        def exchange(self, first: str, second: str) -> None:
            super().exchange(first, second)
            raise KeyboardInterrupt

    save(tmp_path / NAME, 1)
    pending = begin(tmp_path / NAME, 2)
    with using(Interrupted()), pytest.raises(KeyboardInterrupt):
        pending.publish(b'{"step": 2}\n', overwrite=True)
    assert step_in(tmp_path / NAME) == 2
    (old,) = hidden(tmp_path)
    assert step_in(old) == 1  # nothing has synced the exchange: it may be all that a power failure leaves
    assert sweep_directories(str(tmp_path), NAME) == [str(old)]


def test_interrupt_right_after_a_directory_was_made_leaves_nothing(tmp_path: Path, leak_check: None) -> None:
    class Interrupted(Filesystem):
        def make_directory(self, path: str, mode: int = 0o777) -> None:
            super().make_directory(path, mode)
            raise KeyboardInterrupt

    with using(Interrupted()), pytest.raises(KeyboardInterrupt):
        begin(tmp_path / NAME)
    assert os.listdir(tmp_path) == []


def test_pending_directory_that_nobody_owns_goes(tmp_path: Path, leak_check: None) -> None:
    pending = begin(tmp_path / NAME)
    assert len(hidden(tmp_path)) == 1
    del pending
    gc.collect()
    assert os.listdir(tmp_path) == []


def test_forked_child_has_no_part_in_its_parents_directory(tmp_path: Path, leak_check: None) -> None:
    pending = begin(tmp_path / NAME)
    fd = pending.create_file("open.pt")

    def work(report: Report) -> None:
        for held in (fd, pending._manifest_fd):
            with pytest.raises(OSError, match="Bad file descriptor"):
                os.fstat(held)
        pending.abort()
        for call in (lambda: pending.publish(b"{}"), lambda: pending.create_file("x"), lambda: pending.close_file(fd)):
            with pytest.raises(ConfigError, match="forked child"):
                call()
        assert sweep_directories(str(tmp_path), NAME) == []

    run_in_child(work)
    pending.close_file(fd)
    pending.publish(b'{"step": 1}\n')
    assert step_in(tmp_path / NAME) == 1


# --- the seam


@pytest.mark.parametrize(
    "operation",
    [
        lambda path: Filesystem().make_directory(path),
        lambda path: Filesystem().remove_directory(path),
        lambda path: Filesystem().rename_to_free_name(path, path + ".new"),
        lambda path: Filesystem().exchange(path, path + ".new"),
    ],
)
def test_every_operation_names_the_path_it_failed_on(operation: Callable[[str], None], tmp_path: Path) -> None:
    path = str(tmp_path / "missing" / NAME)
    with pytest.raises(StorageError) as caught:
        operation(path)
    assert caught.value.errno == errno.ENOENT
    assert path in str(caught.value)


def test_names_are_exchanged(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "two").write_bytes(b"2")
    Filesystem().exchange(str(tmp_path / "one"), str(tmp_path / "two"))
    assert (tmp_path / "one").read_bytes() == b"2"
    assert (tmp_path / "two").is_dir()


@pytest.mark.parametrize("operation", ["status", "close"])
def test_open_file_that_fails_is_an_error_with_its_path_and_what_it_means(
    operation: Literal["status", "close"], tmp_path: Path, leak_check: None
) -> None:
    for nth in itertools.count(1):
        save(tmp_path / NAME, 1)
        error: StorageError | None = None
        with using(double := FailingOpenFiles(operation, nth)):
            try:
                save(tmp_path / NAME, 2)
            except StorageError as raised:
                error = raised.with_traceback(None)
        if error is not None:
            assert (error.errno, error.filename) == (errno.EIO, str(tmp_path / NAME))
            assert double.failed_path in str(error)
        is_published = error is None or "is published and durable" in str(error)
        assert step_in(tmp_path / NAME) == (2 if is_published else 1)
        sweep_directories(str(tmp_path), NAME)
        assert os.listdir(tmp_path) == [NAME]
        if not double.failed_path:
            break
    assert nth > 2


def test_manifest_that_fails_to_close_is_published_and_the_error_says_so(tmp_path: Path, leak_check: None) -> None:
    for durable, meaning in ((True, "all was synced before"), (False, "save again")):
        with using(FailingOpenFiles("close", 3)), pytest.raises(StorageError, match=f"is published.*{meaning}"):
            save(tmp_path / NAME, 1, durable=durable)
        assert step_in(tmp_path / NAME) == 1
        sweep_directories(str(tmp_path), NAME)


def hang_guard(path: Path) -> None:
    """Put a FIFO, which nobody writes to, in place of a file."""
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def test_fifo_in_place_of_a_file_of_a_root_is_refused_or_replaced(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, leak_check: None
) -> None:
    with fp.Checkpointer(tmp_path, keep=2) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, {"a": torch.ones(3)}).result()
    hang_guard(tmp_path / "LATEST")
    hang_guard(tmp_path / ".LATEST.new")
    hang_guard(tmp_path / "step-00000002" / "MANIFEST.json")
    with pytest.raises(fp.FormatError, match=r"MANIFEST\.json.*no regular file"):
        fp.Checkpointer(tmp_path).load(2)
    assert fp.Checkpointer(tmp_path).latest() == 1
    assert fp.Checkpointer(tmp_path).steps() == [1]
    assert not fp.verify(tmp_path).ok
    with fp.Checkpointer(tmp_path, keep=2) as checkpointer:
        checkpointer.save(3, {"a": torch.ones(3)}).result()
    assert (tmp_path / "LATEST").read_text() == "step-00000003\n"
    assert not (tmp_path / ".LATEST.new").exists()
    hang_guard(tmp_path / ".lock")
    with fp.Checkpointer(tmp_path) as checkpointer:
        with pytest.raises(StorageError, match=r"\.lock is no regular file.*remove it"):
            checkpointer.save(4, {})
        (tmp_path / ".lock").unlink()
        checkpointer.save(4, {}).result()


@pytest.mark.parametrize("name", ["state.pt", "rank-00000.pt", "PARTS.json"])
def test_fifo_in_place_of_a_file_of_a_step_is_refused(name: str, tmp_path: Path, leak_check: None) -> None:
    """Also where a manifest says that it is empty, as a FIFO is."""
    with fp.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"a": torch.ones(3)}, rank_state={"b": 1}).result()
    path = tmp_path / "step-00000001"
    manifest = json.loads((path / "MANIFEST.json").read_text())
    manifest["files"] = [entry for entry in manifest["files"] if entry["name"] != name]
    manifest["files"].append({"name": name, "size_bytes": 0, "crc32": None})
    (path / "MANIFEST.json").write_text(json.dumps(manifest))
    hang_guard(path / name)
    for read in (lambda: fp.Checkpointer(tmp_path).load(1), lambda: fp.inspect(path)):
        with pytest.raises(fp.FormatError, match="no regular file"):
            read()
    assert any(damage.message.startswith(f"{name} is no regular file") for damage in fp.verify(path).damages)
    assert fp.Checkpointer(tmp_path).latest() is None
