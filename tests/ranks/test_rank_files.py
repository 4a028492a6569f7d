"""Files of one rank alone, in a directory that several ranks save: written at the same time, published together."""

from __future__ import annotations

import multiprocessing
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.forking import SMALL_RING
from support.process_groups import rank_endings, run_ranks
from support.runs import Run, held_writers, hidden_names
from support.sameness import assert_same
from support.training import PATIENCE_S

import fastpersist as fp
from fastpersist import _native
from fastpersist.commit.filesystem import Filesystem, using
from fastpersist.distributed import group_save
from fastpersist.distributed.coordination import Ranks
from fastpersist.distributed.messages import encoded
from fastpersist.distributed.node_local.publishing import CoordinatorStores
from fastpersist.distributed.sessions import Session
from fastpersist.saving.directory_files import DirectoryFiles

SIZES = (400_000, 300_001, 7)
SHORT_S = 1.0
"""The deadline, where it is to be passed."""


def begin(path: Path) -> fp.DirectorySave | fp.PeerDirectorySave:
    return fp.directory_save_together(path, dist.group.WORLD)


def save_own(path: Path, rank: int, names: list[str] | None = None) -> fp.PendingSave:
    """Save files that are this rank's alone, and publish."""
    with begin(path) as files:
        for name in [f"rank_{rank}.pt"] if names is None else names:
            files.save({"rank": rank, "name": name, "weights": torch.full((300_000,), rank + 0.5)}, name, own=True)
        return files.publish()


def expect_own(path: Path, names_by_rank: dict[int, list[str]]) -> None:
    """Check that these files are published, that nothing else is, and that the manifest knows each of them."""
    entries = {entry.name: entry for entry in fp.inspect(path).files}
    assert sorted(entries) == sorted(name for names in names_by_rank.values() for name in names)
    for rank, names in names_by_rank.items():
        for name in names:
            found = fp.load(path / name)
            assert (found["rank"], found["name"]) == (rank, name)
            assert torch.equal(found["weights"], torch.full((300_000,), rank + 0.5))
            data = (path / name).read_bytes()
            assert (entries[name].size_bytes, entries[name].crc32) == (len(data), _native.crc32(data))
    assert fp.verify(path).ok
    assert hidden_names(path.parent) == []


class Disk(Filesystem):
    """Tells, or waits, when a file is about to be written, and when one is synced."""

    def __init__(
        self, before: Callable[[str], object] = lambda _: None, synced: Callable[[str], object] = lambda _: None
    ) -> None:
        self._before = before
        self._synced = synced

    def allocate(self, fd: int, size_bytes: int, path: str) -> None:
        self._before(path)
        super().allocate(fd, size_bytes, path)

    def sync(self, fd: int, path: str) -> None:
        super().sync(fd, path)
        self._synced(path)


# --- all at once


@pytest.mark.parametrize(("count", "held"), [(2, 0), (2, 1), (4, 0), (4, 3)])
def test_each_rank_writes_its_own_while_another_one_has_not_written_a_byte(
    tmp_path: Path, count: int, held: int
) -> None:
    path = tmp_path / "checkpoint"
    are_written = [multiprocessing.Event() for _ in range(count)]

    def wait_for_others(_: str) -> None:
        for rank, is_written in enumerate(are_written):
            assert rank == held or is_written.wait(PATIENCE_S), f"rank {rank} waits for rank {held}"
        assert not path.exists()

    def work(rank: int, count: int) -> None:
        disk = Disk(before=wait_for_others) if rank == held else Disk(synced=lambda _: are_written[rank].set())
        with using(disk):
            save_own(path, rank).result()

    if held != 0:  # which syncs when nobody gives it another file
        are_written[0].set()
    run_ranks(count, work)
    expect_own(path, {rank: [f"rank_{rank}.pt"] for rank in range(count)})


def test_file_of_another_rank_is_written_while_the_first_one_has_none_and_waits_for_a_shared_one(
    tmp_path: Path,
) -> None:
    path = tmp_path / "checkpoint"
    is_written = multiprocessing.Event()

    def work(rank: int, count: int) -> None:
        with using(Disk(synced=lambda _: is_written.set())), begin(path) as files:
            if rank == 1:
                files.save({"rank": 1}, "own.pt", own=True)
                assert is_written.wait(PATIENCE_S)  # and not behind the part of what follows
            files.save({"shared": torch.ones(500_000)}, "shared.pt", constant=())
            files.publish().result()

    run_ranks(2, work)
    assert sorted(entry.name for entry in fp.inspect(path).files) == ["own.pt", "shared.pt"]
    assert fp.load(path / "own.pt") == {"rank": 1}


@pytest.mark.parametrize("first", [0, 1])
def test_no_rank_waits_on_its_training_thread_for_one_that_comes_later(tmp_path: Path, first: int) -> None:
    path = tmp_path / "checkpoint"
    has_returned = multiprocessing.Event()

    def work(rank: int, count: int) -> None:
        begin(tmp_path / "before").abort()  # they have met
        if rank != first:
            assert has_returned.wait(PATIENCE_S)
        pending = save_own(path, rank)
        if rank == first:
            assert not pending.done()
            has_returned.set()
        pending.result()

    run_ranks(2, work)
    expect_own(path, {0: ["rank_0.pt"], 1: ["rank_1.pt"]})


# --- what there may be


@pytest.mark.parametrize(
    "names_by_rank",
    [
        {0: ["a.pt"]},
        {1: ["a.pt"]},
        {2: ["a.pt", "b.pt", "c.pt"]},
        {0: ["here/a.pt"], 1: ["here/b.pt", "far/down/c.pt"], 2: ["far/down/d.pt"]},
        {},
    ],
)
def test_own_files_need_no_other_file_and_no_other_rank_to_have_some(
    tmp_path: Path, names_by_rank: dict[int, list[str]]
) -> None:
    path = tmp_path / "checkpoint"

    def work(rank: int, count: int) -> None:
        unread = mock.Mock(side_effect=AssertionError("it is known, and not read for its CRC"))
        with mock.patch.object(DirectoryFiles, "_read", unread):
            save_own(path, rank, names_by_rank.get(rank, [])).result()

    run_ranks(3, work)
    expect_own(path, names_by_rank)


def test_own_files_in_any_order_among_shared_ones_and_beside_the_next_step(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"

    def work(rank: int, count: int) -> int:
        run = Run(SIZES).advance(rank + 1)
        shared = Run(SIZES).advance()
        with held_writers():
            with begin(path) as files:
                if rank == 1:
                    files.save({"first": rank}, "first.pt", own=True)
                files.save(shared.model.state_dict(), "model.pt", shared.optimizer)
                files.save(run.optimizer.state_dict(), f"optimizer_{rank}.pt", run.optimizer, own=True)
                files.add_bytes("note", b"of rank 0")
                files.save(
                    {"weights": torch.full((9,), rank)},
                    f"last_{rank}",
                    format="safetensors",
                    metadata={"rank": str(rank)},
                    own=True,
                )
                pending = files.publish()
            run.advance(rank + 5)
        pending.result()
        return pending.stats.bytes_at_gate

    assert all(at_gate > 0 for at_gate in run_ranks(3, work))
    for rank in range(3):
        assert_same(fp.load(path / f"optimizer_{rank}.pt"), Run(SIZES).advance(rank + 1).optimizer.state_dict())
        assert fp.inspect(path / f"last_{rank}").metadata == {"rank": str(rank)}
    assert fp.load(path / "first.pt") == {"first": 1}
    assert fp.verify(path).ok


def test_file_comes_in_time_when_the_first_rank_has_called_publish_and_not_after_its_own(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    has_published = multiprocessing.Event()

    def work(rank: int, count: int) -> None:
        files = begin(path)
        if rank == 0:
            pending = files.publish()
            has_published.set()
        else:
            assert has_published.wait(PATIENCE_S)
            files.save({"rank": 1, "name": "a.pt", "weights": torch.full((300_000,), 1.5)}, "a.pt", own=True)
            pending = files.publish()
            with pytest.raises(fp.ConfigError, match="published or aborted already"):
                files.save({}, "b.pt", own=True)
        pending.result()

    run_ranks(2, work)
    expect_own(path, {1: ["a.pt"]})


# --- what it costs


def test_own_files_cost_two_messages_more_and_cost_nothing_where_there_are_none(tmp_path: Path) -> None:
    def work(rank: int, count: int) -> list[int]:
        found = []
        sessions: list[Session] = []
        begin_session = Ranks.begin

        def noted(self: Ranks, *arguments: Any, **options: Any) -> Session:
            sessions.append(begin_session(self, *arguments, **options))
            return sessions[-1]

        with mock.patch.object(Ranks, "begin", noted):
            for name, is_shared, is_own in (("shared", True, False), ("own", False, True), ("both", True, True)):
                with begin(tmp_path / name) as files:
                    if is_own:
                        files.save({"rank": rank}, f"rank_{rank}.pt", own=True)
                    if is_shared:
                        files.save({"x": torch.ones(500_000)}, "shared.pt")
                    files.publish().result()
                found.append(sessions[-1].message_count)
            with fp.Checkpointer(tmp_path / "run", process_group=dist.group.WORLD) as checkpoints:
                for step, rank_state in enumerate(
                    (None, None, {"rank": rank})
                ):  # the first one finds out who sees whom
                    checkpoints.save(step, {"x": torch.ones(500_000)}, rank_state=rank_state).result()
                    found.append(sessions[-1].message_count)
        return found

    _, (shared, own, both, _, step, step_with_own) = run_ranks(2, work)
    assert shared == 5
    assert own in (3, 4), "it may have asked before it was told"
    assert both in (6, 7)
    assert step == 5
    assert step_with_own in (6, 7), "it may have asked before it was told"


def test_step_that_begins_before_it_is_known_who_sees_whose_files_has_its_rank_states(tmp_path: Path) -> None:
    both_begun = threading.Event()
    find = CoordinatorStores.find

    def find_late(self: CoordinatorStores, *arguments: Any, **options: Any) -> None:
        assert both_begun.wait(PATIENCE_S)
        find(self, *arguments, **options)

    def work(rank: int, count: int) -> None:
        with mock.patch.object(CoordinatorStores, "find", find_late):
            with fp.Checkpointer(tmp_path / "run", process_group=dist.group.WORLD) as checkpoints:
                steps = [checkpoints.save(step, {"x": torch.ones(9)}, rank_state={"rank": rank}) for step in (1, 2)]
                both_begun.set()
                for step in steps:
                    step.result(PATIENCE_S)

    run_ranks(2, work)
    for step in (1, 2):
        assert fp.load(tmp_path / "run" / f"step-{step:08d}" / "rank-00001.pt") == {"rank": 1}


# --- what goes wrong


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_state_that_changes_before_it_is_captured_fails_all_and_names_the_rank(tmp_path: Path, failing: int) -> None:
    path = tmp_path / "checkpoint"

    def work(rank: int, count: int) -> BaseException | None:
        run = Run(SIZES).advance()
        with held_writers():
            with begin(path) as files:
                files.save(run.model.state_dict(), f"rank_{rank}.pt", run.optimizer, own=True)
                pending = files.publish()
            if rank == failing:
                with torch.no_grad():
                    run.model[0].add_(1)
        return pending.exception(PATIENCE_S)

    errors = run_ranks(3, work)
    for rank, error in enumerate(errors):
        if rank == failing:
            assert isinstance(error, fp.TornStateError)
        else:
            assert isinstance(error, fp.PeerError)
            assert error.rank == failing
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("rivals", [(0, 1), (1, 2)])
def test_two_files_of_one_name_fail_the_save(tmp_path: Path, rivals: tuple[int, int]) -> None:
    def work(rank: int, count: int) -> BaseException | None:
        error = save_own(tmp_path / "a", rank, ["same/name.pt"] if rank in rivals else []).exception(PATIENCE_S)
        save_own(tmp_path / "b", rank).result()
        return error

    errors = run_ranks(3, work)
    (second,) = [rank for rank, error in enumerate(errors) if isinstance(error, fp.ConfigError)]
    assert second in rivals
    for error in errors:
        assert "same/name.pt is in" in str(error)
        assert isinstance(error, fp.ConfigError) or (isinstance(error, fp.PeerError) and error.rank == second)
    assert [one.name for one in tmp_path.iterdir()] == ["b"]


def test_what_somebody_has_put_there_is_not_overwritten(tmp_path: Path) -> None:
    def work(rank: int, count: int) -> BaseException | None:
        with begin(tmp_path / "a") as files:
            if rank == 0:
                Path(files.path, "rank_1.pt").write_bytes(b"theirs")
            dist.barrier()
            if rank == 1:
                files.save({"rank": rank}, "rank_1.pt", own=True)
            return files.publish().exception(PATIENCE_S)

    first, second = run_ranks(2, work)
    assert isinstance(first, fp.PeerError)
    assert isinstance(second, fp.ConfigError)
    assert "another program has put one there" in str(second)


@pytest.mark.parametrize("loser", [0, 1])
@pytest.mark.parametrize("way", ["abort", "forget", "raise"])
def test_save_that_one_rank_gives_up_leaves_nothing_of_what_others_have_written(
    tmp_path: Path, loser: int, way: str
) -> None:
    is_written = multiprocessing.Event()

    def give_up(files: fp.DirectorySave | fp.PeerDirectorySave) -> None:
        if way == "abort":
            files.abort()
        elif way == "raise":
            with pytest.raises(KeyError), files:
                raise KeyError("a mistake")

    def work(rank: int, count: int) -> BaseException | None:
        with using(Disk(synced=lambda _: is_written.set())):
            files = begin(tmp_path / "a")
            files.save({"rank": rank}, f"deep/rank_{rank}.pt", own=True)
            if rank == loser:
                assert is_written.wait(PATIENCE_S) or rank  # rank 0 itself syncs when it publishes
                give_up(files)
                del files
                error = None
            else:
                error = files.publish().exception(PATIENCE_S)
            save_own(tmp_path / "b", rank).result()
        return error

    error = run_ranks(2, work)[1 - loser]
    assert isinstance(error, fp.PeerError)
    assert error.rank == loser
    assert ("a mistake" if way == "raise" else "given up") in str(error)
    assert [one.name for one in tmp_path.iterdir()] == ["b"]


def impatient(seconds: float = SHORT_S) -> None:
    """Have the ranks of the group meet with a short deadline."""
    group = dist.group.WORLD
    group_save._met[group] = (Ranks.meet(group, timeout_s=seconds), None)


@pytest.mark.parametrize("late", [0, 1])
def test_rank_that_comes_after_the_deadline_is_waited_for(tmp_path: Path, late: int) -> None:
    def work(rank: int, count: int) -> float:
        impatient()
        files = begin(tmp_path / "a")
        if rank == late:
            time.sleep(3 * SHORT_S)
        started_s = time.monotonic()
        files.save({"rank": rank}, f"rank_{rank}.pt", own=True)
        files.publish().result(PATIENCE_S)
        return time.monotonic() - started_s

    assert run_ranks(2, work)[1 - late] > 2 * SHORT_S
    assert sorted(path.name for path in (tmp_path / "a").glob("rank_*")) == ["rank_0.pt", "rank_1.pt"]


@pytest.mark.parametrize("slow", [0, 1])
def test_rank_that_writes_for_longer_than_the_deadline_is_not_silent(tmp_path: Path, slow: int) -> None:
    path = tmp_path / "a"

    def work(rank: int, count: int) -> float:
        impatient()
        started_s = time.monotonic()
        if rank == slow:
            _native.set_fault_plan(_native.FaultPlan(op="write", count=1 << 62, kind="delay", delay_ms=150))
        engine = "fault:threads" if rank == slow else "auto"
        with fp.directory_save_together(path, dist.group.WORLD, engine=engine) as files:
            weights = torch.full((300_000,), rank + 0.5)
            files.save({"rank": rank, "name": f"{rank}.pt", "weights": weights}, f"{rank}.pt", own=True)
            files.publish().result()
        _native.clear_fault_plan()
        return time.monotonic() - started_s

    assert min(run_ranks(2, work, environment=SMALL_RING)) > 1.5 * SHORT_S, "it was not slow"
    expect_own(path, {0: ["0.pt"], 1: ["1.pt"]})


def test_failure_is_known_on_all_ranks_before_those_who_write_are_through(tmp_path: Path) -> None:
    has_failed, may_go = multiprocessing.Event(), threading.Event()

    def fail(path: str) -> None:
        raise fp.StorageError(5, "a broken disk", path)

    def work(rank: int, count: int) -> BaseException | None:
        if rank == 2:
            with using(Disk(before=lambda _: may_go.wait(PATIENCE_S))):
                pending = save_own(tmp_path / "a", rank, ["1.pt", "2.pt"])
                assert has_failed.wait(PATIENCE_S)
                may_go.set()
                return pending.exception(PATIENCE_S)
        with using(Disk(before=fail) if rank == 1 else Disk()):
            error = save_own(tmp_path / "a", rank).exception(PATIENCE_S)
            has_failed.set()
            return error

    first, second, third = run_ranks(3, work)
    assert "a broken disk" in str(second)
    for error in (first, third):
        assert isinstance(error, fp.PeerError)
        assert error.rank == 1
        assert "a broken disk" in str(error)
    assert list(tmp_path.iterdir()) == []


def test_file_that_the_first_rank_cannot_write_is_told_before_it_has_put_the_rest_together(tmp_path: Path) -> None:
    is_known = multiprocessing.Event()

    def fail(path: str) -> None:
        raise fp.StorageError(5, "a broken disk", path)

    def work(rank: int, count: int) -> BaseException | None:
        with using(Disk() if rank else Disk(before=fail)), begin(tmp_path / "a") as files:
            files.save({"rank": rank}, f"rank_{rank}.pt", own=True)
            if rank == 0:
                assert is_known.wait(PATIENCE_S)
                files.save({"late": 1}, "late.pt", own=True)
            error = files.publish().exception(PATIENCE_S)
            is_known.set()
        return error

    first, second = run_ranks(2, work)
    assert type(first) is fp.StorageError
    assert isinstance(second, fp.PeerError)
    assert "a broken disk" in str(second)
    assert list(tmp_path.iterdir()) == []


def test_ranks_that_do_not_see_the_directory_say_so(tmp_path: Path) -> None:
    def work(rank: int, count: int) -> None:
        files = begin(tmp_path / "a")
        if rank == 1:
            assert isinstance(files, fp.PeerDirectorySave)
            with mock.patch.object(Session, "offered", return_value=encoded({"path": str(tmp_path / "another disk")})):
                files.save({"rank": 1}, "rank_1.pt", own=True)
                error = files.publish().exception(PATIENCE_S)
            assert error is not None
            raise error
        files.publish().result(PATIENCE_S)

    first, second = rank_endings(2, work)
    assert second.error_type is fp.StorageError
    assert "need the same file system" in second.error_text
    assert first.error_type is fp.PeerError
    assert "need the same file system" in first.error_text
    assert list(tmp_path.iterdir()) == []
