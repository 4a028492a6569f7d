"""How a TensorFile is opened, and what becomes of it in the end: modes, arguments that make no sense, and files that
are closed, dropped or pickled.
"""

from __future__ import annotations

import errno
import os
import pickle
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.leaks import no_leaks
from support.tensor_files import bytes_of, pattern, tensor_of

import fastpersist as fp
from fastpersist.errors import ConfigError, StorageError, UnsupportedError
from fastpersist.transfer import tensor_file

torch.set_num_threads(1)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "file"


# ------------------------------------------------------------------------------------------------------- opening


@pytest.mark.parametrize("engine", ["uring", "libaio"])
def test_signals_while_a_file_is_opened_are_no_errors(path: Path, engine: str) -> None:
    try:
        fp.TensorFile(path, "w", engine=engine).close()
    except UnsupportedError as error:
        pytest.skip(str(error))
    before = signal.signal(signal.SIGALRM, lambda number, frame: None)
    try:
        signal.setitimer(signal.ITIMER_REAL, 5e-5, 5e-5)
        for _ in range(2_000):
            fp.TensorFile(path, "w", engine=engine).close()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_the_modes_make_empty_and_keep_what_they_should(path: Path) -> None:
    for mode in ("r", "r+"):
        with pytest.raises(StorageError) as failure:
            fp.TensorFile(path, mode)
        assert failure.value.errno == errno.ENOENT
        assert failure.value.filename == str(path)
    fp.TensorFile(path, "x").close()
    with pytest.raises(StorageError) as failure:
        fp.TensorFile(path, "x")
    assert failure.value.errno == errno.EEXIST
    path.write_bytes(b"abcd")
    for mode in ("r", "r+"):
        with fp.TensorFile(path, mode) as file:
            assert file.size() == 4
    with fp.TensorFile(path, "w") as file:
        assert file.size() == 0
        file.write(torch.zeros(3, dtype=torch.uint8))
        read = torch.ones(3, dtype=torch.uint8)
        assert file.read(read) == 3
        assert not read.any()
    assert path.read_bytes() == bytes(3)


MODES_OF_OPEN = {
    "rb": "r",
    "br": "r",
    "rb+": "r+",
    "r+b": "r+",
    "wb": "w",
    "w+": "w",
    "wb+": "w",
    "w+b": "w",
    "xb": "x",
    "x+": "x",
    "xb+": "x",
    "x+b": "x",
}


@pytest.mark.parametrize("mode", MODES_OF_OPEN)
def test_the_modes_of_open_do_what_they_do_there(mode: str, path: Path) -> None:
    ours = MODES_OF_OPEN[mode]
    if ours != "x":
        path.write_bytes(b"abcd")
    with fp.TensorFile(path, mode) as file:
        assert file.mode == ours
        assert file.size() == (4 if ours in ("r", "r+") else 0)
        if ours == "r":
            with pickle.loads(pickle.dumps(file)) as again:
                assert again.mode == "r"
            with pytest.raises(ConfigError, match="reading only"):
                file.write(torch.zeros(1))
        else:
            file.write(torch.zeros(2, dtype=torch.uint8))
            read = torch.ones(2, dtype=torch.uint8)
            assert file.read(read) == 2
            assert not read.any()
    if ours == "x":
        with pytest.raises(StorageError) as failure:
            fp.TensorFile(path, mode)
        assert failure.value.errno == errno.EEXIST


def test_who_wants_to_append_hears_how(path: Path) -> None:
    path.write_bytes(b"precious")
    for mode in ("a", "ab", "a+"):
        with pytest.raises(ConfigError, match=r"write at size\(\)"):
            fp.TensorFile(path, mode)
    assert path.read_bytes() == b"precious"


def test_a_file_says_how_it_was_opened(path: Path) -> None:
    with fp.TensorFile(path, "w", engine="threads-buffered", queue_depth=3, chunk_bytes=8192, threads=2) as file:
        assert (file.path, file.mode, file.engine) == (str(path), "w", "threads-buffered")
        assert (file.queue_depth, file.chunk_bytes, file.threads, file.closed) == (3, 8192, 2, False)
        assert os.readlink(f"/proc/self/fd/{file.fileno()}") == str(path)
        assert str(path) in repr(file)
    assert file.closed
    assert "closed" in repr(file)


def test_what_was_tuned_holds_where_nothing_is_said(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTPERSIST_QUEUE_DEPTH", "5")
    monkeypatch.setenv("FASTPERSIST_THREADS", "3")
    monkeypatch.setenv("FASTPERSIST_CHUNK_BYTES", "131072")
    monkeypatch.setenv("FASTPERSIST_ENGINE", "threads-buffered")
    with fp.TensorFile(path, "w") as file:
        assert (file.queue_depth, file.chunk_bytes, file.threads) == (5, 131072, 3)
        assert file.engine == "threads-buffered"
    with fp.TensorFile(path, queue_depth=7) as file:
        assert (file.queue_depth, file.threads) == (7, 3)


@pytest.mark.parametrize("given", [bytes, Path, str])
def test_paths_may_be_strings_bytes_and_path_objects(given: Callable[[Any], Any], tmp_path: Path) -> None:
    path = os.fsencode(tmp_path) + b"/\xff\xfe odd"
    with fp.TensorFile(given(path) if given is bytes else given(os.fsdecode(path)), "w") as file:
        file.write(torch.zeros(2))
    with open(path, "rb") as written:
        assert written.read() == bytes(8)


BAD_ARGUMENTS: list[dict[str, Any]] = [
    {"mode": "a"},
    {"mode": "ab"},
    {"mode": "rt"},
    {"mode": "rbb"},
    {"mode": "b"},
    {"mode": "rw"},
    {"mode": "r++"},
    {"mode": ""},
    {"mode": None},
    {"mode": ["w"]},
    {"engine": "abacus"},
    {"engine": ""},
    {"engine": None},
    {"engine": 3},
    {"queue_depth": 0},
    {"queue_depth": 4097},
    {"queue_depth": -1},
    {"queue_depth": 8.0},
    {"queue_depth": True},
    {"chunk_bytes": 0},
    {"chunk_bytes": 2048},
    {"chunk_bytes": 5000},
    {"chunk_bytes": 1 << 31},
    {"chunk_bytes": "8M"},
    {"threads": 0},
    {"threads": 1 << 20},
    {"threads": 1.5},
]


@pytest.mark.parametrize("arguments", BAD_ARGUMENTS, ids=str)
@pytest.mark.parametrize("mode", ["r+", "w", "x"])
def test_arguments_that_make_no_sense_open_nothing(arguments: dict[str, Any], mode: str, path: Path) -> None:
    if mode != "x":
        path.write_bytes(b"precious")
    with no_leaks(), pytest.raises(ConfigError):
        fp.TensorFile(path, **{"mode": mode, **arguments})
    assert not path.exists() if mode == "x" else path.read_bytes() == b"precious"


@pytest.mark.parametrize("bad", ["a\0b", 3, None, "\ud800", 1.5, b"a\0"], ids=repr)
def test_what_is_no_path_is_refused(bad: Any) -> None:
    with pytest.raises(ConfigError):
        fp.TensorFile(bad)


def test_an_environment_that_makes_no_sense_opens_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path.write_bytes(b"precious")
    monkeypatch.setenv("FASTPERSIST_CHUNK_BYTES", "many")
    with no_leaks(), pytest.raises(ConfigError):
        fp.TensorFile(path, "w")
    assert path.read_bytes() == b"precious"


@pytest.mark.parametrize("mode", ["w", "x"])
def test_an_engine_that_cannot_work_here_changes_nothing(
    mode: str, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*arguments: object, **named: object) -> list[str]:
        raise UnsupportedError("not here")

    monkeypatch.setattr(tensor_file, "engine_ladder", refused)
    if mode == "w":
        path.write_bytes(b"precious")
    with no_leaks(), pytest.raises(UnsupportedError):
        fp.TensorFile(path, mode)
    assert path.read_bytes() == b"precious" if mode == "w" else not path.exists()


@pytest.mark.parametrize("mode", ["r", "w"])
def test_directories_and_pipes_are_refused(mode: str, tmp_path: Path) -> None:
    with no_leaks(), pytest.raises(StorageError) as failure:
        fp.TensorFile(tmp_path, mode)
    assert failure.value.errno == errno.EISDIR
    os.mkfifo(tmp_path / "pipe")
    with no_leaks(), pytest.raises(ConfigError):
        fp.TensorFile(tmp_path / "pipe", mode)


# ----------------------------------------------------------------------------------------------------------- the end


def test_a_file_for_reading_is_not_written(path: Path) -> None:
    path.write_bytes(b"x" * 100)
    with fp.TensorFile(path) as file:
        for call in (file.write, file.write_async, lambda t: file.write_list([(t, 0)])):
            with pytest.raises(ConfigError, match="reading only"):
                call(torch.zeros(1))
        for change in (file.truncate, file.allocate):
            with pytest.raises(ConfigError, match="reading only"):
                change(0)
        file.sync()
    assert path.read_bytes() == b"x" * 100


def test_nothing_works_after_close(path: Path) -> None:
    file = fp.TensorFile(path, "w")
    file.close()
    file.close()
    tensor = torch.zeros(1)
    calls: list[Callable[[], object]] = [
        lambda: file.read(tensor),
        lambda: file.write(tensor),
        lambda: file.read_async(tensor),
        lambda: file.write_async(tensor),
        lambda: file.read_list([]),
        lambda: file.write_list([]),
        file.sync,
        file.size,
        file.fileno,
        lambda: file.truncate(0),
        lambda: file.allocate(1),
        lambda: file.engine,
    ]
    for call in calls:
        with pytest.raises(ConfigError, match="closed"):
            call()
    assert path.read_bytes() == b""


def test_a_file_that_is_dropped_is_closed_and_says_so(path: Path) -> None:
    with no_leaks():
        file = fp.TensorFile(path, "w")
        file.write(torch.ones(3))
        with pytest.warns(ResourceWarning, match="was not closed"):
            del file  # the last reference


def test_only_what_is_for_reading_can_be_pickled(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = pattern(5000)
    path.write_bytes(data)
    monkeypatch.chdir(path.parent)
    monkeypatch.setenv("FASTPERSIST_THREADS", "300")
    with fp.TensorFile(path.name, engine="threads", queue_depth=9, chunk_bytes=4096) as file:
        pickled = pickle.dumps(file)
        monkeypatch.chdir("/")
        with pickle.loads(pickled) as other:
            assert (other.engine, other.queue_depth, other.chunk_bytes) == ("threads", 9, 4096)
            read = tensor_of(bytes(5000))
            other.read(read)
            assert bytes_of(read) == data
    with fp.TensorFile(path, "r+") as file, pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(file)


def test_the_engine_that_moves_nothing_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    with pytest.raises(fp.ConfigError, match="null engine moves nothing"):
        fp.TensorFile(tmp_path / "new", "w", engine="null")
    assert not list(tmp_path.iterdir())
