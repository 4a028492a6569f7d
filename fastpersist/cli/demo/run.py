"""Starts a run of the demo's trainer, reads its reports, and kills it if asked to.

The trainer (`demo.gpt`) reports events, one JSON object a line. This module collects them in a `Run`: losses, times,
costs of the saves. `demo.live` shows it, and `demo.command` draws the conclusions.
"""

from __future__ import annotations

import json
import random
import signal
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastpersist.cli.child_process import python_command

__all__ = ["Run", "TrainerFailedError", "run_trainer"]


class TrainerFailedError(Exception):
    """The trainer ended unexpectedly."""


@dataclass(slots=True)
class Run:
    """The reported facts of a run.

    Attributes:
        step_count: Number of steps to train.
        step: The last reported step.
        resumed_at: The step of the checkpoint that the run resumed from; 0 without one.
        losses: Loss of each step, as float.hex() writes it.
        times_s: By the way of saving: the seconds of each step that is measured, the save and waits for earlier saves
            included.
        saves: `SaveStats` of each save that ended, as a dict.
        digest: The SHA-256 of the state at the end; "" until then.
        killed: Where the run was killed, in words; "" if it was not.
    """

    step_count: int
    step: int = 0
    resumed_at: int = 0
    losses: dict[int, str] = field(default_factory=dict)
    times_s: dict[str, list[float]] = field(default_factory=dict)
    saves: list[dict[str, Any]] = field(default_factory=list)
    digest: str = ""
    killed: str = ""

    def note(self, event: dict[str, Any]) -> None:
        """Record a report of the trainer."""
        if event["event"] == "resumed":
            self.resumed_at = self.step = event["step"]
        elif event["event"] == "step":
            self.step = event["step"]
            self.losses[self.step] = event["loss"]
            if event["step_s"] is not None:
                self.times_s.setdefault(event["way"], []).append(event["step_s"])
        else:
            self.digest = event["digest"]
        self.saves += [save for save in event.get("saves", ()) if save["error"] is None]

    def step_s(self, way: str | None = None) -> float:
        """Return the median time of a step, of all or of those saved in one way; 0 if none was measured."""
        times_s = [step_s for found, times in self.times_s.items() if way in (None, found) for step_s in times]
        return statistics.median(times_s or [0.0])

    def stall_s(self) -> float:
        """Return what the median save cost the training thread."""
        stalls_s: list[float] = [save["stall_s"] for save in self.saves]
        return statistics.median(stalls_s or [0.0])

    def bytes_per_s(self) -> float:
        """Return the median rate of the saves, from the first byte to the last one durable."""
        rates: list[float] = [save["bytes"] / max(save["write_s"] + save["sync_s"], 1e-9) for save in self.saves]
        return statistics.median(rates or [0.0])


def run_trainer(
    directory: Path,
    step_count: int,
    *,
    save_with: str,
    show: Callable[[Run], None],
    quick: bool = False,
    resume: bool = False,
    kill: bool = False,
) -> Run:
    """Train in a child process, to the end or until it is killed.

    Args:
        directory: The directory of the checkpoints.
        step_count: The number of the last step.
        save_with: "nothing", "fastpersist" or "torch"; or "turns", which takes all of them in turn.
        show: Called after each report.
        quick: Train the small model.
        resume: Go on from the newest checkpoint in the directory.
        kill: Send SIGKILL at a random moment in the middle third. A trainer that was through before is a run that
            was not killed.

    Raises:
        TrainerFailedError: The trainer ended before its last step, and was not killed by us.
    """
    words = [str(directory), "--steps", str(step_count), "--save-with", save_with]
    words += ["--quick"] * quick + ["--resume"] * resume
    command = python_command("from fastpersist.cli.demo.gpt import main; sys.exit(main())", *words)
    # Not before step 3: two saves may be unfinished, so by then at least one is committed.
    last_step = random.randint(max(3, step_count // 3), max(3, 2 * step_count // 3)) if kill else None
    run = Run(step_count)
    child = subprocess.Popen(command, stdout=subprocess.PIPE)
    try:
        for line in child.stdout or ():
            try:
                run.note(json.loads(line))
            except ValueError:  # also half a line, of a trainer that was killed from outside
                raise TrainerFailedError(f"the trainer said {_shown(line)}, which is none of its messages") from None
            if run.step == last_step:
                delay_s = random.uniform(0, run.step_s() or 0.01)
                time.sleep(delay_s)
                run.killed = f"{delay_s * 1e3:.0f} ms after it had reported step {run.step}"
                break
            show(run)
        if run.killed:
            child.kill()
        code = child.wait()
    finally:
        child.kill()
        child.wait()
        if child.stdout is not None:
            child.stdout.close()
    if run.killed and code == 0:
        run.killed = ""  # it was through by then
    elif code != (-signal.SIGKILL if run.killed else 0):
        raise TrainerFailedError(f"the trainer ended with code {code}; what it says is above")
    elif not run.killed and not run.digest:
        raise TrainerFailedError("the trainer ended without telling how")
    return run


def _shown(line: bytes) -> str:
    return repr(line.decode(errors="backslashreplace").strip())
