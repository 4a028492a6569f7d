"""What fails on one rank, or is wrong in a file that all load, is an error on each of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.crafted_pickles import HUGE, craft, tensor
from support.loads_together import watch, world
from support.process_groups import run_ranks

import fastpersist as fp


def save_of_a_rank_into_nothing(rank: int, _count: int, path: Path) -> str:
    with pytest.raises(fp.StorageError if rank == 0 else fp.PeerError) as raised:
        fp.save({"w": torch.ones(3)}, path, process_group=dist.group.WORLD)
    return str(raised.value)


def test_all_ranks_hear_of_the_argument_that_makes_parents(tmp_path: Path) -> None:
    for message in run_ranks(2, save_of_a_rank_into_nothing, tmp_path / "a" / "x.pt"):
        assert "make_parents=True" in message


@pytest.mark.parametrize("way", ["ahead", "alone"])
def test_ranks_that_load_together_refuse_a_tensor_beyond_its_storage(way: str, tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    craft(path, {"w": tensor((HUGE,), (1,))})

    def work(rank: int, count: int) -> str:
        watch(way)
        with pytest.raises(fp.FastPersistError) as raised:
            fp.load(path, process_group=world())
        return str(raised.value)

    assert all("reaches beyond the 64 bytes of its storage 0" in text for text in run_ranks(2, work))
