"""torch.save with async_=True returns when everything is copied; who reads, replaces or ends waits; nothing is lost."""

from __future__ import annotations

import errno
import logging
import pickle
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from support.filesystems import FullFor
from support.forking import run_in_child
from support.torch_save_calls import STOCK_LOAD, STOCK_SAVE, is_ours

import fastpersist as fp
from fastpersist.commit.filesystem import Filesystem, using
from fastpersist.integrations import torch_save as integration
from fastpersist.integrations.torch_save import TorchNoSpaceError, TorchStorageError

PATIENCE_S = 30


@pytest.fixture(autouse=True)
def nothing_stays_behind(leak_check: None) -> Iterator[None]:
    yield
    fp.uninstall()
    assert (torch.save, torch.load) == (STOCK_SAVE, STOCK_LOAD)
    assert integration._behind == []


class Held(Filesystem):
    """New files do not get their names until somebody lets them."""

    def __init__(self) -> None:
        self.let_go = threading.Event()
        self.is_full = False

    def rename(self, source: str, target: str) -> None:
        if not self.let_go.wait(PATIENCE_S):
            raise TimeoutError("nobody waits for the save")
        if self.is_full:
            raise fp.NoSpaceError(errno.ENOSPC, f"renaming to {target}: disk full", target)
        super().rename(source, target)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    """Saves are held until somebody waits for one: who does not wait finds nothing."""
    disk = Held()
    join = fp.PendingSave.join

    def let_go_and_join(pending: fp.PendingSave, timeout: float | None = None) -> bool:
        disk.let_go.set()
        return join(pending, timeout)

    monkeypatch.setattr(fp.PendingSave, "join", let_go_and_join)
    with using(disk):
        yield disk
        disk.let_go.set()


def fail(path: Path) -> None:
    """Begin a save that fails behind the program, and let that happen."""
    with using(FullFor(path.name)):
        torch.save([torch.ones(10)], path)
        integration._behind[-1].pending.join(PATIENCE_S)


# --------------------------------------------------------------------------------------------- returning, waiting


def test_save_returns_before_it_is_written_and_the_object_may_change(tmp_path: Path, held: Held) -> None:
    weights = torch.zeros(1000)
    fp.install(async_=True)
    torch.save({"weights": weights}, tmp_path / "x.pt")
    weights.fill_(1)
    assert not (tmp_path / "x.pt").exists()
    fp.uninstall()
    assert torch.equal(torch.load(tmp_path / "x.pt")["weights"], torch.zeros(1000))
    assert is_ours(tmp_path / "x.pt")


def load(path: Path) -> None:
    assert torch.load(path) == ["new"]


def load_mapped(path: Path) -> None:
    assert torch.load(path, mmap=True) == ["new"]


def load_by_another_name(path: Path) -> None:
    (path.parent / "link").symlink_to(path.parent)
    assert torch.load(path.parent / "link" / ".." / path.parent.name / path.name) == ["new"]


def load_in_another_thread(path: Path) -> None:
    found = []
    thread = threading.Thread(target=lambda: found.append(torch.load(path)))
    thread.start()
    thread.join()
    assert found == [["new"]]


def save_again(path: Path) -> None:
    torch.save(["newest"], path)
    assert STOCK_LOAD(path) != ["old"]  # one copy at a time is held for a path, however slow the disk is


def save_in_another_way(path: Path) -> None:
    torch.save(["newest"], path, _disable_byteorder_record=True)
    assert STOCK_LOAD(path) == ["newest"]


def save_in_a_block_that_is_not_async(path: Path) -> None:
    with fp.installed():
        torch.save(["newest"], path)
        assert STOCK_LOAD(path) == ["newest"]


def uninstall(path: Path) -> None:
    fp.uninstall()
    assert STOCK_LOAD(path) == ["new"]


def end_a_block_inside(path: Path) -> None:
    with fp.installed():
        pass
    assert STOCK_LOAD(path) == ["new"]


@pytest.mark.parametrize(
    "wait",
    [
        load,
        load_mapped,
        load_by_another_name,
        load_in_another_thread,
        save_again,
        save_in_another_way,
        save_in_a_block_that_is_not_async,
        uninstall,
        end_a_block_inside,
    ],
)
def test_what_needs_the_file_waits_for_it(wait: Callable[[Path], None], tmp_path: Path, held: Held) -> None:
    STOCK_SAVE(["old"], tmp_path / "x.pt")
    fp.install(async_=True)
    torch.save(["new"], tmp_path / "x.pt")
    assert STOCK_LOAD(tmp_path / "x.pt") == ["old"]
    wait(tmp_path / "x.pt")


def test_end_of_the_block_waits(tmp_path: Path, held: Held) -> None:
    with fp.installed(async_=True):
        torch.save(["new"], tmp_path / "x.pt")
        assert not (tmp_path / "x.pt").exists()
    assert STOCK_LOAD(tmp_path / "x.pt") == ["new"]


def test_end_of_a_block_that_raises_waits(tmp_path: Path, held: Held) -> None:
    with pytest.raises(LookupError), fp.installed(async_=True):
        torch.save(["new"], tmp_path / "x.pt")
        raise LookupError("on purpose")
    assert STOCK_LOAD(tmp_path / "x.pt") == ["new"]


def test_installing_again_without_async_loses_nothing(tmp_path: Path, held: Held) -> None:
    fp.install(async_=True)
    torch.save(["new"], tmp_path / "x.pt")
    fp.install()
    fp.uninstall()
    assert STOCK_LOAD(tmp_path / "x.pt") == ["new"]


def test_other_files_are_loaded_meanwhile(tmp_path: Path, held: Held) -> None:
    STOCK_SAVE(["other"], tmp_path / "other.pt")
    fp.install(async_=True)
    torch.save(["new"], tmp_path / "x.pt")
    assert torch.load(tmp_path / "other.pt") == ["other"]
    assert not held.let_go.is_set()


def test_saves_to_one_path_are_written_in_order(tmp_path: Path, held: Held) -> None:
    fp.install(async_=True)
    for number in range(5):
        torch.save([number], tmp_path / "x.pt")
    assert torch.load(tmp_path / "x.pt") == [4]


def test_path_is_the_one_at_the_time_of_the_save(tmp_path: Path, held: Held, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    fp.install(async_=True)
    torch.save(["new"], "x.pt")
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert torch.load("../x.pt") == ["new"]
    assert not Path("x.pt").exists()


def test_file_is_a_torch_zip_whatever_its_name(tmp_path: Path) -> None:
    with fp.installed(async_=True):
        torch.save(["new"], tmp_path / "x.safetensors")
    assert is_ours(tmp_path / "x.safetensors")


def test_what_no_rename_can_replace_is_there_when_save_returns(tmp_path: Path) -> None:
    STOCK_SAVE(["old"], tmp_path / "x.pt")
    (tmp_path / "y.pt").hardlink_to(tmp_path / "x.pt")
    with fp.installed(async_=True):
        torch.save(["new"], tmp_path / "x.pt")
        assert STOCK_LOAD(tmp_path / "y.pt") == ["new"]


def test_nothing_is_kept_of_saves_that_are_done(tmp_path: Path) -> None:
    fp.install(async_=True)
    for number in range(3):
        torch.save(torch.ones(100), tmp_path / f"{number}.pt")
        for save in list(integration._behind):
            save.pending.join(PATIENCE_S)
    assert integration._behind == []


def test_forked_child_leaves_its_parents_saves_alone(tmp_path: Path, held: Held) -> None:
    def work(report: Callable[[int], None]) -> None:
        with pytest.raises(FileNotFoundError):
            torch.load(tmp_path / "x.pt")
        held.let_go.set()
        torch.save(["child's"], tmp_path / "y.pt")
        fp.uninstall()

    fp.install(async_=True)
    torch.save(["parent's"], tmp_path / "x.pt")
    run_in_child(work)
    assert torch.load(tmp_path / "x.pt") == ["parent's"]
    assert torch.load(tmp_path / "y.pt") == ["child's"]


@pytest.mark.parametrize(
    ("ending", "code"),
    [("", 0), ("sys.exit(3)", 3), ("raise LookupError", 1), ("atexit.register(torch.save, [2], 'later.pt')", 0)],
)
def test_every_end_of_a_program_but_a_kill_waits(ending: str, code: int, tmp_path: Path) -> None:
    program = f"""
        import atexit, sys, torch
        import fastpersist as fp
        fp.install(async_=True)
        torch.save(torch.ones(3_000_000), "x.pt")
        {ending}
    """
    command = [sys.executable, "-W", "error", "-c", textwrap.dedent(program)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == code, done.stderr
    assert torch.equal(torch.load(tmp_path / "x.pt"), torch.ones(3_000_000))
    if "later" in ending:
        assert torch.load(tmp_path / "later.pt") == [2]


# --------------------------------------------------------------------------------------------- errors


def save_something_else(path: Path) -> None:
    torch.save([1], path.with_name("something_else.pt"))


def save_elsewhere_without_async(path: Path) -> None:
    with fp.installed():
        torch.save([1], path.with_name("something_else.pt"))


def end_a_block(path: Path) -> None:
    with fp.installed():
        pass


def torch_load(path: Path) -> None:
    torch.load(path)


@pytest.mark.parametrize(
    "told",
    [
        save_something_else,
        save_elsewhere_without_async,
        torch_load,
        load_in_another_thread,
        end_a_block,
        lambda path: fp.uninstall(),
    ],
)
def test_error_is_raised_once_and_is_torchs_too(
    told: Callable[[Path], None], tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    STOCK_SAVE(["old"], tmp_path / "x.pt")
    fp.install(async_=True)
    fail(tmp_path / "x.pt")
    assert "disk full" in caplog.text  # at once
    if told is load_in_another_thread:
        raised: list[BaseException] = []
        monkeypatch.setattr(threading, "excepthook", lambda arguments: raised.append(arguments.exc_value))
        with pytest.raises(AssertionError):
            told(tmp_path / "x.pt")
        (error,) = raised
    else:
        with pytest.raises(TorchStorageError) as caught:
            told(tmp_path / "x.pt")
        error = caught.value
    assert isinstance(error, TorchNoSpaceError)
    assert isinstance(error, fp.NoSpaceError)
    assert isinstance(error, RuntimeError)
    assert isinstance(error, OSError)
    assert error.errno == errno.ENOSPC
    assert str(tmp_path / "x.pt") in str(error)
    assert isinstance(error.__cause__, fp.NoSpaceError)
    assert not (tmp_path / "something_else.pt").exists(), "the save that raises does nothing else"
    save_something_else(tmp_path / "x.pt")
    assert torch.load(tmp_path / "x.pt") == ["old"]


def test_load_of_another_file_does_not_take_the_error(tmp_path: Path) -> None:
    STOCK_SAVE([1], tmp_path / "other.pt")
    fp.install(async_=True)
    fail(tmp_path / "x.pt")
    assert torch.load(tmp_path / "other.pt") == [1]
    with pytest.raises(TorchNoSpaceError):
        torch.load(tmp_path / "x.pt")


def test_error_of_several_saves_says_so(tmp_path: Path, held: Held) -> None:
    held.is_full = True
    fp.install(async_=True)
    for name in ("a.pt", "b.pt", "c.pt"):
        torch.save([1], tmp_path / name)
    with pytest.raises(TorchNoSpaceError, match=r"a\.pt.*\(2 more failed, see the log\)"):
        fp.uninstall()


def test_error_at_the_end_of_a_block_is_raised_there(tmp_path: Path) -> None:
    with pytest.raises(TorchNoSpaceError), fp.installed(async_=True):
        fail(tmp_path / "x.pt")


def test_error_does_not_hide_that_of_the_block(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(LookupError), fp.installed(async_=True):
        fail(tmp_path / "x.pt")
        raise LookupError("on purpose")
    assert "disk full" in caplog.text


def test_error_of_an_object_is_raised_by_save_itself(tmp_path: Path) -> None:
    fp.install(async_=True)
    with pytest.raises((AttributeError, TypeError, pickle.PicklingError), match="pickle"):
        torch.save({"function": lambda: 0}, tmp_path / "x.pt")
    with pytest.raises(RuntimeError, match=r"Parent directory .* does not exist\."):
        torch.save([1], tmp_path / "missing" / "x.pt")


def test_what_an_object_did_not_hear_of_while_it_is_loaded_gets_out(tmp_path: Path) -> None:
    torch.save([LoadsAnother(tmp_path / "inside.pt")], tmp_path / "x.pt")
    fp.install(async_=True)
    fail(tmp_path / "inside.pt")
    with pytest.raises(TorchNoSpaceError):
        torch.load(tmp_path / "x.pt", weights_only=False)


class LoadsAnother:
    """Loads another file while it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __setstate__(self, state: dict[str, Path]) -> None:
        torch.load(state["path"])


@pytest.mark.parametrize("is_async", [False, True])
def test_failed_save_leaves_the_old_file(is_async: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    STOCK_SAVE(["old"], tmp_path / "x.pt")
    with pytest.raises(RuntimeError) as caught, using(FullFor()), fp.installed(async_=is_async):
        torch.save(["new"], tmp_path / "x.pt")
    assert isinstance(caught.value, fp.NoSpaceError)
    assert STOCK_LOAD(tmp_path / "x.pt") == ["old"]
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == [] or is_async
