"""The tuned number of writers: all ranks go by the file of the coordinator."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.process_groups import run_ranks

import fastpersist as fp
from fastpersist.distributed.group_save import tuned_writer_count

MIB = 1 << 20


def test_tuned_number_takes_effect_in_a_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def save(_rank: int, _count: int, directory: Path) -> bool:
        state = {"weight": torch.arange(3 * MIB)}
        return fp.save(state, directory / "shared.pt", process_group=dist.group.WORLD).engine != ""

    assert run_ranks(3, save, tmp_path) != [True, True, False]  # or what follows proves nothing
    (tmp_path / "tuning.toml").write_text("writers = 2")
    monkeypatch.setenv("FASTPERSIST_CONFIG", str(tmp_path / "tuning.toml"))
    assert run_ranks(3, save, tmp_path) == [True, True, False]


def own_file(rank: int, directory: Path, text: str) -> None:
    path = directory / f"rank-{rank}.toml"
    path.write_text(text)
    os.environ["FASTPERSIST_CONFIG"] = str(path)


def test_all_ranks_choose_as_the_first_one_is_tuned(tmp_path: Path) -> None:
    """Ranks that chose each for themselves would leave holes in the file, or wait for each other."""

    def work(rank: int, count: int, directory: Path) -> list[bool]:
        own_file(rank, directory, f"writers = {2 - rank or 1}\nqueue_depth = {rank + 1}")
        state = {"weight": torch.arange(3 * MIB)}
        group = dist.group.WORLD
        wrote = [fp.save(state, directory / "shared.pt", process_group=group).engine != ""]
        wrote.append(fp.save(state, directory / "all.pt", process_group=group, writers="all").engine != "")
        with fp.Checkpointer(directory / "root", constant=state, process_group=group) as checkpointer:
            wrote.append(checkpointer._bound.writers == [0, 1])
            checkpointer.save(1, state)
        return wrote

    results = run_ranks(3, work, tmp_path)
    assert results == [[True, True, True], [True, True, True], [False, True, True]]
    for path in (tmp_path / "shared.pt", tmp_path / "all.pt"):
        assert torch.equal(fp.load(path, verify=True)["weight"], torch.arange(3 * MIB))
    assert torch.equal(fp.Checkpointer(tmp_path / "root").load(1, verify=True)["weight"], torch.arange(3 * MIB))


def test_file_of_the_first_rank_that_makes_no_sense_is_told_to_all(tmp_path: Path) -> None:
    def work(rank: int, count: int, directory: Path) -> str:
        own_file(rank, directory, "writers = 0" if rank == 0 else "writers = 1")
        try:
            tuned_writer_count(dist.group.WORLD, str(directory / "x.pt"))
        except fp.ConfigError as error:
            return str(error)
        return ""

    for text in run_ranks(2, work, tmp_path):
        assert "rank 0" in text
        assert "rank-0.toml" in text
