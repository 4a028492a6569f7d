"""DCP in one process: ours and torch's own writer and reader read each other."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.dcp_states import (
    IGNORED,
    WRITERS,
    blank,
    failure_of,
    has_use_collectives,
    load,
    loaded,
    make_state,
    portrait,
    save,
)
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import fastpersist as fp
from fastpersist.integrations import torch_dcp
from fastpersist.integrations.torch_dcp import FastPersistReader, FastPersistSavePlanner, FastPersistWriter
from fastpersist.transfer import reader, writer

pytestmark = [pytest.mark.filterwarnings(one) for one in IGNORED]

torch.set_num_threads(1)


@pytest.mark.parametrize("reader", [FastPersistReader, dcp.FileSystemReader], ids=["ours", "torch's"])
@pytest.mark.parametrize("writer", WRITERS)
def test_each_reader_reads_each_writer(tmp_path: Path, writer: str, reader: Any) -> None:
    state = make_state()
    dcp.save(state, storage_writer=WRITERS[writer](tmp_path / "checkpoint"))
    assert loaded(tmp_path / "checkpoint", reader, state) == portrait(state)


def test_tensors_of_a_device_are_copied_piece_by_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU stands for the device, and what is read and written goes through the copies that a device needs."""
    for side in (writer, reader):
        monkeypatch.setattr(side, "is_host_memory", lambda _: False)
    state = make_state()
    save(state, tmp_path / "checkpoint")
    assert portrait(load(tmp_path / "checkpoint", state)) == portrait(state)
    assert loaded(tmp_path / "checkpoint", dcp.FileSystemReader, state) == portrait(state)


def test_targets_of_another_dtype_or_order_are_filled(tmp_path: Path) -> None:
    state = {"a": torch.randn(64, 48), "b": torch.randn(1000)}
    save(state, tmp_path / "checkpoint")
    target = {"a": torch.zeros(48, 64).t(), "b": torch.zeros(1000, dtype=torch.float64)}
    dcp.load(target, storage_reader=FastPersistReader(tmp_path / "checkpoint"))
    assert torch.equal(target["a"], state["a"])
    assert torch.equal(target["b"], state["b"].double())


def test_models_and_optimizers_come_back_through_get_and_set_state_dict(tmp_path: Path) -> None:
    def trained(steps: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(steps)
        model = torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.Linear(30, 4))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * (steps + 1))
        for _ in range(steps):
            model(torch.randn(3, 20)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return model, optimizer

    def state_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        model_state, optimizer_state = get_state_dict(model, optimizer)
        return {"model": model_state, "optimizer": optimizer_state}

    first, other = trained(3), trained(1)
    expected = portrait(state_of(*first))
    dcp.save(state_of(*first), storage_writer=FastPersistWriter(tmp_path / "checkpoint"))
    target = state_of(*other)
    dcp.load(target, storage_reader=FastPersistReader(tmp_path / "checkpoint"))
    set_state_dict(*other, model_state_dict=target["model"], optim_state_dict=target["optimizer"])
    assert portrait(state_of(*other)) == expected


def test_the_path_may_come_as_checkpoint_id_and_writers_may_be_used_again(tmp_path: Path) -> None:
    writer, reader = FastPersistWriter(), FastPersistReader()
    for seed in (1, 2):
        path = tmp_path / "deep" / str(seed)
        dcp.save(make_state(seed), checkpoint_id=path, storage_writer=writer)
        target = blank(make_state())
        dcp.load(target, checkpoint_id=path, storage_reader=reader)
        assert portrait(target) == portrait(make_state(seed))
    metadata = reader.read_metadata()
    assert metadata.storage_meta is not None
    assert metadata.storage_meta.checkpoint_id == os.fspath(path)


@pytest.mark.parametrize("kind", ["", "HuggingFace"])
def test_a_tilde_is_a_name_as_for_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    (tmp_path / "home").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    make_writer, make_reader = (getattr(torch_dcp, f"FastPersist{kind}{what}") for what in ("Writer", "Reader"))
    found = torch.zeros(3)
    dcp.save({"a": torch.ones(3)}, storage_writer=make_writer("~/checkpoint"), no_dist=True)
    dcp.load({"a": found}, storage_reader=make_reader("~/checkpoint"), no_dist=True)
    assert torch.equal(found, torch.ones(3))
    assert not os.listdir(tmp_path / "home")
    for nothing in ("", "s3://bucket/checkpoint"):
        with pytest.raises(CheckpointException, match=r"names no file|is the URL"):
            dcp.save({"a": found}, storage_writer=make_writer(nothing), no_dist=True)


def test_without_a_path_it_is_said_how_to_give_one(tmp_path: Path) -> None:
    assert "checkpoint_id" in str(failure_of(lambda: dcp.save({}, storage_writer=FastPersistWriter())))
    assert "checkpoint_id" in str(failure_of(lambda: dcp.load({"a": 1}, storage_reader=FastPersistReader())))


@pytest.mark.parametrize("make", [FastPersistWriter, FastPersistReader])
def test_unknown_engines_are_refused_at_once(make: Any) -> None:
    with pytest.raises(fp.ConfigError, match="no engine 'warp'"):
        make("checkpoint", engine="warp")


@has_use_collectives
def test_one_process_may_do_without_collectives(tmp_path: Path) -> None:
    state = make_state()
    writer = FastPersistWriter(tmp_path / "checkpoint")
    dcp.save(state, storage_writer=writer, no_dist=True, use_collectives=False)
    assert portrait(load(tmp_path / "checkpoint", state)) == portrait(state)


@has_use_collectives
def test_what_torch_wrote_without_collectives_is_read(tmp_path: Path) -> None:
    state = {"a": torch.randn(10), "b": "text"}
    writer = dcp.FileSystemWriter(tmp_path / "checkpoint")
    dcp.save(state, storage_writer=writer, no_dist=True, use_collectives=False)
    assert (tmp_path / "checkpoint" / "__0.metadata").exists()
    assert portrait(load(tmp_path / "checkpoint", state)) == portrait(state)


def test_async_save_writes_what_was_there_when_it_was_called(tmp_path: Path) -> None:
    import torch.distributed as dist

    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        state = {"a": torch.arange(1 << 16), "b": torch.ones(3)}
        expected = portrait(state)
        future = dcp.async_save(state, storage_writer=FastPersistWriter(tmp_path / "checkpoint"))
        state["a"].zero_()
        future.result()
    finally:
        dist.destroy_process_group()
    assert portrait(load(tmp_path / "checkpoint", state)) == expected


def test_writers_readers_and_planners_go_to_other_processes(tmp_path: Path) -> None:
    """As async_save with processes has it."""
    state = make_state()
    writer, reader, planner = pickle.loads(
        pickle.dumps((FastPersistWriter(tmp_path / "c"), FastPersistReader(tmp_path / "c"), FastPersistSavePlanner()))
    )
    dcp.save(state, storage_writer=writer, planner=planner)
    target = blank(state)
    dcp.load(target, storage_reader=reader)
    assert portrait(target) == portrait(state)
