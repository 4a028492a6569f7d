"""Each node keeps whole files: what is there, how it comes back, also after a node is lost, and what is said of errors.

Ranks are processes here, and a store is a directory of its own.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.process_groups import rank_endings, run_ranks
from support.rank_faults import everybodys
from support.runs import Run, hidden_names
from support.sameness import assert_same
from support.store_runs import SIZES, checkpoints_at, ordinary_file, resume, step_path, train, two_stores

import fastpersist as fp
from fastpersist.commit.filesystem import Filesystem, using


def train_copies(rank: int, count: int, roots: list[Path], steps: int, first: int = 1, **options: Any) -> None:
    train(rank, count, roots, steps, first, node_local="copies", **options)


def resume_copies(rank: int, count: int, roots: list[Path]) -> int:
    return resume(rank, count, roots, node_local="copies")


def files_of(path: Path) -> list[str]:
    return sorted(found.name for found in path.iterdir())


# --- what is there


@pytest.mark.parametrize(("count", "stores"), [(2, "ab"), (4, "aabb"), (4, "abab"), (3, "abc"), (2, "aa")])
def test_each_node_has_the_ordinary_file_which_stock_torch_reads(tmp_path: Path, count: int, stores: str) -> None:
    roots = [tmp_path / name for name in stores]
    run_ranks(count, train_copies, roots, 3)
    expected = ordinary_file(tmp_path, 3)
    tokens = set()
    for root in dict.fromkeys(roots):
        path = step_path(root, 3)
        ranks = [rank for rank in range(count) if roots[rank] == root]
        own = [f"rank-{rank:05d}.pt" for rank in ranks]
        assert files_of(path) == ["COPY.json", "MANIFEST.json", *own, "state.pt"]
        assert (path / "state.pt").read_bytes() == expected
        assert_same(torch.load(path / "state.pt", weights_only=True), Run(SIZES).advance(3).state())
        assert fp.verify(path).ok
        alone = fp.Checkpointer(root)
        assert (alone.steps(), alone.latest()) == ([1, 2, 3], 3)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # one process is not as many as have saved
            assert_same(alone.load(verify=True), Run(SIZES).advance(3).state())
        assert (root / "LATEST").read_text() == "step-00000003\n"
        assert hidden_names(root) == []
        record = json.loads((path / "COPY.json").read_text())
        tokens.add(record["token"])
        if others := [name for name in record["own_files"] if name not in own]:
            host = fp.inspect(path).host
            assert host["files_of_other_copies"] == ", ".join(others)
            assert "written on" in str(host["other_copies"])
        assert record["own_files"] == [f"rank-{rank:05d}.pt" for rank in range(count)]
    assert len(tokens) == 1
    assert run_ranks(count, resume_copies, roots) == [3] * count


@pytest.mark.parametrize("writers", ["auto", "all", "node", 1])
def test_any_choice_of_writers_gives_the_same_copies(tmp_path: Path, writers: Any) -> None:
    roots = two_stores(tmp_path, 4)

    def work(rank: int, count: int) -> None:
        run = Run(SIZES).advance()
        with fp.Checkpointer(
            roots[rank],
            optimizer=run.optimizer,
            process_group=dist.group.WORLD,
            writers=writers,
            node_local="copies",
        ) as checkpoints:
            checkpoints.save(1, run.state())

    run_ranks(4, work)
    for root in dict.fromkeys(roots):
        assert (step_path(root, 1) / "state.pt").read_bytes() == ordinary_file(tmp_path, 1)


def test_state_of_which_no_rank_owns_anything_is_copied_from_rank_0(tmp_path: Path) -> None:
    roots = two_stores(tmp_path)

    def work(rank: int, count: int) -> None:
        with fp.Checkpointer(roots[rank], process_group=dist.group.WORLD, node_local="copies") as checkpoints:
            checkpoints.save(1, {"large": torch.full((5_000_000,), float(rank)), "rank": rank})

    run_ranks(2, work)
    first, second = ((step_path(root, 1) / "state.pt").read_bytes() for root in roots)
    assert first == second
    assert fp.load(step_path(roots[1], 1) / "state.pt")["rank"] == 0


def test_retention_and_the_best_step_are_the_same_on_all_nodes(tmp_path: Path) -> None:
    roots = two_stores(tmp_path)

    def work(rank: int, count: int) -> Any:
        run = Run(SIZES)
        options = {"keep": 1, "keep_best": (1, "loss", "min"), "node_local": "copies"}
        with checkpoints_at(roots[rank], run, **options) as checkpoints:
            for loss in (3.0, 1.0, 2.0, 4.0):
                run.advance()
                checkpoints.save(run.step, run.state(), metrics={"loss": loss} if rank == 0 else None).result()
            dist.barrier()
            return checkpoints.steps(), checkpoints.best(), checkpoints.load("best")["step"]

    assert run_ranks(2, work) == [([2, 4], 2, 2)] * 2
    assert [fp.Checkpointer(root).steps() for root in roots] == [[2, 4], [2, 4]]


def test_removal_counts_the_steps_of_all_nodes(tmp_path: Path) -> None:
    roots = two_stores(tmp_path)
    run_ranks(2, train_copies, roots, 4)
    shutil.rmtree(step_path(roots[0], 2))
    shutil.rmtree(step_path(roots[1], 4))

    def work(rank: int, count: int) -> list[int]:
        with checkpoints_at(roots[rank], Run(SIZES), node_local="copies") as checkpoints:
            checkpoints.delete(2)
            dist.barrier()
            removed = checkpoints.discard_after(1)
            dist.barrier()
            return removed

    assert run_ranks(2, work) == [[3, 4]] * 2
    assert [fp.Checkpointer(root).steps() for root in roots] == [[1], [1]]


# --- what is refused


def test_sharded_state_and_different_options_are_refused(tmp_path: Path) -> None:
    with pytest.raises(fp.ConfigError, match=r"copies.*sharded"):
        fp.Checkpointer(tmp_path, sharded=True, node_local="copies")

    def work(rank: int, count: int) -> None:
        fp.Checkpointer(tmp_path, process_group=dist.group.WORLD, node_local=("copies", "parts")[rank])

    for ending in rank_endings(2, work):
        assert ending.error_type is fp.ConfigError
        assert "all ranks need the same node_local" in ending.error_text


def test_replicas_that_differ_between_the_samples_are_found(tmp_path: Path) -> None:
    roots = two_stores(tmp_path)

    def work(rank: int, count: int) -> str:
        run = Run(SIZES).advance()
        with torch.no_grad():
            run.model[0].view(-1)[140_001 if rank else 0] += 0.0
        checkpoints = checkpoints_at(roots[rank], run, node_local="copies", on_error="warn")
        state = run.state()
        if rank:
            with torch.no_grad():
                run.model[0].view(-1)[140_001] += 1.0  # between two samples
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            error = str(checkpoints.save(1, state).exception())
            checkpoints.close()
        return error

    for said in run_ranks(2, work):
        assert "the copies would differ" in said or "not the same" in said
    assert not step_path(roots[0], 1).exists()
    assert not step_path(roots[1], 1).exists()


# --- how it comes back


class Heard(logging.Handler):
    """What the log says."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []
        logger = logging.getLogger("fastpersist")
        logger.setLevel(logging.INFO)
        logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@pytest.mark.parametrize("lost", [0, 1])
@pytest.mark.parametrize("what", ["step", "disk"])
@pytest.mark.parametrize("count", [2, 4])
def test_copy_that_is_lost_comes_from_another_node_and_the_next_save_works(
    tmp_path: Path, count: int, lost: int, what: str
) -> None:
    roots = two_stores(tmp_path, count)
    run_ranks(count, train_copies, roots, 3)
    gone = roots[-1] if lost else roots[0]
    shutil.rmtree(step_path(gone, 3) if what == "step" else gone)

    def work(rank: int, count: int) -> Any:
        heard = Heard()
        run = Run(SIZES)
        with checkpoints_at(roots[rank], run, node_local="copies", keep=2) as checkpoints:
            whole = checkpoints.load()
            run.load(checkpoints)
            own = whole.pop("rank_state", None)
            assert_same(whole, Run(SIZES).advance(3).state())
            assert_same(run.optimizer.state_dict(), Run(SIZES).advance(3).optimizer.state_dict())
            run.advance()
            checkpoints.save(run.step, run.state(), rank_state={"rank": rank, "step": run.step}).result()
            dist.barrier()
            return own, heard.lines, checkpoints.latest(), checkpoints.load()["step"]

    for rank, (own, lines, latest, loaded) in enumerate(run_ranks(count, work)):
        assert (latest, loaded) == (4, 4)
        if roots[rank] == gone:
            assert own is None
            assert any("comes from a copy of rank" in line for line in lines)
            assert any(f"with rank-{rank:05d}.pt" in line for line in lines)
        else:
            assert own == {"rank": rank, "step": 3}
            assert any("reads the copy of its own node" in line for line in lines)
    numbers = set()
    saved = (step_path(roots[0], 4) / "state.pt").read_bytes()
    for root in dict.fromkeys(roots):
        assert (step_path(root, 4) / "state.pt").read_bytes() == saved
        assert_same(torch.load(step_path(root, 4) / "state.pt"), Run(SIZES).advance(4).state())
        assert fp.Checkpointer(root).latest() == 4
        numbers.add(json.loads((step_path(root, 4) / "MANIFEST.json").read_text())["commit_number"])
    assert numbers == {4}


def test_node_that_takes_the_place_of_rank_0_with_older_steps_does_not_hide_newer_ones(tmp_path: Path) -> None:
    roots = two_stores(tmp_path)
    run_ranks(2, train_copies, roots, 4)
    for step in (3, 4):
        shutil.rmtree(step_path(roots[0], step))
    assert run_ranks(2, resume_copies, roots) == [4, 4]
    assert run_ranks(3, resume_quietly, [tmp_path / "new", *roots]) == [4, 4, 4]
    assert run_ranks(1, resume_quietly, roots[1:]) == [4]


def resume_quietly(rank: int, count: int, roots: list[Path]) -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return resume_copies(rank, count, roots)


@pytest.mark.parametrize("damage", ["short", "gone", "manifest"])
def test_damaged_copy_is_replaced_by_another_one(tmp_path: Path, damage: str) -> None:
    roots = two_stores(tmp_path)
    run_ranks(2, train_copies, roots, 2)
    path = step_path(roots[1], 2)
    if damage == "short":
        with (path / "state.pt").open("r+b") as file:
            file.truncate(100)
    else:
        (path / ("state.pt" if damage == "gone" else "MANIFEST.json")).unlink()
    assert run_ranks(2, resume_copies, roots) == [2, 2]


def test_copy_that_cannot_be_read_is_replaced_by_another_one(tmp_path: Path) -> None:
    roots = two_stores(tmp_path)
    run_ranks(2, train_copies, roots, 2)
    assert run_ranks(2, resume_beside_a_failing_disk, roots) == [2, 2]


def resume_beside_a_failing_disk(rank: int, count: int, roots: list[Path]) -> int:
    real_stat = os.stat

    def stat(path: Any, *arguments: Any, **options: Any) -> os.stat_result:
        if rank == 1 and str(path).endswith("state.pt"):
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)
        return real_stat(path, *arguments, **options)

    with mock.patch.object(os, "stat", stat):
        return resume_copies(rank, count, roots)


@pytest.mark.parametrize("failing", [0, 1])
def test_root_of_one_node_that_cannot_be_read_does_not_hide_the_copies_of_the_others(
    tmp_path: Path, failing: int
) -> None:
    roots = two_stores(tmp_path)
    run_ranks(2, train_copies, roots, 2)

    def resume_beside(rank: int, count: int, broken: set[int]) -> int:
        failure = OSError(errno.EIO, os.strerror(errno.EIO), str(roots[rank]))
        real = {"listdir": os.listdir, "stat": os.stat, "open": os.open}

        def failing_below(name: str) -> Any:
            def call(path: Any, *arguments: Any, **options: Any) -> Any:
                if rank in broken and str(path).startswith(str(roots[rank])):
                    raise failure
                return real[name](path, *arguments, **options)

            return call

        with mock.patch.multiple(os, **{name: failing_below(name) for name in real}):
            return resume_copies(rank, count, roots)

    assert run_ranks(2, resume_beside, {failing}) == [2, 2]
    for ending in rank_endings(2, resume_beside, {0, 1}):
        assert "Input/output error" in ending.error_text
    shutil.rmtree(roots[1 - failing])  # the other node has no steps: those that cannot be read may be all there are
    for ending in rank_endings(2, resume_beside, {failing}):
        assert "Input/output error" in ending.error_text


def test_of_two_saves_of_one_step_the_later_one_is_read(tmp_path: Path) -> None:
    roots = two_stores(tmp_path)
    run_ranks(2, train_copies, roots, 2)
    shutil.copytree(step_path(roots[1], 2), tmp_path / "old")

    def again(rank: int, count: int) -> None:
        run = Run(SIZES).advance(5)
        with checkpoints_at(roots[rank], run, node_local="copies") as checkpoints:
            checkpoints.save(2, run.state(), overwrite=True)

    run_ranks(2, again)
    shutil.rmtree(step_path(roots[1], 2))
    shutil.copytree(tmp_path / "old", step_path(roots[1], 2))

    def work(rank: int, count: int) -> Any:
        with checkpoints_at(roots[rank], Run(SIZES), node_local="copies") as checkpoints:
            return checkpoints.load(2)["step"]

    assert run_ranks(2, work) == [5, 5]


def test_copy_that_only_some_nodes_made_visible_was_never_committed(tmp_path: Path) -> None:
    roots = two_stores(tmp_path)
    run_ranks(2, train_copies, roots, 2)
    shutil.rmtree(step_path(roots[0], 2))
    (roots[1] / ".committed").write_text("1\n")  # as a save leaves it that died between the renames
    assert run_ranks(2, resume_copies, roots) == [1, 1]

    def named(rank: int, count: int) -> None:
        checkpoints_at(roots[rank], Run(SIZES), node_local="copies").load(2)

    for ending in rank_endings(2, named):
        assert "never committed" in ending.error_text
    run_ranks(2, train_copies, roots, 1, 2)  # takes its place
    assert run_ranks(2, resume_copies, roots) == [2, 2]


# --- what fails while it is saved


class FullDisk(Filesystem):
    """A disk that has no room while it is told so."""

    full = False

    def allocate(self, fd: int, size_bytes: int, path: str) -> None:
        if self.full:
            raise fp.NoSpaceError(errno.ENOSPC, f"reserving space for {path}: no space left", path)
        super().allocate(fd, size_bytes, path)


@pytest.mark.parametrize("failing", [0, 1, 2, 3])
def test_full_disk_of_one_node_fails_everywhere_and_the_next_save_works(tmp_path: Path, failing: int) -> None:
    roots = two_stores(tmp_path, 4)

    def work(rank: int, count: int) -> Any:
        disk, run = FullDisk(), Run(SIZES).advance()
        options: dict[str, Any] = {"on_error": "warn", "node_local": "copies"}
        with using(disk), checkpoints_at(roots[rank], run, **options) as checkpoints, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            checkpoints.save(1, run.state(), rank_state=rank).result()
            run.advance()
            disk.full = rank == failing
            error = checkpoints.save(2, run.state(), rank_state=rank).exception()
            disk.full = False
            dist.barrier()
            loaded = checkpoints.load()["step"]
            dist.barrier()
            there = checkpoints.steps()
            checkpoints.save(2, run.state(), rank_state=rank).result()
            dist.barrier()
            return type(error), loaded, there, checkpoints.load()["step"], checkpoints.steps()

    for rank, (error, loaded, there, after, steps) in enumerate(run_ranks(4, work)):
        assert error is (fp.NoSpaceError if rank == failing else fp.PeerError)
        assert (loaded, there, after, steps) == (1, [1], 2, [1, 2])
    for root in roots:
        assert hidden_names(root) == []


@pytest.mark.parametrize("missing", [0, 1])
def test_missing_parents_fail_the_first_save_and_not_the_next_one(tmp_path: Path, missing: int) -> None:
    roots = [tmp_path / "here" / "runs" / "a", tmp_path / "mnt" / "runs" / "a"]
    if missing == 0:
        roots.reverse()
    roots[1 - missing].parent.mkdir(parents=True)

    def work(rank: int, count: int) -> list[str]:
        run = Run(SIZES).advance()
        said = []
        options: dict[str, Any] = {"on_error": "warn", "node_local": "copies"}
        with checkpoints_at(roots[rank], run, **options) as checkpoints, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for step in (1, 2):
                said.append(str(checkpoints.save(step, run.state()).exception()))
                everybodys(None)
                if step == 1:
                    assert not (tmp_path / "mnt").exists()
                everybodys(None)
                roots[missing].parent.mkdir(parents=True, exist_ok=True)
                everybodys(None)
        return said

    for first, second in run_ranks(2, work):
        assert f"{'has' if missing else 'had'} no {tmp_path / 'mnt'}." in first
        assert second == "None"
    assert [fp.Checkpointer(root).steps() for root in roots] == [[2], [2]]
