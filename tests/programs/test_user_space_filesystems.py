"""What users do on a file system in user space, as those of clusters are seen: with and without what one may lack.

Each test starts the file system's server, and most of them two ranks.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.forking import SMALL_RING, Child, Report, in_child
from support.fuse_mounts import fuse_mount, why_no_fuse
from support.leaks import no_leaks
from support.process_groups import run_ranks
from support.runs import Replay, Run, hidden_names
from support.sameness import assert_same
from support.sharded_runs import ShardedRun, expected, mesh_of_all
from support.states import differences, load_step, make_state, pending_files
from support.training import PATIENCE_S

import fastpersist as fp
from fastpersist.cli import main
from fastpersist.errors import StorageError

KINDS: dict[str, dict[str, Any]] = {
    "as it comes": {},
    "no page cache": {"cache": "none"},
    "write-back": {"cache": "back"},
    "no direct I/O": {"direct": False},
    "locks of a server": {"locks": "server"},
    "no locks": {"locks": "no"},
    "no flags of rename": {"rename2": False},
    "no fallocate": {"fallocate": False},
    "1 ms": {"latency_us": 1000},
    "nothing": {"latency_us": 200, "direct": False, "locks": "no", "rename2": False, "fallocate": False},
}
CUT_SIZES = (400_000, 300_001, 5_000, 7)  # the first two, and Adam's two moments of each, are cut over the ranks

pytestmark = [
    pytest.mark.skipif(why_no_fuse() is not None, reason=str(why_no_fuse())),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning:torch.distributed.checkpoint"),
]


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> dict[str, Any]:
    return KINDS[request.param]


@pytest.fixture
def mounted(tmp_path: Path, kind: dict[str, Any]) -> Iterator[Path]:
    with fuse_mount(tmp_path, **kind) as directory:
        yield directory


@in_child(SMALL_RING)
def test_files_are_saved_replaced_loaded_and_verified(mounted: Path, kind: dict[str, Any]) -> None:
    with no_leaks(mounted):
        for name in ("state.pt", "state.safetensors"):
            path = mounted / name
            for step in (1, 2):
                report = fp.save(make_state(step), path)
                assert report.engine.endswith("-buffered") == (not kind.get("direct", True)), report.engine
                assert load_step(path) == step
                assert differences(fp.load(path, verify=True), make_state(step)) == []
            target = make_state(3)
            fp.load_into(path, target, verify=True)
            assert differences(target, make_state(2)) == []
            assert main(["verify", str(path)]) == 0
            assert main(["inspect", str(path)]) == 0
        assert fp.save_async(make_state(4), mounted / "state.pt").result() == mounted / "state.pt"
        assert load_step(mounted / "state.pt") == 4
        assert differences(torch.load(mounted / "state.pt", mmap=kind.get("cache") != "none"), make_state(4)) == []
    assert sorted(os.listdir(mounted)) == ["state.pt", "state.safetensors"]


@in_child(SMALL_RING)
def test_a_training_keeps_its_steps_and_resumes(mounted: Path) -> None:
    root = mounted / "run"
    run = Run()
    with no_leaks(root.parent):
        for _ in range(2):  # the second is a new start
            with fp.Checkpointer(root, optimizer=run.optimizer, keep=2) as checkpoints:
                for _ in range(3):
                    run.advance()
                    checkpoints.save(run.step, run.state())
                checkpoints.save(run.step, run.state(), overwrite=True)
            run = Run().load(fp.Checkpointer(root), verify=True)
    assert run.step == fp.Checkpointer(root).latest() == 6
    assert Replay().check_all(root) == [5, 6]
    assert hidden_names(root) == []
    for words in (["verify", str(root)], ["inspect", str(root)], ["verify", str(root / "step-00000006")]):
        assert main(words) == 0


def train_together(rank: int, count: int, root: Path) -> str:
    run = Run(CUT_SIZES)
    with fp.Checkpointer(root, optimizer=run.optimizer, keep=2, process_group=dist.group.WORLD) as checkpoints:
        for _ in range(3):
            run.advance()
            checkpoints.save(run.step, run.state(), rank_state={"rank": rank})
        checkpoints.wait()
        again = Run(CUT_SIZES)
        loaded = checkpoints.load(into=again.targets(), verify=True)
        assert (loaded["step"], loaded["rank_state"]["rank"]) == (3, rank)
        assert_same(again.state()["model"], run.state()["model"])
    return fp.save(run.state(), root.parent / "state.pt", process_group=dist.group.WORLD).engine


def train_sharded(rank: int, count: int, root: Path) -> None:
    run = ShardedRun(mesh_of_all())
    with fp.Checkpointer(
        root, sharded=True, optimizer=run.optimizer, keep=2, process_group=dist.group.WORLD
    ) as checkpoints:
        for _ in range(3):
            run.advance()
            checkpoints.save(run.step, run.state())


def test_ranks_share_one_file_and_write_files_of_their_own(mounted: Path) -> None:
    # Direct I/O is only for files with one writer.
    assert run_ranks(2, train_together, mounted / "common") == ["threads-buffered"] * 2
    run_ranks(2, train_sharded, mounted / "sharded")
    for name in ("common", "sharded"):
        assert fp.Checkpointer(mounted / name).steps() == [2, 3]
        assert main(["verify", str(mounted / name)]) == 0
        assert hidden_names(mounted / name) == []
    for path in (mounted / "state.pt", mounted / "common" / "step-00000003" / "state.pt"):
        assert_same(torch.load(path), Run(CUT_SIZES).advance(3).state())
    assert_same(fp.Checkpointer(mounted / "sharded", sharded=True).load(), expected(3))


def test_a_named_engine_that_the_file_system_refuses_says_what_to_take(tmp_path: Path) -> None:
    with fuse_mount(tmp_path, direct=False) as mounted:
        with pytest.raises(StorageError, match="engine='threads-buffered'") as caught:
            fp.save(make_state(1), mounted / "state.pt", engine="threads")
        assert str(mounted / "state.pt") in str(caught.value)
        assert pending_files(mounted) == []


def test_the_mount_goes_with_whoever_made_it(tmp_path: Path) -> None:
    def work(report: Report) -> None:
        with fuse_mount(tmp_path) as mounted:
            (mounted / "file").write_bytes(b"there")
            report(1)
            time.sleep(PATIENCE_S)

    with Child(work) as child:
        deadline_s = time.monotonic() + PATIENCE_S
        while child.reported != 1 and not child.ended():
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
        if child.ended():
            pytest.skip(child.wait().message)
        child.kill()
    while str(tmp_path / "fuse") in Path("/proc/self/mounts").read_text():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    assert os.listdir(tmp_path / "fuse") == []
    assert os.listdir(tmp_path / "fuse-source") == ["file"]
