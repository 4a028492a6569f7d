"""`fastpersist merge`: the file is what one rank would have written, or there is none, and it is said why not."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from support.filesystems import failing_lookup
from support.process_groups import run_ranks
from support.runs import Run
from support.sameness import assert_same
from support.store_runs import SIZES, checkpoints_at, ordinary_file, step_path, train, two_stores

import fastpersist as fp
from fastpersist.checkpointer import merge as merge_module
from fastpersist.cli import main
from fastpersist.commit.filesystem import Filesystem


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps of three ranks in two stores, and a file beside them."""
    directory = tmp_path_factory.mktemp("saved")
    run_ranks(3, train, two_stores(directory, 3), 2)
    return directory


@pytest.fixture
def stores(saved: Path, tmp_path: Path) -> list[Path]:
    """The same, to be damaged."""
    for name in ("a", "b"):
        shutil.copytree(saved / name, tmp_path / name)
    return [tmp_path / "a", tmp_path / "b"]


def merge(*words: Any) -> int:
    return main(["merge", *map(str, words)])


@pytest.mark.parametrize("order", [1, -1])
def test_merged_file_is_what_one_rank_would_have_written(
    saved: Path, tmp_path: Path, order: int, capsys: pytest.CaptureFixture[str]
) -> None:
    directories = [step_path(saved / name, 2) for name in ("a", "b")][::order]
    assert merge(*directories, tmp_path / "state.pt") == 0
    assert (tmp_path / "state.pt").read_bytes() == ordinary_file(tmp_path, 2)
    assert fp.verify(tmp_path / "state.pt").ok
    assert_same(torch.load(tmp_path / "state.pt"), Run(SIZES).advance(2).state())
    assert capsys.readouterr().out.startswith(f"{tmp_path}/state.pt: ")
    assert sorted(os.listdir(tmp_path)) == ["alone", "state.pt"]


def test_file_that_is_there_is_replaced_only_if_that_is_said(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "state.pt"
    out.write_bytes(b"mine")
    directories = [step_path(saved / name, 1) for name in ("a", "b")]
    assert merge(*directories, out) == 2
    assert out.read_bytes() == b"mine"
    assert "--overwrite" in capsys.readouterr().err
    assert merge(*directories, out, "--overwrite", "--quiet") == 0
    assert out.read_bytes() == ordinary_file(tmp_path, 1)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("damage", "code", "words"),
    [
        ("store missing", 1, ["rank 2 (written on ", "name them too"]),
        ("part missing", 1, ["state.pt.part-00001", "cannot be read"]),
        ("part damaged", 1, ["state.pt.part-00001", "rank 1 has written it on ", "its CRC is"]),
        ("part short", 1, ["state.pt.part-00001", "its manifest says"]),
        ("record damaged", 1, ["PARTS.json", "its CRC"]),
        ("other step", 2, ["of two saves"]),
        ("same store twice", 2, ["the same store"]),
        ("no checkpoint", 2, ["MANIFEST.json"]),
        ("a root", 2, ["holds steps", "such as step-00000002"]),
        ("no directory", 2, ["there is no directory"]),
        ("a file", 2, ["state.pt.part-00001 is no directory"]),
        ("whole already", 2, ["it is whole: use its files (state.pt), or make one with `fastpersist convert`"]),
    ],
)
def test_what_cannot_be_merged_is_said_and_nothing_is_left(
    stores: list[Path],
    tmp_path: Path,
    damage: str,
    code: int,
    words: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    directories = [step_path(root, 2) for root in stores]
    part = directories[0] / "state.pt.part-00001"
    if damage == "store missing":
        directories.pop()
    elif damage == "part missing":
        part.unlink()
    elif damage == "part damaged":
        with part.open("r+b") as file:
            file.seek(5000)
            file.write(b"damage")
    elif damage == "part short":
        os.truncate(part, 4096)
    elif damage == "record damaged":
        record = directories[1] / "PARTS.json"
        record.write_bytes(record.read_bytes().replace(b'"store":1', b'"store":0'))
    elif damage == "other step":
        directories[1] = step_path(stores[1], 1)
    elif damage == "same store twice":
        directories = [directories[0], directories[0]]
    elif damage == "no checkpoint":
        (directories[1] / "MANIFEST.json").unlink()
    elif damage == "a root":
        directories = stores
    elif damage == "no directory":
        directories[1] = tmp_path / "nothing"
    elif damage == "a file":
        directories[1] = part
    else:
        with checkpoints_alone(tmp_path / "whole") as checkpoints:
            checkpoints.save(1, {"a": torch.ones(3)}).result()
        directories = [step_path(tmp_path / "whole", 1)]
    assert merge(*directories, tmp_path / "out.pt") == code
    told = capsys.readouterr().err
    for word in words:
        assert word in told
    assert not [name for name in os.listdir(tmp_path) if "out" in name]


def checkpoints_alone(root: Path) -> fp.Checkpointer:
    return fp.Checkpointer(root)


@pytest.mark.parametrize("fault", ["exists already", "looking up"])
@pytest.mark.parametrize("out", ["state.pt", "state.safetensors"])
def test_file_that_was_not_seen_stays(
    saved: Path,
    tmp_path: Path,
    out: str,
    fault: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    copy_parts = merge_module._copy_parts

    def appearing(*arguments: Any) -> Any:
        (tmp_path / out).write_text("mine")
        return copy_parts(*arguments)

    if fault == "exists already":  # it appears meanwhile
        monkeypatch.setattr(merge_module, "_copy_parts", appearing)
    else:
        (tmp_path / out).write_text("mine")
    with failing_lookup(tmp_path / out, 1 if fault == "looking up" else 0):
        assert merge(*(step_path(saved / name, 1) for name in ("a", "b")), tmp_path / out) == 2
    assert fault in capsys.readouterr().err
    assert (tmp_path / out).read_text() == "mine"
    assert os.listdir(tmp_path) == [out]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning:torch")
def test_file_that_appears_while_shards_are_saved_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import torch.distributed.checkpoint as dcp

    dcp.save({"w": torch.ones(3)}, checkpoint_id=str(tmp_path / "shards"), no_dist=True)
    out = tmp_path / "model.pt"
    sync = Filesystem.sync

    def appearing(filesystem: Filesystem, fd: int, path: str) -> None:
        out.write_text("mine")
        sync(filesystem, fd, path)

    monkeypatch.setattr(Filesystem, "sync", appearing)
    assert merge(tmp_path / "shards", out) == 2
    assert "exists already" in capsys.readouterr().err
    assert out.read_text() == "mine"
    assert sorted(os.listdir(tmp_path)) == ["model.pt", "shards"]


def test_flat_dict_becomes_safetensors_and_another_state_is_refused(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def watched_load(path: str, **options: Any) -> Any:
        beside.append(os.listdir(tmp_path))
        return fp.load(path, **options)

    beside: list[list[str]] = []
    monkeypatch.setattr(merge_module, "load", watched_load)
    (tmp_path / "flat").mkdir()
    roots = two_stores(tmp_path / "flat")

    def work(rank: int, count: int) -> None:
        run = Run(SIZES).advance()
        with checkpoints_at(roots[rank], run) as checkpoints:
            checkpoints.save(1, run.model.state_dict())

    run_ranks(2, work)
    out = tmp_path / "model.safetensors"
    assert merge(*(step_path(root, 1) for root in roots), out) == 0
    assert_same(fp.load(out), dict(Run(SIZES).advance().model.state_dict()))
    assert beside == [["flat"]], "what is copied first has no name: nobody else can write it, and it goes with us"
    assert merge(*(step_path(saved / name, 2) for name in ("a", "b")), tmp_path / "no.safetensors") == 2
    assert "safetensors" in capsys.readouterr().err
    assert sorted(os.listdir(tmp_path)) == ["flat", "model.safetensors"]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning:torch")
@pytest.mark.parametrize("saved_by", ["stock", "checkpointer"])
def test_shards_of_dcp_become_one_file(tmp_path: Path, saved_by: str, capsys: pytest.CaptureFixture[str]) -> None:
    import torch.distributed.checkpoint as dcp

    state = {"model": {"weight": torch.arange(400_000.0).view(400, 1000), "bias": torch.ones(7)}, "step": 5}
    directory = step_path(tmp_path, 5)
    if saved_by == "stock":
        dcp.save(state, checkpoint_id=directory, no_dist=True)
    else:
        with fp.Checkpointer(tmp_path, sharded=True) as checkpoints:
            checkpoints.save(5, state)
    assert merge(directory, tmp_path / "state.pt") == 0
    assert_same(torch.load(tmp_path / "state.pt"), state)
    (part,) = directory.glob("*.distcp")
    part.rename(tmp_path / "gone")
    assert merge(directory, tmp_path / "state.pt", "--overwrite") == 2
    assert "which rank 0 wrote" in capsys.readouterr().err
    assert_same(torch.load(tmp_path / "state.pt"), state)
    (directory / "halves").mkdir()
    (tmp_path / "gone").rename(directory / "halves" / part.name)
    assert merge(directory, directory / "halves", tmp_path / "again.pt") == 0  # shards of two stores, brought together
    assert_same(torch.load(tmp_path / "again.pt"), state)
