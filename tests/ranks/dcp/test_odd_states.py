"""Sharded saves of what is not a plain tensor, by two ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.process_groups import run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import fastpersist as fp


def test_several_ranks_save_one_sparse_tensor(tmp_path: Path) -> None:
    def work(rank: int, count: int) -> list[Any]:
        with fp.Checkpointer(tmp_path, sharded=True, process_group=dist.group.WORLD) as checkpoints:
            for step in (1, 2):
                checkpoints.save(step, {"held": (torch.eye(3) * step).to_sparse()}).result(30)
            return checkpoints.load(2)["held"].to_dense().tolist()

    assert run_ranks(2, work) == [(torch.eye(3) * 2).tolist()] * 2


class Holder:
    def __init__(self, inside: Any) -> None:
        self.inside = inside


@pytest.mark.parametrize("hide", [lambda shard: (shard, 5), Holder], ids=["tuple", "object"])
def test_shards_inside_an_object_are_refused(tmp_path: Path, hide: Callable[[Any], Any]) -> None:
    """Of what is pickled, the coordinator's counts: the other shards would be gone."""

    def work(rank: int, count: int) -> None:
        mesh = init_device_mesh("cpu", (count,))
        shard = DTensor.from_local(torch.full((4,), float(rank)), mesh, [Shard(0)])
        alike = DTensor.from_local(torch.ones(4), mesh, [Replicate()])
        checkpointer = fp.Checkpointer(tmp_path / "refused", sharded=True, process_group=dist.group.WORLD)
        with pytest.raises(fp.FastPersistError, match=r"'moments', a (tuple|Holder), has shards in it"):
            checkpointer.save(1, {"moments": hide(shard)}).result(30)
        fp.Checkpointer(tmp_path / "saved", sharded=True, process_group=dist.group.WORLD).save(
            1, {"moments": (alike, 5)}
        ).result(30)

    run_ranks(2, work)
