"""Resuming allocates what no target has room for, and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.archives import record_places
from support.resumables import load, network, resumable, save, state_of, storages_of
from support.specimens import train

from fastpersist.loading import restore
from fastpersist.transfer.reader import Extents


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state.pt"


@pytest.fixture
def allocated(monkeypatch: pytest.MonkeyPatch) -> list[torch.UntypedStorage]:
    """Every storage with data that a load makes."""
    made: list[torch.UntypedStorage] = []
    original = restore.new_storage

    def spy(size_bytes: int, device: torch.device) -> torch.UntypedStorage:
        storage = original(size_bytes, device)
        if device.type != "meta":
            made.append(storage)
        return storage

    monkeypatch.setattr(restore, "new_storage", spy)
    monkeypatch.setattr("fastpersist.loading.unpickle.new_storage", spy)
    return made


def test_new_optimizer_adopts_the_loaded_memory_and_nothing_else_is_allocated(
    path: Path, allocated: list[torch.UntypedStorage]
) -> None:
    source = network()
    optimizer = torch.optim.AdamW(source.parameters())
    train(source, optimizer, 2)
    save({"model": source.state_dict(), "optimizer": optimizer.state_dict()}, path)
    target = network(9)
    target_optimizer = torch.optim.AdamW(target.parameters())
    load(path, {"model": target, "optimizer": target_optimizer})
    assert {storage.data_ptr() for storage in allocated} == storages_of(target_optimizer)
    allocated.clear()
    load(path, {"model": target, "optimizer": target_optimizer}, verify=True)
    assert allocated == []


@pytest.mark.parametrize("steps", [0, 1], ids=["new optimizer", "optimizer with state"])
def test_every_byte_is_read_once(steps: int, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read_places: list[tuple[int, int]] = []
    original = Extents.read

    def spy(self: Extents, *arguments: Any, **options: Any) -> Any:
        read_places.extend(self.places())
        return original(self, *arguments, **options)

    save(state_of(resumable()), path)
    target = resumable(9, steps)
    monkeypatch.setattr(Extents, "read", spy)
    load(path, target, keys=["rng"])
    data = path.read_bytes()
    storages = [place for name, place in record_places(data).items() if name.startswith("data/")]
    headers = [place for place in read_places if data[place[0] :].startswith(b"PK\x03\x04")]
    assert sorted(place for place in read_places if place not in headers) == sorted(storages)
    assert {size_bytes for _, size_bytes in headers} <= {30}
    assert len(set(headers)) == len(headers)
