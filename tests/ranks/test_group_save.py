"""Directories and single files that several ranks write during training: each file once, byte for byte rank 0's."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.process_groups import rank_endings, run_ranks
from support.runs import Run, hidden_names
from support.sameness import assert_same
from support.training import PATIENCE_S

import fastpersist as fp
from fastpersist.distributed.follower_file import FollowerFile

SIZES = (400_000, 300_001, 5_000, 7)


def file_alone(obj: object, path: Path) -> bytes:
    path.parent.mkdir(parents=True, exist_ok=True)
    fp.save(obj, path)
    return path.read_bytes()


def test_several_files_are_written_by_all_and_published_at_once(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint-1"

    def work(rank: int, count: int) -> Any:
        run = Run(SIZES).advance()
        with fp.directory_save_together(path, dist.group.WORLD) as files:
            Path(files.path, "config.json").write_text(f"{rank}")
            files.add_bytes("vocabulary", b"of rank %d" % rank)
            files.save(torch.get_rng_state(), f"rng_{rank}.pt", own=True)
            files.save(run.model.state_dict(), "model.safetensors", run.optimizer)
            files.save({"rank": rank}, "plain.pt")
            files.save(run.optimizer.state_dict(), "parts/optimizer.pt", run.optimizer)
            pending = files.publish(step=1)
        run.advance()
        assert pending.result() == path
        assert rank == 0 or not os.path.exists(files.path)
        return pending.stats.bytes_by_rank

    by_rank = run_ranks(3, work)[0]
    assert sum(by_rank) > 5_000_000
    assert max(by_rank) - min(by_rank) <= 2 * 4096  # of two files
    run = Run(SIZES).advance()
    assert (path / "model.safetensors").read_bytes() == file_alone(
        run.model.state_dict(), tmp_path / "alone" / "model.safetensors"
    )
    assert (path / "parts" / "optimizer.pt").read_bytes() == file_alone(
        run.optimizer.state_dict(), tmp_path / "alone" / "optimizer.pt"
    )
    assert fp.load(path / "plain.pt") == {"rank": 0}
    assert (path / "config.json").read_text() == "0"
    assert (path / "vocabulary").read_bytes() == b"of rank 0"
    assert {entry.name for entry in path.iterdir()} >= {"rng_0.pt", "rng_1.pt", "rng_2.pt"}
    assert fp.verify(path).ok
    assert hidden_names(tmp_path) == []


def test_steps_wait_for_files_that_come_after_one_that_is_done(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"

    def work(rank: int, count: int) -> Any:
        first_is_done, has_stepped = threading.Event(), threading.Event()
        write = FollowerFile.write

        def slow(self: FollowerFile, *arguments: Any, **options: Any) -> str:
            if first_is_done.is_set():
                assert has_stepped.wait(PATIENCE_S)
            used = write(self, *arguments, **options)
            first_is_done.set()
            return used

        FollowerFile.write = slow  # type: ignore[method-assign]
        run = Run(SIZES).advance()
        with fp.directory_save_together(path, dist.group.WORLD) as files:
            files.save(run.model.state_dict(), "model.pt", run.optimizer)
            files.save(run.optimizer.state_dict(), "optimizer.pt", run.optimizer)
            pending = files.publish()
        assert rank == 0 or first_is_done.wait(PATIENCE_S)
        run.advance()
        has_stepped.set()
        pending.result()

    run_ranks(2, work)
    assert_same(fp.load(path / "optimizer.pt"), Run(SIZES).advance().optimizer.state_dict())


@pytest.mark.parametrize("failing", [0, 1])
def test_rank_that_raises_while_the_files_are_put_together_fails_all(tmp_path: Path, failing: int) -> None:
    path = tmp_path / "checkpoint"

    def work(rank: int, count: int) -> Any:
        with fp.directory_save_together(path, dist.group.WORLD) as files:
            files.save({"weights": torch.ones(300_000)}, "a.pt", constant=())
            if rank == failing:
                raise KeyError("a mistake of the program")
            files.save({"weights": torch.ones(300_000)}, "b.pt")
            files.publish().result()

    endings = rank_endings(2, work)
    assert endings[failing].error_type is KeyError
    assert endings[1 - failing].error_type is fp.PeerError
    assert "a mistake of the program" in endings[1 - failing].error_text
    assert list(tmp_path.iterdir()) == []


def test_ranks_that_save_other_files_are_told_so_and_the_next_save_works(tmp_path: Path) -> None:
    def work(rank: int, count: int) -> Any:
        with fp.directory_save_together(tmp_path / "a", dist.group.WORLD) as files:
            files.save({"x": 1}, "one.pt" if rank else "two.pt")
            error = files.publish().exception()
        with fp.directory_save_together(tmp_path / "b", dist.group.WORLD) as files:
            files.save({"x": 1}, "one.pt")
            files.publish().result()
        return error

    first, second = run_ranks(2, work)
    assert type(first) is fp.CoordinationError
    assert "two.pt" in str(first)
    assert isinstance(second, fp.PeerError)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["b"]


def test_taken_name_is_refused_for_all(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.mkdir()
    (path / "theirs").touch()

    def work(rank: int, count: int) -> Any:
        with fp.directory_save_together(path, dist.group.WORLD) as files:
            files.save({"x": 1}, "one.pt")
            files.publish().result()

    first, second = rank_endings(2, work)
    assert first.error_type is fp.ConfigError
    assert second.error_type is fp.PeerError
    assert (path / "theirs").exists()


def test_ranks_with_other_writers_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    path = tmp_path / "state.pt"

    def work(rank: int, count: int) -> None:
        fp.save({"w": torch.ones(1 << 20)}, path, process_group=dist.group.WORLD, writers=1 if rank else "all")

    coordinator, follower = rank_endings(2, work)
    assert coordinator.error_type is fp.ConfigError
    assert follower.error_type is fp.PeerError
    for ending in (coordinator, follower):
        assert "ranks 0 and 1 were given different writers=" in ending.error_text
    assert list(tmp_path.iterdir()) == []


def test_given_up_by_one_is_given_up_by_all(tmp_path: Path) -> None:
    def work(rank: int, count: int) -> Any:
        files = fp.directory_save_together(tmp_path / "a", dist.group.WORLD)
        files.save({"x": torch.ones(10)}, "one.pt")
        if rank == 1:
            time.sleep(0.2)  # until its part is written: the last word counts
            files.abort()
            files.abort()
            return None
        return files.publish().exception()

    error, _ = run_ranks(2, work)
    assert isinstance(error, fp.PeerError)
    assert "given up" in str(error)
    assert list(tmp_path.iterdir()) == []


def test_forked_child_leaves_what_its_parent_saves_alone(tmp_path: Path) -> None:
    def work(rank: int, count: int) -> Any:
        files = fp.directory_save_together(tmp_path / "a", dist.group.WORLD)
        child = os.fork()
        if child == 0:
            del files  # which would give it up
            os._exit(0)
        os.waitpid(child, 0)
        assert os.path.isdir(files.path)
        files.save({"x": torch.ones(10)}, "one.pt")
        files.publish().result()

    run_ranks(2, work)
    assert fp.verify(tmp_path / "a").ok


def test_group_of_one_makes_an_ordinary_one(tmp_path: Path) -> None:
    def work(rank: int, count: int) -> Any:
        return type(fp.directory_save_together(tmp_path / "a", dist.group.WORLD)) is fp.DirectorySave

    assert run_ranks(1, work) == [True]


@pytest.mark.parametrize("name", ["a.pt", "a.safetensors"])
@pytest.mark.parametrize("gate", ["optimizer", "manual"])
def test_single_file_is_written_by_all_beside_training(tmp_path: Path, name: str, gate: str) -> None:
    def work(rank: int, count: int) -> Any:
        run = Run(SIZES).advance()
        for _ in range(3):
            pending = fp.save_async(
                run.model.state_dict(),
                tmp_path / name,
                optimizer=run.optimizer,
                gate=gate,
                process_group=dist.group.WORLD,
            )
            if gate == "manual":
                pending.wait_captured()
            run.advance()
        pending.result()
        return pending.stats.bytes_by_rank

    first, second = run_ranks(2, work)
    assert abs(first[0] - first[1]) <= 4096
    assert sum(first) > 2_700_000
    assert second == []
    expected = Run(SIZES).advance(3).model.state_dict()
    assert (tmp_path / name).read_bytes() == file_alone(expected, tmp_path / "alone" / name)
    assert hidden_names(tmp_path) == []


def test_all_ranks_know_the_file_from_the_root_whatever_directory_they_are_in_later(tmp_path: Path) -> None:
    def work(rank: int, count: int) -> Any:
        os.chdir(tmp_path)
        pending = fp.save_async({"w": torch.ones(3)}, "model.pt", process_group=dist.group.WORLD)
        os.chdir("/")
        return pending.result(), pending.stats.path

    assert run_ranks(2, work) == [(tmp_path / "model.pt", str(tmp_path / "model.pt"))] * 2


def test_saves_to_several_paths_at_once_do_not_mix(tmp_path: Path) -> None:
    def work(rank: int, count: int) -> Any:
        run = Run(SIZES)
        pendings = []
        for index in range(6):
            run.advance()
            path = tmp_path / f"{index % 3}.pt"
            pendings.append(fp.save_async(run.state(), path, optimizer=run.optimizer, process_group=dist.group.WORLD))
            fp.save({"now": index}, tmp_path / "sync.pt", process_group=dist.group.WORLD)
        for pending in pendings:
            pending.result()

    run_ranks(2, work)
    for index in range(3):
        assert_same(fp.load(tmp_path / f"{index}.pt"), Run(SIZES).advance(index + 4).state())


def test_failure_of_one_rank_reaches_the_other_and_the_old_file_stays(tmp_path: Path) -> None:
    fp.save({"old": 1}, tmp_path / "a.pt")

    def work(rank: int, count: int) -> Any:
        engine = "auto" if rank == 0 else "no such engine"
        try:
            fp.save_async(
                {"x": torch.ones(10)}, tmp_path / "a.pt", engine=engine, process_group=dist.group.WORLD
            ).result()
        except fp.FastPersistError as error:
            return type(error)

    assert run_ranks(2, work) == [fp.PeerError, fp.ConfigError]
    assert fp.load(tmp_path / "a.pt") == {"old": 1}
