"""Arguments that make no sense are refused before anything is done, with what was meant; paths of users are paths."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from support.sandbox import needs_root, small_filesystem

import fastpersist as fp
from fastpersist.arguments import byte_count
from fastpersist.cli import main
from fastpersist.commit.filesystem import tell_free
from fastpersist.errors import ConfigError, NoSpaceError, StorageError, UnsupportedError

STATE = {"weight": torch.arange(5.0)}

TAKING_PATHS: dict[str, Callable[[Any], object]] = {
    "Checkpointer": fp.Checkpointer,
    "save": lambda path: fp.save(STATE, path),
    "save_async": lambda path: fp.save_async(STATE, path),
    "DirectorySave": fp.DirectorySave,
    "load": fp.load,
    "load_into": lambda path: fp.load_into(path, STATE),
    "verify": fp.verify,
    "inspect": fp.inspect,
}


@pytest.fixture(params=TAKING_PATHS)
def take(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], object]:
    """Return a function that is given a path, in an empty directory."""
    monkeypatch.chdir(tmp_path)
    return TAKING_PATHS[request.param]


# --- paths


@pytest.mark.parametrize(
    "url", ["s3://bucket/run", "gs://bucket/run.pt", "file:///run.pt", Path("s3://bucket/run"), "hdfs://host:9000/x"]
)
def test_url_is_refused_and_makes_no_directory(take: Callable[[Any], object], url: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="URL"):
        take(url)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("path", "said"),
    [
        (b"run.pt", r"os\.fsdecode\(b'run\.pt'\)"),
        (5, "not a value of type int"),
        (None, "not a value of type NoneType"),
        ("", "names no file"),
        ("a\0b", "names no file"),
        (STATE, "not a value of type dict"),
    ],
    ids=["bytes", "int", "none", "empty", "nul", "dict"],
)
def test_what_is_no_path_is_refused(take: Callable[[Any], object], path: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        take(path)
    assert os.listdir(tmp_path) == []


def test_home_is_expanded_everywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home, elsewhere = tmp_path / "home", tmp_path / "elsewhere"
    home.mkdir()
    elsewhere.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(elsewhere)
    fp.save(STATE, "~/a.pt")
    fp.save_async(STATE, Path("~/b.pt")).result()
    with fp.DirectorySave("~/c") as files:
        files.save(STATE, "state.pt")
        files.publish().result()
    with fp.Checkpointer("~/run") as checkpoints:
        checkpoints.save(1, STATE)
    assert sorted(os.listdir(home)) == ["a.pt", "b.pt", "c", "run"]
    assert os.listdir(elsewhere) == []
    assert torch.equal(fp.load("~/a.pt")["weight"], STATE["weight"])
    target = {"weight": torch.zeros(5)}
    fp.load_into("~/b.pt", target)
    assert torch.equal(target["weight"], STATE["weight"])
    assert fp.verify("~/c").ok
    assert fp.inspect("~/run").path == str(home / "run")


def test_directory_with_the_name_of_a_scheme_can_be_spelled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "s3:").mkdir()
    fp.save(STATE, "./s3:/a.pt")
    assert torch.equal(fp.load("./s3:/a.pt")["weight"], STATE["weight"])
    fp.save(STATE, "epoch:1.pt")  # no scheme: no slash behind the colon
    assert (tmp_path / "epoch:1.pt").is_file()


@pytest.mark.parametrize("below", ["", "run", "run/a"])
def test_file_as_root_is_refused_at_once(tmp_path: Path, below: str) -> None:
    (tmp_path / "model.pt").write_bytes(b"")
    with pytest.raises(ConfigError, match="file"):
        fp.Checkpointer(tmp_path / "model.pt" / below)


def test_root_that_is_a_link_to_a_directory_is_one(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    with fp.Checkpointer(tmp_path / "link") as checkpoints:
        checkpoints.save(1, STATE)
    assert (tmp_path / "real" / "step-00000001").is_dir()


IN_NO_DIRECTORY: dict[str, Callable[[], object]] = {
    "save": lambda: fp.save(STATE, "a.pt"),
    "save, parents": lambda: fp.save(STATE, "a/b.pt", make_parents=True),
    "save_async": lambda: fp.save_async(STATE, "a.pt"),
    "DirectorySave": lambda: fp.DirectorySave("a"),
    "DirectorySave, pending_in": lambda: fp.DirectorySave("/tmp/none", pending_in="a"),
    "Checkpointer": lambda: fp.Checkpointer("a"),
    "read_events": lambda: list(fp.events.read_events("a")),
    "TensorFile": lambda: fp.TensorFile("a.bin", "w"),
    "RowWriter": lambda: fp.RowWriter("a.npy", (4,), torch.float32),
    "RowStore": lambda: fp.RowStore("a.npy", cache_bytes=0),
}


@pytest.fixture
def no_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the working directory be one that somebody has removed."""
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()


@pytest.mark.parametrize("call", IN_NO_DIRECTORY.values(), ids=IN_NO_DIRECTORY)
def test_relative_path_in_a_removed_directory_is_named(call: Callable[[], object], no_directory: None) -> None:
    with pytest.raises(StorageError, match=r"looking up (the working directory for )?a") as caught:
        call()
    assert caught.value.errno == errno.ENOENT
    assert caught.value.filename


@pytest.mark.parametrize(
    "words",
    [
        ["convert", __file__, "a.pt"],
        ["merge", "a", "b.pt"],
        ["rows", "info", "a.npy"],
        ["watch", "a", "--once"],
        ["tune", "."],
        ["tune", "/", "--output", "a.toml"],
        ["demo"],
    ],
    ids=" ".join,
)
def test_commands_in_a_removed_directory_end_with_one_line(
    words: list[str], no_directory: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    assert capsys.readouterr().err.count("\n") == 1


# --- what else is mistaken for another thing


def publish(path: Path, **options: Any) -> None:
    with fp.DirectorySave(path) as files:
        files.publish(**options)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda run, path: fp.save(path, STATE), r"save\(obj, '.*x\.pt'\)"),
        (lambda run, path: fp.save_async(str(path), STATE), r"save\(obj, '.*x\.pt'\)"),
        (lambda run, path: fp.save(STATE, path, durable="yes"), "durable is True or False, not 'yes'"),
        (lambda run, path: fp.save_async(STATE, path, durable="no"), "durable"),
        (lambda run, path: fp.save(STATE, path, checksum="crc32"), "checksum"),
        (lambda run, path: fp.load(path, weights_only="no"), "weights_only"),
        (lambda run, path: fp.save(STATE, path, progress="no"), "progress"),
        (lambda run, path: publish(path, durable=None), "durable"),
        (lambda run, path: publish(path, step=-1), "a step is an int"),
        (lambda run, path: fp.Checkpointer(path, sharded="yes"), "sharded"),
        (lambda run, path: run.save(STATE, 5), r"save\(5, state\)"),
        (lambda run, path: run.save("5", STATE), "a step is an int"),
        (lambda run, path: run.save(5, STATE, metrics=3.0), 'such as {"loss": 0.5}; not 3.0'),
        (lambda run, path: run.save(5, STATE, metrics=["loss"]), "metrics is a dict"),
        (lambda run, path: run.save(5, STATE, overwrite="yes"), "overwrite"),
        (lambda run, path: run.load(into=torch.nn.Linear(1, 1)), 'into={"model": model}; not a Linear'),
        (lambda run, path: run.load(into=[1]), "not a list"),
        (lambda run, path: run.load(1, into=5), "not a int"),
        (lambda run, path: run.load(verify="yes"), "verify"),
        (
            lambda run, path: fp.load(path, keys=lambda name: True),
            "keys is a list of names and patterns, not <function",
        ),
        (lambda run, path: fp.load_into(path, {}, keys=5), "keys is a list of names and patterns, not 5"),
        (lambda run, path: run.load("latest"), """a step is an int, "best", or None .*; not .latest."""),
    ],
)
def test_mistaken_argument_is_refused_with_what_was_meant(
    tmp_path: Path, call: Callable[[fp.Checkpointer, Path], object], said: str
) -> None:
    run = fp.Checkpointer(tmp_path / "run")
    with pytest.raises(ConfigError, match=said):
        call(run, tmp_path / "x.pt")
    run.close()
    assert os.listdir(tmp_path) == []


def test_file_objects_still_go_to_torch(tmp_path: Path) -> None:
    with open(tmp_path / "x.pt", "wb") as file:
        fp.save("x.pt", file)
    with open(tmp_path / "x.pt", "rb") as file:
        assert fp.load(file) == "x.pt"
    with open(tmp_path / "y.pt", "wb") as file, pytest.raises(UnsupportedError, match="file object"):
        fp.save_async(STATE, file)  # type: ignore[arg-type]


@pytest.mark.parametrize("make", [numpy.int64, numpy.uint8, numpy.int32, lambda step: torch.tensor(step)])
def test_whole_numbers_of_any_kind_are_steps(tmp_path: Path, make: Callable[[int], Any]) -> None:
    with fp.Checkpointer(tmp_path / "run") as checkpoints:
        checkpoints.save(make(7), STATE)
        checkpoints.save(make(8), STATE).result()
        assert checkpoints.steps() == [7, 8]
        assert torch.equal(checkpoints.load(make(7))["weight"], STATE["weight"])
        assert checkpoints.discard_after(make(7)) == [8]
        checkpoints.delete(make(7))
    with fp.DirectorySave(tmp_path / "own") as files:
        files.publish(step=make(9)).result()
    assert fp.inspect(tmp_path / "own").step == 9


def test_numpy_bools_are_bools(tmp_path: Path) -> None:
    fp.save(STATE, tmp_path / "x.pt", durable=numpy.bool_(False), checksum=numpy.True_)  # type: ignore[arg-type]
    assert fp.inspect(tmp_path / "x.pt").has_checksums


# --- no room


@needs_root
@pytest.mark.parametrize("kind", ["tmpfs", "ext4"])
def test_full_disk_says_what_is_free_and_what_a_checkpointer_needs(tmp_path: Path, kind: str) -> None:
    large = {"weight": torch.zeros(2 << 20)}
    with small_filesystem(kind, tmp_path, size_mib=6) as root:
        errors = []
        with pytest.raises(NoSpaceError) as caught:
            fp.save(large, root / "x.pt")
        errors.append(caught.value)
        errors.append(fp.save_async(large, root / "x.pt").exception())  # type: ignore[arg-type]
        with fp.DirectorySave(root / "own") as files:
            files.save(large, "state.pt")
            errors.append(files.publish().exception())  # type: ignore[arg-type]
        with fp.Checkpointer(root / "run", keep=1) as checkpoints:
            errors.append(checkpoints.save(1, large).exception())  # type: ignore[arg-type]
    for error in errors:
        assert isinstance(error, NoSpaceError)
        assert error.errno == errno.ENOSPC
        free = re.findall(r"; (\d+\.\d\d) MB are free there", str(error))
        assert len(free) == 1
        assert 3 < float(free[0]) < 6.3  # what was begun does not count
    assert ["keep=N needs room for N + 1" in str(error) for error in errors] == [False, False, False, True]


def test_disk_without_a_name_left_says_that(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(
        os, "statvfs", lambda path: SimpleNamespace(f_bavail=10**6, f_frsize=4096, f_files=5, f_favail=0)
    )
    error = NoSpaceError(errno.ENOSPC, "creating", str(tmp_path / "gone" / "x.pt"))
    tell_free(error)
    assert str(error) == "creating; no more files can be made there, 4.10 GB are free"
    quota = NoSpaceError(errno.EDQUOT, "creating", str(tmp_path / "x.pt"))
    tell_free(quota, "remove something")
    assert str(quota) == "creating; remove something"


# --- numbers of bytes


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (0, 0),
        (numpy.int64(7), 7),
        ("4GiB", 4 << 30),
        ("4 gib", 4 << 30),
        ("800MB", 800_000_000),
        ("800M", 800_000_000),
        ("1.5 KiB", 1536),
        (" 12 ", 12),
        ("12B", 12),
        ("2T", 2_000_000_000_000),
    ],
)
def test_number_of_bytes_is_a_number_or_a_text(given: int | str, expected: int) -> None:
    found = byte_count(given, "budget_bytes")
    assert found == expected
    assert type(found) is int


@pytest.mark.parametrize(
    "given",
    [-1, True, 1.5, None, "", "GiB", "4 GiB 3", "-4MB", "4XB", "iB", b"4MB", 1 << 63, 1 << 70, "8388608TiB", "9" * 400],
)
def test_what_is_no_number_of_bytes_is_refused(given: object) -> None:
    with pytest.raises(ConfigError, match=r"budget_bytes is .*4GiB"):
        byte_count(given, "budget_bytes")
