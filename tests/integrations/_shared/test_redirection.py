"""What is saved below a directory with stock functions goes into a DirectorySave; all else goes where it did."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import safetensors.torch
import torch
from safetensors import safe_open
from support.runs import held_writers

import fastpersist as fp
from fastpersist.integrations._shared.redirection import saves_into

TENSORS = {"a": torch.arange(10.0), "b": torch.ones(3, 4, dtype=torch.bfloat16)}


def is_ours(path: Path) -> bool:
    """Tell our zip files by the alignment of their storages."""
    return fp.inspect(path).tensors[0].offset_bytes % 4096 == 0


def is_written(path: Path) -> bool:
    return path.exists() and path.stat().st_size > 0


def test_torch_save_and_save_file_go_into_the_directory_with_what_others_put_there(tmp_path: Path) -> None:
    with fp.DirectorySave(tmp_path / "checkpoint") as files:
        root = Path(files.path)
        with saves_into(files):
            torch.save(TENSORS, root / "state.bin")
            torch.save(7, str(root / "number"))
            (root / "below").mkdir()
            torch.save(TENSORS, root / "below" / "state.pt")
            safetensors.torch.save_file(TENSORS, str(root / "model.safetensors"), metadata={"format": "pt"})
            safetensors.torch.save_file(TENSORS, root / "below" / "part")
            (root / "config.json").write_text("{}")
        files.publish().result()
    final = tmp_path / "checkpoint"
    assert fp.verify(final).ok
    names = {str(path.relative_to(final)) for path in final.rglob("*") if path.is_file()}
    expected = {"state.bin", "number", "below/state.pt", "model.safetensors", "below/part", "config.json"}
    assert names == {*expected, "MANIFEST.json"}
    assert is_ours(final / "state.bin")
    assert is_ours(final / "below" / "state.pt")
    assert torch.equal(torch.load(final / "state.bin")["b"], TENSORS["b"])
    assert torch.load(final / "number") == 7
    for name in ("model.safetensors", "below/part"):
        with safe_open(final / name, framework="pt") as file:
            assert torch.equal(file.get_tensor("a"), TENSORS["a"])
            assert (file.metadata() or {}).get("format") == ("pt" if name == "model.safetensors" else None)


def test_files_of_the_directory_are_not_written_by_the_stock_functions(tmp_path: Path) -> None:
    with held_writers() as writers, fp.DirectorySave(tmp_path / "checkpoint") as files:
        with saves_into(files):
            torch.save(TENSORS, f"{files.path}/state.pt")
            safetensors.torch.save_file(TENSORS, f"{files.path}/model.safetensors")
        assert not is_written(Path(files.path, "model.safetensors"))
        writers.release()
        files.publish().result()


def test_what_lies_elsewhere_is_saved_as_ever(tmp_path: Path) -> None:
    with fp.DirectorySave(tmp_path / "checkpoint") as files, saves_into(files):
        for name in ("state.pt", Path(files.path).name + "-other.pt"):
            torch.save(TENSORS, tmp_path / name)
            assert torch.equal(torch.load(tmp_path / name)["a"], TENSORS["a"])
        safetensors.torch.save_file(TENSORS, tmp_path / "model.safetensors")
        assert set(safetensors.torch.load_file(tmp_path / "model.safetensors")) == {"a", "b"}
        safetensors.torch.save_file(filename=tmp_path / "named.safetensors", tensors=TENSORS)
        assert (tmp_path / "named.safetensors").is_file()
    assert not (tmp_path / "checkpoint").exists()


def test_paths_through_links_and_detours_are_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with fp.DirectorySave(tmp_path / "checkpoint") as files:
        (tmp_path / "link").symlink_to(files.path)
        monkeypatch.chdir(tmp_path)
        with saves_into(files):
            torch.save(1, tmp_path / "link" / "first.pt")
            torch.save(2, f"{Path(files.path).name}/../{Path(files.path).name}/second.pt")
            torch.save(TENSORS, f"{files.path}/..third.pt")
        (tmp_path / "link").unlink()
        files.publish().result()
    found = {path.name for path in (tmp_path / "checkpoint").iterdir()}
    assert found == {"first.pt", "second.pt", "..third.pt", "MANIFEST.json"}
    assert is_ours(tmp_path / "checkpoint" / "..third.pt")


def test_other_threads_save_as_ever(tmp_path: Path) -> None:
    with fp.DirectorySave(tmp_path / "checkpoint") as files:

        def save() -> None:
            torch.save(TENSORS, f"{files.path}/theirs.pt")
            safetensors.torch.save_file(TENSORS, f"{files.path}/theirs.safetensors")

        with held_writers(), saves_into(files):
            thread = threading.Thread(target=save)
            thread.start()
            thread.join()
        assert Path(files.path, "theirs.pt").is_file()  # already: no writer was let go
        assert Path(files.path, "theirs.safetensors").is_file()
        files.publish().result()
    assert fp.verify(tmp_path / "checkpoint").ok


def test_two_threads_save_into_their_own_directories(tmp_path: Path) -> None:
    barrier = threading.Barrier(2)

    def save(number: int) -> None:
        with fp.DirectorySave(tmp_path / str(number)) as files:
            with saves_into(files):
                barrier.wait(30)
                torch.save(number, f"{files.path}/state.pt")
                safetensors.torch.save_file({"a": torch.full((3,), number)}, f"{files.path}/model.safetensors")
                barrier.wait(30)
            files.publish().result()

    threads = [threading.Thread(target=save, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number in range(2):
        assert torch.load(tmp_path / str(number) / "state.pt") == number
        assert safetensors.torch.load_file(tmp_path / str(number) / "model.safetensors")["a"].tolist() == [number] * 3


def test_blocks_nest(tmp_path: Path) -> None:
    with fp.DirectorySave(tmp_path / "outer") as outer, fp.DirectorySave(tmp_path / "inner") as inner:
        with saves_into(outer):
            with saves_into(inner):
                torch.save(1, f"{outer.path}/a.pt")
                torch.save(2, f"{inner.path}/a.pt")
            torch.save(3, f"{outer.path}/b.pt")
            torch.save(4, f"{inner.path}/stock.pt")
        outer.publish().result()
        inner.publish().result()
    assert torch.load(tmp_path / "outer" / "a.pt") == 1
    assert torch.load(tmp_path / "inner" / "a.pt") == 2
    assert torch.load(tmp_path / "outer" / "b.pt") == 3
    assert torch.load(tmp_path / "inner" / "stock.pt") == 4


def test_functions_are_put_back_also_after_an_exception(tmp_path: Path) -> None:
    before = torch.save, torch.serialization.save, safetensors.torch.save_file
    with fp.DirectorySave(tmp_path / "checkpoint") as files, pytest.raises(KeyError), saves_into(files):
        assert torch.save is not before[0]
        raise KeyError
    assert (torch.save, torch.serialization.save, safetensors.torch.save_file) == before


def test_names_that_packages_have_for_save_file_are_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package: Any = ModuleType("peft.peft_model")
    package.safe_save_file = safetensors.torch.save_file
    monkeypatch.setitem(sys.modules, "peft.peft_model", package)
    with held_writers() as writers, fp.DirectorySave(tmp_path / "checkpoint") as files:
        with saves_into(files):
            package.safe_save_file(TENSORS, f"{files.path}/adapter.safetensors", metadata={"format": "pt"})
        assert not is_written(Path(files.path, "adapter.safetensors"))
        assert package.safe_save_file is safetensors.torch.save_file
        writers.release()
        files.publish().result()
    assert set(safetensors.torch.load_file(tmp_path / "checkpoint" / "adapter.safetensors")) == {"a", "b"}


def test_a_file_that_is_saved_twice_is_refused(tmp_path: Path) -> None:
    with fp.DirectorySave(tmp_path / "checkpoint") as files, saves_into(files):
        torch.save(1, f"{files.path}/state.pt")
        with pytest.raises(fp.ConfigError, match=r"state\.pt"):
            torch.save(2, f"{files.path}/state.pt")


def test_what_is_no_usual_torch_save_is_written_by_torch_and_published(tmp_path: Path) -> None:
    with fp.DirectorySave(tmp_path / "checkpoint") as files:
        with saves_into(files):
            torch.save(TENSORS, f"{files.path}/old.pt", _use_new_zipfile_serialization=False)
            with open(f"{files.path}/file.pt", "wb") as file:
                torch.save(TENSORS, file)
        files.publish().result()
    assert fp.verify(tmp_path / "checkpoint").ok
    for name in ("old.pt", "file.pt"):
        assert torch.equal(torch.load(tmp_path / "checkpoint" / name)["a"], TENSORS["a"])


def test_tensors_of_the_optimizer_are_written_from_where_they_are(tmp_path: Path) -> None:
    parameter = torch.nn.Parameter(torch.zeros(300_000))
    frozen = torch.full((200_000,), 3.0)
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    with held_writers() as writers, fp.DirectorySave(tmp_path / "checkpoint") as files:
        with saves_into(files, optimizer=optimizer, constant=[frozen]):
            safetensors.torch.save_file({"weight": parameter, "frozen": frozen}, f"{files.path}/model.safetensors")
        pending = files.publish()
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()  # the gate copies what is not written yet
        writers.release()
        pending.result()
    saved = safetensors.torch.load_file(tmp_path / "checkpoint" / "model.safetensors")
    assert torch.equal(saved["weight"], torch.zeros(300_000))
    assert torch.equal(saved["frozen"], frozen)
    assert pending.stats.bytes_before_return == 0
    assert pending.stats.bytes_at_gate >= parameter.nbytes
