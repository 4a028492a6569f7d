"""Accelerate: the same files as its own save_state, whole or not at all, and written while training goes on."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from accelerate import Accelerator
from safetensors import safe_open
from support.accelerate_training import Training, contents, start_anew
from support.runs import held_writers, wait_for_writers
from support.sameness import assert_same, portrait
from support.training import PATIENCE_S

import fastpersist as fp
from fastpersist.integrations.accelerate import load_state, save_state, wait


@pytest.fixture(autouse=True)
def _fresh_accelerate() -> Iterator[None]:
    start_anew()
    yield
    wait_for_writers()
    start_anew()


def names_in(directory: Path) -> list[str]:
    return sorted(os.listdir(directory))


VARIANTS = {
    "as it comes": (Training, {}),
    "torch files": (Training, {"safe_serialization": False}),
    "two models": (lambda: Training(pair_count=2), {}),
    "accumulating": (lambda: Training(accumulation=3), {}),
    "scaled": (lambda: Training(scaler=True), {}),
    "stateful loader": (lambda: Training(stateful_loader=True), {}),
}
variants = pytest.mark.parametrize(("make", "options"), VARIANTS.values(), ids=VARIANTS)


@variants
def test_files_are_those_of_stock(
    tmp_path: Path, make: Callable[[], Training], options: dict[str, Any], leak_check: None
) -> None:
    training = make()
    training.train(4)
    pending = save_state(training.accelerator, tmp_path / "deep" / "ours", **options)
    training.accelerator.save_state(str(tmp_path / "stock"), **options)
    training.train(4)
    assert pending is not None
    assert pending.result(PATIENCE_S) == tmp_path / "deep" / "ours"
    ours, stock = contents(tmp_path / "deep" / "ours"), contents(tmp_path / "stock")
    assert ("scaler.pt" in stock) == (training.accelerator.scaler is not None)
    assert ("dl_state_dict.bin" in stock) == bool(training.accelerator._dataloaders)
    assert list(ours) == list(stock)
    for name, expected in stock.items():
        assert_same(ours[name], expected)
    assert fp.verify(tmp_path / "deep" / "ours").ok
    listed = json.loads((tmp_path / "deep" / "ours" / "MANIFEST.json").read_text())["files"]
    assert sorted(entry["name"] for entry in listed) == list(stock)


def test_metadata_of_safetensors_is_that_of_stock(tmp_path: Path) -> None:
    training = Training()
    save_state(training.accelerator, tmp_path / "ours")
    wait(training.accelerator)
    with safe_open(tmp_path / "ours" / "model.safetensors", "pt") as file:
        assert file.metadata()["format"] == "pt"


@variants
@pytest.mark.parametrize("direction", ["stock reads ours", "ours reads stock", "ours reads ours"])
def test_training_resumes_bit_by_bit(
    tmp_path: Path, make: Callable[[], Training], options: dict[str, Any], direction: str
) -> None:
    training = make()
    training.train(6)
    if direction == "ours reads stock":
        training.accelerator.save_state(str(tmp_path / "a"), **options)
    else:
        save_state(training.accelerator, tmp_path / "a", **options)
    expected = training.train(6)
    wait(training.accelerator)
    start_anew()
    resumed = make()
    if direction == "stock reads ours":
        resumed.accelerator.load_state(str(tmp_path / "a"))
    else:
        assert load_state(resumed.accelerator, tmp_path / "a") == tmp_path / "a"
    assert resumed.counter.step == 6
    assert all(loader.position == 6 for loader in resumed.accelerator._dataloaders)
    assert resumed.train(6) == expected
    assert len(set(expected)) == len(expected), "each loss is one of its own"


def test_saves_change_no_loss(tmp_path: Path) -> None:
    expected = Training().train(8)
    start_anew()
    training = Training(tmp_path, automatic=True)
    losses = []
    for _ in range(8):
        losses += training.train()
        save_state(training.accelerator)
    assert losses == expected


def test_save_returns_before_anything_is_written_and_the_step_waits_for_the_copy(tmp_path: Path) -> None:
    training = Training(width=256)
    training.train(2)
    training.accelerator.save_state(str(tmp_path / "stock"))
    with held_writers() as writers:
        pending = save_state(training.accelerator, tmp_path / "ours")
        assert pending is not None
        assert writers.reached.wait(PATIENCE_S)
        assert not pending.captured(), "the optimizer's tensors are written from where they are"
        assert pending.stats.bytes_at_gate == 0
        training.train(1)
        assert pending.captured()
        assert not pending.done()
        assert not (tmp_path / "ours").exists()
    pending.result(PATIENCE_S)
    size_bytes = sum(4 * 3 * parameter.numel() for parameter in training.models[0].parameters())  # and two moments
    assert pending.stats.bytes_at_gate >= size_bytes
    assert portrait(contents(tmp_path / "ours")) == portrait(contents(tmp_path / "stock"))


def test_batches_that_only_accumulate_do_not_wait(tmp_path: Path) -> None:
    training = Training(accumulation=4, width=256)
    training.train(4)
    with held_writers() as writers:
        pending = save_state(training.accelerator, tmp_path / "ours")
        assert pending is not None
        assert writers.reached.wait(PATIENCE_S)
        training.train(3)
        assert not pending.captured()
        training.train(1)
        assert pending.captured()
    pending.result(PATIENCE_S)


def test_step_that_is_left_out_for_its_gradients_does_not_wait(tmp_path: Path) -> None:
    training = Training(scaler=True, width=256)
    training.train(1)
    with held_writers() as writers:
        pending = save_state(training.accelerator, tmp_path / "ours")
        assert pending is not None
        assert writers.reached.wait(PATIENCE_S)
        for parameter in training.models[0].parameters():
            parameter.register_hook(lambda gradient: gradient * float("inf"))
        training.train(1)
        assert training.optimizers[0].step_was_skipped
        assert not pending.captured()
    pending.result(PATIENCE_S)


def test_optimizer_that_was_not_prepared_is_none_of_ours(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(torch.nn.Linear(300, 300))
    before = model.weight.detach().clone()
    with held_writers():
        pending = save_state(accelerator, tmp_path / "ours")
        assert pending is not None
        assert pending.captured(), "nothing announces changes, so all is copied"
        with torch.no_grad():
            model.weight.add_(1)
    pending.result(PATIENCE_S)
    assert torch.equal(contents(tmp_path / "ours")["model.safetensors"]["weight"], before)


def test_one_save_is_under_way_at_a_time(tmp_path: Path) -> None:
    training = Training(tmp_path, automatic=True)
    with held_writers() as writers:
        first = save_state(training.accelerator)
        assert writers.reached.wait(PATIENCE_S)
        threading.Timer(0.1, writers.release).start()
        second = save_state(training.accelerator)
        assert first is not None
        assert second is not None
        assert first.done()
    wait(training.accelerator)
    assert second.done()
    assert names_in(tmp_path / "checkpoints") == ["checkpoint_0", "checkpoint_1"]


def test_load_waits_for_the_save(tmp_path: Path) -> None:
    training = Training(tmp_path, automatic=True)
    training.train(2)
    with held_writers() as writers:
        save_state(training.accelerator)
        assert writers.reached.wait(PATIENCE_S)
        threading.Timer(0.1, writers.release).start()
        assert load_state(training.accelerator) == tmp_path / "checkpoints" / "checkpoint_0"


def test_program_that_ends_finishes_its_save(tmp_path: Path) -> None:
    code = (
        "import sys, torch; from support.accelerate_training import Training;"
        "from fastpersist.integrations.accelerate import save_state;"
        "t = Training(width=512); t.train(1); save_state(t.accelerator, sys.argv[1]); t.accelerator.end_training()"
    )
    path = str(Path(__file__).parents[1])
    subprocess.run([sys.executable, "-c", code, tmp_path / "a"], check=True, env={**os.environ, "PYTHONPATH": path})
    assert fp.verify(tmp_path / "a").ok


# --- names and what they replace ---


def test_a_checkpoint_is_replaced_as_a_whole(tmp_path: Path) -> None:
    training = Training()
    training.accelerator.save_state(str(tmp_path / "a"), safe_serialization=False)  # one of stock, without a manifest
    save_state(training.accelerator, tmp_path / "a")
    wait(training.accelerator)
    assert "pytorch_model.bin" not in names_in(tmp_path / "a")
    first = portrait(contents(tmp_path / "a"))
    training.train(1)
    with held_writers() as writers:
        save_state(training.accelerator, tmp_path / "a")
        assert writers.reached.wait(PATIENCE_S)
        assert portrait(contents(tmp_path / "a")) == first
    wait(training.accelerator)
    assert portrait(contents(tmp_path / "a")) != first
    assert names_in(tmp_path) == ["a"]


@pytest.mark.parametrize("kind", ["none", "stock", "ours"])
def test_files_of_others_are_never_replaced(tmp_path: Path, kind: str, leak_check: None) -> None:
    training = Training()
    if kind == "stock":
        training.accelerator.save_state(str(tmp_path / "a"))
    elif kind == "ours":
        save_state(training.accelerator, tmp_path / "a")
        wait(training.accelerator)
    (tmp_path / "a").mkdir(exist_ok=True)
    (tmp_path / "a" / "thesis.txt").write_text("years of work")
    before = names_in(tmp_path / "a")
    with pytest.raises(fp.ConfigError, match=r"thesis\.txt in it is no part of a checkpoint"):
        save_state(training.accelerator, tmp_path / "a")
    assert names_in(tmp_path / "a") == before
    assert training.iteration == (kind != "none")


@pytest.mark.parametrize("first", ["stock", "ours"])
def test_hooks_write_into_the_checkpoint_and_are_replaced_with_it(tmp_path: Path, first: str) -> None:
    training = Training()
    seen = []

    def hook(models: list[Any], weights: list[Any], output_dir: str) -> None:
        seen.append(output_dir)
        (Path(output_dir) / "adapter").mkdir()
        (Path(output_dir) / "adapter" / "config.json").write_text("{}")
        torch.save({"weight": weights.pop()["0.weight"]}, Path(output_dir) / "adapter" / "own.bin")

    registered = training.accelerator.register_save_state_pre_hook(hook)
    if first == "stock":
        training.accelerator.save_state(str(tmp_path / "a"))
    else:
        save_state(training.accelerator, tmp_path / "a")
    training.train(1)
    stock = tmp_path / "stock"
    training.accelerator.save_state(str(stock))
    save_state(training.accelerator, tmp_path / "a")
    wait(training.accelerator)
    assert not Path(seen[-1]).exists()
    assert portrait(contents(tmp_path / "a")) == portrait(contents(stock))
    assert {"adapter/config.json", "adapter/own.bin"} < contents(stock).keys()
    assert "model.safetensors" not in contents(stock), "the hook has taken it out"
    registered.remove()
    save_state(training.accelerator, tmp_path / "a")  # the manifest says that adapter/ was part of it
    wait(training.accelerator)
    assert "adapter" not in names_in(tmp_path / "a")


def test_hooks_use_the_files_that_they_save(tmp_path: Path) -> None:
    training = Training()

    def hook(models: list[Any], weights: list[Any], output_dir: str) -> None:
        path = Path(output_dir) / "own.safetensors"
        safetensors.torch.save_file({"step": torch.arange(1_000_000)}, path)
        shutil.copy(path, path.with_name("copy.safetensors"))
        torch.save(safetensors.torch.load_file(path), path.with_name("own.bin"))
        torch.save(torch.load(path.with_name("own.bin")), path.with_name("own.bin"))
        path.rename(path.with_name("renamed.safetensors"))

    training.accelerator.register_save_state_pre_hook(hook)
    training.accelerator.save_state(str(tmp_path / "stock"))
    save_state(training.accelerator, tmp_path / "a")
    wait(training.accelerator)
    assert portrait(contents(tmp_path / "a")) == portrait(contents(tmp_path / "stock"))
    assert fp.verify(tmp_path / "a").ok


def test_files_and_links_in_the_place_are_refused(tmp_path: Path) -> None:
    training = Training()
    (tmp_path / "file").write_text("")
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "there")
    for name in ("file", "link"):
        with pytest.raises(fp.ConfigError, match=name):
            save_state(training.accelerator, tmp_path / name)
    assert training.iteration == 0


def test_a_tilde_is_the_home_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    monkeypatch.setenv("HOME", str(tmp_path))
    training = Training()
    save_state(training.accelerator, "~/checkpoint")
    assert load_state(training.accelerator, "~/checkpoint") == tmp_path / "checkpoint"
    assert not os.listdir()


def test_automatic_names_count_as_in_stock(tmp_path: Path) -> None:
    training = Training(tmp_path, automatic=True)
    save_state(training.accelerator, tmp_path / "not used")
    training.accelerator.project_configuration.iteration = 5
    save_state(training.accelerator)
    wait(training.accelerator)
    training.accelerator.save_state()
    assert names_in(tmp_path) == ["checkpoints"]
    assert names_in(tmp_path / "checkpoints") == ["checkpoint_0", "checkpoint_5", "checkpoint_6"]
    assert training.iteration == 7
    assert training.accelerator.project_configuration.automatic_checkpoint_naming
    training.iteration = 5
    with pytest.raises(ValueError, match="checkpoint_5 exists already"):
        save_state(training.accelerator)
    assert training.iteration == 5


def test_no_name_is_an_error(tmp_path: Path) -> None:
    training = Training()
    for nothing in (None, ""):
        with pytest.raises(fp.ConfigError, match="needs an output_dir"):
            save_state(training.accelerator, nothing)
    with pytest.raises(fp.ConfigError, match="needs an input_dir"):
        load_state(training.accelerator)
    training.accelerator.project_configuration.automatic_checkpoint_naming = True
    with pytest.raises(fp.ConfigError, match="project_dir"):
        save_state(training.accelerator)
    with pytest.raises(fp.ConfigError, match="project_dir"):
        load_state(training.accelerator)


@pytest.mark.parametrize("limit", [0, 1, 2, 4])
def test_total_limit_counts_as_stock_does(tmp_path: Path, limit: int) -> None:
    left = []
    for kind, save in (("ours", save_state), ("stock", Accelerator.save_state)):
        start_anew()
        training = Training(tmp_path / kind, automatic=True, total_limit=limit)
        for _ in range(12):  # so that 10 comes after 9, not after 1
            save(training.accelerator)
        wait(training.accelerator)
        left.append(names_in(tmp_path / kind / "checkpoints"))
    assert left[0] == left[1]


def test_total_limit_removes_nothing_before_the_new_one_is_there(tmp_path: Path) -> None:
    training = Training(tmp_path, automatic=True, total_limit=2)
    for _ in range(2):
        save_state(training.accelerator)
    wait(training.accelerator)
    (tmp_path / "checkpoints" / "checkpoint_0_best").mkdir()  # not a name of Accelerate: it stays
    with held_writers() as writers:
        pending = save_state(training.accelerator)
        assert pending is not None
        assert writers.reached.wait(PATIENCE_S)
        assert names_in(tmp_path / "checkpoints") == ["checkpoint_0", "checkpoint_0_best", "checkpoint_1"]
    pending.result(PATIENCE_S)
    assert names_in(tmp_path / "checkpoints") == ["checkpoint_0_best", "checkpoint_1", "checkpoint_2"]


def test_folder_on_another_disk_hides_what_is_unfinished_in_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other_disk = Path("/dev/shm")
    if not other_disk.is_dir() or other_disk.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("there is no second file system")
    with tempfile.TemporaryDirectory(dir=other_disk) as mounted:
        (tmp_path / "checkpoints").symlink_to(mounted)
        monkeypatch.setattr("os.path.realpath", os.path.abspath)  # as if it were no link, but mounted there
        training = Training(tmp_path, automatic=True, total_limit=1)
        with held_writers() as writers:
            save_state(training.accelerator)
            assert writers.reached.wait(PATIENCE_S)
            assert [name.startswith(".checkpoint_0.pending-") for name in names_in(Path(mounted))] == [True]
        save_state(training.accelerator)
        wait(training.accelerator)
        assert names_in(Path(mounted)) == ["checkpoint_1"]
        assert names_in(tmp_path) == ["checkpoints"]


def test_folder_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "large" / "disk").mkdir(parents=True)
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "checkpoints").symlink_to(tmp_path / "large" / "disk")
    training = Training(tmp_path / "project", automatic=True, total_limit=2)
    for _ in range(3):
        save_state(training.accelerator)
    wait(training.accelerator)
    assert names_in(tmp_path / "large" / "disk") == ["checkpoint_1", "checkpoint_2"]
    assert load_state(training.accelerator).name == "checkpoint_2"
    training.accelerator.load_state()


def test_what_a_killed_removal_has_left_goes_with_the_next(tmp_path: Path) -> None:
    training = Training(tmp_path, automatic=True, total_limit=1)
    save_state(training.accelerator)
    wait(training.accelerator)
    left = tmp_path / f".checkpoint_0.removed-{'a' * 32}"
    left.mkdir()
    (left / "model.safetensors").write_bytes(b"a part")
    save_state(training.accelerator)
    wait(training.accelerator)
    assert names_in(tmp_path / "checkpoints") == ["checkpoint_1"]
    assert names_in(tmp_path) == ["checkpoints"]


# --- the newest whole one ---


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 10)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1  # among the tensors: what is around them in a zip is not all checked
    path.write_bytes(data)


DAMAGES: dict[str, tuple[str, Callable[[Path], None], tuple[str, ...]]] = {
    "model cut": ("model.safetensors", cut, ("ours", "stock")),
    "optimizer cut": ("optimizer.bin", cut, ("ours", "stock")),
    "random state cut": ("random_states_0.pkl", cut, ("ours", "stock")),
    "optimizer gone": ("optimizer.bin", Path.unlink, ("ours", "stock")),
    "random state gone": ("random_states_0.pkl", Path.unlink, ("ours", "stock")),
    "custom object gone": ("custom_checkpoint_0.pkl", Path.unlink, ("ours", "stock")),
    "scheduler empty": ("scheduler.bin", lambda path: path.write_bytes(b""), ("ours", "stock")),
    "one bit of the model": ("model.safetensors", flip, ("ours",)),  # stock has no checksum of that
    "one bit of the optimizer": ("optimizer.bin", flip, ("ours", "stock")),
}


@pytest.mark.parametrize(
    ("writer", "name", "damage"),
    [(writer, name, damage) for name, damage, writers in DAMAGES.values() for writer in writers],
    ids=[f"{writer}: {what}" for what, (_, _, writers) in DAMAGES.items() for writer in writers],
)
def test_damaged_newest_is_skipped(tmp_path: Path, writer: str, name: str, damage: Callable[[Path], None]) -> None:
    training = Training(tmp_path, automatic=True)
    for _ in range(11):
        save_state(training.accelerator) if writer == "ours" else training.accelerator.save_state()
        training.train(1)
    wait(training.accelerator)
    newest = tmp_path / "checkpoints" / "checkpoint_10"
    assert load_state(training.accelerator) == newest
    damage(newest / name)
    with pytest.warns(RuntimeWarning, match=f"checkpoint_10 cannot be loaded, going back: .*{name}"):
        assert load_state(training.accelerator) == tmp_path / "checkpoints" / "checkpoint_9"
    assert training.counter.step == 9


def test_unfinished_directories_are_not_looked_at(tmp_path: Path) -> None:
    training = Training(tmp_path, automatic=True)
    save_state(training.accelerator)
    wait(training.accelerator)
    for name in (".checkpoint_7.pending-abc", ".checkpoint_8.removed-abc", "checkpoint_9_best", "notes"):
        (tmp_path / "checkpoints" / name).mkdir()
    (tmp_path / "checkpoints" / "checkpoint_10").write_text("a file")
    assert load_state(training.accelerator) == tmp_path / "checkpoints" / "checkpoint_0"


def test_nothing_whole_is_an_error_that_names_the_place(tmp_path: Path) -> None:
    training = Training(tmp_path, automatic=True)
    (tmp_path / "checkpoints" / "checkpoint_3").mkdir(parents=True)
    with pytest.warns(RuntimeWarning, match="checkpoint_3 cannot be loaded"):
        with pytest.raises(fp.CheckpointNotFoundError, match=str(tmp_path)):
            load_state(training.accelerator)


def test_arguments_reach_stock_functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training()
    save_state(training.accelerator, tmp_path / "a")
    seen: dict[str, Any] = {}
    monkeypatch.setattr(training.accelerator, "load_state", lambda *args, **options: seen.update(options, args=args))
    assert load_state(training.accelerator, tmp_path / "a", map_location="cpu") == tmp_path / "a"
    assert seen == {"args": (str(tmp_path / "a"),), "map_location": "cpu"}
    monkeypatch.setattr(training.accelerator, "save_state", lambda *args, **options: seen.update(options, args=args))
    save_state(training.accelerator, tmp_path / "b", safe_serialization=False, exclude_frozen_parameters=True)
    assert seen["args"][1] is False
    assert seen["exclude_frozen_parameters"] is True
