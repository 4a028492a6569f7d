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
from fastpersist.cli.bench.overlap import training as training_module
from fastpersist.cli.bench.overlap.further_ways import BareLoopWay
from fastpersist.cli.bench.overlap.report import condense, overlap_text, report_soak
from fastpersist.cli.bench.overlap.run import StepTimes, train_and_save
from fastpersist.cli.bench.overlap.training import SyntheticTraining
from fastpersist.cli.bench.overlap.ways import CheckpointerWay, Options, TorchSaveWay, Unavailable, Way
from fastpersist.cli.bench.overlap.worker import ALL_WAYS, WARM_UP_COUNT, WAYS, Job
from fastpersist.cli.bench.report import machine_facts
from fastpersist.cli.child_process import ChildProcess
from fastpersist.cli.demo.gpt import Sizes

MIB = 1 << 20
NOTHING: dict[str, Any] = {}
NONE, OURS, STOCK = "no checkpoints", "fp.Checkpointer", "torch.save + fsync"
AGAIN, LOOP, PEER = "no checkpoints, again", "O_DIRECT loop", "torch_checkpointing"


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
        f"fastpersist bench overlap {disk} --size-mb 4 --step-ms 20 --steps 3 --repeat 1 --threads 1"
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


def test_further_ways_are_measured_between_several_steps_when_they_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "torch_checkpointing.py").write_text("raise ImportError('is refused by the test')")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))  # children look where we look
    disk = tmp_path / "disk"
    disk.mkdir()
    words = "--size-mb 2 --step-ms 5 --steps 3 --every 2 --repeat 1 --threads 1 --ways".split()
    result = run_overlap(disk, *words, LOOP, PEER, "fp.save_async", "fp.Checkpointer, unpaced")
    rows = {row["name"]: row for row in result["rows"]}
    assert list(rows) == [name for name in ALL_WAYS if name in rows], "in the order of the table"
    assert set(rows) == {NONE, LOOP, PEER, "fp.save_async", "fp.Checkpointer, unpaced"}
    assert "is refused by the test" in rows[PEER].pop("note")
    if rows[LOOP]["note"]:  # a file system without direct I/O
        assert "direct I/O" in rows.pop(LOOP)["note"]
    state_bytes = result["training"]["state_bytes"]
    for name in set(rows) - {NONE, PEER}:
        assert rows[name]["save_count"] == 2, "of four steps"
        assert state_bytes <= rows[name]["checkpoint_bytes"] < 1.2 * state_bytes
        assert 0 < rows[name]["total_of_bound"]
    losses = {run["loss"] for row in rows.values() for run in row.get("runs", ())}
    assert len(losses) == 1, "every way trains the same"
    assert list(disk.iterdir()) == []


def test_turns_of_all_ways_are_steps_of_one_process(tmp_path: Path) -> None:
    words = "--size-mb 2 --step-ms 5 --turns 2 --threads 1 --ways".split()
    result = run_overlap(tmp_path, *words, OURS, LOOP, AGAIN)
    assert f"--ways {OURS} 'O_DIRECT loop' 'no checkpoints, again' --turns 2 --threads 1" in result["command_line"]
    rows = {row["name"]: row for row in result["rows"]}
    if rows[LOOP]["note"]:  # a file system without direct I/O
        rows.pop(LOOP)
    assert {NONE, OURS, AGAIN} <= set(rows)
    for row in rows.values():
        assert [len(run["steps"]) for run in row["runs"]] == [1, 1]
    assert rows[OURS]["runs"][0]["report"], "the Checkpointer's own figures are there"
    assert rows[AGAIN]["stall_s"] < rows[OURS]["step_s"]
    assert list(tmp_path.iterdir()) == []


def test_soak_of_few_saves_passes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = run_overlap(tmp_path, *"--size-mb 2 --soak 30 --growth-mb 64 --threads 1".split())
    assert result["grown"] == []
    assert list(result["soak"]) == [OURS]
    assert "nothing grew" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def answers(of_ours: dict[str, Any] = NOTHING, of_training: dict[str, Any] = NOTHING) -> Any:
    """Return what stands for the processes: canned results of each way, two rounds of two steps."""

    def run(_process: object, job: Job, _scratch: str) -> dict[str, Any]:
        if not job.ways and not of_training:
            seconds = {"write_s": 0.4, "step_s": 0.1, "product_s": 0.01}
            return {"result": {"state_bytes": 10**9, "engine": "uring", "device": "", **seconds}}
        if not job.ways:
            return of_training
        if job.ways == (OURS,) and of_ours:
            return of_ours
        if job.ways not in ((NONE,), (OURS,)):
            return {"unavailable": "not here"}
        jobs.append(job)
        save_s = 0.0 if job.ways == (NONE,) else 0.25
        step = {"step_s": 0.5 + save_s, "gate_s": 0.0, "save_s": save_s}
        return {
            "result": {
                "settings": "as set",
                "steps": [step, step | {"step_s": step["step_s"] + 0.5}],
                "late_count": int(job.ways == (OURS,)),
                "tail_s": 1.0,
                "state_bytes": 10**9,
                "checkpoint_bytes": 10**9,
                "peak_bytes": (10 + 7 * (job.ways == (OURS,))) * MIB,
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

    job = Job("", MIB, "cpu", 1, "auto", ways=(NONE,))
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


def test_a_model_of_its_own_size_is_not_made_smaller_by_a_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench_overlap, "available_host_bytes", lambda: 0)
    assert main(["bench", "overlap", str(tmp_path), "--model", "gpt2-124m"]) == 2
    said = capsys.readouterr().err
    assert "--model gpt2-124m needs some" in said
    assert said.endswith("ask for less: --model layers with --size-mb\n")


def test_help_says_what_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "overlap", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    for words in ("torch.save and fsync", "async_save", "Stall is what", "1.25 times what writing a checkpoint takes"):
        assert words in text


# --- what is made of the results ---


def soak_result(**changes: int) -> dict[str, Any]:
    early = {"resident_bytes": 300 * MIB, "thread_count": 2, "descriptor_count": 5}
    footprints = {"save 100": early, "save 1000": early | changes, "the end": early}
    return {"footprints": footprints, "stall_s": 0.001, "checkpoint_bytes": 1}


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({}, None),
        ({"resident_bytes": 308 * MIB}, None),
        ({"resident_bytes": 308 * MIB + 1}, "memory"),
        ({"thread_count": 3}, "threads"),
        ({"descriptor_count": 6}, "descriptors"),
        ({"descriptor_count": 4}, None),
    ],
)
def test_soak_reports_growth(changes: dict[str, int], word: str | None) -> None:
    text, grown = report_soak(soak_result(**changes), growth_bytes_max=8 * MIB)
    assert len(grown) == (word is not None)
    assert word is None or (word in grown[0] and grown[0] in text)


def test_growth_makes_the_command_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_overlap, "_run_job", lambda *_: {"result": soak_result(thread_count=3)})
    result = run_overlap(tmp_path, *"--size-mb 2 --soak 30".split(), code=1)
    assert "threads grew from 2 to 3" in result["grown"][0]


def run_result(step_s: float, save_s: float, *, every: int, loss: float = 1.0) -> dict[str, Any]:
    """Make the result of 4 windows; in each, the last step has a save."""
    plain = {"step_s": step_s, "gate_s": 0.0, "save_s": 0.0}
    saving = {"step_s": step_s + save_s, "gate_s": 0.0, "save_s": save_s}
    return {
        "settings": "",
        "steps": ([plain] * (every - 1) + [saving]) * 4,
        "late_count": 0,
        "tail_s": 0.5,
        "checkpoint_bytes": 10**9,
        "peak_bytes": MIB,
        "child_peak_bytes": 0,
        "loss": loss,
        "report": [],
    }


@pytest.mark.parametrize(("every", "slowdown"), [(1, 1.5), (5, 1.1)])
def test_slowdown_spreads_a_save_over_the_steps_up_to_the_next(every: int, slowdown: float) -> None:
    rounds = [{NONE: run_result(1.0, 0.0, every=every), "peer": run_result(1.0, 0.5, every=every)}]
    _, peer = condense([NONE, "peer"], rounds, {}, every=every, write_s=0.25)
    assert peer["slowdown"] == pytest.approx(slowdown)
    assert peer["stall_s"] == pytest.approx(0.5)
    assert peer["save_count"] == 4
    total_s = 4 * (every + 0.5) + 0.5
    assert peer["total_of_bound"] == pytest.approx(total_s / (4 * every + 0.5)), "the training is the larger"
    _, peer = condense([NONE, "peer"], rounds, {}, every=every, write_s=100.0)
    assert peer["total_of_bound"] == pytest.approx(total_s / 400), "the writing is"


def test_run_that_trained_something_else_is_named() -> None:
    rounds = [{NONE: run_result(1.0, 0.0, every=1), "peer": run_result(1.0, 0.5, every=1, loss=2.0)}]
    rows = condense([NONE, "peer"], rounds, {}, every=1, write_s=1.0)
    seconds = {"write_s": 1.0, "wanted_step_s": 1.0, "step_s": 1.0}
    lengths = {**seconds, "state_bytes": 1, "engine": "uring", "product_count": 0}
    text = overlap_text("command", machine_facts("/"), lengths, rows, [])
    assert "peer: the last loss is 2.0 instead of 1.0" in text


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


class _Sized:
    """Stands for a training: its state has a length that no chunk divides."""

    optimizer: Any = None

    def state(self, step: int) -> dict[str, Any]:
        return {"weights": torch.zeros(5 * MIB + 4095, dtype=torch.uint8)}


class _SmallChunks(BareLoopWay):
    chunk_bytes = MIB


def bare_loop(root: Path, depth: int) -> BareLoopWay:
    kind = type("Loop", (_SmallChunks,), {"depth": depth})
    try:
        way: BareLoopWay = kind(str(root), _Sized(), Options())
    except Unavailable as reason:
        pytest.skip(str(reason))
    return way


@pytest.mark.parametrize("depth", [1, 3])
def test_bare_loop_writes_every_byte_of_a_file_that_ends_within_a_chunk(depth: int, tmp_path: Path) -> None:
    way = bare_loop(tmp_path, depth)
    way.save(1)
    way.settle()
    written = next(tmp_path.iterdir()).read_bytes()
    chunk = written[:MIB]
    assert written == chunk * 5 + chunk[:4096]
    assert chunk.count(0) < MIB // 2, "blocks that were only allocated read as zeros"
    assert way.newest() == (1, 5 * MIB + 4096)
    way.finish()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("bare-loop")]


def test_bare_loop_that_was_not_started_leaves_nothing(tmp_path: Path) -> None:
    bare_loop(tmp_path, 2).finish()
    assert not list(tmp_path.iterdir())
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("bare-loop")]


def test_gpt2_has_the_parameters_of_gpt2_and_learns(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.device("meta"):
        model = training_module._Gpt2()
    assert sum(parameter.numel() for parameter in model.parameters()) * 12 == training_module.GPT2_STATE_BYTES
    monkeypatch.setattr(training_module, "Sizes", lambda **_: Sizes(width=64, layers=1, heads=2, context=16, batch=1))
    monkeypatch.setattr(training_module._Gpt2, "vocabulary_count", 50)
    training = SyntheticTraining(0, "cpu", model="gpt2-124m", batch_count=2, token_count=8)
    training.step()
    assert 0 < training.last_loss() < 20


def test_vectors_have_ten_thousand_tensors_and_change() -> None:
    training = SyntheticTraining(1 << 20, "cpu", model="vectors")
    before = [parameter.detach().clone() for parameter in training.model.parameters()]
    training.step()
    assert not any(map(torch.equal, before, training.model.parameters()))
    state_of_optimizer = training.optimizer.state.values()
    assert len(training.model.state_dict()) + sum(len(state) for state in state_of_optimizer) == 10_000
