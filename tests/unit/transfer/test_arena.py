"""Room in the arena: for all files of a save together, and for those of the save after it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import fastpersist as fp
from fastpersist import _native
from fastpersist.transfer.arena import Arena, ArenaOfSave

MIB = 1 << 20


def test_files_of_one_save_have_room_together() -> None:
    arena = ArenaOfSave(Arena())
    files = [torch.ones(20 * MIB, dtype=torch.uint8) for _ in range(4)]
    snapshots = [_native.Snapshot(arena.for_state(file.nbytes)) for file in files]
    for snapshot, file in zip(snapshots, files, strict=True):
        snapshot.add(file.data_ptr(), file.nbytes, _native.SourceKind.STABLE)
    for snapshot in snapshots:
        snapshot.capture(_native.SourceKind.STABLE, False)  # without a writer that would make room
    assert [snapshot.counts()["stable_remaining_bytes"] for snapshot in snapshots] == [0, 0, 0, 0]
    for snapshot in snapshots:
        snapshot.close()


def test_a_limit_holds_for_all_files_of_a_save() -> None:
    arena = ArenaOfSave(Arena(30 * MIB))
    files = [torch.ones(20 * MIB, dtype=torch.uint8) for _ in range(2)]
    snapshots = [_native.Snapshot(arena.for_state(file.nbytes)) for file in files]
    for snapshot, file in zip(snapshots, files, strict=True):
        snapshot.add(file.data_ptr(), file.nbytes, _native.SourceKind.STABLE)
        snapshot.capture(_native.SourceKind.STABLE, False)
    assert [snapshot.counts()["stable_remaining_bytes"] for snapshot in snapshots] == [0, 10 * MIB]
    for snapshot in snapshots:
        snapshot.close()


def test_a_directory_asks_for_room_for_all_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    class Recording(Arena):
        def for_state(self, state_bytes: int) -> _native.Arena:
            asked.append(state_bytes)
            return super().for_state(state_bytes)

    arena = Recording()
    for step in range(2):
        save = fp.DirectorySave(tmp_path / str(step), _arena=arena)
        for name, count in (("a.pt", 1000), ("b.pt", 500)):
            save.save({"w": torch.ones(count)}, name)
        save.publish().result(30)
    assert asked == [4000, 6000, 4000, 6000]
