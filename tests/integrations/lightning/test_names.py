"""A checkpoint that is saved under two names is written once, if it is the same; and ModelCheckpoint's link to it."""

from __future__ import annotations

import errno
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.filesystems import FullFor
from support.lightning_plugins import IGNORED, FullOnceReleased, Training, plugin_of
from support.runs import copied, held_writers, hidden_names
from support.sameness import assert_same

import fastpersist as fp
from fastpersist.commit.filesystem import Filesystem, using
from fastpersist.integrations.lightning import FastPersistCheckpointIO

pytestmark = [pytest.mark.filterwarnings(one) for one in IGNORED]


def save(plugin: FastPersistCheckpointIO, checkpoint: dict[str, Any], path: Path) -> None:
    """Save as ModelCheckpoint does: "last" right behind another one."""
    with plugin.linking(is_first=path.name != "last.ckpt"):
        plugin.save_checkpoint(checkpoint, path)


def test_same_checkpoint_under_a_second_name_is_a_hard_link_once_it_is_durable(tmp_path: Path) -> None:
    training = Training()
    plugin = plugin_of(training)
    with held_writers() as writers:
        save(plugin, training.checkpoint(), tmp_path / "a.ckpt")
        save(plugin, training.checkpoint(), tmp_path / "last.ckpt")
        assert len(plugin.pending()) == 1
        assert plugin.order.expects(str(tmp_path / "last.ckpt")) is True
        expected = copied(training.checkpoint())
        training.step()
        writers.release()
        plugin.wait()
    assert (tmp_path / "a.ckpt").samefile(tmp_path / "last.ckpt")
    assert_same(torch.load(tmp_path / "last.ckpt"), expected)
    save(plugin, training.checkpoint(), tmp_path / "last.ckpt")
    plugin.wait()
    assert_same(torch.load(tmp_path / "a.ckpt"), expected)  # the other name keeps the old file
    assert torch.load(tmp_path / "last.ckpt")["global_step"] == 2
    assert hidden_names(tmp_path) == []


def test_second_name_of_a_durable_file_replaces_what_has_the_name(tmp_path: Path) -> None:
    training = Training()
    plugin = plugin_of(training)
    (tmp_path / "last.ckpt").symlink_to("nothing")
    save(plugin, training.checkpoint(), tmp_path / "a.ckpt")
    plugin.wait()
    for _ in range(2):  # the second time both are names of one file already
        save(plugin, training.checkpoint(), tmp_path / "last.ckpt")
        plugin.wait()
    assert (tmp_path / "a.ckpt").samefile(tmp_path / "last.ckpt")
    assert not (tmp_path / "last.ckpt").is_symlink()
    assert sorted(os.listdir(tmp_path)) == ["a.ckpt", "last.ckpt"]


def test_where_there_are_no_hard_links_the_second_name_is_a_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = Training()
    plugin = plugin_of(training)

    def refuse(*_arguments: object, **_keywords: object) -> None:
        raise OSError(errno.EPERM, "no hard links here")

    monkeypatch.setattr(os, "link", refuse)
    save(plugin, training.checkpoint(), tmp_path / "a.ckpt")
    save(plugin, training.checkpoint(), tmp_path / "last.ckpt")
    plugin.wait()
    assert not (tmp_path / "a.ckpt").samefile(tmp_path / "last.ckpt")
    assert (tmp_path / "a.ckpt").read_bytes() == (tmp_path / "last.ckpt").read_bytes()
    assert hidden_names(tmp_path) == []


def test_when_the_second_name_fails_what_it_was_to_replace_stays_and_the_error_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = Training()
    plugin = plugin_of(training)
    torch.save({"global_step": 0}, tmp_path / "old-last.ckpt")

    def refuse(*_arguments: object, **_keywords: object) -> None:
        raise OSError(errno.EIO, "broken")

    with monkeypatch.context() as patch:
        patch.setattr(os, "link", refuse)
        save(plugin, training.checkpoint(), tmp_path / "a.ckpt")
        save(plugin, training.checkpoint(), tmp_path / "last.ckpt")
        plugin.remove_checkpoint(tmp_path / "old-last.ckpt")
        with pytest.raises(OSError, match="broken"):
            plugin.wait()
    assert sorted(os.listdir(tmp_path)) == ["a.ckpt", "old-last.ckpt"]


def test_failed_save_has_no_second_name(tmp_path: Path) -> None:
    training = Training()
    plugin = plugin_of(training)
    torch.save({"global_step": 0}, tmp_path / "last.ckpt")
    with held_writers(FullOnceReleased("a.ckpt")) as writers:
        save(plugin, training.checkpoint(), tmp_path / "a.ckpt")
        save(plugin, training.checkpoint(), tmp_path / "last.ckpt")
        writers.release()
        with pytest.raises(fp.NoSpaceError):
            plugin.wait()
        plugin.wait()
    assert torch.load(tmp_path / "last.ckpt") == {"global_step": 0}


def changed_value(training: Training) -> dict[str, Any]:
    return training.checkpoint(epoch=1)


def changed_weights(training: Training) -> dict[str, Any]:
    with torch.no_grad():
        training.model.bias.add_(1)
    return training.checkpoint()


def stepped(training: Training) -> dict[str, Any]:
    training.step()
    return {**training.checkpoint(), "global_step": 1}


def other_tensor(training: Training) -> dict[str, Any]:
    return {**training.checkpoint(), "state_dict": copied(training.model.state_dict())}


def other_order(training: Training) -> dict[str, Any]:
    return dict(reversed(training.checkpoint().items()))


@pytest.mark.parametrize("change", [changed_value, changed_weights, stepped, other_tensor, other_order])
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "plain"])
def test_checkpoint_that_differs_is_saved_by_itself(
    tmp_path: Path, change: Callable[[Training], dict[str, Any]], fused: bool
) -> None:
    training = Training(fused=fused)
    plugin = plugin_of(training)
    save(plugin, training.checkpoint(), tmp_path / "a.ckpt")
    plugin.wait()
    second = change(training)
    save(plugin, second, tmp_path / "last.ckpt")
    plugin.wait()
    assert_same(torch.load(tmp_path / "last.ckpt"), copied(second))
    assert not (tmp_path / "a.ckpt").samefile(tmp_path / "last.ckpt")


def test_what_cannot_be_compared_is_saved_twice(tmp_path: Path) -> None:
    training = Training()
    plugin = plugin_of(training)
    for name in ("a.ckpt", "last.ckpt"):
        save(plugin, training.checkpoint(hyper=torch.nn.Identity()), tmp_path / name)
    plugin.wait()
    assert not (tmp_path / "a.ckpt").samefile(tmp_path / "last.ckpt")


def test_removed_file_does_not_get_a_second_name(tmp_path: Path) -> None:
    training = Training()
    plugin = plugin_of(training)
    save(plugin, training.checkpoint(), tmp_path / "a.ckpt")
    plugin.remove_checkpoint(tmp_path / "a.ckpt")
    save(plugin, training.checkpoint(), tmp_path / "last.ckpt")
    plugin.wait()
    assert os.listdir(tmp_path) == ["last.ckpt"]


def test_link_is_made_once_its_file_is_durable_and_not_if_it_fails(tmp_path: Path) -> None:
    plugin = plugin_of(on_error="warn")
    torch.save({"global_step": 1}, tmp_path / "1.ckpt")
    key = str(tmp_path / "last.ckpt")
    plugin.order.link(str(tmp_path / "1.ckpt"), key, symbolic=True)
    assert os.readlink(key) == "1.ckpt"
    with held_writers() as writers:
        save(plugin, {"global_step": 2}, tmp_path / "2.ckpt")
        plugin.order.link(str(tmp_path / "2.ckpt"), key, symbolic=True)
        plugin.remove_checkpoint(tmp_path / "1.ckpt")
        assert os.readlink(key) == "1.ckpt"
        assert torch.load(key) == {"global_step": 1}
        writers.release()
        plugin.wait()
    assert os.readlink(key) == "2.ckpt"
    with using(FullFor()):
        save(plugin, {"global_step": 3}, tmp_path / "3.ckpt")
        plugin.order.link(str(tmp_path / "3.ckpt"), key, symbolic=True)
        plugin.remove_checkpoint(tmp_path / "2.ckpt")
        with pytest.warns(RuntimeWarning, match=r"3\.ckpt"):
            plugin.wait()
    assert torch.load(key) == {"global_step": 2}


def test_after_a_failure_the_second_name_is_written_by_itself(tmp_path: Path) -> None:
    training = Training()
    plugin = plugin_of(training, on_error="warn")
    torch.save({"global_step": 0}, tmp_path / "a.ckpt")
    with held_writers(FullOnceReleased("a.ckpt")) as writers:
        writers.release()
        save(plugin, training.checkpoint(), tmp_path / "a.ckpt")
        plugin.order.join()
        with pytest.warns(RuntimeWarning, match=r"a\.ckpt"):
            save(plugin, training.checkpoint(), tmp_path / "last.ckpt")
        plugin.wait()
    assert torch.load(tmp_path / "a.ckpt") == {"global_step": 0}
    assert_same(torch.load(tmp_path / "last.ckpt"), copied(training.checkpoint()))


class Uneven(Filesystem):
    """The real file system, in which some writers are much slower than others."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance

    def allocate(self, fd: int, size_bytes: int, path: str) -> None:
        time.sleep(self._chance.choice([0, 0, 0.002, 0.02]))
        super().allocate(fd, size_bytes, path)


@pytest.mark.parametrize("seed", range(8))
def test_whatever_finishes_first_the_files_are_those_that_were_asked_for_last(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    training = Training()
    plugin = plugin_of(training)
    names = ["a.ckpt", "b.ckpt", "c.ckpt", "last.ckpt"]
    expected: dict[str, int] = {}
    with using(Uneven(chance)):
        for count in range(60):
            name, deed = chance.choice(names), chance.choice(["new", "new", "same", "remove", "step"])
            if deed == "step":
                plugin.wait_captured()
            elif deed == "remove":
                plugin.remove_checkpoint(tmp_path / name)
                expected.pop(name, None)
            else:
                part = count if deed == "new" else max(expected.values(), default=count)
                save(plugin, training.checkpoint(part=part), tmp_path / name)
                expected[name] = part
            for one in names:
                known = plugin.order.expects(str(tmp_path / one))
                assert known in (one in expected, None)
        plugin.wait()
    assert {path.name: torch.load(path)["part"] for path in tmp_path.iterdir()} == expected


def test_saves_that_the_program_makes_itself_are_no_links(tmp_path: Path) -> None:
    """Between them it may swap in other weights by `.data`, which moves no counter."""
    training = Training()
    plugin = plugin_of(training)
    for name, value in (("raw.ckpt", 1.0), ("average.ckpt", 2.0)):
        plugin.save_checkpoint(training.checkpoint(), tmp_path / name)
        plugin.wait()
        for parameter in training.optimizer.param_groups[0]["params"]:
            parameter.data.fill_(value)
    assert not (tmp_path / "raw.ckpt").samefile(tmp_path / "average.ckpt")
