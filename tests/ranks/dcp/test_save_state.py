"""Sharded state among other files of a directory, published with them; and what the ranks say about it."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.process_groups import run_ranks
from support.runs import hidden_names
from support.sameness import assert_same
from support.sharded_runs import ShardedRun, expected, mesh_of_all
from support.training import PATIENCE_S, HeldFilesystem

import fastpersist as fp
from fastpersist.commit.filesystem import using
from fastpersist.dcp.plan_agreement import SharedPlans
from fastpersist.dcp.save_state import save_sharded
from fastpersist.distributed.group_save import directory_save_together

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning:torch.distributed.checkpoint")


def loaded(path: Path) -> dict[str, Any]:
    """Load the model and the optimizer of a DCP checkpoint by DCP's own reader."""
    run = ShardedRun(blank=True).advance()
    state = {"model": run.model.state_dict(), "optimizer": run.optimizer.state_dict(), "step": 0}
    dcp.load(state, storage_reader=dcp.FileSystemReader(path), no_dist=True)
    return {**state, "model": dict(state["model"])}  # type: ignore[call-overload]


def of_run(step: int) -> dict[str, Any]:
    whole = expected(step)
    return {"model": whole["model"], "optimizer": whole["optimizer"], "step": step}


def test_several_sharded_states_and_other_files_appear_together(tmp_path: Path) -> None:
    run = ShardedRun().advance(1)
    with fp.DirectorySave(tmp_path / "out") as files:
        save_sharded(files, run.state(), "first", run.optimizer)
        files.add_bytes("config.json", b"{}")
        run.advance()  # the gate lets go what was captured
        save_sharded(files, run.state(), "deep/second", run.optimizer)
        files.save({"lr": 1}, "extra.pt")
        assert not (tmp_path / "out").exists()
        files.publish().result()
    for step, name in ((1, "first"), (2, "deep/second")):
        assert_same(loaded(tmp_path / "out" / name), of_run(step))
    names = [entry["name"] for entry in json.loads((tmp_path / "out" / "MANIFEST.json").read_text())["files"]]
    parts = [f"{name}/{file}" for name in ("first", "deep/second") for file in (".metadata", "__0_0.distcp")]
    assert names == sorted([*parts, "config.json", "extra.pt"])
    assert fp.verify(tmp_path / "out").ok


def test_ranks_save_several_states_in_one_directory_while_they_train(tmp_path: Path) -> None:
    def work(rank: int, count: int) -> None:
        run = ShardedRun(mesh_of_all()).advance(1)
        with (
            using(disk := HeldFilesystem()),
            directory_save_together(tmp_path / "out", dist.group.WORLD) as files,
        ):
            save_sharded(files, run.state(), "model", run.optimizer)
            files.save({"step": 1}, "trainer.pt")
            run.advance()
            save_sharded(files, run.state(), "", run.optimizer)
            pending = files.publish()
            assert disk.reached.wait(PATIENCE_S)
            run.advance()
            assert not pending.done()
            disk.release()
            pending.result()

    run_ranks(2, work)
    assert_same(loaded(tmp_path / "out" / "model"), of_run(1))
    assert_same(loaded(tmp_path / "out"), of_run(2))
    assert fp.load(tmp_path / "out" / "trainer.pt") == {"step": 1}
    names = [entry["name"] for entry in json.loads((tmp_path / "out" / "MANIFEST.json").read_text())["files"]]
    parts = [".metadata", "__0_0.distcp", "__1_0.distcp"]
    assert names == sorted([*parts, *(f"model/{part}" for part in parts), "trainer.pt"])
    assert fp.verify(tmp_path / "out").ok


def test_saves_that_overlap_do_not_mix_their_plans(tmp_path: Path) -> None:
    plans = SharedPlans()
    states = [{f"{letter}{index}": torch.full((3,), float(index)) for index in range(4)} for letter in "ab"]
    with using(disk := HeldFilesystem()):
        first, second = (fp.DirectorySave(tmp_path / name) for name in "ab")
        save_sharded(first, states[0], plans=plans)
        assert disk.reached.wait(PATIENCE_S)  # it has planned
        disk.reached.clear()
        save_sharded(second, states[1], plans=plans)
        assert disk.reached.wait(PATIENCE_S)
        pending = [first.publish(), second.publish()]
        disk.release()
        for one in pending:
            one.result()
    for name, state in zip("ab", states, strict=True):
        found = {key: torch.zeros(3) for key in state}
        dcp.load(found, storage_reader=dcp.FileSystemReader(tmp_path / name), no_dist=True)
        assert_same(found, state)


def test_two_states_of_one_name_are_refused(tmp_path: Path) -> None:
    with fp.DirectorySave(tmp_path / "out") as files:
        save_sharded(files, {"a": torch.ones(2)})
        save_sharded(files, {"a": torch.ones(2)})
        error = files.publish().exception()
    assert isinstance(error, (fp.ConfigError, fp.StorageError))
    assert not (tmp_path / "out").exists()
    assert hidden_names(tmp_path) == []


def test_what_is_given_up_leaves_nothing(tmp_path: Path) -> None:
    with using(disk := HeldFilesystem()):
        with fp.DirectorySave(tmp_path / "out") as files:
            save_sharded(files, {"a": torch.ones(2)}, "a")
            assert disk.reached.wait(PATIENCE_S)
            threading.Timer(0.05, disk.release).start()
    assert list(tmp_path.iterdir()) == []
