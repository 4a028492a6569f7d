"""Directories of tiny checkpoints as the commit protocol makes them, and what dead processes leave of them."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from support.filesystems import FailingFilesystem, KillingBeforeNth, KillingFilesystem, Operation, WatchedFilesystem
from support.forking import Child, Report

from fastpersist.commit.directory_commit import (
    PendingDirectory,
)
from fastpersist.commit.filesystem import filesystem
from fastpersist.errors import (
    StorageError,
    UnsupportedError,
)

NAME = "step-00000001"
STEPS = re.compile(r"step-\d{8}")


class Refusing(WatchedFilesystem):
    """A file system that cannot exchange names. Put it before the double that does the watching."""

    def exchange(self, first: str, second: str) -> None:
        raise UnsupportedError(f"exchanging {first} with {second}: Invalid argument")


class Recording(WatchedFilesystem):
    def __init__(self) -> None:
        self.operations: list[Operation] = []

    @contextmanager
    def around(self, operation: Operation) -> Iterator[None]:
        yield
        self.operations.append(operation)

    def index(self, name: str, nth: int = 0) -> int:
        return [index for index, operation in enumerate(self.operations) if operation.name == name][nth]


class LowerLayer(WatchedFilesystem):
    """A file system that cannot rename directories with final names: overlayfs, if the image of a container has them.

    Put it before the double that does the watching.
    """

    def rename(self, source: str, target: str) -> None:
        self._refuse(source, source, target)
        super().rename(source, target)

    def exchange(self, first: str, second: str) -> None:
        self._refuse(second, first, second)
        super().exchange(first, second)

    def _refuse(self, old: str, source: str, target: str) -> None:
        if os.path.isdir(old) and not os.path.basename(old).startswith("."):
            raise StorageError(errno.EXDEV, f"renaming {source} to {target}: {os.strerror(errno.EXDEV)}", target)


class RecordingLowerLayer(LowerLayer, Recording): ...


class FailingLowerLayer(LowerLayer, FailingFilesystem): ...


class KillingLowerLayer(LowerLayer, KillingBeforeNth): ...


class RecordingRefusing(Refusing, Recording): ...


class FailingRefusing(Refusing, FailingFilesystem): ...


class KillingRefusing(Refusing, KillingFilesystem): ...


def write_file(pending: PendingDirectory, name: str, data: bytes) -> None:
    fd = pending.create_file(name)
    path = f"{pending.final_path}/{name}"
    filesystem().write(fd, data, path)
    filesystem().sync(fd, path)
    pending.close_file(fd)


def begin(path: Path, step: int = 1, *, overwrite: bool = True) -> PendingDirectory:
    pending = PendingDirectory.create(str(path), overwrite=overwrite)
    try:
        write_file(pending, "state.pt", b"%d" % step)
        write_file(pending, "tokenizer/vocabulary.txt", b"words")
    except BaseException:
        pending.abort()
        raise
    return pending


def save(path: Path, step: int = 1, *, overwrite: bool = True, durable: bool = True) -> PendingDirectory:
    pending = begin(path, step, overwrite=overwrite)
    pending.publish(b'{"step": %d}\n' % step, durable=durable, overwrite=overwrite)
    return pending


def step_in(path: Path | str | None) -> int:
    """Return the step in a directory that must be whole."""
    assert path is not None
    step = int((Path(path) / "state.pt").read_bytes())
    assert (Path(path) / "MANIFEST.json").read_bytes() == b'{"step": %d}\n' % step
    assert (Path(path) / "tokenizer" / "vocabulary.txt").read_bytes() == b"words"
    return step


def hidden(parent: Path) -> list[Path]:
    return sorted(parent.glob(".*.*-*"))


def leave(
    parent: Path, kind: str = "pending", name: str = NAME, *, manifest: bytes | None = b"", step: int = 0
) -> Path:
    """Make what a dead process may have left."""
    path = parent / f".{name}.{kind}-{secrets.token_hex(8)}"
    (path / "tokenizer").mkdir(parents=True)
    (path / "tokenizer" / "vocabulary.txt").write_bytes(b"words")
    (path / "state.pt").write_bytes(b"%d" % step)
    if manifest is not None:
        (path / "MANIFEST.json").write_bytes(manifest)
    return path


def wait_for_report(child: Child, step: int = 0) -> None:
    while child.reported < step:
        assert not child.ended(), child.wait().message
        time.sleep(0.002)


def kill_alone(child: Child) -> None:
    """Kill a child and leave its own children alive, which keep the pipe open that `Child.kill` waits for."""
    os.kill(child.pid, signal.SIGKILL)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)


def lock_is_free(path: Path) -> bool:
    """Ask from another process, to which the locks of this one are somebody else's."""

    def work(report: Report) -> None:
        fd = os.open(path, os.O_RDWR)
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            report(1)
        except BlockingIOError:
            report(0)

    with Child(work) as child:
        assert child.wait().verdict == "passed", child.wait().message
        return child.reported == 1


def make_link(path: Path) -> None:
    elsewhere = path.parent / "elsewhere"
    save(elsewhere, 7)
    path.symlink_to(elsewhere)


def make_foreign(path: Path) -> None:
    path.mkdir()
    (path / "thesis.tex").write_bytes(b"years of work")
