"""Say, before it matters, what a save would do with a state, and what would keep others from reading it."""

from __future__ import annotations

import logging
import os
import sys
import time
import warnings
from collections.abc import Mapping

import torch

from fastpersist.arena import Arena
from fastpersist.capture import Capture, Kind
from fastpersist.errors import FastPersistError
from fastpersist.formats.pickle_scan import iter_tensors, scan_pickle
from fastpersist.loading import not_allowed_globals
from fastpersist.owners import Owners
from fastpersist.pickling import pickle_skeleton
from fastpersist.saving import TorchZipContainer

__all__ = ["explain", "warn_caller", "warn_of_globals"]

_log = logging.getLogger("fastpersist")

_KINDS = (("stable", Kind.STABLE), ("constant", Kind.CONSTANT), ("volatile", Kind.VOLATILE))


def explain(state: object, owners: Owners) -> str:
    """Tell which bytes of a state are stable, constant and volatile, key by key, and how long save() would take.

    Args:
        state: What would be saved.
        owners: Whose storages are stable.

    Returns:
        A table and the expected stall, several lines.

    Raises:
        ConfigError, RuntimeError, …: The state cannot be saved; as in `save`.
    """
    started_s = time.perf_counter()
    container = TorchZipContainer(state, "state", checksum=True)
    capture = Capture(owners, Arena(0))
    capture.add(container)
    plan_s = time.perf_counter() - started_s

    key_of: dict[str, str] = {}
    for name, tensor in iter_tensors(scan_pickle(container.skeleton.pickle).root):
        if tensor.storage is not None:
            key_of.setdefault(tensor.storage.key, _top_key(name))
    by_key: dict[str, dict[Kind, int]] = {}
    for index, (source, kind) in enumerate(zip(container.sources, capture.kinds, strict=True)):
        row = by_key.setdefault(key_of.get(str(index), "(other)"), {})
        row[kind] = row.get(kind, 0) + source.size_bytes
    why = capture.why_volatile
    capture.release()

    width = max([len("key"), *map(len, by_key)])
    lines = [f"{'key':{width}}  " + "  ".join(f"{name:>12}" for name, _ in _KINDS)]
    for key, row in [*by_key.items(), ("all", _sum(by_key))]:
        lines.append(f"{key:{width}}  " + "  ".join(f"{row.get(kind, 0) / 1e6:9.2f} MB" for _, kind in _KINDS))
    copied_bytes = _sum(by_key).get(Kind.VOLATILE, 0)
    stall_s = plan_s + copied_bytes / _copy_bytes_per_s()
    lines.append(
        f"save() returns after about {stall_s * 1e3:.1f} ms: {plan_s * 1e3:.1f} ms to plan, the rest to copy what is "
        "volatile. What is stable is written while training goes on; the next step copies what is left of it"
    )
    if why:
        lines.append(f"not all of the optimizer's state is stable: {why}")
    return "\n".join(lines)


def _sum(by_key: Mapping[str, Mapping[Kind, int]]) -> dict[Kind, int]:
    return {kind: sum(row.get(kind, 0) for row in by_key.values()) for _, kind in _KINDS}


def _top_key(name: str) -> str:
    """Return the first part of a tensor's name: "model" of "model.layer.weight", of "model[0]"."""
    ends = [at for at in (name.find("."), name.find("[")) if at > 0]
    return name[: min(ends)] if ends else name


def _copy_bytes_per_s() -> float:
    """Measure how fast this machine copies memory, in a few milliseconds."""
    source = torch.ones(8 << 20, dtype=torch.uint8)
    target = torch.empty_like(source)
    target.copy_(source)
    started_s = time.perf_counter()
    target.copy_(source)
    return float(source.nbytes) / max(time.perf_counter() - started_s, 1e-9)


def warn_caller(message: str) -> None:
    """Warn with the line outside this package that called us, however deep we are."""
    # torch.compile, once it was used, stands between a public function and who calls it (see `untraced`).
    ours = tuple(os.path.dirname(path) + os.sep for path in (__file__, os.path.join(torch.__path__[0], "_dynamo", "")))
    frame, level = sys._getframe(), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(ours):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, RuntimeWarning, stacklevel=level)


def warn_of_globals(state: object) -> None:
    """Warn if torch.load(weights_only=True), the default, would refuse this state; say which key, and what to do."""
    keys = dict.fromkeys(_refused(state), "the state")
    if keys and isinstance(state, Mapping):
        for key, value in state.items():
            for name in _refused(value):
                if keys.get(name) == "the state":
                    keys[name] = f"key {key!r}"
    for name, place in keys.items():
        module = name.rpartition(".")[0]
        warn_caller(
            f"{place} needs {name}, which torch.load and Checkpointer.load refuse with weights_only=True. Save plain "
            f"values instead, or before loading: import {module}; torch.serialization.add_safe_globals([{name}])"
        )


def _refused(obj: object) -> list[str]:
    """Return the globals in the pickle of an object that weights_only=True refuses."""
    try:
        return not_allowed_globals(scan_pickle(pickle_skeleton(obj).pickle).globals)
    except FastPersistError as error:  # a pickle beyond what our scanner follows; torch.load may still read it
        _log.debug("its globals are not known: %s", error)
        return []
