"""DeepSpeed, by one rank: its own files, whole or not at all, written while training goes on. The engine is a stand-in.

With DeepSpeed itself: test_training.py. With several ranks: test_ranks.py.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.deepspeed_stand_in import (
    DeepSpeedZeroOptimizer,
    ForestallingZeroOptimizer,
    StandInEngine,
    StrangeZeroOptimizer,
    deepspeed_integration,
    files_of,
    latest_in,
    names_in,
)
from support.imports import expect_import_error
from support.runs import held_writers, hidden_names, wait_for_writers
from support.sameness import portrait
from support.training import PATIENCE_S

import fastpersist as fp

attach = deepspeed_integration().attach

stages = pytest.mark.parametrize("stage", [0, 1, 3])


@pytest.fixture(autouse=True)
def _no_writer_is_left() -> Iterator[None]:
    yield
    wait_for_writers()


def stock_portrait(engine: StandInEngine, directory: Path) -> Any:
    """Say what stock saving would write now."""
    engine.save_checkpoint(str(directory), "stock")
    return portrait(files_of(directory / "stock"))


# ------------------------------------------------------------------------------------------- what is saved, and when


@stages
def test_files_are_those_of_the_moment_of_saving_though_training_goes_on(
    tmp_path: Path, stage: int, leak_check: None
) -> None:
    engine = StandInEngine(stage)
    engine.train(2)
    expected = stock_portrait(engine, tmp_path)
    with attach(engine) as saving, held_writers() as writers:
        assert engine.save_checkpoint(str(tmp_path / "ours"), client_state={}) is True
        assert writers.reached.wait(PATIENCE_S)
        pending = saving.pending()
        assert not pending.captured(), "weights and moments are written from where they are"
        assert pending.stats.bytes_at_gate == 0
        engine.train(2)
        assert pending.captured()
        assert not pending.done()
        assert names_in(tmp_path / "ours") == hidden_names(tmp_path / "ours")
        writers.release()
        saving.wait()
        assert saving.pending() is None
    assert latest_in(tmp_path / "ours") == "global_step2"
    assert portrait(files_of(tmp_path / "ours" / "global_step2")) == expected
    assert fp.verify(tmp_path / "ours" / "global_step2").ok
    trained_bytes = 4 * sum(one.numel() for one in engine.module.parameters())
    assert pending.stats.bytes_at_gate >= (2 if stage == 3 else 3) * trained_bytes


@stages
@pytest.mark.parametrize("direction", ["stock reads ours", "ours reads stock", "ours reads ours"])
def test_training_resumes_bit_by_bit(tmp_path: Path, stage: int, direction: str) -> None:
    engine = StandInEngine(stage)
    saving = None if direction == "ours reads stock" else attach(engine)
    engine.train(3)
    engine.save_checkpoint(str(tmp_path))
    expected = engine.train(3)
    if saving is not None:
        saving.close()
    resumed = StandInEngine(stage)
    resumed.train(1)
    if direction != "stock reads ours":
        attach(resumed)
    path, _ = resumed.load_checkpoint(str(tmp_path))
    assert path is not None
    assert resumed.train(3) == expected
    assert len(set(expected)) == 3


def test_tensors_that_forward_changes_are_copied_before_the_save_returns(tmp_path: Path) -> None:
    engine = StandInEngine()
    saving = attach(engine)
    with held_writers():
        engine.save_checkpoint(str(tmp_path), "a")
        engine.module.seen.fill_(7)
    saving.wait()
    assert files_of(tmp_path / "a")["mp_rank_00_model_states.pt"]["module"]["seen"].eq(0).all()


def test_a_step_of_the_inner_optimizer_passes_the_gate_without_the_engine(tmp_path: Path) -> None:
    engine = StandInEngine(stage=1)
    expected = stock_portrait(engine, tmp_path)
    saving = attach(engine)
    engine.train()
    engine.load_checkpoint(str(tmp_path), "stock")
    with held_writers():
        engine.save_checkpoint(str(tmp_path), "a")
        engine.optimizer.step()  # as a pipeline does it
    saving.wait()
    assert portrait(files_of(tmp_path / "a")) == expected


def test_the_gate_is_passed_before_anything_of_the_engines_step(tmp_path: Path) -> None:
    engine = StandInEngine(1, kind=ForestallingZeroOptimizer)
    engine.train()
    expected = stock_portrait(engine, tmp_path)
    saving = attach(engine)
    with held_writers():
        engine.save_checkpoint(str(tmp_path), "a")
        engine.train()
    saving.wait()
    assert portrait(files_of(tmp_path / "a")) == expected


@pytest.mark.parametrize("why", ["unknown optimizer", "hybrid engine", "zenflow", "no optimizer", "deepcompile"])
def test_all_is_copied_at_once_where_it_is_not_sure_what_a_step_changes(
    tmp_path: Path, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    class DeepSpeedHybridEngine(StandInEngine):
        pass

    engine = DeepSpeedHybridEngine() if why == "hybrid engine" else StandInEngine()
    if why == "unknown optimizer":
        engine = StandInEngine(1, kind=StrangeZeroOptimizer)
    if why == "zenflow":
        engine.zenflow = True  # type: ignore[attr-defined]
    if why == "deepcompile":
        engine.is_deepcompile_active = lambda: True  # type: ignore[attr-defined]
    expected = stock_portrait(engine, tmp_path)
    if why == "no optimizer":
        optimizer, engine.optimizer = engine.optimizer, torch.nn.Identity()
    with caplog.at_level(logging.INFO, "fastpersist"), held_writers():
        saving = attach(engine)
        if why == "no optimizer":
            engine.optimizer.state_dict = optimizer.state_dict
        engine.save_checkpoint(str(tmp_path), "a")
        assert saving.pending().captured()
        with torch.no_grad():
            for one in engine.module.parameters():
                one.zero_()
    saving.wait()
    assert portrait(files_of(tmp_path / "a")) == expected
    assert "save_checkpoint copies everything before it returns" in caplog.text


def test_frozen_weights_are_written_from_where_they_are_if_they_are_declared(tmp_path: Path) -> None:
    engine = StandInEngine(1)
    frozen = torch.arange(100_000.0)
    engine.module.register_buffer("frozen", frozen)
    saving = attach(engine, constant=[frozen])
    with held_writers():
        engine.save_checkpoint(str(tmp_path), "a")
        assert saving.pending().stats.bytes_before_return < frozen.nbytes
        copied_bytes = saving.pending().stats.bytes_before_return
    saving.wait()
    assert copied_bytes < frozen.nbytes
    assert files_of(tmp_path / "a")["mp_rank_00_model_states.pt"]["module"]["frozen"].equal(frozen)


def test_without_background_it_is_there_when_save_checkpoint_returns(tmp_path: Path) -> None:
    engine = StandInEngine()
    attach(engine, background=False)
    engine.save_checkpoint(str(tmp_path), 12)
    assert latest_in(tmp_path) == "12"
    assert fp.verify(tmp_path / "12").ok


def test_latest_is_left_alone_where_that_is_wanted(tmp_path: Path) -> None:
    engine = StandInEngine()
    with attach(engine):
        engine.save_checkpoint(str(tmp_path), "a")
        engine.save_checkpoint(str(tmp_path), "b", save_latest=False)
    assert latest_in(tmp_path) == "a"
    assert names_in(tmp_path) == ["a", "b", "latest"]


def test_saving_the_next_one_waits_for_the_one_before(tmp_path: Path) -> None:
    engine = StandInEngine()
    saving = attach(engine)
    for step in range(4):
        engine.train()
        engine.save_checkpoint(str(tmp_path))
        assert latest_in(tmp_path) in (
            (f"global_step{step}", f"global_step{step + 1}") if step else (None, "global_step1")
        )
    saving.close()
    assert names_in(tmp_path) == ["global_step1", "global_step2", "global_step3", "global_step4", "latest"]
    assert latest_in(tmp_path) == "global_step4"


@pytest.mark.parametrize("load", [lambda engine, path: engine.load_checkpoint(path), StandInEngine.load_checkpoint])
def test_loading_waits_for_what_is_being_saved(tmp_path: Path, load: Callable[..., Any]) -> None:
    engine = StandInEngine(1)
    engine.train()
    expected = stock_portrait(engine, tmp_path)
    engine.train()
    with attach(engine) as saving:
        engine.save_checkpoint(str(tmp_path), "stock")  # what is saved now is what is loaded
        pending = saving.pending()
        path, _ = load(engine, str(tmp_path))
        assert path == str(tmp_path / "stock" / "mp_rank_00_model_states.pt")
        assert pending.done()
    assert portrait(files_of(tmp_path / "stock")) != expected


# ------------------------------------------------------------------------------------------- tags that exist


@pytest.mark.parametrize("before", ["ours", "stock"])
def test_tag_that_exists_is_replaced_as_a_whole(tmp_path: Path, before: str) -> None:
    engine = StandInEngine(1)
    if before == "ours":
        with attach(engine):
            engine.save_checkpoint(str(tmp_path), "a")
    else:
        engine.save_checkpoint(str(tmp_path), "a")
    (tmp_path / "a" / "layer_00-model_states.pt").write_bytes(b"of a run with another model")
    engine.train()
    expected = stock_portrait(engine, tmp_path)
    with attach(engine):
        engine.save_checkpoint(str(tmp_path), "a")
    assert portrait(files_of(tmp_path / "a")) == expected
    assert fp.verify(tmp_path / "a").ok


@pytest.mark.parametrize("has_manifest", [True, False])
def test_tag_with_something_that_is_no_checkpoint_is_not_replaced(tmp_path: Path, has_manifest: bool) -> None:
    engine = StandInEngine(1)
    saving = attach(engine)
    engine.save_checkpoint(str(tmp_path), "a")
    saving.wait()
    if not has_manifest:
        (tmp_path / "a" / "MANIFEST.json").unlink()
    (tmp_path / "a" / "notes.txt").write_text("mine")
    with pytest.raises(fp.ConfigError, match=r"notes\.txt in it is no part of a checkpoint: save into"):
        engine.save_checkpoint(str(tmp_path), "a")
    assert (tmp_path / "a" / "notes.txt").read_text() == "mine"
    engine.save_checkpoint(str(tmp_path), "b")
    saving.close()
    assert latest_in(tmp_path) == "b"


def test_what_appears_under_the_tag_while_it_is_saved_stays(tmp_path: Path) -> None:
    engine = StandInEngine()
    saving = attach(engine)
    with held_writers():
        engine.save_checkpoint(str(tmp_path), "a")
        (tmp_path / "a").mkdir()
        (tmp_path / "a" / "notes.txt").write_text("mine")
    with pytest.raises(fp.ConfigError, match="a exists"):
        saving.wait()
    assert names_in(tmp_path / "a") == ["notes.txt"]
    assert latest_in(tmp_path) is None


# ------------------------------------------------------------------------------------------- what else is saved


def test_a_model_that_is_saved_alone_is_durable_when_that_returns(tmp_path: Path) -> None:
    engine = StandInEngine()
    saving = attach(engine)
    with held_writers() as writers:
        engine.save_checkpoint(str(tmp_path), "a")
        writers.release()
        assert engine.save_16bit_model(str(tmp_path / "models" / "deep"), "model.bin")
        assert portrait(torch.load(tmp_path / "models" / "deep" / "model.bin")) == portrait(engine.module.state_dict())
    with held_writers() as writers:
        engine.save_checkpoint(str(tmp_path), "b")
        assert writers.reached.wait(PATIENCE_S)
        engine.train()
        assert saving.pending().captured(), "the gate is passed as before"
    saving.close()


def test_the_class_of_the_engine_saves_in_its_own_time(tmp_path: Path) -> None:
    engine = StandInEngine(1)
    engine.train()
    expected = stock_portrait(engine, tmp_path)
    saving = attach(engine)
    StandInEngine.save_checkpoint(engine, str(tmp_path), "a")
    assert latest_in(tmp_path) == "a"
    assert portrait(files_of(tmp_path / "a")) == expected
    engine.save_checkpoint(str(tmp_path), "b")
    StandInEngine.save_checkpoint(engine, str(tmp_path), "c")
    saving.close()
    assert latest_in(tmp_path) == "c"
    assert portrait(files_of(tmp_path / "b")) == expected


def test_layers_of_a_flat_buffer_are_copied_once_and_without_the_rest_of_it(tmp_path: Path) -> None:
    flat = torch.arange(1 << 20, dtype=torch.float32)
    names = [f"layer_{number:02d}-model_states.pt" for number in range(4)]

    class PipelineEngine(StandInEngine):
        def module_state(self) -> dict[str, Any]:
            assert not self.checkpoint_engine.preserves_storage_sharing(), "or DeepSpeed would copy them as well"
            for name, part in zip(names, flat.chunk(4), strict=True):
                self.checkpoint_engine.save({"weight": part}, str(tmp_path / "a" / name))
            return {}

    engine = PipelineEngine()
    with attach(engine) as saving:
        with held_writers() as writers:
            engine.save_checkpoint(str(tmp_path), "a")
            assert writers.reached.wait(PATIENCE_S)
            flat.zero_()
            pending = saving.pending()
        saving.wait()
    assert pending.stats.bytes_before_return < 100_000, "the copies are nobody else's, and are not copied again"
    files = files_of(tmp_path / "a")
    whole = torch.cat([files[name]["weight"] for name in names])
    assert whole.equal(torch.arange(1 << 20, dtype=torch.float32))
    assert all((tmp_path / "a" / name).stat().st_size < flat.nbytes // 4 + 40_000 for name in names)


def test_files_elsewhere_are_saved_where_they_belong(tmp_path: Path) -> None:
    class Chatty(StandInEngine):
        def module_state(self) -> dict[str, Any]:
            self.checkpoint_engine.save({"a": torch.ones(3)}, str(tmp_path / "beside.pt"))
            self.checkpoint_engine.makedirs(str(tmp_path / "more"), exist_ok=True)
            return super().module_state()

    engine = Chatty()
    with attach(engine):
        engine.save_checkpoint(str(tmp_path / "run"), "a")
        assert torch.load(tmp_path / "beside.pt")["a"].eq(1).all()
    assert names_in(tmp_path) == ["beside.pt", "more", "run"]


def test_files_are_found_through_another_name_of_the_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    monkeypatch.chdir(tmp_path)
    engine = StandInEngine(1)
    with attach(engine), held_writers():
        engine.save_checkpoint("./link/../link/run", "a")
        monkeypatch.chdir("/")
    assert latest_in(tmp_path / "real" / "run") == "a"
    assert names_in(tmp_path / "real" / "run" / "a") == [
        "MANIFEST.json",
        "mp_rank_00_model_states.pt",
        "zero_pp_rank_0_mp_rank_00_optim_states.pt",
    ]


@pytest.mark.parametrize(
    ("map_location", "stock_has_to"),
    [
        (lambda storage, place: storage, False),
        ("cpu", False),
        (None, False),
        (lambda storage, place: storage.cpu(), True),
    ],
)
def test_loading_goes_our_way_for_all_that_deepspeed_asks_for(
    tmp_path: Path, map_location: Any, stock_has_to: bool, caplog: pytest.LogCaptureFixture
) -> None:
    engine = StandInEngine()
    attach(engine)
    state = {"a": torch.arange(10), "n": 3}
    torch.save(state, tmp_path / "a.pt")
    with caplog.at_level(logging.INFO, "fastpersist"):
        assert portrait(engine.checkpoint_engine.load(str(tmp_path / "a.pt"), map_location)) == portrait(state)
    assert ("map_location" in caplog.text) == stock_has_to


# ------------------------------------------------------------------------------------------- attach and close


def test_close_gives_the_engine_back_what_it_had(tmp_path: Path) -> None:
    engine = StandInEngine()
    before = dict(vars(engine))
    saving = attach(engine)
    assert engine.checkpoint_engine is not before["checkpoint_engine"]
    engine.save_checkpoint(str(tmp_path))
    saving.close()
    assert latest_in(tmp_path) == "global_step0"
    assert vars(engine) == before
    saving.close()
    engine.save_checkpoint(str(tmp_path), "stock")
    assert names_in(tmp_path / "stock") == ["mp_rank_00_model_states.pt"]
    attach(engine).close()
    engine.train()


def test_close_leaves_what_somebody_else_has_put_there_since(tmp_path: Path) -> None:
    engine = StandInEngine()
    saving = attach(engine)
    ours = engine.save_checkpoint

    def theirs(*arguments: Any, **options: Any) -> bool:
        return bool(ours(*arguments, **options))

    engine.save_checkpoint = theirs  # type: ignore[method-assign]
    engine.save_checkpoint(str(tmp_path))
    saving.close()
    assert engine.save_checkpoint is theirs


def test_what_is_no_engine_is_refused() -> None:
    with pytest.raises(fp.ConfigError, match=r"deepspeed\.initialize, not a Linear"):
        attach(torch.nn.Linear(1, 1))


def test_an_engine_is_attached_once() -> None:
    engine = StandInEngine()
    with attach(engine):
        with pytest.raises(fp.ConfigError, match="attached already"):
            attach(engine)
    attach(engine)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"writers": "some"}, "writers must be"),
        ({"writers": 0}, "writers must be 1 or more"),
        ({"on_error": "ignore"}, "on_error must be"),
        ({"engine": "nothing"}, "nothing"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any], text: str) -> None:
    engine = StandInEngine()
    before = dict(vars(engine))
    with pytest.raises(fp.ConfigError, match=text):
        attach(engine, **options)
    assert vars(engine) == before


@pytest.mark.parametrize(("name", "text"), [("has_nvme", "on NVMe"), ("is_node_local", "use_node_local_storage")])
def test_what_cannot_be_saved_is_refused_at_once(name: str, text: str) -> None:
    engine = StandInEngine()
    setattr(engine, name, True)
    with pytest.raises(fp.UnsupportedError, match=text):
        attach(engine)


# ------------------------------------------------------------------------------------------- where it is not installed


def test_missing_deepspeed_names_the_extra() -> None:
    find = importlib.util.find_spec

    def find_all_but_deepspeed(name: str, package: str | None = None) -> Any:
        return None if name == "deepspeed" else find(name, package)

    def change() -> None:
        importlib.util.find_spec = find_all_but_deepspeed

    message = 'integrations.deepspeed needs deepspeed: pip install "fastpersist[deepspeed]"'
    expect_import_error("fastpersist.integrations.deepspeed", change, message)


def test_manifest_lists_what_deepspeed_has_saved(tmp_path: Path) -> None:
    engine = StandInEngine(1)
    with attach(engine):
        engine.save_checkpoint(str(tmp_path), "a")
    listed = json.loads((tmp_path / "a" / "MANIFEST.json").read_text())["files"]
    assert {entry["name"]: entry["size_bytes"] for entry in listed} == {
        name: os.path.getsize(tmp_path / "a" / name) for name in names_in(tmp_path / "a") if name.endswith(".pt")
    }
    assert type(engine.optimizer) is DeepSpeedZeroOptimizer
