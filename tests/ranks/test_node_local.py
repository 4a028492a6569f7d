"""Ranks that share no file system: what each gets of a step, how it comes back, and what is said if it cannot."""

from __future__ import annotations

import json
import logging
import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.process_groups import rank_endings, run_ranks
from support.rank_faults import empty_disk_over
from support.runs import Run, hidden_names
from support.sameness import assert_same
from support.sandbox import needs_root
from support.store_runs import SIZES, checkpoints_at, ordinary_file, resume, step_path, train, two_stores

import fastpersist as fp
from fastpersist.checkpointer.merge import merge
from fastpersist.commit.filesystem import Filesystem, using
from fastpersist.events.delivery import flush


def merged(directory: Path, roots: list[Path], step: int) -> bytes:
    out = directory / "merged.pt"
    merge([step_path(root, step) for root in dict.fromkeys(roots)], out, overwrite=True)
    return out.read_bytes()


# --- what is there


@pytest.mark.parametrize(("count", "stores"), [(2, "ab"), (4, "aabb"), (4, "abab"), (3, "abc")])
def test_each_store_has_its_part_and_together_they_are_the_ordinary_file(
    tmp_path: Path, count: int, stores: str
) -> None:
    roots = [tmp_path / name for name in stores]
    run_ranks(count, train, roots, 3)
    for step in (1, 3):
        assert merged(tmp_path, roots, step) == ordinary_file(tmp_path, step)
    sizes = []
    for root in dict.fromkeys(roots):
        path = step_path(root, 3)
        ranks = [rank for rank in range(count) if roots[rank] == root]
        names = [f"rank-{rank:05d}.pt" for rank in ranks] + [f"state.pt.part-{rank:05d}" for rank in ranks]
        assert sorted(found.name for found in path.iterdir()) == ["MANIFEST.json", "PARTS.json", *names]
        assert fp.verify(path).ok
        assert fp.verify(path).has_checksums
        assert fp.Checkpointer(root).steps() == [1, 2, 3]
        assert (root / "LATEST").read_text() == "step-00000003\n"
        assert hidden_names(root) == []
        for rank in ranks:
            assert fp.load(path / f"rank-{rank:05d}.pt") == {"rank": rank, "step": 3}
            sizes.append((path / f"state.pt.part-{rank:05d}").stat().st_size)
        others = [rank for rank in range(count) if rank not in ranks]
        assert all(str(rank) in str(fp.inspect(path).host["other_parts"]) for rank in others)
    assert max(sizes) - min(sizes) < 100_000  # each has written its share
    tokens = {json.loads((step_path(root, 3) / "PARTS.json").read_text())["token"] for root in roots}
    assert len(tokens) == 1


def test_ranks_that_see_one_directory_by_two_names_are_one_store(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "link").symlink_to("a")
    run_ranks(2, train, [tmp_path / "a", tmp_path / "link"], 2)
    assert (step_path(tmp_path / "a", 2) / "state.pt").read_bytes() == ordinary_file(tmp_path, 2)
    assert not (step_path(tmp_path / "a", 2) / "PARTS.json").exists()


def test_it_is_said_once_that_there_is_no_shared_file_system(tmp_path: Path) -> None:
    roots = two_stores(tmp_path)

    def work(rank: int, count: int) -> list[str]:
        found: list[str] = []
        handler = logging.Handler(logging.WARNING)
        handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("fastpersist").addHandler(handler)
        train(rank, count, roots, 3)
        return found

    first, other = run_ranks(2, work)
    assert len(first) == 1
    assert "fastpersist merge" in first[0]
    assert other == []


def test_writer_that_is_alone_writes_all_and_the_other_store_still_loads(tmp_path: Path) -> None:
    roots = two_stores(tmp_path)

    def work(rank: int, count: int) -> int:
        run = Run(SIZES).advance()
        with fp.Checkpointer(
            roots[rank], optimizer=run.optimizer, process_group=dist.group.WORLD, writers=1, node_local="parts"
        ) as checkpoints:
            checkpoints.save(1, run.state(), rank_state={"rank": rank, "step": 1})
        return resume(rank, count, roots)

    assert run_ranks(2, work) == [1, 1]
    assert (step_path(roots[0], 1) / "state.pt.part-00000").read_bytes() == ordinary_file(tmp_path, 1)
    names = sorted(found.name for found in step_path(roots[1], 1).iterdir())
    assert names == ["MANIFEST.json", "PARTS.json", "rank-00001.pt"]


def test_retention_keeps_the_same_steps_in_all_stores(tmp_path: Path) -> None:
    roots = two_stores(tmp_path)

    def work(rank: int, count: int) -> None:
        run = Run(SIZES)
        with checkpoints_at(roots[rank], run, keep=1, keep_best=(1, "loss", "min")) as checkpoints:
            for loss in (3.0, 1.0, 2.0, 4.0):
                run.advance()
                metrics = {"loss": loss} if rank == 0 else None  # rank 0's word counts
                checkpoints.save(run.step, run.state(), metrics=metrics).result()

    run_ranks(2, work)
    assert [fp.Checkpointer(root).steps() for root in roots] == [[2, 4], [2, 4]]
    assert fp.inspect(step_path(roots[1], 2)).metrics == {"loss": 1.0}


def test_what_was_never_committed_takes_the_place_of_no_step_that_was(tmp_path: Path) -> None:
    roots = two_stores(tmp_path)
    run_ranks(2, train, roots, 2)
    shutil.copytree(step_path(roots[1], 2), step_path(roots[1], 3))  # as a save leaves it that died between the renames

    def work(rank: int, count: int) -> None:
        train(rank, count, roots, 1, first=4, keep=2)

    run_ranks(2, work)
    assert fp.Checkpointer(roots[0]).steps() == [2, 4]
    assert {2, 4} <= set(fp.Checkpointer(roots[1]).steps())


@needs_root
def test_mounts_of_one_path_are_two_stores(tmp_path: Path) -> None:
    root = tmp_path / "run"
    root.mkdir()

    def work(rank: int, count: int) -> Any:
        if rank == 0:
            train(rank, count, [root, root], 2)
            return resume(rank, count, [root, root])
        with empty_disk_over(root):
            train(rank, count, [root, root], 2)
            names = sorted(found.name for found in step_path(root, 2).iterdir())
            assert names == ["MANIFEST.json", "PARTS.json", "rank-00001.pt", "state.pt.part-00001"]
            return resume(rank, count, [root, root])

    assert run_ranks(2, work) == [2, 2]
    assert not (step_path(root, 2) / "state.pt.part-00001").exists()


@needs_root
def test_mount_that_comes_between_two_saves_is_noticed_and_the_next_save_finds_out_anew(tmp_path: Path) -> None:
    root = tmp_path / "run"

    def work(rank: int, count: int) -> Any:
        run = Run(SIZES).advance()
        checkpoints = checkpoints_at(root, run, on_error="warn")
        checkpoints.save(1, run.state()).result()
        dist.barrier()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if rank:
                with empty_disk_over(root):
                    failed = checkpoints.save(2, run.advance().state()).exception()
                    checkpoints.save(3, run.advance().state()).result()
                    names = [found.name for found in step_path(root, 3).iterdir()]
            else:
                failed = checkpoints.save(2, run.advance().state()).exception()
                checkpoints.save(3, run.advance().state()).result()
                names = [found.name for found in step_path(root, 3).iterdir()]
        dist.barrier()
        return type(failed), sorted(names)

    first, second = run_ranks(2, work)
    assert first == (fp.PeerError, ["MANIFEST.json", "PARTS.json", "state.pt.part-00000"])
    assert second == (fp.StorageError, ["MANIFEST.json", "PARTS.json", "state.pt.part-00001"])
    assert (step_path(root, 1) / "state.pt").exists()


# --- how it comes back


def test_step_comes_back_on_other_hosts_and_on_more_and_fewer_of_them(tmp_path: Path) -> None:
    roots = two_stores(tmp_path, 4)
    run_ranks(4, train, roots, 1)
    first, second = roots[0], roots[3]
    assert run_ranks(4, resume, roots) == [1] * 4
    assert run_ranks(4, resume, roots[::-1]) == [1] * 4  # each gets its rank_state, from the other host

    def resume_warned(rank: int, count: int, roots: list[Path]) -> int:
        with pytest.warns(RuntimeWarning, match="was saved by 4 ranks"):
            return resume(rank, count, roots)

    assert run_ranks(2, resume_warned, [second, first]) == [1] * 2
    assert run_ranks(3, resume_warned, [tmp_path / "new", second, first]) == [1] * 3


@pytest.mark.parametrize("different", ["map_location", "into", "nothing"])
def test_ranks_may_want_different_bytes(tmp_path: Path, different: str) -> None:
    roots = two_stores(tmp_path)
    run_ranks(2, train, roots, 1)

    def work(rank: int, count: int) -> Any:
        run = Run(SIZES)
        expected = Run(SIZES).advance(1)
        with checkpoints_at(roots[rank], run) as checkpoints:
            if rank == 0:
                whole = checkpoints.load()
                assert torch.equal(whole["model"]["0"], expected.model[0])
                return whole["step"]
            if different == "map_location":  # for stock torch.load, which wants all of the file
                found = checkpoints.load(map_location=lambda storage, location: storage)
                assert_same(found["optimizer"], expected.optimizer.state_dict())
                return found["step"]
            if different == "nothing":
                return checkpoints.load(map_location="meta")["step"]
            found = checkpoints.load(into={"model": run.model})
            assert torch.equal(run.model[0], expected.model[0])
            return found["step"]

    assert run_ranks(2, work) == [1, 1]


def test_no_rank_reads_what_another_one_has(tmp_path: Path) -> None:
    roots = two_stores(tmp_path)
    run_ranks(2, train, roots, 1)

    def work(rank: int, count: int) -> set[str]:
        from fastpersist.distributed.node_local import exchange

        read, found = exchange.read_extents, set()

        def noted(fd: int, path: str, *arguments: Any, **options: Any) -> Any:
            found.add(Path(path).name)
            return read(fd, path, *arguments, **options)

        exchange.read_extents = noted  # type: ignore[assignment]
        resume(rank, count, roots)
        return {name for name in found if ".part-" in name}

    assert run_ranks(2, work) == [{"state.pt.part-00000"}, {"state.pt.part-00001"}]


def test_a_rank_state_that_is_not_wanted_is_not_left_open(tmp_path: Path) -> None:
    roots = two_stores(tmp_path)
    run_ranks(2, train, roots, 1)

    def work(rank: int, count: int) -> int:
        with fp.Checkpointer(roots[rank], process_group=dist.group.WORLD) as checkpoints:
            checkpoints.load(keys=["step"])
            flush(60)  # of events: whoever writes them has a file open meanwhile
            before = len(os.listdir("/proc/self/fd"))
            for _ in range(3):
                assert checkpoints.load(keys=["step"]) == {"step": 1}
            flush(60)
            return len(os.listdir("/proc/self/fd")) - before

    assert max(run_ranks(2, work)) <= 0  # the I/O thread may close meanwhile what the ranks met by


# --- what cannot be loaded


def test_one_process_is_told_what_is_missing_and_what_to_do(tmp_path: Path) -> None:
    roots = two_stores(tmp_path, 4)
    run_ranks(4, train, roots, 1)
    for root, others in ((roots[0], "ranks 2, 3"), (roots[3], "ranks 0, 1")):
        with pytest.raises(fp.UnsupportedError, match=rf"{others} \(written on .*fastpersist merge"):
            fp.Checkpointer(root).load()


def test_missing_store_is_named_and_load_goes_back_to_what_all_have(tmp_path: Path) -> None:
    roots = two_stores(tmp_path)
    run_ranks(2, train, roots, 2)
    shutil.rmtree(step_path(roots[1], 2))

    def back(rank: int, count: int) -> int:
        with pytest.warns(RuntimeWarning, match="step 2 cannot be loaded"):
            return resume(rank, count, roots)

    def explicit(rank: int, count: int) -> None:
        fp.Checkpointer(roots[rank], process_group=dist.group.WORLD).load(2)

    assert run_ranks(2, back) == [1, 1]
    for ending in rank_endings(2, explicit):
        assert "no rank sees the parts of rank 1 (written on " in ending.error_text
        assert "fastpersist merge" in ending.error_text


@pytest.mark.parametrize("damage", ["tensor", "pickle", "gone", "record"])
def test_damaged_part_is_named_with_the_rank_that_wrote_it(tmp_path: Path, damage: str) -> None:
    roots = two_stores(tmp_path)
    run_ranks(2, train, roots, 1)
    writer = 0 if damage == "pickle" else 1
    part = step_path(roots[writer], 1) / f"state.pt.part-{writer:05d}"
    if damage == "gone":
        part.unlink()
    elif damage == "record":
        (part.parent / "PARTS.json").write_bytes(b"{" * (part.parent / "PARTS.json").stat().st_size)
    else:
        with part.open("r+b") as file:
            file.seek(part.read_bytes().index(b"optimizer") if damage == "pickle" else part.stat().st_size // 2)
            file.write(b"damage")

    def work(rank: int, count: int) -> None:
        fp.Checkpointer(roots[rank], process_group=dist.group.WORLD).load(1, verify=True)

    for ending in rank_endings(2, work):
        assert ending.error_type in (fp.ChecksumError, fp.FormatError, fp.PeerError), ending.trace
        if damage == "record":
            assert "PARTS.json" in ending.error_text
        else:
            assert f"state.pt.part-{writer:05d}" in ending.error_text
        if damage in ("tensor", "pickle"):
            assert f"rank {writer} has written it on " in ending.error_text
    if damage != "pickle":
        assert not fp.verify(part.parent).ok


def test_part_of_another_save_of_that_step_is_not_mixed_in(tmp_path: Path) -> None:
    roots = two_stores(tmp_path)
    run_ranks(2, train, roots, 1)
    shutil.copytree(step_path(roots[1], 1), tmp_path / "old")
    shutil.rmtree(step_path(roots[0], 1))
    shutil.rmtree(step_path(roots[1], 1))
    run_ranks(2, train, roots, 1)
    shutil.rmtree(step_path(roots[1], 1))
    shutil.copytree(tmp_path / "old", step_path(roots[1], 1))

    def work(rank: int, count: int) -> None:
        fp.Checkpointer(roots[rank], process_group=dist.group.WORLD).load(1)

    for ending in rank_endings(2, work):
        assert ending.error_type is fp.FormatError
        assert "parts of two saves" in ending.error_text


def test_step_that_one_rank_sees_whole_is_no_step_in_parts(tmp_path: Path) -> None:
    roots = two_stores(tmp_path)
    run_ranks(2, train, roots, 1)
    shutil.rmtree(step_path(roots[0], 1))
    with fp.Checkpointer(roots[0]) as alone:
        alone.save(1, Run(SIZES).advance(1).state()).result()

    def work(rank: int, count: int) -> None:
        fp.Checkpointer(roots[rank], process_group=dist.group.WORLD).load(1)

    endings = rank_endings(2, work)
    assert endings[1].error_type is fp.CoordinationError
    assert "rank 0 sees all of the step" in endings[1].error_text
    assert endings[0].error_type is fp.PeerError


def test_file_that_lies_in_parts_is_not_just_missing(tmp_path: Path) -> None:
    run_ranks(2, train, two_stores(tmp_path), 1)
    with pytest.raises(fp.CheckpointNotFoundError, match=r"some part of one.*fastpersist merge"):
        fp.load(step_path(tmp_path / "b", 1) / "state.pt")


# --- what fails while it is saved


class FailsToPublish(Filesystem):
    """A file system on which nothing is given its final name while it is told so."""

    fails = False

    def rename_to_free_name(self, source: str, target: str) -> None:
        if self.fails:
            raise fp.NoSpaceError(28, f"renaming {source}: no space left", source)
        super().rename_to_free_name(source, target)

    def exchange(self, first: str, second: str) -> None:
        if self.fails:
            raise fp.NoSpaceError(28, f"exchanging {first}: no space left", first)
        super().exchange(first, second)


@pytest.mark.parametrize("failing", [0, 1, 2])
@pytest.mark.parametrize("replaces", [False, True], ids=["new", "replace"])
def test_store_that_cannot_publish_fails_the_save_in_all_and_the_next_one_works(
    tmp_path: Path, failing: int, replaces: bool
) -> None:
    roots = [tmp_path / name for name in "abc"]

    def work(rank: int, count: int) -> Any:
        disk, run = FailsToPublish(), Run(SIZES).advance()
        with using(disk), checkpoints_at(roots[rank], run, on_error="warn") as checkpoints, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            checkpoints.save(1, run.state()).result()
            run.advance()
            disk.fails = rank == failing
            error = checkpoints.save(1 if replaces else 2, run.state(), overwrite=replaces).exception()
            disk.fails = False
            dist.barrier()
            found = checkpoints.load()
            dist.barrier()
            there = checkpoints.steps()
            run.advance()
            checkpoints.save(3, run.state()).result()
        return type(error), found["step"], there, checkpoints.load()["step"]

    for rank, (error, loaded, there, after) in enumerate(run_ranks(3, work)):
        assert error is (fp.NoSpaceError if rank == failing else fp.PeerError)
        assert (loaded, after) == (1, 3)
        assert there == [1]
    for root in roots:
        assert hidden_names(root) == []
