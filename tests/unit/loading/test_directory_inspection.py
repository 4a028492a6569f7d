"""A checkpoint directory is what its manifest says, file by file; a root is its committed steps, and names the rest."""

from __future__ import annotations

import itertools
import json
import os
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from support.archives import flip_bit, record_places
from support.filesystems import failing_lookup
from support.forking import Report, run_in_child
from support.leaks import no_leaks
from support.sandbox import become_ordinary_user, needs_root, open_directory

import fastpersist as fp
from fastpersist import _native
from fastpersist.checkpointer import step_loader
from fastpersist.commit import step_listing
from fastpersist.errors import StorageError
from fastpersist.formats.manifest import MANIFEST_NAME, CheckpointManifest, FileEntry, encode_manifest, step_name
from fastpersist.loading import directory_inspection
from fastpersist.loading.directory_inspection import directory_bytes, inspect_directory, verify_directory
from fastpersist.loading.file_inspection import Manifest, VerifyReport


@pytest.fixture(scope="module", autouse=True)
def nothing_is_left_behind(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with no_leaks():
        yield


def verify(path: Path, **options: Any) -> VerifyReport:
    return verify_directory(str(path), engine=options.pop("engine", "auto"))


def inspect(path: Path) -> Manifest:
    return inspect_directory(str(path))


def write_manifest(path: Path, step: int | None, *, checksum: bool = True) -> None:
    entries = []
    for file in sorted(p for p in path.rglob("*") if p.is_file() and p.name != MANIFEST_NAME):
        data = file.read_bytes()
        entries.append(FileEntry(str(file.relative_to(path)), len(data), zlib.crc32(data) if checksum else None))
    stats: dict[str, float | int | str] = {"write_s": 0.5, "engine": "uring"}
    manifest = CheckpointManifest(
        tuple(entries), step, 1.75e9, {"loss": 0.25}, {"torch": "2.13"}, {"name": "node", "cpus": 2}, stats
    )
    (path / MANIFEST_NAME).write_bytes(encode_manifest(manifest))


def make_checkpoint(path: Path, step: int | None = 7, *, checksum: bool = True) -> Path:
    path.mkdir(parents=True)
    (path / "inner").mkdir()
    fp.save({"model": {"w": torch.arange(3000.0)}, "step": step}, path / "state.pt", durable=False)
    fp.save({"t": torch.ones(50)}, path / "inner" / "weights.safetensors", durable=False)
    (path / "config.json").write_text("{}")
    (path / "empty.txt").touch()
    write_manifest(path, step, checksum=checksum)
    return path


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path / "step-00000007")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for step in (100, 7, 123_456_789):
        make_checkpoint(tmp_path / "run" / step_name(step), step)
    return tmp_path / "run"


def files_of(report: VerifyReport) -> list[str]:
    return [damage.file for damage in report.damages]


# --------------------------------------------------------------------------------------------- one checkpoint


def test_manifest_and_tensors_are_shown(checkpoint: Path) -> None:
    found = inspect(checkpoint)
    sizes = {entry.name: entry.size_bytes for entry in found.files}
    assert set(sizes) == {"state.pt", "inner/weights.safetensors", "config.json", "empty.txt"}
    assert (found.path, found.format, found.step, found.time_s) == (str(checkpoint), "directory", 7, 1.75e9)
    assert found.size_bytes == sum(sizes.values())
    assert found.has_checksums
    assert (found.metrics, found.versions, found.host) == (
        {"loss": 0.25},
        {"torch": "2.13"},
        {"name": "node", "cpus": 2},
    )
    assert found.stats == {"write_s": 0.5, "engine": "uring"}
    tensors = {(tensor.file, tensor.name): tensor for tensor in found.tensors}
    assert set(tensors) == {("state.pt", "model.w"), ("inner/weights.safetensors", "t")}
    weight = tensors["state.pt", "model.w"]
    assert weight.offset_bytes is not None
    start = weight.offset_bytes
    data = (checkpoint / "state.pt").read_bytes()[start : start + weight.size_bytes]
    assert data == torch.arange(3000.0).numpy().tobytes()
    assert "torch._utils._rebuild_tensor_v2" in found.globals
    assert found.checkpoints == ()


def test_directory_of_any_name_with_a_manifest_is_a_checkpoint(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "final model", None)
    assert inspect(path).step is None
    assert verify(path).ok


def test_whole_checkpoint_is_verified_in_every_byte(checkpoint: Path) -> None:
    report = verify(checkpoint)
    assert report.ok
    assert report.has_checksums
    assert report.checked_bytes == sum(entry.size_bytes for entry in inspect(checkpoint).files)
    assert report.checked_bytes == directory_bytes(str(checkpoint))


@pytest.mark.slow  # verifies a directory once for each of its bytes
def test_every_flipped_byte_of_every_file_is_found(checkpoint: Path) -> None:
    for entry in inspect(checkpoint).files:
        for at in range(0, entry.size_bytes, 211):
            flip_bit(checkpoint / entry.name, at)
            report = verify(checkpoint)
            assert not report.ok, f"{entry.name} at {at}"
            assert set(files_of(report)) == {entry.name}
            assert all(entry.name in damage.message for damage in report.damages)
            flip_bit(checkpoint / entry.name, at)
    assert verify(checkpoint).ok


def test_damaged_tensors_are_named_with_their_file(checkpoint: Path) -> None:
    flip_bit(checkpoint / "state.pt", record_places((checkpoint / "state.pt").read_bytes())["data/0"][0])
    safetensors = checkpoint / "inner" / "weights.safetensors"
    flip_bit(safetensors, safetensors.stat().st_size - 1)
    first, second = verify(checkpoint).damages
    assert (first.file, first.tensors) == ("inner/weights.safetensors", ("t",))
    assert (second.file, second.tensors, second.record) == ("state.pt", ("model.w",), "data/0")
    assert second.message.startswith("state.pt: the bytes of model.w are damaged")


def test_damage_in_padding_is_damage_outside_of_tensors(checkpoint: Path) -> None:
    data = (checkpoint / "state.pt").read_bytes()
    padding = data.index(b"Z" * 32)
    flip_bit(checkpoint / "state.pt", padding)
    (damage,) = verify(checkpoint).damages
    assert "outside of its tensors" in damage.message
    assert damage.tensors == ()


def test_missing_short_and_surplus_files(checkpoint: Path) -> None:
    (checkpoint / "config.json").unlink()
    os.truncate(checkpoint / "state.pt", 5000)
    (checkpoint / "empty.txt").unlink()
    (checkpoint / "empty.txt").mkdir()
    (checkpoint / "inner" / "more.txt").touch()
    report = verify(checkpoint)
    messages = {damage.file: damage.message for damage in report.damages}
    assert messages["config.json"] == "config.json is missing"
    assert messages["state.pt"].startswith("state.pt is 5000 bytes long, not ")
    assert messages["empty.txt"] == "empty.txt is no regular file"
    assert len(messages) == 3
    assert report.notes == ("inner/more.txt is not in the manifest, so nothing is known of it",)
    with pytest.raises(fp.FormatError, match=r"config\.json is missing"):
        inspect(checkpoint)


def test_file_beside_those_of_a_step_is_a_note_and_no_damage(root: Path) -> None:
    (root / step_name(100) / "notes.md").write_text("the one in the paper")
    report = verify(root / step_name(100))
    assert report.ok
    assert report.has_checksums
    note = "notes.md is not in the manifest, so nothing is known of it"
    assert report.notes == (note,)
    assert verify(root).ok
    assert verify(root).notes == (f"{step_name(100)}: {note}",)
    (root / step_name(100) / "link").symlink_to("notes.md")
    assert "link is a symbolic link" in verify(root).damages[0].message


def test_fifo_and_link_in_the_place_of_a_file_do_not_block(checkpoint: Path) -> None:
    (checkpoint / "config.json").unlink()
    os.mkfifo(checkpoint / "config.json")
    assert "config.json is no regular file" in [damage.message for damage in verify(checkpoint).damages]
    (checkpoint / "config.json").unlink()
    (checkpoint / "config.json").symlink_to("config.json")
    assert "config.json is missing" in [damage.message for damage in verify(checkpoint).damages]


def test_checkpoint_without_checksums_says_so(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "c", checksum=False)
    report = verify(path)
    assert report.ok
    assert not report.has_checksums  # of config.json nothing is known but its length
    assert not inspect(path).has_checksums
    assert report.checked_bytes >= 3000 * 4 + 50 * 4  # the tensor files have CRCs of their own
    flip_bit(path / "state.pt", record_places((path / "state.pt").read_bytes())["data/0"][0])
    assert verify(path).damages[0].tensors == ("model.w",)


MANIFESTS: dict[str, Callable[[Path], object]] = {
    "missing": lambda path: path.unlink(),
    "empty": lambda path: path.write_bytes(b""),
    "garbage": lambda path: path.write_bytes(b"\x00garbage"),
    "cut off": lambda path: os.truncate(path, 50),
    "of a later format": lambda path: path.write_text(json.dumps({"format": 2})),
    "leading outside": lambda path: path.write_text(path.read_text().replace("config.json", "../../etc/passwd")),
    "fifo": lambda path: (path.unlink(), os.mkfifo(path)),
    "link": lambda path: (path.unlink(), path.symlink_to("state.pt")),
    "directory": lambda path: (path.unlink(), path.mkdir()),
}


@pytest.mark.parametrize("kind", MANIFESTS)
def test_damaged_manifest_is_reported(kind: str, checkpoint: Path) -> None:
    MANIFESTS[kind](checkpoint / MANIFEST_NAME)
    report = verify(checkpoint)
    (damage,) = report.damages
    assert damage.file == MANIFEST_NAME
    assert MANIFEST_NAME in damage.message
    assert report.checked_bytes == 0
    with pytest.raises((fp.FormatError, fp.CheckpointNotFoundError)):
        inspect(checkpoint)
    assert directory_bytes(str(checkpoint)) == 0


def verify_with_a_read_that_fails(path: Path) -> VerifyReport:
    _native.set_fault_plan(_native.FaultPlan(op="read", nth=1, count=1))
    try:
        return verify(path, engine="fault:threads")
    finally:
        _native.clear_fault_plan()


def test_file_that_cannot_be_read_is_no_damage(checkpoint: Path) -> None:
    with pytest.raises(StorageError, match=r"config\.json"):
        verify_with_a_read_that_fails(checkpoint)


def test_file_that_cannot_be_read_does_not_hide_the_damage_of_another(root: Path) -> None:
    flip_bit(root / step_name(7) / "state.pt", 5)
    report = verify_with_a_read_that_fails(root / step_name(7))
    assert files_of(report) == ["state.pt", "config.json"]
    assert "config.json cannot be read" in report.damages[1].message
    report = verify_with_a_read_that_fails(root)
    assert files_of(report) == [f"{step_name(7)}/state.pt", f"{step_name(7)}/config.json"]
    flip_bit(root / step_name(7) / "state.pt", 5)
    flip_bit(root / step_name(100) / "state.pt", 5)
    report = verify_with_a_read_that_fails(root)
    assert files_of(report) == [f"{step_name(100)}/state.pt", step_name(7)]
    assert f"{step_name(7)} cannot be read: " in report.damages[1].message


@pytest.mark.parametrize("below", ["", MANIFEST_NAME])
@pytest.mark.parametrize("call", [verify, inspect])
def test_a_look_that_fails_is_an_error_of_the_disk(checkpoint: Path, call: Callable[[Path], Any], below: str) -> None:
    whole = call(checkpoint)
    for nth in itertools.count(1):
        found = whole
        with failing_lookup(checkpoint / below, nth) as failed, suppress(StorageError):
            found = call(checkpoint)
        assert found == whole
        if not failed:
            return


def test_nothing_of_the_file_is_run(checkpoint: Path, tmp_path: Path) -> None:
    class Harm:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "harm"),)

    fp.save({"harm": Harm()}, checkpoint / "state.pt")
    write_manifest(checkpoint, 7)
    assert verify(checkpoint).ok
    assert inspect(checkpoint).globals == ("posix.mkdir",)
    assert not (tmp_path / "harm").exists()


def test_files_that_hold_no_tensors_are_listed_all_the_same(checkpoint: Path) -> None:
    (checkpoint / "zeros.bin").write_bytes(bytes(100))
    (checkpoint / "text.pt").write_text("no checkpoint at all")
    write_manifest(checkpoint, 7)
    assert {tensor.file for tensor in inspect(checkpoint).tensors} == {"state.pt", "inner/weights.safetensors"}
    assert {"zeros.bin", "text.pt"} <= {entry.name for entry in inspect(checkpoint).files}
    assert verify(checkpoint).ok


# --------------------------------------------------------------------------------------------- a root


def test_steps_are_listed_as_integers_without_their_tensors(root: Path) -> None:
    found = inspect(root)
    assert (found.format, found.path) == ("root", str(root))
    assert [checkpoint.step for checkpoint in found.checkpoints] == [7, 100, 123_456_789]
    assert [checkpoint.path for checkpoint in found.checkpoints] == [
        str(root / step_name(step)) for step in (7, 100, 123_456_789)
    ]
    assert (
        found.size_bytes == sum(checkpoint.size_bytes for checkpoint in found.checkpoints) == directory_bytes(str(root))
    )
    assert all(checkpoint.tensors == () and len(checkpoint.files) == 4 for checkpoint in found.checkpoints)
    assert found.leftovers == ()


def test_all_steps_are_verified_and_damages_say_which(root: Path) -> None:
    report = verify(root)
    assert report.ok
    assert report.has_checksums
    assert report.checked_bytes == directory_bytes(str(root))
    flip_bit(root / step_name(100) / "state.pt", 5000)
    (root / step_name(7) / MANIFEST_NAME).unlink()
    report = verify(root)
    assert set(files_of(report)) == {f"{step_name(7)}/{MANIFEST_NAME}", f"{step_name(100)}/state.pt"}
    assert [damage.message.split(":")[0] for damage in report.damages] == [step_name(7), step_name(100)]
    found = inspect(root)
    assert [checkpoint.step for checkpoint in found.checkpoints] == [100, 123_456_789]
    assert found.leftovers == (step_name(7),)


def test_leftovers_are_told_and_no_damage(root: Path) -> None:
    (root / ".lock").write_text("1 host\n")
    (root / "LATEST").write_text(step_name(100))
    (root / "notes.txt").touch()
    (root / "step-5").mkdir()  # no name of ours
    token = "0123456789abcdef"
    pending = root / f".{step_name(200)}.pending-{token}"
    pending.mkdir()
    (pending / MANIFEST_NAME).touch()
    make_checkpoint(root / f".{step_name(100)}.retired-{token}", 100)
    report = verify(root)
    assert report.ok
    wanted = (f".{step_name(100)}.retired-{token}", pending.name)
    assert report.leftovers == wanted
    assert inspect(root).leftovers == wanted
    assert [checkpoint.step for checkpoint in inspect(root).checkpoints] == [7, 100, 123_456_789]
    assert not verify(pending).ok


@needs_root
def test_step_that_may_not_be_read_is_not_said_to_have_no_manifest(tmp_path: Path) -> None:
    with open_directory(tmp_path) as directory:
        with fp.Checkpointer(directory / "run") as checkpoints:
            checkpoints.save(1, {"weight": torch.ones(3)})
        (directory / "run" / step_name(1)).chmod(0)

        def work(report: Report) -> None:
            become_ordinary_user()
            with pytest.raises(StorageError, match=r"step-00000001/MANIFEST\.json: Permission denied"):
                verify(directory / "run")

        run_in_child(work)


def test_retired_step_whose_final_name_is_missing_is_committed(root: Path) -> None:
    retired = root / f".{step_name(100)}.retired-0123456789abcdef"
    (root / step_name(100)).rename(retired)
    found = inspect(root)
    assert [checkpoint.step for checkpoint in found.checkpoints] == [7, 100, 123_456_789]
    assert found.checkpoints[1].path == str(retired)
    assert found.leftovers == ()
    assert verify(root).ok
    flip_bit(retired / "state.pt", 5000)
    assert {name.split("/")[0] for name in files_of(verify(root))} == {retired.name}


def test_step_that_is_no_directory_is_damage(root: Path) -> None:
    (root / step_name(5)).write_text("a file")
    (root / step_name(6)).symlink_to("nowhere")
    report = verify(root)
    assert files_of(report) == [step_name(5), step_name(6)]
    assert inspect(root).leftovers == (step_name(5), step_name(6))


def test_root_before_its_first_save(tmp_path: Path) -> None:
    (tmp_path / ".lock").touch()
    assert inspect(tmp_path).checkpoints == ()
    assert not inspect(tmp_path).has_checksums
    assert verify(tmp_path).ok


def test_directory_that_is_neither_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.txt").touch()
    for look in (inspect, verify):
        with pytest.raises(fp.StorageError, match=r"directory that holds neither a MANIFEST\.json nor step-\* dir"):
            look(tmp_path)


def test_step_that_is_held_by_a_reader_is_read_too(checkpoint: Path) -> None:
    from fastpersist.commit.directory_commit import hold_for_reading

    with hold_for_reading(str(checkpoint)):
        assert verify(checkpoint).ok
        assert inspect(checkpoint).step == 7


# --------------------------------------------------------------------------------------------- replaced meanwhile


def publish(path: Path, value: float, count: int) -> None:
    """Save a checkpoint whose two files have other bytes, and another length, each time."""
    with fp.DirectorySave(path, overwrite=True) as save:
        save.save({"a": torch.full((count,), value)}, "a.pt")
        save.save({"b": torch.full((count,), value)}, "b.safetensors")
        save.publish().result()


class Replacing:
    """Calls a function, and has a checkpoint replaced right before, the first time."""

    def __init__(self, function: Callable[..., Any], replace: Callable[[], None]) -> None:
        self._function = function
        self._replace = replace
        self.count = 0

    def __call__(self, *args: Any, **options: Any) -> Any:
        self.count += 1
        if self.count == 1:
            self._replace()
        return self._function(*args, **options)


@pytest.mark.parametrize("first", ["read_manifest", "_size_problem", "read_extents", "_surplus"])
def test_checkpoint_that_is_replaced_while_it_is_verified_is_whole(
    first: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model"
    publish(path, 1, 5000)
    replacing = Replacing(getattr(directory_inspection, first), lambda: publish(path, 2, 7000))
    monkeypatch.setattr(directory_inspection, first, replacing)
    report = fp.verify(path)
    assert replacing.count
    assert report.damages == ()
    assert report.path == str(path)
    assert fp.load(path / "a.pt")["a"][0] == 2
    assert fp.verify(path).ok
    publish(path, 3, 100)
    assert os.listdir(tmp_path) == ["model"]  # what was replaced while it was read is gone by now


@pytest.mark.parametrize("first", ["read_manifest", "_size_problem", "inspect_source"])
def test_checkpoint_that_is_replaced_while_it_is_inspected_is_one_of_the_two(
    first: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model"
    publish(path, 1, 5000)
    monkeypatch.setattr(
        directory_inspection,
        first,
        Replacing(getattr(directory_inspection, first), lambda: publish(path, 2, 7000)),
    )
    found = fp.inspect(path)
    assert {tensor.shape for tensor in found.tensors} == {(5000,)}
    assert found.path == str(path)


def test_damage_in_a_checkpoint_that_is_replaced_meanwhile_has_the_path_that_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model"
    publish(path, 1, 5000)
    (path / "a.pt").unlink()
    os.mkfifo(path / "a.pt")  # of the old one
    (path / "b.safetensors").unlink()
    (path / "link").symlink_to("nowhere")
    monkeypatch.setattr(
        directory_inspection,
        "_size_problem",
        Replacing(directory_inspection._size_problem, lambda: publish(path, 2, 9)),
    )
    report = fp.verify(path)
    assert [damage.message for damage in report.damages] == [
        "a.pt is no regular file",
        "b.safetensors is missing",
        f"{path}/link is a symbolic link; a checkpoint has files and directories only",
    ]
    monkeypatch.undo()
    (path / MANIFEST_NAME).write_text("{}")
    with pytest.raises(fp.FormatError) as caught:
        fp.inspect(path)
    assert "/proc" not in str(caught.value)
    assert str(path / MANIFEST_NAME) in str(caught.value)


@pytest.mark.parametrize("first", ["read_manifest", "check_files", "open_file", "load_state"])
def test_step_that_is_replaced_while_it_is_loaded_is_loaded_from_one_of_the_two(
    first: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def state(value: float, count: int) -> dict[str, torch.Tensor]:
        return {"a": torch.full((count,), value)}

    with fp.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state(1, 5000), rank_state={"own": 1}).result()
        room = step_loader if first in ("open_file", "load_state") else step_listing
        replacing = Replacing(
            getattr(room, first),
            lambda: checkpointer.save(1, state(2, 7000), rank_state={"own": 2}, overwrite=True).result() and None,
        )
        monkeypatch.setattr(room, first, replacing)
        loaded = fp.Checkpointer(tmp_path).load(1, verify=True)
        assert torch.equal(loaded["a"], state(1, 5000)["a"])
        assert loaded["rank_state"] == {"own": 1}
        again = fp.Checkpointer(tmp_path).load(1, verify=True)
        assert (again["a"].numel(), again["rank_state"]) == (7000, {"own": 2})


def test_step_that_is_replaced_while_steps_are_listed_is_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with fp.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"a": torch.ones(5000)}).result()
        monkeypatch.setattr(
            step_listing,
            "check_files",
            Replacing(
                step_listing.check_files,
                lambda: checkpointer.save(1, {"a": torch.ones(7000)}, overwrite=True).result() and None,
            ),
        )
        assert fp.Checkpointer(tmp_path).latest() == 1
    assert not caplog.records
