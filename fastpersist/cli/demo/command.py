"""`fastpersist demo`: trains with a checkpoint after every step, kills the training, resumes it, and compares the bits.

`demo.run` runs the trainer `demo.gpt` in child processes, `demo.live` shows them, and `demo.times` makes the table of
times. This module starts, kills and compares the runs. It checks every claim that it prints; a false one ends the demo
with FAIL.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from fastpersist.cli.argument_types import whole_number
from fastpersist.cli.demo.live import showing
from fastpersist.cli.demo.run import Run, TrainerFailedError, run_trainer
from fastpersist.cli.terminal import EXIT_DAMAGED, EXIT_GOOD, HelpFormatter, examples_text, printable, size_text

__all__ = ["add_parser", "run"]

_STEP_COUNT_MIN = 6
_ATTEMPT_COUNT = 5

_say = partial(print, flush=True)  # children write to the same terminal, in turn


class _DemoFailedError(Exception):
    """A claim of the demo is false."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command's options."""
    parser = subparsers.add_parser(
        "demo",
        help="train a small GPT with a checkpoint every step, kill it, resume, and time it against torch.save",
        description=(
            "Train a small GPT on the source of Python's standard library; train it again with a checkpoint after "
            "every step, kill it at a random moment, resume, and reach the same bits. Then time save and load against "
            "torch. Takes about a minute, and 1.5 GB of disk meanwhile."
        ),
        epilog=examples_text("fastpersist demo", "fastpersist demo --quick --dir /mnt/nvme")
        + "Exit codes: 0 all of it held (the last line says PASS), 1 something did not, 2 usage.",
        formatter_class=HelpFormatter,
    )
    parser.add_argument(
        "--dir", metavar="DIR", help="work below DIR and leave the checkpoints there (default: here, and clean up)"
    )
    parser.add_argument(
        "--steps",
        type=whole_number(_STEP_COUNT_MIN),
        metavar="N",
        help=f"train for N steps, at least {_STEP_COUNT_MIN} (default: 64; quick: 24)",
    )
    parser.add_argument("--quick", action="store_true", help="a tiny model and a small table, in seconds")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the demo; return 0 if every claim holds."""
    started_s = time.monotonic()
    if arguments.steps is None:
        arguments.steps = 24 if arguments.quick else 64
    try:
        with _workplace(arguments.dir) as directory:
            claim = _tell(arguments, directory)
            _show_times(directory, quick=arguments.quick)
    except (_DemoFailedError, TrainerFailedError) as failure:
        _say(f"\nFAIL: {failure}")
        return EXIT_DAMAGED
    _say(f"\nPASS: {claim} ({time.monotonic() - started_s:.0f} s in all)")
    return EXIT_GOOD


@contextmanager
def _workplace(kept_in: str | None) -> Iterator[Path]:
    """Make a working directory on the user's disk; remove it unless the user chose the place."""
    from fastpersist.commit.filesystem import absolute_path, storage_errors

    prefix = "fastpersist-demo-"
    if kept_in is not None:
        with storage_errors("creating a directory in", kept_in):
            os.makedirs(kept_in, exist_ok=True)
            directory = tempfile.mkdtemp(prefix=prefix, dir=kept_in)
        yield Path(directory)
        return
    here = absolute_path(".")
    with storage_errors("creating a directory here (--dir DIR chooses another place):", here):
        removed = tempfile.TemporaryDirectory(prefix=prefix, dir=here)
    with removed as directory:
        yield Path(directory)


def _tell(arguments: argparse.Namespace, directory: Path) -> str:
    """Run sections 1 to 5; return the proven claims in one line."""
    from fastpersist.cli.demo.gpt import GPT, sizes, stdlib_modules
    from fastpersist.cli.info import filesystem_name

    parameter_count = sum(parameter.numel() for parameter in GPT(sizes(quick=arguments.quick)).parameters())
    modules = stdlib_modules()
    text_bytes = sum(path.stat().st_size for path in modules)
    _say(f"A GPT of {parameter_count / 1e6:.1f} million parameters learns to write Python, on one thread.")
    _say(f"text   {len(modules)} modules of {printable(str(modules[0].parent))}, {size_text(text_bytes)}")
    _say(f"files  {printable(str(directory))} ({filesystem_name(str(directory))})")

    _say(f"\n1. Train for {arguments.steps} steps, undisturbed, without a checkpoint")
    whole = _run(arguments, directory, save_with="nothing")

    _say("\n2. The same again, with a checkpoint after every step, and kill -9 at a random moment")
    root, killed = _killed_run(arguments, directory, whole)
    _compare_losses(whole, killed)

    _say("\n3. What is left")
    leftovers = _say_what_is_left(root, killed)

    _say("\n4. Resume from the newest, and go on with a checkpoint after every step")
    resumed = _run(arguments, root, save_with="fastpersist", resume=True, without=whole)
    for leftover in leftovers:
        if leftover.exists():
            raise _DemoFailedError(f"{leftover.name} is still there after the saves of the resumed run")
        _say(f"   {leftover.name} is gone: the resumed run removed it")
    claim = _compare(whole, resumed)
    _check_last_checkpoint(arguments, root, whole)

    _say("\n5. What a checkpoint after every step costs the training")
    for line in _cost_table(arguments, directory):
        _say(f"   {line}".rstrip())
    return claim


# ------------------------------------------------------------------------------------------------------- the runs


def _run(
    arguments: argparse.Namespace,
    directory: Path,
    *,
    save_with: str,
    step_count: int | None = None,
    resume: bool = False,
    kill: bool = False,
    without: Run | None = None,
) -> Run:
    with showing(without, plain=save_with != "turns") as show:
        return run_trainer(
            directory,
            step_count or arguments.steps,
            save_with=save_with,
            show=show,
            quick=arguments.quick,
            resume=resume,
            kill=kill,
        )


def _killed_run(arguments: argparse.Namespace, directory: Path, whole: Run) -> tuple[Path, Run]:
    """Train until the signal hits; if the training ended before the signal, try again."""
    for attempt in range(1, _ATTEMPT_COUNT + 1):
        root = directory / f"killed-{attempt}"
        root.mkdir()
        killed = _run(arguments, root, save_with="fastpersist", kill=True, without=whole)
        if killed.killed:
            _say(f"   SIGKILL {killed.killed}; the trainer is dead")
            return root, killed
        _say(f"   attempt {attempt}: it was through before the signal came; again")
        shutil.rmtree(root)
    raise _DemoFailedError(f"no signal hit the training in {_ATTEMPT_COUNT} attempts; steps are too short here")


def _say_what_is_left(root: Path, killed: Run) -> list[Path]:
    """List the files of the dead trainer, and verify its checkpoints; return the unfinished ones."""
    import torch

    import fastpersist
    from fastpersist.cli.demo.gpt import KEPT_COUNT

    leftovers = sorted(path for path in root.iterdir() if ".pending-" in path.name)
    for leftover in leftovers:
        written_bytes = sum(path.stat().st_size for path in leftover.iterdir())
        _say(f"   unfinished: {leftover.name}, {size_text(written_bytes)}, never renamed")
    if not leftovers:
        _say("   unfinished: nothing, the signal came between two saves")
    checkpoints = fastpersist.Checkpointer(root)
    steps = checkpoints.steps()
    if not steps:
        raise _DemoFailedError(f"no checkpoint is left, though step {killed.step} was reached")
    _say(f"   complete: step {', '.join(map(str, steps))} (keep={KEPT_COUNT})")
    report = fastpersist.verify(root)
    if not report.ok:
        raise _DemoFailedError(f"a checkpoint is damaged after the kill: {report.damages[0].message}")
    _say(f"   fastpersist.verify: ok, {size_text(report.checked_bytes)} compared with their CRC-32s")
    state_path = next(path for path in root.glob("step-*/state.pt") if path.parent.name.endswith(f"{steps[-1]:08d}"))
    found = torch.load(state_path, weights_only=True)["step"]
    if found != steps[-1]:
        raise _DemoFailedError(f"torch.load finds step {found} in {state_path.parent.name}")
    _say(f"   torch.load(weights_only=True) of {state_path.parent.name}/{state_path.name}: loads, step {found}")
    return leftovers


# ----------------------------------------------------------------------------------------------------- the proofs


def _compare_losses(expected: Run, found: Run) -> None:
    """Compare the loss of every step that both runs have, bit for bit."""
    for step, loss in found.losses.items():
        if loss != expected.losses[step]:
            raise _DemoFailedError(f"the loss of step {step} is {loss}, and {expected.losses[step]} undisturbed")


def _compare(whole: Run, resumed: Run) -> str:
    """Compare the loss of every step since the resumption and the final digest; return the proven claim."""
    _compare_losses(whole, resumed)
    if resumed.step != whole.step:
        raise _DemoFailedError(f"the resumed run ended at step {resumed.step}, the undisturbed one at {whole.step}")
    if resumed.digest != whole.digest:
        raise _DemoFailedError("the losses agree, but parameters, moments, data position or generator do not")
    loss = resumed.losses[resumed.step]
    _say(f"   losses of steps {resumed.resumed_at + 1} to {resumed.step}: the same bits, each of them")
    _say(f"   loss of step {resumed.step}: {float.fromhex(loss):.6f} = {loss} both times")
    _say(f"   SHA-256 of parameters, moments, data position and generator: {whole.digest[:16]}… both times")
    return (
        f"killed at a random moment, resumed from step {resumed.resumed_at}, and at step {resumed.step} "
        "losses and state are the same bits"
    )


def _check_last_checkpoint(arguments: argparse.Namespace, root: Path, whole: Run) -> None:
    """Load the last checkpoint into a fresh model, and compare."""
    import fastpersist
    from fastpersist.cli.demo.gpt import Training, sizes

    training = Training(sizes(quick=arguments.quick))
    training.resume(fastpersist.Checkpointer(root))
    if training.digest() != whole.digest:
        raise _DemoFailedError(f"the checkpoint of step {training.step_count} holds another state than the run had")
    _say(f"   the checkpoint of step {training.step_count}, loaded from disk: the same SHA-256")


# ----------------------------------------------------------------------------------------------------- the tables


def _cost_table(arguments: argparse.Namespace, directory: Path) -> Iterator[str]:
    """Train with and without checkpoints in turns, so that drift of the machine affects both; yield lines to print."""
    from tabulate import tabulate

    from fastpersist.cli.demo.gpt import TURN_COUNT, WAYS

    other = directory / "turns"
    other.mkdir()
    round_count = 2 if arguments.quick else 4
    found = _run(arguments, other, save_with="turns", step_count=round_count * len(WAYS) * TURN_COUNT)
    shutil.rmtree(other)
    yield f"one process, in turns of {TURN_COUNT} steps, the first of which is left out; medians"
    yield ""
    names = ("none", "every step, fp.Checkpointer", "every step, torch.save + fsync")
    rows = []
    for name, way in zip(names, WAYS, strict=True):
        times_s = found.times_s[way]
        slower = "" if way == WAYS[0] else f"{(found.step_s(way) / found.step_s(WAYS[0]) - 1) * 100:+.1f} %"
        times = f"{min(times_s) * 1e3:.1f} – {max(times_s) * 1e3:.1f}"
        rows.append((name, f"{found.step_s(way) * 1e3:.1f}", times, slower, str(len(times_s))))
    table = tabulate(
        rows,
        headers=("checkpoints", "ms per step", "min – max", "slower", "steps"),
        disable_numparse=True,
        colalign=("left", *["right"] * 4),
    )
    yield from table.splitlines()
    yield ""
    size_bytes = found.saves[-1]["bytes"]
    yield f"stall of fp.Checkpointer: {found.stall_s() * 1e3:.1f} ms per checkpoint of {size_text(size_bytes)}"


def _show_times(directory: Path, *, quick: bool) -> None:
    from fastpersist.cli.demo import times

    _say("\n6. Save and load times")
    for line in times.measure(directory, quick=quick):
        _say(line)
