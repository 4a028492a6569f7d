"""What the bytes of the newest step are: of the model, of the optimizer, or the rest. This runs no code from it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from fastpersist.cli.report.records import bytes_of
from fastpersist.errors import FastPersistError
from fastpersist.formats.manifest import CheckpointManifest, step_name

if TYPE_CHECKING:
    from fastpersist import TensorEntry

__all__ = ["content_of"]

_OPTIMIZER = ("optimizer", "optim", "opt")
_MODEL = ("model", "module", "state_dict", "ema", "net", "network", "policy", "weights")


def content_of(root: str, checkpoints: Sequence[CheckpointManifest]) -> tuple[dict[str, float], str]:
    """Return bytes by what they are, and a note on the step that was looked into.

    Tensors that share a storage are counted once.
    """
    from fastpersist import inspect

    newest = max(checkpoints, key=lambda one: (one.commit_number or 0, one.step or 0), default=None)
    if newest is None or newest.step is None:
        return {}, ""
    try:
        found = inspect(os.path.join(root, step_name(newest.step)))
    except FastPersistError as error:
        return {}, f"Step {newest.step} cannot be looked into: {error}"
    if not found.tensors:
        return {}, f"No tensors are listed in step {newest.step}."
    sizes = {"model": 0.0, "optimizer": 0.0, "rest": 0.0}
    records: dict[tuple[str, str], tuple[str, int]] = {}
    for tensor in found.tensors:
        key = (tensor.file, tensor.record)
        if key not in records or records[key][1] < tensor.size_bytes:
            records[key] = (_kind_of(tensor), tensor.size_bytes)
    for kind, size_bytes in records.values():
        sizes[kind] += size_bytes
    sizes["rest"] += max(0.0, float(bytes_of(newest)) - sum(sizes.values()))
    return (
        sizes,
        f"Of step {newest.step}, by the first part of each tensor's name; the rest holds all that is no tensor.",
    )


def _kind_of(tensor: TensorEntry) -> str:
    first = tensor.name.split(".", 1)[0].split("[", 1)[0].lower()
    if any(first.startswith(word) for word in _OPTIMIZER):
        return "optimizer"
    return "model" if any(first.startswith(word) for word in _MODEL) else "rest"
