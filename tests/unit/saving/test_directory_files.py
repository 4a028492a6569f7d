"""The files of a pending directory: each has one entry, and none that is missing or too short is published."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

import fastpersist as fp
from fastpersist.commit.directory_commit import PendingDirectory
from fastpersist.commit.filesystem import Filesystem, using
from fastpersist.formats.manifest import FileEntry
from fastpersist.saving.directory_files import DirectoryFiles, check_lengths
from fastpersist.saving.pending_save import SaveStats


@pytest.fixture
def files(tmp_path: Path) -> Iterator[DirectoryFiles]:
    directory = PendingDirectory.create(os.fspath(tmp_path / "checkpoint"), overwrite=False)
    yield DirectoryFiles(directory, SaveStats(path="checkpoint"))
    directory.abort()


def write(files: DirectoryFiles, name: str, data: bytes) -> None:
    files.add(name)
    files.write_bytes(files.create(name), name, data)


def test_all_files_are_listed_whoever_wrote_them(files: DirectoryFiles) -> None:
    write(files, "a", b"ours")
    Path(files.path, "b").write_bytes(b"told of")
    files.note_written_elsewhere(FileEntry("b", 7, None))
    Path(files.path, "c").write_bytes(b"found")
    files.sync(durable=True)
    assert sorted(files.complete(), key=lambda entry: entry.name) == [
        FileEntry("a", 4, zlib.crc32(b"ours")),
        FileEntry("b", 7, None),
        FileEntry("c", 5, zlib.crc32(b"found")),
    ]


def test_name_that_is_taken_is_refused_and_the_other_writer_named(files: DirectoryFiles) -> None:
    files.add("a")
    with pytest.raises(fp.ConfigError, match=r"a is in .*checkpoint already$"):
        files.check_new("a")
    with pytest.raises(fp.ConfigError, match="already: rank 3 and another one"):
        files.note_written_elsewhere(FileEntry("a", 0, None), "rank 3")
    files.drop("a")
    files.check_new("a")


def test_file_that_was_never_written_is_missed(files: DirectoryFiles) -> None:
    files.add("a")
    with pytest.raises(fp.StorageError, match="a is gone"):
        files.complete()


@pytest.mark.parametrize("size_bytes", [6, 8])
def test_file_of_another_length_than_was_told_is_refused(files: DirectoryFiles, size_bytes: int) -> None:
    Path(files.path, "b").write_bytes(b"told of")
    files.note_written_elsewhere(FileEntry("b", size_bytes, None))
    with pytest.raises(fp.StorageError, match=f"b has 7 bytes, and its writer wrote {size_bytes}"):
        files.complete()


def test_file_that_others_have_cut_since_it_was_written_is_refused(files: DirectoryFiles) -> None:
    files.add("a")
    files.write_bytes(files.create("a"), "a", b"seven..")
    Path(files.path, "a").write_bytes(b"six...")
    with pytest.raises(fp.StorageError, match="a has 6 bytes, and its writer wrote 7"):
        files.complete()


def test_file_that_is_gone_is_refused(tmp_path: Path) -> None:
    with pytest.raises(fp.StorageError, match=r"looking at .*/b"):
        check_lengths(os.fspath(tmp_path), "checkpoint", [FileEntry("b", 1, None)])


def test_descriptors_of_many_files_are_closed_before_all_are_written(files: DirectoryFiles) -> None:
    class Noting(Filesystem):
        open_count = open_count_max = sync_count = 0

        def create(self, path: str) -> int:
            self.open_count += 1
            self.open_count_max = max(self.open_count, self.open_count_max)
            return super().create(path)

        def sync(self, fd: int, path: str) -> None:
            self.sync_count += 1
            super().sync(fd, path)

        def close(self, fd: int, path: str) -> None:
            self.open_count -= 1
            super().close(fd, path)

    with using(noting := Noting()):
        for number in range(200):
            write(files, f"{number}", b"x")
        files.sync(durable=True)
    assert noting.sync_count == 200
    assert 1 < noting.open_count_max <= 64
    assert noting.open_count == 0
