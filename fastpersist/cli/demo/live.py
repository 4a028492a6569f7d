"""Shows the progress of a demo run: a few lines that change in place, or plain lines.

On a terminal rich draws the lines. Without a terminal or without rich, some steps print a plain line each. Both have
the same content, made from a `Run`.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from fastpersist.cli.demo.run import Run
from fastpersist.cli.terminal import has_rich, size_text
from fastpersist.display import rate_text

if TYPE_CHECKING:
    from rich.padding import Padding

__all__ = ["showing"]

_LINE_COUNT = 6
_REFRESH_INTERVAL_S = 0.1  # drawing costs time on the cores that the trainer is on


@contextmanager
def showing(without: Run | None, *, plain: bool) -> Iterator[Callable[[Run], None]]:
    """Yield a function to call with a run after each event.

    Args:
        without: A run without checkpoints, to compare the time of a step with.
        plain: Whether it is worth plain lines.
    """
    if sys.stdout.isatty() and has_rich():
        with _live_lines(without) as show:
            yield show
    else:
        if sys.stdout.isatty():
            _hint()
        yield lambda run: _print_some_steps(run, without) if plain else None


@functools.cache  # once
def _hint() -> None:
    print("   (for lines that change in place: pip install rich, or fastpersist[demo])")


@contextmanager
def _live_lines(without: Run | None) -> Iterator[Callable[[Run], None]]:
    from rich.live import Live

    newest: Run | None = None
    drawn_s = 0.0

    # The thread that rich would draw from is left out: it would draw, and take a core, when nothing is new.
    with Live(auto_refresh=False) as live:

        def show(run: Run) -> None:
            nonlocal newest, drawn_s
            newest = run
            now_s = time.monotonic()
            if now_s - drawn_s >= _REFRESH_INTERVAL_S:
                drawn_s = now_s
                live.update(_lines(run, without), refresh=True)

        yield show
        if newest is not None:
            live.update(_lines(newest, without), refresh=True)


def _lines(run: Run, without: Run | None) -> Padding:
    from rich.padding import Padding
    from rich.progress_bar import ProgressBar
    from rich.table import Table

    lines = Table.grid(padding=(0, 2, 0, 0))
    lines.add_row("step", f"{run.step} of {run.step_count}")
    lines.add_row("", ProgressBar(total=run.step_count, completed=run.step, width=50))
    for name, text in _facts(run, without):
        lines.add_row(name, text)
    return Padding(lines, (0, 0, 0, 3))


def _facts(run: Run, without: Run | None) -> list[tuple[str, str]]:
    """Return the known facts of a run, as names and texts."""
    facts = []
    if run.step in run.losses:
        facts.append(("loss", f"{float.fromhex(run.losses[run.step]):.4f}"))
    if run.step_s():
        facts.append(("per step", _step_time(run, without)))
    if run.saves:
        save = run.saves[-1]
        facts.append(("stall", f"{run.stall_s() * 1e3:.1f} ms per {size_text(save['bytes'])}"))
        facts.append(("disk", f"{rate_text(run.bytes_per_s())} ({save['engine']})"))
    return facts


def _step_time(run: Run, without: Run | None) -> str:
    """Describe the time of a step, and that of a step without checkpoints."""
    # No percentage: the runs are minutes apart, and the machine may do something else meanwhile. See section 5 of demo.
    beside = "" if without is None or not without.step_s() else f", {without.step_s() * 1e3:.1f} ms without checkpoints"
    return f"{run.step_s() * 1e3:.1f} ms{beside}"


def _print_some_steps(run: Run, without: Run | None) -> None:
    if run.digest or run.step not in run.losses or run.step % max(1, run.step_count // _LINE_COUNT):
        return
    print(f"   step {run.step:4}  " + ";  ".join(f"{name} {text}" for name, text in _facts(run, without)), flush=True)
