"""The plugin alone: what it saves, removes and links to happens in an order in which nothing is lost."""

from __future__ import annotations

import copy
import errno
import logging
import os
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.filesystems import FullFor
from support.forking import run_in_child
from support.lightning_plugins import IGNORED, Training, plugin_of
from support.lightning_runs import Net, lightning
from support.runs import copied, held_writers, hidden_names
from support.sameness import assert_same
from support.training import PATIENCE_S

import fastpersist as fp
from fastpersist.commit.filesystem import Filesystem, using
from fastpersist.integrations.lightning import FastPersistCheckpointIO, last_checkpoint

pytestmark = [pytest.mark.filterwarnings(one) for one in IGNORED]


# --- saving and loading


def test_save_returns_before_the_file_is_there_and_the_step_waits_for_what_it_changes(tmp_path: Path) -> None:
    training = Training()
    plugin = plugin_of(training)
    expected = copied(training.checkpoint())
    with held_writers() as writers:
        plugin.save_checkpoint(training.checkpoint(), tmp_path / "deep" / "a.ckpt")
        assert plugin.pending() == [str(tmp_path / "deep" / "a.ckpt")]
        assert not (tmp_path / "deep" / "a.ckpt").exists()
        training.step()
        writers.release()
        plugin.wait()
    assert plugin.pending() == []
    assert_same(torch.load(tmp_path / "deep" / "a.ckpt", weights_only=True), expected)
    assert hidden_names(tmp_path / "deep") == []


def test_without_an_optimizer_all_is_copied_before_the_save_returns(tmp_path: Path) -> None:
    training = Training()
    plugin = plugin_of()
    expected = copied(training.checkpoint())
    with held_writers() as writers:
        plugin.save_checkpoint(training.checkpoint(), tmp_path / "a.ckpt")
        with torch.no_grad():
            training.model.weight.data.zero_()
        writers.release()
        plugin.wait()
    assert_same(torch.load(tmp_path / "a.ckpt"), expected)


def test_load_waits_for_the_file(tmp_path: Path) -> None:
    training = Training()
    plugin = plugin_of(training)
    torch.save({"global_step": -1}, tmp_path / "a.ckpt")
    loaded: list[Any] = []
    with held_writers() as writers:
        plugin.save_checkpoint(training.checkpoint(), tmp_path / "a.ckpt")
        loader = threading.Thread(target=lambda: loaded.append(plugin.load_checkpoint(tmp_path / "a.ckpt")))
        loader.start()
        assert writers.reached.wait(PATIENCE_S)
        assert not loaded
        writers.release()
        loader.join(PATIENCE_S)
    assert_same(loaded[0], copied(training.checkpoint()))


def test_load_of_another_path_does_not_wait(tmp_path: Path) -> None:
    plugin = plugin_of()
    torch.save({"global_step": 7}, tmp_path / "b.ckpt")
    with held_writers():
        plugin.save_checkpoint({"global_step": 8}, tmp_path / "a.ckpt")
        assert plugin.load_checkpoint(tmp_path / "b.ckpt") == {"global_step": 7}
        assert plugin.pending()


def test_load_is_what_lightning_would_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plugin, stock = plugin_of(), lightning.fabric.plugins.TorchCheckpointIO()
    unsafe = {"net": Net, "tensor": torch.ones(3)}
    plugin.save_checkpoint(unsafe, tmp_path / "a.ckpt")
    plugin.wait()
    for one in (plugin, stock):
        with pytest.raises(pickle.UnpicklingError):
            one.load_checkpoint(tmp_path / "a.ckpt")
        assert one.load_checkpoint(tmp_path / "a.ckpt", weights_only=False)["net"] is Net
        assert one.load_checkpoint(str(tmp_path / "a.ckpt"), "meta", False)["tensor"].is_meta
        with pytest.raises(FileNotFoundError):
            one.load_checkpoint(tmp_path / "none.ckpt")
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    assert plugin.load_checkpoint(tmp_path / "a.ckpt")["net"] is Net


def test_storage_options_are_refused_as_by_lightning(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="storage_options"):
        plugin_of().save_checkpoint({}, tmp_path / "a.ckpt", storage_options={"x": 1})


def test_remote_paths_go_to_lightnings_own_plugin_and_file_urls_do_not(tmp_path: Path) -> None:
    plugin = plugin_of()
    plugin.save_checkpoint({"global_step": 1}, "memory://here/a.ckpt")
    assert plugin.load_checkpoint("memory://here/a.ckpt") == {"global_step": 1}
    plugin.remove_checkpoint("memory://here/a.ckpt")
    with pytest.raises(FileNotFoundError):
        plugin.load_checkpoint("memory://here/a.ckpt")
    plugin.save_checkpoint({"global_step": 2}, f"file://{tmp_path}/b.ckpt")
    assert plugin.load_checkpoint(tmp_path / "b.ckpt") == {"global_step": 2}


def test_a_tilde_is_the_home_directory_as_in_lightning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    monkeypatch.setenv("HOME", str(tmp_path))
    plugin = plugin_of()
    for path, name in (("~/a.ckpt", "a.ckpt"), ("file://~/b.ckpt", "b.ckpt")):
        plugin.save_checkpoint({"global_step": 1}, path)
        assert plugin.load_checkpoint(path) == {"global_step": 1}
        assert last_checkpoint("~") == str(tmp_path / name)
        plugin.remove_checkpoint(path)
        plugin.wait()
    assert [entry.name for entry in tmp_path.iterdir()] == ["elsewhere"]
    assert not os.listdir()


def test_save_to_a_symbolic_link_replaces_the_link_and_not_what_it_leads_to(tmp_path: Path) -> None:
    plugin = plugin_of()
    torch.save({"global_step": 1}, tmp_path / "a.ckpt")
    (tmp_path / "last.ckpt").symlink_to("a.ckpt")
    (tmp_path / "broken.ckpt").symlink_to("nothing.ckpt")
    for name in ("last.ckpt", "broken.ckpt"):
        plugin.save_checkpoint({"global_step": 2}, tmp_path / name)
    plugin.wait()
    assert torch.load(tmp_path / "a.ckpt") == {"global_step": 1}
    assert torch.load(tmp_path / "last.ckpt") == torch.load(tmp_path / "broken.ckpt") == {"global_step": 2}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.ckpt", "broken.ckpt", "last.ckpt"]
    assert not (tmp_path / "last.ckpt").is_symlink()


def test_save_for_slurm_is_durable_when_it_returns_and_leaves_nothing_that_looks_like_another(tmp_path: Path) -> None:
    training = Training()
    plugin = plugin_of(training)

    class Looking(Filesystem):
        names: list[str]

        def allocate(self, fd: int, size_bytes: int, path: str) -> None:
            super().allocate(fd, size_bytes, path)
            self.names = os.listdir(tmp_path)

    looking = Looking()
    with using(looking):
        plugin.save_checkpoint(training.checkpoint(), tmp_path / "hpc_ckpt_1.ckpt")
    assert looking.names
    assert not [name for name in looking.names if "hpc_ckpt" in name]  # Lightning takes the largest number it finds
    assert os.listdir(tmp_path) == ["hpc_ckpt_1.ckpt"]
    assert_same(torch.load(tmp_path / "hpc_ckpt_1.ckpt"), copied(training.checkpoint()))


def test_after_teardown_a_save_is_durable_when_it_returns(tmp_path: Path) -> None:
    plugin = plugin_of()
    plugin.teardown()
    plugin.save_checkpoint({"global_step": 2}, tmp_path / "a.ckpt")
    assert torch.load(tmp_path / "a.ckpt") == {"global_step": 2}
    with using(FullFor()), pytest.raises(fp.NoSpaceError):
        plugin.save_checkpoint({"global_step": 3}, tmp_path / "a.ckpt")


def test_teardown_finishes_what_is_under_way(tmp_path: Path) -> None:
    plugin = plugin_of()
    with held_writers() as writers:
        plugin.save_checkpoint({"global_step": 1}, tmp_path / "a.ckpt")
        plugin.remove_checkpoint(tmp_path / "b.ckpt")
        threading.Timer(0.05, writers.release).start()
        plugin.teardown()
        assert torch.load(tmp_path / "a.ckpt") == {"global_step": 1}


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_plugin_goes_to_another_process_with_its_options(duplicate: Callable[[Any], Any], tmp_path: Path) -> None:
    other = duplicate(plugin_of(Training(), on_error="warn", durable=False))
    with using(FullFor()):
        other.save_checkpoint({"global_step": 1}, tmp_path / "a.ckpt")
        with pytest.warns(RuntimeWarning, match=r"a\.ckpt"):
            other.wait()
    assert other.optimizer is None


@pytest.mark.parametrize("options", [{"on_error": "ignore"}, {"engine": "steam"}])
def test_unknown_options_are_refused(options: dict[str, str]) -> None:
    with pytest.raises(fp.ConfigError, match=next(iter(options.values()))):
        FastPersistCheckpointIO(**options)  # type: ignore[arg-type]


def test_forked_child_does_not_wait_for_the_saves_of_its_parent(tmp_path: Path) -> None:
    plugin = plugin_of()
    with held_writers():
        plugin.save_checkpoint({"global_step": 1}, tmp_path / "a.ckpt")

        def work(_report: Any) -> None:
            plugin.teardown()
            assert plugin.pending() == []

        run_in_child(work)
        assert plugin.pending() == [str(tmp_path / "a.ckpt")]
    plugin.wait()
    assert torch.load(tmp_path / "a.ckpt") == {"global_step": 1}


# --- removals


def test_removal_waits_for_the_successor(tmp_path: Path) -> None:
    plugin = plugin_of()
    torch.save({"global_step": 1}, tmp_path / "old.ckpt")
    with held_writers() as writers:
        plugin.save_checkpoint({"global_step": 2}, tmp_path / "new.ckpt")
        plugin.remove_checkpoint(tmp_path / "old.ckpt")
        assert (tmp_path / "old.ckpt").exists()
        assert plugin.order.expects(str(tmp_path / "old.ckpt")) is False
        assert plugin.order.expects(str(tmp_path / "new.ckpt")) is True
        assert plugin.order.expects(str(tmp_path / "other.ckpt")) is None
        writers.release()
        plugin.wait()
    assert os.listdir(tmp_path) == ["new.ckpt"]
    assert plugin.order.expects(str(tmp_path / "old.ckpt")) is None


@pytest.mark.parametrize("when", ["under way", "over"])
def test_file_stays_when_its_successor_fails(tmp_path: Path, when: str, caplog: pytest.LogCaptureFixture) -> None:
    plugin = plugin_of()
    torch.save({"global_step": 1}, tmp_path / "old.ckpt")
    with using(FullFor()), caplog.at_level(logging.WARNING, "fastpersist"):
        plugin.save_checkpoint({"global_step": 2}, tmp_path / "new.ckpt")
        if when == "over":
            plugin.order.join()
        plugin.remove_checkpoint(tmp_path / "old.ckpt")
        with pytest.raises(fp.NoSpaceError):
            plugin.wait()
        plugin.wait()  # told once
    assert os.listdir(tmp_path) == ["old.ckpt"]
    assert "old.ckpt is not removed" in caplog.text


def test_after_a_failure_removals_go_on_with_the_next_save(tmp_path: Path) -> None:
    plugin = plugin_of(on_error="warn")
    with using(FullFor()):
        plugin.save_checkpoint({"global_step": 1}, tmp_path / "1.ckpt")
        plugin.order.join()
    with pytest.warns(RuntimeWarning, match=r"1\.ckpt"):
        plugin.save_checkpoint({"global_step": 2}, tmp_path / "2.ckpt")
    plugin.save_checkpoint({"global_step": 3}, tmp_path / "3.ckpt")
    plugin.remove_checkpoint(tmp_path / "2.ckpt")
    plugin.wait()
    assert os.listdir(tmp_path) == ["3.ckpt"]


def test_file_that_is_to_be_removed_and_is_saved_again_stays(tmp_path: Path) -> None:
    training = Training()
    plugin = plugin_of(training)
    torch.save({"global_step": 1}, tmp_path / "a.ckpt")
    with held_writers() as writers:
        plugin.save_checkpoint(training.checkpoint(part=1), tmp_path / "b.ckpt")
        plugin.remove_checkpoint(tmp_path / "a.ckpt")
        plugin.save_checkpoint(training.checkpoint(part=2), tmp_path / "a.ckpt")
        assert plugin.order.expects(str(tmp_path / "a.ckpt")) is True
        writers.release()
        plugin.wait()
    assert torch.load(tmp_path / "a.ckpt")["part"] == 2


def test_directories_and_missing_files_are_removed_as_by_lightning(tmp_path: Path) -> None:
    plugin = plugin_of()
    (tmp_path / "sharded.ckpt" / "inner").mkdir(parents=True)
    plugin.remove_checkpoint(tmp_path / "sharded.ckpt")
    plugin.remove_checkpoint(tmp_path / "none.ckpt")
    plugin.wait()
    assert os.listdir(tmp_path) == []


def test_removal_that_fails_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plugin = plugin_of()
    (tmp_path / "a.ckpt").touch()

    def refuse(_path: object) -> None:
        raise PermissionError(errno.EPERM, "not allowed")

    with monkeypatch.context() as patch:
        patch.setattr(os, "remove", refuse)
        plugin.remove_checkpoint(tmp_path / "a.ckpt")
    with pytest.raises(PermissionError):
        plugin.wait()
    plugin.wait()


# --- errors


def next_save(plugin: FastPersistCheckpointIO, tmp_path: Path) -> None:
    plugin.save_checkpoint({"global_step": 2}, tmp_path / "b.ckpt")


def load_of_the_path(plugin: FastPersistCheckpointIO, tmp_path: Path) -> None:
    plugin.load_checkpoint(tmp_path / "a.ckpt")


def wait(plugin: FastPersistCheckpointIO, tmp_path: Path) -> None:
    plugin.wait()


def teardown(plugin: FastPersistCheckpointIO, tmp_path: Path) -> None:
    plugin.teardown()


tellers = pytest.mark.parametrize("tell", [next_save, load_of_the_path, wait, teardown])


@tellers
def test_failure_is_raised_by_whoever_comes_first_and_once(
    tmp_path: Path, tell: Callable[[FastPersistCheckpointIO, Path], None]
) -> None:
    plugin = plugin_of()
    torch.save({"global_step": 0}, tmp_path / "a.ckpt")
    with using(FullFor()):
        plugin.save_checkpoint({"global_step": 1}, tmp_path / "a.ckpt")
        plugin.order.join()
    with pytest.raises(fp.NoSpaceError, match=r"a\.ckpt"):
        tell(plugin, tmp_path)
    assert plugin.load_checkpoint(tmp_path / "a.ckpt") == {"global_step": 0}
    plugin.wait()
    plugin.teardown()


@tellers
def test_failure_is_a_warning_when_asked_for(
    tmp_path: Path, tell: Callable[[FastPersistCheckpointIO, Path], None]
) -> None:
    plugin = plugin_of(on_error="warn")
    torch.save({"global_step": 0}, tmp_path / "a.ckpt")
    with using(FullFor()):
        plugin.save_checkpoint({"global_step": 1}, tmp_path / "a.ckpt")
        plugin.order.join()
    with pytest.warns(RuntimeWarning, match=r"a\.ckpt"):
        tell(plugin, tmp_path)
    plugin.wait()


def test_teardown_in_an_unwinding_exception_logs_instead_of_raising(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plugin = plugin_of()
    with using(FullFor()):
        plugin.save_checkpoint({"global_step": 1}, tmp_path / "a.ckpt")
        with pytest.raises(KeyError):
            try:
                raise KeyError("of the training")
            except KeyError:
                plugin.teardown()
                raise
    assert "disk full" in caplog.text
    plugin.wait()


# --- after a crash


def test_last_checkpoint_is_the_newest_that_is_whole(tmp_path: Path) -> None:
    assert last_checkpoint(tmp_path) is None
    plugin = plugin_of()
    for number in range(1, 5):
        plugin.save_checkpoint({"global_step": number, "weights": torch.ones(1000)}, tmp_path / f"{number}.ckpt")
        plugin.wait()
        os.utime(tmp_path / f"{number}.ckpt", (number, number))
    (tmp_path / "folder.ckpt").mkdir()
    (tmp_path / "gone.ckpt").symlink_to("nowhere")
    assert last_checkpoint(tmp_path) == str(tmp_path / "4.ckpt")
    with open(tmp_path / "4.ckpt", "r+b") as file:
        file.truncate(5000)
    os.utime(tmp_path / "4.ckpt", (4, 4))
    data = bytearray((tmp_path / "3.ckpt").read_bytes())
    data[data.index(torch.ones(100).numpy().tobytes()) + 9] ^= 4
    (tmp_path / "3.ckpt").write_bytes(data)
    os.utime(tmp_path / "3.ckpt", (3, 3))
    with pytest.warns(RuntimeWarning, match=r"[34]\.ckpt is damaged and skipped: .") as told:
        assert last_checkpoint(tmp_path) == str(tmp_path / "2.ckpt")
    assert len(told) == 2
