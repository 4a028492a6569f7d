"""The table that a notebook shows for a Checkpointer: its steps, newest first, and unfinished saves."""

from __future__ import annotations

from collections.abc import Sequence

from fastpersist.commit.step_listing import commit_of, committed_steps, in_commit_order
from fastpersist.display import duration_text, html_table, size_text, time_text
from fastpersist.errors import StorageError
from fastpersist.saving.pending_save import PendingSave

__all__ = ["checkpointer_html"]


def checkpointer_html(root: str, title: str, unfinished: Sequence[PendingSave]) -> str:
    """Return a table of the committed steps, which reads their manifests, and a line for each unfinished save.

    Args:
        root: The directory of the steps.
        title: What the object is.
        unfinished: The saves that are under way.

    Thread safety: any thread.
    """
    notes = [
        f"step {pending.stats.step} is being saved: {'captured' if pending.captured() else 'not captured yet'}"
        for pending in unfinished
    ]
    try:
        found = committed_steps(root)
    except StorageError as error:  # a picture of an object never raises
        return html_table(title, (), (), [str(error), *notes])
    rows = []
    for step in reversed(in_commit_order({step: commit_of(manifest) for step, manifest in found.items()})):
        manifest = found[step]
        stall_s, engine = manifest.stats.get("stall_s"), manifest.stats.get("engine", "")
        rows.append(
            (
                str(step),
                time_text(manifest.time_s),
                size_text(sum(entry.size_bytes for entry in manifest.files)),
                duration_text(float(stall_s)) if isinstance(stall_s, float | int) else "",
                str(engine),
            )
        )
    return html_table(title, ("step", "time", "size", "stall", "engine"), rows, notes or ["No save is under way."])
