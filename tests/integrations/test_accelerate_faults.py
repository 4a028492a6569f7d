"""Accelerate when something goes wrong: nothing is lost or told twice, and the last good checkpoint resumes."""

from __future__ import annotations

import errno
import logging
import os
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.utils import DistributedType
from support.accelerate_training import Training, start_anew, train_as_one_of_two
from support.filesystems import FullFor, FullForNames
from support.forking import Child, Report
from support.imports import expect_import_error, in_version, without
from support.process_groups import run_ranks
from support.runs import held_writers, wait_for_writers
from support.training import PATIENCE_S

import fastpersist as fp
from fastpersist.commit.filesystem import using
from fastpersist.integrations.accelerate import load_state, save_state, wait


@pytest.fixture(autouse=True)
def _fresh_accelerate() -> Iterator[None]:
    start_anew()
    yield
    wait_for_writers()
    start_anew()


def names_in(directory: Path) -> list[str]:
    return sorted(os.listdir(directory))


def save_that_fails(training: Training, **options: Any) -> fp.PendingSave:
    with using(FullFor()):
        pending = save_state(training.accelerator, **options)
        assert pending is not None
        assert pending.join(PATIENCE_S)
    return pending


def next_save(training: Training) -> None:
    save_state(training.accelerator)


def load(training: Training) -> None:
    load_state(training.accelerator)


def wait_for_it(training: Training) -> None:
    wait(training.accelerator)


tellers = pytest.mark.parametrize("tell", [next_save, load, wait_for_it])


@tellers
def test_full_disk_is_told_once_and_all_that_was_there_stays(
    tmp_path: Path, tell: Callable[[Training], None], caplog: pytest.LogCaptureFixture, leak_check: None
) -> None:
    training = Training(tmp_path, automatic=True, total_limit=2)
    for _ in range(3):
        save_state(training.accelerator)
    wait(training.accelerator)
    with caplog.at_level(logging.ERROR, "fastpersist"):
        save_that_fails(training)
    assert "disk full" in caplog.text, "at once, whether anybody asks or not"
    training.train(1)
    assert names_in(tmp_path / "checkpoints") == ["checkpoint_1", "checkpoint_2"]
    with pytest.raises(fp.NoSpaceError, match="disk full"):
        tell(training)
    tell(training)
    wait(training.accelerator)
    save_state(training.accelerator)
    wait(training.accelerator)
    assert "checkpoint_1" not in names_in(tmp_path / "checkpoints")


@tellers
def test_full_disk_is_warned_of_once_where_that_is_wanted(
    tmp_path: Path, tell: Callable[[Training], None], recwarn: pytest.WarningsRecorder
) -> None:
    training = Training(tmp_path, automatic=True)
    save_state(training.accelerator)
    wait(training.accelerator)
    save_that_fails(training, on_error="warn")
    with pytest.warns(RuntimeWarning, match="a checkpoint was not saved, training goes on: .*disk full") as told:
        tell(training)
    assert told[0].filename == __file__
    tell(training)
    wait(training.accelerator)
    assert not recwarn.list


def test_error_that_result_has_raised_is_told(tmp_path: Path) -> None:
    training = Training(tmp_path, automatic=True)
    with pytest.raises(fp.NoSpaceError):
        save_that_fails(training).result()
    save_state(training.accelerator)
    wait(training.accelerator)
    assert names_in(tmp_path / "checkpoints") == ["checkpoint_1"]


def test_disk_that_takes_no_directory_is_an_error_at_once(tmp_path: Path, leak_check: None) -> None:
    training = Training(tmp_path, automatic=True)
    with using(FullForNames()), pytest.raises(fp.NoSpaceError, match="creating directory"):
        save_state(training.accelerator)
    with using(FullForNames()), pytest.warns(RuntimeWarning, match="creating directory") as told:
        assert save_state(training.accelerator, on_error="warn") is None
    assert told[0].filename == __file__
    wait(training.accelerator)
    assert training.iteration == 0


def test_parent_that_cannot_be_made_is_an_error_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    training = Training()
    with pytest.raises(fp.StorageError, match=r"creating directory .*file"):
        save_state(training.accelerator, tmp_path / "file" / "deep" / "a")
    with pytest.warns(RuntimeWarning, match=r"creating directory .*file"):
        save_state(training.accelerator, tmp_path / "file" / "deep" / "a", on_error="warn")


@pytest.mark.parametrize("kind", [KeyError, KeyboardInterrupt, OSError])
@pytest.mark.parametrize("on_error", ["raise", "warn"])
def test_exception_in_a_hook_comes_through_and_leaves_nothing(
    tmp_path: Path, kind: type[BaseException], on_error: str, leak_check: None
) -> None:
    training = Training(tmp_path, automatic=True)
    training.train(2)

    def hook(models: list[Any], weights: list[Any], output_dir: str) -> None:
        torch.save(weights, Path(output_dir) / "copy.bin")
        (Path(output_dir) / "half").write_text("half")
        raise kind("mine")

    registered = training.accelerator.register_save_state_pre_hook(hook)
    with pytest.raises(kind, match="mine"):
        save_state(training.accelerator, on_error=on_error)
    registered.remove()
    assert names_in(tmp_path / "checkpoints") == []
    assert training.iteration == 0
    assert training.accelerator.project_configuration.automatic_checkpoint_naming
    training.train(1)
    save_state(training.accelerator)
    wait(training.accelerator)
    assert names_in(tmp_path / "checkpoints") == ["checkpoint_0"]


def test_disk_that_is_full_while_hooks_write_is_what_is_told(tmp_path: Path, leak_check: None) -> None:
    training = Training(tmp_path, automatic=True)

    def hook(models: list[Any], weights: list[Any], output_dir: str) -> None:
        torch.save(weights, Path(output_dir) / "copy.bin")
        (Path(output_dir) / "config.json").write_text("{}")

    training.accelerator.register_save_state_pre_hook(hook)
    with using(FullFor()), pytest.raises(fp.NoSpaceError):
        save_state(training.accelerator)
    with using(FullFor()), pytest.warns(RuntimeWarning, match="disk full"):
        assert save_state(training.accelerator, on_error="warn") is None
    wait_for_writers()
    assert names_in(tmp_path) == ["checkpoints"]
    assert names_in(tmp_path / "checkpoints") == []


def test_exception_in_training_is_not_replaced_by_one_of_ours(tmp_path: Path) -> None:
    training = Training(tmp_path, automatic=True)
    with pytest.raises(ZeroDivisionError):
        save_that_fails(training)
        _ = 1 / 0
    with pytest.raises(fp.NoSpaceError):
        wait(training.accelerator)


def test_state_changed_behind_our_back_is_not_published(tmp_path: Path) -> None:
    training = Training(tmp_path, automatic=True, width=256)
    save_state(training.accelerator)
    wait(training.accelerator)
    with held_writers() as writers:
        save_state(training.accelerator)
        assert writers.reached.wait(PATIENCE_S)
        with torch.no_grad():
            training.models[0][0].weight.add_(1)
    with pytest.raises(fp.TornStateError, match="weight"):
        wait(training.accelerator)
    assert names_in(tmp_path / "checkpoints") == ["checkpoint_0"]


def test_removal_that_fails_does_not_fail_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    training = Training(tmp_path, automatic=True, total_limit=1)
    save_state(training.accelerator)
    wait(training.accelerator)

    def refuse(*_: object) -> None:
        raise PermissionError(errno.EACCES, "not yours")

    monkeypatch.setattr("shutil.rmtree", refuse)
    save_state(training.accelerator)
    wait(training.accelerator)
    assert "checkpoint_1 is saved, but old checkpoints beyond total_limit could not be removed" in caplog.text
    assert names_in(tmp_path / "checkpoints") == ["checkpoint_1"]


# --- what is refused ---


def test_unknown_on_error_is_refused(tmp_path: Path) -> None:
    with pytest.raises(fp.ConfigError, match="'raise' or 'warn', not 'ignore'"):
        save_state(Training().accelerator, tmp_path / "a", on_error="ignore")


@pytest.mark.parametrize("no_accelerator", [None, "checkpoints"])
def test_what_is_no_accelerator_is_refused(no_accelerator: Any) -> None:
    for call in (save_state, load_state):
        with pytest.raises(fp.ConfigError, match=r"take the Accelerator first, .*; not a (NoneType|str)"):
            call(no_accelerator)


def test_unknown_engine_is_refused(tmp_path: Path) -> None:
    training = Training()
    with pytest.raises(fp.ConfigError, match="punchcard"):
        save_state(training.accelerator, tmp_path / "a", engine="punchcard")
    assert names_in(tmp_path) == []


@pytest.mark.parametrize("strategy", ["DEEPSPEED", "MEGATRON_LM", "XLA"])
def test_strategies_with_savers_of_their_own_are_refused_by_name(tmp_path: Path, strategy: str) -> None:
    training = Training()
    training.accelerator.state.distributed_type = DistributedType(strategy)
    for call in (save_state, load_state):
        with pytest.raises(fp.ConfigError, match=f"{strategy} yet: stock accelerator.save_state"):
            call(training.accelerator, tmp_path)


def test_tensor_parallel_models_are_refused(tmp_path: Path) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_tensor

    training = Training()
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        layer = training.models[0][0]
        layer.weight = torch.nn.Parameter(distribute_tensor(layer.weight.detach(), init_device_mesh("cpu", (1,))))
        with pytest.raises(fp.ConfigError, match=r"0\.weight is a DTensor"):
            save_state(training.accelerator, tmp_path / "a")
    finally:
        torch.distributed.destroy_process_group()
    assert names_in(tmp_path) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            without("accelerate"),
            'ImportError: fastpersist.integrations.accelerate needs accelerate: pip install "fastpersist[accel',
        ),
        (
            in_version("accelerate", "1.0.1"),
            "UnsupportedError: fastpersist.integrations.accelerate needs accelerate 1.1 or newer, and 1.0.1 is",
        ),
    ],
    ids=["missing", "old"],
)
def test_accelerate_that_is_missing_or_old_is_named(change: Callable[[], None], message: str) -> None:
    expect_import_error("fastpersist.integrations.accelerate", change, message)


# --- processes ---


def test_forked_child_has_no_part_in_the_save(tmp_path: Path) -> None:
    training = Training(tmp_path, automatic=True)

    def work(report: Report) -> None:
        wait(training.accelerator)
        report(1)

    with held_writers() as writers:
        save_state(training.accelerator)
        assert writers.reached.wait(PATIENCE_S)
        with Child(work) as child:
            assert child.wait().verdict == "passed"
            assert child.reported == 1
    wait(training.accelerator)
    assert fp.verify(tmp_path / "checkpoints" / "checkpoint_0").ok


def test_killed_training_resumes_from_a_whole_checkpoint(tmp_path: Path) -> None:
    expected = Training(width=128).train(400)
    chance = random.Random(5)
    for round_number in range(6):
        root = tmp_path / str(round_number)

        def work(report: Report, root: Path = root) -> None:
            start_anew()
            training = Training(root, automatic=True, total_limit=2, width=128)
            while True:
                training.train()
                save_state(training.accelerator)
                report(training.counter.step)

        with Child(work) as child:
            deadline_s = time.monotonic() + PATIENCE_S
            while child.reported < 3 + round_number:
                assert not child.ended(), child.wait().message
                assert time.monotonic() < deadline_s
                time.sleep(0.001)
            time.sleep(chance.random() * 0.05)
            reported = child.reported
            child.kill()
        visible = list((root / "checkpoints").iterdir())  # stock load_state takes all of them for checkpoints
        assert 1 <= len(visible) <= 3
        assert all(fp.verify(path).ok for path in visible)
        start_anew()
        resumed = Training(root, automatic=True, total_limit=2, width=128)
        newest = load_state(resumed.accelerator)
        step = resumed.counter.step
        assert newest.name == f"checkpoint_{step - 1}"
        assert step >= reported - 1, "one save is under way at a time"
        resumed.iteration = step
        losses = []
        for _ in range(3):
            losses += resumed.train()
            save_state(resumed.accelerator)
        assert losses == expected[step : step + 3]
        wait(resumed.accelerator)
        assert len(names_in(root / "checkpoints")) == 2
        assert names_in(root) == ["checkpoints"], "what was left behind is gone"


def test_two_processes_save_together(tmp_path: Path) -> None:
    # The port is asked for, and not used: the ranks have met.
    variables = {"ACCELERATE_USE_CPU": "true", "MASTER_PORT": "1", "OMP_NUM_THREADS": "1"}
    run_ranks(2, lambda _rank, _count: train_as_one_of_two(tmp_path), timeout_s=90, environment=variables)


def save_with_a_scaler(folder: Path) -> list[tuple[float, float]]:
    """Save twice, with a file that stock Accelerate writes on every process; return scales, saved and loaded."""
    training = Training(scaler=True)
    training.train(2)
    scaler = training.accelerator.scaler
    found = []
    for name in ("one", "two"):
        training.train(1)
        scale = scaler.get_scale()
        save_state(training.accelerator, folder / name)
        wait(training.accelerator)
        scaler.update(1.0)
        load_state(training.accelerator, folder / name)
        found.append((scale, scaler.get_scale()))
    assert training.accelerator.scaler is scaler
    return found


def test_processes_that_scale_gradients_save_together(tmp_path: Path) -> None:
    variables = {"ACCELERATE_USE_CPU": "true", "MASTER_PORT": "1", "OMP_NUM_THREADS": "1"}
    results = run_ranks(2, lambda _rank, _count: save_with_a_scaler(tmp_path), timeout_s=90, environment=variables)
    assert all(saved == loaded != 1.0 for found in results for saved, loaded in found)
    assert (tmp_path / "two" / "scaler.pt").exists()


def save_beside_a_hook(folder: Path) -> float:
    """Return what a hook of users, which runs on every process, reads of the scaler."""
    training = Training(scaler=True)
    scales: list[float] = []

    def hook(*_: object) -> None:
        scales.append(training.accelerator.scaler.get_scale())

    training.accelerator.register_save_state_pre_hook(hook)
    training.train(1)
    save_state(training.accelerator, folder / "one")
    wait(training.accelerator)
    return scales[0]


def test_hooks_see_the_scaler_on_every_process(tmp_path: Path) -> None:
    variables = {"ACCELERATE_USE_CPU": "true", "MASTER_PORT": "1", "OMP_NUM_THREADS": "1"}
    scales = run_ranks(2, lambda _rank, _count: save_beside_a_hook(tmp_path), timeout_s=90, environment=variables)
    assert scales[0] == scales[1] > 1.0


def save_with_a_stateful_loader(folder: Path) -> bool:
    """Save beside a loader whose state stock Accelerate writes on every process; return whether all came back."""
    training = Training(stateful_loader=True)
    training.train(2)
    loader: Any = training.accelerator._dataloaders[0]
    loader.position += training.accelerator.process_index
    for name in ("one", "two"):
        save_state(training.accelerator, folder / name)
        wait(training.accelerator)
        training.accelerator.wait_for_everyone()
        loader.position = 0
        load_state(training.accelerator, folder / name)
        assert loader.position == 2
    return fp.verify(folder / "one").ok and fp.verify(folder / "two").ok


def test_processes_with_a_stateful_loader_save_together(tmp_path: Path) -> None:
    variables = {"ACCELERATE_USE_CPU": "true", "MASTER_PORT": "1", "OMP_NUM_THREADS": "1"}
    assert run_ranks(2, lambda *_: save_with_a_stateful_loader(tmp_path), timeout_s=90, environment=variables) == [
        True,
        True,
    ]
