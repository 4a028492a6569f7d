"""Sharded steps of ranks that share no file system: each store has its ranks' parts of a DCP checkpoint."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.process_groups import rank_endings, run_ranks
from support.runs import hidden_names
from support.sameness import assert_same
from support.sharded_runs import ShardedRun, expected, mesh_of_all, whole
from support.store_runs import step_path, two_stores

import fastpersist as fp
from fastpersist.merging import merge

torch.set_num_threads(1)


def train(rank: int, count: int, roots: list[Path], steps: int) -> None:
    run = ShardedRun(mesh_of_all())
    with fp.Checkpointer(
        roots[rank], optimizer=run.optimizer, process_group=dist.group.WORLD, sharded=True
    ) as checkpoints:
        for _ in range(steps):
            run.advance()
            checkpoints.save(run.step, run.state(), rank_state={"rank": rank})


def load(rank: int, count: int, roots: list[Path], own_state: bool = True) -> None:
    """Load whole tensors, and then shards in place."""
    run = ShardedRun(mesh_of_all(), blank=True)
    with fp.Checkpointer(roots[rank], process_group=dist.group.WORLD) as checkpoints:
        found = checkpoints.load(verify=True)
        assert_same(found["model"], expected(2)["model"])
        assert_same(found["position"], expected(2)["position"])
        assert found.get("rank_state") == ({"rank": rank} if own_state else None)
        found = checkpoints.load(into=run.targets())
    assert found["step"] == 2
    assert_same(dict(whole(run.model.state_dict())), expected(2)["model"])
    assert_same(whole(run.optimizer.state_dict()), expected(2)["optimizer"])


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("saved")
    run_ranks(4, train, two_stores(directory, 4), 2)
    return directory


def test_each_store_has_its_ranks_parts_and_merged_they_are_the_state(saved: Path, tmp_path: Path) -> None:
    for name, ranks in (("a", (0, 1)), ("b", (2, 3))):
        path = step_path(saved / name, 2)
        names = {found.name for found in path.iterdir()}
        own = {f"__{rank}_0.distcp" for rank in ranks} | {f"rank-{rank:05d}.pt" for rank in ranks}
        assert names == {"MANIFEST.json", "PARTS.json", ".metadata", *own}
        assert fp.verify(path).ok
        assert hidden_names(saved / name) == []
        assert fp.Checkpointer(saved / name).steps() == [1, 2]
    merge([step_path(saved / name, 2) for name in ("a", "b")], tmp_path / "state.pt")
    assert_same(torch.load(tmp_path / "state.pt")["model"], expected(2)["model"])
    with pytest.raises(fp.FormatError, match=r"ranks 2, 3 \(written on "):
        merge([step_path(saved / "a", 2)], tmp_path / "other.pt")


def test_parts_are_exchanged_whoever_loads_them(saved: Path, tmp_path: Path) -> None:
    roots = two_stores(saved, 4)
    run_ranks(4, load, roots)
    run_ranks(4, load, roots[::-1])

    def load_fewer(rank: int, count: int, roots: list[Path]) -> None:
        with pytest.warns(RuntimeWarning, match="was saved by 4 ranks"):
            load(rank, count, roots, own_state=False)

    run_ranks(2, load_fewer, [saved / "b", saved / "a"])
    run_ranks(3, load_fewer, [tmp_path / "new", saved / "b", saved / "a"])


def test_one_process_is_told_whose_parts_are_elsewhere_and_loads_them_when_they_were_brought(
    saved: Path, tmp_path: Path
) -> None:
    for name in ("a", "b"):
        shutil.copytree(saved / name, tmp_path / name)
    with pytest.raises(fp.UnsupportedError, match=r"ranks 2, 3 \(written on .*fastpersist merge"):
        fp.Checkpointer(tmp_path / "a").load()
    for part in step_path(tmp_path / "b", 2).glob("*.distcp"):
        shutil.copy(part, step_path(tmp_path / "a", 2))
    with pytest.warns(RuntimeWarning, match="was saved by 4 ranks"):
        assert_same(fp.Checkpointer(tmp_path / "a").load()["model"], expected(2)["model"])


@pytest.mark.parametrize("damage", ["damaged", "missing", "store missing"])
def test_part_that_is_damaged_or_missing_is_named_with_its_rank(saved: Path, tmp_path: Path, damage: str) -> None:
    for name in ("a", "b"):
        shutil.copytree(saved / name, tmp_path / name)
    part = step_path(tmp_path / "b", 2) / "__3_0.distcp"
    if damage == "damaged":
        data = bytearray(part.read_bytes())
        data[len(data) // 2] ^= 1
        part.write_bytes(data)
    elif damage == "missing":
        part.unlink()
    else:
        shutil.rmtree(step_path(tmp_path / "b", 2))

    def work(rank: int, count: int) -> None:
        fp.Checkpointer(two_stores(tmp_path, 4)[rank], process_group=dist.group.WORLD).load(2, verify=True)

    told = [ending.error_text for ending in rank_endings(4, work)]
    for text in told:
        assert ("ranks 2, 3 (written on " if damage == "store missing" else "__3_0.distcp") in text
    if damage == "damaged":
        assert any("rank 3 wrote it" in text for text in told)


@pytest.mark.parametrize("sharded_rank", [0, 1])
def test_ranks_of_which_one_saves_shards_and_one_replicas_are_told(tmp_path: Path, sharded_rank: int) -> None:
    def work(rank: int, count: int) -> BaseException | None:
        checkpoints = fp.Checkpointer(
            two_stores(tmp_path)[rank], process_group=dist.group.WORLD, sharded=rank == sharded_rank, on_error="warn"
        )
        return checkpoints.save(1, {"a": torch.ones(3)}).exception()

    first, second = run_ranks(2, work)
    assert isinstance(first, fp.CoordinationError)
    assert isinstance(second, fp.PeerError)
    assert "do not save the same" in str(first)
