"""The progress of a transfer: its callbacks, and a progress bar by tqdm, without tqdm's thread."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from fastpersist.arguments import require_bools

if TYPE_CHECKING:
    from tqdm import tqdm

__all__ = ["Poll", "counted", "progress_bar", "showing_progress"]

Poll = Callable[[int], None]
"""Called about every 50 ms with the bytes done so far; what it raises stops the transfer."""


_count: ContextVar[Callable[[int], None] | None] = ContextVar("count", default=None)
"""Told how many more bytes a read of this context has done; set while a progress bar is shown."""


def counted(poll: Poll | None) -> Poll | None:
    """Return what a read calls so that the bar around it, if there is one, counts its bytes beside those of others."""
    count = _count.get()
    if count is None:
        return poll
    before_bytes = 0

    def note(done_bytes: int) -> None:
        nonlocal before_bytes
        count(done_bytes - before_bytes)
        before_bytes = done_bytes
        if poll is not None:
            poll(done_bytes)

    return note


def progress_bar(**options: Any) -> tqdm[Any]:
    """Make a progress bar on standard error; the options are tqdm's."""
    from tqdm.auto import tqdm  # in notebooks a widget; here, as importing fastpersist shall be quick

    class Bar(tqdm):  # type: ignore[type-arg]
        monitor_interval = 0  # tqdm starts a thread for this, which outlives every bar

    return Bar(**options)


@contextmanager
def showing_progress(path: str, size_bytes: int, wanted: bool) -> Iterator[Poll | None]:
    """Show a progress bar while the block runs. All that the block reads, in any number of reads, is counted.

    Args:
        path: The path of the file; its last part is shown.
        size_bytes: How many bytes are moved in all.
        wanted: Whether to show a bar at all.

    Yields:
        For a write: what is called with the bytes that are done so far; None if nothing is shown.
    """
    require_bools(progress=wanted)
    if not wanted:
        yield None
        return
    with progress_bar(total=size_bytes, unit="B", unit_scale=True, desc=os.path.basename(path)) as bar:

        def poll(done_bytes: int) -> None:
            bar.update(min(done_bytes, size_bytes) - bar.n)

        token = _count.set(lambda more_bytes: poll(int(bar.n) + more_bytes))
        try:
            yield poll
        finally:
            _count.reset(token)
        bar.update(size_bytes - bar.n)
