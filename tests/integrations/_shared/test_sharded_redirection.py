"""What is saved below a directory with dcp.save goes into a DirectorySave, what is loaded is read by us; no more."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.dcp_states import PART, blank, make_state, portrait
from support.runs import held_writers
from torch.distributed.checkpoint import state_dict
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict import StateDictOptions

import fastpersist as fp
from fastpersist.integrations._shared import sharded_redirection as ours
from fastpersist.integrations._shared.sharded_redirection import reads_shards, shards_into, why_not_whole
from fastpersist.integrations.torch_dcp import FastPersistReader

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

STATE = {name: value for name, value in make_state().items() if name not in ("conjugate", "negative")}


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[str | None]:
    """Note which directories FastPersistReader reads."""
    noted: list[str | None] = []
    read = FastPersistReader.read_data

    def read_data(self: FastPersistReader, *arguments: Any) -> Any:
        noted.append(self.checkpoint_id)
        return read(self, *arguments)

    monkeypatch.setattr(FastPersistReader, "read_data", read_data)
    return noted


def loaded(path: Path, **options: Any) -> list[Any]:
    target = blank(STATE)
    dcp.load(target, **(options or {"checkpoint_id": path}))
    return portrait(target)


SAVES = {
    "an identifier": lambda path: dcp.save(STATE, checkpoint_id=path),
    "torch's writer": lambda path: dcp.save(STATE, storage_writer=dcp.FileSystemWriter(path)),
    "torch's writer and planner": lambda path: dcp.save(
        STATE, storage_writer=dcp.FileSystemWriter(path), planner=DefaultSavePlanner()
    ),
    "torch's writer and an identifier": lambda path: dcp.save(
        STATE, storage_writer=dcp.FileSystemWriter("/nowhere"), checkpoint_id=str(path)
    ),
}


@pytest.mark.parametrize("save", SAVES.values(), ids=SAVES)
@pytest.mark.parametrize("name", ["", "model_0", "deep/er"])
def test_dcp_save_goes_into_the_directory_with_what_others_put_there(tmp_path: Path, save: Any, name: str) -> None:
    with held_writers() as writers, fp.DirectorySave(tmp_path / "checkpoint") as files:
        with shards_into(files, files.path):
            save(Path(files.path, name))
            assert not Path(files.path, name, ".metadata").exists()  # it is written behind the training
        Path(files.path, "config.json").write_text("{}")
        writers.release()
        files.publish().result()
    final = tmp_path / "checkpoint" / name
    assert fp.verify(tmp_path / "checkpoint").ok
    manifest = {entry.name: entry for entry in fp.inspect(tmp_path / "checkpoint").files}
    prefix = f"{name}/" if name else ""
    assert set(manifest) == {prefix + PART, f"{prefix}.metadata", "config.json"}
    assert all(entry.crc32 is not None for entry in manifest.values())
    assert loaded(final) == portrait(STATE)
    assert why_not_whole(final) is None


class OwnPlanner(DefaultSavePlanner):
    """Somebody's own."""


class OwnWriter(dcp.FileSystemWriter):
    """Somebody's own."""


PASSED_ON = {
    "elsewhere": lambda inside, outside: dcp.save(STATE, checkpoint_id=outside),
    "a name that begins alike": lambda inside, outside: dcp.save(STATE, checkpoint_id=f"{inside}-other"),
    "another writer": lambda inside, outside: dcp.save(STATE, storage_writer=OwnWriter(inside)),
    "another planner": lambda inside, outside: dcp.save(STATE, checkpoint_id=inside, planner=OwnPlanner()),
    "options of a planner": lambda inside, outside: dcp.save(
        STATE, checkpoint_id=inside, planner=DefaultSavePlanner(dedup_save_to_lowest_rank=True)
    ),
    "one rank alone": lambda inside, outside: dcp.save(STATE, checkpoint_id=inside, no_dist=True),
}


@pytest.mark.parametrize("save", PASSED_ON.values(), ids=PASSED_ON)
def test_what_somebody_has_chosen_for_a_reason_is_done_as_ever(
    tmp_path: Path, save: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ours, "save_sharded", lambda *_, **__: pytest.fail("it was redirected"))
    with fp.DirectorySave(tmp_path / "checkpoint") as files:
        inside = Path(files.path)
        with shards_into(files, files.path):
            assert save(inside, tmp_path / "elsewhere") is not None
        (written,) = {path.parent for path in tmp_path.rglob("*.metadata")}
        assert loaded(written) == portrait(STATE)


def test_another_thread_is_left_alone_and_afterwards_all_is_as_before(tmp_path: Path) -> None:
    before = dcp.save, dcp.load
    with fp.DirectorySave(tmp_path / "checkpoint") as files, reads_shards(), shards_into(files, files.path):
        assert dcp.save is not before[0]
        assert dcp.load is not before[1]
        other = threading.Thread(target=lambda: dcp.save(STATE, checkpoint_id=Path(files.path, "below")))
        other.start()
        other.join()
        assert Path(files.path, "below", ".metadata").exists()
    assert (dcp.save, dcp.load) == before


def test_shards_stay_on_their_device_and_what_is_gathered_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def get_model_state_dict(_model: Any, *, submodules: Any = None, options: Any = None) -> None:
        asked.append(None if options is None else (options.cpu_offload, options.full_state_dict))

    monkeypatch.setattr(state_dict, "get_model_state_dict", get_model_state_dict)
    before = state_dict.get_model_state_dict, state_dict.get_optimizer_state_dict
    with fp.DirectorySave(tmp_path / "checkpoint") as files, shards_into(files, files.path):
        for options in (None, (True, False), (True, True), (False, False)):
            given = options and StateDictOptions(cpu_offload=options[0], full_state_dict=options[1])
            state_dict.get_model_state_dict(None, options=given)
    assert asked == [None, (False, False), (True, True), (False, False)]
    assert (state_dict.get_model_state_dict, state_dict.get_optimizer_state_dict) == before
    state_dict.get_model_state_dict(None, options=StateDictOptions(cpu_offload=True))
    assert asked[-1] == (True, False)


def test_objects_with_a_state_dict_are_asked_for_it(tmp_path: Path) -> None:
    model = torch.nn.Linear(4, 3)
    with fp.DirectorySave(tmp_path / "checkpoint") as files:
        with shards_into(files, files.path):
            dcp.save({"model": model}, checkpoint_id=files.path)
        files.publish().result()
    other = torch.nn.Linear(4, 3)
    with reads_shards():
        dcp.load({"model": other}, checkpoint_id=tmp_path / "checkpoint")
    assert torch.equal(model.weight, other.weight)


def test_dcp_load_is_done_by_our_reader_whoever_has_written(tmp_path: Path, loads: list[Any]) -> None:
    path = tmp_path / "stock"
    dcp.save(STATE, checkpoint_id=path)
    with reads_shards():
        assert loaded(path) == portrait(STATE)
        assert loaded(path, storage_reader=dcp.FileSystemReader(path)) == portrait(STATE)
        assert loads == [str(path), str(path)]

        class OwnReader(dcp.FileSystemReader):
            """Somebody's own."""

        assert loaded(path, storage_reader=OwnReader(path)) == portrait(STATE)
    assert loaded(path) == portrait(STATE)
    assert len(loads) == 2


def test_what_a_load_meets_is_raised_as_it_is(tmp_path: Path) -> None:
    with reads_shards():
        with pytest.raises(AssertionError, match=r"there is no checkpoint at .*nothing"):  # as torch has it
            loaded(tmp_path / "nothing")
        dcp.save(STATE, checkpoint_id=tmp_path / "a")
        with pytest.raises(RuntimeError, match="Missing key in checkpoint state_dict: more"):
            dcp.load({"more": torch.ones(3)}, checkpoint_id=tmp_path / "a")
        (tmp_path / "a" / PART).write_bytes(b"")
        with pytest.raises(fp.FastPersistError, match=PART):
            loaded(tmp_path / "a")


def test_directories_that_are_not_whole_are_told_apart(tmp_path: Path) -> None:
    dcp.save(STATE, checkpoint_id=tmp_path)
    assert why_not_whole(tmp_path) is None
    part = tmp_path / PART
    data = part.read_bytes()
    part.write_bytes(data[:-1])
    assert "is cut off" in str(why_not_whole(tmp_path))
    part.unlink()
    assert f"{PART} is missing" in str(why_not_whole(tmp_path))
    (tmp_path / ".metadata").write_bytes(b"what")
    assert "metadata" in str(why_not_whole(tmp_path))
    (tmp_path / ".metadata").unlink()
    assert "no checkpoint" in str(why_not_whole(tmp_path))
