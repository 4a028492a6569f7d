"""What a user has put into a checkpoint-N is there after the Trainer has saved that step again, as with a stock one."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from support.filesystems import FullFor
from support.huggingface_trainers import attached, trainer_for, working_in
from support.runs import hidden_names

import fastpersist as fp
from fastpersist.commit.filesystem import Filesystem, using
from fastpersist.integrations.huggingface import checkpoint_saves, last_checkpoint
from fastpersist.integrations.huggingface.foreign_files import hold_foreign, put_back

NOTES = {"notes.txt": b"of mine", "evaluation/step/scores.json": b"{}", "my_weights.pt": b"not torch's"}


def nobody() -> None:
    """Stand for a wait that ends at once."""


def put_notes(checkpoint: Path) -> None:
    for name, content in NOTES.items():
        (checkpoint / name).parent.mkdir(parents=True, exist_ok=True)
        (checkpoint / name).write_bytes(content)


def check_notes(checkpoint: Path) -> None:
    for name, content in NOTES.items():
        assert (checkpoint / name).read_bytes() == content


def test_code_that_is_tested_is_that_of_this_tree() -> None:
    assert Path(checkpoint_saves.__file__ or "").parent == Path(__file__).parents[3] / "integrations" / "huggingface"


def test_files_of_users_stay_as_with_a_stock_trainer(tmp_path: Path) -> None:
    for kind in ("stock", "ours"):
        with working_in(tmp_path / kind) as output:
            for _ in range(3):  # what was put back once is kept again
                trainer = trainer_for(max_steps=4) if kind == "stock" else attached(max_steps=4)[0]
                trainer.train()
                if not (output / "checkpoint-2" / "notes.txt").exists():
                    put_notes(output / "checkpoint-2")
            check_notes(output / "checkpoint-2")
            assert hidden_names(output) == []


def test_a_damaged_copy_in_the_order_of_names_is_not_whole(tmp_path: Path) -> None:
    with working_in(tmp_path) as output:
        attached(max_steps=2)[0].train()
        copy = tmp_path / "copy" / "checkpoint-2"
        copy.mkdir(parents=True)
        for number, file in enumerate(sorted((output / "checkpoint-2").iterdir())):
            (copy / file.name).write_bytes(file.read_bytes())
            os.utime(copy / file.name, (number, number))
        weights = copy / "model.safetensors"
        times = weights.stat().st_mtime
        weights.write_bytes(weights.read_bytes()[:-1] + b"?")
        os.utime(weights, (times, times))
        with pytest.warns(RuntimeWarning, match="is not whole"), pytest.raises(fp.CheckpointNotFoundError):
            last_checkpoint(copy.parent)


def test_a_checkpoint_that_a_stock_trainer_has_saved_over_is_whole_once_it_is_complete(tmp_path: Path) -> None:
    with working_in(tmp_path) as output:
        attached(max_steps=4)[0].train()
        trainer_for(max_steps=4, learning_rate=0.5).train()
        assert last_checkpoint(output) == str(output / "checkpoint-4")
        weights = output / "checkpoint-4" / "model.safetensors"
        whole = weights.read_bytes()
        weights.write_bytes(whole[:-1])  # as if the second run had ended before it saved its state
        with pytest.warns(RuntimeWarning, match="checkpoint-4 is not whole"):
            assert last_checkpoint(output) == str(output / "checkpoint-2")
        (output / "checkpoint-4" / "trainer_state.json").touch()
        with pytest.warns(RuntimeWarning, match="checkpoint-4 is not whole"):
            assert last_checkpoint(output) == str(output / "checkpoint-2")
        weights.write_bytes(whole)
        (output / "checkpoint-4" / "trainer_state.json").touch()
        assert last_checkpoint(output) == str(output / "checkpoint-4")


def test_checkpoint_with_files_of_users_is_whole_and_one_with_a_damage_is_not(tmp_path: Path) -> None:
    with working_in(tmp_path) as output:
        attached(max_steps=4)[0].train()
        put_notes(output / "checkpoint-4")
        assert last_checkpoint(output) == str(output / "checkpoint-4")
        with (output / "checkpoint-4" / "model.safetensors").open("r+b") as file:
            file.seek(-1, os.SEEK_END)
            byte = file.read(1)[0]
            file.seek(-1, os.SEEK_END)
            file.write(bytes([byte ^ 1]))
        with pytest.warns(RuntimeWarning, match="checkpoint-4 is not whole"):
            assert last_checkpoint(output) == str(output / "checkpoint-2")
        manifest = output / "checkpoint-2" / "MANIFEST.json"
        good = manifest.read_text()
        manifest.write_text(good.replace('"format": 1', '"format": 99'))
        with pytest.warns(RuntimeWarning, match="is not whole"), pytest.raises(fp.CheckpointNotFoundError):
            last_checkpoint(output)
        manifest.write_text(good)
        (output / "checkpoint-2" / "trainer_state.json").unlink()
        with (
            pytest.warns(RuntimeWarning, match="is not whole"),
            pytest.raises(fp.CheckpointNotFoundError, match=r"trainer_state\.json"),
        ):
            last_checkpoint(output)


def test_stock_checkpoint_is_replaced_and_only_what_is_not_the_trainers_stays(tmp_path: Path) -> None:
    with working_in(tmp_path) as output:
        trainer_for(max_steps=2).train()
        checkpoint = output / "checkpoint-2"
        put_notes(checkpoint)
        stale = ["model-00001-of-00002.safetensors", "model.safetensors.index.json", "rng_state_1.pth"]
        for name in [*stale, "optimizer_0/x.distcp"]:
            (checkpoint / name).parent.mkdir(exist_ok=True)
            (checkpoint / name).write_bytes(b"of an older run")
        attached(max_steps=2)[0].train()
        check_notes(checkpoint)
        assert not [name for name in [*stale, "optimizer_0"] if (checkpoint / name).exists()]
        assert last_checkpoint(output) == str(checkpoint)
        assert hidden_names(output) == []


def test_save_that_fails_leaves_all_where_it_was(tmp_path: Path) -> None:
    with working_in(tmp_path) as output:
        attached(max_steps=2)[0].train()
        put_notes(output / "checkpoint-2")
        with using(FullFor("checkpoint-2")), pytest.warns(RuntimeWarning, match="could not be saved"):
            attached(max_steps=2, on_error="warn")[0].train()
        check_notes(output / "checkpoint-2")
        assert last_checkpoint(output) == str(output / "checkpoint-2")
        assert hidden_names(output) == []


def test_save_that_is_published_and_fails_then_keeps_them_too(tmp_path: Path) -> None:
    class NotSynced(Filesystem):
        """It exchanges names, and cannot make that durable."""

        exchanged = False

        def exchange(self, first: str, second: str) -> None:
            super().exchange(first, second)
            self.exchanged = True

        def sync_directory(self, path: str) -> None:
            if self.exchanged:
                self.exchanged = False
                raise fp.StorageError(errno.EIO, f"syncing {path}: Input/output error", path)
            super().sync_directory(path)

    with working_in(tmp_path) as output:
        attached(max_steps=2)[0].train()
        put_notes(output / "checkpoint-2")
        with using(NotSynced()), pytest.warns(RuntimeWarning, match="a power failure may undo that"):
            attached(max_steps=2, on_error="warn")[0].train()
        check_notes(output / "checkpoint-2")
        assert not (output / ".checkpoint-2.held").exists()


def test_directory_that_cannot_be_listed_is_not_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = os.scandir

    def refuse(path: str) -> object:
        if str(path).endswith("checkpoint-2/evaluation"):
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)
        return listed(path)

    with working_in(tmp_path) as output:
        attached(max_steps=2)[0].train()
        put_notes(output / "checkpoint-2")
        monkeypatch.setattr(os, "scandir", refuse)
        with pytest.warns(RuntimeWarning, match="could not be saved"):
            attached(max_steps=2, on_error="warn")[0].train()
        monkeypatch.undo()
        check_notes(output / "checkpoint-2")
        assert hidden_names(output) == []


def test_what_a_dead_process_held_is_put_back_by_the_next_save(tmp_path: Path) -> None:
    with working_in(tmp_path) as output:
        attached(max_steps=2)[0].train()
        checkpoint = output / "checkpoint-2"
        put_notes(checkpoint)
        hold_foreign(str(checkpoint), wait=nobody)
        for name in NOTES:  # the new directory is there, and the process gone
            (checkpoint / name).unlink()
        attached(max_steps=2)[0].train()
        check_notes(checkpoint)
        assert hidden_names(output) == []


def test_names_that_the_new_checkpoint_has_are_its_own(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x").write_text("old")
    hold_foreign(str(tmp_path / "a"), wait=nobody)
    (tmp_path / "a" / "x").unlink()
    (tmp_path / "a" / "x").write_text("new")
    put_back(str(tmp_path / "a"))
    assert (tmp_path / "a" / "x").read_text() == "new"
    assert os.listdir(tmp_path) == ["a"]


def test_file_system_without_links_gets_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "link", refuse)
    put_notes(tmp_path / "a")
    hold_foreign(str(tmp_path / "a"), wait=nobody)
    for name in NOTES:
        (tmp_path / "a" / name).unlink()
    put_back(str(tmp_path / "a"))
    check_notes(tmp_path / "a")


def test_link_is_not_kept_and_the_log_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    put_notes(tmp_path / "a")
    (tmp_path / "a" / "link").symlink_to("notes.txt")
    (tmp_path / "a" / "folder").symlink_to("evaluation")
    hold_foreign(str(tmp_path / "a"), wait=nobody)
    for name in ("link", "folder"):
        assert f"{tmp_path / 'a' / name} is removed with the replaced checkpoint" in caplog.text
    assert sorted(os.listdir(tmp_path / ".a.held")) == ["evaluation", "my_weights.pt", "notes.txt"]
