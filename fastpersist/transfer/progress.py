"""How far a transfer is: what is called meanwhile, and a progress bar by tqdm, without the thread of tqdm."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tqdm import tqdm

__all__ = ["Poll", "progress_bar", "showing_progress"]

Poll = Callable[[int], None]
"""Called about every 50 ms with the bytes done so far; what it raises stops the transfer."""


def progress_bar(**options: Any) -> tqdm[Any]:
    """Make a progress bar on standard error; the options are tqdm's."""
    from tqdm.auto import tqdm  # in notebooks a widget; here, as importing fastpersist shall be quick

    class Bar(tqdm):  # type: ignore[type-arg]
        monitor_interval = 0  # tqdm starts a thread for this, which outlives every bar

    return Bar(**options)


@contextmanager
def showing_progress(path: str, size_bytes: int, wanted: bool) -> Iterator[Poll | None]:
    """Show a progress bar while the block runs.

    Args:
        path: Of the file; its last part is shown.
        size_bytes: How many bytes are moved in all.
        wanted: Without it nothing is shown.

    Yields:
        What is called with the bytes that are done so far; None if nothing is shown.
    """
    if not wanted:
        yield None
        return
    with progress_bar(total=size_bytes, unit="B", unit_scale=True, desc=os.path.basename(path)) as bar:

        def poll(done_bytes: int) -> None:
            bar.update(min(done_bytes, size_bytes) - bar.n)

        yield poll
        bar.update(size_bytes - bar.n)
