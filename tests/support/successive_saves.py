"""Saves a random state again and again, changed between the saves, and compares each file with a full save."""

from __future__ import annotations

import tempfile
from pathlib import Path

from support.random_states import RandomState

import fastpersist as fp

__all__ = ["save_and_compare"]


def save_and_compare(seed: int, change_count: int) -> int:
    """Save a state and its changes with one Checkpointer; fail unless each file is the one that fp.save writes.

    The state changes as soon as it is captured, while the file is written. A state that fp.save refuses must be
    refused with the same error.

    Returns:
        How many files were compared.
    """
    state = RandomState(seed)
    file_count = 0
    with tempfile.TemporaryDirectory() as name:
        root, full = Path(name, "root"), Path(name, "state.pt")  # the name of the file is in the archive
        with fp.Checkpointer(root) as checkpointer:
            for step in range(change_count + 1):
                refused: Exception | None = None
                try:
                    fp.save(state.value, full, durable=False)
                except Exception as error:  # noqa: BLE001 - whatever it is, it is compared
                    refused = error
                try:
                    pending = checkpointer.save(step, state.value)
                except Exception as error:
                    if type(error) is not type(refused):
                        raise AssertionError(f"step {step}: {error!r}, and fp.save: {refused!r}") from error
                    state.change()
                    continue
                assert refused is None, f"step {step}: saved, and fp.save: {refused!r}"
                pending.wait_captured()
                state.change()
                pending.result()
                found = (root / f"step-{step:08}" / "state.pt").read_bytes()
                assert found == full.read_bytes(), f"step {step} of seed {seed} is not the file that fp.save writes"
                file_count += 1
    return file_count
