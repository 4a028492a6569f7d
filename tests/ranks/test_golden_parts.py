"""A step in parts, as format 1 has it, is loaded by two ranks that share no file system."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.golden import (
    PARTS,
    PARTS_STEP,
    parted,
)
from support.process_groups import run_ranks
from support.sameness import assert_same

import fastpersist as fp
from fastpersist.distributed import replica_check
from fastpersist.errors import FormatError, PeerError

STEP = f"step-{PARTS_STEP:08d}"


def test_parts_of_format_1_are_loaded_by_their_ranks(tmp_path: Path) -> None:
    shutil.copytree(PARTS, tmp_path / "stores")

    def load(rank: int, _count: int) -> None:
        with fp.Checkpointer(tmp_path / "stores" / "ab"[rank], process_group=dist.group.WORLD) as checkpointer:
            assert checkpointer.steps() == [PARTS_STEP]
            assert_same(checkpointer.load(verify=True), parted())

    run_ranks(2, load)
    for root in "ab":
        assert fp.verify(PARTS / root / STEP).has_checksums
        assert fp.inspect(PARTS / root / STEP).metrics == {"loss": 0.25}


def test_a_step_whose_short_storage_is_cut_is_refused_by_what_it_is(tmp_path: Path) -> None:
    def work(rank: int, _count: int) -> None:
        replica_check.CUT_BYTES_MIN = 4096  # which no writer of ours does
        root, state = tmp_path / "ab"[rank], {"weight": torch.arange(8 * 1024, dtype=torch.int32)}
        with fp.Checkpointer(
            root, constant=state["weight"], process_group=dist.group.WORLD, writers="all", node_local="parts"
        ) as checkpointer:
            checkpointer.save(1, state).result()
            with pytest.raises((FormatError, PeerError), match="less than 64 KiB"):
                checkpointer.load(1)

    run_ranks(2, work)
