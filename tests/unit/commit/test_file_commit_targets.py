"""Where a save may go: names, symbolic links, what no rename can replace, and files that somebody is reading."""

from __future__ import annotations

import errno
import io
import logging
import mmap
import os
import pickle
import resource
import stat
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.forking import Child, Report, run_in_child
from support.leaks import no_leaks
from support.sandbox import become_ordinary_user, bind_mounted, needs_root, open_directory
from support.states import differences, load_step, make_state, pending_files

import fastpersist as fp
from fastpersist.commit.filesystem import Filesystem, using
from fastpersist.errors import StorageError, UnsupportedError


def plain_state(step: int) -> dict[str, torch.Tensor]:
    """A state without empty tensors, which torch.save itself (2.13) cannot write to a pipe."""
    return {name: tensor for name, tensor in make_state(step).items() if tensor.numel()}


def assert_holds(data: bytes | Path, step: int) -> None:
    """The bytes are the plain state of that step, as stock torch reads it."""
    state = torch.load(io.BytesIO(data) if isinstance(data, bytes) else data, weights_only=True)
    assert differences(state, plain_state(step)) == []


def in_place_warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    messages = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    return [message for message in messages if "torch.save itself writes" in message]


# --- names


@pytest.mark.parametrize(
    "name",
    ["a" * 252 + ".pt", "ä" * 126 + ".pt", "a b\n.pt", ".pt.pt", "model", "ünï.safetensors", "100%s.pt"],
    ids=["255-bytes", "255-bytes-utf8", "newline", "dots", "no-suffix", "umlauts", "percent"],
)
def test_any_name_that_the_file_system_takes_works(name: str, tmp_path: Path, leak_check: None) -> None:
    for step in range(2):
        fp.save(make_state(step), tmp_path / name)
        assert load_step(tmp_path / name) == step
    assert os.listdir(tmp_path) == [name]


def test_name_that_is_no_unicode_works(tmp_path: Path) -> None:
    path = tmp_path / os.fsdecode(b"mod\xe8le.pt")  # Latin-1, as on old disks
    torch.save(make_state(0), path)
    assert load_step(path) == 0
    fp.save(make_state(1), path)
    assert load_step(path) == 1


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("a" * 256, errno.ENAMETOOLONG),
        ("missing/model", errno.ENOENT),
        ("file/model", errno.ENOTDIR),
        ("loop/model", errno.ELOOP),
        ("directory", errno.EISDIR),
        ("to-directory", errno.EISDIR),
    ],
    ids=["too-long", "no-directory", "below-a-file", "loop-of-links", "directory", "link-to-directory"],
)
def test_place_where_no_file_can_be_is_a_clear_error(
    name: str, number: int, suffix: str, tmp_path: Path, leak_check: None
) -> None:
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / f"directory{suffix}").mkdir()
    (tmp_path / f"to-directory{suffix}").symlink_to(f"directory{suffix}")
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(StorageError) as caught:
        fp.save(make_state(1), tmp_path / f"{name}{suffix}")
    assert caught.value.errno == number
    assert name.split("/")[0] in str(caught.value)
    assert sorted(os.listdir(tmp_path)) == before


@pytest.mark.parametrize("path", ["", "new/", "directory/", ".", "directory/.."])
def test_path_without_a_file_name_is_refused_and_makes_nothing(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "directory").mkdir()
    monkeypatch.chdir(tmp_path / "directory")
    monkeypatch.chdir(tmp_path)
    with pytest.raises((OSError, ValueError, RuntimeError)):
        fp.save(make_state(1), path)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["directory"]


# --- links


def test_symbolic_link_is_followed(tmp_path: Path) -> None:
    real = tmp_path / "disk" / "model-1.pt"
    real.parent.mkdir()
    fp.save(make_state(1), real)
    links = tmp_path / "links"
    links.mkdir()
    (links / "latest.pt").symlink_to("../disk/model-1.pt")
    (links / "second.pt").symlink_to("latest.pt")
    created = []

    class Watching(Filesystem):
        def create(self, path: str, mode: int = 0o666) -> int:
            created.append(Path(path).parent)
            return super().create(path, mode)

    with using(Watching()):
        fp.save(make_state(2), links / "second.pt")
    assert os.readlink(links / "latest.pt") == "../disk/model-1.pt"
    assert os.readlink(links / "second.pt") == "latest.pt"
    assert not real.is_symlink()
    assert load_step(real) == 2
    # On the disk of the file, not on that of the link: a rename does not go further.
    assert created == [real.parent]


def test_dangling_link_makes_the_file_it_names(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "model.pt").symlink_to("disk/new.pt")
    fp.save(make_state(1), tmp_path / "model.pt")
    assert (tmp_path / "model.pt").is_symlink()
    assert load_step(tmp_path / "disk" / "new.pt") == 1


def test_dangling_link_into_a_missing_directory_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "model.pt").symlink_to("missing/new.pt")
    with pytest.raises(StorageError) as caught:
        fp.save(make_state(1), tmp_path / "model.pt")
    assert caught.value.errno == errno.ENOENT
    assert os.listdir(tmp_path) == ["model.pt"]


def test_archive_is_named_as_torch_names_it_for_a_link(tmp_path: Path) -> None:
    stock = tmp_path / "stock"
    stock.mkdir()
    for directory in (tmp_path, stock):
        (directory / "latest.pt").symlink_to("model-1.pt")
    fp.save(make_state(1), tmp_path / "latest.pt")
    torch.save(make_state(1), stock / "latest.pt")
    with zipfile.ZipFile(tmp_path / "model-1.pt") as ours, zipfile.ZipFile(stock / "model-1.pt") as theirs:
        assert set(theirs.namelist()) <= set(ours.namelist())
        assert "latest/data.pkl" in ours.namelist()


# --- what no rename can replace

SAVES: dict[str, Callable[..., Any]] = {
    "save": lambda *arguments, **options: fp.save(*arguments, **options).engine,
    "save_async": lambda *arguments, **options: fp.save_async(*arguments, **options).stats.engine,
}


def test_hard_linked_file_is_written_in_place(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, other = tmp_path / "model.pt", tmp_path / "other.pt"
    fp.save(make_state(1), path)
    os.link(path, other)
    report = fp.save(make_state(2), path)
    assert report.engine == "torch.save"
    assert report.size_bytes == path.stat().st_size
    assert path.samefile(other)
    assert load_step(path) == load_step(other) == 2
    (warning,) = in_place_warnings(caplog)
    assert str(path) in warning
    assert "2 hard links" in warning


@pytest.mark.parametrize("way", SAVES)
def test_hard_linked_file_that_grows_beyond_the_limit_is_named_as_lost(way: str, tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    fp.save(make_state(1), path)
    os.link(path, tmp_path / "other.pt")

    def work(report: Report) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))  # as on a disk without more room
        with pytest.raises(
            StorageError, match=rf"{path} in place \(it has 2 hard links.*held before is lost"
        ) as caught:
            SAVES[way]({"w": torch.ones(1 << 20)}, path)
        assert caught.value.filename == str(path)

    run_in_child(work)


@pytest.mark.parametrize("way", SAVES)
def test_hard_linked_file_stays_when_the_new_object_cannot_be_pickled(way: str, tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    fp.save(make_state(1), path)
    os.link(path, tmp_path / "other.pt")
    with pytest.raises((pickle.PicklingError, AttributeError), match="lambda"):
        SAVES[way]({"w": torch.ones(3), "f": lambda: 0}, path)
    assert load_step(path) == load_step(tmp_path / "other.pt") == 1


def test_fifo_gets_the_whole_file(tmp_path: Path, caplog: pytest.LogCaptureFixture, leak_check: None) -> None:
    fifo = tmp_path / "fifo.pt"
    os.mkfifo(fifo)
    received: list[bytes] = []
    reader = threading.Thread(target=lambda: received.append(fifo.read_bytes()))
    reader.start()
    report = fp.save(plain_state(1), fifo)
    reader.join()
    assert report.engine == "torch.save"
    assert_holds(received[0], 1)
    assert stat.S_ISFIFO(fifo.stat().st_mode)
    (warning,) = in_place_warnings(caplog)
    assert "no regular file" in warning


def test_dev_null_takes_everything(caplog: pytest.LogCaptureFixture) -> None:
    assert fp.save(make_state(1), "/dev/null").engine == "torch.save"
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)
    assert len(in_place_warnings(caplog)) == 1


@pytest.mark.parametrize("name", ["/dev/stdout", "/dev/fd/1", "/proc/self/fd/1"])
def test_standard_output_gets_the_whole_file(name: str, tmp_path: Path) -> None:
    redirected = tmp_path / "redirected.pt"

    def work(report: Report) -> None:
        fd = os.open(redirected, os.O_RDWR | os.O_CREAT)
        os.dup2(fd, 1)
        assert fp.save(plain_state(1), name).engine == "torch.save"
        assert os.fstat(1).st_ino == redirected.stat().st_ino  # not replaced under the descriptor

    run_in_child(work)
    assert_holds(redirected, 1)
    assert os.listdir(tmp_path) == ["redirected.pt"]


def test_standard_output_may_be_a_pipe() -> None:
    read_end, write_end = os.pipe()

    def work(report: Report) -> None:
        os.close(read_end)
        os.dup2(write_end, 1)
        fp.save(plain_state(1), "/dev/stdout")

    with Child(work) as child:
        os.close(write_end)
        with os.fdopen(read_end, "rb") as file:
            received = file.read()
        assert child.wait().verdict == "passed", child.wait().message
    assert_holds(received, 1)


@needs_root
def test_bind_mounted_file_is_written_in_place(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source, place = tmp_path / "source.pt", tmp_path / "place.pt"
    fp.save(make_state(1), source)
    place.touch()
    with bind_mounted(source, place):
        assert fp.save(make_state(2), place).engine == "torch.save"
        assert load_step(place) == 2
        assert place.samefile(source)
    assert load_step(source) == 2
    (warning,) = in_place_warnings(caplog)
    assert "mounted" in warning
    assert pending_files(tmp_path) == []


@pytest.mark.parametrize("way", SAVES)
def test_writable_file_in_a_closed_directory_is_written_in_place_only_when_asked(
    way: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save = SAVES[way]
    with open_directory(tmp_path) as directory:
        closed = directory / "closed"
        closed.mkdir()
        path = closed / "model.pt"
        fp.save(make_state(1), path)
        path.chmod(0o666)
        closed.chmod(0o555)

        def work(report: Report) -> None:
            become_ordinary_user()
            safetensors = closed / "model.safetensors"
            with no_leaks(directory):
                for name in (path, safetensors):
                    with pytest.raises(StorageError, match=r"takes no new file.*in_place=True") as caught:
                        save(make_state(2), name)
                    assert (caught.value.errno, caught.value.filename) == (errno.EACCES, str(name))
                assert load_step(path) == 1
                assert in_place_warnings(caplog) == []
                assert save(make_state(2), path, in_place=True) == "torch.save"
            (warning,) = in_place_warnings(caplog)
            assert "takes no new file" in warning
            with pytest.raises(UnsupportedError, match="choose another path"):
                save(make_state(2), safetensors, in_place=True)

        (closed / "model.safetensors").touch()
        (closed / "model.safetensors").chmod(0o666)
        try:
            run_in_child(work)
        finally:
            closed.chmod(0o755)
        assert load_step(path) == 2


@needs_root
@pytest.mark.parametrize("way", SAVES)
def test_file_of_somebody_else_in_a_sticky_directory_is_written_in_place_only_when_asked(
    way: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if Path("/proc/sys/fs/protected_regular").read_text().strip() != "0":
        pytest.skip("fs.protected_regular forbids to write such a file at all")
    with open_directory(tmp_path) as directory:
        path = directory / "model.pt"
        fp.save(make_state(1), path)
        path.chmod(0o666)
        directory.chmod(0o1777)

        def work(report: Report) -> None:
            become_ordinary_user()
            with pytest.raises(StorageError, match=r"sticky bit.*in_place=True") as caught:
                SAVES[way](make_state(2), path)
            assert (caught.value.errno, caught.value.filename) == (errno.EPERM, str(path))
            assert load_step(path) == 1
            assert SAVES[way](make_state(2), path, in_place=True) == "torch.save"
            (warning,) = in_place_warnings(caplog)
            assert "sticky" in warning

        run_in_child(work)
        assert load_step(path) == 2
        assert pending_files(directory) == []


def test_safetensors_file_is_not_written_in_place(tmp_path: Path, leak_check: None) -> None:
    path = tmp_path / "model.safetensors"
    fp.save(make_state(1), path)
    os.link(path, tmp_path / "other.safetensors")
    before = path.read_bytes()
    with pytest.raises(UnsupportedError, match=r"2 hard links.*choose another path"):
        fp.save(make_state(2), path)
    assert path.read_bytes() == before


@pytest.mark.parametrize("buffered", [True, False])
def test_file_object_is_given_to_torch(buffered: bool, tmp_path: Path) -> None:
    memory = io.BytesIO()
    assert fp.save(make_state(1), memory).engine == "torch.save"
    memory.seek(0)
    assert differences(fp.load(memory), make_state(1)) == []
    with open(tmp_path / "model.pt", "wb", buffering=-1 if buffered else 0) as file:
        fp.save(make_state(2), file)
    assert load_step(tmp_path / "model.pt") == 2


# --- readers of the file that is replaced


def test_memory_mapped_checkpoint_stays_what_it_was(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    fp.save(make_state(1), path)
    mapped = torch.load(path, mmap=True, weights_only=True)
    for step in range(2, 5):
        fp.save(make_state(step), path)
    assert differences(mapped, make_state(1)) == []
    assert load_step(path) == 4


def test_open_descriptor_and_mapping_keep_the_old_bytes(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    fp.save(make_state(1), path)
    before = path.read_bytes()
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        fp.save(make_state(2, 2_000_000), path)
        assert mapped[:] == before
        assert file.read() == before
        assert file.read() == b""
