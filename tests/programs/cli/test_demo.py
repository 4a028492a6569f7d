"""`fastpersist demo`: the whole story in its quick version, and that it says FAIL when a claim does not hold."""

from __future__ import annotations

import argparse
import fcntl
import io
import json
import os
import pty
import struct
import subprocess
import sys
import termios
from pathlib import Path
from typing import Any

import pytest
import torch

import fastpersist as fp
from fastpersist.cli import main
from fastpersist.cli.demo import command as demo
from fastpersist.cli.demo import live
from fastpersist.cli.demo.run import Run, TrainerFailedError, run_trainer


@pytest.fixture
def one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def nothing(run: Run) -> None:
    """Show nothing."""


# --- the story ---


def test_quick_demo_passes_and_keeps_what_it_shows(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    command = [sys.executable, "-m", "fastpersist", "demo", "--quick", "--steps", "12", "--dir", str(kept)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False, cwd=tmp_path)
    assert (result.returncode, result.stderr) == (0, ""), result.stdout
    lines = [line.strip() for line in result.stdout.splitlines()]
    assert lines[-1].startswith("PASS: killed at a random moment, resumed from step ")
    assert [line[0] for line in lines if line[1:3] == ". "] == ["1", "2", "3", "4", "5", "6"]
    assert any(line.startswith("SIGKILL ") and line.endswith("; the trainer is dead") for line in lines)
    unfinished = [line.split()[1].rstrip(",") for line in lines if line.startswith("unfinished: .step-")]
    assert all(f"{name} is gone: the resumed run removed it" in lines for name in unfinished)
    for row in ("none ", "every step, fp.Checkpointer ", "every step, torch.save + fsync ", "fp.save ", "torch.load,"):
        assert any(line.startswith(row) for line in lines)

    (root,) = kept.glob("fastpersist-demo-*/killed-*")
    assert fp.Checkpointer(root).steps() == [10, 11, 12]
    assert fp.verify(root).ok
    assert fp.inspect(root).leftovers == ()
    assert torch.load(root / "step-00000012" / "state.pt", weights_only=True)["step"] == 12


def test_trainer_that_dies_of_something_else_fails_the_demo(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    assert main(["demo", "--quick", "--dir", str(tmp_path)]) == 1
    assert capsys.readouterr().out.endswith("FAIL: the trainer ended with code 1; what it says is above\n")


def test_without_dir_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "executable", "/bin/false")
    assert main(["demo", "--quick"]) == 1
    assert str(tmp_path / "fastpersist-demo-") in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_directory_that_cannot_be_made_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert main(["demo", "--dir", str(tmp_path / "file" / "below")]) == 2
    assert capsys.readouterr().err.startswith("fastpersist: error: creating a directory in ")


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        (Run(4, 4, 2, {3: "0x1.8p+1", 4: "0x1.0p+1"}, digest="aa"), "the loss of step 3"),
        (Run(4, 4, 2, {3: "0x1.4p+1", 4: "0x1.0p+1"}, digest="bb"), "parameters, moments, data position"),
        (Run(4, 3, 2, {3: "0x1.4p+1"}, digest="aa"), "ended at step 3"),
    ],
    ids=["loss", "digest", "step"],
)
def test_one_different_bit_fails_the_demo(found: Run, reason: str) -> None:
    expected = Run(4, 4, 0, {3: "0x1.4p+1", 4: "0x1.0p+1"}, digest="aa")
    with pytest.raises(demo._DemoFailedError, match=reason):
        demo._compare(expected, found)


def test_equal_runs_are_told_to_be_equal() -> None:
    whole = Run(4, 4, 0, {3: "0x1.4p+1", 4: "0x1.0p+1"}, digest="aa")
    resumed = Run(4, 4, 3, {4: "0x1.0p+1"}, digest="aa")
    assert "resumed from step 3, and at step 4" in demo._compare(whole, resumed)


def test_last_checkpoint_with_other_bits_fails_the_demo(tmp_path: Path, one_thread: None) -> None:
    from fastpersist.cli.demo.gpt import Training, sizes

    training = Training(sizes(quick=True))
    training.step()
    with fp.Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, training.state(), rank_state=training.rank_state())
    arguments = argparse.Namespace(quick=True)
    demo._check_last_checkpoint(arguments, tmp_path, Run(1, 1, digest=training.digest()))
    with pytest.raises(demo._DemoFailedError, match="the checkpoint of step 1 holds another state"):
        demo._check_last_checkpoint(arguments, tmp_path, Run(1, 1, digest="aa"))


def test_leftover_that_stays_damaged_step_and_no_step_at_all_fail_the_demo(tmp_path: Path) -> None:
    (tmp_path / "step-00000001").mkdir()
    with pytest.raises(demo._DemoFailedError, match="no checkpoint is left, though step 3 was reached"):
        demo._say_what_is_left(tmp_path, Run(6, 3))
    with fp.Checkpointer(tmp_path / "run") as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, {"step": step, "weight": torch.ones(5000)})
    path = tmp_path / "run" / "step-00000001" / "state.pt"
    content = bytearray(path.read_bytes())
    content[-8000] ^= 1
    path.write_bytes(content)
    with pytest.raises(demo._DemoFailedError, match="a checkpoint is damaged after the kill: step-00000001"):
        demo._say_what_is_left(tmp_path / "run", Run(6, 3))


def test_kill_that_comes_too_late_is_tried_again_and_then_admitted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "run_trainer", lambda directory, step_count, **_: Run(step_count, step_count))
    arguments = argparse.Namespace(steps=6, quick=True)
    with pytest.raises(demo._DemoFailedError, match="no signal hit the training in 5 attempts"):
        demo._killed_run(arguments, tmp_path, Run(6))
    assert capsys.readouterr().out.count("it was through before the signal came; again") == 5
    assert list(tmp_path.iterdir()) == []


# --- the trainer ---


@pytest.mark.parametrize("forgotten", [None, "rng", "position", "optimizer"])
def test_resumed_training_needs_all_of_the_state(forgotten: str | None, one_thread: None, tmp_path: Path) -> None:
    from fastpersist.cli.demo.gpt import Training, sizes

    whole, fresh = Training(sizes(quick=True)), Training(sizes(quick=True))
    for _ in range(2):
        whole.step()
    with fp.Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(2, whole.state(), rank_state=whole.rank_state())
        losses = [whole.step() for _ in range(2)]
        digest = whole.digest()
        resumed = Training(sizes(quick=True))
        resumed.resume(checkpoints)
    if forgotten == "rng":
        torch.manual_seed(1)
    elif forgotten == "position":
        resumed.position = 0
    elif forgotten == "optimizer":
        resumed.optimizer.load_state_dict(fresh.optimizer.state_dict())
    same = [resumed.step() for _ in range(2)] == losses and resumed.digest() == digest
    assert same == (forgotten is None)


def test_same_state_has_the_same_digest_and_another_position_another() -> None:
    from fastpersist.cli.demo.gpt import Training, sizes

    training = Training(sizes(quick=True))
    digest = training.digest()
    assert training.digest() == digest
    training.position += 1
    assert training.digest() != digest


# --- a run, from outside ---


STEPS = [
    {"event": "step", "step": step, "way": "fastpersist", "loss": "0x1.8p+1", "step_s": step / 100, "saves": []}
    for step in range(1, 7)
]
SAVE = {"bytes": 5_000_000, "stall_s": 0.002, "write_s": 0.003, "sync_s": 0.002, "engine": "uring", "error": None}
END = {"event": "end", "digest": "aa", "saves": [SAVE]}


@pytest.fixture
def say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return what makes the trainer a program that says some lines and then does something else."""

    def say(lines: list[str], then: str) -> None:
        (tmp_path / "lines").write_text("".join(line + "\n" for line in lines))
        script = tmp_path / "trainer"
        script.write_text(f"#!/bin/sh\ncat {tmp_path / 'lines'}\n{then}\n")
        script.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(script))

    return say


def test_run_is_what_the_trainer_told(say: Any, tmp_path: Path) -> None:
    say([json.dumps(event) for event in ({"event": "resumed", "step": 2}, *STEPS[2:], END)], "exit 0")
    shown: list[int] = []
    run = run_trainer(tmp_path, 6, save_with="fastpersist", show=lambda run: shown.append(run.step))
    assert (run.resumed_at, run.step, run.digest, run.killed) == (2, 6, "aa", "")
    assert list(run.losses) == [3, 4, 5, 6]
    assert shown == [2, 3, 4, 5, 6, 6]
    assert run.step_s() == run.step_s("fastpersist") == pytest.approx(0.045)
    assert run.step_s("torch") == 0
    assert run.stall_s() == 0.002
    assert run.bytes_per_s() == pytest.approx(1e9)


def test_signal_hits_a_trainer_in_the_middle(say: Any, tmp_path: Path) -> None:
    say([json.dumps(event) for event in STEPS[:4]], "exec sleep 1000")
    run = run_trainer(tmp_path, 6, save_with="fastpersist", show=nothing, kill=True)
    assert run.step in (3, 4)
    assert run.killed.endswith(f"after it had reported step {run.step}")


@pytest.mark.parametrize(
    ("lines", "then", "reason"),
    [
        ([], "exit 7", "ended with code 7"),
        ([json.dumps(END)], "kill -9 $$", "ended with code -9"),
        ([json.dumps(STEPS[0])], "exit 0", "without telling how"),
        (['{"event": "st'], "exec sleep 1000", "said .*event.*, which is none of its messages"),
        (["Warning!"], "exec sleep 1000", "said 'Warning!"),
    ],
    ids=["code", "killed by somebody else", "no end", "torn line", "another line"],
)
def test_trainer_that_ends_otherwise_is_a_failure(
    lines: list[str], then: str, reason: str, say: Any, tmp_path: Path
) -> None:
    say(lines, then)
    with pytest.raises(TrainerFailedError, match=reason):
        run_trainer(tmp_path, 6, save_with="fastpersist", show=nothing)


# --- what is seen of it ---


SHOWN = (
    "from fastpersist.cli.demo.live import showing; from fastpersist.cli.demo.run import Run\n"
    "run = Run(12)\n"
    "with showing(Run(12, times_s={'nothing': [0.01]}), plain=True) as show:\n"
    "    for step in range(1, 13):\n"
    "        run.note({'event': 'step', 'step': step, 'way': 'fastpersist', 'loss': '0x1.8p+1', 'step_s': 0.0125})\n"
    f"        run.saves = [{SAVE!r}]\n"
    "        show(run)\n"
)
FACTS = ("3.0000", "12.5 ms, 10.0 ms without checkpoints", "2.0 ms per 5.0 MB", "1.00 GB/s (uring)")


def shown_on_a_terminal(source: str) -> str:
    reader, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("4H", 24, 100, 0, 0))
    environment = {**os.environ, "TERM": "xterm"}
    try:
        subprocess.run(
            [sys.executable, "-c", source], stdout=terminal, stdin=terminal, env=environment, timeout=60, check=True
        )
        return os.read(reader, 1 << 20).decode()
    finally:
        os.close(reader)
        os.close(terminal)


def test_terminal_shows_lines_that_change_in_place() -> None:
    shown = shown_on_a_terminal(SHOWN)
    assert "\x1b[" in shown
    assert "1 of 12" in shown
    end = shown[shown.rindex("12 of 12") :]
    assert all(fact in end for fact in FACTS)


def test_terminal_without_rich_says_what_to_install_and_shows_plain_lines() -> None:
    shown = shown_on_a_terminal("import sys; sys.modules['rich'] = None\n" + SHOWN + SHOWN)
    assert "\x1b[" not in shown
    assert shown.count("pip install rich, or fastpersist[demo]") == 1
    check_plain_lines(shown.splitlines()[1:], 2)


def test_pipe_gets_plain_lines(capsys: pytest.CaptureFixture[str]) -> None:
    exec(SHOWN)
    check_plain_lines(capsys.readouterr().out.splitlines(), 1)


def check_plain_lines(lines: list[str], run_count: int) -> None:
    assert [line.split()[1] for line in lines] == ["2", "4", "6", "8", "10", "12"] * run_count
    assert all(fact in lines[-1] for fact in FACTS)


def test_run_of_which_little_is_known_shows_that() -> None:
    from rich.console import Console

    for run in (Run(12), Run(12, 3, 3), Run(12, 4, 3, {4: "0x1.8p+1"})):
        console = Console(file=io.StringIO(), width=80)
        console.print(live._lines(run, Run(12)))
        text = console.file.getvalue()  # type: ignore[attr-defined]
        assert f"{run.step} of 12" in text
        assert "GB/s" not in text
