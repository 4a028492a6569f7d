"""Progress bars: tqdm, without the thread that it would leave running."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tqdm import tqdm

__all__ = ["progress_bar"]


def progress_bar(**options: Any) -> tqdm[Any]:
    """Make a progress bar on standard error; the options are tqdm's."""
    from tqdm import tqdm  # here: most saves show none, and importing fastpersist shall be quick

    class Bar(tqdm):  # type: ignore[type-arg]
        monitor_interval = 0  # tqdm starts a thread for this, which outlives every bar

    return Bar(**options)
