"""Resuming from a root: the newest whole step, in place or not, and what happens when a step is damaged."""

from __future__ import annotations

import os
import shutil
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.forking import Report, run_in_child
from support.runs import Replay, Run, copied
from support.sameness import assert_same
from support.sandbox import become_ordinary_user, open_directory

import fastpersist as fp
from fastpersist.checkpointer import step_loader
from fastpersist.commit import step_listing


def save_steps(root: Path, *steps: int, **options: Any) -> None:
    run = Run()
    with fp.Checkpointer(root, optimizer=run.optimizer, **options) as checkpointer:
        for step in steps:
            run.advance(step)
            checkpointer.save(step, run.state(), rank_state={"position": step})


def flip_byte(path: Path, offset_bytes: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset_bytes)
        byte = file.read(1)
        file.seek(offset_bytes)
        file.write(bytes([byte[0] ^ 0x40]))


def cut(path: Path) -> None:
    os.truncate(path / "state.pt", 5000)


def cut_in_manifest_too(path: Path) -> None:
    size_bytes = (path / "state.pt").stat().st_size
    os.truncate(path / "state.pt", size_bytes - 4096)
    text = (path / "MANIFEST.json").read_text().replace(str(size_bytes), str(size_bytes - 4096))
    (path / "MANIFEST.json").write_text(text)


def remove_state(path: Path) -> None:
    (path / "state.pt").unlink()


def remove_rank_state(path: Path) -> None:
    (path / "rank-00000.pt").unlink()


def remove_manifest(path: Path) -> None:
    (path / "MANIFEST.json").unlink()


def spoil_manifest(path: Path) -> None:
    (path / "MANIFEST.json").write_text('{"format": 1')


def spoil_pickle(path: Path) -> None:
    data = (path / "state.pt").read_bytes()
    flip_byte(path / "state.pt", data.index(b"_rebuild_tensor") + 3)


def spoil_tensor(path: Path) -> None:
    flip_byte(path / "state.pt", (path / "state.pt").stat().st_size // 2)


DAMAGES = (cut, cut_in_manifest_too, remove_state, remove_rank_state, remove_manifest, spoil_manifest, spoil_pickle)
damages = pytest.mark.parametrize("damage", [*DAMAGES, spoil_tensor])


@damages
@pytest.mark.parametrize("in_place", [False, True], ids=["", "into"])
def test_load_goes_back_to_the_step_before_a_damaged_one_and_says_so(
    tmp_path: Path, damage: Callable[[Path], None], in_place: bool
) -> None:
    save_steps(tmp_path, 1, 2, 3)
    damage(tmp_path / "step-00000003")
    run = Run().advance(9)
    reader = fp.Checkpointer(tmp_path)
    with pytest.warns(RuntimeWarning, match="step 3 cannot be loaded, going back") as caught:
        loaded = reader.load(into=run.targets() if in_place else None, verify=damage is spoil_tensor)
    assert caught[0].filename == __file__
    assert loaded["rank_state"] == {"position": 2}
    if in_place:
        assert loaded["model"] is run.model
        assert_same(copied(run.model.state_dict()), copied(Replay().at(2).model.state_dict()))
        run.step = 2
        assert_same(copied(run.advance(5).state()), copied(Replay().at(5).state()))
    else:
        Replay().check(loaded, 2)


@damages
def test_strict_raises_when_the_newest_step_is_damaged(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    save_steps(tmp_path, 1, 2)
    damage(tmp_path / "step-00000002")
    reader = fp.Checkpointer(tmp_path)
    with pytest.raises((fp.CorruptionError, fp.CheckpointNotFoundError), match="step-00000002"):
        reader.load(strict=True, verify=True)
    with pytest.raises((fp.CorruptionError, fp.CheckpointNotFoundError), match="step-00000002"):
        reader.load(2, verify=True)
    Replay().check(reader.load(1), 1)


@damages
def test_step_that_is_damaged_can_be_saved_again(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    save_steps(tmp_path, 1, 2)
    damage(tmp_path / "step-00000002")
    if damage is remove_manifest:
        shutil.rmtree(tmp_path / "step-00000002")  # it is somebody's directory now, which we never replace
    run = Run().advance(2)
    with fp.Checkpointer(tmp_path, optimizer=run.optimizer) as checkpointer:
        checkpointer.save(2, run.state(), overwrite=True)
    assert Replay().check_newest(tmp_path) == 2


@pytest.mark.parametrize("damage", DAMAGES[:-1])
def test_damage_that_the_manifest_shows_is_no_committed_step(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    save_steps(tmp_path, 1, 2)
    damage(tmp_path / "step-00000002")
    reader = fp.Checkpointer(tmp_path)
    expected = [1, 2] if damage is cut_in_manifest_too else [1]
    assert reader.steps() == expected
    assert reader.latest() == expected[-1]


@pytest.mark.parametrize("in_place", [False, True])
def test_no_whole_step_is_an_error_that_names_each(tmp_path: Path, in_place: bool) -> None:
    save_steps(tmp_path, 1, 2)
    cut(tmp_path / "step-00000001")
    spoil_pickle(tmp_path / "step-00000002")
    with pytest.warns(RuntimeWarning, match="going back"):
        with pytest.raises(fp.CorruptionError, match=r"step 2: .*step 1: ") as raised:
            fp.Checkpointer(tmp_path).load(into=Run().targets() if in_place else None)
    assert "overwritten" not in str(raised.value)  # nothing was


def test_retention_does_not_count_damaged_steps_among_those_it_keeps(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2, 3)
    for step in (2, 3):
        cut(tmp_path / f"step-0000000{step}")
    run = Run().advance(4)
    with fp.Checkpointer(tmp_path, keep=2, optimizer=run.optimizer) as checkpointer:
        checkpointer.save(4, run.state())
    assert checkpointer.steps() == [1, 4]


def test_resumed_run_goes_on_as_if_it_had_never_stopped(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 5)
    resumed = Run().load(fp.Checkpointer(tmp_path))
    assert resumed.step == 5
    assert_same(copied(resumed.advance(20).state()), copied(Replay().at(20).state()))


def test_into_that_does_not_fit_changes_nothing_and_is_no_damage(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2)
    run = Run((20_000, 12_000, 3_000, 8)).advance(3)
    before = copied(run.state())
    with pytest.raises(fp.ConfigError, match=r"model"):
        fp.Checkpointer(tmp_path).load(into=run.targets())
    assert_same(copied(run.state()), before)


def test_reader_that_loses_the_race_against_retention_finds_the_newer_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run().advance(1)
    writer = fp.Checkpointer(tmp_path, keep=1, optimizer=run.optimizer)
    writer.save(1, run.state()).result()
    found = step_listing.committed_path

    def look_late(parent: str, name: str) -> str | None:
        if run.step < 3:
            run.advance()
            writer.save(run.step, run.state()).result()
        return found(parent, name)

    monkeypatch.setattr(step_listing, "committed_path", look_late)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Replay().check(fp.Checkpointer(tmp_path).load(), 3)
    writer.close()


@pytest.mark.parametrize("in_place", [False, True], ids=["", "into"])
def test_step_that_is_replaced_while_it_is_read_is_never_a_mixture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_place: bool
) -> None:
    save_steps(tmp_path, 1)
    run = Run().advance(2)
    writer = fp.Checkpointer(tmp_path, optimizer=run.optimizer)
    load_state = step_loader.load_state
    replaced = []

    def replace_after(path: str, **options: Any) -> dict[str, Any]:
        loaded = load_state(path, **options)
        if not replaced:
            replaced.append(path)
            writer.save(1, run.state(), rank_state={"position": run.step}, overwrite=True).result()
        return loaded

    monkeypatch.setattr(step_loader, "load_state", replace_after)
    target = Run()
    loaded = fp.Checkpointer(tmp_path).load(1, into=target.targets() if in_place else None)
    writer.close()
    assert loaded["rank_state"] == {"position": loaded["step"]}
    if in_place:
        expected = Replay().at(loaded["step"])
        assert_same(copied(target.model.state_dict()), copied(expected.model.state_dict()))
        assert_same(copied(target.optimizer.state_dict()), copied(expected.optimizer.state_dict()))
    else:
        Replay().check(loaded)


def test_readers_beside_a_writer_always_find_a_whole_step(tmp_path: Path) -> None:
    run = Run((5000, 7)).advance(1)
    replay = Replay((5000, 7))
    writer = fp.Checkpointer(tmp_path, keep=1, optimizer=run.optimizer)
    writer.save(1, run.state(), rank_state={"position": 1}).result()
    over = threading.Event()
    loaded: list[dict[str, Any]] = []
    failures: list[BaseException] = []

    def read() -> None:
        reader = fp.Checkpointer(tmp_path)
        try:
            while not over.is_set():
                loaded.append(reader.load(verify=True))
        except BaseException as error:  # noqa: BLE001 - the test's thread raises it
            failures.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    try:
        for step in range(2, 40):
            run.advance(step)
            writer.save(step - step % 2, run.state(), rank_state={"position": step}, overwrite=True)
        while len(loaded) <= 3 and thread.is_alive():  # a slow machine may not have let it load beside a save yet
            writer.save(step - step % 2, run.state(), rank_state={"position": step}, overwrite=True)
        writer.close()
    finally:
        over.set()
        thread.join()
    if failures:
        raise failures[0]
    assert len(loaded) > 3
    steps = []
    for state in loaded:
        assert state["rank_state"] == {"position": state["step"]}
        steps.append(replay.check(state))
    assert steps == sorted(steps)


def test_a_root_that_cannot_be_written_can_be_read(tmp_path: Path) -> None:
    with open_directory(tmp_path) as directory:
        root = directory / "run"
        save_steps(root, 1, 2)

        def work(report: Report) -> None:
            become_ordinary_user()
            assert Replay().check_all(root) == [1, 2]

        for path in (root, *root.rglob("*")):
            path.chmod(0o555 if path.is_dir() else 0o444)
        names = sorted(map(str, root.rglob("*")))
        run_in_child(work)
        assert sorted(map(str, root.rglob("*"))) == names


@pytest.mark.parametrize("call", ["steps", "latest", "load"])
def test_root_that_is_a_file_is_an_error_of_ours(tmp_path: Path, call: str) -> None:
    (tmp_path / "run").write_text("a file")
    with pytest.raises(fp.FastPersistError, match="run"):
        getattr(fp.Checkpointer(tmp_path / "run"), call)()


def test_map_location_and_weights_only_go_to_torch(tmp_path: Path) -> None:
    save_steps(tmp_path, 1)
    reader = fp.Checkpointer(tmp_path)
    assert reader.load(map_location="meta")["position"].device.type == "meta"
    assert torch.equal(reader.load(weights_only=False)["position"], torch.arange(50) + 1)


@pytest.mark.parametrize("sharded", [False, True], ids=["whole", "sharded"])
@pytest.mark.parametrize("into", [False, True], ids=["new", "into"])
def test_progress_counts_every_byte(
    sharded: bool, into: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with fp.Checkpointer(tmp_path, sharded=sharded) as checkpoints:
        checkpoints.save(7, {"weight": torch.ones(3_000_000)})
        checkpoints.wait()
        capfd.readouterr()
        target = {"into": {"weight": torch.zeros(3_000_000)}} if into else {}
        assert bool((checkpoints.load(progress=True, **target)["weight"] == 1).all())
        shown = capfd.readouterr().err
        assert "step-00000007: 100%" in shown
        assert "12.0M/12.0M" in shown
        checkpoints.load()
        assert capfd.readouterr().err == ""
