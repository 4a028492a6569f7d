"""What owns a lock, a descriptor or a thread is not copied; what it owns stays as it was."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import fastpersist as fp

WAYS: list[Callable[[Any], object]] = [copy.copy, copy.deepcopy, pickle.dumps]


@pytest.mark.parametrize("way", WAYS)
def test_a_checkpointer_keeps_its_lock(way: Callable[[Any], object], tmp_path: Path) -> None:
    checkpointer = fp.Checkpointer(tmp_path)
    checkpointer.save(1, {"x": torch.ones(3)}).result()
    for one in (checkpointer, {"trainer": [checkpointer]}):
        if way is copy.copy and one is not checkpointer:
            continue  # it shares the object
        with pytest.raises(TypeError, match="a Checkpointer cannot be copied or pickled"):
            way(one)
    gc.collect()
    other = fp.Checkpointer(tmp_path)
    with pytest.raises(fp.ConfigError, match="is being saved to by"):
        other.save(2, {})
    checkpointer.save(2, {}).result()
    checkpointer.close()


@pytest.mark.parametrize("way", WAYS)
def test_unfinished_directories_saves_and_tables_go_on(way: Callable[[Any], object], tmp_path: Path) -> None:
    directory = fp.DirectorySave(tmp_path / "d")
    directory.save({"w": torch.ones(3)}, "m.safetensors")
    pending = fp.save_async({"w": torch.ones(3)}, tmp_path / "x.pt")
    with fp.RowWriter(tmp_path / "rows.npy", (2,), torch.float32) as writer:
        writer.append(torch.ones(5, 2))
        for one in (directory, pending, writer):
            with pytest.raises(TypeError, match=f"a {type(one).__name__} cannot be copied or pickled"):
                way(one)
        gc.collect()
        writer.append(torch.ones(5, 2))
    directory.publish().result()
    pending.result()
    assert len(fp.load(tmp_path / "d" / "m.safetensors")["w"]) == 3
    assert fp.RowStore(tmp_path / "rows.npy").row_count == 10


@pytest.mark.parametrize("way", WAYS)
def test_tickets_keep_their_rows(way: Callable[[Any], object], tmp_path: Path) -> None:
    fp.write_rows(tmp_path / "rows.npy", torch.arange(10.0).view(5, 2))
    with fp.RowStore(tmp_path / "rows.npy") as rows:
        ticket = rows.prefetch([3])
        with pytest.raises(TypeError, match="a RowTicket cannot be copied or pickled"):
            way(ticket)
        gc.collect()
        assert ticket.result().tolist() == [[6, 7]]
