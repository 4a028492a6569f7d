"""A follower's part of a shared file, and files of its own."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from support.sessions import ThreadSession, run_threads
from support.shared_files import MIB, expected_file, share_and_write, state_of
from support.training import PATIENCE_S

import fastpersist as fp
from fastpersist import _native
from fastpersist.distributed.coordinator_file import CoordinatorFile
from fastpersist.distributed.follower_file import FollowerFile, OwnFile
from fastpersist.distributed.partition import CUT_BYTES_MIN
from fastpersist.distributed.replica_check import replicas_of
from fastpersist.distributed.shared_file import SaveGroup
from fastpersist.formats.layout import align_up
from fastpersist.formats.manifest import FileEntry
from fastpersist.saving.containers import container_for
from fastpersist.saving.ownership import Owners
from fastpersist.saving.pacing import Spread
from fastpersist.saving.pending_save import PendingSave, SaveStats
from fastpersist.saving.write_file import capture_file
from fastpersist.transfer.arena import Arena


def test_each_rank_reads_only_what_it_writes(tmp_path: Path) -> None:
    # Of the cut bytes a rank does not write, the file has those of others: overwriting them here changes nothing.
    ready = threading.Barrier(2)

    def work(session: ThreadSession) -> Any:
        state = {"weights": torch.ones(4 * MIB, dtype=torch.uint8)}
        container = container_for(state, str(path), checksum=True)
        together = SaveGroup(session, path.name, [0, 1], False)  # type: ignore[arg-type]
        kind = FollowerFile if session.rank else CoordinatorFile
        share = kind(container, replicas_of(container), together)
        mine = [(part.from_bytes, part.from_bytes + part.size_bytes) for part in share.ranges]
        for low, high in itertools.pairwise([0, *itertools.chain(*mine), 4 * MIB]):
            if (low, high) not in mine:
                state["weights"][low:high] = 7
        ready.wait()
        if isinstance(share, FollowerFile):
            share.write(str(path), engine="auto", durable=False)
            return None
        fd = os.open(path, os.O_RDWR | os.O_CREAT)
        os.posix_fallocate(fd, 0, align_up(container.size_bytes, 4096))
        share.write(fd, str(path), engine="auto", pending_path=str(path))
        os.ftruncate(fd, container.size_bytes)
        os.close(fd)
        return None

    path = tmp_path / "state.pt"
    assert run_threads(2, work) == [None, None]
    assert torch.equal(torch.load(path)["weights"], torch.ones(4 * MIB, dtype=torch.uint8))
    assert fp.verify(path).ok


def test_rank_that_does_not_see_the_file_says_so(tmp_path: Path) -> None:
    def work(session: ThreadSession) -> Any:
        if session.rank == 0:
            return share_and_write(session, state_of(0), tmp_path / "state.pt", [0, 1])
        session.hear = lambda: hear().replace(b"state.pt", b"other.pt")  # type: ignore[method-assign]
        hear = ThreadSession.hear.__get__(session)
        return share_and_write(session, state_of(0), tmp_path / "state.pt", [0, 1])

    first, other = run_threads(2, work)
    assert isinstance(first, fp.PeerError)
    assert isinstance(other, fp.StorageError)
    assert "rank 1 cannot open" in str(other)
    assert "same file system" in str(other)


def test_four_messages_a_rank_are_at_most_a_kibibyte(tmp_path: Path) -> None:
    state = {f"layer{index}": torch.zeros(CUT_BYTES_MIN // 4 + 1024 * (index % 3)) for index in range(64)}
    told: list[int] = []

    def work(session: ThreadSession) -> Any:
        tell = session.tell
        session.tell = lambda message: told.append(len(message)) or tell(message)  # type: ignore[method-assign]
        outcome = share_and_write(session, state, tmp_path / "state.pt", list(range(4)))
        return outcome if session.rank == 0 else session.message_count

    outcomes = run_threads(4, work)
    assert outcomes[1:] == [3, 3, 3]  # and one more, which tells that it is published
    assert max(told) <= 1024


def test_what_stands_in_the_place_of_the_coordinators_file_is_not_followed(tmp_path: Path) -> None:
    victim, link = tmp_path / "victim", tmp_path / "link"
    victim.write_bytes(b"theirs")
    link.symlink_to(victim)

    def work(session: ThreadSession) -> Any:
        if session.rank:
            hear = session.hear
            session.hear = lambda: hear().replace(b"state.pt", b"link")  # type: ignore[method-assign]
        return share_and_write(session, state_of(0), tmp_path / "state.pt", [0, 1])

    _, other = run_threads(2, work)
    assert isinstance(other, fp.StorageError)
    assert "rank 1 cannot open" in str(other)
    assert victim.read_bytes() == b"theirs"


# --- files of a follower's own


@contextmanager
def own_file(name: str, obj: object, directory: Path) -> Iterator[Callable[[], tuple[FileEntry, list[str]]]]:
    """Capture an object for a file of this name; give what writes it, and then returns its entry and what was made."""
    owners = Owners(None, (), "optimizer")
    final_path = str(directory / name)
    container = container_for(obj, final_path, checksum=True)
    capture, snapshot, _ = capture_file(
        container, owners, arena=Arena(), spread=Spread(), on_gate=lambda _: None, look=owners.look
    )
    pending = PendingSave(final_path, SaveStats(path=final_path))
    captured = threading.Event()
    pending.begin(capture, captured.set)
    assert captured.wait(PATIENCE_S)
    made: list[str] = []

    def write() -> tuple[FileEntry, list[str]]:
        file = OwnFile(name, final_path, container, capture, snapshot)
        entry, _ = file.write(str(directory), 1, engine="auto", durable=True, poll=lambda _: None, made=made.append)
        return entry, made

    try:
        yield write
    finally:
        capture.release()


def test_own_file_lies_below_directories_that_it_makes(tmp_path: Path) -> None:
    state = {"x": torch.arange(10_000)}
    (tmp_path / "a").mkdir()
    with own_file("a/b/c.pt", state, tmp_path) as write:
        entry, made = write()
    data = (tmp_path / "a/b/c.pt").read_bytes()
    assert data == expected_file(state, tmp_path / "c.pt")
    assert entry == FileEntry("a/b/c.pt", len(data), _native.crc32(data))
    assert made == [str(tmp_path / name) for name in ("a", "a/b", "a/b/c.pt")], "who gives up removes them"


def test_name_that_two_ranks_save_is_an_error_of_the_second(tmp_path: Path) -> None:
    (tmp_path / "rng.pt").write_bytes(b"of another rank")
    with own_file("rng.pt", {"x": 1}, tmp_path) as write, pytest.raises(fp.ConfigError, match="another rank has saved"):
        write()
    assert (tmp_path / "rng.pt").read_bytes() == b"of another rank"


def test_own_file_in_a_directory_that_is_not_seen_needs_one_file_system(tmp_path: Path) -> None:
    with own_file("x.pt", {"x": 1}, tmp_path / "nothing") as write:
        with pytest.raises(fp.StorageError, match="same file system"):
            write()
