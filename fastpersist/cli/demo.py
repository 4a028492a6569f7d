"""`fastpersist demo`: the main job on real input. Train, be killed inside a save, resume, and lose nothing.

The trainer is `demo_gpt`, run in child processes; the table of times is `demo_times`. Here is the story: what is
started, killed and compared, and what counts as proof. Every claim that is printed was checked; one that is not so ends
the demo with FAIL.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from fastpersist.cli.terminal import EXIT_DAMAGED, EXIT_GOOD, printable, size_text

__all__ = ["add_parser", "run"]

_SAVE_COUNT = 6
_SAVES_BEFORE_KILL = 3
_ATTEMPT_COUNT = 5
_WATCH_INTERVAL_S = 0.0003

_say = partial(print, flush=True)  # children write to the same terminal, in turn


class _DemoFailedError(Exception):
    """Something that the demo claims is not so."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command's options."""
    parser = subparsers.add_parser(
        "demo",
        help="train, save, kill and resume a small GPT, and time it against torch.save",
        description=(
            "Train a small GPT on the source of Python's standard library; train it again, kill it inside a save, "
            "resume, and reach the same bits. Then time save and load against torch. Takes a minute or two, and "
            "1.5 GB of disk meanwhile."
        ),
        epilog="Exit codes: 0 all of it held (the last line says PASS), 1 something did not, 2 usage.",
    )
    parser.add_argument(
        "--dir", metavar="DIR", help="work below DIR and leave the states there (default: here, and clean up)"
    )
    parser.add_argument(
        "--steps",
        type=_step_count,
        metavar="N",
        help="train for N steps, at least 6 (default: 96; quick: 24)",
    )
    parser.add_argument("--quick", action="store_true", help="a tiny model and a small table, in seconds")
    parser.set_defaults(run=run)


def _step_count(text: str) -> int:
    if not text.isdecimal() or int(text) < _SAVE_COUNT:
        raise argparse.ArgumentTypeError(f"it is a whole number from {_SAVE_COUNT} on, not {text!r}")
    return int(text)


def run(arguments: argparse.Namespace) -> int:
    """Tell the story; the exit code says whether it ended well."""
    started_s = time.monotonic()
    if arguments.steps is None:
        arguments.steps = 24 if arguments.quick else 96
    try:
        with _workplace(arguments.dir) as directory:
            claim = _prove(arguments, directory)
            _show_times(directory, quick=arguments.quick)
    except _DemoFailedError as failure:
        _say(f"\nFAIL: {failure}")
        return EXIT_DAMAGED
    _say(f"\nPASS: {claim} ({time.monotonic() - started_s:.0f} s in all)")
    return EXIT_GOOD


@contextmanager
def _workplace(kept_in: str | None) -> Iterator[Path]:
    """Make a directory of our own, on the disk the user is on; remove it unless he said where he wants it."""
    from fastpersist.filesystem import storage_errors

    prefix = "fastpersist-demo-"
    if kept_in is not None:
        with storage_errors("creating a directory in", kept_in):
            os.makedirs(kept_in, exist_ok=True)
            directory = tempfile.mkdtemp(prefix=prefix, dir=kept_in)
        yield Path(directory)
        return
    with storage_errors("creating a directory here (--dir DIR chooses another place):", os.getcwd()):
        removed = tempfile.TemporaryDirectory(prefix=prefix, dir=os.getcwd())
    with removed as directory:
        yield Path(directory)


def _prove(arguments: argparse.Namespace, directory: Path) -> str:
    """Sections 1 to 4; returns what was proven, in one line."""
    import torch

    import fastpersist
    from fastpersist.cli.demo_gpt import GPT, STATE_NAME, sizes, stdlib_modules
    from fastpersist.cli.info import filesystem_name

    parameter_count = sum(parameter.numel() for parameter in GPT(sizes(quick=arguments.quick)).parameters())
    modules = stdlib_modules()
    text_bytes = sum(path.stat().st_size for path in modules)
    _say(f"A GPT of {parameter_count / 1e6:.1f} million parameters learns to write Python.")
    _say(f"text   {len(modules)} modules of {printable(str(modules[0].parent))}, {size_text(text_bytes)}")
    _say(f"files  {printable(str(directory))} ({filesystem_name(str(directory))})")

    _say(f"\n1. Train for {arguments.steps} steps, undisturbed")
    whole = directory / "uninterrupted"
    whole.mkdir()
    with _training(arguments, whole) as child:
        _expect_success(child)
    expected = _result(whole)

    _say("\n2. The same again, and kill -9 inside a save")
    leftover = _kill_inside_save(arguments, directory)
    killed = leftover.parent

    _say("\n3. What is left: the last complete file")
    state_path = killed / STATE_NAME
    report = fastpersist.verify(state_path)
    if not report.ok:
        raise _DemoFailedError(f"{STATE_NAME} is damaged after the kill: {report.damages[0].message}")
    _say(f"   fastpersist.verify: ok, {size_text(report.checked_bytes)} compared with their CRC-32s")
    step_count = torch.load(state_path, weights_only=True)["step"]
    _say(f"   torch.load(weights_only=True): loads, step {step_count}")

    _say("\n4. Resume from it")
    with _training(arguments, killed, resume=True) as child:
        _expect_success(child)
    if leftover.exists():
        raise _DemoFailedError(f"{leftover.name} is still there after the saves of the resumed run")
    _say(f"   {leftover.name} is gone: a save of the resumed run removed it")
    return _compare(expected, _result(killed), step_count)


# ------------------------------------------------------------------------------------------------------- children


@contextmanager
def _training(
    arguments: argparse.Namespace, directory: Path, *, resume: bool = False
) -> Iterator[subprocess.Popen[bytes]]:
    """Start the trainer in a child; it does not outlive the block."""
    command = [sys.executable, "-m", "fastpersist.cli.demo_gpt", str(directory)]
    command += ["--steps", str(arguments.steps), "--save-every", str(arguments.steps // _SAVE_COUNT)]
    command += ["--quick"] * arguments.quick + ["--resume"] * resume
    child = subprocess.Popen(command)
    try:
        yield child
    finally:
        child.kill()
        child.wait()


def _expect_success(child: subprocess.Popen[bytes]) -> None:
    code = child.wait()
    if code != 0:
        raise _DemoFailedError(f"the trainer ended with code {code}; what it says is above")


def _kill_inside_save(arguments: argparse.Namespace, directory: Path) -> Path:
    """Train until a later save begins, and kill; return the pending file that proves that it had not finished.

    A save takes a few hundredths of a second, so the signal may come too late: then all of it is done again.
    """
    for attempt in range(1, _ATTEMPT_COUNT + 1):
        killed = directory / f"killed-{attempt}"
        killed.mkdir()
        with _training(arguments, killed) as child:
            pending = _watch_for_save(child, killed)
            child.kill()
            code = child.wait()
        if code not in (0, -signal.SIGKILL):
            raise _DemoFailedError(f"the trainer ended with code {code}; what it says is above")
        if pending is None:
            _say(f"   attempt {attempt}: it trained to the end before a save was seen to begin; again")
        elif not pending.exists():
            _say(f"   attempt {attempt}: {pending.name} was seen, but the save ended before the signal came; again")
        else:
            _say("   SIGKILL in the middle of the next save; the trainer is dead")
            _say(f"   left behind: {pending.name}, {size_text(pending.stat().st_size)}, not yet renamed")
            _say(f"   fastpersist.verify says of it: {_verdict(pending)}")
            return pending
    raise _DemoFailedError(f"no signal hit a save in {_ATTEMPT_COUNT} attempts; saves are too short here")


def _watch_for_save(child: subprocess.Popen[bytes], directory: Path) -> Path | None:
    """Wait for the middle of a later save, judged by how long the ones before it took; None if the child ends before.

    Returns:
        The pending file of that save, by which saves are seen: it has this name from their beginning to their end.
    """
    durations_s: list[float] = []
    current, began_s = None, 0.0
    while child.poll() is None:
        now_s = time.monotonic()
        pending = next((name for name in os.listdir(directory) if ".pending-" in name), None)
        if pending != current:
            if current is not None:
                durations_s.append(now_s - began_s)
            current, began_s = pending, now_s
        if current is not None and len(durations_s) >= _SAVES_BEFORE_KILL and now_s - began_s > min(durations_s) / 3:
            return directory / current
        time.sleep(_WATCH_INTERVAL_S)
    return None


def _verdict(leftover: Path) -> str:
    """Say what a reader would make of half a save."""
    import fastpersist

    report = fastpersist.verify(leftover)
    return "all bytes are there; only sync and rename were missing" if report.ok else report.damages[0].message


def _result(directory: Path) -> dict[str, Any]:
    from fastpersist.cli.demo_gpt import RESULT_NAME

    result: dict[str, Any] = json.loads((directory / RESULT_NAME).read_text())
    return result


def _compare(expected: dict[str, Any], found: dict[str, Any], resumed_at: int) -> str:
    """Compare losses of every step since the resumption and the digest of the end, bit for bit."""
    for step, loss in found["losses"].items():
        if loss != expected["losses"][step]:
            raise _DemoFailedError(f"the loss of step {step} is {loss} resumed and {expected['losses'][step]} not")
    if found["digest"] != expected["digest"]:
        raise _DemoFailedError("the losses agree, but parameters or moments do not")
    step, loss = list(found["losses"].items())[-1]
    _say(f"   losses of steps {resumed_at + 1} to {step}: the same bits, each of them")
    _say(f"   loss of step {step}: {float.fromhex(loss):.6f} = {loss} both times")
    _say(f"   SHA-256 of parameters and moments: {found['digest'][:16]}… both times")
    return (
        f"killed inside a save, resumed from step {resumed_at}, and at step {step} "
        "loss, parameters and moments are the same bits"
    )


# ------------------------------------------------------------------------------------------------------- the table


def _show_times(directory: Path, *, quick: bool) -> None:
    from fastpersist.cli import demo_times

    _say("\n5. Save and load times")
    for line in demo_times.measure(directory, quick=quick):
        _say(line)
