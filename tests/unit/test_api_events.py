"""What the functions for single files tell: each save and load, to callbacks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import fastpersist as fp
from fastpersist.events import Event, subscribe
from fastpersist.events.delivery import flush


@pytest.fixture
def heard() -> Iterator[list[Event]]:
    found: list[Event] = []
    unsubscribe = subscribe(found.append)
    yield found
    unsubscribe()


def kinds(heard: list[Event]) -> list[str]:
    assert flush(60)
    return [event.kind for event in heard]


def test_save_tells_what_its_report_says(tmp_path: Path, heard: list[Event]) -> None:
    path = str(tmp_path / "file.pt")
    report = fp.save({"weight": torch.zeros(1000)}, path)
    assert kinds(heard) == ["save_begun", "committed"]
    told = heard[-1]
    assert (told.root, told.path, told.step, told.rank) == (None, path, None, 0)
    assert told.figures == {
        "bytes": report.size_bytes,
        "engine": report.engine,
        "stall_s": report.total_s,
        "plan_s": report.plan_s,
        "write_s": report.write_s,
        "sync_s": report.sync_s,
    }


def test_failed_save_is_told(tmp_path: Path, heard: list[Event]) -> None:
    with pytest.raises(fp.StorageError):
        fp.save({}, tmp_path / "none" / "file.pt")
    assert kinds(heard) == ["save_begun", "failed"]
    assert str(heard[-1].figures["error"]).startswith("StorageError: ")


def test_save_async_tells_of_its_way(tmp_path: Path, heard: list[Event]) -> None:
    pending = fp.save_async({"weight": torch.zeros(1000)}, tmp_path / "file.pt")
    path = pending.result()
    assert kinds(heard) == ["save_begun", "captured", "written", "committed"]
    assert {event.path for event in heard} == {str(path)}
    assert heard[-1].figures["stall_s"] == pending.stats.stall_s
    assert heard[-1].figures["bytes"] == path.stat().st_size
    assert heard[2].figures["write_s"] > 0  # type: ignore[operator]


def test_directory_save_tells_of_its_way(tmp_path: Path, heard: list[Event]) -> None:
    with fp.DirectorySave(tmp_path / "out") as save:
        save.save({"weight": torch.zeros(1000)}, "a.pt")
        save.publish().result()
    assert kinds(heard) == ["save_begun", "captured", "written", "committed"]
    assert heard[-1].path == str(tmp_path / "out")


def test_directory_save_that_is_given_up_is_skipped(tmp_path: Path, heard: list[Event]) -> None:
    with fp.DirectorySave(tmp_path / "out") as save:
        save.save({"weight": torch.zeros(1000)}, "a.pt")
    assert kinds(heard) == ["save_begun", "skipped"]


@pytest.mark.parametrize("way", ["load", "load_into"])
def test_load_is_told(way: str, tmp_path: Path, heard: list[Event]) -> None:
    path = tmp_path / "file.pt"
    torch.save({"weight": torch.zeros(1000)}, path)
    if way == "load":
        fp.load(path)
    else:
        fp.load_into(path, {"weight": torch.ones(1000)})
    assert kinds(heard) == ["loaded"]
    assert heard[0].path == str(path)
    assert heard[0].figures["bytes"] == path.stat().st_size
    assert heard[0].figures["total_s"] > 0  # type: ignore[operator]


def test_load_of_a_model_directory_is_told(tmp_path: Path, heard: list[Event]) -> None:
    fp.save({"weight": torch.zeros(1000)}, tmp_path / "model.safetensors")
    fp.load_into(tmp_path, {"weight": torch.ones(1000)})
    assert kinds(heard) == ["save_begun", "committed", "loaded"]
    assert heard[-1].figures["bytes"] == (tmp_path / "model.safetensors").stat().st_size


def test_failed_load_is_not_told(tmp_path: Path, heard: list[Event]) -> None:
    with pytest.raises(fp.CheckpointNotFoundError):
        fp.load(tmp_path / "none.pt")
    assert kinds(heard) == []
