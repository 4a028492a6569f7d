"""The file system of a root is unmounted while a training saves to it, or that of one node is full.

What is mounted is seen by a child of pytest's and the ranks that it starts: the mount namespace is theirs.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.forking import SMALL_RING, in_child
from support.process_groups import run_ranks
from support.runs import Run, held_writers, hidden_names
from support.sandbox import needs_root
from support.store_runs import SIZES, checkpoints_at

import fastpersist as fp
from fastpersist.distributed.node_local.detection import NodeLocal
from fastpersist.events.delivery import flush

_CLONE_NEWNS = 0x00020000
RANK_COUNT = 32


def mount(*words: object) -> None:
    done = subprocess.run(["mount", *map(str, words)], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"mount: {done.stderr.strip()}")


def own_mounts() -> None:
    if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNS) != 0:
        pytest.skip(f"no mount namespace: {os.strerror(ctypes.get_errno())}")
    mount("--make-rprivate", "/")


class Disk:
    """A file system in memory, mounted twice: one mount of it can be taken away and come back."""

    def __init__(self, directory: Path) -> None:
        self.point, self._kept = directory / "disk", directory / "kept"
        for path in (self.point, self._kept):
            path.mkdir(parents=True)
        mount("-t", "tmpfs", "-o", "size=256m", "tmpfs", self._kept)
        self.mount()

    def mount(self) -> None:
        mount("--bind", self._kept, self.point)

    def unmount(self) -> None:
        subprocess.run(["umount", "--lazy", str(self.point)], check=True)

    def assert_nothing_below(self) -> None:
        assert flush(60)
        found = [path.name for path in self.point.iterdir()]
        assert not found, f"{found} were written to the directory below the mount"


@contextmanager
def held_events(elsewhere: Path) -> Iterator[None]:
    """Hold the thread that delivers events: those that come meanwhile reach no log before the block ends."""
    holds, may_go_on = threading.Event(), threading.Event()

    def hold(event: fp.events.Event) -> None:
        holds.set()
        may_go_on.wait(60)

    unsubscribe = fp.events.subscribe(hold)
    fp.save({}, elsewhere)
    assert holds.wait(60)
    try:
        yield
    finally:
        may_go_on.set()
        unsubscribe()


def said_of(pending: fp.PendingSave) -> str:
    error = pending.exception()
    return "" if error is None else f"{type(error).__name__}: {error}"


@needs_root
@pytest.mark.parametrize("below", [".", "run"])
@in_child(SMALL_RING)
def test_nothing_is_written_where_the_file_system_was_until_it_is_back(tmp_path: Path, below: str) -> None:
    own_mounts()
    disk = Disk(tmp_path)
    root = disk.point / below
    run = Run(SIZES)
    with warnings.catch_warnings(), fp.Checkpointer(root, optimizer=run.optimizer, on_error="warn") as checkpoints:
        warnings.simplefilter("ignore")
        checkpoints.save(1, run.advance().state()).result()
        with held_writers():
            in_flight = checkpoints.save(2, run.advance().state())
            disk.unmount()
        assert str(root) in said_of(in_flight)
        disk.assert_nothing_below()
        for step in (3, 4):
            with pytest.raises(fp.StorageError) as caught:
                checkpoints.save(step, run.advance().state()).result()
            for said in (f"the file system of {os.path.abspath(root)} is not mounted any more", "device "):
                assert said in str(caught.value)
            disk.assert_nothing_below()
        disk.mount()
        checkpoints.save(5, run.advance().state()).result()
        assert checkpoints.steps() == [1, 5]
    assert hidden_names(root) == []
    assert fp.load(root / "step-00000005" / "state.pt", verify=True)["step"] == run.step


@needs_root
@in_child(SMALL_RING)
def test_events_of_earlier_saves_wait_too_until_it_is_back(tmp_path: Path) -> None:
    own_mounts()
    disk = Disk(tmp_path)
    with fp.Checkpointer(disk.point) as checkpoints:
        with held_events(tmp_path / "other.pt"):
            checkpoints.save(1, {"a": 1}).result()
            disk.unmount()
        disk.assert_nothing_below()
        disk.mount()
        checkpoints.save(2, {"a": 2}).result()
    committed = [event.step for event in fp.events.read_events(disk.point) if event.kind == "committed"]
    assert committed == [1, 2]


@needs_root
@in_child(SMALL_RING)
def test_a_root_that_is_moved_away_on_the_same_file_system_is_made_anew(tmp_path: Path) -> None:
    own_mounts()
    disk = Disk(tmp_path)
    root = disk.point / "run"
    with fp.Checkpointer(root) as checkpoints:
        checkpoints.save(1, {"a": 1}).result()
        root.rename(disk.point / "old")
        checkpoints.save(2, {"a": 2}).result()
        assert checkpoints.steps() == [2]


@needs_root
@pytest.mark.parametrize("node_local", ["parts", "copies"])
@pytest.mark.parametrize("victim", [0, 1])
@in_child(SMALL_RING)
def test_a_node_whose_file_system_is_unmounted_fails_the_saves_until_it_is_back(
    tmp_path: Path, victim: int, node_local: NodeLocal
) -> None:
    own_mounts()
    disks = [Disk(tmp_path / f"node-{rank}") for rank in range(2)]

    def work(rank: int, count: int) -> Any:
        own_mounts()  # of each rank
        run = Run(SIZES)
        options: dict[str, Any] = {"node_local": node_local, "on_error": "warn"}
        with warnings.catch_warnings(), checkpoints_at(disks[rank].point, run, **options) as checkpoints:
            warnings.simplefilter("ignore")
            said = []
            for step in range(1, 5):
                dist.barrier()
                if rank == victim and step == 2:
                    disks[rank].unmount()
                if rank == victim and step == 4:
                    disks[rank].assert_nothing_below()
                    disks[rank].mount()
                dist.barrier()
                try:
                    said.append(said_of(checkpoints.save(step, run.advance().state(), rank_state=rank)))
                except fp.FastPersistError as error:
                    said.append(f"{type(error).__name__}: {error}")
            steps = checkpoints.steps()
            loaded = checkpoints.load()
        return said, steps, int(loaded["step"])

    for rank, (said, steps, newest) in enumerate(run_ranks(2, work)):
        assert said[0] == said[3] == ""
        for text in said[1:3]:
            assert text.startswith("StorageError" if rank == victim else "PeerError"), said
            assert f"the file system of {disks[victim].point} is not mounted any more" in text
        assert (steps, newest) == ([1, 4], 4)


@needs_root
@pytest.mark.slow  # starts 32 processes
@pytest.mark.parametrize("node_local", ["parts", "copies"])
@in_child(SMALL_RING)
def test_a_full_disk_of_one_node_fails_the_save_on_all_ranks_and_the_next_one_works(
    tmp_path: Path, node_local: NodeLocal
) -> None:
    own_mounts()
    roots = [tmp_path / f"node-{number}" for number in range(4)]
    for root in roots:
        root.mkdir()
    mount("-t", "tmpfs", "-o", "size=32m", "tmpfs", roots[2])
    full, room = {"w": torch.ones(2 << 20)}, {"w": torch.ones(256 << 10)}  # 8 and 1 MiB for each rank

    def work(rank: int, count: int) -> Any:
        torch.set_num_threads(1)
        root = roots[rank * len(roots) // count]
        options: dict[str, Any] = {"node_local": node_local, "on_error": "warn", "process_group": dist.group.WORLD}
        with warnings.catch_warnings(), fp.Checkpointer(root, **options) as checkpoints:
            warnings.simplefilter("ignore")
            said = [
                said_of(checkpoints.save(step, {"step": step}, rank_state=full if step == 2 else room))
                for step in (1, 2, 3)
            ]
            steps = checkpoints.steps()
            loaded = checkpoints.load()
            same = torch.equal(loaded["rank_state"]["w"], room["w"])
        return said, steps, loaded["step"], same

    for rank, (said, *found) in enumerate(run_ranks(RANK_COUNT, work)):
        assert said[0] == said[2] == "", (rank, said)
        assert "NoSpaceError" in said[1], (rank, said)
        assert str(roots[2]) in said[1], (rank, said)
        assert found == [[1, 3], 3, True]
    for root in roots:
        assert hidden_names(root) == []
