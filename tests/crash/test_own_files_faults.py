"""Each rank writes files of its own into one directory, and one of them fails, or is killed, before each call of it.

Whoever it was: the directory is there with the files of all ranks, or it is not there and every rank knows who it was;
what was there before loads; the next save of the same directory works and clears up.
"""

from __future__ import annotations

import errno
import os
import signal
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.forking import SMALL_RING
from support.process_groups import rank_endings, run_ranks
from support.rank_faults import Point, everybodys, kill_this_process, points_of, spread, wait_until, watched
from support.runs import hidden_names
from support.training import PATIENCE_S

import fastpersist as fp
from fastpersist.commit.filesystem import Filesystem, using


def names_of(rank: int) -> list[str]:
    return [f"rank_{rank}.pt", f"deep/rank_{rank}.pt"]


def begin_save(path: Path, rank: int, number: int) -> fp.PendingSave:
    """Save two files of this rank, which say which save it was."""
    with fp.directory_save_together(path, dist.group.WORLD, overwrite=True) as files:
        for name in names_of(rank):
            files.save({"number": number, "weights": torch.full((200_000,), number + rank)}, name, own=True)
        return files.publish()


def save(path: Path, rank: int, number: int) -> BaseException | None:
    try:
        return begin_save(path, rank, number).exception(PATIENCE_S)
    except fp.FastPersistError as error:  # before there was anything to publish
        return error


def number_in(path: Path, count: int) -> int:
    """Check that everything is there, and of one save; return of which."""
    assert fp.verify(path).ok
    names = [name for rank in range(count) for name in names_of(rank)]
    assert sorted(entry.name for entry in fp.inspect(path).files) == sorted(names)
    numbers = set()
    for rank in range(count):
        for name in names_of(rank):
            found = fp.load(path / name)
            assert torch.equal(found["weights"], torch.full((200_000,), found["number"] + rank))
            numbers.add(found["number"])
    (number,) = numbers
    return int(number)


def break_disk() -> None:
    raise fp.StorageError(errno.EIO, "the disk is broken", "here")


def test_each_call_of_each_rank_that_fails_fails_the_save_on_all(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"

    def work(rank: int, count: int) -> tuple[list[str], set[str]]:
        assert save(path, rank, 1) is None
        with watched() as counts:
            assert save(path, rank, 2) is None
        told = everybodys(counts)
        points = [(one, point) for one in range(count) for point in points_of(told[one])]
        wrong, number = [], 2
        for victim, point in points:
            if point.name.startswith("Session.") or point.name in ("unlink", "remove_directory"):
                continue  # the latter remove what was replaced, and are not needed
            number += 1
            with watched(point if rank == victim else None, break_disk):
                error = save(path, rank, number)
            errors = everybodys(error)
            dist.barrier()
            if rank == 0:
                there = number_in(path, count)
                text = f"{point} of rank {victim}: save {there} is there, {errors}"
                # What rank 0 syncs at the end may fail when everything is visible.
                if there == number and (victim != 0 or point.name != "sync_directory") and any(errors):
                    wrong.append(f"told to have failed: {text}")
                if there != number and not all(errors):
                    wrong.append(f"told to be saved: {text}")
                for other, one in enumerate(errors):
                    if one is not None and other != victim and not (type(one) is fp.PeerError and one.rank == victim):
                        wrong.append(f"rank {other} was not told who it was: {text}")
            dist.barrier()
        assert save(path, rank, number + 1) is None
        return wrong, {point.name for one, point in points if one != 0}

    (wrong, calls_of_others), *_ = run_ranks(2, work, environment=SMALL_RING)
    assert not wrong, "\n".join(wrong)
    assert calls_of_others >= {"create", "make_directory", "allocate", "truncate", "sync", "Writer.finish"}
    assert calls_of_others >= {"Session.offered", "Session.tell", "Session.hear"}
    assert hidden_names(tmp_path) == []


@pytest.mark.parametrize("is_full", [False, True])
def test_what_a_rank_makes_when_the_first_one_has_given_up_does_not_stay(tmp_path: Path, is_full: bool) -> None:
    making, removed = tmp_path / "making", tmp_path / "removed"
    path = tmp_path / "root" / "checkpoint"
    path.parent.mkdir()

    class Late(Filesystem):
        """Makes the directory of the second file, and that, when rank 0 has removed all that it has found."""

        def make_directory(self, path: str, mode: int = 0o777) -> None:
            making.touch()
            wait_until(removed.exists)
            super().make_directory(path, mode)

        def create(self, path: str, mode: int = 0o666) -> int:
            if is_full and removed.exists():
                break_disk()
            return super().create(path, mode)

    class Removing(Filesystem):
        """There was always something new in the directory when it was to be removed."""

        def remove_directory(self, path: str) -> None:
            if making.exists() and not removed.exists():
                raise fp.StorageError(errno.ENOTEMPTY, "directory not empty", path)
            super().remove_directory(path)

    def work(rank: int, count: int) -> BaseException | None:
        error = None
        with using(Late() if rank else Removing()):
            if rank:
                error = save(path, rank, 1)
            else:
                files = fp.directory_save_together(path, dist.group.WORLD, overwrite=True)
                files.save({}, "first.pt", own=True)
                wait_until(making.exists)
                files.abort()
                removed.touch()
        dist.barrier()
        assert rank or list(path.parent.iterdir()) == []
        dist.barrier()
        assert save(path, rank, 2) is None
        return error

    error = run_ranks(2, work)[1]
    assert isinstance(error, fp.PeerError)
    assert number_in(path, 2) == 2


def test_rank_whose_directory_is_gone_waits_for_the_news_why(tmp_path: Path) -> None:
    missed = tmp_path / "missed"

    class Gone(Filesystem):
        def create(self, path: str, mode: int = 0o666) -> int:
            missed.touch()
            raise fp.StorageError(errno.ENOENT, "it is gone, and over a network the news may come later", path)

    def work(rank: int, count: int) -> BaseException | None:
        if rank:
            with using(Gone()):
                return save(tmp_path / "checkpoint", rank, 1)
        files = fp.directory_save_together(tmp_path / "checkpoint", dist.group.WORLD)
        files.save({}, "first.pt", own=True)
        wait_until(missed.exists)
        files.abort()
        return None

    error = run_ranks(2, work)[1]
    assert isinstance(error, fp.PeerError), error
    assert "given up" in str(error)


def test_the_first_rank_does_not_take_for_its_own_what_a_failure_of_another_one_does_to_it(tmp_path: Path) -> None:
    def deep() -> list[Path]:
        return list(tmp_path.glob(".checkpoint.pending-*/deep"))

    class Broken(Filesystem):
        def create(self, path: str, mode: int = 0o666) -> int:
            if path.endswith("deep/rank_1.pt"):
                wait_until((tmp_path / "first_is_there").exists)
                break_disk()
            return super().create(path, mode)

    class Waiting(Filesystem):
        """Makes its second file when the other rank has given up, and removed the directory that is for both."""

        def create(self, path: str, mode: int = 0o666) -> int:
            if path.endswith("deep/rank_0.pt"):
                (tmp_path / "first_is_there").touch()
                wait_until(lambda: not deep())
            return super().create(path, mode)

    def work(rank: int, count: int) -> BaseException | None:
        with using(Broken() if rank else Waiting()):
            return save(tmp_path / "checkpoint", rank, 1)

    first, other = run_ranks(2, work)
    assert isinstance(first, fp.PeerError), first
    assert first.rank == 1
    assert "the disk is broken" in str(first)
    assert isinstance(other, fp.StorageError)
    assert hidden_names(tmp_path) == []


def test_the_first_rank_that_gives_up_does_not_wait_for_a_rank_that_comes_late(tmp_path: Path) -> None:
    def work(rank: int, count: int) -> BaseException | None:
        assert save(path, rank, 1) is None  # from here on they know each other
        if rank:
            dist.barrier()
            return save(path, rank, 2)
        files = fp.directory_save_together(path, dist.group.WORLD, overwrite=True)
        files.save({"number": 2}, "shared.pt")  # the thread that writes waits for the other rank
        files.abort()
        dist.barrier()
        return None

    path = tmp_path / "checkpoint"
    other = run_ranks(2, work)[1]
    assert isinstance(other, fp.PeerError)
    assert "given up" in str(other)
    assert number_in(path, 2) == 1
    assert hidden_names(tmp_path) == []


def test_what_the_first_rank_cannot_save_the_others_hear_of_at_once(tmp_path: Path) -> None:
    def work(rank: int, count: int) -> BaseException | None:
        path = tmp_path / "checkpoint"
        assert save(path, rank, 1) is None  # from here on they know each other
        files = fp.directory_save_together(path, dist.group.WORLD, overwrite=True)
        error = None
        if rank == 0:
            with pytest.raises(TypeError, match="pickle"):
                files.save({"lock": threading.Lock()}, "shared.pt")
        else:
            files.save({"lock": None}, "shared.pt")
            error = files.publish().exception(PATIENCE_S)
        dist.barrier()  # until here the first rank has not given up
        files.abort()
        return error

    other = run_ranks(2, work)[1]
    assert isinstance(other, fp.PeerError)
    assert other.rank == 0
    assert "cannot pickle" in str(other)
    assert number_in(tmp_path / "checkpoint", 2) == 1
    assert hidden_names(tmp_path) == []


def save_twice(rank: int, count: int, path: Path, victim: int, point: Point | None) -> tuple[Any, Counter[str]]:
    """Save one number, and then the next one, in which `victim` is killed at a point."""
    number = number_in(path, count) if path.exists() else 0
    dist.barrier()
    assert save(path, rank, number + 1) is None
    assert rank != 0 or hidden_names(path.parent) == []
    dist.barrier()
    with watched(point if rank == victim else None, kill_this_process) as counts:
        error = save(path, rank, number + 2)
    return (number + 1, error), counts


@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.long)])
def test_rank_killed_before_each_call(tmp_path: Path, count: int, request: pytest.FixtureRequest) -> None:
    path = tmp_path / "checkpoint"
    outcomes = run_ranks(count, save_twice, path, 0, None, environment=SMALL_RING)
    points = [(rank, point) for rank, (_, counts) in enumerate(outcomes) for point in points_of(counts)]
    assert {point.name for rank, point in points if rank} >= {"Session.offered", "Session.tell", "create", "sync"}
    assert {point.name for rank, point in points if not rank} >= {"Session.offer", "Session.announce", "Session.gather"}
    wrong = []
    for victim, point in spread(points, request.config.getoption("--kills")):
        endings = rank_endings(count, save_twice, path, victim, point, environment=SMALL_RING)
        there = number_in(path, count)
        for rank, ending in enumerate(endings):
            text = f"rank {rank} when rank {victim} was killed at {point}: {ending.trace or ending.result}, {there}"
            if rank == victim:
                assert ending.signal == signal.SIGKILL, text
                continue
            (durable, error), _ = ending.result
            if error is not None and not (isinstance(error, fp.PeerError) and error.rank == victim):
                wrong.append(f"it does not know who it was: {text}")
            if there not in ([durable + 1] if error is None else [durable, durable + 1] if victim == 0 else [durable]):
                wrong.append(f"it is not what is there: {text}")
    assert not wrong, "\n".join(wrong)
    run_ranks(count, save_twice, path, 0, None, environment=SMALL_RING)
    assert hidden_names(tmp_path) == []
    assert os.listdir(tmp_path) == ["checkpoint"]
