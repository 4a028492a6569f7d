"""`bench overlap`: real trainings beside real saves, a way that is missing or fails is said, and nothing is left."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from support.bench_runs import check_interrupted, children_of

import fastpersist as fp
from fastpersist.cli import main
from fastpersist.cli.bench.overlap import command as bench_overlap
from fastpersist.cli.bench.overlap.run import StepTimes, train_and_save
from fastpersist.cli.bench.overlap.ways import CheckpointerWay, Options, TorchSaveWay, Way
from fastpersist.cli.bench.overlap.worker import WARM_UP_COUNT, WAYS, Job, SyntheticTraining
from fastpersist.cli.child_process import ChildProcess

MIB = 1 << 20
NOTHING: dict[str, Any] = {}
NONE, OURS, STOCK = "no checkpoints", "fp.Checkpointer", "torch.save + fsync"


def run_overlap(directory: Path, *options: str, code: int = 0) -> dict[str, Any]:
    """Run the command in this process and return its JSON."""
    target = directory / "result.json"
    assert main(["bench", "overlap", str(directory), "--json", str(target), *options]) == code
    result: dict[str, Any] = json.loads(target.read_text())
    target.unlink()
    return result


# --- the command ---


def test_every_way_is_measured_a_missing_one_is_said_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(
        "import torch.distributed.checkpoint.state_dict_saver\n"
        "from torch.distributed.checkpoint import staging\n"
        "vars(staging).pop('DefaultStager', None)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"), prepend=":")
    disk = tmp_path / "disk"
    disk.mkdir()
    result = run_overlap(disk, "--size-mb", "4", "--step-ms", "20", "--steps", "3", "--repeat", "1", "--threads", "1")

    assert (result["format"], result["command"]) == (1, "overlap")
    assert result["command_line"] == (
        f"fastpersist bench overlap {disk} --device cpu --size-mb 4 --step-ms 20 --steps 3 --repeat 1 --threads 1 "
        "--engine auto"
    )
    training = result["training"]
    assert training["state_bytes"] == pytest.approx(4 * MIB, rel=0.05)
    assert training["wanted_step_s"] == 0.02
    rows = {row["name"]: row for row in result["rows"]}
    assert list(rows) == list(WAYS)
    assert "DefaultStager" in rows["dcp.async_save, stager kept"]["note"]
    alone_s = rows[NONE]["step_s"]
    assert "stall_s" not in rows[NONE]
    for name in (OURS, STOCK, "dcp.async_save"):
        row = rows[name]
        assert row["note"] == ""
        assert row["step_min_s"] <= row["step_s"] <= row["step_max_s"]
        assert row["slowdown"] == pytest.approx(row["step_s"] / alone_s)
        assert 0 < row["stall_s"] <= row["stall_max_s"] < row["step_max_s"] + 0.001
        assert 0 <= row["late_count"] <= row["save_count"] == 3
        assert training["state_bytes"] <= row["checkpoint_bytes"] < 1.2 * training["state_bytes"]
        assert row["peak_bytes"] is not None
        (run,) = row["runs"]
        assert len(run["steps"]) == 3
    assert rows[STOCK]["late_count"] == 0
    assert list(disk.iterdir()) == []
    text = capsys.readouterr().out
    assert all(name in text for name in rows)


def answers(of_ours: dict[str, Any] = NOTHING, of_training: dict[str, Any] = NOTHING) -> Any:
    """Return what stands for the processes: canned results of each way, two rounds of two steps."""

    def run(_process: object, job: Job, _scratch: str) -> dict[str, Any]:
        if job.way is None and not of_training:
            seconds = {"write_s": 0.4, "step_s": 0.1, "product_s": 0.01}
            return {"result": {"state_bytes": 10**9, "engine": "uring", "device": "", **seconds}}
        if job.way is None:
            return of_training
        if job.way == OURS and of_ours:
            return of_ours
        if job.way not in (NONE, OURS):
            return {"unavailable": "not here"}
        jobs.append(job)
        save_s = 0.0 if job.way == NONE else 0.25
        step = {"step_s": 0.5 + save_s, "gate_s": 0.0, "save_s": save_s}
        return {
            "result": {
                "settings": "as set",
                "steps": [step, step | {"step_s": step["step_s"] + 0.5}],
                "late_count": int(job.way == OURS),
                "tail_s": 1.0,
                "state_bytes": 10**9,
                "checkpoint_bytes": 10**9,
                "peak_bytes": (10 + 7 * (job.way == OURS)) * MIB,
                "child_peak_bytes": 0,
                "report": [],
            }
        }

    jobs: list[Job] = []
    run.jobs = jobs  # type: ignore[attr-defined]
    return run


def test_slowdown_is_against_the_round_and_late_saves_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = answers()
    monkeypatch.setattr(bench_overlap, "_run_job", run)
    result = run_overlap(tmp_path, "--size-mb", "4", "--steps", "2", "--repeat", "2")
    alone, ours, *others = result["rows"]
    assert alone["step_s"] == 0.75
    assert ours["step_s"] == 1.0
    assert ours["slowdowns"] == pytest.approx([4 / 3, 4 / 3])
    assert (ours["stall_s"], ours["late_count"], ours["save_count"], ours["peak_bytes"]) == (0.25, 2, 4, 7 * MIB)
    assert {row["note"] for row in others} == {"not here"}
    # 1.25 times the write, less the training itself, in products
    assert {job.product_count for job in run.jobs} == {40}
    text = capsys.readouterr().out
    assert "2 of 4" in text
    assert "+33.3 %" in text
    assert "stager kept: not here" in text


def test_only_a_failure_of_our_own_makes_the_command_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_overlap, "_run_job", answers({"failed": "StorageError: no room"}))
    result = run_overlap(tmp_path, "--size-mb", "4", "--repeat", "2", code=1)
    assert result["rows"][1]["note"] == "failed: StorageError: no room"
    assert "step_s" not in result["rows"][1]


def test_training_that_cannot_be_saved_at_all_is_an_answer_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench_overlap, "_run_job", answers(of_training={"failed": "StorageError: no room"}))
    assert main(["bench", "overlap", str(tmp_path), "--size-mb", "4"]) == 2
    assert "its first checkpoints: failed: StorageError: no room" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_job_that_fails_or_dies_is_the_ways_failure_and_the_next_one_runs(tmp_path: Path) -> None:
    def kill_what_trains() -> None:
        while not (workers := children_of(process.pid)):
            time.sleep(0.01)
        os.kill(workers[0], signal.SIGKILL)

    job = Job("", MIB, "cpu", 1, "auto", way=NONE)
    with ChildProcess(bench_overlap._PROGRAM, title="the process that trains") as process:
        answer = bench_overlap._run_job(process, dataclasses.replace(job, device="nowhere"), str(tmp_path))
        assert answer["failed"].startswith("RuntimeError: ")
        while children_of(process.pid):  # it has answered, and is about to end
            time.sleep(0.01)
        killer = threading.Thread(target=kill_what_trains)
        killer.start()
        answer = bench_overlap._run_job(process, dataclasses.replace(job, step_count=10**9), str(tmp_path))
        killer.join()
        assert answer["failed"] == "the process that trained died (exit status -9)"
        assert len(bench_overlap._run_job(process, job, str(tmp_path))["result"]["steps"]) == 1
    assert "has ended" in bench_overlap._run_job(process, job, str(tmp_path))["failed"]
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_removes_every_file_and_ends_every_process(tmp_path: Path) -> None:
    words = ["overlap", str(tmp_path), "--size-mb", "4", "--step-ms", "5", "--steps", "1000000"]
    check_interrupted(tmp_path, *words, when=".fastpersist-bench-*/*/step-*", child_count=1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--device", "tpu"], "--device tpu"),
        (["--device", "xpu"], "cpu, cuda or cuda:N"),
        (["--device", "cuda:99"], "no such CUDA device"),
        (["--engine", "warp"], "no engine 'warp'"),
        (["--size-mb", str(10**9)], "ask for less"),
        (["--json", "none/x.json"], "x.json"),
    ],
)
def test_what_cannot_be_measured_here_is_refused_at_once(
    options: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "overlap", str(tmp_path), *options]) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_disk_without_room_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: type("Usage", (), {"free": 15 * MIB}))
    assert main(["bench", "overlap", str(tmp_path), "--size-mb", "4"]) == 2
    assert "smaller --size-mb" in capsys.readouterr().err


def test_help_says_what_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "overlap", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    for words in ("torch.save and fsync", "async_save", "Stall is what", "1.25 times what writing a checkpoint takes"):
        assert words in text


# --- the training, and one run of it ---


@pytest.mark.parametrize("size_mb", [1, 5, 64])
def test_state_has_the_size_that_is_asked_for(size_mb: int) -> None:
    training = SyntheticTraining(size_mb * MIB, "cpu")
    training.step()
    assert training.state_bytes() == pytest.approx(size_mb * MIB, rel=0.05)


def test_every_step_changes_every_parameter() -> None:
    training = SyntheticTraining(2 * MIB, "cpu")
    for _ in range(3):
        before = [parameter.detach().clone() for parameter in training.model.parameters()]
        training.step()
        for old, new in zip(before, training.model.parameters(), strict=True):
            assert not torch.equal(old, new)


def test_gpu_is_waited_for_once_a_step_on_the_stream_that_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stream:
        def synchronize(self) -> None:
            waits.append("stream")

    waits: list[str] = []
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: waits.append("device"))
    training = SyntheticTraining(MIB, "cpu")
    synchronize = training.synchronize

    def on_a_gpu() -> None:
        training._device = torch.device("cuda", 0)
        synchronize()
        training._device = torch.device("cpu")

    monkeypatch.setattr(training, "synchronize", on_a_gpu)
    training.step()
    assert waits == ["stream"]


def test_stall_is_the_gate_and_the_call() -> None:
    training = SyntheticTraining(MIB, "cpu")
    waited = training.step(before_update=lambda: time.sleep(0.05))
    assert 0.05 <= waited.stall_s <= waited.step_s
    assert StepTimes(1.0, 0.25, 0.5).stall_s == 0.75


class _Slow(Way):
    """Is late from the second save that counts on, and writes one file at the end."""

    count = 0

    def is_written(self) -> bool:
        return self.count < WARM_UP_COUNT + 1

    def save(self, step: int) -> None:
        self.count += 1

    def settle(self) -> None:
        Path(self.root, f"step-{self.count:08d}").write_bytes(bytes(2 * MIB))


def test_late_saves_of_the_warm_up_do_not_count(tmp_path: Path) -> None:
    training = SyntheticTraining(MIB, "cpu")
    way = _Slow(str(tmp_path), training, Options())
    result = train_and_save(training, way, every=1, warm_up_count=WARM_UP_COUNT, step_count=4)
    assert result["late_count"] == 3
    assert len(result["steps"]) == 4
    assert result["checkpoint_bytes"] == 2 * MIB


def test_way_that_wrote_nothing_is_found_out(tmp_path: Path) -> None:
    training = SyntheticTraining(MIB, "cpu")
    with pytest.raises(fp.StorageError, match="newest checkpoint is of step -1"):
        train_and_save(training, _Idle(str(tmp_path), training, Options()), every=1, warm_up_count=1, step_count=1)


class _Idle(Way):
    """Only says that it saves."""


@pytest.mark.parametrize("kind", [CheckpointerWay, TorchSaveWay])
def test_what_is_written_is_the_state(kind: type[Way], tmp_path: Path) -> None:
    training = SyntheticTraining(MIB, "cpu")
    way = kind(str(tmp_path), training, Options())
    for step in range(4):
        training.step(before_update=way.before_update, update_guard=way.update_guard)
        way.save(step)
    way.finish()
    path = tmp_path / "step-00000003.pt"
    saved = fp.load(path if path.exists() else tmp_path / "step-00000003" / "state.pt")
    for name, tensor in training.model.state_dict().items():
        assert torch.equal(saved["model"][name], tensor)  # type: ignore[index]
    assert way.is_written()
