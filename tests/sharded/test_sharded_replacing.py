"""What `FastPersistWriter` replaces, and what it refuses to: a directory is replaced as a whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import fastpersist as fp
from fastpersist.integrations.torch_dcp import FastPersistReader, FastPersistWriter

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

STATE = {"w": torch.arange(1000.0)}
WRITERS = {"ours": FastPersistWriter, "stock": dcp.FileSystemWriter}


def save(writer: Any) -> None:
    dcp.save(STATE, storage_writer=writer, no_dist=True)


def failure_of(path: Path) -> BaseException:
    with pytest.raises(dcp.api.CheckpointException) as caught:
        save(FastPersistWriter(path))
    return caught.value.failures[0][0]


@pytest.mark.parametrize("before", WRITERS)
@pytest.mark.parametrize("name", ["config.json", "logs/precious", "step-1/.metadata"])
def test_a_directory_with_something_else_in_it_is_refused(tmp_path: Path, before: str, name: str) -> None:
    path = tmp_path / "checkpoint"
    save(WRITERS[before](path))
    other = path / name
    other.parent.mkdir(exist_ok=True)
    other.write_text("mine")
    files = {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}
    error = failure_of(path)
    assert isinstance(error, fp.ConfigError)
    assert f"{path} is replaced as a whole, and {name.split('/')[0]} in it is no part of a checkpoint" in str(error)
    assert {file: file.read_bytes() for file in path.rglob("*") if file.is_file()} == files


@pytest.mark.parametrize("before", WRITERS)
def test_a_checkpoint_is_replaced(tmp_path: Path, before: str) -> None:
    save(WRITERS[before](tmp_path / "checkpoint"))
    save(FastPersistWriter(tmp_path / "checkpoint"))
    loaded = {"w": torch.zeros(1000)}
    dcp.load(loaded, storage_reader=FastPersistReader(tmp_path / "checkpoint"), no_dist=True)
    assert torch.equal(loaded["w"], STATE["w"])
    assert fp.verify(tmp_path / "checkpoint").ok
