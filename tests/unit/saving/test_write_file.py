"""A file is reserved, written, cut to its length, published, in this order; a failure publishes nothing."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch
from support.states import pending_files

import fastpersist as fp
from fastpersist import _native
from fastpersist.commit.file_commit import PendingFile, resolve_target
from fastpersist.commit.filesystem import Filesystem, using
from fastpersist.saving.containers import Checksum, Container, Literal, Stored, TorchZipContainer
from fastpersist.saving.write_file import WrittenFile, publish_file, write_container, write_file
from fastpersist.transfer.arena import Arena

SIZE_BYTES = 5000
"""More than a block, and less than two."""


class Steps(Filesystem):
    """The real file system, which notes the operations in order; writing is noted by the test."""

    def __init__(self) -> None:
        self.done: list[tuple[str, int]] = []

    def allocate(self, fd: int, size_bytes: int, path: str) -> None:
        self.done.append(("allocate", size_bytes))
        super().allocate(fd, size_bytes, path)

    def truncate(self, fd: int, size_bytes: int, path: str) -> None:
        self.done.append(("truncate", size_bytes))
        super().truncate(fd, size_bytes, path)

    def rename(self, source: str, target: str) -> None:
        self.done.append(("rename", 0))
        super().rename(source, target)

    def write_all(self, fd: int) -> WrittenFile:
        self.done.append(("write", 0))
        os.pwrite(fd, b"x" * SIZE_BYTES, 0)
        return WrittenFile("an engine", 7)


class Full(Steps):
    def allocate(self, fd: int, size_bytes: int, path: str) -> None:
        raise fp.NoSpaceError(errno.ENOSPC, f"reserving {size_bytes} bytes for {path}: disk full", path)


IN_A_DIRECTORY = [("allocate", 8192), ("write", 0), ("truncate", SIZE_BYTES)]


def test_file_of_a_directory_is_reserved_written_and_cut(tmp_path: Path) -> None:
    path = tmp_path / "file"
    steps = Steps()
    with path.open("w+b") as file, using(steps):
        written = write_file(file.fileno(), str(path), SIZE_BYTES, lambda: steps.write_all(file.fileno()))
    assert written == WrittenFile("an engine", 7)
    assert steps.done == IN_A_DIRECTORY
    assert path.read_bytes() == b"x" * SIZE_BYTES


def test_nothing_is_written_where_there_is_no_space(tmp_path: Path) -> None:
    steps = Full()
    with (tmp_path / "file").open("w+b") as file, using(steps), pytest.raises(fp.NoSpaceError):
        write_file(file.fileno(), "file", SIZE_BYTES, lambda: steps.write_all(file.fileno()))
    assert steps.done == []


def test_published_file_is_checked_between_its_last_byte_and_its_name(tmp_path: Path) -> None:
    path = tmp_path / "file"
    steps = Steps()
    with using(steps):
        file = PendingFile.create(resolve_target(str(path)))
        published = publish_file(
            file,
            SIZE_BYTES,
            lambda: steps.write_all(file.fd),
            durable=True,
            check=lambda: steps.done.append(("check", 0)),
        )
    assert steps.done == [("allocate", 8192), ("write", 0), ("check", 0), ("truncate", SIZE_BYTES), ("rename", 0)]
    assert (published.engine, published.sync_s) == ("an engine", file.sync_s)
    assert path.read_bytes() == b"x" * SIZE_BYTES


def test_what_the_check_raises_keeps_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    steps = Steps()

    def refuse() -> None:
        raise fp.TornStateError("changed")

    with using(steps):
        file = PendingFile.create(resolve_target(str(path)))
        with pytest.raises(fp.TornStateError):
            publish_file(file, SIZE_BYTES, lambda: steps.write_all(file.fd), durable=False, check=refuse)
        file.abort()
    assert steps.done == [("allocate", 8192), ("write", 0)]
    assert path.read_bytes() == b"old"
    assert not pending_files(tmp_path)


def composed(container: Container) -> bytes:
    """Put a file together part by part."""
    contents = [
        bytes(source.storage)[source.offset_bytes : source.offset_bytes + source.size_bytes]
        for source in container.sources
    ]
    crcs = [_native.crc32(content) if container.has_checksums else 0 for content in contents]
    file = b""
    for part in container.parts():
        assert part.offset_bytes == len(file)
        match part:
            case Literal(data=data):
                file += data
            case Stored(source=source):
                file += contents[source]
            case Checksum(source=source):
                file += crcs[source].to_bytes(4, "little")
    assert container.closing_extent[0] == len(file)
    return file + container.closing(crcs)


@pytest.mark.parametrize("checksum", [True, False])
@pytest.mark.parametrize("captured", [True, False])
def test_many_records_at_a_time_give_the_same_file(captured: bool, checksum: bool, tmp_path: Path) -> None:
    state = [torch.arange(index % 7, dtype=torch.uint8) for index in range(1100)]  # several batches, some empty
    container = TorchZipContainer(state, "many", checksum=checksum)
    snapshot = None
    if captured:
        snapshot = _native.Snapshot(Arena(1 << 20).for_state(0))
        for source in container.sources:
            snapshot.add([source.storage.data_ptr()], [source.size_bytes], [_native.SourceKind.CONSTANT], [None])
    with (tmp_path / "many.pt").open("w+b") as file:
        write_container(container, file.fileno(), file.name, engine="threads-buffered", snapshot=snapshot)
        file.truncate(container.size_bytes)
        file.seek(0)
        assert file.read() == composed(container)
