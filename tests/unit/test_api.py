"""save and load from outside: paths of every kind, reports, progress, engines, threads, and memory that is bounded."""

from __future__ import annotations

import os
import re
import threading
from pathlib import Path

import pytest
import torch
from support import leaks
from support.sameness import assert_same

import fastpersist as fp

nothing_is_left_behind = leaks.nothing_is_left_behind


STATE = {"weight": torch.arange(1000.0), "step": 3}


def usable_engines(directory: Path) -> list[str]:
    return [probe.name for probe in fp.engines(directory) if probe.usable]


# --------------------------------------------------------------------------------------------- paths


def test_path_may_be_text_or_path_like(tmp_path: Path) -> None:
    for path in (str(tmp_path / "text.pt"), tmp_path / "pathlib.pt"):
        fp.save(STATE, path)
        assert_same(fp.load(path), STATE)
        assert fp.verify(path).ok
        assert fp.inspect(path).tensors[0].name == "weight"
        target = {"weight": torch.zeros(1000)}
        fp.load_into(path, target)
        assert_same(target["weight"], STATE["weight"])


def test_relative_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "below").mkdir()
    for path in ("model.pt", "./model2.pt", "below/../model3.pt", "below/model.pt"):
        fp.save(STATE, path)
        assert_same(fp.load(path), STATE)
    assert sorted(os.listdir(tmp_path)) == ["below", "model.pt", "model2.pt", "model3.pt"]


def test_missing_file_is_a_file_not_found_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as raised:
        fp.load(tmp_path / "nothing.pt")
    assert isinstance(raised.value, fp.CheckpointNotFoundError)
    assert "nothing.pt" in str(raised.value)


def test_missing_directory_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="nowhere") as raised:
        fp.save(STATE, tmp_path / "nowhere" / "model.pt")
    assert isinstance(raised.value, fp.StorageError)


def test_saving_twice_replaces_the_file(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    fp.save({"old": torch.ones(100_000)}, path)
    fp.save(STATE, path)
    assert_same(fp.load(path), STATE)
    assert os.listdir(tmp_path) == ["model.pt"]


def test_loaded_state_survives_the_file_it_came_from(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    fp.save(STATE, path)
    mapped, loaded = torch.load(path, mmap=True), fp.load(path)
    fp.save({"weight": torch.zeros(1000)}, path)
    path.unlink()
    assert_same(loaded, STATE)
    assert torch.equal(mapped["weight"], STATE["weight"])


# --------------------------------------------------------------------------------------------- options


@pytest.mark.parametrize("durable", [True, False])
def test_report_says_what_was_done(durable: bool, tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    report = fp.save(STATE, path, durable=durable)
    assert report.path == str(path)
    assert report.size_bytes == path.stat().st_size
    assert report.engine in usable_engines(tmp_path)
    assert (report.sync_s > 0) == durable
    parts = (report.plan_s, report.write_s, report.sync_s)
    assert all(part >= 0 for part in parts)
    assert sum(parts) <= report.total_s + 0.001


def test_every_usable_engine_saves_and_loads(tmp_path: Path) -> None:
    state = {"big": torch.arange(1_300_000), "odd": torch.arange(7, dtype=torch.uint8)}
    names = usable_engines(tmp_path)
    assert names
    for name in names:
        path = tmp_path / name / "model.pt"
        path.parent.mkdir()
        assert fp.save(state, path, engine=name, durable=False).engine == name
        assert_same(fp.load(path, engine=name, verify=True), state)
        assert fp.verify(path, engine=name).ok
        target = {"big": torch.zeros(1_300_000, dtype=torch.int64), "odd": torch.zeros(7)}
        fp.load_into(path, target, engine=name, verify=True)
        assert torch.equal(target["big"], state["big"])
    assert len({(tmp_path / name / "model.pt").read_bytes() for name in names}) == 1


def test_unknown_engine_is_refused(tmp_path: Path) -> None:
    with pytest.raises(fp.ConfigError, match="warp"):
        fp.save(STATE, tmp_path / "model.pt", engine="warp")
    assert os.listdir(tmp_path) == []
    fp.save(STATE, tmp_path / "model.pt")
    for call in (fp.load, fp.verify):
        with pytest.raises(fp.ConfigError, match="warp"):
            call(tmp_path / "model.pt", engine="warp")


@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
def test_progress_counts_every_byte(suffix: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / f"model.{suffix}"
    for call in (
        lambda: fp.save({"t": torch.ones(3_000_000)}, path, progress=True),
        lambda: fp.load(path, progress=True),
        lambda: fp.load_into(path, {"t": torch.zeros(3_000_000)}, progress=True),
        lambda: fp.verify(path, progress=True),
    ):
        call()
        shown = capfd.readouterr().err
        assert f"model.{suffix}" in shown
        assert "100%" in shown
        assert re.search(r"12\.0M/12\.0M", shown)
    fp.load(path)
    assert capfd.readouterr().err == ""


def test_progress_leaves_no_thread(tmp_path: Path) -> None:
    before = threading.enumerate()  # frameworks show bars of their own
    fp.save(STATE, tmp_path / "model.pt", progress=True)
    fp.load(tmp_path / "model.pt", progress=True)
    assert [thread for thread in threading.enumerate() if thread not in before] == []


def test_threads_save_to_one_path_and_the_last_one_stays(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    failures: list[BaseException] = []

    def work(value: int) -> None:
        try:
            for _ in range(5):
                fp.save({"t": torch.full((100_000,), value)}, path, durable=False)
                assert len(fp.load(path, verify=True)["t"].unique()) == 1
        except BaseException as error:  # noqa: BLE001 - handed to the test's own thread
            failures.append(error)

    threads = [threading.Thread(target=work, args=(value,)) for value in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert os.listdir(tmp_path) == ["model.pt"]


# --------------------------------------------------------------------------------------------- memory
