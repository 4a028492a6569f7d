"""`fastpersist tune` cleans up, whatever ends it; and what it writes is read by the next save.

It runs with tiny files for a second or two, so what it finds says nothing here: how it decides is tested in
test_tune_search.py, and what each value does in tests/unit/test_config_tuning.py.
"""

from __future__ import annotations

import errno
import itertools
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.forking import in_child
from support.sandbox import small_filesystem

import fastpersist as fp
from fastpersist import _native
from fastpersist.cli import main
from fastpersist.cli.report.disk_rate import tuned_rate
from fastpersist.cli.tune import command as tune
from fastpersist.cli.tune import search
from fastpersist.cli.tune.file import tuning_text, write_tuning
from fastpersist.cli.tune.search import DEFAULTS, Choice, choices_for
from fastpersist.cli.tune.worker import Foreman
from fastpersist.config import TUNING_KEYS, config_at, config_for, read_tuning, tuning_path
from fastpersist.errors import NoSpaceError, StorageError, UnsupportedError

MIB = 1 << 20
PATIENCE_S = 60.0


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in os.environ if name.startswith("FASTPERSIST_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home"))


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    """A directory to be tuned for."""
    path = tmp_path / "disk"
    path.mkdir()
    return path


def place_of(directory: Path) -> Path:
    """Where the library looks for the tuning file of a directory."""
    fd = os.open(directory, os.O_PATH)
    path = tuning_path(fd)
    os.close(fd)
    assert path is not None
    return Path(path)


# --- the file


FACTS = {
    "directory": "/data\nqueue_depth = 7",
    "date": "2026-01-01",
    "file_system": "ext4",
    "device": "/dev/x",
    "device_model": "",
    "cpu_model": "a",
    "cpu_count": 2,
    "kernel": "6",
    "architecture": "b",
    "fastpersist": "0",
    "torch": "2",
}


def test_choice_has_every_key_that_a_tuning_file_has() -> None:
    assert {*Choice._fields, "writers"} == set(TUNING_KEYS)


def test_what_a_choice_says_is_what_the_library_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file.toml"
    engines = [name for name in _native.engine_names() if name not in ("null", "cufile")]  # no tuning file takes these
    choices = choices_for(engines, "uring", ring_limit_bytes=256 * MIB)
    for choice in [Choice("threads", 4 * MIB, 6, 128 * MIB, 4), *choices[:60:3]]:
        write_tuning(str(path), tuning_text(choice.settings(), FACTS, []), choice.settings(), make_parents=False)
        assert read_tuning(str(path)) == choice.settings()
        monkeypatch.setenv("FASTPERSIST_CONFIG", str(path))
        by_file = config_at(str(path))
        with pytest.MonkeyPatch.context() as patch:
            for name, value in choice.environment().items():
                patch.setenv(name, value)
            by_environment = config_at(str(path))
        engine = by_file.engine_wish or by_file.engine
        assert engine == by_environment.engine == choice.engine
        for key in Choice._fields[1:]:
            assert getattr(by_file, key) == getattr(by_environment, key) == getattr(choice, key)
    assert os.listdir(tmp_path) == ["file.toml"]


def test_file_is_replaced_whole_or_stays_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file.toml"
    path.write_text("queue_depth = 2")

    def fail(*_arguments: object) -> None:
        raise OSError(5, "Input/output error")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "rename", fail)
        with pytest.raises(StorageError):
            write_tuning(str(path), "queue_depth = 3", {"queue_depth": 3}, make_parents=False)
    with pytest.raises(fp.InternalError):
        write_tuning(str(path), "queue_depth = 3", {"queue_depth": 4}, make_parents=False)
    assert os.listdir(tmp_path) == ["file.toml"]
    assert path.read_text() == "queue_depth = 2"


# --- the foreman


@pytest.fixture
def foreman(tmp_path: Path) -> Iterator[Foreman]:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    with Foreman(str(scratch)) as found:
        yield found


def test_savers_save_as_they_are_told(foreman: Foreman, tmp_path: Path) -> None:
    foreman.fill(3 * MIB + 100)
    ring = (DEFAULTS.ring_bytes, DEFAULTS.chunk_bytes)
    seconds, engine = foreman.save(Choice("threads-buffered", threads=2).environment(), ring)
    assert (seconds > 0, engine) == (True, "threads-buffered")
    assert foreman.save(DEFAULTS.environment(), ring)[1] == fp.save([torch.ones(9)], tmp_path / "a.pt").engine
    with pytest.raises(UnsupportedError, match="there is no engine 'warp'"):
        foreman.save(Choice("warp").environment(), ring)
    with pytest.raises(UnsupportedError, match="FASTPERSIST_CHUNK_BYTES"):
        foreman.save({"FASTPERSIST_CHUNK_BYTES": "7"}, ring)
    small = Choice(chunk_bytes=MIB, ring_bytes=32 * MIB)
    assert foreman.save(small.environment(), (32 * MIB, MIB))[0] > 0
    foreman.keep({ring})
    assert foreman.load(DEFAULTS.environment(), ring) > 0
    assert len(os.listdir(tmp_path / "scratch")) == 1
    with pytest.raises(UnsupportedError, match="warp"):
        foreman.load(Choice("warp").environment(), ring)
    for count in (1, 2, 3):
        assert foreman.share(DEFAULTS.environment(), ring, count) > 0
    with pytest.raises(UnsupportedError, match="warp"):
        foreman.share(Choice("warp").environment(), ring, 2)
    assert foreman.share(small.environment(), (32 * MIB, MIB), 2) > 0
    assert os.listdir(tmp_path / "scratch") == []


def test_parts_of_a_shared_file_are_the_whole_file(tmp_path: Path) -> None:
    """What is measured is what has to be done: every byte, once."""
    from fastpersist.cli.tune import worker

    data = torch.randint(0, 255, (5 * MIB,), dtype=torch.uint8)
    path = tmp_path / "file"
    path.write_bytes(bytes(5 * MIB))
    cuts = [0, 4096, 2 * MIB, 2 * MIB, 5 * MIB]
    for low, high in itertools.pairwise(cuts):
        worker._write_part(data, str(path), low, high)
    assert path.read_bytes() == data.numpy().tobytes()


def test_saver_that_dies_is_told_and_another_takes_its_place(foreman: Foreman) -> None:
    ring = (DEFAULTS.ring_bytes, DEFAULTS.chunk_bytes)
    foreman.fill(MIB)
    foreman.save(DEFAULTS.environment(), ring)
    (saver,) = children_of(foreman._process.pid)
    os.kill(saver, signal.SIGKILL)
    wait_until(lambda: state_of(saver) in "ZX")
    assert foreman.save(DEFAULTS.environment(), ring)[0] > 0


def test_nobody_is_left_when_the_foreman_is_killed(foreman: Foreman) -> None:
    foreman.fill(MIB)
    foreman.share(DEFAULTS.environment(), (DEFAULTS.ring_bytes, DEFAULTS.chunk_bytes), 3)
    savers = children_of(foreman._process.pid)
    assert len(savers) == 3
    os.kill(foreman._process.pid, signal.SIGKILL)
    with pytest.raises(fp.FastPersistError, match="has ended"):
        foreman.fill(MIB)
    wait_until(lambda: all(state_of(saver) in "ZX" for saver in savers))


def children_of(pid: int) -> list[int]:
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return [int(word) for word in file.read().split()]


def state_of(pid: int) -> str:
    """Return the letter that the kernel gives a process; X when there is none."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return "X"


def wait_until(is_so: Callable[[], bool]) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < end_s
        time.sleep(0.01)


# --- the command


def run_tune(directory: Path, *words: str) -> int:
    return main(["tune", str(directory), "--seconds", "1", "--size-mb", "1", *words])


def test_file_is_written_where_the_library_finds_it(disk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_tune(disk, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["written"] is True
    assert Path(found["file"]) == place_of(disk)
    assert read_tuning(found["file"]) == found["settings"]
    text = Path(found["file"]).read_text()
    assert "Measured: " in text
    fastest_s = min(statistics.median(one["seconds"]) for one in found["rounds"][-1])
    assert tuned_rate(str(disk)) == pytest.approx(MIB / fastest_s, abs=0.006e9)
    assert found["facts"]["kernel"] in text
    assert found["rounds"][0][0]["settings"] == {}
    assert found["run_count"] >= 12
    assert found["size_bytes"] == MIB
    engine = found["settings"].get("engine", found["default_engine"])
    assert engine == fp.save([torch.ones(9)], disk / "a.pt").engine
    assert os.listdir(disk) == ["a.pt"]


def test_dry_run_measures_and_writes_nothing(disk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_tune(disk, "--dry-run") == 0
    out = capsys.readouterr().out
    assert "not written" in out
    assert "# Measured: " in out
    assert list(disk.iterdir()) == []
    assert not (disk.parent / "home").exists()


def all_faster(settings: dict[str, Any]) -> Callable[..., Any]:
    """Return a search whose result is known."""
    choice = Choice(**{key: value for key, value in settings.items() if key in Choice._fields})
    return lambda race, *_arguments: (choice, [race.round([DEFAULTS, choice], 1, math.inf)])


class FasterForeman(Foreman):
    """Whatever is not as by default is twice as fast, and fewer writers are, too."""

    def save(self, environment: dict[str, str], ring: Any) -> tuple[float, str]:
        _, engine = super().save(environment, ring)
        return (1.0 if environment == DEFAULTS.environment() else 0.5), engine

    def load(self, environment: dict[str, str], ring: Any) -> float:
        assert super().load(environment, ring) > 0
        return 1.0

    def share(self, environment: dict[str, str], ring: Any, count: int) -> float:
        return 0.5 if count == 2 else 1.0


EVERYTHING = {
    "engine": "threads-buffered",
    "chunk_bytes": MIB,
    "queue_depth": 8,
    "ring_bytes": 32 * MIB,
    "threads": 2,
    "writers": 2,
}


IN_NO_HURRY = ("--seconds", "3600")
"""What is compared then does not depend on the machine; it ends by the number of runs."""


@pytest.fixture
def faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every value that there is makes a difference here."""
    monkeypatch.setattr("fastpersist.cli.tune.worker.Foreman", FasterForeman)
    monkeypatch.setattr(search, "search", all_faster(EVERYTHING))
    monkeypatch.setattr(search, "simplify", lambda race, choice, *_arguments: choice)


@in_child({})
def test_everything_it_prints_is_read_by_the_next_save(
    disk: Path, faster: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert set(EVERYTHING) == set(TUNING_KEYS)
    assert run_tune(disk, *IN_NO_HURRY) == 0
    out = capsys.readouterr().out
    assert "is 2.00 times as fast as the defaults" in out
    assert "Loading from the disk with it is 1.00 times as fast" in out
    assert "writers 2 is 2.00 times as fast as 8 of them" in out
    assert read_tuning(str(place_of(disk))) == EVERYTHING
    seen: list[dict[str, Any]] = []
    real = _native.TransferOptions
    monkeypatch.setattr(_native, "TransferOptions", lambda **given: seen.append(given) or real(**given))
    report = fp.save({"a": torch.arange(99)}, disk / "model.pt")
    assert report.engine == seen[0]["engines"][0] == "threads-buffered"
    assert {key: seen[0][key] for key in ("chunk_bytes", "queue_depth", "ring_bytes")} == {
        key: EVERYTHING[key] for key in ("chunk_bytes", "queue_depth", "ring_bytes")
    }
    assert seen[0]["thread_count"] == 2
    assert _native.ring_buffer_count() == 32
    assert config_at(str(disk / "x")).writers == 2  # what ranks make of it: tests/unit/test_config_tuning.py


def test_what_makes_loading_slower_is_not_kept(
    disk: Path, faster: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    loads = []

    def load(_foreman: Foreman, environment: dict[str, str], _ring: Any) -> float:
        loads.append(environment)
        return 1.0 if environment == DEFAULTS.environment() else 1.1

    monkeypatch.setattr(FasterForeman, "load", load)
    assert run_tune(disk, "--json", *IN_NO_HURRY) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["comparison"]["is_kept"]
    assert found["loading"]["gain"] == pytest.approx(1 / 1.1)
    assert found["settings"] == read_tuning(found["file"]) == {"writers": 2}
    assert "so the defaults stay after all" in Path(found["file"]).read_text()
    assert not any("FASTPERSIST_ENGINE" in environment for environment in loads)  # a save's page cache is no load's


def test_defaults_that_are_best_replace_an_older_file(
    disk: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    place = place_of(disk)
    place.parent.mkdir(parents=True)
    place.write_text("queue_depth = 3")
    monkeypatch.setattr(search, "search", lambda race, *_arguments: (DEFAULTS, []))
    monkeypatch.setattr(tune, "_compare_writers", lambda *_arguments: None)
    assert run_tune(disk) == 0
    assert read_tuning(str(place)) == {}
    assert "says that the defaults are best" in capsys.readouterr().out


def test_output_is_for_a_named_file(disk: Path, capsys: pytest.CaptureFixture[str], faster: None) -> None:
    output = disk.parent / "mine.toml"
    assert run_tune(disk, "--output", str(output), *IN_NO_HURRY) == 0
    assert f"FASTPERSIST_CONFIG={output}" in capsys.readouterr().out
    assert read_tuning(str(output)) == EVERYTHING
    assert not place_of(disk).exists()
    os.environ["FASTPERSIST_CONFIG"] = str(output)
    fd = os.open("/", os.O_PATH)
    try:
        assert config_for(fd).queue_depth == 8
    finally:
        os.close(fd)
        del os.environ["FASTPERSIST_CONFIG"]


def test_environment_that_stands_in_the_way_is_told_and_does_not_disturb(
    disk: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FASTPERSIST_CONFIG", "")
    monkeypatch.setenv("FASTPERSIST_ENGINE", "threads-buffered")
    monkeypatch.setenv("FASTPERSIST_RING_BYTES", "plenty")
    assert run_tune(disk, "--json", "--dry-run") == 0
    found = json.loads(capsys.readouterr().out)
    assert "FASTPERSIST_CONFIG" in found["notes"][0]
    assert "FASTPERSIST_ENGINE, FASTPERSIST_RING_BYTES set" in found["notes"][1]
    assert found["failed"] == []


def test_full_disk_is_refused_before_anything_is_written(disk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", str(disk), "--size-mb", str(1 << 30)]) == 2
    assert "and this needs" in capsys.readouterr().err
    assert list(disk.iterdir()) == []


def test_little_memory_is_not_used_up(
    disk: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tune, "available_host_bytes", lambda: 0)
    assert main(["tune", str(disk), "--seconds", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["size_bytes"] == MIB


def test_disk_that_fills_up_meanwhile_ends_it(
    disk: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def require_space(directory: str, size_bytes: int, *, instead: str) -> None:
        calls.append(size_bytes)
        if len(calls) == 6:
            raise NoSpaceError(28, "full")

    monkeypatch.setattr(tune, "require_space", require_space)
    assert run_tune(disk) == 2
    assert "full" in capsys.readouterr().err
    assert list(disk.iterdir()) == []
    assert not place_of(disk).exists()


@pytest.mark.parametrize(
    "words", [["nowhere"], [".", "--output", "."], [".", "--output", "nowhere/file.toml"]], ids=str
)
def test_places_that_are_not_there_are_told_before_anything_is_measured(
    words: list[str], disk: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(disk)
    monkeypatch.setattr(tune, "_tune", None)
    assert main(["tune", *words]) == 2
    assert "fastpersist: error: " in capsys.readouterr().err


@pytest.mark.parametrize("place", ["home", "output"])
def test_places_that_cannot_be_written_are_told_before_anything_is_measured(
    place: str, disk: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(*arguments: object) -> None:
        raise StorageError(errno.EIO, "this goes on to measure")

    monkeypatch.setattr(tune, "_tune", measure)
    words = ["--output", str(tmp_path / "mounted-tmpfs" / "mine.toml")] if place == "output" else []
    with small_filesystem("tmpfs", tmp_path, size_mib=1) as root:
        if place == "home":
            monkeypatch.setenv("XDG_CONFIG_HOME", str(root / "not" / "there"))
        assert run_tune(disk, *words) == 2
        assert "goes on to measure" in capsys.readouterr().err
        subprocess.run(["mount", "-o", "remount,ro", str(root)], check=True)
        assert run_tune(disk, *words) == 2
        told = capsys.readouterr().err
        assert f"{root}/" in told
        assert "cannot be written" in told
        assert "--output FILE" in told
        assert run_tune(disk, *words, "--dry-run") == 2
        assert "goes on to measure" in capsys.readouterr().err
    monkeypatch.setenv("XDG_CONFIG_HOME", os.devnull)
    assert run_tune(disk) == 2
    assert "--output FILE" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--seconds", "0"], ["--seconds", "inf"], ["--size-mb", "0"], ["--seconds", "nan"]])
def test_nonsense_is_usage(words: list[str], disk: Path) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["tune", str(disk), *words])
    assert ended.value.code == 2


def test_it_runs_beside_the_main_thread_too(disk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    codes: list[int] = []
    thread = threading.Thread(target=lambda: codes.append(run_tune(disk, "--dry-run")))
    thread.start()
    thread.join()
    assert codes == [0]
    assert list(disk.iterdir()) == []


@pytest.mark.parametrize(
    ("number", "status"),
    [(signal.SIGINT, 130), (signal.SIGHUP, 129), (signal.SIGKILL, -9)],
    ids=["ctrl-c", "hangup", "kill"],
)
def test_nothing_is_left_when_it_is_stopped(number: signal.Signals, status: int, disk: Path) -> None:
    check_stopped([], [number], status, disk)


def test_under_nohup_it_outlives_the_terminal(disk: Path) -> None:
    check_stopped(["nohup"], [signal.SIGHUP, signal.SIGTERM], 143, disk)


def check_stopped(prefix: list[str], numbers: list[signal.Signals], status: int, disk: Path) -> None:
    """Send signals to a run, look at its exit status, and at what it leaves."""
    command = subprocess.Popen(
        [*prefix, sys.executable, "-m", "fastpersist", "tune", str(disk), "--size-mb", "1"],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert command.stdout is not None
    with command, command.stdout:
        while "choices" not in (line := command.stdout.readline()):
            assert line, "it has ended by itself"
        processes = children_of(command.pid)
        processes += [saver for child in processes for saver in children_of(child)]
        assert len(processes) >= 2
        assert [path.name.startswith(".fastpersist-tune-") for path in disk.iterdir()] == [True]
        for number in numbers:
            command.send_signal(number)
        assert command.wait(PATIENCE_S) == status
    wait_until(lambda: all(state_of(pid) in "ZX" for pid in processes))
    wait_until(lambda: not list(disk.iterdir()))
    assert not place_of(disk).exists()
